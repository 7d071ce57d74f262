//! CPU time of this thread, which other processes on the machine disturb least.

use rustix::time::{ClockId, clock_gettime};

fn now_ns() -> u64 {
    let now = clock_gettime(ClockId::ThreadCPUTime);
    u64::try_from(now.tv_sec).unwrap() * 1_000_000_000 + u64::try_from(now.tv_nsec).unwrap()
}

/// Nanoseconds of CPU time that `work` takes, the least of `times` runs: whatever disturbs only adds.
pub fn least_ns<T>(times: usize, mut work: impl FnMut() -> T) -> u64 {
    let run = |_| {
        let before = now_ns();
        std::hint::black_box(work());
        now_ns() - before
    };
    (0..times).map(run).min().unwrap()
}

pub fn mb_per_s(bytes: usize, ns: u64) -> f64 {
    round(bytes as f64 * 1e3 / ns as f64)
}

pub fn microseconds(ns: u64) -> f64 {
    round(ns as f64 / 1e3)
}

/// To two digits behind the point: more is noise.
pub fn round(value: f64) -> f64 {
    (value * 100.0).round() / 100.0
}
