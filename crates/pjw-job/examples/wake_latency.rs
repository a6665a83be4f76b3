//! Measures the time from a change of a core map to the program that waits for it: p50, p99 and the longest of 2000
//! changes. Usage: `cargo run --release -p pjw-job --example wake_latency`

#![allow(clippy::unwrap_used, clippy::print_stdout)]

use std::sync::mpsc;
use std::time::{Duration, Instant};

use pjw_job::layout::CoreMapContent;
use pjw_job::{CORE_MAP_FILE_NAME, CoreMapWriter, Job};

const CHANGES: u64 = 2000;

fn main() {
    let directory = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
    let content = |epoch| CoreMapContent { epoch, is_live: true, ..CoreMapContent::default() };
    let path = directory.path().join(CORE_MAP_FILE_NAME);
    let mut writer = CoreMapWriter::create(&path, &directory.path().join("new"), &content(1)).unwrap();
    let job = Job::in_directory(directory.path());
    let (send, seen) = mpsc::channel();
    let mut took: Vec<Duration> = std::thread::scope(|scope| {
        scope.spawn(move || {
            for epoch in 1..=CHANGES {
                let cores = job.wait_for_change(epoch, None).unwrap();
                send.send((cores.epoch, Instant::now())).unwrap();
            }
        });
        (2..=CHANGES + 1)
            .map(|epoch| {
                // The reader must have begun to wait.
                std::thread::sleep(Duration::from_millis(1));
                let begun = Instant::now();
                writer.write(&content(epoch)).unwrap();
                let (read, at) = seen.recv().unwrap();
                assert_eq!(read, epoch);
                at - begun
            })
            .collect()
    });
    took.sort();
    let at = |permille: usize| took[(took.len() - 1) * permille / 1000];
    println!("p50 {:?}, p99 {:?}, longest {:?}", at(500), at(990), at(1000));
}
