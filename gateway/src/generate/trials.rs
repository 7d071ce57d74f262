//! Who is under trial, and who may be placed where: the one owner of both.
//!
//! A suspect is tried on workers that nobody else is given meanwhile, so that their next death names the right one.
//! Everybody looks at the trials and is placed in one step: a newcomer cannot come to a worker between the look of a
//! suspect and its trial. Knows lives of workers and times, neither streams nor submissions.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::{Duration, Instant};

use crate::worker::Role;
use crate::worker::pool::Life;

/// How long a suspect waits at most until all that was there before it has left its workers. Longer than most prompts
/// take; then it is tried in their company.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long workers are kept free for one suspect, whose client may read so slowly that it is not looked after. Whoever
/// comes then spoils its trial.
const LEASE: Duration = PATIENCE.saturating_mul(2);
/// How long workers that have survived a suspect are kept for the next one, which needs to wait for nobody there. A few
/// times as long as it takes a suspect to look again.
const KEPT: Duration = Duration::from_millis(75);

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Trials {
    /// Read by newcomers while they are placed, written when a trial begins or ends.
    open: RwLock<Vec<Entry>>,
}

#[derive(Debug)]
struct Entry {
    workers: Vec<Life>,
    /// Also names the trial.
    is_spoilt: Arc<AtomicBool>,
    /// From then on nobody stays away.
    until: Instant,
    state: State,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Held,
    InDoubt,
    /// The workers are kept for the next suspect.
    Survived,
}

impl Trials {
    /// Places somebody whom nobody suspects: away from workers that are taken, where there are others. Else that trial
    /// tells nothing any more. `place` gets the workers to stay away from, and `workers` says where it went.
    ///
    /// # Errors
    /// Those of the last `place`.
    pub(super) fn place_newcomer<P, E>(
        &self,
        now: Instant,
        place: impl Fn(&[Life]) -> Result<P, E>,
        workers: impl Fn(&P) -> Vec<Life>,
    ) -> Result<P, E> {
        let open = self.read();
        if open.is_empty() {
            return place(&[]);
        }
        let taken = lives(&open, |entry| now < entry.until);
        let placed = place(&taken).or_else(|error| if taken.is_empty() { Err(error) } else { place(&[]) })?;
        spoil(&open, &workers(&placed));
        Ok(placed)
    }

    /// Takes workers for a suspect. `choose` gets those that are taken, and those that were kept for it, if any; it
    /// returns some that are not taken, or nothing where none is left.
    pub(super) fn take<C>(
        self: &Arc<Self>,
        now: Instant,
        choose: impl FnOnce(&[Life], &[Life]) -> Option<(C, Vec<Life>)>,
    ) -> Option<(Trial, C)> {
        let mut open = self.write();
        open.retain(|entry| now < entry.until || entry.state == State::Held);
        let taken = lives(&open, |entry| now < entry.until && entry.state != State::Survived);
        let kept = open.iter().find(|entry| entry.state == State::Survived).map(|entry| entry.workers.clone());
        let (chosen, workers) = choose(&taken, &kept.unwrap_or_default())?;
        spoil(&open, &workers);
        open.retain(|entry| entry.state != State::Survived || entry.workers.iter().all(|life| !workers.contains(life)));
        let is_spoilt = Arc::new(AtomicBool::new(false));
        open.push(Entry { workers, is_spoilt: is_spoilt.clone(), until: now + LEASE, state: State::Held });
        Some((Trial { trials: self.clone(), is_spoilt, since: now, has_begun: false }, chosen))
    }

    /// Whether any worker is taken.
    pub(super) fn are_open(&self, now: Instant) -> bool {
        self.read().iter().any(|entry| now < entry.until)
    }

    fn read(&self) -> RwLockReadGuard<'_, Vec<Entry>> {
        self.open.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Vec<Entry>> {
        self.open.write().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether one more trial leaves workers of each role to everybody else.
pub(super) fn have_room(ready: impl Iterator<Item = (Role, Life)> + Clone, taken: &[Life]) -> bool {
    [Role::Unified, Role::Prefill, Role::Decode].into_iter().all(|role| {
        let of_role = ready.clone().filter(|(other, _)| *other == role);
        let num_free = of_role.clone().filter(|(_, worker)| !taken.contains(worker)).count();
        num_free != 1 || of_role.count() == 1
    })
}

fn lives(open: &[Entry], of: impl Fn(&Entry) -> bool) -> Vec<Life> {
    open.iter().filter(|entry| of(entry)).flat_map(|entry| entry.workers.iter().copied()).collect()
}

/// Somebody was given these workers.
fn spoil(open: &[Entry], workers: &[Life]) {
    let are_met = |entry: &&Entry| entry.workers.iter().any(|worker| workers.contains(worker));
    open.iter().filter(are_met).for_each(|entry| entry.is_spoilt.store(true, Ordering::Release));
}

/// Held by a suspect from when workers are taken for it to its next token.
#[derive(Debug)]
pub(super) struct Trial {
    trials: Arc<Trials>,
    is_spoilt: Arc<AtomicBool>,
    since: Instant,
    has_begun: bool,
}

impl Trial {
    /// Whether the suspect is to be submitted now. Its workers must first have survived all that was there before it,
    /// unless nobody can be kept away from them. `have_survived`: so they have.
    pub(super) fn may_begin(&mut self, have_survived: bool, now: Instant) -> bool {
        if !have_survived {
            if !self.is_spoilt.load(Ordering::Acquire) && now.saturating_duration_since(self.since) < PATIENCE {
                return false;
            }
            self.is_spoilt.store(true, Ordering::Release);
        }
        self.has_begun = true;
        true
    }

    /// Whether a death of its workers now is the suspect's doing: it is there, and nobody else was.
    pub(super) fn is_conclusive(&self) -> bool {
        // Waits for newcomers that are being placed.
        let _placed = self.trials.write();
        self.has_begun && !self.is_spoilt.load(Ordering::Acquire)
    }

    /// It has ended, and this worker, whose peer has given it up, may turn out to be dead: nobody is sent there before
    /// that is known.
    pub(super) fn end_in_doubt(self, worker: Life, until: Instant) {
        self.end(|entry| (entry.workers, entry.until, entry.state) = (vec![worker], until, State::InDoubt));
    }

    /// The workers have survived the suspect, and are the next one's for a moment.
    pub(super) fn end_well(self, now: Instant) {
        self.end(|entry| (entry.until, entry.state) = (now + KEPT, State::Survived));
    }

    fn end(&self, how: impl FnOnce(&mut Entry)) {
        let mut open = self.trials.write();
        open.iter_mut().find(|entry| Arc::ptr_eq(&entry.is_spoilt, &self.is_spoilt)).map(how);
    }
}

impl Drop for Trial {
    fn drop(&mut self) {
        let stays = |entry: &Entry| entry.state != State::Held || !Arc::ptr_eq(&entry.is_spoilt, &self.is_spoilt);
        self.trials.write().retain(stays);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: Life = (0, 1);
    const OTHER: Life = (1, 1);

    fn take(trials: &Arc<Trials>, worker: Life) -> Option<Trial> {
        let free = |taken: &[Life], _: &[Life]| (!taken.contains(&worker)).then(|| ((), vec![worker]));
        trials.take(Instant::now(), free).map(|(trial, ())| trial)
    }

    /// A newcomer that can go to these workers; where it went.
    fn come(trials: &Trials, workers: &[Life]) -> Option<Life> {
        let free = |taken: &[Life]| workers.iter().copied().find(|worker| !taken.contains(worker)).ok_or(());
        trials.place_newcomer(Instant::now(), free, |&worker| vec![worker]).ok()
    }

    #[test]
    fn newcomers_and_other_suspects_stay_away_from_a_trial() {
        let trials = Arc::default();
        assert_eq!(come(&trials, &[ONE, OTHER]), Some(ONE));
        let mut trial = take(&trials, ONE).unwrap_or_else(|| unreachable!("nothing is taken"));
        assert!(take(&trials, ONE).is_none() && trials.are_open(Instant::now()));
        assert_eq!(come(&trials, &[ONE, OTHER]), Some(OTHER));
        assert!(!trial.is_conclusive(), "it has not begun");
        assert!(trial.may_begin(true, Instant::now()) && trial.is_conclusive());
        drop(trial);
        assert_eq!(come(&trials, &[ONE, OTHER]), Some(ONE));
    }

    #[test]
    fn a_trial_is_spoilt_by_a_newcomer_that_has_nowhere_else_to_go() {
        let trials = Arc::default();
        let [mut spoilt, mut other] =
            [ONE, OTHER].map(|worker| take(&trials, worker).unwrap_or_else(|| unreachable!("it is free")));
        assert!(other.may_begin(true, Instant::now()));
        assert_eq!(come(&trials, &[ONE]), Some(ONE));
        assert!(spoilt.may_begin(false, Instant::now()), "it would wait in vain");
        assert!(!spoilt.is_conclusive() && other.is_conclusive());
    }

    #[test]
    fn a_trial_waits_until_its_workers_have_survived_all_that_was_there_before() {
        let (trials, now) = (Arc::default(), Instant::now());
        let mut trial = take(&trials, ONE).unwrap_or_else(|| unreachable!("nothing is taken"));
        assert!(!trial.may_begin(false, now), "a deadly one may be there");
        assert!(!trial.is_conclusive(), "whoever kills the worker now, it was not the suspect");
        assert!(trial.may_begin(true, now) && trial.is_conclusive());
        let mut patient = take(&trials, OTHER).unwrap_or_else(|| unreachable!("it is free"));
        assert!(patient.may_begin(false, now + 2 * PATIENCE) && !patient.is_conclusive(), "not for ever");
    }

    #[test]
    fn nobody_stays_away_for_ever_from_a_trial_whose_client_is_gone_to_sleep() {
        let (trials, now) = (Arc::<Trials>::default(), Instant::now());
        let mut trial = take(&trials, ONE).unwrap_or_else(|| unreachable!("nothing is taken"));
        assert!(trial.may_begin(true, now));
        let free = |taken: &[Life]| if taken.is_empty() { Ok(ONE) } else { Err(()) };
        assert_eq!(trials.place_newcomer(now + 2 * LEASE, free, |&worker| vec![worker]), Ok(ONE));
        assert!(!trial.is_conclusive());
    }

    #[test]
    fn nobody_takes_a_worker_while_a_newcomer_is_placed() {
        let trials: Arc<Trials> = Arc::default();
        let look_and_go = |_: &[Life]| {
            assert!(trials.open.try_write().is_err(), "a suspect could come between");
            Ok::<Life, ()>(ONE)
        };
        assert!(trials.place_newcomer(Instant::now(), look_and_go, |&worker| vec![worker]).is_ok());
        let look_and_take = |_: &[Life], _: &[Life]| {
            assert!(trials.open.try_read().is_err(), "a newcomer could come between");
            Some(((), vec![ONE]))
        };
        assert!(trials.take(Instant::now(), look_and_take).is_some());
    }

    #[test]
    fn a_worker_that_a_peer_gave_up_is_left_alone_until_more_is_known() {
        let (trials, now) = (Arc::<Trials>::default(), Instant::now());
        let taken = trials.take(now, |_, _| Some(((), vec![ONE, OTHER])));
        let (trial, ()) = taken.unwrap_or_else(|| unreachable!("nothing is taken"));
        trial.end_in_doubt(ONE, now + PATIENCE);
        assert_eq!(come(&trials, &[ONE, OTHER]), Some(OTHER));
        assert!(take(&trials, ONE).is_none());
        assert!(!trials.are_open(now + PATIENCE));
    }

    #[test]
    fn workers_that_have_survived_a_suspect_are_kept_for_the_next_one() {
        let (trials, now) = (Arc::<Trials>::default(), Instant::now());
        let trial = take(&trials, ONE).unwrap_or_else(|| unreachable!("nothing is taken"));
        trial.end_well(now);
        assert_eq!(come(&trials, &[ONE, OTHER]), Some(OTHER));
        let next = trials.take(now, |taken, kept| Some(((), kept.to_vec())).filter(|_| taken.is_empty()));
        assert!(next.is_some_and(|_| take(&trials, ONE).is_none()), "it has what was kept, and no other one has");
        assert!(!trials.are_open(now), "it has ended without a word");
        let trial = take(&trials, ONE).unwrap_or_else(|| unreachable!("nothing is taken"));
        trial.end_well(now);
        assert!(!trials.are_open(now + KEPT));
    }
}
