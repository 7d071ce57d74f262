//! The protocol within bounds, exhaustively, and each broken variant of it, which must be found out.
#![expect(clippy::print_stdout, reason = "how much was explored is seen with --nocapture")]

use baleen_handover_model::faults::Fault;
use baleen_handover_model::receiving::Patience;
use baleen_handover_model::variant::Variant;
use baleen_handover_model::world::World;
use stateright::{Checker as _, HasDiscoveries, Model as _};

const RESTARTS: &[Fault] = &[Fault::RestartsPrefill, Fault::RestartsDecode, Fault::RestartsGateway];

fn world(num_pages: u8, kinds: &'static [Fault], num_faults: u32) -> World {
    World { variant: Variant::Whole, num_pages, num_faults, kinds, patience: Patience { bad_reads: 1, losses: 2 } }
}

fn checker(world: World) -> impl stateright::Checker<World> {
    let threads = std::thread::available_parallelism().map_or(1, |count| count.get().min(4));
    world.checker().threads(threads).finish_when(HasDiscoveries::AnyFailures).spawn_bfs().join()
}

/// Every course of events keeps the promises, and what should be possible is.
fn holds(world: World) {
    let bounds = format!("{} pages, {} faults", world.num_pages, world.num_faults);
    let checker = checker(world);
    println!("{bounds}: {} states, {} steps deep", checker.unique_state_count(), checker.max_depth());
    checker.assert_properties();
}

/// Some course of events breaks this promise.
fn is_found_out(variant: Variant, promise: &'static str, kinds: &'static [Fault]) {
    let num_faults = u32::try_from(kinds.len()).unwrap_or_default();
    let checker = checker(World { variant, ..world(2, kinds, num_faults) });
    let path = checker.assert_any_discovery(promise);
    println!("{variant:?}: {} states, {} steps to it", checker.unique_state_count(), path.into_actions().len());
}

#[test]
fn any_single_fault_keeps_the_promises() {
    holds(world(2, &Fault::ALL, 1));
}

/// Minutes of work: `make test-all` has it done.
#[test]
fn any_two_faults_keep_the_promises() {
    if std::env::var_os("BALEEN_TEST_ALL").is_some() {
        holds(world(1, &Fault::ALL, 2));
    }
}

#[test]
fn every_worker_and_the_gateway_may_restart() {
    holds(world(2, RESTARTS, 3));
}

const STALE: &str = "no stale page is accepted";
const STRANGER: &str = "a page is written for its owner alone";
const REST: &str = "at rest all is answered and nothing held";
const TOKEN: &str = "a token comes once";

#[test]
fn a_generation_that_nobody_checks_is_found_out() {
    is_found_out(Variant::GenerationNotChecked, STALE, &[Fault::CutsDecodeStream]);
}

#[test]
fn a_digest_that_is_trusted_is_found_out() {
    is_found_out(Variant::DigestTrusted, STALE, &[Fault::DamagesPage]);
}

#[test]
fn a_length_that_is_trusted_is_found_out() {
    is_found_out(Variant::LengthTrusted, STRANGER, &[Fault::LengthensPage]);
}

#[test]
fn a_lease_without_end_is_found_out() {
    is_found_out(Variant::LeaseNeverEnds, REST, &[Fault::LosesDecodeCommand]);
}

#[test]
fn legs_without_attempts_in_their_names_are_found_out() {
    is_found_out(Variant::AttemptNotInKey, STALE, &[Fault::LosesPatienceEarly]);
}

#[test]
fn an_abort_that_is_dropped_is_found_out() {
    is_found_out(Variant::AbortDropped, REST, &[Fault::ClientLeaves]);
}

#[test]
fn pages_that_are_granted_before_the_transfer_has_stopped_are_found_out() {
    is_found_out(Variant::StoppedNotAwaited, STRANGER, &[Fault::ClientLeaves]);
}

#[test]
fn rows_of_earlier_attempts_that_are_heard_are_found_out() {
    is_found_out(Variant::EveryRowHeard, TOKEN, &[Fault::EndsLeaseEarly]);
}

#[test]
fn a_prefill_leg_that_nobody_misses_in_a_replay_is_found_out() {
    is_found_out(Variant::AnyTokenIsEnough, REST, &[Fault::RestartsDecode, Fault::LosesDecodeCommand]);
}
