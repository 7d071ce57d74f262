//! What measurements of gateways need around them: a worker that speaks Baleen's contract, a server that speaks
//! OpenAI's API, both with the same tokens at the same pace, and a client that puts load on what stands in front.
//!
//! Servers bind a free port of the loopback interface, print `{"port": N}` and run until they are told to end. The
//! client prints one JSON object. Each runs on one thread, so that little is taken from what is measured.

use std::io::Write;

use anyhow::Context;
use clap::{Parser, Subcommand};
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};

mod engine;
mod load;
mod openai;
mod vocabulary;
mod worker;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

#[derive(Debug, Parser)]
#[command(about, disable_help_subcommand = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// A worker behind Baleen's gateway
    Worker(engine::EngineArgs),
    /// A server behind a router that forwards HTTP
    Openai(engine::EngineArgs),
    /// Requests to a gateway or router
    Load(load::LoadArgs),
}

fn main() -> anyhow::Result<()> {
    let cli = Cli::parse();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        match cli.command {
            Command::Worker(args) => until_told(worker::serve(listen().await?, &args)?).await,
            Command::Openai(args) => until_told(openai::serve(listen().await?, &args)?).await,
            Command::Load(args) => print(&load::run(&args).await?),
        }
    })
}

async fn listen() -> anyhow::Result<TcpListener> {
    let listener = TcpListener::bind("127.0.0.1:0").await.context("cannot listen on the loopback interface")?;
    print(&serde_json::json!({"port": listener.local_addr()?.port()}))?;
    Ok(listener)
}

async fn until_told(serving: impl Future<Output = anyhow::Result<()>>) -> anyhow::Result<()> {
    let mut terminate = signal(SignalKind::terminate())?;
    tokio::select! {
        ended = serving => ended,
        _ = terminate.recv() => Ok(()),
    }
}

fn print(object: &serde_json::Value) -> anyhow::Result<()> {
    let mut stdout = std::io::stdout();
    writeln!(stdout, "{object}")?;
    Ok(stdout.flush()?)
}
