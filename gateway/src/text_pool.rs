//! A few threads for work on long texts, so that it holds up no socket and only so much of it runs at once.
//!
//! The threads live as long as the pool: the tokenizer keeps tables of megabytes for each thread that uses it, and a
//! thread that comes and goes would fill them anew. Who waits for a turn waits in order, and who is dropped while
//! waiting is forgotten.

use std::num::NonZero;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use thiserror::Error;
use tokio::sync::{Semaphore, oneshot};

/// More threads than this would only take the sockets' share of a large machine.
const MAX_THREADS: usize = 8;

type Job = Box<dyn FnOnce() + Send>;

/// See the module.
pub struct TextPool {
    turns: Arc<Semaphore>,
    jobs: SyncSender<Job>,
}

/// The work ended without a result: it panicked, or the process is ending.
#[derive(Debug, Error, PartialEq, Eq)]
#[error("the work on a text was lost")]
pub struct Lost;

impl TextPool {
    /// A pool of one thread a core, up to a bound.
    ///
    /// # Errors
    /// The system refuses a thread.
    pub fn new() -> std::io::Result<Self> {
        Self::with_threads(thread::available_parallelism().map_or(1, NonZero::get).min(MAX_THREADS))
    }

    fn with_threads(num_threads: usize) -> std::io::Result<Self> {
        // Never full: whoever sends has a turn, and a job that runs has left the channel.
        let (jobs, inbox) = sync_channel(num_threads);
        let inbox = Arc::new(Mutex::new(inbox));
        for index in 0..num_threads {
            let inbox = inbox.clone();
            thread::Builder::new().name(format!("text-{index}")).spawn(move || work(&inbox))?;
        }
        Ok(Self { turns: Arc::new(Semaphore::new(num_threads)), jobs })
    }

    /// Runs `job` on a thread of the pool, when one is free.
    ///
    /// # Errors
    /// The job panicked.
    pub async fn run<T: Send + 'static>(&self, job: impl FnOnce() -> T + Send + 'static) -> Result<T, Lost> {
        let turn = self.turns.clone().acquire_owned().await.map_err(|_| Lost)?;
        let (give, result) = oneshot::channel();
        let job = move || {
            let ended = catch_unwind(AssertUnwindSafe(job));
            // The turn goes first, so that whoever has the result can have another.
            drop(turn);
            if let Ok(value) = ended {
                let _ = give.send(value);
            }
        };
        self.jobs.send(Box::new(job)).map_err(|_| Lost)?;
        result.await.map_err(|_| Lost)
    }
}

fn work(inbox: &Mutex<Receiver<Job>>) {
    loop {
        // The lock is held while waiting: the next job wakes one thread.
        let job = inbox.lock().unwrap_or_else(PoisonError::into_inner).recv();
        match job {
            Ok(job) => job(),
            Err(_) => return,
        }
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, clippy::panic, reason = "tests")]

    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::{Arc, Barrier};
    use std::thread;

    use futures::future::join_all;

    use super::{Lost, TextPool};

    #[tokio::test]
    async fn no_more_runs_at_once_than_there_are_threads_and_all_of_it_runs() {
        let pool = TextPool::with_threads(3).unwrap();
        let (running, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let together = Arc::new(Barrier::new(3));
        let jobs = (0..30).map(|number| {
            let (running, most, together) = (running.clone(), most.clone(), together.clone());
            pool.run(move || {
                most.fetch_max(running.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                // Ends only when three are here: so many do run at once.
                together.wait();
                running.fetch_sub(1, Ordering::SeqCst);
                number
            })
        });
        let numbers: Result<Vec<usize>, Lost> = join_all(jobs).await.into_iter().collect();
        assert_eq!(numbers, Ok((0..30).collect()));
        assert_eq!(most.load(Ordering::SeqCst), 3);
    }

    #[tokio::test]
    async fn a_panic_costs_nothing_but_its_own_result() {
        let pool = TextPool::with_threads(1).unwrap();
        for _ in 0..3 {
            assert_eq!(pool.run(|| panic!("on purpose")).await, Err::<(), _>(Lost));
        }
        let name = pool.run(|| thread::current().name().map(str::to_owned)).await;
        assert_eq!(name, Ok(Some("text-0".to_owned())));
    }

    #[tokio::test]
    async fn who_is_dropped_while_waiting_is_never_run() {
        let pool = TextPool::with_threads(1).unwrap();
        let gate = Arc::new(Barrier::new(2));
        let ran = Arc::new(AtomicUsize::new(0));
        let (opened, counted) = (gate.clone(), ran.clone());
        let first = pool.run(move || opened.wait().is_leader());
        let mut first = Box::pin(first);
        assert!(futures::poll!(&mut first).is_pending());
        let mut left = Box::pin(pool.run(move || counted.fetch_add(1, Ordering::SeqCst)));
        assert!(futures::poll!(&mut left).is_pending());
        drop(left);
        gate.wait();
        first.await.unwrap();
        pool.run(|| ()).await.unwrap();
        assert_eq!(ran.load(Ordering::SeqCst), 0);
    }
}
