//! `gateway chat`: a conversation in the terminal, with a server that runs or with one started for it.
//!
//! On a terminal it edits lines, keeps their history, shows reasoning dim, and Ctrl-C stops an answer. From a pipe each
//! line is one turn, and nothing but answers and calls goes to standard output.

use std::ffi::OsString;
use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, bail};
use clap::Args;
use serde_json::Value;
use tokio::net::TcpListener;
use tokio::runtime::Runtime;

use super::serve::Server;
use crate::app::App;
use crate::cli::{banner, probe};
use crate::config::locate::Surroundings;
use crate::config::{Config, ServeArgs, Source};
use crate::telemetry;

pub(super) mod client;
mod command;
mod conversation;
mod input;
mod screen;
mod turn;

use client::Client;
use command::Command;
use conversation::{Conversation, Settings};
use input::{Input, Line};
use screen::Screen;

/// Reads the command line of `gateway serve`, program name first.
pub type ReadServe = fn(Vec<OsString>) -> Result<ServeArgs, clap::Error>;

const DEFAULT_URL: &str = "http://127.0.0.1:8000";

/// What `gateway chat` takes.
#[derive(Debug, Args)]
pub struct ChatArgs {
    /// Server to talk to, or a model folder to start one for [default: http://127.0.0.1:8000]
    #[arg(value_name = "URL|MODEL_DIR")]
    target: Option<String>,
    /// Name of the model [default: the first that the server lists]
    #[arg(long, value_name = "NAME")]
    model: Option<String>,
    /// Key of the server
    #[arg(long, env = "BALEEN_API_KEY", hide_env_values = true, value_name = "KEY")]
    api_key: Option<String>,
    /// What the model is told before the conversation
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
    /// Let the model reason before it answers
    #[arg(long)]
    think: bool,
    /// Longest answer
    #[arg(long, value_name = "N")]
    max_tokens: Option<u32>,
    #[arg(long, value_name = "T")]
    temperature: Option<f64>,
    /// File with a JSON list of tools, as in a request; you are asked for what a called tool returns
    #[arg(long, value_name = "FILE")]
    tools: Option<PathBuf>,
    /// Flags of `gateway serve` for a server started here
    #[arg(last = true, value_name = "FLAGS")]
    serve_flags: Vec<OsString>,
}

/// How a conversation went on a pipe, where there is nobody to try again.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Health {
    Good,
    Failed,
}

impl ChatArgs {
    /// Talks until the input ends; `read` understands the flags of a server that is started for it.
    ///
    /// # Errors
    /// No server can be reached or started, or a file is not what it should be.
    pub fn run(self, read: ReadServe) -> anyhow::Result<ExitCode> {
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
        let settings = self.settings()?;
        let (server, url) = match self.target.as_deref() {
            Some(path) if !path.contains("://") => {
                let (server, url) = runtime.block_on(start_server(Path::new(path), &self.serve_flags, read))?;
                (Some(server), url)
            }
            target => {
                if let Some(flag) = self.serve_flags.first() {
                    let flag = flag.to_string_lossy();
                    bail!("{flag} is for a server started here: give a model folder, or leave it out");
                }
                (None, target.unwrap_or(DEFAULT_URL).to_owned())
            }
        };
        let ended = Client::new(&url, self.api_key.as_deref()).and_then(|client| {
            let model = runtime.block_on(client.model(self.model.as_deref()))?;
            let conversation = Conversation::new(model, settings);
            converse(&runtime, &client, conversation)
        });
        if let Some(server) = server {
            runtime.block_on(server.stop());
        }
        runtime.shutdown_background();
        Ok(if ended? == Health::Good { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    }

    fn settings(&self) -> anyhow::Result<Settings> {
        let tools = self.tools.as_deref().map(read_tools).transpose()?;
        Ok(Settings {
            system: self.system.clone(),
            thinks: self.think,
            max_tokens: self.max_tokens,
            temperature: self.temperature,
            tools,
        })
    }
}

fn read_tools(path: &Path) -> anyhow::Result<Value> {
    let json = std::fs::read(path).with_context(|| format!("--tools {}", path.display()))?;
    let tools: Value = serde_json::from_slice(&json).with_context(|| format!("--tools {}", path.display()))?;
    if !tools.is_array() {
        bail!("--tools {}: it should hold a list, [{{\"type\": \"function\", \"function\": …}}]", path.display());
    }
    Ok(tools)
}

/// A server for `model_dir` on a free port of this machine, once it is ready.
async fn start_server(model_dir: &Path, flags: &[OsString], read: ReadServe) -> anyhow::Result<(Server, String)> {
    let words = ["gateway", "serve"].map(OsString::from).into_iter().chain([model_dir.as_os_str().to_owned()]);
    // Logs would come between the lines of the conversation.
    let quiet = ["--port", "0", "--log-level", "error"].map(OsString::from);
    let args = read(words.chain(quiet).chain(flags.iter().cloned()).collect())?;
    telemetry::init_logging(args.flags.log_level, args.flags.log_format);
    let mut config = Config::new(args, &Surroundings::of_this_process()).await?;
    if let Source::Local(worker) = &mut config.source {
        // Ctrl-C is for the answer that is being written, not for the worker.
        worker.command.own_process_group = true;
        probe::check(worker).await.map_err(anyhow::Error::msg)?;
    }
    let listener = TcpListener::bind(config.listen).await?;
    let url = banner::base_url(listener.local_addr()?);
    let mut server = Server::start(App::new(config), listener);
    match server.until_ready().await {
        Ok(()) => Ok((server, url)),
        Err(error) => {
            server.stop().await;
            Err(error.into())
        }
    }
}

/// Takes lines until there are no more.
fn converse(runtime: &Runtime, client: &Client, mut conversation: Conversation) -> anyhow::Result<Health> {
    let mut input = Input::new()?;
    let mut screen = Screen::new(input.is_interactive(), std::io::stdout().is_terminal());
    if input.is_interactive() {
        screen.note(&format!(
            "{} at {}: /help lists commands, Ctrl-C stops an answer, Ctrl-D leaves",
            conversation.model(),
            client.url()
        ));
    }
    let mut health = Health::Good;
    loop {
        let line = match input.read("> ")? {
            Line::Text(line) => line,
            Line::Interrupted => {
                screen.note("Ctrl-D leaves");
                continue;
            }
            Line::End => break,
        };
        match Command::parse(&line) {
            None if line.trim().is_empty() => {}
            None => {
                conversation.say(&line);
                if turn::answer(runtime, client, &mut conversation, &mut input, &mut screen)? == Health::Failed {
                    health = Health::Failed;
                }
            }
            Some(Command::Quit) => break,
            Some(command) => screen.note(&command.obey(&mut conversation)),
        }
    }
    input.save();
    std::io::stdout().flush()?;
    Ok(if input.is_interactive() { Health::Good } else { health })
}
