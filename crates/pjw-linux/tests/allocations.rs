//! A look takes memory for each process, not for each of its threads, though all of them ran: by /proc and by the
//! kernel's task scan. On machines of more than 128 PUs each mask takes some.
#![expect(clippy::unwrap_used, reason = "what cannot be started is a failure")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use nix::unistd::gettid;
use pjw_core::node::Node;
use pjw_core::process::{Pid, Tid};
use pjw_core::snapshot::{Look, Scope, Seen};
use pjw_linux::affinity;
use pjw_linux::bpf::TaskScan;
use pjw_linux::node::LinuxNode;

/// So many that a pass of the task scan is worth it, if the machine does not have thousands of others.
const FEW: usize = 100;
const MANY: usize = 500;

thread_local! {
    /// How often this thread asked for memory.
    static ASKED: Cell<usize> = const { Cell::new(0) };
}

struct Counting;

#[global_allocator]
static COUNTING: Counting = Counting;

fn count() {
    // A thread that is about to end has no counter any more, and is not the one that looks.
    let _ = ASKED.try_with(|asked| asked.set(asked.get() + 1));
}

// SAFETY: every call is passed on to the system's allocator as it came; the counter is a cell of the calling thread's own,
// made without memory.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller keeps the contract of `GlobalAlloc::alloc`, which is the same.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: `pointer` came from `System` with this layout, as the caller promises.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count();
        // SAFETY: as for `dealloc`, and `size` is what the caller promises of it.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

/// How often a look at this process asks for memory while so many more threads of it run now and then: the least of some
/// looks, after the first ones.
fn asked(node: &mut LinuxNode, threads: usize) -> usize {
    let us = Pid(std::process::id());
    let look = Look {
        scope: Scope::Partial(BTreeSet::from([us])),
        threads_of: BTreeSet::from([us]),
        cgroups: BTreeSet::new(),
        watch: Arc::default(),
    };
    let over = AtomicBool::new(false);
    let run = || {
        while !over.load(Ordering::Relaxed) {
            thread::sleep(Duration::from_millis(5));
        }
    };
    let looks: Vec<(usize, Option<usize>)> = thread::scope(|scope| {
        for _ in 0..threads {
            thread::Builder::new().stack_size(32 * 1024).spawn_scoped(scope, run).unwrap();
        }
        let mut once = || {
            let before = ASKED.get();
            let snapshot = node.observe(&look);
            let asked = ASKED.get() - before;
            let process = snapshot.processes.get(&us).and_then(Seen::here);
            (asked, process.and_then(|process| process.threads.as_ref()).map(Vec::len))
        };
        let looks = (0..10).map(|_| once()).collect();
        over.store(true, Ordering::Relaxed);
        looks
    });
    assert!(looks.iter().all(|(_, seen)| seen.is_some_and(|seen| seen > threads)), "{looks:?}");
    looks.into_iter().skip(3).map(|(asked, _)| asked).min().unwrap()
}

#[test]
fn a_look_takes_no_memory_for_a_thread() {
    let ours = affinity::get(Tid(gettid().as_raw().cast_unsigned())).unwrap();
    if ours.words().len() > 2 {
        println!("skipped: sets of more than 128 PUs are on the heap");
        return;
    }
    let scan =
        TaskScan::load().inspect_err(|error| println!("skipped, the look by the task scan: {error}")).ok();
    let ways = [Some(None), scan.map(Some)].into_iter().flatten();
    for scan in ways {
        let way = if scan.is_some() { "the task scan" } else { "/proc" };
        let mut node = LinuxNode::new(BTreeSet::new()).unwrap();
        node.use_task_scan(scan);
        let [few, many] = [FEW, MANY].map(|threads| asked(&mut node, threads));
        // Lists double when they grow.
        assert!(
            many < few + 40,
            "by {way}: with {FEW} threads {few} times, with {MANY} threads {many} times"
        );
    }
}
