//! The registry of job cpusets: which cpusets were made, which processes were moved, and which changes were
//! refused. The cpusets and the moves are in the journal.

pub mod delayed;
mod partitions;
mod records;
mod refusals;

use self::delayed::DelayedChanges;
use crate::basics::{CpuSet, Nanos, ProcessId, cgroup_and_ancestor_paths, history::History, prelude::*};
use crate::terms::{
    Cpuset, CpusetAction, CpusetChange, CpusetOutcome, JobCpuset, JobId, JobRequest, LeftoverCpuset, Warning,
};

/// A job's cpuset that pjw manages: pjw created or changed this cpuset, or is about to create or change it. Has
/// the facts that pjw needs in order to remove the cpuset later.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ManagedCpuset {
    /// The job, the path of the cgroup, and the settings of the cpuset.
    pub job_cpuset: JobCpuset,
    /// The sets of PUs that pjw wrote to the cpuset before the last set, oldest first. The last set is in `job_cpuset`.
    /// The cpuset may still have one of these earlier sets in two cases: the kernel refused a later write, or the
    /// daemon ended before a later write. (The daemon records each write in its journal before it makes the write.) The
    /// list becomes empty when a scan finds the last set in the cpuset.
    pub previous_cpus: Vec<CpuSet>,
    /// Whether pjw is to remove the cpuset, because no job needs the cpuset any longer.
    pub must_be_removed: bool,
    /// Whether this run of the daemon has written the settings in `job_cpuset`, and the kernel has accepted them. A
    /// scan reads the PUs of a cpuset, but not `cpu.idle` and `cgroup.freeze`. If this field is false, as after a
    /// restart of the daemon or a refused write, these two settings of the cpuset are unknown.
    pub was_written: bool,
    /// The path of the cgroup from which pjw moved the first process into the cpuset. When pjw removes the cpuset, it
    /// moves the processes in the cpuset out. A process that was forked inside the cpuset goes to this cgroup if pjw
    /// does not know from which cgroups it moved the ancestors of the process. `None` if pjw moved no process into the
    /// cpuset, or if the path is unknown.
    pub origin_cgroup: Option<String>,
    /// The number of writes of the cpuset that pjw has planned since the last scan of all processes, or since a later
    /// scan that found the settings in `job_cpuset` in the cpuset. If there are many, another program probably
    /// overwrites the cpuset again and again.
    tries: u32,
    /// Whether the kernel or systemd refused the last write of the settings in `job_cpuset`. pjw must then write them
    /// again, even if a scan finds these settings in the cpuset: systemd may still have other settings for the cpuset,
    /// and would write those at its next reload.
    was_refused: bool,
}

impl ManagedCpuset {
    /// Returns whether pjw last wrote exactly the settings `job_cpuset` to this cpuset. False if the cpuset is to be
    /// removed, or if the write was refused. A scan can't read whether a cpuset has idle priority. So if
    /// `job_cpuset` has idle priority, the result is true only if this run of the daemon wrote the settings.
    pub(crate) fn was_last_written_with(&self, job_cpuset: &JobCpuset) -> bool {
        let is_known = self.was_written || !job_cpuset.spec.idle;
        is_known && self.job_cpuset == *job_cpuset && !self.must_be_removed && !self.was_refused
    }

    /// Whether pjw wrote the PUs (logical CPUs) of the cpuset that this `ManagedCpuset` describes. `cpuset` is the
    /// state in which a scan found the cpuset. True if the PUs in `cpuset` are the set that pjw wrote last, or an
    /// earlier set that may still be in force ([`ManagedCpuset::previous_cpus`]). False if another program has changed
    /// the PUs.
    #[must_use]
    pub fn has_cpus_from_pjw(&self, cpuset: &Cpuset) -> bool {
        self.possible_cpus().any(|cpus| *cpus == cpuset.cpus)
    }

    /// Iterates over the PU sets that the cpuset may have.
    fn possible_cpus(&self) -> impl Iterator<Item = &CpuSet> {
        self.previous_cpus.iter().chain([&self.job_cpuset.spec.cpus])
    }
}

/// A move of a process by pjw into a job's cpuset: the cgroup of the process before the move and after the
/// move. This type does not name the process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CgroupMove {
    /// The path of the cgroup that contained the process before the move.
    pub from: String,
    /// The path of the cgroup of the job's cpuset, into which pjw moved the process.
    pub to: String,
}

/// A job's cpuset that an earlier run of the daemon left and that the journal does not contain, with the decision of
/// pjw: the job keeps the cpuset, or pjw removes the cpuset.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct LeftoverDecision {
    /// The job for which the cpuset was made.
    pub(crate) job: JobId,
    /// The request of the job after the decision. `None` if the job has no request.
    pub(crate) request: Option<JobRequest>,
    /// The processes that were in the cpuset.
    pub(crate) processes: Vec<ProcessId>,
    /// The reason why pjw removes the cpuset. `None` if the job keeps its cores.
    pub(crate) removal_reason: Option<String>,
}

/// The cpusets that pjw created or changed for jobs, the processes that pjw moved into these cpusets, and
/// the changes that the kernel or systemd refused.
#[derive(Debug, Clone, Default)]
pub struct CpusetRegistry {
    managed: BTreeMap<String, ManagedCpuset>,
    /// For each job the path of the cpuset that the job is to have.
    wanted: BTreeMap<JobId, String>,
    /// The paths of the cpusets that are to be removed.
    to_remove: BTreeSet<String>,
    moved: BTreeMap<ProcessId, CgroupMove>,
    /// The same processes, by the cgroup to which they were moved.
    moved_to: BTreeMap<String, BTreeSet<ProcessId>>,
    /// Those processes in `moved` that were not found in the cpuset since their move was planned, because the move was
    /// not made, and those that pjw has moved back since. Not in the journal: after a restart, the first scan of each
    /// process decides ([`CpusetRegistry::note_first_cgroup`]).
    unmoved: BTreeSet<ProcessId>,
    /// For each job whose cpuset could not be created or changed: the reason ([`CpusetRegistry::cpuset_error`]).
    refused: BTreeMap<JobId, String>,
    /// For each process that could not be moved: the reason ([`CpusetRegistry::move_error`]).
    move_errors: BTreeMap<ProcessId, String>,
    /// For each cpuset that could not be removed: the reason. The key is the cgroup path.
    failed_removals: BTreeMap<String, String>,
    /// The PUs of each cpuset, now and in the past.
    history: BTreeMap<String, History<CpuSet>>,
    /// The paths of removed cpusets that have a history.
    removed: BTreeSet<String>,
    /// The leftover cgroups: cgroups with the name of a job's cpuset that existed when the daemon started and that are
    /// not in the journal. The next scan of all processes decides about each of them: it becomes the cpuset of its job
    /// again, or pjw removes it. It then leaves this list.
    leftovers: Vec<LeftoverCpuset>,
    /// The former entries of `leftovers` that a warning in `pjwctl status` names, by path.
    leftover_decisions: BTreeMap<String, LeftoverDecision>,
    /// The delayed changes of cpusets. A change is delayed if pjw requested it in one cycle of the daemon, and the
    /// kernel or systemd had not completed it at the end of this cycle. (A cycle is a scan, a decision and the decided
    /// changes.)
    pub delayed_changes: DelayedChanges,
}

impl CpusetRegistry {
    /// Returns the cpuset at the cgroup path `path`, if pjw manages it: pjw created or changed the cpuset for a job, or
    /// is about to create or change it. Otherwise returns `None`.
    #[must_use]
    pub fn cpuset_at(&self, path: &str) -> Option<&ManagedCpuset> {
        self.managed.get(path)
    }

    /// Iterates over the cgroup paths of all cpusets in the registry, including cpusets that pjw is to
    /// remove.
    pub fn paths(&self) -> impl Iterator<Item = &str> {
        self.managed.keys().map(String::as_str)
    }

    /// Iterates over the cgroup paths of the cpusets that no job needs and that are still to be removed.
    pub(crate) fn paths_to_remove(&self) -> impl Iterator<Item = &str> {
        self.to_remove.iter().map(String::as_str)
    }

    /// Adds a leftover cpuset: a cpuset that a daemon of pjw wrote for a job and that existed when this daemon started.
    /// Has no effect if pjw already manages the cpuset at this path.
    pub(crate) fn add_leftover_cpuset(&mut self, leftover: LeftoverCpuset) {
        if !self.managed.contains_key(&leftover.path) {
            self.leftovers.push(leftover);
        }
    }

    /// Adds a leftover cpuset again, after [`CpusetRegistry::take_leftover_cpusets`] has returned it. Unlike
    /// [`CpusetRegistry::add_leftover_cpuset`], also adds a cpuset that pjw manages: until pjw has written this cpuset,
    /// its PUs are those that the earlier run or the other daemon wrote.
    pub(crate) fn keep_leftover_cpuset(&mut self, leftover: LeftoverCpuset) {
        self.leftovers.push(leftover);
    }

    /// Iterates over the cgroup paths of the leftover cpusets. A leftover cpuset ([`LeftoverCpuset`]) existed when this
    /// daemon started: an earlier run of this daemon, or another daemon of pjw, had written the cpuset for a job.
    ///
    /// - A cpuset of an earlier run is included until pjw has decided whether to use it for its job again. pjw decides
    ///   after the next scan of all processes. In the mode `observe`, pjw does not decide.
    /// - A cpuset of another daemon is included until the cpuset is removed or gets other PUs (logical CPUs).
    pub fn leftover_paths(&self) -> impl Iterator<Item = &str> {
        self.leftovers.iter().map(|leftover| leftover.path.as_str())
    }

    /// Returns whether an earlier run of this daemon left a cpuset about which pjw has not decided yet: whether to use
    /// the cpuset for its job again. Cpusets that another daemon of pjw wrote ([`LeftoverCpuset::other_writer`]) are
    /// ignored, because pjw leaves them as they are.
    #[must_use]
    pub fn has_undecided_leftovers(&self) -> bool {
        self.leftovers.iter().any(|leftover| leftover.other_writer.is_none())
    }

    /// Returns the leftover cpuset that a daemon of pjw wrote in the batch system's cgroup at `path`. `cpuset` is the
    /// cpuset of this cgroup as a scan read it. `None` if it has other PUs (logical CPUs) than the daemon wrote.
    pub(crate) fn leftover_for_scheduler(&self, path: &str, cpuset: &Cpuset) -> Option<&LeftoverCpuset> {
        let is_in_force = |written: &JobCpuset| written.path == path && written.spec.cpus == cpuset.cpus;
        self.leftovers.iter().find(|leftover| leftover.scheduler_cpuset.as_ref().is_some_and(is_in_force))
    }

    /// Returns the leftover cpuset that an earlier run of this daemon wrote for the job `job` in the cgroup of a batch
    /// system. `None` if there is none, or if pjw has decided about it.
    pub(crate) fn leftover_scheduler_cpuset_of(&self, job: &JobId) -> Option<&JobCpuset> {
        let own = self.leftovers.iter().filter(|leftover| leftover.other_writer.is_none());
        own.filter_map(|leftover| leftover.scheduler_cpuset.as_ref()).find(|written| written.job == *job)
    }

    /// Removes all leftover cpusets from the registry, and returns them. A daemon of pjw wrote such a cpuset for a job
    /// before this daemon started, and the journal has no record of the cpuset.
    pub(crate) fn take_leftover_cpusets(&mut self) -> Vec<LeftoverCpuset> {
        core::mem::take(&mut self.leftovers)
    }

    /// Records what pjw decided about the leftover cpuset at the cgroup path `path`. An earlier run of the daemon made
    /// this cpuset, and the journal does not contain the cpuset. A warning in `pjwctl status` names the decision.
    pub(crate) fn add_leftover_decision(&mut self, path: &str, decision: LeftoverDecision) {
        self.leftover_decisions.insert(path.to_owned(), decision);
    }

    /// Removes and returns the decisions about leftover cpusets (cpusets that an earlier run of the daemon made, and
    /// that the journal does not contain). A warning in `pjwctl status` names these decisions. The key of the map is
    /// the cgroup path.
    pub(crate) fn take_leftover_decisions(&mut self) -> BTreeMap<String, LeftoverDecision> {
        core::mem::take(&mut self.leftover_decisions)
    }

    /// Replaces the decisions about leftover cpusets (cpusets that an earlier run of the daemon made, and that the
    /// journal does not contain). A warning in `pjwctl status` names these decisions. The key of the map is the cgroup
    /// path.
    pub(crate) fn set_leftover_decisions(&mut self, decisions: BTreeMap<String, LeftoverDecision>) {
        self.leftover_decisions = decisions;
    }

    /// Returns the cpuset that pjw created or changed for a job, or is about to create or change. `None` if pjw
    /// manages no cpuset for the job, or if the job no longer needs its cpuset.
    #[must_use]
    pub fn cpuset_of(&self, job: &JobId) -> Option<&ManagedCpuset> {
        self.managed.get(self.wanted.get(job)?)
    }

    /// Whether a scan at the time `read_at` (in ns since boot) may have read only a part of the mask that was requested
    /// for a thread, because a cpuset of pjw hides the other part. The cpuset is the cgroup `cgroup` of the thread, or
    /// a cgroup above it. True in each of these cases:
    ///
    /// - pjw wrote such a cpuset after `read_at`.
    /// - Such a cpuset is to be removed.
    /// - There is such a cpuset, and `is_cut` is true: the mask that was read lacks PUs (logical CPUs) of the original
    ///   mask (the mask before pjw changed it).
    pub(crate) fn may_hide_mask(&self, cgroup: &str, is_cut: bool, read_at: Nanos) -> bool {
        cgroup_and_ancestor_paths(cgroup).any(|path| {
            let is_written = self.history.get(path).is_some_and(|history| history.has_changed_since(read_at));
            is_written || self.to_remove.contains(path) || (is_cut && self.managed.contains_key(path))
        })
    }

    /// Whether pjw moved the process into the cpuset of any job. The result stays true until the process exits
    /// or the cpuset is removed, even if another program moves the process out of the cpuset.
    #[must_use]
    pub fn was_moved_into_any_cpuset(&self, process: ProcessId) -> bool {
        self.moved.contains_key(&process)
    }

    /// Returns the cgroup path of the cpuset into which pjw last moved the process `process`. `None` if pjw moved the
    /// process into no cpuset, or if the cpuset was removed.
    pub(crate) fn last_move_destination(&self, process: ProcessId) -> Option<&str> {
        self.moved.get(&process).map(|moved| moved.to.as_str())
    }

    /// Whether pjw moved the process into the cpuset at the cgroup path `path`. The result stays true until
    /// the process exits or the cpuset is removed, even if another program moves the process out of the
    /// cpuset.
    #[must_use]
    pub fn was_moved_into_cpuset_at(&self, process: ProcessId, path: &str) -> bool {
        self.last_move_destination(process) == Some(path)
    }

    /// Whether the process was in the cpuset at the cgroup path `path` after pjw moved it there. False if the move was
    /// not made, for example because the memory of the process is locked. Also false if pjw moved the process back.
    pub(crate) fn has_been_inside(&self, process: ProcessId, path: &str) -> bool {
        self.was_moved_into_cpuset_at(process, path) && !self.unmoved.contains(&process)
    }

    /// Returns the nearest cpuset of pjw that contains the cgroup at the path `cgroup`. This is the cpuset at
    /// this path, or else the cpuset at the nearest ancestor of this path. `None` if pjw manages no such
    /// cpuset.
    #[must_use]
    pub fn enclosing_cpuset(&self, cgroup: &str) -> Option<&ManagedCpuset> {
        cgroup_and_ancestor_paths(cgroup).find_map(|path| self.managed.get(path))
    }

    /// Returns the PUs (logical CPUs) of the cpuset at the cgroup path `path`, now and at earlier times. `None` if pjw
    /// never wrote the cpuset, or removed it long ago.
    pub(crate) fn cpu_history(&self, path: &str) -> Option<&History<CpuSet>> {
        self.history.get(path)
    }

    /// Returns the path of the cgroup to which pjw moves a process when pjw removes the job's cpuset at `path`.
    /// `ancestry` lists the process, its parent, its grandparent and so on. The first known path is returned:
    ///
    /// 1. The cgroup from which pjw moved the process into a cpuset.
    /// 2. The cgroup from which pjw moved the nearest ancestor in `ancestry` into a cpuset.
    /// 3. [`ManagedCpuset::origin_cgroup`] of the cpuset at `path`: the cgroup from which its first process came.
    ///
    /// Returns `None` if no path is known.
    #[must_use]
    pub fn original_cgroup(&self, ancestry: impl IntoIterator<Item = ProcessId>, path: &str) -> Option<&str> {
        let moved = ancestry.into_iter().find_map(|process| self.moved.get(&process));
        let original =
            moved.map(|moved| &moved.from).or_else(|| self.managed.get(path)?.origin_cgroup.as_ref());
        original.map(String::as_str)
    }

    /// Returns the path of the cgroup in which the process `process` is without the moves of pjw. `cgroup` is the path
    /// of its present cgroup. The result is its original cgroup ([`CpusetRegistry::original_cgroup`]) if it is in a
    /// cpuset of pjw and the original cgroup is known, and otherwise `cgroup`.
    pub(crate) fn cgroup_without_pjw<'a>(&'a self, process: ProcessId, cgroup: &'a str) -> &'a str {
        let enclosing = self.enclosing_cpuset(cgroup);
        let original =
            enclosing.and_then(|managed| self.original_cgroup([process], &managed.job_cpuset.path));
        original.unwrap_or(cgroup)
    }

    /// Returns the reason why pjw could not create or change the cpuset of the job: the kernel or systemd
    /// refused the last attempt, or another program overwrites the cpuset. `None` if no attempt has failed
    /// since the last scan of all processes.
    #[must_use]
    pub fn cpuset_error(&self, job: &JobId) -> Option<&str> {
        self.refused.get(job).map(String::as_str)
    }

    /// Returns the reason why the kernel or systemd refused the last attempt to move the process into the
    /// cpuset of its job, or out of a cpuset back to the original cgroup of the process. `None` if no such
    /// attempt was refused since the last scan of all processes.
    #[must_use]
    pub fn move_error(&self, process: ProcessId) -> Option<&str> {
        self.move_errors.get(&process).map(String::as_str)
    }

    /// Whether the last attempt to remove the cpuset at the cgroup path `path` failed: the kernel or systemd
    /// refused to remove the limits of the cpuset, or to remove its cgroup. pjw forgets the failure at the next
    /// scan of all processes, and then tries again.
    #[must_use]
    pub fn has_failed_removal(&self, path: &str) -> bool {
        self.failed_removals.contains_key(path)
    }

    /// Returns the jobs whose cpuset the kernel or systemd refused to write since the last scan of all processes.
    pub(crate) fn jobs_with_refused_cpusets(&self) -> Vec<JobId> {
        self.refused.keys().cloned().collect()
    }

    /// Removes the recorded failures, so that the refused changes are tried again. Must be called before a full scan.
    pub(crate) fn reset_failures(&mut self) {
        self.refused.clear();
        self.move_errors.clear();
        self.failed_removals.clear();
        self.managed.values_mut().for_each(|managed| managed.tries = 0);
    }

    /// Records that pjw no longer knows the settings `cpu.idle` and `cgroup.freeze` of any cpuset. Scans do not read
    /// these two settings. So this method must be called if another program may have changed them. pjw writes both
    /// settings again when it next plans the cpuset of a borrower (a job of the class besteffort, which borrows cores).
    pub fn forget_unread_settings(&mut self) {
        self.managed.values_mut().for_each(|managed| managed.was_written = false);
    }

    /// Returns whether every requested change of a cpuset is complete. False if a change was refused, is delayed or is
    /// to be tried again, or if a cpuset is still to be removed.
    pub(crate) fn are_all_changes_complete(&self) -> bool {
        let is_done = |managed: &ManagedCpuset| !managed.must_be_removed && managed.tries == 0;
        self.refused.is_empty()
            && self.move_errors.is_empty()
            && self.failed_removals.is_empty()
            && self.delayed_changes.is_empty()
            && self.managed.values().all(is_done)
    }

    /// Records that a scan at the time `at` (in ns since boot) read the PUs (logical CPUs) `cpus` in the cpuset at the
    /// cgroup path `path`. These PUs may differ from those that pjw wrote last: the daemon may have ended before the
    /// write, or another program may have written the cpuset. Has no effect while a delayed change writes the cpuset.
    pub(crate) fn record_cpus_read(&mut self, path: &str, cpus: &CpuSet, at: Nanos) {
        let history = self.history.get_mut(path).filter(|_| !cpus.is_empty());
        if let Some(history) = history.filter(|_| !self.delayed_changes.is_writing(path)) {
            history.replace_if_different(cpus.clone(), at);
        }
    }

    /// Records the outcome of `action`, a change of a cpuset that pjw has requested from the kernel or systemd. Must be
    /// called once for each requested change. If the change was refused, this function calls
    /// [`CpusetRegistry::record_refusal`]. If the change is not complete yet, it is added to
    /// [`CpusetRegistry::delayed_changes`].
    pub fn record_outcome(&mut self, action: &CpusetAction, outcome: &CpusetOutcome) {
        self.record_move_attempt(action, outcome);
        match outcome {
            CpusetOutcome::Done { .. } => self.record_done(action),
            CpusetOutcome::Refused { reason } => self.record_refusal(action, reason),
            CpusetOutcome::NotMoved { reason } => match action.moved_process() {
                // The process keeps its original cgroup, to which a later move brings it back.
                Some(process) => drop(self.move_errors.insert(process, reason.clone())),
                None => self.record_refusal(action, reason),
            },
            CpusetOutcome::Delayed => self.delayed_changes.add(action),
            CpusetOutcome::Gone => {}
        }
    }

    /// Records that pjw did not try the planned change `action` of a cpuset, because the journal could not be written.
    /// pjw counts its planned writes to each cpuset. Too many writes between two scans of all processes show that
    /// another program overwrites the cpuset. This function takes the write in `action` off the count.
    pub fn record_not_attempted(&mut self, action: &CpusetAction) {
        let CpusetChange::Create { job_cpuset, .. } = &action.change else { return };
        if let Some(managed) = self.managed.get_mut(&job_cpuset.path) {
            managed.tries = managed.tries.saturating_sub(1);
        }
    }

    /// Records that the settings of a cpuset were written, if no other settings were planned meanwhile.
    fn record_done(&mut self, action: &CpusetAction) {
        let CpusetChange::Create { job_cpuset, .. } = &action.change else { return };
        if let Some(managed) = self.managed.get_mut(&job_cpuset.path) {
            managed.was_written = managed.job_cpuset == *job_cpuset;
        }
    }

    /// Records that a scan found the settings that pjw wrote last in the cpuset at the cgroup path `path`.
    pub(crate) fn confirm_written_settings(&mut self, path: &str) {
        if let Some(managed) = self.managed.get_mut(path) {
            managed.previous_cpus.clear();
            managed.tries = 0;
        }
    }

    /// Removes what is recorded about the process `process`, which has exited: its move into a job's cpuset, and the
    /// error of a move that failed.
    pub(crate) fn remove_process(&mut self, process: ProcessId) {
        self.remove_move(process);
        self.move_errors.remove(&process);
        self.unmoved.remove(&process);
    }

    /// Records that the delayed writes of cpusets took place at the time `at` (in ns since boot) or later. A write is
    /// delayed if the kernel or systemd did not complete it at once.
    pub(crate) fn set_delayed_write_times(&mut self, at: Nanos) {
        for path in self.delayed_changes.take_written_cpusets() {
            if let Some(history) = self.history.get_mut(&path) {
                history.postpone_last_replacement(at);
            }
        }
    }

    /// Returns the reason why pjw could not move a process out of the cpuset at the cgroup path `path`, back to the
    /// original cgroup of the process (the cgroup before pjw moved it). `None` if no such move failed since the last
    /// scan of all processes.
    #[must_use]
    pub fn move_back_error(&self, path: &str) -> Option<&str> {
        let of_path =
            self.move_errors.iter().find(|(process, _)| self.was_moved_into_cpuset_at(**process, path));
        of_path.map(|(_, reason)| reason.as_str())
    }

    /// Iterates over the warnings about cpuset cgroups that could not be removed.
    pub(crate) fn removal_warnings(&self) -> impl Iterator<Item = Warning> + '_ {
        self.failed_removals.iter().filter_map(|(path, reason)| {
            let managed = self.managed.get(path)?;
            let mut why = format!("{path} is open and could not be removed: {reason}");
            if let Some(reason) = self.move_back_error(path) {
                why += "; ";
                why += reason;
            }
            let remedy = "it is removed once its last process has ended";
            let job = Some(managed.job_cpuset.job.clone());
            Some(Warning { job, ..Warning::new("wall-stays", why, remedy) })
        })
    }
}

#[cfg(test)]
mod tests;
