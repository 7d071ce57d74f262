//! The client's end of the API, as far as a conversation needs it: a model's name, and a streamed answer.

use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response, StatusCode, Uri, header};
use http_body_util::{BodyExt, Full};
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use serde::Deserialize;
use serde_json::Value;
use thiserror::Error;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// More than this is no error object.
const MAX_ERROR_BYTES: usize = 64 * 1024;

type Body = hyper::body::Incoming;

/// Why there is no answer; one sentence.
#[derive(Debug, Error)]
pub enum ClientError {
    #[error("nothing answers at {url}: start a server with `gateway serve`, or give the address of one")]
    Unreachable { url: String },
    #[error("{0}")]
    Refused(String),
    #[error("the server does not speak this API: {0}")]
    Foreign(String),
    #[error("the answer broke off")]
    CutOff,
}

/// A piece of an answer.
#[derive(Debug, PartialEq, Eq)]
pub enum News {
    Reasoning(String),
    Content(String),
    /// A call begins.
    Call {
        index: usize,
        id: String,
        name: String,
    },
    /// More of a call's arguments.
    Arguments {
        index: usize,
        text: String,
    },
    Finish(String),
    Usage {
        completion_tokens: u32,
    },
}

/// See the module.
pub struct Client {
    url: String,
    authorization: Option<String>,
    http: hyper_util::client::legacy::Client<HttpConnector, Full<Bytes>>,
}

impl Client {
    /// A client of the server at `url`, with or without the path `/v1`.
    ///
    /// # Errors
    /// The URL is none that this client speaks.
    pub fn new(url: &str, api_key: Option<&str>) -> anyhow::Result<Self> {
        let url = url.trim_end_matches('/').trim_end_matches("/v1").to_owned();
        let parsed: Uri = url.parse().map_err(|_| anyhow::anyhow!("{url} is not a URL such as http://host:8000"))?;
        match parsed.scheme_str() {
            Some("http") if parsed.host().is_some_and(|host| !host.is_empty()) => {}
            Some("https") => anyhow::bail!("{url}: https is not spoken here; give an address that speaks plain http"),
            _ => anyhow::bail!("{url} is not a URL such as http://host:8000"),
        }
        let mut connector = HttpConnector::new();
        connector.set_connect_timeout(Some(CONNECT_TIMEOUT));
        connector.set_nodelay(true);
        let http = hyper_util::client::legacy::Client::builder(TokioExecutor::new()).build(connector);
        Ok(Self { url, authorization: api_key.map(|key| format!("Bearer {key}")), http })
    }

    #[must_use]
    pub fn url(&self) -> &str {
        &self.url
    }

    /// `wanted` if the server has it, else the first model it lists.
    ///
    /// # Errors
    /// The server cannot be reached, refuses, or has no such model.
    pub async fn model(&self, wanted: Option<&str>) -> anyhow::Result<String> {
        #[derive(Deserialize)]
        struct List {
            data: Vec<Card>,
        }
        #[derive(Deserialize)]
        struct Card {
            id: String,
        }
        let reply = self.send("/v1/models", None).await?;
        let bytes = reply.into_body().collect().await.map_err(|_| ClientError::CutOff)?.to_bytes();
        let list: List = serde_json::from_slice(&bytes).map_err(|error| ClientError::Foreign(error.to_string()))?;
        let names: Vec<String> = list.data.into_iter().map(|card| card.id).collect();
        match (wanted, names.first()) {
            (Some(name), _) if names.iter().any(|known| known == name) => Ok(name.to_owned()),
            (Some(name), Some(_)) => {
                anyhow::bail!("{} does not serve {name}; it serves {}", self.url, names.join(", "))
            }
            (None, Some(first)) => Ok(first.clone()),
            (_, None) => anyhow::bail!("{} serves no model yet; try again when it is ready", self.url),
        }
    }

    /// Asks for a streamed answer.
    ///
    /// # Errors
    /// The server cannot be reached or refuses.
    pub async fn ask(&self, body: &Value) -> Result<Events, ClientError> {
        let reply = self.send("/v1/chat/completions", Some(body)).await?;
        Ok(Events { body: reply.into_body(), buffer: Vec::new(), pending: Vec::new() })
    }

    /// The JSON that the server answers: to a POST where there is a `body`, else to a GET.
    ///
    /// # Errors
    /// The server cannot be reached, refuses, or answers something else.
    pub async fn json(&self, path: &str, body: Option<&Value>) -> Result<Value, ClientError> {
        let reply = self.send(path, body).await?;
        let bytes = reply.into_body().collect().await.map_err(|_| ClientError::CutOff)?.to_bytes();
        serde_json::from_slice(&bytes).map_err(|error| ClientError::Foreign(error.to_string()))
    }

    async fn send(&self, path: &str, body: Option<&Value>) -> Result<Response<Body>, ClientError> {
        let mut request = Request::builder().uri(format!("{}{path}", self.url));
        if body.is_some() {
            request = request.method("POST").header(header::CONTENT_TYPE, "application/json");
        }
        if let Some(value) = &self.authorization {
            request = request.header(header::AUTHORIZATION, value);
        }
        let body = Full::new(body.map(|body| Bytes::from(body.to_string())).unwrap_or_default());
        let request = request.body(body).map_err(|error| ClientError::Refused(error.to_string()))?;
        let reply = self.http.request(request).await;
        let reply = reply.map_err(|_| ClientError::Unreachable { url: self.url.clone() })?;
        if reply.status().is_success() { Ok(reply) } else { Err(refusal(reply).await) }
    }
}

async fn refusal(reply: Response<Body>) -> ClientError {
    let status = reply.status();
    let body = http_body_util::Limited::new(reply.into_body(), MAX_ERROR_BYTES).collect().await;
    let object: Value = body.ok().and_then(|body| serde_json::from_slice(&body.to_bytes()).ok()).unwrap_or_default();
    let message = object["error"]["message"].as_str().map_or_else(|| status.to_string(), str::to_owned);
    let hint =
        if status == StatusCode::UNAUTHORIZED { " Here it is given by --api-key or BALEEN_API_KEY." } else { "" };
    ClientError::Refused(format!("{message}{hint}"))
}

/// An answer as it comes.
pub struct Events {
    body: Body,
    buffer: Vec<u8>,
    /// News of the last event, the next one last.
    pending: Vec<News>,
}

impl Events {
    /// The next piece; `None` at the end of a whole answer.
    ///
    /// # Errors
    /// The stream broke off, or the server reports that it failed.
    pub async fn next(&mut self) -> Result<Option<News>, ClientError> {
        loop {
            if let Some(news) = self.pending.pop() {
                return Ok(Some(news));
            }
            if let Some(end) = self.buffer.windows(2).position(|pair| pair == b"\n\n") {
                let event: Vec<u8> = self.buffer.drain(..end + 2).collect();
                let Some(data) = event.strip_prefix(b"data: ") else { continue };
                if data.starts_with(b"[DONE]") {
                    return Ok(None);
                }
                self.pending = news_of(data)?;
                self.pending.reverse();
                continue;
            }
            match self.body.frame().await {
                Some(Ok(frame)) => self.buffer.extend_from_slice(frame.data_ref().map_or(&[], |data| data)),
                Some(Err(_)) | None => return Err(ClientError::CutOff),
            }
        }
    }
}

#[derive(Deserialize)]
struct Chunk {
    #[serde(default)]
    choices: Vec<Choice>,
    usage: Option<Usage>,
    error: Option<Failure>,
}

#[derive(Deserialize)]
struct Choice {
    #[serde(default)]
    delta: Delta,
    finish_reason: Option<String>,
}

#[derive(Default, Deserialize)]
struct Delta {
    content: Option<String>,
    reasoning_content: Option<String>,
    #[serde(default)]
    tool_calls: Vec<CallDelta>,
}

#[derive(Deserialize)]
struct CallDelta {
    index: usize,
    id: Option<String>,
    #[serde(default)]
    function: FunctionDelta,
}

#[derive(Default, Deserialize)]
struct FunctionDelta {
    name: Option<String>,
    arguments: Option<String>,
}

#[derive(Deserialize)]
struct Usage {
    completion_tokens: u32,
}

#[derive(Deserialize)]
struct Failure {
    message: String,
}

/// What one event says, in order.
fn news_of(data: &[u8]) -> Result<Vec<News>, ClientError> {
    let chunk: Chunk = serde_json::from_slice(data).map_err(|error| ClientError::Foreign(error.to_string()))?;
    if let Some(failure) = chunk.error {
        return Err(ClientError::Refused(failure.message));
    }
    let mut news = Vec::new();
    let some = |text: Option<String>| text.filter(|text| !text.is_empty());
    for Choice { delta, finish_reason } in chunk.choices {
        news.extend(some(delta.reasoning_content).map(News::Reasoning));
        news.extend(some(delta.content).map(News::Content));
        for CallDelta { index, id, function } in delta.tool_calls {
            if let Some(name) = function.name {
                news.push(News::Call { index, id: id.unwrap_or_default(), name });
            }
            news.extend(some(function.arguments).map(|text| News::Arguments { index, text }));
        }
        news.extend(finish_reason.map(News::Finish));
    }
    news.extend(chunk.usage.map(|usage| News::Usage { completion_tokens: usage.completion_tokens }));
    Ok(news)
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "tests")]

    use super::*;

    #[test]
    fn an_event_is_read_in_order() {
        let data = br#"{"choices":[{"index":0,"delta":{"reasoning_content":"r","content":"c","tool_calls":[
            {"index":1,"id":"x","function":{"name":"f","arguments":"{"}}]},"finish_reason":"tool_calls"}],
            "usage":{"completion_tokens":3,"prompt_tokens":1}}"#;
        let call = News::Call { index: 1, id: "x".into(), name: "f".into() };
        let expected = [
            News::Reasoning("r".into()),
            News::Content("c".into()),
            call,
            News::Arguments { index: 1, text: "{".into() },
            News::Finish("tool_calls".into()),
            News::Usage { completion_tokens: 3 },
        ];
        assert_eq!(news_of(data).unwrap(), expected);
        let opening = br#"{"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}"#;
        assert_eq!(news_of(opening).unwrap(), []);
        let failed = news_of(br#"{"error":{"message":"The worker went away.","code":null}}"#);
        assert_eq!(failed.unwrap_err().to_string(), "The worker went away.");
    }

    #[test]
    fn only_plain_http_is_spoken() {
        for (url, expected) in [("https://a", "https is not spoken"), ("a:8000", "not a URL"), ("http://", "not a URL")]
        {
            let sentence = Client::new(url, None).err().unwrap().to_string();
            assert!(sentence.contains(expected), "{sentence}");
        }
        assert_eq!(Client::new("http://a:1/v1/", None).unwrap().url(), "http://a:1");
    }
}
