//! What is to be sent to a worker next. Everything that gathers between two wake-ups of the stream leaves in one frame.

use std::mem;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::{SystemTime, UNIX_EPOCH};

use futures::Stream;
use tokio::time::{Interval, MissedTickBehavior};

use super::{HEARTBEAT_INTERVAL, PROTOCOL_VERSION, wire};

/// Prompt tokens after which a frame is full: a frame stays far below gRPC's usual 4 MiB limit.
const MAX_FRAME_PROMPT_TOKENS: usize = 256 * 1024;

/// Submits and aborts that wait for the stream. It holds at most the admitted requests and one abort for each.
#[derive(Debug, Default)]
pub(super) struct Outbox {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    submits: Vec<wire::Submit>,
    aborts: Vec<u64>,
    waker: Option<Waker>,
    closed: bool,
}

impl Outbox {
    pub(super) fn submit(&self, submits: impl IntoIterator<Item = wire::Submit>) {
        self.change(|state| state.submits.extend(submits));
    }

    /// A submit that has not left yet is taken back instead of being sent and aborted.
    pub(super) fn abort(&self, key: u64) {
        self.change(|state| match state.submits.iter().position(|submit| submit.key == key) {
            Some(index) => drop(state.submits.remove(index)),
            None => state.aborts.push(key),
        });
    }

    /// Ends the stream: the worker aborts what is left on it.
    pub(super) fn close(&self) {
        self.change(|state| state.closed = true);
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        let waker = {
            let mut state = self.lock();
            if state.closed {
                return;
            }
            change(&mut state);
            state.waker.take()
        };
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The gateway's half of a `Connect` stream: `hello` first, then numbered frames as the outbox fills.
pub(super) struct Outbound {
    outbox: Arc<Outbox>,
    sequence: u64,
    hello: Option<wire::Hello>,
    heartbeat: Interval,
}

impl Outbound {
    pub(super) fn new(outbox: Arc<Outbox>, gateway_id: String, gateway_epoch: u64) -> Self {
        let mut heartbeat = tokio::time::interval(HEARTBEAT_INTERVAL);
        heartbeat.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let hello = Some(wire::Hello { protocol_version: PROTOCOL_VERSION, gateway_id, gateway_epoch });
        Self { outbox, sequence: 0, hello, heartbeat }
    }

    fn number(&mut self, mut frame: wire::GatewayFrame) -> Poll<Option<wire::GatewayFrame>> {
        self.sequence += 1;
        frame.sequence = self.sequence;
        Poll::Ready(Some(frame))
    }
}

impl Stream for Outbound {
    type Item = wire::GatewayFrame;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if let Some(hello) = self.hello.take() {
            return self.number(wire::GatewayFrame { hello: Some(hello), ..Default::default() });
        }
        let due = self.heartbeat.poll_tick(context).is_ready();
        let mut frame = wire::GatewayFrame::default();
        {
            let mut state = self.outbox.lock();
            if state.closed {
                return Poll::Ready(None);
            }
            frame.submits = take_frame(&mut state.submits);
            frame.aborts = mem::take(&mut state.aborts).into_iter().map(|key| wire::Abort { key }).collect();
            if frame.submits.is_empty() && frame.aborts.is_empty() && !due {
                state.waker = Some(context.waker().clone());
                return Poll::Pending;
            }
        }
        if due {
            frame.heartbeat = Some(wire::Heartbeat { sent_unix_us: unix_us() });
        }
        self.number(frame)
    }
}

/// As many of the oldest submits as fit into one frame, at least one if there are any.
fn take_frame(submits: &mut Vec<wire::Submit>) -> Vec<wire::Submit> {
    let mut num_tokens = 0;
    let fitting = submits.iter().take_while(|submit| {
        let first = num_tokens == 0;
        num_tokens += submit.prompt_token_ids.len();
        first || num_tokens <= MAX_FRAME_PROMPT_TOKENS
    });
    let count = fitting.count();
    if count == submits.len() { mem::take(submits) } else { submits.drain(..count).collect() }
}

fn unix_us() -> u64 {
    let elapsed = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(elapsed.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "tests")]

    use futures::StreamExt;

    use super::*;

    fn submit(key: u64, num_tokens: usize) -> wire::Submit {
        wire::Submit { key, prompt_token_ids: vec![1; num_tokens], ..Default::default() }
    }

    async fn next_payload(stream: &mut Outbound) -> wire::GatewayFrame {
        loop {
            let frame = stream.next().await.unwrap();
            if !frame.submits.is_empty() || !frame.aborts.is_empty() {
                return frame;
            }
        }
    }

    #[tokio::test]
    async fn what_gathers_leaves_in_one_numbered_frame() {
        let outbox = Arc::new(Outbox::default());
        let mut stream = Outbound::new(outbox.clone(), "g".into(), 7);
        let hello = stream.next().await.unwrap();
        assert_eq!((hello.sequence, hello.hello.unwrap().gateway_epoch), (1, 7));
        outbox.submit([submit(1, 3), submit(2, 3)]);
        outbox.submit([submit(3, 3)]);
        outbox.abort(2);
        outbox.abort(9);
        let frame = next_payload(&mut stream).await;
        assert_eq!(frame.submits.iter().map(|submit| submit.key).collect::<Vec<_>>(), [1, 3]);
        assert_eq!(frame.aborts.iter().map(|abort| abort.key).collect::<Vec<_>>(), [9]);
        assert!(frame.sequence >= 2);
        outbox.close();
        assert!(stream.next().await.is_none());
    }

    #[tokio::test]
    async fn large_prompts_are_spread_over_frames_in_order() {
        let outbox = Arc::new(Outbox::default());
        let mut stream = Outbound::new(outbox.clone(), "g".into(), 7);
        stream.next().await.unwrap();
        outbox.submit([submit(1, MAX_FRAME_PROMPT_TOKENS + 5), submit(2, 10), submit(3, MAX_FRAME_PROMPT_TOKENS)]);
        let mut keys = Vec::new();
        for _ in 0..3 {
            let frame = next_payload(&mut stream).await;
            keys.push(frame.submits.iter().map(|submit| submit.key).collect::<Vec<_>>());
        }
        assert_eq!(keys, [vec![1], vec![2], vec![3]]);
    }
}
