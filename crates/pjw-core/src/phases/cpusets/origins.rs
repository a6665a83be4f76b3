//! The original cgroups of processes: the cgroups to which pjw moves processes back from the cpuset of a job.

use crate::basics::{Pid, ProcessId, prelude::*};
use crate::phases::membership::parent_of;
use crate::state::WardenState;

/// A search for the original cgroups of processes in one cpuset. The results are kept, so that a chain of thousands of
/// nested processes is walked only once.
pub(super) struct OriginSearch<'a> {
    state: &'a WardenState,
    /// The path of the cpuset.
    job_cpuset: &'a str,
    moved: MovedAncestors,
}

impl<'a> OriginSearch<'a> {
    /// Starts a search for the original cgroups of processes in the cpuset at the path `job_cpuset`.
    pub(super) fn new(state: &'a WardenState, job_cpuset: &'a str) -> Self {
        Self { state, job_cpuset, moved: MovedAncestors::default() }
    }

    /// Returns the path of the original cgroup of `process`, to which pjw can move the process back from the cpuset.
    /// This is the first of these cgroups that is known:
    ///
    /// 1. The cgroup from which pjw moved the process into a cpuset.
    /// 2. The cgroup from which pjw moved the nearest ancestor. The search follows the parents ([`parent_of`]), and
    ///    ends at the first ancestor that is not in this cpuset and was never moved into a cpuset of pjw.
    /// 3. The cgroup from which the first process in this cpuset came.
    ///
    /// Returns `None` if none of these cgroups is known.
    pub(super) fn original_cgroup(&mut self, process: ProcessId) -> Option<&'a str> {
        let (state, job_cpuset) = (self.state, self.job_cpuset);
        let was_moved = |process: ProcessId| state.cpusets.was_moved_into_any_cpuset(process);
        let parent_inside = |process: ProcessId| {
            let parent = &parent_of(state, state.process(process.pid)?)?.process;
            (parent.is_in_cgroup(job_cpuset) || was_moved(parent.id)).then_some(parent.id)
        };
        let known = state.process(process.pid);
        let moved = known.and_then(|known| self.moved.find(known.id, was_moved, parent_inside));
        state.cpusets.original_cgroup(moved, job_cpuset)
    }

    /// Returns the path of the original cgroup of `process`, if pjw can move the process back to it now from the
    /// cpuset. `None` if the original cgroup is unknown, if the process can't be moved, or if pjw is still moving the
    /// process for another job.
    pub(super) fn cgroup_to_return_to(&mut self, process: ProcessId) -> Option<String> {
        let cpusets = &self.state.cpusets;
        let is_movable = cpusets.move_error(process).is_none() && !cpusets.delayed_changes.is_moving(process);
        self.original_cgroup(process).filter(|_| is_movable).map(str::to_owned)
    }
}

/// For each visited process, by its pid: the process itself if pjw moved it into a cpuset, or else its nearest ancestor
/// that pjw moved. `None` if there is no such process.
#[derive(Default)]
struct MovedAncestors(BTreeMap<Pid, Option<ProcessId>>);

impl MovedAncestors {
    /// Returns the first process for which `was_moved` is true, among `process` and its ancestors. `parent` returns the
    /// parent of a process, or `None` where the search ends. Stores the result for each visited process, so that no
    /// process is visited twice.
    fn find(
        &mut self,
        process: ProcessId,
        was_moved: impl Fn(ProcessId) -> bool,
        mut parent: impl FnMut(ProcessId) -> Option<ProcessId>,
    ) -> Option<ProcessId> {
        let mut visited = Vec::new();
        let mut moved = None;
        let mut next = Some(process);
        while let Some(process) = next {
            if let Some(known) = self.0.get(&process.pid) {
                moved = *known;
                break;
            }
            // Parents that were read at different times can form a cycle, because process ids are used again. The
            // search then ends at this entry.
            self.0.insert(process.pid, None);
            visited.push(process.pid);
            if was_moved(process) {
                moved = Some(process);
                break;
            }
            next = parent(process);
        }
        self.0.extend(visited.into_iter().map(|pid| (pid, moved)));
        moved
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::basics::StartTime;

    fn process(pid: u32) -> ProcessId {
        ProcessId { pid: Pid(pid), start: StartTime(0) }
    }

    #[test]
    fn each_process_of_a_chain_is_visited_once() {
        const SIZE: u32 = 5000;
        let was_moved = |other: ProcessId| other == process(1);
        for pids in [Vec::from_iter(1..=SIZE), Vec::from_iter((1..=SIZE).rev())] {
            let (mut ancestors, mut steps) = (MovedAncestors::default(), 0);
            for pid in pids {
                let parent = |child: ProcessId| {
                    steps += 1;
                    Some(process(child.pid.0 - 1))
                };
                assert_eq!(ancestors.find(process(pid), was_moved, parent), Some(process(1)), "{pid}");
            }
            assert_eq!(steps, SIZE - 1);
        }
    }

    #[test]
    fn a_search_ends_in_a_cycle_of_parents() {
        let mut ancestors = MovedAncestors::default();
        let parent = |child: ProcessId| Some(process(child.pid.0 % 3 + 1));
        assert_eq!(ancestors.find(process(1), |_| false, parent), None);
        assert_eq!(ancestors.0.len(), 3);
    }
}
