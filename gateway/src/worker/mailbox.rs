//! Where rows of one client request wait between the stream's reader and the response that is being written.
//!
//! The reader never waits: rows that nobody takes pile up to a bound, then the request is cut. Tokens of one choice
//! that arrive while the client is busy are merged, so a late taker gets one larger row instead of many small ones.

use std::mem;
use std::sync::{Mutex, PoisonError};
use std::task::{Context, Poll, Waker};

use super::Failure;
use crate::openai::logprobs::TokenLogprob;

/// What may wait for a slow client, per choice. At four bytes a token this is most of a context window.
const MAX_UNREAD_BYTES_PER_CHOICE: usize = 256 * 1024;

/// How a choice ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum End {
    /// A stop token, which is the row's last token.
    Stop,
    /// `max_tokens` or the context length.
    Length,
    Abort,
    /// Of a prefill leg: the decode leg has all its pages.
    HandedOver,
    Failed(Box<Failure>),
}

/// Which part of which attempt speaks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Origin {
    pub attempt: u32,
    /// The leg that computes the prompt for another one, and sends no token.
    pub is_prefill_leg: bool,
}

/// News of one choice: `num_tokens` further tokens of the batch's `token_ids`, and what came with them.
#[derive(Debug, Default)]
pub struct Row {
    pub choice: u32,
    pub origin: Origin,
    pub num_tokens: u32,
    /// Prompt tokens that came from a cache; final from the first token on.
    pub cached_tokens: u32,
    pub logprobs: Vec<TokenLogprob>,
    pub prompt_logprobs: Vec<TokenLogprob>,
    pub end: Option<End>,
}

/// Rows in order of arrival; `token_ids` holds their tokens one after another.
#[derive(Debug, Default)]
pub struct Batch {
    pub rows: Vec<Row>,
    pub token_ids: Vec<u32>,
}

impl Batch {
    /// Empties the batch and keeps its memory.
    pub fn clear(&mut self) {
        self.rows.clear();
        self.token_ids.clear();
    }
}

/// Whether the rows still have a taker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cut {
    /// The client did not keep up with the tokens.
    SlowClient,
    /// An operator asked for it.
    Aborted,
}

/// See the module. One writer (the stream's reader) and one taker.
#[derive(Debug)]
pub struct Mailbox {
    max_unread_bytes: usize,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    batch: Batch,
    unread_bytes: usize,
    waker: Option<Waker>,
    cut: Option<Cut>,
}

impl Mailbox {
    /// A mailbox for a client request of `num_choices` choices.
    #[must_use]
    pub fn new(num_choices: usize) -> Self {
        Self {
            max_unread_bytes: MAX_UNREAD_BYTES_PER_CHOICE.saturating_mul(num_choices.max(1)),
            state: Mutex::default(),
        }
    }

    /// Adds a row. The waker, if any, is to be woken once the caller's locks are released.
    ///
    /// # Errors
    /// The request was cut: nobody will take the row, and the worker should be told to stop.
    pub fn push(&self, row: Row, token_ids: &[u32]) -> Result<Option<Waker>, Cut> {
        let mut state = self.lock();
        if let Some(cut) = state.cut {
            return Err(cut);
        }
        let bytes = size_of_val(token_ids) + row_bytes(&row);
        if state.unread_bytes + bytes > self.max_unread_bytes {
            state.batch = Batch::default();
            state.cut = Some(Cut::SlowClient);
            if let Some(waker) = state.waker.take() {
                waker.wake();
            }
            return Err(Cut::SlowClient);
        }
        state.batch.token_ids.extend_from_slice(token_ids);
        state.unread_bytes += bytes;
        match state.batch.rows.last_mut() {
            Some(last) if may_merge(last, &row) => {
                last.num_tokens += row.num_tokens;
                last.cached_tokens = row.cached_tokens;
                last.end = row.end;
            }
            _ => {
                // One row is all that most requests ever have waiting, and thousands of mailboxes keep their memory.
                if state.batch.rows.capacity() == 0 {
                    state.batch.rows.reserve_exact(1);
                }
                state.batch.rows.push(row);
            }
        }
        Ok(state.waker.take())
    }

    /// Swaps everything that waits into `batch`, which must be empty; its memory is reused for what comes next.
    pub fn poll_take(&self, context: &mut Context<'_>, batch: &mut Batch) -> Poll<Result<(), Cut>> {
        let mut state = self.lock();
        if let Some(cut) = state.cut {
            return Poll::Ready(Err(cut));
        }
        if state.batch.rows.is_empty() {
            match &mut state.waker {
                Some(waker) => waker.clone_from(context.waker()),
                empty => *empty = Some(context.waker().clone()),
            }
            return Poll::Pending;
        }
        mem::swap(&mut state.batch, batch);
        state.unread_bytes = 0;
        Poll::Ready(Ok(()))
    }

    /// Ends the request from outside: its taker is told, rows that still arrive are dropped.
    pub fn cut(&self, cut: Cut) {
        let waker = {
            let mut state = self.lock();
            state.cut.get_or_insert(cut);
            state.waker.take()
        };
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn may_merge(last: &Row, next: &Row) -> bool {
    let plain = |row: &Row| row.logprobs.is_empty() && row.prompt_logprobs.is_empty();
    (last.choice, last.origin) == (next.choice, next.origin) && last.end.is_none() && plain(last) && plain(next)
}

/// Scores of the prompt do not count: they come before the first token, however fast the client reads, and their number
/// is bounded by the prompt that it sent.
fn row_bytes(row: &Row) -> usize {
    row.logprobs.iter().map(|score| size_of::<TokenLogprob>() + size_of_val(score.top.as_slice())).sum()
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "tests")]

    use std::task::Waker;

    use super::*;

    fn row(choice: u32, num_tokens: u32) -> Row {
        Row { choice, num_tokens, ..Row::default() }
    }

    fn take(mailbox: &Mailbox) -> Poll<Result<Batch, Cut>> {
        let mut batch = Batch::default();
        mailbox.poll_take(&mut Context::from_waker(Waker::noop()), &mut batch).map_ok(|()| batch)
    }

    #[test]
    fn rows_of_one_choice_merge_until_its_end() {
        let mailbox = Mailbox::new(2);
        mailbox.push(row(0, 2), &[1, 2]).unwrap();
        mailbox.push(row(0, 1), &[3]).unwrap();
        mailbox.push(row(1, 1), &[9]).unwrap();
        mailbox.push(Row { end: Some(End::Stop), ..row(0, 1) }, &[4]).unwrap();
        let Poll::Ready(Ok(batch)) = take(&mailbox) else { unreachable!("rows wait") };
        let shape: Vec<_> = batch.rows.iter().map(|row| (row.choice, row.num_tokens, row.end.is_some())).collect();
        assert_eq!(shape, [(0, 3, false), (1, 1, false), (0, 1, true)]);
        assert_eq!(batch.token_ids, [1, 2, 3, 9, 4]);
        assert!(take(&mailbox).is_pending());
    }

    #[test]
    fn rows_of_two_attempts_stay_apart() {
        let mailbox = Mailbox::new(1);
        let again = Origin { attempt: 1, is_prefill_leg: false };
        mailbox.push(row(0, 1), &[1]).unwrap();
        mailbox.push(Row { origin: again, ..row(0, 1) }, &[2]).unwrap();
        let Poll::Ready(Ok(batch)) = take(&mailbox) else { unreachable!("rows wait") };
        assert_eq!(batch.rows.iter().map(|row| row.origin.attempt).collect::<Vec<_>>(), [0, 1]);
    }

    #[test]
    fn a_taker_that_stays_away_is_cut() {
        let mailbox = Mailbox::new(1);
        let tokens = vec![7; 1024];
        let mut pushed = 0;
        let cut = loop {
            match mailbox.push(row(0, 1024), &tokens) {
                Ok(_) => pushed += tokens.len(),
                Err(cut) => break cut,
            }
        };
        assert_eq!(cut, Cut::SlowClient);
        assert_eq!(pushed * 4, MAX_UNREAD_BYTES_PER_CHOICE);
        assert!(matches!(take(&mailbox), Poll::Ready(Err(Cut::SlowClient))));
    }

    #[test]
    fn scores_of_a_long_prompt_are_no_reason_to_cut() {
        let mailbox = Mailbox::new(1);
        let score = TokenLogprob { token_id: 1, logprob: Some(-1.0), top: vec![(1, -1.0); 20] };
        for _ in 0..4 {
            let scored = Row { prompt_logprobs: vec![score.clone(); 2048], ..row(0, 0) };
            mailbox.push(scored, &[]).unwrap();
        }
        assert!(take(&mailbox).is_ready());
    }

    #[test]
    fn taking_makes_room_again() {
        let mailbox = Mailbox::new(1);
        let tokens = vec![7; MAX_UNREAD_BYTES_PER_CHOICE / 4];
        for _ in 0..3 {
            mailbox.push(row(0, 1), &tokens).unwrap();
            assert!(take(&mailbox).is_ready());
        }
    }
}
