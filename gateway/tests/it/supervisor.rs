//! The life of a supervised worker, with small shell scripts in its place.

use std::sync::Arc;
use std::time::Duration;

use baleen_gateway::supervisor::{Intent, Phase, StartError, Supervisor, WorkerCommand};
use baleen_gateway::worker::Role;
use baleen_gateway::worker::pool::{Pool, WorkerSlot, WorkerSpec};
use tokio::sync::watch;

use crate::gateway::PATIENCE;

const READY: &str = r#"echo '{"event":"listening","address":"127.0.0.1:1"}'
echo '{"event":"loading","done_bytes":1,"total_bytes":4}'
echo '{"event":"ready","device":"cpu","dtype":"float32","capacity_pages":2,"page_size_tokens":64,"context_length_tokens":3,"weights_bytes":4,"kv_bytes":5,"load_seconds":0.25}'
"#;

fn local() -> WorkerSpec {
    WorkerSpec { name: "local".into(), address: None, role: Role::Unified, transfer_port: None }
}

fn supervisor(script: &str) -> (Supervisor, watch::Sender<Intent>, Arc<WorkerSlot>) {
    let pool = Pool::new([local()], None);
    let slot = pool.slots()[0].clone();
    let (stop, stopped) = watch::channel(Intent::Keep);
    let command = WorkerCommand {
        program: "/bin/sh".into(),
        args: vec!["-c".into(), script.into()],
        envs: vec![("WORKER_TEST".into(), "1".into())],
        own_process_group: false,
    };
    (Supervisor::new(command, slot.clone(), stopped, PATIENCE), stop, slot)
}

async fn wait_for(phases: &mut watch::Receiver<Phase>, wanted: impl Fn(&Phase) -> bool) {
    tokio::time::timeout(PATIENCE, phases.wait_for(wanted)).await.expect("the phase comes in time").unwrap();
}

#[tokio::test]
async fn a_fatal_start_is_reported_with_the_workers_sentence() {
    let script = r#"echo '{"event":"fatal","message":"config.json has no kv_lora_rank"}'; exit 3"#;
    let (supervisor, _stop, _) = supervisor(script);
    assert_eq!(supervisor.run().await, Err(StartError::Fatal("config.json has no kv_lora_rank".into())));
}

#[tokio::test]
async fn a_silent_death_before_readiness_is_reported_with_its_status() {
    let (supervisor, _stop, _) = supervisor("exit 7");
    let Err(StartError::Died(status)) = supervisor.run().await else { panic!("the start failed") };
    assert_eq!(status.code(), Some(7));
}

#[tokio::test]
async fn a_program_that_is_not_there_is_named() {
    let pool = Pool::new([local()], None);
    let (_stop, stopped) = watch::channel(Intent::Keep);
    let command =
        WorkerCommand { program: "/nowhere/python3".into(), args: vec![], envs: vec![], own_process_group: false };
    let error = Supervisor::new(command, pool.slots()[0].clone(), stopped, PATIENCE).run().await.unwrap_err();
    assert!(error.to_string().contains("/nowhere/python3"), "{error}");
}

#[tokio::test]
async fn a_worker_that_was_ready_is_started_again() {
    // Ready, then gone; anything else it prints is passed over.
    let (supervisor, stop, _) = supervisor(&format!("echo gibberish\n{READY}sleep 0.05; exit 1"));
    let mut phases = supervisor.phases();
    let running = tokio::spawn(supervisor.run());
    for _ in 0..2 {
        wait_for(&mut phases, |phase| matches!(phase, Phase::Ready(_))).await;
        wait_for(&mut phases, |phase| *phase == Phase::Restarting).await;
    }
    stop.send_replace(Intent::Stop);
    assert_eq!(tokio::time::timeout(PATIENCE, running).await.unwrap().unwrap(), Ok(()));
}

#[tokio::test]
async fn stopping_closes_the_workers_standard_input() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let path = file.path().display();
    // `cat` ends when standard input does, and only then the script goes on.
    let (supervisor, stop, _) = supervisor(&format!("{READY}cat > /dev/null; printf ended > {path}"));
    let mut phases = supervisor.phases();
    let running = tokio::spawn(supervisor.run());
    wait_for(&mut phases, |phase| matches!(phase, Phase::Ready(report) if report.load_seconds == 0.25)).await;
    assert_eq!(std::fs::read_to_string(file.path()).unwrap(), "");
    stop.send_replace(Intent::Stop);
    assert_eq!(tokio::time::timeout(PATIENCE, running).await.unwrap().unwrap(), Ok(()));
    assert_eq!(std::fs::read_to_string(file.path()).unwrap(), "ended");
}

#[tokio::test]
async fn a_worker_that_does_not_end_is_killed() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let path = file.path().display();
    let (supervisor, stop, _) = supervisor(&format!("trap '' TERM; echo $$ > {path}; {READY}exec sleep 1000"));
    let mut phases = supervisor.phases();
    let running = tokio::spawn(supervisor.run());
    wait_for(&mut phases, |phase| matches!(phase, Phase::Ready(_))).await;
    let pid: u32 = std::fs::read_to_string(file.path()).unwrap().trim().parse().unwrap();
    stop.send_replace(Intent::Stop);
    assert_eq!(tokio::time::timeout(PATIENCE, running).await.unwrap().unwrap(), Ok(()));
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert!(!std::path::Path::new(&format!("/proc/{pid}")).exists());
}
