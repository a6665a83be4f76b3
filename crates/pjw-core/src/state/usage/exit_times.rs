//! The CPU times that are read right after the exit event of a process of a job. The next scan comes too late for a
//! process whose parent waits for it at once.

use super::UsageState;
use super::processes::ExitTimes;
use crate::basics::{Nanos, Pid, prelude::*};
use crate::terms::{ProcessCpuTimes, ProcessEvent};

impl UsageState {
    /// Returns the pids of the processes whose CPU times must be read at once, because `events` contains the
    /// exit of a process of a job. These are the exited process, which may still be a zombie, and its parent.
    /// The parent gets the CPU time of its child from the kernel when it waits for the child (wait4(2)).
    #[must_use]
    pub fn pids_with_exit_times_to_read(&self, events: &[ProcessEvent]) -> BTreeSet<Pid> {
        let exited = events.iter().filter_map(|event| match event {
            ProcessEvent::Exit { pid } => Some((*pid, self.processes.get(*pid)?.parent)),
            _ => None,
        });
        exited.flat_map(|(pid, parent)| [pid, parent]).filter(|pid| pid.0 > 1).collect()
    }

    /// Stores `cpu_times`: the CPU times of the processes that exited according to `events`, and of their parents, by pid
    /// ([`UsageState::pids_with_exit_times_to_read`]). The caller reads them directly after the exit events, because a
    /// process may be gone at the next scan. The next scan then adds to the job the CPU time that each exited process
    /// used since the scan before.
    ///
    /// `read_from` is a time just before the CPU times were read, in ns since boot. `None` if it is unknown.
    pub fn note_exit_times(
        &mut self,
        events: &[ProcessEvent],
        cpu_times: BTreeMap<Pid, ProcessCpuTimes>,
        read_from: Option<Nanos>,
    ) {
        let exited = events.iter().filter_map(|event| match event {
            ProcessEvent::Exit { pid } => Some(*pid),
            _ => None,
        });
        let exited: BTreeSet<Pid> = exited.collect();
        self.exit_times.extend(cpu_times.into_iter().map(|(pid, times)| {
            let is_final = exited.contains(&pid);
            (pid, ExitTimes { times, is_final, read_from })
        }));
    }

    /// Iterates over the pids of the processes outside of jobs whose CPU times the caller of
    /// [`UsageState::note_exit_times`] read. A child of such a process belonged to a job and has exited.
    pub(crate) fn parents_read_at_exit(&self) -> impl Iterator<Item = Pid> {
        self.exit_times.keys().copied().filter(|pid| self.outside_parents.contains_key(pid))
    }

    /// Removes and returns the CPU times of the processes outside of jobs that the caller of
    /// [`UsageState::note_exit_times`] read. A child of such a process belonged to a job and has exited.
    pub(crate) fn take_exit_times_of_parents(&mut self) -> Vec<(Pid, ProcessCpuTimes)> {
        let Self { exit_times, outside_parents, processes, .. } = self;
        let of_parents = exit_times.iter().filter(|(pid, _)| outside_parents.contains_key(pid));
        let taken = of_parents.map(|(&pid, read)| (pid, read.times)).collect();
        exit_times.retain(|pid, _| processes.get(*pid).is_some());
        taken
    }
}
