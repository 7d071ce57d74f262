//! Courses of calls of single legs, drawn at random, with what the model's legs answer: written down as JSON, one a line,
//! for `worker/tests/core/test_transfer_courses.py`, which makes the same calls of the worker's own legs.
//!
//! A line is `[leg, [[call, arguments, actions], …]]`; `actions` is the text "protocol error" where the peer breaks it.

use serde_json::{Value, json};

use crate::messages::{Action, Announced, Content, FromDecode, FromPrefill, ProtocolError, Read, Report};
use crate::receiving::{Patience, ReceivingLeg};
use crate::sending::SendingLeg;
use crate::variant::Variant;

/// Pages of every prompt.
pub const NUM_PAGES: u8 = 3;
/// Those of `receiving.py`.
pub const PATIENCE: Patience = Patience { bad_reads: 4, losses: 5 };
const MAX_CALLS: usize = 24;

/// `SplitMix64`: these courses are the same with every library and on every machine.
struct Dice(u64);

impl Dice {
    /// Below `sides`.
    fn roll(&mut self, sides: u8) -> u8 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        u8::try_from((mixed ^ (mixed >> 31)) % u64::from(sides)).unwrap_or_default()
    }
}

/// A course as it is written down.
struct Course {
    leg: &'static str,
    calls: Vec<Value>,
}

impl Course {
    fn note(&mut self, call: &str, arguments: &Value, actions: &[Action]) {
        let actions: Vec<Value> = actions.iter().map(spelled).collect();
        self.calls.push(json!([call, arguments, actions]));
    }

    /// False where the course ends with it.
    fn note_result(&mut self, call: &str, arguments: &Value, result: &Result<Vec<Action>, ProtocolError>) -> bool {
        match result {
            Ok(actions) => self.note(call, arguments, actions),
            Err(ProtocolError) => self.calls.push(json!([call, arguments, "protocol error"])),
        }
        result.is_ok()
    }
}

/// So many courses of each leg, a line each.
#[must_use]
pub fn courses(count: u64) -> String {
    let lines = (0..count).flat_map(|seed| [sending(Dice(2 * seed)), receiving(Dice(2 * seed + 1))]);
    lines.map(|course| format!("{}\n", json!([course.leg, course.calls]))).collect()
}

fn sending(mut dice: Dice) -> Course {
    let mut course = Course { leg: "sending", calls: Vec::new() };
    let mut leg = SendingLeg::default();
    let (mut num_announced, mut generation, mut is_final, mut is_attached) = (0, 1, false, false);
    for _ in 0..MAX_CALLS {
        let read = Read { first: dice.roll(NUM_PAGES), page: 0, generation: generation - dice.roll(4) / 3 };
        let read = Read { page: read.first + 4 + dice.roll(8) / 7, ..read };
        let named = json!([read.first, read.page, read.generation]);
        match dice.roll(14) {
            0..4 if num_announced < NUM_PAGES => {
                let digest = Content::Of(0, num_announced);
                let announced = Announced { page: num_announced + 4, generation, digest };
                let actions = leg.announce(num_announced, announced);
                course.note("announce", &json!([num_announced, spelled_page(&announced)]), &actions);
                num_announced += 1;
            }
            0..4 if !is_final => {
                course.note("finish", &json!([]), &leg.finish());
                is_final = true;
            }
            4 if !is_final && dice.roll(3) == 0 => {
                course.note("withdraw", &json!([]), &leg.withdraw());
                (num_announced, generation) = (0, generation + 1);
            }
            5..7 => {
                course.note("attach", &json!([]), &leg.attach());
                is_attached = true;
            }
            7 if is_attached => {
                leg.detach();
                course.note("detach", &json!([]), &[]);
                is_attached = false;
            }
            8..10 if is_attached => {
                let heard = leg.hear(FromDecode::Read(read));
                course.note_result("read", &named, &heard);
            }
            10..12 => {
                let after = read.generation + dice.roll(3) / 2;
                let said = Action::ToDecode(leg.copied(read, after, Variant::Whole));
                course.note("copied", &json!([named, after]), &[said]);
            }
            12 if is_attached && dice.roll(2) == 0 => {
                let message = if dice.roll(4) == 0 { FromDecode::Want } else { FromDecode::Ack };
                let name = if message == FromDecode::Want { "want" } else { "ack" };
                course.note_result(name, &json!([]), &leg.hear(message));
                return course;
            }
            13 if leg.is_leased() && dice.roll(2) == 0 => {
                course.note("lease ends", &json!([]), &leg.lease_ends());
                return course;
            }
            13 if dice.roll(6) == 0 => {
                course.note("cancel", &json!([]), &leg.cancel());
                return course;
            }
            _ => {}
        }
    }
    course
}

fn receiving(mut dice: Dice) -> Course {
    let mut course = Course { leg: "receiving", calls: Vec::new() };
    let mut leg = ReceivingLeg::new(NUM_PAGES);
    course.note("start", &json!([]), &leg.start());
    let (mut is_connected, mut is_reserved) = (false, false);
    for _ in 0..MAX_CALLS {
        if leg.over {
            break;
        }
        if !is_connected {
            course.note("connected", &json!([]), &leg.connected());
            is_connected = true;
        }
        if !is_reserved && dice.roll(4) == 0 {
            course.note("reserve", &json!([]), &leg.reserve());
            is_reserved = true;
        }
        let (first, generation) = (dice.roll(NUM_PAGES), 1 + dice.roll(10) / 9);
        let goes_on = match dice.roll(24) {
            0 => {
                course.note("lost", &json!([]), &leg.lost(PATIENCE));
                is_connected = false;
                true
            }
            1 if dice.roll(2) == 0 => {
                let (name, actions) = match dice.roll(3) {
                    0 => ("cancel", leg.cancel()),
                    1 => ("rejected", leg.rejected()),
                    _ => ("no progress", leg.no_progress()),
                };
                course.note(name, &json!([]), &actions);
                false
            }
            2..12 if leg.expected_pages(first).is_ok() || dice.roll(20) == 0 => {
                let content = if dice.roll(6) == 0 { Content::Damaged } else { Content::Of(0, first) };
                let result = leg.received((first, generation), content, PATIENCE, Variant::Whole);
                course.note_result("received", &json!([first, generation, number_of(content)]), &result)
            }
            _ => {
                let message = drawn(&mut dice, first, generation);
                let result = leg.hear(&message, PATIENCE);
                course.note_result("hear", &spelled(&Action::ToDecode(message)), &result)
            }
        };
        if !goes_on {
            break;
        }
    }
    course
}

/// Something that a prefill worker says.
fn drawn(dice: &mut Dice, first: u8, generation: u8) -> FromPrefill {
    let announced = |place| Announced { page: place + 4, generation, digest: Content::Of(0, place) };
    match dice.roll(16) {
        0..8 => {
            let end = (first + 1 + dice.roll(NUM_PAGES)).min(NUM_PAGES);
            FromPrefill::Chunk { first, pages: (first..end).map(announced).collect() }
        }
        8..11 => FromPrefill::Final,
        11..13 => FromPrefill::Stale { first },
        13 if dice.roll(3) == 0 => FromPrefill::Refused,
        14 if dice.roll(2) == 0 => FromPrefill::Released,
        _ => FromPrefill::Wait,
    }
}

fn number_of(content: Content) -> u8 {
    match content {
        Content::Of(attempt, place) => 1 + 16 * attempt + place,
        Content::Foreign => 253,
        Content::Damaged => 254,
        Content::TooLong => 255,
    }
}

fn spelled_page(announced: &Announced) -> Value {
    json!([announced.page, announced.generation, number_of(announced.digest)])
}

/// Names are those of the worker's classes, in small letters.
fn spelled(action: &Action) -> Value {
    match action {
        Action::ToDecode(message) => match message {
            FromPrefill::Wait => json!(["wait"]),
            FromPrefill::Chunk { first, pages } => {
                json!(["chunk", first, pages.iter().map(spelled_page).collect::<Vec<_>>()])
            }
            FromPrefill::Sealed { first, generation } => json!(["sealed", first, generation]),
            FromPrefill::Stale { first } => json!(["stale", first]),
            FromPrefill::Final => json!(["final"]),
            FromPrefill::Released => json!(["released"]),
            FromPrefill::Refused => json!(["refused"]),
        },
        Action::ToPrefill(FromDecode::Want) => json!(["want"]),
        Action::ToPrefill(FromDecode::Ack) => json!(["ack"]),
        Action::ToPrefill(FromDecode::Read(read)) => json!(["read", read.first, read.page, read.generation]),
        Action::Connect => json!(["connect"]),
        Action::Close => json!(["close"]),
        Action::Serve(read) => json!(["serve", read.first, read.page, read.generation]),
        Action::Store(first) => json!(["store", first]),
        Action::Report(report) => json!([match report {
            Report::Begun => "begun",
            Report::Arrived => "arrived",
            Report::Failed => "failed",
            Report::Stopped => "stopped",
            Report::HandedOver => "handedover",
            Report::LeaseEnded => "leaseended",
        }]),
    }
}
