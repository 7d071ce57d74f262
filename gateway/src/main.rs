//! The `gateway` command: reads the command line, runs it, and says in one line why it failed.

use std::io::Write;
use std::process::ExitCode;

use baleen_gateway::cli::chat::ChatCli;
use baleen_gateway::cli::records::RecordsCli;
use baleen_gateway::cli::serve;
use baleen_gateway::cli::workers::WorkersCli;
use baleen_gateway::config::ServeArgs;
use clap::Parser;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    let command_line: Vec<_> = std::env::args_os().collect();
    if RecordsCli::is_meant(&command_line) {
        return work_on_records(command_line);
    }
    if ChatCli::is_meant(&command_line) {
        return chat(command_line);
    }
    if WorkersCli::is_meant(&command_line) {
        return manage_workers(command_line);
    }
    let args = match ServeArgs::parse(command_line) {
        Ok(args) => args,
        Err(error) => {
            let _ = error.print();
            return ExitCode::from(if error.use_stderr() { 2 } else { 0 });
        }
    };
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return fail(&format!("cannot start the runtime: {error}")),
    };
    let ended = runtime.block_on(serve::run(args));
    // Blocking work that is still running, such as the loading of a tokenizer, must not delay the end.
    runtime.shutdown_background();
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if error.is_already_told() => ExitCode::FAILURE,
        Err(error) => fail(&error.to_string()),
    }
}

fn work_on_records(command_line: Vec<std::ffi::OsString>) -> ExitCode {
    match RecordsCli::try_parse_from(command_line) {
        Ok(cli) => cli.run().map_or_else(|error| fail(&error.to_string()), |()| ExitCode::SUCCESS),
        Err(error) => {
            let _ = error.print();
            ExitCode::from(if error.use_stderr() { 2 } else { 0 })
        }
    }
}

fn chat(command_line: Vec<std::ffi::OsString>) -> ExitCode {
    match ChatCli::parse_line(command_line) {
        Ok(cli) => cli.run().unwrap_or_else(|error| fail(&format!("{error:#}"))),
        Err(error) => {
            let _ = error.print();
            ExitCode::from(if error.use_stderr() { 2 } else { 0 })
        }
    }
}

fn manage_workers(command_line: Vec<std::ffi::OsString>) -> ExitCode {
    match WorkersCli::parse_line(command_line) {
        Ok(cli) => cli.run().map_or_else(|error| fail(&format!("{error:#}")), |()| ExitCode::SUCCESS),
        Err(error) => {
            let _ = error.print();
            ExitCode::from(if error.use_stderr() { 2 } else { 0 })
        }
    }
}

fn fail(message: &str) -> ExitCode {
    let _ = writeln!(std::io::stderr(), "error: {message}");
    ExitCode::FAILURE
}
