//! Generates the gRPC types of `proto/baleen/worker/v1/worker.proto` in pure Rust, without a system `protoc`.

use std::path::Path;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let root = Path::new("../proto");
    let file = root.join("baleen/worker/v1/worker.proto");
    println!("cargo:rerun-if-changed={}", file.display());
    let descriptors = protox::compile([&file], [root])?;
    // The service has a method named Connect, which the generated convenience constructor would shadow.
    tonic_prost_build::configure()
        .build_transport(false)
        .codec_path("crate::worker::codec::ContractCodec")
        .compile_fds(descriptors)?;
    Ok(())
}
