//! One turn: the model's answer as it comes, and what its calls return, until it has said what it wants to say.

use std::time::Instant;

use tokio::runtime::Runtime;

use super::Health;
use super::client::{Client, ClientError, News};
use super::conversation::{Conversation, Reply};
use super::input::{Input, Line};
use super::screen::Screen;

/// Why no more of an answer came.
enum Ended {
    Finished { reason: String, num_tokens: Option<u32> },
    Stopped,
    Failed(ClientError),
}

/// Lets the model answer what was said last.
///
/// # Errors
/// The input cannot be read.
pub(super) fn answer(
    runtime: &Runtime,
    client: &Client,
    conversation: &mut Conversation,
    input: &mut Input,
    screen: &mut Screen,
) -> anyhow::Result<Health> {
    loop {
        let mut reply = Reply::default();
        let started = Instant::now();
        let ended = runtime.block_on(async {
            let reading = read(client, conversation, &mut reply, screen);
            if input.is_interactive() {
                tokio::select! {
                    ended = reading => ended,
                    // Dropping the stream closes the connection, and with it the request.
                    _ = tokio::signal::ctrl_c() => Ended::Stopped,
                }
            } else {
                reading.await
            }
        });
        screen.end_of_answer();
        let calls = reply.calls.clone();
        match ended {
            Ended::Finished { reason, num_tokens } => {
                screen.summary(&reason, num_tokens, started.elapsed());
                conversation.reply(reply);
            }
            Ended::Stopped => {
                screen.note("stopped");
                conversation.reply_cut_short(reply);
                return Ok(Health::Good);
            }
            Ended::Failed(error) => {
                screen.error(&error.to_string());
                conversation.take_back();
                return Ok(Health::Failed);
            }
        }
        if calls.is_empty() {
            return Ok(Health::Good);
        }
        for call in calls {
            match input.read(&format!("what does {} return? ", call.name))? {
                Line::Text(result) => conversation.returned(&call.id, &result),
                // Calls without results cannot be sent again.
                Line::Interrupted | Line::End => {
                    conversation.take_back();
                    return Ok(Health::Good);
                }
            }
        }
    }
}

async fn read(client: &Client, conversation: &Conversation, reply: &mut Reply, screen: &mut Screen) -> Ended {
    let mut events = match client.ask(&conversation.request()).await {
        Ok(events) => events,
        Err(error) => return Ended::Failed(error),
    };
    let (mut reason, mut num_tokens) = (None, None);
    loop {
        match events.next().await {
            Ok(Some(news)) => {
                screen.show(&news);
                match &news {
                    News::Finish(name) => reason = Some(name.clone()),
                    News::Usage { completion_tokens } => num_tokens = Some(*completion_tokens),
                    News::Reasoning(_) | News::Content(_) | News::Call { .. } | News::Arguments { .. } => {}
                }
                reply.add(news);
            }
            Ok(None) => {
                return match reason {
                    Some(reason) => Ended::Finished { reason, num_tokens },
                    None => Ended::Failed(ClientError::CutOff),
                };
            }
            Err(error) => return Ended::Failed(error),
        }
    }
}
