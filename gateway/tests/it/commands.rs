//! What the command prints about itself: the real binary, started by its path.

use std::process::{Command, Output};

const NAMES: [&str; 6] = ["serve", "chat", "render", "parse", "workers", "doctor"];

fn gateway(words: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_gateway")).args(words).env_remove("BALEEN_API_KEY").output().unwrap()
}

fn printed(words: &[&str]) -> String {
    let output = gateway(words);
    assert!(output.status.success() && output.stderr.is_empty(), "{words:?}: {output:?}");
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn help_lists_every_command_with_a_line() {
    let help = printed(&["--help"]);
    let table = help.split("Commands:\n").nth(1).and_then(|rest| rest.split("\n\n").next()).unwrap();
    let rows: Vec<(&str, &str)> = table.lines().map(|line| line.trim().split_once(' ').unwrap()).collect();
    assert_eq!(rows.iter().map(|row| row.0).collect::<Vec<_>>(), NAMES);
    for (name, says) in rows {
        assert!(says.trim().len() > 10, "{name}: {says}");
    }
}

#[test]
fn each_commands_help_names_it_in_full() {
    for name in NAMES {
        let help = printed(&[name, "--help"]);
        assert!(help.contains(&format!("Usage: gateway {name} ")), "{help}");
        assert!(printed(&[name, "--version"]).starts_with(&format!("gateway-{name} ")));
    }
    let drain = printed(&["workers", "drain", "--help"]);
    assert!(drain.contains("Usage: gateway workers drain [OPTIONS] <WORKER>"), "{drain}");
}

#[test]
fn a_wrong_use_is_said_on_standard_error_with_status_2() {
    for words in [&["workers", "list", "--no-such"][..], &["chatt"], &["--port", "1", "chat"], &["parse", "--chunk"]] {
        let output = gateway(words);
        assert_eq!((output.status.code(), output.stdout.len()), (Some(2), 0), "{words:?}");
        assert!(output.stderr.starts_with(b"error: "), "{words:?}");
    }
}

#[test]
fn flags_without_a_command_serve() {
    let output = gateway(&["--prefill", "http://127.0.0.1:1", "8998"]);
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(said.starts_with("error: ") && said.contains("--decode"), "{said}");
}

#[test]
fn why_it_does_not_start_is_said_once() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let cases = [
        (&["serve", "/nonexistent"][..], "/nonexistent is not a model directory"),
        (&["--host", "192.0.2.1"], "--host 192.0.2.1 would let everybody"),
        (&["--port", &port], "cannot listen on 127.0.0.1:"),
    ];
    for (words, sentence) in cases {
        let pair = ["--prefill", "http://127.0.0.1:1", "--decode", "http://127.0.0.1:2"];
        let words = if words[0] == "serve" { words.to_vec() } else { [&pair, words].concat() };
        let output = gateway(&words);
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{words:?}: {said}");
        assert!(said.starts_with(&format!("error: {sentence}")), "{said}");
        assert_eq!(said.matches(sentence).count(), 1, "{said}");
        assert!(said.matches("os error").count() < 2, "{said}");
    }
}
