//! The table of commands: every word that may follow `gateway`, what it takes, and what it runs.
//!
//! `gateway --worker …` without a word is `gateway serve`, as in other routers.

use std::ffi::OsString;
use std::process::ExitCode;

use clap::error::ErrorKind;
use clap::{CommandFactory, Parser, Subcommand};

use super::chat::ChatArgs;
use super::doctor::DoctorArgs;
use super::records::{ParseArgs, RenderArgs};
use super::serve;
use super::workers::WorkersArgs;
use crate::config::ServeArgs;
use crate::config::args::{ServeFlags, ServeWords, split};

const AFTER_HELP: &str = "\
Flags not listed here go to the worker unchanged, under the names of SGLang's launch command: --device, --load-format, \
--kv-cache-dtype, --max-total-tokens, --mem-fraction-static, --max-running-requests, --chunked-prefill-size, \
--context-length, --runner and others; `python -m baleen_worker --help` lists them.

Examples:
  gateway serve                                  the small built-in model, on this machine
  gateway serve /models/DeepSeek-V3.2 --port 8000
  gateway --worker 10.0.0.1:30001 --worker 10.0.0.2:30001
  gateway --prefill http://10.0.0.1:30001 --decode http://10.0.0.2:30001
  gateway chat                                   talk to the server on this machine
  gateway workers list                           the workers of the gateway on this machine
  gateway doctor                                 what this machine can run, and what is missing";

/// OpenAI-compatible server for DeepSeek-V3.2.
#[derive(Debug, Parser)]
#[command(name = "gateway", version, propagate_version = true)]
#[command(args_conflicts_with_subcommands = true, arg_required_else_help = true, disable_help_subcommand = true)]
#[command(after_help = AFTER_HELP)]
struct Cli {
    #[command(subcommand)]
    word: Option<Word>,
    #[command(flatten)]
    flags: ServeFlags,
}

#[derive(Debug, Subcommand)]
enum Word {
    /// Start a worker for MODEL_DIR here, or front running ones, and serve
    #[command(after_help = AFTER_HELP)]
    Serve(Box<ServeWords>),
    /// Talk to a model in the terminal
    Chat(ChatArgs),
    /// Print the prompt that each line's recorded messages become, and its token ids
    Render(RenderArgs),
    /// Print the message that each line's recorded output stands for
    Parse(ParseArgs),
    /// See and change which workers a running gateway has
    #[command(arg_required_else_help = true)]
    Workers(WorkersArgs),
    /// Say what this machine can run, what is missing, and how to add it
    Doctor(DoctorArgs),
}

/// A command line that was understood.
#[derive(Debug)]
pub enum Command {
    Serve(Box<ServeArgs>),
    Chat(ChatArgs),
    Render(RenderArgs),
    Parse(ParseArgs),
    Workers(WorkersArgs),
    Doctor(DoctorArgs),
}

impl Command {
    /// Reads a command line, program name first.
    ///
    /// # Errors
    /// What clap prints: a wrong use, or the text of `--help` and `--version`.
    pub fn read(command_line: Vec<OsString>) -> Result<Self, clap::Error> {
        // Only what is served has flags that are not the gateway's own.
        let is_complete = command_line.get(1).is_some_and(|word| {
            word != "serve" && Cli::command().get_subcommands().any(|command| *word == *command.get_name())
        });
        let (own, worker_flags) = if is_complete { (command_line, Vec::new()) } else { split(command_line) };
        let cli = Cli::try_parse_from(own)?;
        let words = match cli.word {
            None => ServeWords { model_dir: None, flags: cli.flags },
            Some(Word::Serve(words)) => *words,
            Some(_) if !worker_flags.is_empty() => {
                let message = "a flag of `gateway serve` stands before another command: leave one of them out";
                return Err(Cli::command().error(ErrorKind::ArgumentConflict, message));
            }
            Some(Word::Chat(args)) => return Ok(Self::Chat(args)),
            Some(Word::Render(args)) => return Ok(Self::Render(args)),
            Some(Word::Parse(args)) => return Ok(Self::Parse(args)),
            Some(Word::Workers(args)) => return Ok(Self::Workers(args)),
            Some(Word::Doctor(args)) => return Ok(Self::Doctor(args)),
        };
        let args = ServeArgs::new(words, worker_flags);
        let args = args.map_err(|message| Cli::command().error(ErrorKind::ArgumentConflict, message))?;
        Ok(Self::Serve(Box::new(args)))
    }

    /// Runs it to its end.
    ///
    /// # Errors
    /// One sentence for the operator.
    pub fn run(self) -> anyhow::Result<ExitCode> {
        match self {
            Self::Serve(args) => serve(*args),
            Self::Chat(args) => args.run(serve_args),
            Self::Render(args) => args.run().map(|()| ExitCode::SUCCESS),
            Self::Parse(args) => args.run().map(|()| ExitCode::SUCCESS),
            Self::Workers(args) => args.run().map(|()| ExitCode::SUCCESS),
            Self::Doctor(args) => args.run(),
        }
    }
}

/// Reads the command line of `gateway serve`, program name first.
///
/// # Errors
/// What clap prints; the line is for another command.
pub fn serve_args(command_line: Vec<OsString>) -> Result<ServeArgs, clap::Error> {
    match Command::read(command_line)? {
        Command::Serve(args) => Ok(*args),
        _ => Err(Cli::command().error(ErrorKind::InvalidSubcommand, "this is not a command line of `gateway serve`")),
    }
}

fn serve(args: ServeArgs) -> anyhow::Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let ended = runtime.block_on(serve::run(args));
    // Blocking work that is still running, such as the loading of a tokenizer, must not delay the end.
    runtime.shutdown_background();
    match ended {
        Ok(()) => Ok(ExitCode::SUCCESS),
        Err(error) if error.is_already_told() => Ok(ExitCode::FAILURE),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "tests")]

    use super::{Cli, Command};

    fn read(words: &str) -> Result<Command, clap::Error> {
        Command::read(words.split_whitespace().map(Into::into).collect())
    }

    #[test]
    fn the_table_is_sound() {
        <Cli as clap::CommandFactory>::command().debug_assert();
    }

    #[test]
    fn each_word_is_read_as_its_command() {
        assert!(matches!(read("gateway serve --runner fake"), Ok(Command::Serve(_))));
        assert!(matches!(read("gateway --prefill a:1 8998 --decode b:2 --tp 1"), Ok(Command::Serve(_))));
        assert!(matches!(read("gateway chat --think -- --runner fake"), Ok(Command::Chat(_))));
        assert!(matches!(read("gateway render --tokenizer t.json f"), Ok(Command::Render(_))));
        assert!(matches!(read("gateway parse --chunk char"), Ok(Command::Parse(_))));
        assert!(matches!(read("gateway workers list --url http://a:1"), Ok(Command::Workers(_))));
        assert!(matches!(read("gateway doctor --python py --device cpu --no-check"), Ok(Command::Doctor(_))));
    }

    #[test]
    fn what_a_command_does_not_take_is_refused() {
        for (words, expected) in [
            ("gateway chat --runner fake", "unexpected argument '--runner'"),
            ("gateway workers list --port 1", "unexpected argument '--port'"),
            ("gateway --port 1 chat", "cannot be used with"),
            ("gateway --enable-metrics chat", "before another command"),
            ("gateway chatt", "unrecognized subcommand 'chatt'"),
        ] {
            let refusal = read(words).unwrap_err();
            assert!(refusal.use_stderr() && refusal.to_string().contains(expected), "{words}: {refusal}");
        }
    }
}
