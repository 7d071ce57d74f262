//! `gateway workers`: an operator's verbs for the workers of a gateway that runs.

use std::fmt::Write as _;
use std::io::Write as _;

use clap::{Args, Subcommand, ValueEnum};
use serde_json::{Value, json};

use super::chat::client::Client;

/// What `gateway workers` takes.
#[derive(Debug, Args)]
pub struct WorkersArgs {
    #[command(subcommand)]
    verb: Verb,
    #[command(flatten)]
    server: Server,
}

#[derive(Debug, Args)]
struct Server {
    /// The gateway
    #[arg(long, global = true, default_value = "http://127.0.0.1:8000", value_name = "URL")]
    url: String,
    /// An operator's key
    #[arg(long, global = true, env = "BALEEN_API_KEY", hide_env_values = true, value_name = "KEY")]
    api_key: Option<String>,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// List workers with their states
    List,
    /// Connect one more
    Add {
        /// [grpc://]host:port
        worker: String,
        /// What it does of a request
        #[arg(long, value_enum, default_value = "unified")]
        role: RoleName,
    },
    /// Send it no new requests; those in progress end
    Drain {
        /// As `list` names it
        worker: String,
    },
    /// Give it up; requests in progress go on elsewhere
    Remove {
        /// As `list` names it
        worker: String,
    },
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum RoleName {
    Unified,
    Prefill,
    Decode,
}

impl RoleName {
    fn name(self) -> &'static str {
        match self {
            Self::Unified => "unified",
            Self::Prefill => "prefill",
            Self::Decode => "decode",
        }
    }
}

impl WorkersArgs {
    /// Does what was asked, and says what has become of it.
    ///
    /// # Errors
    /// The gateway cannot be reached, or refuses.
    pub fn run(self) -> anyhow::Result<()> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let client = Client::new(&self.server.url, self.server.api_key.as_deref())?;
        let (path, body, done) = match &self.verb {
            Verb::List => ("/workers", None, String::new()),
            Verb::Add { worker, role } => {
                ("/workers", Some(json!({"url": worker, "role": role.name()})), format!("{worker} is being connected"))
            }
            Verb::Drain { worker } => {
                ("/workers/drain", Some(json!({"url": worker})), format!("{worker} gets no new requests"))
            }
            Verb::Remove { worker } => {
                ("/workers/remove", Some(json!({"url": worker})), format!("{worker} is given up"))
            }
        };
        let reply = runtime.block_on(client.json(path, body.as_ref()))?;
        let text = if body.is_none() { table(&reply) } else { done + "\n" };
        std::io::stdout().write_all(text.as_bytes())?;
        Ok(())
    }
}

/// One worker a line: name, role, state, requests, and what keeps it.
fn table(reply: &Value) -> String {
    let word = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let mut text = String::new();
    for worker in reply["workers"].as_array().into_iter().flatten() {
        let (name, role, state) = (word(&worker["name"]), word(&worker["role"]), word(&worker["state"]));
        let requests = worker["load"]["requests_of_this_gateway"].as_u64();
        let requests = requests.map(|count| format!("{count} requests")).unwrap_or_default();
        let line = format!("{name:<28} {role:<8} {state:<10} {requests:<14} {}", word(&worker["reason"]));
        let _ = writeln!(text, "{}", line.trim_end());
    }
    for sentence in reply["unpaired"].as_array().into_iter().flatten() {
        let _ = writeln!(text, "{}", word(sentence));
    }
    text
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::table;

    #[test]
    fn each_worker_is_a_line() {
        let load = json!({"requests_of_this_gateway": 3});
        let reply = json!({
            "workers": [
                {"name": "a:1", "role": "prefill", "state": "ready", "reason": null, "load": load},
                {"name": "b:2", "role": "decode", "state": "refused", "reason": "it is another model", "load": null},
            ],
            "unpaired": ["a:1 pairs with no decode worker"],
        });
        let text = table(&reply);
        let lines: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(lines[0], ["a:1", "prefill", "ready", "3", "requests"]);
        assert_eq!(lines[1], ["b:2", "decode", "refused", "it", "is", "another", "model"]);
        assert_eq!(text.lines().last(), Some("a:1 pairs with no decode worker"));
    }
}
