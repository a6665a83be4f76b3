//! The memory allocations of scans and samples.
//!
//! A scan allocates memory for processes and not for threads, even if all threads ran. This holds for `/proc` and for
//! the task scan. On machines of more than 128 PUs, each mask needs an allocation. A sample of the CPU time of known
//! processes allocates nothing.
#![expect(clippy::unwrap_used, reason = "a failed setup is a failed test")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use pjw_core::ids::{Pid, ProcessId, StartTime};
use pjw_core::ports::MachineInterface;
use pjw_core::scan::{ScanRequest, ScanScope};
use pjw_core::snapshot::Observed;
use pjw_linux::bpf::TaskScan;
use pjw_linux::node::LinuxMachine;
use pjw_linux::sys::{
    affinity,
    cpu_time::{CpuTimeSampler, process_cpu_time},
};

/// A number of threads for which the task scan is used, unless the machine has thousands of other tasks.
const FEW_THREADS: usize = 100;
const MANY_THREADS: usize = 500;

thread_local! {
    /// The number of allocations of this thread.
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

/// The allocator of the system with a count of the allocations of each thread.
struct CountingAllocator;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

fn count() {
    // A thread that ends has no counter any more, and does not scan.
    let _ = ALLOCATIONS.try_with(|count| count.set(count.get() + 1));
}

// SAFETY: every call is forwarded unchanged to the system's allocator. The counter is a cell of the calling
// thread and does not allocate.
unsafe impl GlobalAlloc for CountingAllocator {
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

/// The number of allocations of a scan of this process with `threads` additional threads that run from time to time:
/// the minimum of several scans after the first three.
fn allocations(node: &mut LinuxMachine, threads: usize) -> usize {
    let own_pid = Pid(std::process::id());
    let scan_request = ScanRequest {
        scope: ScanScope::Partial(BTreeSet::from([own_pid])),
        pids_to_read_threads_of: BTreeSet::from([own_pid]),
        active_threads: BTreeMap::new(),
        cgroups: BTreeSet::new(),
        idle_watch: Arc::default(),
    };
    let is_over = AtomicBool::new(false);
    let run = || {
        while !is_over.load(Ordering::Relaxed) {
            thread::sleep(Duration::from_millis(5));
        }
    };
    let scans: Vec<(usize, Option<usize>)> = thread::scope(|scope| {
        for _ in 0..threads {
            thread::Builder::new().stack_size(32 * 1024).spawn_scoped(scope, run).unwrap();
        }
        let mut scan_once = || {
            let before = ALLOCATIONS.get();
            let snapshot = node.scan(&scan_request);
            let count = ALLOCATIONS.get() - before;
            let process = snapshot.processes.get(&own_pid).and_then(Observed::present);
            (count, process.and_then(|process| process.threads.as_ref()).map(Vec::len))
        };
        let scans = (0..10).map(|_| scan_once()).collect();
        is_over.store(true, Ordering::Relaxed);
        scans
    });
    assert!(
        scans.iter().all(|(_, read_threads)| read_threads.is_some_and(|read_threads| read_threads > threads)),
        "{scans:?}"
    );
    scans.into_iter().skip(3).map(|(count, _)| count).min().unwrap()
}

#[test]
fn the_allocations_of_a_scan_do_not_depend_on_the_number_of_threads() {
    let own_mask = affinity::get_mask(affinity::own_thread()).unwrap();
    if own_mask.words().len() > 2 {
        println!("skipped: sets of more than 128 PUs are on the heap");
        return;
    }
    let scan = TaskScan::load().inspect_err(|error| println!("skipped, the task scan: {error}")).ok();
    let readers = [Some(None), scan.map(Some)].into_iter().flatten();
    for scan in readers {
        let reader = if scan.is_some() { "the task scan" } else { "/proc" };
        let mut node = LinuxMachine::new(BTreeSet::new()).unwrap();
        node.set_task_scan(scan);
        let [few, many] = [FEW_THREADS, MANY_THREADS].map(|threads| allocations(&mut node, threads));
        // The buffers double when they grow.
        assert!(
            many < few + 40,
            "{reader}: {few} allocations with {FEW_THREADS} threads, {many} allocations with {MANY_THREADS} threads"
        );
    }
}

#[test]
fn a_sample_of_the_cpu_time_of_known_processes_allocates_no_memory() {
    let processes = [1, std::process::id()].map(|pid| ProcessId { pid: Pid(pid), start: StartTime(1) });
    let mut sampler = CpuTimeSampler::default();
    let mut allocations = || {
        let before = ALLOCATIONS.get();
        sampler.sample(processes, process_cpu_time);
        ALLOCATIONS.get() - before
    };
    assert!(allocations() > 0, "the first sample of a process allocates memory");
    assert_eq!([(); 3].map(|()| allocations()), [0; 3]);
}
