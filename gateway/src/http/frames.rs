//! Server-sent events as bytes.

/// What OpenAI's older streams end with.
pub const DONE: &[u8] = b"data: [DONE]\n\n";

/// Writes one event that has a name; `write` gives one line of JSON.
pub fn write_named_event(out: &mut Vec<u8>, name: &str, write: impl FnOnce(&mut Vec<u8>) -> serde_json::Result<()>) {
    let start = out.len();
    out.extend_from_slice(b"event: ");
    out.extend_from_slice(name.as_bytes());
    out.push(b'\n');
    let body = out.len();
    write_event(out, write);
    if out.len() == body {
        out.truncate(start);
    }
}

/// Writes one `data:` event; `write` gives one line of JSON.
pub fn write_event(out: &mut Vec<u8>, write: impl FnOnce(&mut Vec<u8>) -> serde_json::Result<()>) {
    let start = out.len();
    out.extend_from_slice(b"data: ");
    // Memory grows as needed, so only a value that cannot be serialised fails; its event is left out.
    match write(out) {
        Ok(()) => out.extend_from_slice(b"\n\n"),
        Err(_) => out.truncate(start),
    }
}
