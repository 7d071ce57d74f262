//! Numbers of a chat request: what is one, which ones a field takes, and that no number is answered by chance.

use serde_json::{Value, json};

use super::{refused, submit, with};

#[test]
fn seeds_are_all_integers_of_64_bits() {
    let seed = |text: &str| {
        let body = format!(r#"{{"messages": [{{"role": "user", "content": "hi"}}], "seed": {text}}}"#);
        submit(&body).map(|spec| spec.generation.sampling.seed.unwrap())
    };
    assert_eq!(seed("0").unwrap(), 0);
    assert_eq!(seed("18446744073709551615").unwrap(), u64::MAX);
    assert_eq!(seed("-9223372036854775808").unwrap(), 1 << 63);
    for bad in ["18446744073709551616", "-9223372036854775809", "1e300"] {
        let error = seed(bad).unwrap_err();
        assert_eq!(error.param.as_deref(), Some("seed"), "{bad}");
        let range = "'seed' must be between -9223372036854775808 and 18446744073709551615, but it is beyond 64 bits.";
        assert_eq!(error.message, range, "{bad}");
    }
    for bad in ["1.0", "9.3e18", "\"1\"", "true"] {
        let error = seed(bad).unwrap_err();
        assert_eq!(error.param.as_deref(), Some("seed"), "{bad}");
        assert!(error.message.contains("expected an integer"), "{error}");
    }
}

#[test]
fn integers_beyond_64_bits_are_out_of_range() {
    for (field, value) in [("n", "18446744073709551616"), ("max_tokens", "-1e40"), ("top_k", "1e308")] {
        let body = format!(r#"{{"messages": [{{"role": "user", "content": "hi"}}], "{field}": {value}}}"#);
        let error = submit(&body).unwrap_err();
        assert_eq!((error.status(), error.param.as_deref()), (400, Some(field)), "{error}");
        assert!(error.message.contains("must be between") && error.message.contains("beyond 64 bits"), "{error}");
    }
}

#[test]
fn values_out_of_range_are_refused_by_name() {
    for (field, values) in [
        ("temperature", json!([-0.1, 2.01, 1e300])),
        ("top_p", json!([0, -1, 1.01, 1e-60])),
        ("top_k", json!([-2, 4294967296u64])),
        ("min_p", json!([-0.1, 1.1])),
        ("repetition_penalty", json!([0, -1, 10.5])),
        ("frequency_penalty", json!([-2.1, 2.1])),
        ("presence_penalty", json!([-2.1, 2.1])),
        ("max_tokens", json!([-1, 0, 4097, 4294967296u64])),
        ("max_completion_tokens", json!([-1, 0, 4097])),
        ("min_tokens", json!([-1])),
        ("n", json!([0, -1, 9, 129])),
        ("priority", json!([-1001, 1001])),
        ("deadline_ms", json!([0, -5, 86400001])),
        ("thinking_budget", json!([-1])),
    ] {
        for value in values.as_array().unwrap() {
            refused(with(json!({ field: value })), 400, field);
        }
    }
    refused(with(json!({"min_tokens": 5, "max_tokens": 4})), 400, "min_tokens");
    refused(with(json!({"cache_salt": "x".repeat(257)})), 400, "cache_salt");
}

#[test]
fn what_is_no_json_number_is_refused_by_name() {
    for bad in ["NaN", "-NaN", "Infinity", "-Infinity", "1e999", "\"hot\"", "[1]", "{}", "true"] {
        let body = format!(r#"{{"messages": [{{"role": "user", "content": "hi"}}], "temperature": {bad}, "n": 1}}"#);
        let error = submit(&body).unwrap_err();
        assert_eq!((error.status(), error.param.as_deref()), (400, Some("temperature")), "{bad}: {error}");
    }
}

/// Any number for any numeric field gives an answer or a refusal that names the field.
#[test]
fn every_numeric_field_answers_every_number() {
    let fields = [
        ("max_tokens", "4096"),
        ("max_completion_tokens", "4096"),
        ("min_tokens", "4096"),
        ("temperature", "2"),
        ("top_p", "1"),
        ("top_k", "4294967295"),
        ("min_p", "1"),
        ("repetition_penalty", "10"),
        ("frequency_penalty", "2"),
        ("presence_penalty", "2"),
        ("seed", "18446744073709551615"),
        ("n", "8"),
        ("top_logprobs", "20"),
        ("thinking_budget", "4294967295"),
        ("priority", "1000"),
        ("deadline_ms", "86400000"),
    ];
    for (field, max) in fields {
        let sent = |value: &str| {
            let body = r#"{"messages": [{"role": "user", "content": "q"}], "logprobs": true, "FIELD": VALUE}"#;
            submit(&body.replace("FIELD", field).replace("VALUE", value))
        };
        assert!(sent(max).is_ok(), "{field} {max}");
        let beyond = format!("{}", max.parse::<u128>().unwrap() + 1);
        for value in ["-1", "0", "1", &beyond, "2147483648", "9223372036854775808", "1e400", "-1e400", "NaN", "1e-400"]
        {
            if let Err(error) = sent(value) {
                assert_eq!((error.status(), error.param.as_deref()), (400, Some(field)), "{field} {value}: {error}");
            }
        }
        for value in [&beyond, "NaN", "1e400"] {
            assert!(sent(value).is_err(), "{field} {value}");
        }
    }
}

#[test]
fn token_ids_must_exist() {
    refused(with(json!({"logit_bias": {"1000": 1}})), 400, "logit_bias.1000");
    refused(with(json!({"logit_bias": {"5": 101}})), 400, "logit_bias.5");
    refused(with(json!({"stop_token_ids": [1, 1000]})), 400, "stop_token_ids[1]");
    refused(with(json!({"stop_token_ids": [-1]})), 400, "stop_token_ids[0]");
    refused(with(json!({"stop_token_ids": vec![1; 65]})), 400, "stop_token_ids");
    let biases: serde_json::Map<String, Value> = (0..301).map(|id| (id.to_string(), json!(1))).collect();
    refused(with(json!({ "logit_bias": biases })), 400, "logit_bias");
}
