#![expect(clippy::unwrap_used, reason = "tests")]

//! Requests on pairs of workers that die, refuse and fall silent, in simulated time: what clients may never see.
//!
//! A failure prints its seed; `BALEEN_SIMULATION_SEEDS` asks for more of them.

use std::time::Duration;

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use self::world::{NUM_REQUESTS, Request, World};

mod world;

const SEEDS: u64 = 1_000;

/// Plays each of so many seeds, and names the one that fails.
fn on_seeds(count: u64, play: impl Fn(u64) + std::panic::RefUnwindSafe) {
    for seed in 0..count {
        let outcome = std::panic::catch_unwind(|| play(seed));
        assert!(outcome.is_ok(), "seed {seed}");
    }
}

#[test]
fn no_schedule_of_faults_loses_repeats_or_mixes_a_token() {
    let asked = std::env::var("BALEEN_SIMULATION_SEEDS").ok().and_then(|count| count.parse().ok());
    on_seeds(asked.unwrap_or(SEEDS), |seed| World::new(seed).run());
}

/// Both prefill workers are killed within a second, with requests on them and more to come.
fn kill_a_whole_role(seed: u64) {
    let mut world = World::of(2, 2, StdRng::seed_from_u64(seed));
    (0..NUM_REQUESTS / 2).for_each(|_| world.arrive());
    world.look_after();
    for number in [0, 1] {
        world.die(number);
        // The rows of all that died with it, then the next one dies within the second.
        for _ in 0..NUM_REQUESTS {
            world.deliver_from(number);
        }
        world.now += Duration::from_millis(world.random.random_range(1..900));
        world.look_after();
    }
    assert!(world.requests.iter().all(|request| !request.is_accused), "a request was called the cause");
    world.run();
}

#[test]
fn killing_a_whole_role_accuses_no_request() {
    on_seeds(SEEDS / 5, kill_a_whole_role);
}

/// Two deadly requests, one after the other, among neighbours that come all the time. Ranks are dead for a while before
/// anybody knows.
fn send_deadly_requests(seed: u64) {
    let mut world = World::of(3, 2, StdRng::seed_from_u64(seed));
    world.is_calm = true;
    (0..NUM_REQUESTS / 4).for_each(|_| world.arrive());
    for _ in 0..2 {
        // Of a gateway that has enough to do for all retries.
        (0..200).for_each(|_| world.limits.note_request(world.now));
        world.arrive();
        let deadly = world.requests.len() - 1;
        world.requests[deadly].is_deadly = true;
        let are_up = |world: &World| world.workers.iter().all(|worker| worker.down_until.is_none());
        for _ in 0..10_000 {
            world.now += Duration::from_millis(world.random.random_range(1..20));
            world.step();
            if world.requests[deadly].ends > 0 && are_up(&world) {
                break;
            }
        }
        let request = &world.requests[deadly];
        let Request { attempts, victims, ends, .. } = request;
        assert!(request.is_accused && *victims == 2, "{victims} workers, {ends} ends, {attempts:?}");
    }
    let mut neighbours = world.requests.iter().filter(|request| !request.is_deadly);
    assert!(neighbours.all(|request| !request.is_accused), "a neighbour was called the cause");
    world.run();
}

#[test]
fn a_deadly_request_takes_two_workers_with_it_and_no_neighbour_is_accused() {
    on_seeds(SEEDS / 5, send_deadly_requests);
}
