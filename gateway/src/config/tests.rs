#![expect(clippy::unwrap_used, reason = "tests")]

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use super::locate::Surroundings;
use super::names::{Name, Question};
use super::*;
use crate::chat::dialect::Dialect;
use crate::chat::style::{StyleChoice, Thinking};
use crate::route::policy::{Policies, Policy};
use crate::worker::Role;
use crate::worker::pool::WorkerSpec;

fn parse(words: &str) -> ServeArgs {
    try_parse(words).unwrap()
}

fn try_parse(words: &str) -> Result<ServeArgs, clap::Error> {
    crate::cli::commands::serve_args(words.split_whitespace().map(OsString::from).collect())
}

fn passed(args: &ServeArgs) -> String {
    args.worker_flags.iter().map(|flag| flag.to_string_lossy()).collect::<Vec<_>>().join(" ")
}

/// A checkout with a model and an interpreter, none of which is real.
fn checkout() -> (tempfile::TempDir, Surroundings) {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    for path in ["worker/baleen_worker", "models/micro", ".venv/bin", "elsewhere", "bin"] {
        fs::create_dir_all(root.join(path)).unwrap();
    }
    for path in ["models/micro/config.json", "models/micro/tokenizer.json", ".venv/bin/python3", ".venv/bin/gateway"] {
        fs::write(root.join(path), "{}").unwrap();
    }
    let surroundings = Surroundings {
        executables: vec![root.join(".venv/bin/gateway"), PathBuf::from("/cache/target/gateway")],
        current_dir: "/".into(),
        ..Surroundings::default()
    };
    (folder, surroundings)
}

async fn configure(words: &str) -> Result<Config, ConfigError> {
    let (_folder, surroundings) = checkout();
    Config::new(parse(words), &surroundings).await
}

async fn refusal(words: &str) -> String {
    configure(words).await.unwrap_err().to_string()
}

fn command_line(config: &Config) -> Vec<String> {
    let Source::Local(worker) = &config.source else { unreachable!("a worker is started") };
    worker.command.args.iter().map(|arg| arg.to_string_lossy().into_owned()).collect()
}

#[test]
fn worker_flags_are_passed_on_wherever_they_stand() {
    let args = parse(
        "gateway serve models/m --chunked-prefill-size 64 --port 9 --disable-radix-cache --cuda-graph-bs 1 2 4 \
         --mem-fraction-static=0.8 --host 127.0.0.2 --runner fake",
    );
    assert_eq!((args.port, args.host.as_str()), (9, "127.0.0.2"));
    assert_eq!(args.model(), Some(Path::new("models/m")));
    let expected =
        "--chunked-prefill-size 64 --disable-radix-cache --cuda-graph-bs 1 2 4 --mem-fraction-static=0.8 --runner fake";
    assert_eq!(passed(&args), expected);
}

#[test]
fn a_switch_does_not_swallow_the_model_and_a_value_may_be_negative() {
    let args = parse("gateway serve --disable-cuda-graph models/m --chunked-prefill-size -1 --tp 1");
    assert_eq!(args.model(), Some(Path::new("models/m")));
    assert_eq!(passed(&args), "--disable-cuda-graph --chunked-prefill-size -1 --tp 1");
}

#[test]
fn the_word_serve_may_be_left_out_before_flags() {
    assert_eq!(parse("gateway --model-path m --port 1").model(), Some(Path::new("m")));
    assert_eq!(parse("gateway --worker a:1 --worker b:2").worker, ["a:1", "b:2"]);
    assert_eq!(passed(&parse("gateway --runner fake")), "--runner fake");
    assert!(try_parse("gateway models/m").is_err());
    assert!(try_parse("gateway").is_err());
}

#[test]
fn a_model_named_twice_and_values_out_of_range_are_refused() {
    assert!(try_parse("gateway serve a --model b").is_err());
    assert!(try_parse("gateway serve a --model a").is_ok());
    for wrong in ["--port 70000", "--max-body-bytes 0", "--max-concurrent-requests x", "--dtype float16"] {
        assert!(try_parse(&format!("gateway serve {wrong}")).is_err(), "{wrong}");
    }
}

#[test]
fn help_and_version_are_printed() {
    for (words, expected) in
        [("gateway --version", "gateway 0.1.0"), ("gateway serve --help", "--chunked-prefill-size")]
    {
        let shown = try_parse(words).unwrap_err();
        assert!(!shown.use_stderr());
        assert!(shown.to_string().contains(expected), "{shown}");
    }
}

#[tokio::test]
async fn the_workers_command_line_is_complete() {
    let config =
        configure("gateway serve --dtype bfloat16 --log-level warn --served-model-name x --max-total-tokens 64")
            .await
            .unwrap();
    let line = command_line(&config);
    assert_eq!(line[..2], ["-m", "baleen_worker"]);
    assert!(line[2].ends_with("models/micro"));
    let rest = "--host 127.0.0.1 --port 0 --supervised --dtype bfloat16 --served-model-name x --log-level warning \
                --max-total-tokens 64";
    assert_eq!(line[3..].join(" "), rest);
    let Source::Local(worker) = &config.source else { unreachable!() };
    assert!(worker.needs_torch);
    assert!(worker.command.program.ends_with(".venv/bin/python3"));
    let (_, paths) = &worker.command.envs[0];
    assert!(paths.to_string_lossy().contains("/worker:") && paths.to_string_lossy().ends_with("/kernels"));
}

#[tokio::test]
async fn the_fake_runner_needs_no_torch() {
    for words in ["gateway serve --runner fake", "gateway serve --runner=fake"] {
        let Source::Local(worker) = configure(words).await.unwrap().source else { unreachable!() };
        assert!(!worker.needs_torch);
    }
}

#[tokio::test]
async fn the_models_name_is_its_folder_unless_another_is_given() {
    let (folder, surroundings) = checkout();
    let model = folder.path().join("models/micro");
    let named =
        async |words: String| Config::new(parse(&words), &surroundings).await.unwrap().served_model_name.unwrap();
    assert_eq!(named("gateway serve".into()).await, "micro");
    assert_eq!(named(format!("gateway serve {}/", model.display())).await, "micro");
    assert_eq!(named(format!("gateway serve {}/.", model.display())).await, "micro");
    assert_eq!(named("gateway serve --served-model-name other".into()).await, "other");
}

#[tokio::test]
async fn running_workers_are_named_by_address() {
    let config =
        configure("gateway --worker grpc://a.example:1 --worker http://[::1]:2/ --worker 10.0.0.1:3").await.unwrap();
    let expected = ["a.example:1", "[::1]:2", "10.0.0.1:3"];
    assert_eq!(config.source.specs(), expected.map(|address| WorkerSpec::at(address.into(), Role::Unified)));
    for (words, expected) in [
        ("--worker a", "port"),
        ("--worker a:0", "65535"),
        ("--worker https://a:1", "scheme"),
        ("--worker :1", "host"),
        ("--worker a:1 --worker grpc://a:1", "twice"),
        ("--worker a:1 --model m", "would not be used"),
        ("--worker a:1 --runner fake", "--runner"),
        ("--worker a:1 --dtype auto", "--dtype"),
    ] {
        let sentence = refusal(&format!("gateway {words}")).await;
        assert!(sentence.contains(expected), "{sentence}");
    }
}

#[tokio::test]
async fn pairs_are_given_by_url_and_port() {
    let config = configure(
        "gateway --pd-disaggregation --prefill http://a:1 8998 --prefill b:2 --prefill c:3 none --decode http://d:4 \
         --decode e:5 --policy round_robin --prefill-policy cache_aware",
    )
    .await
    .unwrap();
    let prefill = |address: &str, transfer_port| WorkerSpec {
        transfer_port,
        ..WorkerSpec::at(address.to_owned(), Role::Prefill)
    };
    let decode = |address: &str| WorkerSpec::at(address.to_owned(), Role::Decode);
    let expected =
        [prefill("a:1", Some(8998)), prefill("b:2", None), prefill("c:3", None), decode("d:4"), decode("e:5")];
    assert_eq!(config.source.specs(), expected);
    let Policies { unified, prefill, decode } = config.policies;
    assert_eq!([unified, prefill, decode], [Policy::RoundRobin, Policy::CacheAware, Policy::RoundRobin]);
}

#[tokio::test]
async fn pairs_are_started_here_with_their_roles() {
    let config = configure("gateway serve --prefill-workers 2 --decode-workers 1 --runner fake").await.unwrap();
    let names: Vec<_> = config.source.specs().into_iter().map(|spec| (spec.name, spec.role)).collect();
    let expected = [("prefill-0", Role::Prefill), ("prefill-1", Role::Prefill), ("decode-0", Role::Decode)];
    assert_eq!(names, expected.map(|(name, role)| (name.to_owned(), role)));
    let Source::Local(worker) = config.source else { unreachable!() };
    let line = |role| {
        let args = worker.command_of(role).args;
        args.iter().map(|arg| arg.to_string_lossy().into_owned()).collect::<Vec<_>>().join(" ")
    };
    for (role, added) in [
        (Role::Unified, ""),
        (Role::Prefill, " --disaggregation-mode prefill --disaggregation-bootstrap-port 0"),
        (Role::Decode, " --disaggregation-mode decode"),
    ] {
        assert!(line(role).ends_with(&format!("--runner fake{added}")), "{}", line(role));
    }
}

#[tokio::test]
async fn half_a_pair_is_refused_with_a_sentence() {
    for (words, expected) in [
        ("--prefill a:1", "at least one --decode"),
        ("--decode a:1", "at least one --prefill"),
        ("--pd-disaggregation", "takes workers"),
        ("--pd-disaggregation --worker a:1", "takes workers"),
        ("--prefill a:1 --decode b:1 --worker c:1", "leave it out"),
        ("--prefill a:1 --decode a:1", "twice"),
        ("--prefill a:1 70000 --decode b:1", "--prefill 70000"),
        ("--prefill a:1 1 2 --decode b:1", "--prefill"),
        ("--prefill a --decode b:1", "--prefill a: the port is missing"),
        ("--prefill a:1 --decode https://b:1", "--decode https://b:1"),
        ("--prefill a:1 --decode b:1 --runner fake", "--runner"),
        ("--prefill a:1 --decode b:1 --model m", "would not be used"),
        ("--prefill-workers 1 --decode-workers 1 --worker a:1", "leave them out"),
        ("--prefill-workers 1 --decode-workers 1 --disaggregation-mode decode", "--disaggregation-mode"),
    ] {
        let sentence = match try_parse(&format!("gateway serve {words}")) {
            Ok(_) => refusal(&format!("gateway serve {words}")).await,
            Err(error) => error.to_string(),
        };
        assert!(sentence.contains(expected), "{words}: {sentence}");
    }
    assert!(try_parse("gateway serve --prefill-workers 1").is_err());
    assert!(try_parse("gateway serve --prefill-workers 0 --decode-workers 1").is_err());
}

#[tokio::test]
async fn what_is_not_built_is_refused_with_a_sentence() {
    for (words, expected) in [
        ("--tool-call-parser qwen3_coder", "qwen3_coder"),
        (
            "--tool-call-parser deepseekv32 --chat-template tool_chat_template_deepseekv31.jinja",
            "different generations",
        ),
        ("--reasoning-parser qwen3", "qwen3"),
        ("--chat-template chatml.jinja", "deepseek_v32"),
        ("--tokenizer /nowhere", "/nowhere"),
        ("--python /nowhere/python3", "/nowhere/python3"),
        ("--model /nowhere", "/nowhere"),
        ("--host no.such.host.invalid", "no.such.host.invalid"),
    ] {
        let sentence = refusal(&format!("gateway serve {words}")).await;
        assert!(sentence.contains(expected), "{sentence}");
    }
}

#[tokio::test]
async fn a_known_template_name_is_a_dialect() {
    for (name, dialect) in [
        ("deepseek_v32", Dialect::V32),
        ("encoding_dsv32.py", Dialect::V32),
        ("./templates/tool_chat_template_deepseekv32.jinja", Dialect::V31),
        ("tool_chat_template_deepseekv31.jinja", Dialect::V31),
        ("tool_chat_template_deepseekr1.jinja", Dialect::V3),
    ] {
        let config = configure(&format!("gateway serve --chat-template {name} --trust-remote-code")).await.unwrap();
        assert_eq!(config.style.dialect, Some(dialect), "{name}");
    }
}

#[tokio::test]
async fn parsers_are_known_by_the_names_of_other_servers() {
    for (name, dialect) in [("deepseekv32", Dialect::V32), ("deepseek_v31", Dialect::V31), ("deepseekv3", Dialect::V3)]
    {
        let config = configure(&format!("gateway serve --tool-call-parser {name}")).await.unwrap();
        assert_eq!(config.style, StyleChoice { dialect: Some(dialect), thinking: None });
    }
    for (name, thinking) in [("deepseek-v3", Thinking::Switched), ("deepseek-r1", Thinking::Always)] {
        let config = configure(&format!("gateway serve --reasoning-parser {name}")).await.unwrap();
        assert_eq!(config.style, StyleChoice { dialect: None, thinking: Some(thinking) });
    }
}

#[test]
fn the_built_in_model_is_found_in_a_checkout_and_after_installation() {
    let (folder, surroundings) = checkout();
    assert_eq!(surroundings.default_model().unwrap(), folder.path().join("models/micro"));
    let prefix = tempfile::tempdir().unwrap();
    let installed = Surroundings {
        executables: vec![prefix.path().join("bin/gateway")],
        current_dir: folder.path().into(),
        ..Surroundings::default()
    };
    // Not yet installed with its data: the current folder is a checkout.
    assert_eq!(installed.default_model().unwrap(), folder.path().join("models/micro"));
    assert!(!installed.worker_environment().is_empty());
    let data = prefix.path().join("share/baleen/models/micro");
    fs::create_dir_all(&data).unwrap();
    fs::write(data.join("config.json"), "{}").unwrap();
    assert_eq!(installed.default_model().unwrap(), data);
    assert!(installed.worker_environment().is_empty());
    let lost = Surroundings { executables: vec!["/nowhere/bin/gateway".into()], ..Surroundings::default() };
    let sentence = lost.default_model().unwrap_err().to_string();
    assert!(sentence.contains("/nowhere/share/baleen/models/micro") && sentence.contains("MODEL_DIR"), "{sentence}");
}

#[test]
fn the_interpreter_is_looked_for_in_order() {
    let (folder, mut surroundings) = checkout();
    let root = folder.path();
    let put = |path: &str| {
        let path = root.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, "").unwrap();
        path
    };
    let (on_path, in_env) = (put("elsewhere/python3"), put("env/bin/python3"));
    surroundings.search_path = vec![root.join("elsewhere")];
    surroundings.virtual_env = Some(root.join("env"));
    let beside = root.join(".venv/bin/python3");
    assert_eq!(surroundings.python(None).unwrap(), beside);
    assert_eq!(surroundings.python(Some(Path::new("python3"))).unwrap(), on_path);
    assert_eq!(surroundings.python(Some(&in_env)).unwrap(), in_env);
    // Called from elsewhere: the environment, then the checkout, then PATH.
    surroundings.executables = vec![root.join("bin/gateway")];
    assert_eq!(surroundings.python(None).unwrap(), in_env);
    surroundings.virtual_env = None;
    assert_eq!(surroundings.python(None).unwrap(), beside);
    fs::remove_file(&beside).unwrap();
    assert_eq!(surroundings.python(None).unwrap(), on_path);
    surroundings.search_path.clear();
    assert!(surroundings.python(None).unwrap_err().to_string().contains("python3"));
}

#[tokio::test]
async fn names_in_dns_stand_for_workers_beside_addresses() {
    let config = configure(
        "gateway --prefill dns+srv://_p._tcp.a 8998 --prefill c:1 --decode dns://b:2 --dns-server 10.0.0.2:53",
    );
    let config = config.await.unwrap();
    let service =
        Name { question: Question::Service("_p._tcp.a".into()), role: Role::Prefill, transfer_port: Some(8998) };
    let host = Question::Host { host: "b".into(), port: 2 };
    assert_eq!(config.names, [service, Name { question: host, role: Role::Decode, transfer_port: None }]);
    assert_eq!(config.source.specs(), [WorkerSpec::at("c:1".into(), Role::Prefill)]);
    assert_eq!(config.dns_server, "10.0.0.2:53".parse().ok());
    let config = configure("gateway --worker dns+srv://_w._tcp.a").await.unwrap();
    assert!(matches!(&config.source, Source::Remote(specs) if specs.is_empty()));
    assert!(refusal("gateway --worker a:1 --dns-server 10.0.0.2:53").await.contains("--dns-server has no effect"));
    assert!(refusal("gateway --worker dns+srv://a:1").await.starts_with("--worker dns+srv://a:1: service records"));
}

#[cfg(feature = "kubernetes")]
#[tokio::test]
async fn endpoints_of_services_are_workers_beside_addresses() {
    use super::services::ServicePort;

    let line = "gateway --prefill k8s://llm/p:grpc 8998 --prefill c:1 --decode k8s://llm/d --kubeconfig /k";
    let config = configure(line).await.unwrap();
    let of = |service: &Service| (service.place.to_string(), service.role, service.transfer_port);
    let services: Vec<_> = config.services.iter().map(of).collect();
    let expected = [("k8s://llm/p:grpc".into(), Role::Prefill, Some(8998)), ("k8s://llm/d".into(), Role::Decode, None)];
    assert_eq!(services, expected);
    assert_eq!(config.services[1].place.port, ServicePort::Only);
    assert_eq!(config.source.specs(), [WorkerSpec::at("c:1".into(), Role::Prefill)]);
    assert_eq!(config.kubeconfig, Some("/k".into()));
    let sentence = refusal("gateway --prefill k8s://llm/p").await;
    assert!(sentence.contains("give at least one --decode"), "{sentence}");
}

#[cfg(not(feature = "kubernetes"))]
#[tokio::test]
async fn services_are_refused_by_a_gateway_that_cannot_follow_them() {
    let sentence = refusal("gateway --worker k8s://llm/w").await;
    assert!(sentence.starts_with("--worker k8s://llm/w: this gateway was built without Kubernetes"), "{sentence}");
}

#[tokio::test]
async fn a_kubeconfig_for_nothing_is_refused() {
    assert!(refusal("gateway --worker a:1 --kubeconfig /k").await.contains("--kubeconfig has no effect"));
    assert!(refusal("gateway --worker k8s://w").await.contains("the namespace is missing"));
}

#[tokio::test]
async fn a_listener_for_everybody_asks_for_a_key_or_takes_a_word_from_the_operator() {
    for host in ["0.0.0.0", "::", "10.1.2.3"] {
        let sentence = refusal(&format!("gateway --worker a:1 --host {host}")).await;
        assert!(sentence.contains(&format!("--host {host}")) && sentence.contains("--insecure-listen"), "{sentence}");
        for more in ["--api-key k", "--insecure-listen"] {
            assert!(configure(&format!("gateway --worker a:1 --host {host} {more}")).await.is_ok(), "{more}");
        }
    }
    assert!(configure("gateway --worker a:1 --host ::1").await.is_ok());
}

#[tokio::test]
async fn the_workers_key_is_read_and_goes_to_a_worker_that_is_started_here() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("key");
    assert!(
        refusal(&format!("gateway --worker a:1 --worker-key-file {}", path.display())).await.contains("cannot be read")
    );
    fs::write(&path, "0123456789abcdef").unwrap();
    let config = configure(&format!("gateway serve --worker-key-file {}", path.display())).await.unwrap();
    assert!(config.worker_key.is_some());
    assert!(command_line(&config).join(" ").contains(&format!("--worker-key-file {}", path.display())));
}
