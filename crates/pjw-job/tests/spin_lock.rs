//! The example `spin_lock`: one thread at a time holds the lock, however the cores of the job change. Waiters sleep
//! while the job does not have the core of the holder.

#![allow(clippy::unwrap_used, missing_docs, unreachable_pub)] // a test may fail

use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use pjw_job::layout::CoreMapContent;
use pjw_job::{CORE_MAP_FILE_NAME, CoreMapWriter, Job};

#[path = "../examples/spin_lock/lock.rs"]
mod lock;

use lock::SpinLock;

const TIMEOUT: Duration = Duration::from_secs(60);
/// All CPUs that the page can have, and none.
const ALL_CPUS: &str = "0-8063";
const NO_CPU: &str = "";

fn cores(epoch: u64, own: &str) -> CoreMapContent {
    CoreMapContent { epoch, is_live: true, own: own.parse().unwrap(), ..CoreMapContent::default() }
}

fn publish(directory: &Path, own: &str) -> CoreMapWriter {
    let page = directory.join(CORE_MAP_FILE_NAME);
    CoreMapWriter::create(&page, &directory.join("temporary"), &cores(1, own)).unwrap()
}

fn open(directory: &Path) -> Arc<Job> {
    Arc::new(Job::in_directory(directory))
}

/// Adds 1 to the value many times in each of four threads. Between the read and the write of the value, a second holder
/// would have time to read it too.
fn count_in_threads(lock: &SpinLock<u64>) {
    let add = || {
        let mut value = lock.lock();
        let before = *value;
        (0..20).for_each(|_| std::hint::spin_loop());
        *value = before + 1;
    };
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| (0..20_000).for_each(|_| add()));
        }
    });
}

#[test]
fn one_thread_at_a_time_holds_the_lock_while_cores_come_and_go() {
    let directory = tempfile::tempdir().unwrap();
    let mut writer = publish(directory.path(), ALL_CPUS);
    let lock = SpinLock::new(open(directory.path()), 0_u64);
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut epoch = 1;
            while !is_over.load(Ordering::Relaxed) {
                epoch += 1;
                writer.write(&cores(epoch, if epoch % 2 == 0 { NO_CPU } else { ALL_CPUS })).unwrap();
                std::thread::yield_now();
            }
        });
        count_in_threads(&lock);
        is_over.store(true, Ordering::Relaxed);
    });
    assert_eq!(*lock.lock(), 80_000);
}

#[test]
fn one_thread_at_a_time_holds_the_lock_without_a_core_map_and_when_every_waiter_sleeps() {
    let directory = tempfile::tempdir().unwrap();
    let lock = SpinLock::new(open(directory.path()), 0_u64);
    count_in_threads(&lock);
    let _writer = publish(directory.path(), NO_CPU);
    count_in_threads(&lock);
    assert_eq!(*lock.lock(), 160_000);
}

#[test]
fn waiters_sleep_while_the_job_does_not_have_the_core_of_the_holder_and_get_the_lock_later() {
    let directory = tempfile::tempdir().unwrap();
    let _writer = publish(directory.path(), NO_CPU);
    let lock = SpinLock::new(open(directory.path()), 0_u64);
    let (sender, waiters) = mpsc::channel();
    std::thread::scope(|scope| {
        let guard = lock.lock();
        for _ in 0..8 {
            let (sender, lock) = (sender.clone(), &lock);
            scope.spawn(move || {
                // A relative link, such as 4711/task/4712.
                sender.send(fs::read_link("/proc/thread-self").unwrap()).unwrap();
                *lock.lock() += 1;
            });
        }
        for thread in waiters.iter().take(8) {
            wait_until_it_sleeps(&Path::new("/proc").join(thread));
        }
        drop(guard);
    });
    assert_eq!(*lock.lock(), 8);
}

#[track_caller]
fn wait_until_it_sleeps(thread: &Path) {
    let deadline = Instant::now() + TIMEOUT;
    let is_asleep = || fs::read_to_string(thread.join("status")).unwrap().contains("State:\tS");
    while !is_asleep() {
        assert!(Instant::now() < deadline, "the waiter spins");
        std::thread::sleep(Duration::from_millis(1));
    }
}
