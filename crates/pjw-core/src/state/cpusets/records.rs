//! The journal records of job cpusets: what each record changes in the registry, and the records from which a restarted
//! daemon restores it.

use super::{CgroupMove, CpusetRegistry, ManagedCpuset};
use crate::basics::{CpuSet, Nanos, ProcessId, history::History, prelude::*};
use crate::terms::{CpusetRecord, JobCpuset};

/// The maximum number of times that pjw writes a cpuset again between two full scans. If more writes are needed,
/// another program probably overwrites the cpuset.
const MAX_TRIES: u32 = 4;

/// The time for which pjw keeps the history of a removed cpuset. In this time, scans read the masks of the
/// processes that were in the cpuset.
const HISTORY_AFTER_REMOVAL: Nanos = Nanos(60_000_000_000);

impl CpusetRegistry {
    /// Changes the registry of cpusets as the record `record` says. The record is in the journal (the file with which
    /// a restarted daemon restores its state). Called when pjw writes the record, and when a restarted daemon reads
    /// it. `machine` has every PU (logical CPU) of the machine. `at` is the time of the call, in ns since boot.
    pub(crate) fn apply_record(&mut self, record: &CpusetRecord, machine: &CpuSet, at: Nanos) {
        match record {
            CpusetRecord::Created(job_cpuset) => {
                self.write_history(&job_cpuset.path, &job_cpuset.spec.cpus, machine, at);
                self.record_created(job_cpuset);
            }
            CpusetRecord::Unwanted { path } => {
                self.write_history(path, machine, machine, at);
                if let Some(managed) = self.managed.get_mut(path) {
                    managed.must_be_removed = true;
                    self.to_remove.insert(path.clone());
                }
                self.forget_wanted(path);
            }
            CpusetRecord::Removed { path } => {
                self.forget_wanted(path);
                self.managed.remove(path);
                self.to_remove.remove(path);
                for process in self.moved_to.remove(path).into_iter().flatten() {
                    self.moved.remove(&process);
                    self.unmoved.remove(&process);
                }
                self.removed.insert(path.clone());
                self.forget_histories(at);
            }
            CpusetRecord::Moved { process, from, to } => {
                self.record_origin(to, from);
                self.record_move(*process, from.clone(), to.clone());
            }
            CpusetRecord::Origin { path, from } => {
                if let Some(managed) = self.managed.get_mut(path) {
                    managed.origin_cgroup = Some(from.clone());
                }
            }
        }
    }

    /// Records that no job is to have the cpuset at `path`.
    fn forget_wanted(&mut self, path: &str) {
        let job = self.managed.get(path).map(|managed| &managed.job_cpuset.job);
        if let Some(job) = job.filter(|job| self.wanted.get(*job).is_some_and(|wanted| wanted == path)) {
            self.wanted.remove(job);
        }
    }

    /// Records that the process `process` is in the job's cpuset at the path `to`, and that pjw must later move it back
    /// to the cgroup at the path `from`. Replaces an earlier record about the process.
    pub(super) fn record_move(&mut self, process: ProcessId, from: String, to: String) {
        self.remove_move(process);
        self.moved_to.entry(to.clone()).or_default().insert(process);
        self.moved.insert(process, CgroupMove { from, to });
    }

    /// Removes the record of [`CpusetRegistry::record_move`] about the process `process`, if there is one.
    pub(super) fn remove_move(&mut self, process: ProcessId) {
        let Some(moved) = self.moved.remove(&process) else { return };
        if let Some(processes) = self.moved_to.get_mut(&moved.to) {
            processes.remove(&process);
            if processes.is_empty() {
                self.moved_to.remove(&moved.to);
            }
        }
    }

    /// Removes the histories (the PUs at each time) of those removed cpusets that have not changed for
    /// [`HISTORY_AFTER_REMOVAL`]. `at` is the present time, in ns since boot.
    fn forget_histories(&mut self, at: Nanos) {
        let kept_from = Nanos(at.0.saturating_sub(HISTORY_AFTER_REMOVAL.0));
        let Self { history, removed, .. } = self;
        removed.retain(|path| {
            let is_kept = history.get(path).is_some_and(|history| history.has_changed_since(kept_from));
            if !is_kept {
                history.remove(path);
            }
            is_kept
        });
    }

    /// Adds a write of `cpus` at the time `at` to the history of the cpuset at `path`, even if the cpuset has these PUs
    /// already: a kernel before Linux 6.2 replaces affinity masks at every write.
    fn write_history(&mut self, path: &str, cpus: &CpuSet, machine: &CpuSet, at: Nanos) {
        let history = self.history.entry(path.to_owned()).or_insert_with(|| History::new(machine.clone()));
        history.replace(cpus.clone(), at);
        self.removed.remove(path);
    }

    /// Records that pjw moved a process from the cgroup at `from` into the cpuset at `path`. Keeps an earlier origin.
    fn record_origin(&mut self, path: &str, from: &str) {
        if let Some(managed) = self.managed.get_mut(path) {
            managed.origin_cgroup.get_or_insert_with(|| from.to_owned());
        }
    }

    /// Registers `job_cpuset` as the cpuset that its job is to have. If a cpuset with this path is registered
    /// already, two facts about it are kept: its former PUs, and the cgroup from which its processes came. Counts the
    /// writes of the cpuset. After more than [`MAX_TRIES`] writes without a full scan, another program probably
    /// overwrites the cpuset. This reason is then recorded for users.
    fn record_created(&mut self, job_cpuset: &JobCpuset) {
        let mut managed = ManagedCpuset {
            job_cpuset: job_cpuset.clone(),
            previous_cpus: Vec::new(),
            must_be_removed: false,
            was_written: false,
            origin_cgroup: None,
            tries: 1,
            was_refused: false,
        };
        if let Some(earlier) = self.managed.remove(&job_cpuset.path) {
            managed.previous_cpus = earlier.previous_cpus;
            managed.origin_cgroup = earlier.origin_cgroup;
            managed.tries += earlier.tries;
            // A write that is refused again and again has the same PUs each time.
            if !managed.previous_cpus.contains(&earlier.job_cpuset.spec.cpus) {
                managed.previous_cpus.push(earlier.job_cpuset.spec.cpus);
            }
        }
        let tries = managed.tries;
        self.managed.insert(job_cpuset.path.clone(), managed);
        self.wanted.insert(job_cpuset.job.clone(), job_cpuset.path.clone());
        self.to_remove.remove(&job_cpuset.path);
        if tries > MAX_TRIES {
            let why = format!("another program overwrites the cpuset of {}", job_cpuset.path);
            self.refused.insert(job_cpuset.job.clone(), why);
        }
    }

    /// Returns the journal records from which a restarted daemon restores the registry.
    pub(crate) fn records(&self) -> Vec<CpusetRecord> {
        let managed = self.managed.iter().flat_map(|(path, managed)| {
            let created_with = |cpus: &CpuSet| {
                let mut job_cpuset = managed.job_cpuset.clone();
                job_cpuset.spec.cpus = cpus.clone();
                CpusetRecord::Created(job_cpuset)
            };
            let earlier = managed.previous_cpus.iter().map(created_with);
            let present = [CpusetRecord::Created(managed.job_cpuset.clone())];
            let origin = managed.origin_cgroup.iter();
            let origin = origin.map(|from| CpusetRecord::Origin { path: path.clone(), from: from.clone() });
            let unwanted = managed.must_be_removed.then(|| CpusetRecord::Unwanted { path: path.clone() });
            earlier.chain(present).chain(origin).chain(unwanted).collect::<Vec<_>>()
        });
        let moved = self.moved.iter().map(|(&process, moved)| CpusetRecord::Moved {
            process,
            from: moved.from.clone(),
            to: moved.to.clone(),
        });
        managed.chain(moved).collect()
    }
}
