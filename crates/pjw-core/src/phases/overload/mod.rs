//! Finds the hot threads whose program bound them where too many other threads are bound, while other PUs of the grant
//! idle.
//!
//! A binding inside the grant is the program's choice, and is kept. It is broken in two cases only:
//!
//! - More hot threads are bound to some PUs than these are (Hall's theorem: then there is no assignment in which each
//!   thread has a PU of its mask for itself), while PUs of the grant idle.
//! - Hot threads of several processes are bound to the same whole core, while a core of the grant idles. A launcher
//!   that binds a rank to a core reserves the core for this rank, with all hardware threads. Another launcher of the
//!   same job begins with the same core.
//!
//! As few threads as possible are moved: as many as have no PU, or no core, for themselves, and not more than there
//! are idle PUs, or cores. Those with the largest masks move, and of these those with the largest ids.
//!
//! Threads of one process that share a PU are moved for that only if all threads of the process have the same mask
//! inside one core. They inherited the mask: a launcher bound the process to fewer PUs than it has running threads. A
//! program that bound its threads itself gave them different masks, and they stay.

pub(crate) mod matching;

use crate::basics::{CpuSet, ProcessId, ThreadId, prelude::*};
use crate::machine::Topology;
use crate::phases::overload::matching::ThreadPuMatching;
use crate::phases::pinning::HotThread;

/// Returns the threads whose binding (the mask by which the program restricted the thread) pjw must lift. These are hot
/// threads: threads that run or wait for a PU (logical CPU) most of the time. A program bound too many hot threads to
/// the same PUs, while other PUs of the job are idle. Returns an empty set if no binding must be lifted.
///
/// - `grant` has the PUs of the job.
/// - `hot_threads` has all hot threads of the job, including threads without a binding.
/// - `inherited` has the processes whose threads all have the same mask inside one core.
pub(crate) fn threads_to_unbind(
    topology: &Topology,
    grant: &CpuSet,
    hot_threads: &[HotThread],
    inherited: &BTreeSet<ProcessId>,
) -> BTreeSet<ThreadId> {
    let mut bound: Vec<&HotThread> = hot_threads.iter().filter(|thread| thread.mask != *grant).collect();
    let floating = hot_threads.len() - bound.len();
    bound.sort_by_key(|hot_thread| (hot_thread.mask.len(), hot_thread.thread));
    let mut moving: BTreeSet<ProcessId> = BTreeSet::new();
    loop {
        let all_counted: BTreeSet<ProcessId> = moving.union(inherited).copied().collect();
        let counted = threads_with_pu_in_own_process(topology, grant, &bound, &all_counted);
        let spread: BTreeSet<ProcessId> = moving.intersection(inherited).copied().collect();
        let overloaded = threads_to_move(topology, grant, &counted, floating, &spread);
        let count_before = moving.len();
        moving.extend(overloaded.iter().map(|thread| thread.process));
        // If some threads of a process move, the others that shared their PUs are compared with those of other
        // processes.
        if moving.len() == count_before {
            return overloaded;
        }
    }
}

/// Returns the bound threads to move to other PUs: those without a PU for themselves, and those that share a core
/// ([`threads_on_shared_cores`]). Not more threads are moved than there are idle PUs or idle cores for them.
///
/// - `bound` has the hot threads with a mask smaller than `grant`, in the order in which they get a PU.
/// - `floating` is the number of hot threads without such a mask. They need PUs too.
/// - `spread` has the processes of which each thread gets a core for itself before two of them share a core.
fn threads_to_move(
    topology: &Topology,
    grant: &CpuSet,
    bound: &[&HotThread],
    floating: usize,
    spread: &BTreeSet<ProcessId>,
) -> BTreeSet<ThreadId> {
    let mut matching = ThreadPuMatching::new(topology, grant);
    let (with_pu, without_pu): (Vec<&HotThread>, Vec<_>) =
        bound.iter().partition(|hot_thread| matching.add_thread(&hot_thread.mask));
    let idle_pus = matching.free_pus().len().saturating_sub(floating);
    let mut overloaded: BTreeSet<ThreadId> =
        without_pu.into_iter().take(idle_pus).map(|hot_thread| hot_thread.thread).collect();
    let idle_cores = matching.idle_core_count().saturating_sub(floating + overloaded.len());
    overloaded.extend(threads_on_shared_cores(topology, grant, &with_pu, spread).take(idle_cores));
    overloaded
}

/// Returns the threads of `bound` (hot threads with a mask smaller than `grant`) for which other processes may be the
/// reason that they share a PU. These are the threads that would get a PU for themselves if their process ran alone on
/// `grant`. Threads that share a PU with their own process anyway are left out. But if their process is in
/// `all_counted`, all its threads are in the result.
fn threads_with_pu_in_own_process<'a>(
    topology: &'a Topology,
    grant: &'a CpuSet,
    bound: &[&'a HotThread],
    all_counted: &BTreeSet<ProcessId>,
) -> Vec<&'a HotThread> {
    let mut thread_counts: BTreeMap<ProcessId, usize> = BTreeMap::new();
    bound.iter().for_each(|hot_thread| *thread_counts.entry(hot_thread.thread.process).or_default() += 1);
    let mut matchings: BTreeMap<ProcessId, ThreadPuMatching<'_>> = BTreeMap::new();
    let has_pu = |hot_thread: &&'a HotThread| {
        let process = hot_thread.thread.process;
        all_counted.contains(&process)
            || thread_counts.get(&process) == Some(&1)
            || matchings
                .entry(process)
                .or_insert_with(|| ThreadPuMatching::new(topology, grant))
                .add_thread(&hot_thread.mask)
    };
    bound.iter().copied().filter(has_pu).collect()
}

/// Returns the threads that are bound to a whole core to which an earlier thread in `bound` is bound too. Only the PUs
/// in `grant` count as the core. Two threads of one process may share a core: a thread of the same process as the first
/// thread of the core is left out, unless its process is in `spread`.
fn threads_on_shared_cores(
    topology: &Topology,
    grant: &CpuSet,
    bound: &[&HotThread],
    spread: &BTreeSet<ProcessId>,
) -> impl Iterator<Item = ThreadId> {
    let mut first_on: BTreeMap<CpuSet, ThreadId> = BTreeMap::new();
    bound.iter().filter_map(move |hot_thread| {
        let (mask, thread) = (&hot_thread.mask, hot_thread.thread);
        let core = topology.core_cpus(mask.first()?).intersection(grant);
        let is_whole = *mask == core;
        if !mask.is_subset(&core) {
            return None;
        }
        let first = *first_on.entry(core).or_insert(thread);
        let is_apart = first.process != thread.process || spread.contains(&thread.process);
        (is_whole && first != thread && is_apart).then_some(thread)
    })
}

#[cfg(test)]
mod tests;
