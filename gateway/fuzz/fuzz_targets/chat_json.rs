#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| baleen_gateway_fuzz::chat_json::run(data));
