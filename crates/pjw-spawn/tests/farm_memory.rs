//! The pages that the processes of a farm share, by /proc/PID/smaps_rollup. This test is a program of its own, because
//! a fork has all memory of its program.
#![allow(clippy::unwrap_used, clippy::panic)] // a test may fail

use std::fs;
use std::hint::black_box;
use std::sync::Mutex;

use nix::sys::eventfd::{EfdFlags, EventFd};
use pjw_spawn::farm::{Farm, RunningFarm};

const MIB: usize = 1 << 20;
/// The bytes of the data that all workers use, and of the data of each worker: 80 % are common.
const COMMON: usize = 40 * MIB;
const OWN: usize = 10 * MIB;

/// A fork has the memory of all tests of this process, so one test runs at a time.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// The memory of a process in KiB.
struct Memory {
    pss: u64,
    rss: u64,
    shared: u64,
}

fn memory_of(pid: u32) -> Memory {
    let text = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap();
    let field = |name: &str| -> u64 {
        let line = text.lines().find(|line| line.starts_with(name)).unwrap();
        line.split_whitespace().nth(1).unwrap().parse().unwrap()
    };
    let shared = field("Shared_Clean:") + field("Shared_Dirty:");
    Memory { pss: field("Pss:"), rss: field("Rss:"), shared }
}

/// Writes to all pages of new memory.
fn load(bytes: usize) -> Vec<u8> {
    let mut memory = vec![0; bytes];
    memory.chunks_mut(4096).for_each(|page| page[0] = 1);
    black_box(memory)
}

/// Runs a farm whose workers each compute one item. Returns the memory of the master and of the workers during that. If
/// `is_late`, the master loads the common data before the fork. Otherwise each worker loads them.
fn measure(workers: u32, is_late: bool) -> (Memory, Vec<Memory>) {
    let semaphore = || EventFd::from_flags(EfdFlags::EFD_SEMAPHORE).unwrap();
    let (has_loaded, may_end) = (semaphore(), semaphore());
    let common = if is_late { load(COMMON) } else { Vec::new() };
    let mut loaded = Vec::new();
    // SAFETY: the function only computes, and waits for no lock.
    let farm = unsafe { Farm::new(workers).allow_threads() };
    let running: RunningFarm<'_> = farm
        .start(workers.into(), |_, _| {
            if !is_late {
                loaded = load(COMMON);
            }
            let pages = common.chunks(4096).chain(loaded.chunks(4096));
            let sum: u64 = pages.map(|page| u64::from(page[0])).sum();
            let own = load(OWN);
            black_box(sum);
            has_loaded.write(1).map_err(|errno| errno as i32)?;
            may_end.read().map_err(|errno| errno as i32)?;
            drop(black_box(own));
            Ok(())
        })
        .unwrap();
    for _ in 0..workers {
        has_loaded.read().unwrap();
    }
    let of_workers = running.worker_pids().iter().map(|pid| memory_of(pid.0)).collect();
    let of_master = memory_of(std::process::id());
    may_end.write(workers.into()).unwrap();
    assert_eq!(running.map(Result::unwrap).count(), workers as usize);
    (of_master, of_workers)
}

#[test]
fn late_forked_workers_share_three_quarters_of_their_pages_and_early_forked_ones_nearly_none() {
    let _guard = ONE_AT_A_TIME.lock();
    for (is_late, expected_permille) in [(true, 750..=1000), (false, 0..=99)] {
        let (_, workers) = measure(2, is_late);
        for worker in workers {
            let permille = worker.shared * 1000 / worker.rss;
            assert!(expected_permille.contains(&permille), "late: {is_late}, shared: {permille} permille");
        }
    }
}

#[test]
fn eight_late_forked_workers_take_a_third_of_eight_instances() {
    let _guard = ONE_AT_A_TIME.lock();
    let (master, workers) = measure(8, true);
    let late: u64 = workers.iter().map(|worker| worker.pss).sum::<u64>() + master.pss;
    // A worker that was forked before the data were loaded has all data for itself, as a separate instance has.
    let (_, instances) = measure(8, false);
    let instances: u64 = instances.iter().map(|instance| instance.pss).sum();
    let permille = late * 1000 / instances;
    assert!(permille <= 350, "{late} KiB of {instances} KiB: {permille} permille");
}
