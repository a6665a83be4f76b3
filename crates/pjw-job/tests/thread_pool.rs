//! The example `thread_pool`: the number of its workers follows the core map of its job. The test publishes the core
//! map as pjwd does.

#![allow(clippy::unwrap_used, clippy::panic, missing_docs, unreachable_pub)] // a test may fail

use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Barrier, mpsc};
use std::time::{Duration, Instant};

use pjw_job::layout::CoreMapContent;
use pjw_job::{CORE_MAP_FILE_NAME, CoreMapWriter, Job};

#[path = "../examples/thread_pool/pool.rs"]
mod pool;

use pool::ThreadPool;

/// The longest time for which a test waits. Only a test that fails waits so long.
const TIMEOUT: Duration = Duration::from_secs(60);

/// A core map with the CPUs `own`, of which `leaving` are leaving.
fn cores(epoch: u64, own: &str, leaving: &str) -> CoreMapContent {
    let (own, leaving) = (own.parse().unwrap(), leaving.parse().unwrap());
    CoreMapContent { epoch, is_live: true, own, leaving, ..CoreMapContent::default() }
}

fn publish(directory: &Path, content: &CoreMapContent) -> CoreMapWriter {
    CoreMapWriter::create(&directory.join(CORE_MAP_FILE_NAME), &directory.join("temporary"), content).unwrap()
}

#[track_caller]
fn wait_for_workers(pool: &ThreadPool, count: usize) {
    let deadline = Instant::now() + TIMEOUT;
    while pool.worker_count() != count {
        assert!(Instant::now() < deadline, "{} workers instead of {count}", pool.worker_count());
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn the_number_of_workers_follows_the_cores_of_the_job() {
    let directory = tempfile::tempdir().unwrap();
    let mut writer = publish(directory.path(), &cores(1, "0-1", ""));
    let pool = ThreadPool::new(Job::in_directory(directory.path())).unwrap();
    wait_for_workers(&pool, 2);
    for (epoch, own, leaving, workers) in
        [(2, "0-7", "", 8), (3, "0-7", "2-7", 2), (4, "0-1", "", 2), (5, "", "", 1), (6, "0-3", "", 4)]
    {
        writer.write(&cores(epoch, own, leaving)).unwrap();
        wait_for_workers(&pool, workers);
    }
}

#[test]
fn a_worker_above_the_number_of_cores_completes_its_task_before_it_ends() {
    let directory = tempfile::tempdir().unwrap();
    let mut writer = publish(directory.path(), &cores(1, "0-3", ""));
    let pool = ThreadPool::new(Job::in_directory(directory.path())).unwrap();
    let (all_run, may_end) = (Arc::new(Barrier::new(5)), Arc::new(Barrier::new(5)));
    for _ in 0..4 {
        let (all_run, may_end) = (Arc::clone(&all_run), Arc::clone(&may_end));
        pool.execute(move || {
            all_run.wait();
            may_end.wait();
        });
    }
    all_run.wait();
    let job = Job::in_directory(directory.path());
    writer.write(&cores(2, "0", "")).unwrap();
    assert_eq!(job.cores().recommended_thread_count(), 1);
    assert_eq!(pool.worker_count(), 4, "each worker still runs its task");
    may_end.wait();
    wait_for_workers(&pool, 1);
    let (running, max_running) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    for _ in 0..100 {
        let (running, max_running) = (Arc::clone(&running), Arc::clone(&max_running));
        pool.execute(move || {
            max_running.fetch_max(running.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
            running.fetch_sub(1, Ordering::SeqCst);
        });
    }
    drop(pool);
    assert_eq!(max_running.load(Ordering::SeqCst), 1, "tasks run at the same time on one core");
}

#[test]
fn all_tasks_have_run_when_the_pool_is_dropped_even_if_some_of_them_panic() {
    let directory = tempfile::tempdir().unwrap();
    let _writer = publish(directory.path(), &cores(1, "0-1", ""));
    let pool = ThreadPool::new(Job::in_directory(directory.path())).unwrap();
    let (sender, receiver) = mpsc::channel();
    for number in 0..1000 {
        let sender = sender.clone();
        pool.execute(move || {
            assert!(number % 100 != 0, "this panic is intended");
            sender.send(number).unwrap();
        });
    }
    drop(pool);
    drop(sender);
    assert_eq!(receiver.iter().count(), 990);
}
