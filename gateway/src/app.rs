//! Builds and holds what all requests share: the pool, the model's text side, permits, metrics.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use http::HeaderValue;
use tracing::{debug, warn};

use crate::admission::Admission;
use crate::chat::constraint::AnswerRule;
use crate::chat::control::{DSML, THINK_OPEN};
use crate::chat::style::{ModelTraits, Style};
use crate::config::Config;
use crate::error::ApiError;
use crate::generate::{Enforced, Generator};
use crate::openai::models::ModelCard;
use crate::openai::response::ResponseHead;
use crate::openai::{InvalidRequest, Limits, ModelFacts};
use crate::telemetry::Metrics;
use crate::text::spans::SpanCache;
use crate::text::tokenizer::Tokenizer;
use crate::text_pool::TextPool;
use crate::worker::calls::sha256_hex;
use crate::worker::pool::{ModelGate, Pool};
use crate::worker::{TokenizerFiles, WorkerInfo};

/// Memory for the ids of texts that were tokenized before: some hundred long conversations. Taken as it is needed.
const SPAN_CACHE_BYTES: usize = 256 << 20;

/// The one model this gateway serves, as the first worker described it.
pub struct Model {
    /// Name clients use.
    pub name: String,
    pub tokenizer: Arc<Tokenizer>,
    pub spans: SpanCache,
    pub text_pool: TextPool,
    pub info: WorkerInfo,
    pub facts: ModelFacts,
    pub limits: Limits,
    created_unix_s: u64,
}

impl Model {
    /// The entry of `/v1/models`.
    #[must_use]
    pub fn card(&self) -> ModelCard {
        ModelCard::new(&*self.name, self.created_unix_s, self.info.context_length_tokens)
    }

    /// What the worker is told to enforce.
    ///
    /// # Errors
    /// The rule cannot be compiled for this model, or becomes too large.
    pub fn compile(&self, rule: AnswerRule) -> Result<Option<Enforced>, InvalidRequest> {
        let Some(constraint) = rule.compile(self.facts.style.dialect, &self.tokenizer)? else { return Ok(None) };
        self.limits.check_constraint(&rule.field, &constraint)?;
        Ok(Some(Enforced { constraint: Arc::new(constraint), field: rule.field }))
    }

    /// What every object of an answer that is begun now repeats.
    #[must_use]
    pub fn response_head(&self, id: String) -> ResponseHead {
        ResponseHead { id, created: unix_s(), model: self.name.clone() }
    }
}

fn unix_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

/// See the module.
pub struct App {
    pub config: Config,
    pub pool: Arc<Pool>,
    pub generator: Arc<Generator>,
    pub metrics: Arc<Metrics>,
    pub admission: Admission,
    model: OnceLock<Arc<Model>>,
    draining: AtomicBool,
    request_id_prefix: u64,
    num_requests: AtomicU64,
}

impl App {
    /// An application whose workers are not connected yet.
    #[must_use]
    pub fn new(config: Config) -> Arc<Self> {
        let pool = Pool::new(config.source.specs(), config.worker_key.clone());
        let metrics = Arc::new(Metrics::new());
        Arc::new(Self {
            generator: Generator::new(pool.clone(), config.policies, metrics.clone()),
            admission: Admission::new(&config, metrics.clone()),
            pool,
            metrics,
            config,
            model: OnceLock::new(),
            draining: AtomicBool::new(false),
            request_id_prefix: rand::random(),
            num_requests: AtomicU64::new(0),
        })
    }

    /// The model, once a worker was reached.
    #[must_use]
    pub fn model(&self) -> Option<&Arc<Model>> {
        self.model.get()
    }

    /// From now on requests are turned away.
    pub fn start_draining(&self) {
        self.draining.store(true, Ordering::Release);
    }

    /// Why a request cannot be taken now, if it cannot.
    #[must_use]
    pub fn refusal(&self) -> Option<ApiError> {
        if self.draining.load(Ordering::Acquire) {
            return Some(ApiError::draining());
        }
        if !self.pool.is_serving() {
            return Some(ApiError::not_ready(self.generator.why_not_ready()));
        }
        None
    }

    /// An id for a request that brought none.
    #[must_use]
    pub fn next_request_id(&self) -> HeaderValue {
        let number = self.num_requests.fetch_add(1, Ordering::Relaxed);
        let id = format!("{:016x}-{number:x}", self.request_id_prefix);
        HeaderValue::try_from(id).unwrap_or_else(|_| HeaderValue::from_static("none"))
    }
}

/// Lets the first worker decide what is served, and refuses later ones that would answer differently.
pub struct FirstModel {
    app: Arc<App>,
    /// Two workers may be reached at the same instant.
    deciding: Mutex<()>,
}

impl FirstModel {
    #[must_use]
    pub fn of(app: Arc<App>) -> Arc<dyn ModelGate> {
        Arc::new(Self { app, deciding: Mutex::new(()) })
    }

    fn load(&self, info: &WorkerInfo, files: Option<TokenizerFiles>) -> Result<Model, String> {
        let config = &self.app.config;
        let json = match (&config.tokenizer, files) {
            (Some(path), _) => {
                std::fs::read(path).map_err(|error| format!("cannot read {}: {error}", path.display()))?
            }
            (None, Some(files)) => files.tokenizer,
            (None, None) => return Err("its tokenizer was not fetched".into()),
        };
        if config.tokenizer.is_some() && sha256_hex(&json) != info.tokenizer_sha256 {
            warn!("the tokenizer given by --tokenizer is not the model's own");
        }
        let tokenizer = Tokenizer::from_json(&json, info.vocab_size).map_err(|error| error.to_string())?;
        debug!(backend = tokenizer.backend_name(), vocab_size = info.vocab_size, "the tokenizer is loaded");
        let traits = ModelTraits {
            name: &info.model_id,
            model_type: &info.model_type,
            has_dsml: tokenizer.control(DSML).is_some(),
            has_think: tokenizer.control(THINK_OPEN).is_some(),
        };
        Ok(Model {
            name: config.served_model_name.clone().unwrap_or_else(|| info.model_id.clone()),
            tokenizer: Arc::new(tokenizer),
            spans: SpanCache::new(SPAN_CACHE_BYTES),
            text_pool: TextPool::new().map_err(|error| format!("cannot start threads for long texts: {error}"))?,
            info: info.clone(),
            facts: ModelFacts {
                vocab_size: info.vocab_size,
                context_len: info.context_length_tokens,
                style: Style::of(traits).with(config.style),
            },
            limits: Limits::load().map_err(|error| format!("the built-in table of limits is broken: {error}"))?,
            created_unix_s: unix_s(),
        })
    }
}

impl ModelGate for FirstModel {
    fn wants_tokenizer(&self) -> bool {
        self.app.config.tokenizer.is_none() && self.app.model().is_none()
    }

    fn admit(&self, info: &WorkerInfo, files: Option<TokenizerFiles>) -> Result<(), String> {
        let _deciding = self.deciding.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(model) = self.app.model() else {
            let model = self.load(info, files)?;
            // The lock above makes this the only writer.
            let _ = self.app.model.set(Arc::new(model));
            return Ok(());
        };
        let served = &model.info;
        let differs = |what: &str, theirs: &str, ours: &str| {
            Err(format!("it serves another model than this gateway: {what} {theirs} instead of {ours}"))
        };
        if info.config_digest != served.config_digest {
            return differs("config digest", &info.config_digest, &served.config_digest);
        }
        if info.tokenizer_sha256 != served.tokenizer_sha256 {
            return differs("tokenizer digest", &info.tokenizer_sha256, &served.tokenizer_sha256);
        }
        if info.vocab_size != served.vocab_size {
            return differs("vocabulary size", &info.vocab_size.to_string(), &served.vocab_size.to_string());
        }
        if info.context_length_tokens != served.context_length_tokens {
            let (theirs, ours) = (info.context_length_tokens.to_string(), served.context_length_tokens.to_string());
            return differs("context length", &theirs, &ours);
        }
        Ok(())
    }
}
