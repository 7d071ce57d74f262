//! Puts tool results into the order of the calls they answer. The encoding itself knows results only by position.

use super::{EncodeError, Message, Role};

/// Reorders the results after every assistant message with calls by `tool_call_id`.
///
/// # Errors
/// A result that answers no call of the message before it, a call without its result, or two results of one call.
pub fn match_results(messages: &mut [Message]) -> Result<(), EncodeError> {
    let mut index = 0;
    while index < messages.len() {
        let num_results = messages[index + 1..].iter().take_while(|message| message.role == Role::Tool).count();
        let (before, after) = messages.split_at_mut(index + 1);
        let caller = &before[index];
        let results = &mut after[..num_results];
        if caller.role == Role::Tool || (num_results > 0 && caller.tool_calls.is_empty()) {
            let index = if caller.role == Role::Tool { index } else { index + 1 };
            let message = "must not be 'tool': no assistant message with 'tool_calls' stands before it";
            return Err(invalid(format!("messages[{index}].role"), message));
        }
        if !caller.tool_calls.is_empty() {
            order(caller, index, results)?;
        }
        index += 1 + num_results;
    }
    Ok(())
}

fn order(caller: &Message, index: usize, results: &mut [Message]) -> Result<(), EncodeError> {
    let mut ids = std::collections::HashMap::with_capacity(caller.tool_calls.len());
    for (place, call) in caller.tool_calls.iter().enumerate() {
        let param = || format!("messages[{index}].tool_calls[{place}].id");
        let Some(id) = call.id.as_deref() else {
            return Err(invalid(param(), "is required"));
        };
        if ids.insert(id, place).is_some() {
            return Err(invalid(param(), format!("is {id:?}, which names another call of the message too")));
        }
    }
    let mut places = Vec::with_capacity(results.len());
    let mut answered = vec![false; caller.tool_calls.len()];
    for (offset, result) in results.iter().enumerate() {
        let param = || format!("messages[{}].tool_call_id", index + 1 + offset);
        let Some(id) = result.tool_call_id.as_deref() else {
            return Err(invalid(param(), "is required: it names the call that is answered"));
        };
        let Some(&place) = ids.get(id) else {
            return Err(invalid(param(), format!("is {id:?}, which no call of the assistant message before has")));
        };
        if std::mem::replace(&mut answered[place], true) {
            return Err(invalid(param(), format!("is {id:?}, a call that is answered already")));
        }
        places.push(place);
    }
    if let Some(place) = answered.iter().position(|answered| !answered) {
        let id = caller.tool_calls[place].id.as_deref().unwrap_or_default();
        let message = format!("must each be answered by a tool message, but {id:?} is not");
        return Err(invalid(format!("messages[{index}].tool_calls"), message));
    }
    // Every place occurs exactly once, so following the cycles sorts in linear time.
    for start in 0..places.len() {
        while places[start] != start {
            let target = places[start];
            results.swap(start, target);
            places.swap(start, target);
        }
    }
    Ok(())
}

fn invalid(param: String, rule: impl std::fmt::Display) -> EncodeError {
    EncodeError::Invalid { message: format!("'{param}' {rule}"), param }
}
