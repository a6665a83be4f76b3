//! A thread pool that has one worker for each CPU of its job. Copy this file, and change it as you need.

use std::collections::VecDeque;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use pjw_job::Job;

/// How often the thread that follows the core map looks whether the pool is still there.
const FOLLOW_INTERVAL: Duration = Duration::from_secs(1);

type Task = Box<dyn FnOnce() + Send>;

/// A thread pool whose number of workers follows the core map of a job.
///
/// A worker whose CPU is leaving ends after its current task. A task is never interrupted.
pub struct ThreadPool {
    shared: Arc<Shared>,
}

struct Shared {
    state: Mutex<State>,
    /// Signalled when a field of the state has changed.
    changed: Condvar,
}

#[derive(Default)]
struct State {
    tasks: VecDeque<Task>,
    /// The number of workers that run. It may be above `limit` until some of them have ended their tasks.
    workers: usize,
    /// The number of workers that the pool should have: one for each CPU that stays with the job.
    limit: usize,
    /// Whether no more tasks come. The workers end when the queue is empty.
    is_closed: bool,
}

impl ThreadPool {
    /// Makes a pool with as many workers as the job has CPUs, and a thread that follows the core map.
    ///
    /// # Errors
    /// If a thread can't be started.
    pub fn new(job: Job) -> io::Result<Self> {
        let pool = Self { shared: Arc::new(Shared { state: Mutex::default(), changed: Condvar::new() }) };
        let cores = job.cores();
        set_limit(&pool.shared, cores.recommended_thread_count())?;
        // The follower does not keep the pool alive, so it ends after the pool.
        let shared = Arc::downgrade(&pool.shared);
        let follow = move || {
            let mut epoch = cores.epoch;
            while shared.strong_count() > 0 {
                let change = job.wait_for_change(epoch, Some(FOLLOW_INTERVAL));
                if let (Some(cores), Some(shared)) = (change, shared.upgrade()) {
                    epoch = cores.epoch;
                    // Without a new thread, the tasks run on fewer workers until the next change.
                    let _ = set_limit(&shared, cores.recommended_thread_count());
                }
            }
        };
        thread::Builder::new().name("pool follower".into()).spawn(follow)?;
        Ok(pool)
    }

    /// Adds a task to the end of the queue. A task that panics does not end its worker.
    pub fn execute(&self, task: impl FnOnce() + Send + 'static) {
        self.shared.state().tasks.push_back(Box::new(task));
        self.shared.changed.notify_one();
    }

    /// Returns the number of workers that run now.
    pub fn worker_count(&self) -> usize {
        self.shared.state().workers
    }
}

impl Drop for ThreadPool {
    /// Waits until all tasks have ended. So a task must not drop the pool that runs it.
    fn drop(&mut self) {
        let mut state = self.shared.state();
        state.is_closed = true;
        self.shared.changed.notify_all();
        while state.workers > 0 {
            state = self.shared.wait(state);
        }
    }
}

/// Sets the number of workers that the pool should have, and starts those that are missing. Surplus workers end by
/// themselves.
fn set_limit(shared: &Arc<Shared>, limit: usize) -> io::Result<()> {
    let mut state = shared.state();
    state.limit = limit;
    shared.changed.notify_all();
    while state.workers < limit && !state.is_closed {
        let worker = Arc::clone(shared);
        thread::Builder::new().name("pool worker".into()).spawn(move || worker.work())?;
        state.workers += 1;
    }
    Ok(())
}

impl Shared {
    fn work(&self) {
        let mut state = self.state();
        loop {
            let is_surplus = state.workers > state.limit;
            if is_surplus || (state.is_closed && state.tasks.is_empty()) {
                break;
            }
            let Some(task) = state.tasks.pop_front() else {
                state = self.wait(state);
                continue;
            };
            drop(state);
            // The panic hook has printed the message.
            let _ = catch_unwind(AssertUnwindSafe(task));
            state = self.state();
        }
        state.workers -= 1;
        self.changed.notify_all();
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        self.changed.wait(state).unwrap_or_else(PoisonError::into_inner)
    }
}
