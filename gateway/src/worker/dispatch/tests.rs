#![expect(clippy::unwrap_used, reason = "tests")]

use std::task::{Context, Poll, Waker};

use super::super::mailbox::Batch;
use super::*;

fn arrivals<const N: usize>(costs_us: [f64; N]) -> Vec<Arrival> {
    let numbered = (0..).zip(costs_us);
    numbered.map(|(choice, prefill_us)| Arrival { choice, prefill_us, ..Arrival::default() }).collect()
}

fn take(mailbox: &Mailbox) -> Batch {
    let mut batch = Batch::default();
    match mailbox.poll_take(&mut Context::from_waker(Waker::noop()), &mut batch) {
        Poll::Ready(Ok(())) => batch,
        other => unreachable!("expected rows, got {other:?}"),
    }
}

fn two_rows() -> wire::StepFrame {
    wire::StepFrame {
        step: 1,
        keys: vec![1, 2],
        token_counts: vec![2, 1],
        token_ids: vec![10, 11, 20],
        finish_reasons: vec![0, 2],
        cached_tokens: vec![0, 64],
        logprobs: Some(wire::LogprobColumns {
            rows: vec![1],
            counts: vec![1],
            token_ids: vec![20],
            logprobs: vec![-0.5],
            top_counts: vec![2],
            top_token_ids: vec![20, 21],
            top_logprobs: vec![-0.5, -1.0],
        }),
        prompt_logprobs: None,
    }
}

#[test]
fn rows_reach_their_own_mailbox() {
    let table = Table::default();
    let (first, second) = (Arc::new(Mailbox::new(1)), Arc::new(Mailbox::new(1)));
    assert_eq!(table.insert(&first, arrivals([0.0])).unwrap(), [1]);
    assert_eq!(table.insert(&second, arrivals([0.0])).unwrap(), [2]);
    assert_eq!(table.step(&two_rows()).unwrap(), Vec::<u64>::new());
    assert_eq!(take(&first).token_ids, [10, 11]);
    let batch = take(&second);
    assert_eq!((batch.token_ids.as_slice(), &batch.rows[0].end), ([20].as_slice(), &Some(End::Length)));
    assert_eq!(batch.rows[0].logprobs[0].top, [(20, -0.5), (21, -1.0)]);
    assert_eq!((table.in_flight().requests, batch.rows[0].cached_tokens), (1, 64));
}

#[test]
fn rows_of_forgotten_keys_are_skipped_with_their_tokens() {
    let table = Table::default();
    let mailbox = Arc::new(Mailbox::new(2));
    table.insert(&mailbox, arrivals([0.0; 2])).unwrap();
    assert!(table.remove(1));
    table.step(&two_rows()).unwrap();
    assert_eq!(take(&mailbox).token_ids, [20]);
}

#[test]
fn a_cut_request_is_reported_once_and_forgotten() {
    let table = Table::default();
    let mailbox = Arc::new(Mailbox::new(1));
    table.insert(&mailbox, arrivals([0.0])).unwrap();
    mailbox.cut(Cut::Aborted);
    assert_eq!(table.step(&two_rows()).unwrap(), [1]);
    assert_eq!(table.step(&two_rows()).unwrap(), Vec::<u64>::new());
}

#[test]
fn a_prompts_cost_is_pending_until_its_first_token_or_its_end() {
    let table = Table::default();
    let mailbox = Arc::new(Mailbox::new(4));
    table.insert(&mailbox, arrivals([1e3, 2e3, 4e3, 8e3])).unwrap();
    assert_eq!(table.in_flight(), InFlight { requests: 4, pending_prefill_us: 15e3 });
    table.step(&two_rows()).unwrap();
    assert_eq!(table.in_flight(), InFlight { requests: 3, pending_prefill_us: 12e3 });
    table.step(&two_rows()).unwrap();
    assert_eq!(table.in_flight(), InFlight { requests: 3, pending_prefill_us: 12e3 });
    assert!(table.remove(3));
    assert_eq!(table.in_flight(), InFlight { requests: 2, pending_prefill_us: 8e3 });
    table.close(&Failure::lost("the worker went away"));
    assert_eq!(table.in_flight(), InFlight::default());
}

#[test]
fn a_worker_has_survived_what_gave_a_token_or_ended_and_in_time_what_was_taken_back() {
    let (table, rest) = (Table::default(), Duration::from_secs(1_000));
    let mailbox = Arc::new(Mailbox::new(5));
    assert!(table.has_survived_all(rest));
    table.insert(&mailbox, arrivals([0.0; 5])).unwrap();
    table.step(&two_rows()).unwrap();
    table.step(&two_rows()).unwrap();
    table.fail(wire::RequestError { key: 3, ..wire::RequestError::default() });
    assert!(!table.has_survived_all(Duration::ZERO));
    table.note_survived(4);
    assert!(table.remove(4) && !table.has_survived_all(Duration::ZERO), "the fifth");
    assert!(table.remove(5) && table.has_survived_all(Duration::ZERO));
    assert!(!table.has_survived_all(rest), "the worker may be computing it still");
    assert!(table.remove(1));
}

#[test]
fn columns_that_do_not_fit_break_the_stream() {
    let spoil: [fn(&mut wire::StepFrame); 5] = [
        |step| step.token_ids.push(1),
        |step| step.cached_tokens.clear(),
        |step| step.token_counts[0] = u32::MAX,
        |step| step.logprobs.as_mut().unwrap().rows[0] = 2,
        |step| step.logprobs.as_mut().unwrap().top_counts[0] = 3,
    ];
    for change in spoil {
        let mut step = two_rows();
        change(&mut step);
        assert!(matches!(Table::default().step(&step), Err(BrokenStream::Columns(_))));
    }
}

#[test]
fn the_end_of_the_stream_fails_what_is_in_flight_and_what_comes_later() {
    let table = Table::default();
    let mailbox = Arc::new(Mailbox::new(1));
    table.insert(&mailbox, arrivals([0.0])).unwrap();
    let failure = Failure::lost("the worker went away");
    table.close(&failure);
    assert_eq!(take(&mailbox).rows[0].end, Some(End::Failed(Box::new(failure.clone()))));
    assert_eq!(table.insert(&mailbox, arrivals([0.0])), Err(failure));
}
