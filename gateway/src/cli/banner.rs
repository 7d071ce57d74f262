//! What people see on the terminal: progress while the model loads, then the banner with everything needed to use it.

use std::fmt::Write as _;
use std::io::{IsTerminal, Write};
use std::net::SocketAddr;
use std::time::Instant;

use tokio::sync::watch;

use crate::app::Model;
use crate::supervisor::{Phase, ReadyReport};
use crate::worker::Role;

/// Facts of the banner that come from the start itself.
#[derive(Clone, Debug)]
pub struct Start {
    pub address: SocketAddr,
    pub started: Instant,
    /// Of a worker that this gateway started.
    pub report: Option<ReadyReport>,
    pub roles: Vec<Role>,
    /// Why workers of a pair find no partner, a sentence each.
    pub unpaired: Vec<String>,
    pub needs_key: bool,
}

/// Prints the banner to standard output, in colour on a terminal.
pub fn print(start: &Start, model: &Model) {
    let text = render(start, model, std::io::stdout().is_terminal());
    // A closed standard output is no reason to stop serving.
    let _ = std::io::stdout().write_all(text.as_bytes());
}

fn render(start: &Start, model: &Model, colour: bool) -> String {
    let url = base_url(start.address);
    let (bold, dim, end) = if colour { ("\x1b[1m", "\x1b[2m", "\x1b[0m") } else { ("", "", "") };
    let mut text = String::new();
    let mut line = |name: &str, value: String| {
        let _ = writeln!(text, "  {dim}{name:<8}{end} {value}");
    };
    line("model", format!("{bold}{}{end}  {}", model.name, model.info.model_type));
    line("worker", worker_line(start, model));
    line("memory", memory_line(start.report.as_ref(), model));
    start.unpaired.iter().for_each(|sentence| line("unused", sentence.clone()));
    let ready = format!("ready in {:.1} s", start.started.elapsed().as_secs_f64());
    let version = env!("CARGO_PKG_VERSION");
    let key = if start.needs_key { " \\\n    -H \"Authorization: Bearer $BALEEN_API_KEY\"" } else { "" };
    let name = model.name.replace('\'', "'\\''").replace('"', "\\\"");
    format!(
        "\n  {bold}Baleen {version}{end}  {bold}{url}{end}  {dim}{ready}{end}\n\n{text}\n\
         \x20 curl -N {url}/v1/chat/completions -H 'Content-Type: application/json'{key} \\\n\
         \x20   -d '{{\"model\":\"{name}\",\"messages\":[{{\"role\":\"user\",\"content\":\"Hello!\"}}],\
         \"max_tokens\":64,\"stream\":true}}'\n\n"
    )
}

fn worker_line(start: &Start, model: &Model) -> String {
    let what = format!("{}, {}", model.info.device, model.info.dtype);
    let count = |role| start.roles.iter().filter(|&&other| other == role).count();
    match (start.roles.len(), &start.report) {
        (_, Some(report)) => format!("{what}  (loaded in {:.1} s)", report.load_seconds),
        (1, None) => what,
        (_, None) if count(Role::Prefill) > 0 => {
            format!("{} prefill and {} decode, the first on {what}", count(Role::Prefill), count(Role::Decode))
        }
        (count, None) => format!("{count} workers, the first on {what}"),
    }
}

fn memory_line(report: Option<&ReadyReport>, model: &Model) -> String {
    let tokens = format!(
        "{} tokens of KV cache, context {}",
        grouped(model.info.capacity_tokens()),
        grouped(model.info.context_length_tokens.into())
    );
    match report {
        Some(report) => {
            let (weights, kv) = (bytes(report.weights_bytes), bytes(report.kv_bytes));
            format!("weights {weights}, KV {kv}: {tokens}")
        }
        None => tokens,
    }
}

/// `http://` and where to reach the server from this machine.
#[must_use]
pub fn base_url(address: SocketAddr) -> String {
    let ip = match address.ip() {
        ip if !ip.is_unspecified() => ip,
        std::net::IpAddr::V4(_) => std::net::Ipv4Addr::LOCALHOST.into(),
        std::net::IpAddr::V6(_) => std::net::Ipv6Addr::LOCALHOST.into(),
    };
    format!("http://{}", SocketAddr::new(ip, address.port()))
}

/// Shows the loading of weights on one line of a terminal, until the worker is ready or gone.
pub async fn show_progress(mut phases: watch::Receiver<Phase>) {
    let mut stderr = std::io::stderr();
    if !stderr.is_terminal() {
        return;
    }
    let mut started = None;
    loop {
        match *phases.borrow_and_update() {
            Phase::Loading { done_bytes, total_bytes } => {
                let started = *started.get_or_insert_with(Instant::now);
                let _ = write!(stderr, "\r\x1b[2K  {}", progress_line(done_bytes, total_bytes, started));
                let _ = stderr.flush();
            }
            Phase::Starting => {}
            Phase::Ready(_) | Phase::Restarting => break,
        }
        if phases.changed().await.is_err() {
            break;
        }
    }
    if started.is_some() {
        let _ = write!(stderr, "\r\x1b[2K");
        let _ = stderr.flush();
    }
}

fn progress_line(done: u64, total: u64, started: Instant) -> String {
    const WIDTH: u64 = 24;
    let filled = (done.min(total) * WIDTH).checked_div(total).unwrap_or(0);
    let bar: String = (0..WIDTH).map(|place| if place < filled { '█' } else { '░' }).collect();
    let rate = (done as f64 / started.elapsed().as_secs_f64().max(0.001)) as u64;
    format!("loading weights {bar} {} of {}, {}/s", bytes(done), bytes(total), bytes(rate))
}

/// A size for people: three significant digits in binary units.
fn bytes(count: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = count as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    let decimals = if unit == 0 || value >= 100.0 { 0 } else { 1 };
    format!("{value:.decimals$} {}", UNITS[unit])
}

/// A count for people, in groups of three digits.
fn grouped(count: u64) -> String {
    let digits = count.to_string();
    let mut text = String::new();
    for (place, digit) in digits.chars().enumerate() {
        if place > 0 && (digits.len() - place).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_counts_read_well() {
        let sizes = [0, 1023, 1536, 700 * 1024 * 1024, u64::MAX].map(bytes);
        assert_eq!(sizes, ["0 B", "1023 B", "1.5 KiB", "700 MiB", "16777216 TiB"]);
        assert_eq!([0, 999, 1000, 1_234_567].map(grouped), ["0", "999", "1,000", "1,234,567"]);
    }

    #[test]
    fn the_url_is_one_that_this_machine_can_open() {
        let urls = ["0.0.0.0:80", "[::]:81", "127.0.0.1:82", "10.1.2.3:83"]
            .map(|address| address.parse().map(base_url).unwrap_or_default());
        assert_eq!(urls, ["http://127.0.0.1:80", "http://[::1]:81", "http://127.0.0.1:82", "http://10.1.2.3:83"]);
    }

    #[test]
    fn progress_is_a_bar_with_bytes_and_rate() {
        let line = progress_line(512, 1024, Instant::now());
        assert!(line.starts_with("loading weights ████████████░░░░░░░░░░░░ 512 B of 1.0 KiB, "), "{line}");
        assert!(progress_line(0, 0, Instant::now()).contains("0 B of 0 B"));
    }
}
