//! `/v1/tokenize` and `/v1/detokenize`.

use serde_json::{Value, json};

use crate::fake_worker::{CONTEXT_LENGTH_TOKENS, FakeWorker};
use crate::gateway::{CHAT, Gateway, hello, ids, say, with};

const TOKENIZE: &str = "/v1/tokenize";
const DETOKENIZE: &str = "/v1/detokenize";

#[tokio::test]
async fn a_prompt_becomes_tokens_and_tokens_a_prompt() {
    let worker = FakeWorker::start(|_| say("Yes.")).await;
    let gateway = Gateway::start(&worker).await;
    let text = "A whale 🐋 sings <think> 北";
    let tokens = ids(text);
    let answer = gateway.ask(TOKENIZE, &json!({"prompt": text})).await;
    assert_eq!(answer, json!({"tokens": tokens, "count": tokens.len(), "max_model_len": CONTEXT_LENGTH_TOKENS}));
    assert_eq!(gateway.ask(DETOKENIZE, &json!({"tokens": tokens})).await, json!({"prompt": text}));
    let longer = gateway.ask(TOKENIZE, &json!({"prompt": text, "add_special_tokens": true})).await;
    assert_eq!(longer["count"], tokens.len() + 1);
    let marked = gateway.ask(DETOKENIZE, &json!({"tokens": longer["tokens"]})).await;
    assert_eq!(marked["prompt"], format!("<｜begin▁of▁sentence｜>{text}"));
    let plain = gateway.ask(DETOKENIZE, &json!({"tokens": longer["tokens"], "skip_special_tokens": true})).await;
    assert!(!plain["prompt"].as_str().unwrap().contains("begin"));
    assert_eq!(gateway.ask(TOKENIZE, &json!({"prompt": ""})).await["count"], 0);
    assert_eq!(gateway.ask(DETOKENIZE, &json!({"tokens": []})).await["prompt"], "");
}

#[tokio::test]
async fn a_conversation_becomes_the_prompt_that_chat_would_send() {
    let worker = FakeWorker::start(|_| say("Yes.")).await;
    let gateway = Gateway::start(&worker).await;
    let tools = json!([{"type": "function", "function": {"name": "f", "parameters": {}}}]);
    for more in [json!({}), json!({"thinking": {"type": "enabled"}}), json!({"tools": tools})] {
        let answer = gateway.ask(TOKENIZE, &hello(&more)).await;
        gateway.ask(CHAT, &hello(&more)).await;
        assert_eq!(answer["tokens"], json!(worker.next_submit().await.prompt_token_ids), "{more}");
    }
    let answered =
        json!({"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "Yes."}]});
    let open = gateway.ask(TOKENIZE, &answered).await;
    let closed = gateway.ask(TOKENIZE, &with(answered, &json!({"add_generation_prompt": false}))).await;
    assert_eq!(open["count"].as_u64(), closed["count"].as_u64().map(|count| count + 2));
}

#[tokio::test]
async fn refusals_name_their_field() {
    let worker = FakeWorker::start(|_| say("Yes.")).await;
    let gateway = Gateway::start(&worker).await;
    let cases = [
        (TOKENIZE, json!({}), 400, "prompt"),
        (TOKENIZE, json!({"prompt": 5}), 400, "prompt"),
        (TOKENIZE, json!({"prompt": "x", "messages": []}), 400, "messages"),
        (TOKENIZE, json!({"prompt": "x", "tools": []}), 400, "tools"),
        (TOKENIZE, json!({"messages": []}), 400, "messages"),
        (TOKENIZE, json!({"prompt": "x", "model": "gpt"}), 404, "model"),
        (TOKENIZE, hello(&json!({"model": "gpt"})), 404, "model"),
        (TOKENIZE, json!({"prompt": "x", "add_special_tokens": "yes"}), 400, "add_special_tokens"),
        (DETOKENIZE, json!({}), 400, "tokens"),
        (DETOKENIZE, json!({"tokens": "x"}), 400, "tokens"),
        (DETOKENIZE, json!({"tokens": [1, -1]}), 400, "tokens[1]"),
        (DETOKENIZE, json!({"tokens": [4_294_967_296_u64]}), 400, "tokens[0]"),
        (DETOKENIZE, json!({"tokens": [1.5]}), 400, "tokens[0]"),
    ];
    for (path, body, status, param) in cases {
        let reply = gateway.post(path, &body).await;
        let error: Value = reply.error();
        assert_eq!((reply.status.as_u16(), &error["param"]), (status, &json!(param)), "{body}: {error}");
    }
    gateway.until_idle().await;
}
