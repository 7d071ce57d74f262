//! Logs and metrics: how logging is set up, and every metric's name, in one place.
//!
//! Metrics are counted through handles that are made once, so that a streamed token costs an atomic addition and no
//! look-up. They belong to one gateway, not to the process: two gateways in one test do not share them.

use std::io::IsTerminal;
use std::time::Duration;

use metrics::{Counter, Gauge, Histogram, Key, KeyName, Label, Level, Metadata, Recorder, SharedString, Unit};
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle, PrometheusRecorder};
use tracing_subscriber::EnvFilter;

use crate::config::{LogFormat, LogLevel};

pub mod keys;

/// Media type of the Prometheus text format that `/metrics` speaks.
pub const METRICS_CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// How often histograms are folded into their buckets; between two folds each observation is kept.
pub const UPKEEP_INTERVAL: Duration = Duration::from_secs(5);

const METADATA: Metadata<'_> = Metadata::new("baleen", Level::INFO, None);

const LATENCY_BUCKETS: [f64; 17] =
    [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0];
const TOKEN_BUCKETS: [f64; 14] =
    [1.0, 4.0, 16.0, 64.0, 256.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0, 32768.0, 65536.0, 131_072.0, 262_144.0];

const REQUESTS: &str = "baleen_requests_total";
const PROMPT_TOKENS: &str = "baleen_prompt_tokens_total";
const CACHED_PROMPT_TOKENS: &str = "baleen_cached_prompt_tokens_total";
const OUTPUT_TOKENS: &str = "baleen_output_tokens_total";
const TTFT: &str = "baleen_time_to_first_token_seconds";
const ITL: &str = "baleen_inter_token_latency_seconds";
const DURATION: &str = "baleen_request_duration_seconds";
const REQUEST_PROMPT_TOKENS: &str = "baleen_request_prompt_tokens";
const REQUEST_OUTPUT_TOKENS: &str = "baleen_request_output_tokens";
const ACTIVE_REQUESTS: &str = "baleen_active_requests";
const MAX_ACTIVE_REQUESTS: &str = "baleen_max_active_requests";
const QUEUED_REQUESTS: &str = "baleen_queued_requests";
const QUEUE_TIME: &str = "baleen_queue_time_seconds";
const RETRIES: &str = "baleen_request_retries_total";
const REPLAYS: &str = "baleen_request_replays_total";
const WORKER_READY: &str = "baleen_worker_ready";
const WORKER_RUNNING: &str = "baleen_worker_running_requests";
const WORKER_WAITING: &str = "baleen_worker_waiting_requests";
const WORKER_USED_PAGES: &str = "baleen_worker_used_kv_pages";
const WORKER_TOTAL_PAGES: &str = "baleen_worker_total_kv_pages";
const WORKER_WAITING_TOKENS: &str = "baleen_worker_waiting_prompt_tokens";

/// How a request ended, as the label `outcome` of `baleen_requests_total`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    Completed,
    /// Answered with a 4xx status.
    Rejected,
    /// Answered with a 5xx status, or with an error after its first token.
    Failed,
    /// The client left, did not keep up, or had it aborted.
    Aborted,
}

impl Outcome {
    const ALL: [Self; 4] = [Self::Completed, Self::Rejected, Self::Failed, Self::Aborted];

    fn name(self) -> &'static str {
        match self {
            Self::Completed => "completed",
            Self::Rejected => "rejected",
            Self::Failed => "failed",
            Self::Aborted => "aborted",
        }
    }
}

/// The endpoint of a request, as the label `endpoint`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EndpointName {
    ChatCompletions,
    Completions,
    Responses,
    Messages,
    CountTokens,
    Tokenize,
    Detokenize,
}

impl EndpointName {
    const ALL: [Self; 7] = [
        Self::ChatCompletions,
        Self::Completions,
        Self::Responses,
        Self::Messages,
        Self::CountTokens,
        Self::Tokenize,
        Self::Detokenize,
    ];

    fn name(self) -> &'static str {
        match self {
            Self::ChatCompletions => "chat_completions",
            Self::Completions => "completions",
            Self::Responses => "responses",
            Self::Messages => "messages",
            Self::CountTokens => "count_tokens",
            Self::Tokenize => "tokenize",
            Self::Detokenize => "detokenize",
        }
    }
}

/// Handles of everything that is counted per request or per token.
pub struct Metrics {
    recorder: PrometheusRecorder,
    requests: [[Counter; Outcome::ALL.len()]; EndpointName::ALL.len()],
    pub prompt_tokens: Counter,
    pub cached_prompt_tokens: Counter,
    pub output_tokens: Counter,
    /// Choices submitted anew before their first token, and after it.
    pub retries: Counter,
    pub replays: Counter,
    pub ttft: Histogram,
    pub itl: Histogram,
    pub duration: Histogram,
    pub request_prompt_tokens: Histogram,
    pub request_output_tokens: Histogram,
    /// Of requests that had to wait for a permit.
    pub queue_time: Histogram,
    active: Gauge,
    max_active: Gauge,
    queued: Gauge,
}

/// State of one worker, for its gauges.
#[derive(Clone, Copy, Debug, Default)]
pub struct WorkerGauges {
    pub ready: bool,
    pub running_requests: u32,
    pub waiting_requests: u32,
    pub used_pages: u32,
    pub total_pages: u32,
    pub waiting_prompt_tokens: u64,
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

impl Metrics {
    /// Metrics of one gateway, all at zero.
    #[must_use]
    pub fn new() -> Self {
        let recorder = recorder();
        describe(&recorder);
        let counter = |name| recorder.register_counter(&Key::from_static_name(name), &METADATA);
        let gauge = |name| recorder.register_gauge(&Key::from_static_name(name), &METADATA);
        let histogram = |name| recorder.register_histogram(&Key::from_static_name(name), &METADATA);
        let requests = EndpointName::ALL.map(|endpoint| {
            Outcome::ALL.map(|outcome| {
                let labels = vec![Label::new("endpoint", endpoint.name()), Label::new("outcome", outcome.name())];
                recorder.register_counter(&Key::from_parts(REQUESTS, labels), &METADATA)
            })
        });
        Self {
            requests,
            prompt_tokens: counter(PROMPT_TOKENS),
            cached_prompt_tokens: counter(CACHED_PROMPT_TOKENS),
            output_tokens: counter(OUTPUT_TOKENS),
            retries: counter(RETRIES),
            replays: counter(REPLAYS),
            ttft: histogram(TTFT),
            itl: histogram(ITL),
            duration: histogram(DURATION),
            request_prompt_tokens: histogram(REQUEST_PROMPT_TOKENS),
            request_output_tokens: histogram(REQUEST_OUTPUT_TOKENS),
            queue_time: histogram(QUEUE_TIME),
            active: gauge(ACTIVE_REQUESTS),
            max_active: gauge(MAX_ACTIVE_REQUESTS),
            queued: gauge(QUEUED_REQUESTS),
            recorder,
        }
    }

    /// Counts a request that has ended.
    pub fn count_request(&self, endpoint: EndpointName, outcome: Outcome) {
        self.requests[endpoint as usize][outcome as usize].increment(1);
    }

    /// Requests that hold a permit, of at most `max`, and those that wait for one.
    pub fn set_active(&self, active: usize, max: usize, queued: usize) {
        self.active.set(count(active));
        self.max_active.set(count(max));
        self.queued.set(count(queued));
    }

    /// The last report of one worker.
    pub fn set_worker(&self, worker: &str, gauges: &WorkerGauges) {
        let set = |name: &'static str, value: f64| {
            let key = Key::from_parts(name, vec![Label::new("worker", worker.to_owned())]);
            self.recorder.register_gauge(&key, &METADATA).set(value);
        };
        set(WORKER_READY, if gauges.ready { 1.0 } else { 0.0 });
        set(WORKER_RUNNING, gauges.running_requests.into());
        set(WORKER_WAITING, gauges.waiting_requests.into());
        set(WORKER_USED_PAGES, gauges.used_pages.into());
        set(WORKER_TOTAL_PAGES, gauges.total_pages.into());
        set(WORKER_WAITING_TOKENS, f64::from(u32::try_from(gauges.waiting_prompt_tokens).unwrap_or(u32::MAX)));
    }

    /// Renders all metrics as Prometheus text, and does their upkeep.
    #[must_use]
    pub fn handle(&self) -> PrometheusHandle {
        self.recorder.handle()
    }
}

fn count(value: usize) -> f64 {
    f64::from(u32::try_from(value).unwrap_or(u32::MAX))
}

fn recorder() -> PrometheusRecorder {
    let buckets: [(&str, &[f64]); 6] = [
        (TTFT, &LATENCY_BUCKETS),
        (ITL, &LATENCY_BUCKETS),
        (DURATION, &LATENCY_BUCKETS),
        (QUEUE_TIME, &LATENCY_BUCKETS),
        (REQUEST_PROMPT_TOKENS, &TOKEN_BUCKETS),
        (REQUEST_OUTPUT_TOKENS, &TOKEN_BUCKETS),
    ];
    let builder = buckets.into_iter().fold(PrometheusBuilder::new(), |builder, (name, buckets)| {
        // Only an empty list of buckets is refused, and the tables above are not empty.
        builder.set_buckets_for_metric(Matcher::Full(name.to_owned()), buckets).unwrap_or_default()
    });
    builder.build_recorder()
}

fn describe(recorder: &PrometheusRecorder) {
    let counters = [
        (REQUESTS, "Requests that ended, by endpoint and outcome."),
        (PROMPT_TOKENS, "Prompt tokens of requests that reached a worker."),
        (CACHED_PROMPT_TOKENS, "Prompt tokens that came from a worker's cache."),
        (OUTPUT_TOKENS, "Tokens that workers generated."),
        (RETRIES, "Choices that another worker was given before their first token, because theirs failed."),
        (REPLAYS, "Choices that another worker went on with after tokens were out, because theirs was lost."),
        (keys::KEY_REQUESTS, "Requests that ended, by the name of their API key and by outcome."),
        (keys::KEY_PROMPT_TOKENS, "Prompt tokens, by the name of the API key."),
        (keys::KEY_OUTPUT_TOKENS, "Generated tokens, by the name of the API key."),
        (keys::KEY_REFUSALS, "Requests that a limit of their API key refused, by its name and by limit."),
    ];
    let gauges = [
        (ACTIVE_REQUESTS, "Requests in progress."),
        (MAX_ACTIVE_REQUESTS, "Requests that may be in progress at one time."),
        (QUEUED_REQUESTS, "Requests in line for a place among those in progress."),
        (keys::KEY_PRESENT, "Requests in progress or in line, by the name of their API key."),
        (WORKER_READY, "1 while the worker takes requests."),
        (WORKER_RUNNING, "Requests in the worker's running batch."),
        (WORKER_WAITING, "Requests in the worker's queue."),
        (WORKER_USED_PAGES, "KV pages held by requests or caches."),
        (WORKER_TOTAL_PAGES, "KV pages of the worker."),
        (WORKER_WAITING_TOKENS, "Prompt tokens the worker has not computed yet."),
    ];
    let histograms = [
        (TTFT, "From the request's arrival to its first token."),
        (ITL, "Between two tokens of one choice."),
        (DURATION, "From the request's arrival to its end."),
        (QUEUE_TIME, "Wait of requests that found every place taken."),
        (REQUEST_PROMPT_TOKENS, "Prompt tokens of one request."),
        (REQUEST_OUTPUT_TOKENS, "Output tokens of one request."),
    ];
    for (name, text) in counters {
        recorder.describe_counter(KeyName::from(name), None, SharedString::from(text));
    }
    for (name, text) in gauges {
        recorder.describe_gauge(KeyName::from(name), None, SharedString::from(text));
    }
    for (name, text) in histograms {
        let unit = if name.ends_with("_seconds") { Some(Unit::Seconds) } else { None };
        recorder.describe_histogram(KeyName::from(name), unit, SharedString::from(text));
    }
}

/// Sends logs to standard error. `RUST_LOG` refines `level`, by default `info`.
pub fn init_logging(level: Option<LogLevel>, format: LogFormat) {
    let default = level.unwrap_or(LogLevel::Info).name();
    let filter = EnvFilter::builder()
        .with_default_directive(format!("baleen_gateway={default}").parse().unwrap_or_default())
        .from_env_lossy();
    let stderr = std::io::stderr;
    let colour = stderr().is_terminal();
    // A line that cannot be written is dropped. To complain of it where it could not be written would panic.
    let subscriber = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(stderr)
        .with_ansi(colour)
        .with_target(false)
        .log_internal_errors(false);
    // A second call, as in tests, keeps the first subscriber.
    let _ = match format {
        LogFormat::Text => subscriber.compact().try_init(),
        LogFormat::Json => subscriber.json().flatten_event(true).try_init(),
    };
}
