//! A model check of the handover of pages from a prefill worker to a decode worker, with all that may go wrong.
//!
//! One request, two attempts at most, as many pages in each worker as the prompt has, so that the second attempt is given
//! the pages of the first. Every order in which messages, orders and news can be taken is explored, and every place at
//! which a bounded number of faults can strike: restarts of all three parts, lost and repeated messages, cut
//! streams and connections, damaged pages, timers that run out too early, clients that leave, pages that others use
//! meanwhile. Promises are `always` properties of `World`; among them that wherever nothing can happen any more, the request
//! is answered and nothing is held. Broken variants (`Variant`) show that each check of the protocol is needed.
//!
//! # What corresponds to what
//!
//! | here | there |
//! |---|---|
//! | `SendingLeg`, `ReceivingLeg`, their methods and `Action`s | the classes of that name in `worker/baleen_worker/transfer`; `lease_ends` and `no_progress` are `tick` when the time is over |
//! | `FromDecode`, `FromPrefill`, `Order`, `Report` | `transfer/{messages,orders,actions}.py` |
//! | `Prefill::{hear, serve, act, attach, give_up_early, carry_out}` | `Server` in `transfer/serving.py` |
//! | `Decode::{connect, hear, lose, act, carry_out}` | `Fetcher` in `transfer/fetching.py`; bytes are written in place, before their verdict |
//! | `Prefill::{take, compute, preempt, take_news}`, `Decode::{take, take_news, give_token}` | `legs.py`, `handover.py` and `roster.py`, each step an event of its own |
//! | `Gateway` | `Attempts` and `Placement` in `gateway/src/generate` |
//! | `Stream`, `Row`, `Command` | the `Connect` stream of the contract |
//!
//! That the legs are the worker's own is tested: `courses.jsonl` holds courses of calls with what these legs answer, and
//! `worker/tests/core/test_transfer_courses.py` makes the same calls there.
//!
//! # What is left out
//!
//! Time but for timers that run out; log-probabilities; several pages in one read; a prefix that the decode worker has
//! already; more than one request. A digest never collides. Greetings are one step, which compares the boot epoch.

pub mod breach;
pub mod courses;
pub mod decode;
pub mod faults;
pub mod gateway;
pub mod links;
pub mod messages;
pub mod prefill;
pub mod receiving;
pub mod sending;
pub mod variant;
pub mod world;
