//! Which processes of a job share an address space, so that its memory counts once.
//!
//! The scans of the daemon find this out for a process at its second scan. A memory reading may come earlier. So the
//! reading compares the processes without a group, and one process of each group, by kcmp(2). It compares only
//! processes whose stacks have the same start address: the kernel keeps this address in the `mm_struct`, and execve(2)
//! chooses a new one. Processes that executed a program of their own cause no call.

use std::cmp::Ordering;
use std::collections::BTreeMap;

use nix::errno::Errno;
use pjw_core::cpuset::CpuSet;
use pjw_core::ids::{Pid, ProcessId};

/// One process of a job, as input for [`measure_job_memory`](super::measure_job_memory): its identity, its group of
/// processes with the same address space, and the number of its threads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct JobProcess {
    /// The pid and the start time of the process.
    pub id: ProcessId,
    /// The number of the group of processes with which the process shares its address space, as the scans of the daemon
    /// found it. `None` if the scans did not find that the process shares its address space.
    pub group: Option<u32>,
    /// The number of threads of the process, as the last scan found it.
    pub threads: usize,
}

/// The processes of a job whose memory is read, and the PUs (logical CPUs) on which the reading does not disturb the
/// job.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ProcessesToRead {
    /// The processes.
    pub processes: Vec<JobProcess>,
    /// The PUs that the job holds and does not use: no hot thread of the job needs them. A thread is hot if it runs or
    /// waits for a PU most of the time.
    pub idle_cpus: CpuSet,
}

impl From<ProcessId> for JobProcess {
    /// A process of one thread, of which no scan found that it shares its address space.
    fn from(id: ProcessId) -> Self {
        Self { id, group: None, threads: 1 }
    }
}

/// A process of a job whose memory is being measured, and which has not ended yet.
#[derive(Debug, Clone, Copy)]
pub(super) struct LiveProcess {
    pub(super) id: ProcessId,
    pub(super) group: Option<u32>,
    pub(super) threads: usize,
    /// The thread of which the memory of the process is read. The first thread has no memory any more if it has exited,
    /// while others go on. `None` if no thread has memory: a zombie.
    pub(super) thread: Option<Pid>,
    /// The start address of the stack. `None` if this user may not read it.
    pub(super) stack_start: Option<u64>,
}

/// Returns a number for each of the `processes`, in the same order. Processes with the same number share an address
/// space. `compare` compares the address spaces of two processes by kcmp(2). A process whose stack begins at another
/// address than those of all others shares with none of them, and is not compared. The number is `None` if the
/// address space can't be compared, for example because the kernel refuses kcmp(2).
pub(super) fn number_address_spaces(
    processes: &[LiveProcess],
    compare: impl Fn(Pid, Pid) -> Result<Ordering, Errno> + Copy,
) -> Vec<Option<u32>> {
    let mut stack_users: BTreeMap<u64, u32> = BTreeMap::new();
    for stack in processes.iter().filter_map(|process| process.stack_start) {
        *stack_users.entry(stack).or_default() += 1;
    }
    // For each start address of a stack: one process of each address space, with the number of this space.
    let mut numbered_spaces: BTreeMap<Option<u64>, Vec<(Pid, u32)>> = BTreeMap::new();
    // The key includes the stack: a process that executed a program after the last scan has another stack than its
    // group, and no longer belongs to the group.
    let mut group_numbers: BTreeMap<(u32, Option<u64>), u32> = BTreeMap::new();
    let mut number_process = |unused: u32, process: &LiveProcess| {
        let stack = process.stack_start;
        let group = process.group.map(|group| (group, stack));
        if let Some(&number) = group.and_then(|group| group_numbers.get(&group)) {
            return Some(number);
        }
        let has_own_stack = stack.is_some_and(|stack| stack_users.get(&stack) == Some(&1));
        let number = match process.thread.filter(|_| !has_own_stack) {
            None => Some(unused),
            Some(thread) => {
                find_or_add_space(numbered_spaces.entry(stack).or_default(), thread, unused, compare)
            }
        };
        // A group has a number even if its processes can't be compared.
        let number = number.or(group.map(|_| unused))?;
        group_numbers.extend(group.map(|group| (group, number)));
        Some(number)
    };
    (0..).zip(processes).map(|(unused, process)| number_process(unused, process)).collect()
}

/// Returns the number of the address space of the process `pid`. `None` if `pid` can't be compared, for example
/// because it has ended.
///
/// `spaces` has one process for each numbered address space, with the number of this space. It is sorted in the order
/// of kcmp(2), which `compare` calls. If the address space of `pid` is new, its number is `unused`, and `pid` is added
/// to `spaces`. Processes in `spaces` that have ended are removed.
fn find_or_add_space(
    spaces: &mut Vec<(Pid, u32)>,
    pid: Pid,
    unused: u32,
    compare: impl Fn(Pid, Pid) -> Result<Ordering, Errno>,
) -> Option<u32> {
    // A process that may not be compared with any other may not be compared with itself either.
    while compare(pid, pid).is_ok() {
        let mut incomparable = None;
        let position = spaces.binary_search_by(|&(other, _)| {
            compare(other, pid).unwrap_or_else(|_| {
                incomparable = Some(other);
                Ordering::Less
            })
        });
        let Some(other) = incomparable else {
            if let Err(index) = position {
                spaces.insert(index, (pid, unused));
            }
            return Some(position.map_or(unused, |index| spaces[index].1));
        };
        // One of the two processes has ended meanwhile. If it is `other`, the search starts again without `other`.
        if compare(other, other).is_ok() {
            return None;
        }
        spaces.retain(|&(space_pid, _)| space_pid != other);
    }
    None
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use pjw_core::ids::StartTime;

    use super::*;

    fn process(pid: u32, group: Option<u32>, stack_start: Option<u64>) -> LiveProcess {
        let id = ProcessId { pid: Pid(pid), start: StartTime(1) };
        LiveProcess { id, group, threads: 1, thread: Some(Pid(pid)), stack_start }
    }

    /// Processes without a group, all with the same stack.
    fn forked(pids: &[u32]) -> Vec<LiveProcess> {
        pids.iter().map(|&pid| process(pid, None, Some(0x7fff_0000))).collect()
    }

    /// The address space of each process is its pid without the last digit. Pids that end with 9 may not be compared.
    fn compare(one: Pid, other: Pid) -> Result<Ordering, Errno> {
        let is_hidden = |pid: Pid| pid.0 % 10 == 9;
        if is_hidden(one) || is_hidden(other) {
            Err(Errno::EPERM)
        } else {
            Ok((one.0 / 10).cmp(&(other.0 / 10)))
        }
    }

    #[test]
    fn the_address_space_of_a_process_that_cannot_be_compared_is_unknown() {
        assert_eq!(
            number_address_spaces(&forked(&[30, 39, 10, 49, 20, 31, 11, 21, 19]), compare),
            [Some(0), None, Some(2), None, Some(4), Some(0), Some(2), Some(4), None]
        );
        // Process 20 ends after it got its number.
        let has_ended = Cell::new(false);
        let ending = |one: Pid, other: Pid| {
            if has_ended.get() && (one.0 == 20 || other.0 == 20) {
                return Err(Errno::ESRCH);
            }
            has_ended.set(has_ended.get() || one.0 == 30);
            compare(one, other)
        };
        assert_eq!(number_address_spaces(&forked(&[20, 30, 10, 31, 11]), ending), [0, 1, 2, 1, 2].map(Some));
    }

    #[test]
    fn zombies_share_nothing() {
        let zombie = |pid| LiveProcess { thread: None, ..process(pid, None, None) };
        assert_eq!(number_address_spaces(&[zombie(1), zombie(2)], compare), [Some(0), Some(1)]);
    }

    #[test]
    fn processes_with_stacks_of_their_own_cause_no_call() {
        let calls = Cell::new(0);
        let counted = |one: Pid, other: Pid| {
            calls.set(calls.get() + 1);
            compare(one, other)
        };
        let ordinary: Vec<LiveProcess> =
            (0..10_000).map(|pid| process(pid, None, Some(u64::from(pid) << 12))).collect();
        let numbers = number_address_spaces(&ordinary, counted);
        assert!((0..10_000).map(Some).eq(numbers), "each has an address space of its own");
        assert_eq!(calls.get(), 0);
    }

    #[test]
    fn what_the_scans_found_needs_no_call_and_holds_where_kcmp_is_forbidden() {
        let forbidden = |_: Pid, _: Pid| Err(Errno::EPERM);
        let tasks = [1, 2, 3].map(|pid| process(pid, Some(7), Some(0x1000)));
        assert_eq!(number_address_spaces(&tasks, forbidden), [Some(0); 3]);
        let hidden = [1, 2].map(|pid| process(pid, Some(7), None));
        let others = [process(3, Some(8), None), process(4, None, None)];
        let numbers = number_address_spaces(&[hidden, others].concat(), forbidden);
        assert_eq!(numbers, [Some(0), Some(0), Some(2), None]);
    }

    #[test]
    fn a_process_that_executed_a_program_after_the_scan_is_in_its_group_no_more() {
        let tasks = [
            process(1, Some(7), Some(0x1000)),
            process(2, Some(7), Some(0x2000)),
            process(3, Some(7), Some(0x1000)),
        ];
        assert_eq!(number_address_spaces(&tasks, |_, _| Ok(Ordering::Equal)), [Some(0), Some(1), Some(0)]);
    }

    #[test]
    fn a_task_that_no_scan_has_seen_yet_is_found_beside_those_of_its_group() {
        let tasks = [
            process(11, None, Some(0x1000)),
            process(12, Some(7), Some(0x1000)),
            process(13, Some(7), Some(0x1000)),
        ];
        assert_eq!(number_address_spaces(&tasks, compare), [Some(0); 3]);
        let tasks = [tasks[1], tasks[2], tasks[0], process(21, None, Some(0x1000))];
        assert_eq!(number_address_spaces(&tasks, compare), [Some(0), Some(0), Some(0), Some(3)]);
    }
}
