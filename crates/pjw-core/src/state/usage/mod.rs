//! What the running jobs have used so far: the open [`JobUsage`] of each job, and the CPU times of their processes.
//!
//! The CPU time of a job is exact for children that lived for a millisecond, although no scan ever read them. When a
//! process waits for a child (wait4(2)), the kernel adds the CPU time of the child and of the children that the child
//! waited for to the waiting process (`cutime` and `cstime` of proc_pid_stat(5)). So the job has used:
//!
//! - what each of its processes used itself, as last read,
//! - and what each of them got from children, except the part that was read while the child lived.
//!
//! The parent of a process may not belong to the job, such as the shell that started `pjwctl run`. After the end of the
//! process, the CPU times of this parent show the rest of the CPU time of the process: what the parent got from the
//! kernel less what was read of the process. docs/adr/0024 has the alternatives.

use crate::basics::{CpuSet, Nanos, Pid, ProcessId, StartTime, prelude::*};
use crate::terms::{Event, EventKind, JobId, JobUsage, MemoryReading, ProcessCpuTimes, UsageSample};

mod exit_times;
mod processes;
mod table;

pub(crate) use processes::ProcessUsage;
pub(crate) use processes::is_same_start;
use processes::{ExitTimes, LateTime, MAX_ROUNDING_NS, OutsideParent, may_have_started_after};
use table::ProcessTable;

/// The possible error, in ns, of the known time between the last reading of a process and its end.
const UNREAD_MARGIN_NS: u64 = 500_000_000;

/// While processes of a job end and the job goes on, the peak memory use of its cgroup is read at most once in this
/// time, in ns.
const MEMORY_PEAK_INTERVAL_NS: u64 = 1_000_000_000;

/// The CPU usage of all running jobs, and the CPU times of processes from which this usage is computed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct UsageState {
    jobs: BTreeMap<JobId, RunningJobUsage>,
    /// The processes of jobs whose CPU time was read.
    processes: ProcessTable,
    /// The parents of processes of jobs that belong to no job themselves, by pid.
    outside_parents: BTreeMap<Pid, OutsideParent>,
    /// The outside parents from which the time of an ended child is still expected.
    expected_from: BTreeSet<Pid>,
    /// The pids of the `processes` with this parent, for each parent that has one.
    children: BTreeMap<Pid, BTreeSet<Pid>>,
    /// The CPU times of processes of jobs that have exited, and of their parents, as read right after the exit events.
    /// They are used where the next scan comes too late: the parent may have ended too.
    exit_times: BTreeMap<Pid, ExitTimes>,
    /// The time for which threads of the process that is being updated waited for a PU, in ns, as far as no sample has
    /// this time yet.
    pub(crate) pending_wait_ns: u64,
}

/// The resource usage of a job that has not ended: the usage so far, and the CPU time in the present sample (the time
/// interval for which pjw is adding up CPU time).
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct RunningJobUsage {
    pub(crate) usage: JobUsage,
    /// The beginning of the sample that is being collected, in ns since boot.
    pub(crate) sample_began_at: Nanos,
    /// The CPU time and the wait time in this sample, in ns.
    pub(crate) sample_cpu_ns: u64,
    pub(crate) sample_wait_ns: u64,
    /// The number of cores that the job held in this sample until `held_until`, times the time, in ns.
    pub(crate) sample_held_ns: u64,
    /// The time in this sample until `held_until` in which the job held no PU, in ns.
    pub(crate) sample_without_pus_ns: u64,
    /// The numbers of cores and PUs that the job held last, before `held_until`. 0 if it never held any.
    pub(crate) last_held_counts: (u32, u32),
    /// The number of scans at which this sample did not end, because the scan took too long.
    pub(crate) slow_scans: u32,
    /// The time until which these two count, in ns since boot.
    pub(crate) held_until: Nanos,
    /// The last time at which the usage was written to the journal, in ns since boot.
    pub(crate) recorded_at: Nanos,
    /// The time at which the peak memory use of the job's cgroup was last read because a process had ended, in ns since
    /// boot.
    memory_peak_read_at: Nanos,
    /// The PUs that the job held at the last sample.
    pub(crate) cpus: CpuSet,
    /// The CPU time of the job's cgroup at its first and last reading, in ns.
    pub(crate) cgroup_cpu_ns: Option<(u64, u64)>,
    /// The CPU time that an earlier daemon had computed. `None` if this daemon has seen the job begin.
    pub(crate) recovered_cpu_ns: Option<u64>,
    /// Whether no process of the job was read since an earlier daemon recorded the usage.
    pub(crate) is_unread: bool,
}

impl RunningJobUsage {
    /// Adds `ns` nanoseconds of CPU time to the job.
    pub(crate) fn add_cpu(&mut self, ns: u64) {
        self.usage.cpu_ns += ns;
        self.sample_cpu_ns += ns;
    }

    /// Ends the counting of held cores for a sample of `length_ns` ns. Returns a sample that has only what was counted:
    /// the two times, and the numbers of cores and PUs that the job held last.
    pub(crate) fn take_held_times(&mut self, length_ns: u64) -> UsageSample {
        let held_ns = core::mem::take(&mut self.sample_held_ns);
        // The time after the end of the sample counts in the next sample.
        let without_pus_ns = self.sample_without_pus_ns.min(length_ns);
        self.sample_without_pus_ns -= without_pus_ns;
        let (cores, pus) = self.last_held_counts;
        UsageSample { held_ns, without_pus_ns, cores, pus, ..UsageSample::default() }
    }

    /// Returns the CPU time of the job, in ns. The result is the largest of three values: the sum over the processes of
    /// the job, the CPU time of the job's cgroup, and the CPU time that an earlier run of the daemon recorded.
    pub(crate) fn cpu_ns(&self) -> u64 {
        let of_cgroup = self.cgroup_cpu_ns.map_or(0, |(first, last)| last.saturating_sub(first));
        self.usage.cpu_ns.max(of_cgroup).max(self.recovered_cpu_ns.unwrap_or(0))
    }
}

impl UsageState {
    /// Begins to record the usage of the job `job` at the time `now`, in ns since boot. Has no effect if pjw already
    /// records the usage of the job.
    pub(crate) fn begin_recording(&mut self, job: &JobId, now: Nanos) {
        self.jobs.entry(job.clone()).or_insert_with(|| RunningJobUsage {
            usage: JobUsage::new(now),
            sample_began_at: now,
            recorded_at: now,
            ..RunningJobUsage::default()
        });
    }

    /// Continues to record the usage of the job `job`. `usage` is the usage that an earlier run of the daemon wrote to
    /// the journal.
    pub(crate) fn resume_recording(&mut self, job: JobId, usage: JobUsage) {
        let recovered_cpu_ns = Some(usage.cpu_ns);
        let usage = JobUsage { cpu_ns: usage.ended_cpu_ns, ..usage };
        self.jobs.insert(
            job,
            RunningJobUsage { usage, recovered_cpu_ns, is_unread: true, ..RunningJobUsage::default() },
        );
    }

    /// Returns the usage of the running job `job`. `None` if pjw records no usage of this job.
    pub(crate) fn usage_of_job(&self, job: &JobId) -> Option<&RunningJobUsage> {
        self.jobs.get(job)
    }

    /// Returns the usage of the running job `job`, so that the caller can change it. `None` if pjw records no usage of
    /// this job.
    pub(crate) fn usage_of_job_mut(&mut self, job: &JobId) -> Option<&mut RunningJobUsage> {
        self.jobs.get_mut(job)
    }

    /// Iterates over the running jobs. Each item is a job and its usage in the form that the journal contains.
    pub(crate) fn records(&self) -> impl Iterator<Item = (&JobId, JobUsage)> {
        self.jobs.keys().filter_map(|job| Some((job, self.journal_usage_of(job)?)))
    }

    /// Returns the usage of the running job `job` in the form that the journal contains. This form also has the CPU
    /// time of ended processes, which a restarted daemon could not read again. `None` if pjw records no usage of the
    /// job.
    pub(crate) fn journal_usage_of(&self, job: &JobId) -> Option<JobUsage> {
        let open = self.jobs.get(job)?;
        let began_at = open.usage.began_at;
        let of_job = self.processes.of_job(job);
        let readable: u64 = of_job.map(|(_, process)| process.readable_again_ns(began_at)).sum();
        let ended_cpu_ns = open.usage.cpu_ns.saturating_sub(readable);
        let read_until = open.usage.read_until.max(open.sample_began_at);
        Some(JobUsage { read_until, cpu_ns: open.cpu_ns(), ended_cpu_ns, ..open.usage.clone() })
    }

    /// Removes the usage of the job `job`, which has ended, and the CPU times of its processes. Returns the usage.
    /// `None` if pjw records no usage of the job.
    pub(crate) fn take_job_usage(&mut self, job: &JobId) -> Option<RunningJobUsage> {
        let open = self.jobs.remove(job)?;
        let of_job = self.processes.of_job(job);
        let of_job: Vec<(Pid, Pid)> = of_job.map(|(pid, process)| (pid, process.parent)).collect();
        for (pid, parent) in of_job {
            self.processes.remove(pid);
            self.remove_child(parent, pid);
            self.forget_childless(parent);
        }
        for pid in self.expected_from.clone() {
            if let Some(parent) = self.outside_parents.get_mut(&pid)
                && parent.job_of_ended_child() == Some(job)
            {
                parent.end_job_of_child();
                self.note_expected(pid);
            }
        }
        let processes = &self.processes;
        self.exit_times.retain(|pid, _| processes.get(*pid).is_some());
        Some(open)
    }

    /// Removes `child` from the children of `parent`, and removes the entry of `parent` if no child is left.
    fn remove_child(&mut self, parent: Pid, child: Pid) {
        if let Some(children) = self.children.get_mut(&parent) {
            children.remove(&child);
            if children.is_empty() {
                self.children.remove(&parent);
            }
        }
    }

    /// Removes the process `parent` from `outside_parents` if it has no child in a job any more, and if no time of an
    /// ended child is expected from it.
    fn forget_childless(&mut self, parent: Pid) {
        if !self.children.contains_key(&parent) && !self.expected_from.contains(&parent) {
            self.outside_parents.remove(&parent);
        }
    }

    /// Updates `expected_from` for the process `parent`: the time of an ended child may be expected from it. If not,
    /// removes a parent without a child ([`UsageState::forget_childless`]).
    fn note_expected(&mut self, parent: Pid) {
        if self.outside_parents.get(&parent).is_some_and(OutsideParent::is_time_expected) {
            self.expected_from.insert(parent);
        } else {
            self.expected_from.remove(&parent);
            self.forget_childless(parent);
        }
    }

    /// Iterates over the pids of the processes outside of jobs that pjw must read to learn the CPU time of an ended
    /// child. The child belonged to a job. Its CPU time is part of the parent's CPU time when the parent has waited for
    /// the child (wait4(2)).
    pub(crate) fn expected_parents(&self) -> impl Iterator<Item = Pid> {
        self.expected_from.iter().copied()
    }

    /// Records that the processes `parents` ended before pjw read them. So pjw can no longer learn the CPU times of
    /// their ended children from them.
    pub(crate) fn record_unread_parents_ended(&mut self, parents: impl Iterator<Item = Pid>) {
        for pid in parents {
            if let Some(parent) = self.outside_parents.get_mut(&pid) {
                parent.forget_ended_child();
                self.note_expected(pid);
            }
        }
    }

    /// Counts the events of the kinds `violation` and `repaired`, for the report on the job that each event
    /// names. An event `violation` reports an affinity mask outside the cores of its job. An event `repaired`
    /// reports that pjw corrected a mask, a cpuset or a cgroup.
    pub fn count_violations_and_repairs(&mut self, events: &[Event]) {
        for event in events {
            let Some(open) = event.job.as_ref().and_then(|job| self.jobs.get_mut(job)) else { continue };
            match event.kind {
                EventKind::Repaired => open.usage.repairs += 1,
                EventKind::Violation => open.usage.violations += 1,
                _ => {}
            }
        }
    }

    /// Stores the result `figures` of a memory measurement of the job `job`, for the report on the job. The report has
    /// the largest stored value of each amount of memory. Except for the shared part of the memory: the report has its
    /// last stored value, but an estimate does not replace an exact value. Has no effect if the job has already ended.
    pub fn note_memory(&mut self, job: &JobId, figures: &MemoryReading) {
        let Some(open) = self.jobs.get_mut(job) else { return };
        let MemoryReading { shared, pss, rss, peak } = *figures;
        let usage = &mut open.usage;
        usage.largest_pss = usage.largest_pss.max(pss);
        usage.largest_rss = usage.largest_rss.max(rss);
        usage.memory_peak = usage.memory_peak.max(peak);
        let is_exact = usage.shared.is_some_and(|known| !known.is_estimate);
        usage.shared = shared.filter(|shared| !shared.is_estimate || !is_exact).or(usage.shared);
    }

    /// Returns whether the peak memory use of the job `job` must be read at the time `now`, in ns since boot, because a
    /// process of the job has ended. False if it was read for this reason within the last second, or if pjw records no
    /// usage of the job.
    pub(crate) fn is_memory_peak_due(&self, job: &JobId, now: Nanos) -> bool {
        let open = self.jobs.get(job);
        open.is_some_and(|open| now.0.saturating_sub(open.memory_peak_read_at.0) >= MEMORY_PEAK_INTERVAL_NS)
    }

    /// Stores the peak memory use of a cgroup of the job, for the report on the job. The report has the largest of all
    /// stored peaks. Has no effect if the job has already ended.
    ///
    /// - `peak_bytes` is the peak, in bytes. `None` means unknown, and changes no peak.
    /// - `now` is the time at which the peak was read, in ns since boot.
    pub fn note_memory_peak(&mut self, job: &JobId, peak_bytes: Option<u64>, now: Nanos) {
        if let Some(open) = self.jobs.get_mut(job) {
            open.memory_peak_read_at = now;
            open.usage.memory_peak = open.usage.memory_peak.max(peak_bytes);
        }
    }

    /// Returns the time at which the present usage sample of the job `job` began, in ns since boot. `start` is the
    /// start time of a thread of the job. `None` if the thread started before the job began, or if pjw records no usage
    /// of the job.
    pub(crate) fn sample_start_for_new_thread(&self, job: &JobId, start: StartTime) -> Option<Nanos> {
        let open = self.jobs.get(job)?;
        may_have_started_after(start, open.usage.began_at).then_some(open.sample_began_at)
    }

    /// Adds the pending wait time ([`UsageState::pending_wait_ns`]) to the present usage sample of the job `job`, and
    /// sets the pending wait time to 0.
    pub(crate) fn add_pending_wait(&mut self, job: Option<&JobId>) {
        let wait_ns = core::mem::take(&mut self.pending_wait_ns);
        if wait_ns > 0
            && let Some(open) = job.and_then(|job| self.jobs.get_mut(job))
        {
            open.sample_wait_ns += wait_ns;
        }
    }

    /// Returns the usage record of the process `id` of a job, with its CPU times as last read. `None` if pjw has not
    /// read this process as a process of a job.
    pub(crate) fn process_usage(&self, id: ProcessId) -> Option<&ProcessUsage> {
        self.processes.get(id.pid).filter(|known| known.start == id.start)
    }

    /// Returns the parent of the process `pid` of a job, if the parent belongs to no job and pjw knows the CPU times of
    /// the parent.
    pub(crate) fn outside_parent_of(&self, pid: Pid) -> Option<Pid> {
        let parent = self.processes.get(pid)?.parent;
        self.outside_parents.contains_key(&parent).then_some(parent)
    }

    /// Iterates over the pids of the processes of jobs whose parent was the process `parent` when pjw last read them.
    pub(crate) fn children_of(&self, parent: Pid) -> impl Iterator<Item = Pid> {
        self.children.get(&parent).into_iter().flatten().copied()
    }

    /// Iterates over the pids of the children of `parent` for which `parent` may have waited (wait4(2)) since the
    /// last reading. `times` are the present CPU times of `parent`. The kernel adds the CPU time of a child to the
    /// parent's sum for ended children when the parent waits for the child. So a child is left out if its CPU time is
    /// larger than the growth of this sum.
    pub(crate) fn children_possibly_waited_for(
        &self,
        parent: Pid,
        times: &ProcessCpuTimes,
    ) -> impl Iterator<Item = Pid> {
        let of_job = self.processes.get(parent).and_then(|known| known.growth_of_children_ns(times));
        let of_outside =
            self.outside_parents.get(&parent).and_then(|known| known.growth_of_children_ns(times));
        let growth_ns = of_job.max(of_outside).unwrap_or(0);
        let most_ns = growth_ns.saturating_add(MAX_ROUNDING_NS.unsigned_abs());
        let fits = move |pid| self.processes.get(pid).is_some_and(|known| known.total_ns() <= most_ns);
        // Most parents have waited for no child. Their children, of which there may be hundreds, are not visited.
        let children = self.children.get(&parent).filter(|_| growth_ns > 0);
        children.into_iter().flatten().copied().filter(move |&pid| fits(pid))
    }

    /// Returns the usage record of the process that had the pid `pid` at the last reading, with its CPU times as last
    /// read. `None` if pjw has not read a process with this pid as a process of a job.
    pub(crate) fn process_usage_at(&self, pid: Pid) -> Option<&ProcessUsage> {
        self.processes.get(pid)
    }

    /// Returns the pid and the start time of the process with the pid `pid`, as last read. `None` if pjw has not read
    /// a process with this pid as a process of a job.
    pub(crate) fn process_id_at(&self, pid: Pid) -> Option<ProcessId> {
        self.processes.get(pid).map(|known| ProcessId { pid, start: known.start })
    }

    /// Returns whether the pid `pid` now belongs to another process than when pjw last read it as the pid of a process
    /// of a job. `times` are the CPU times that were just read for this pid.
    pub(crate) fn is_other_process(&self, pid: Pid, times: &ProcessCpuTimes) -> bool {
        self.processes.get(pid).is_some_and(|known| !is_same_start(times.start, known.start))
    }

    /// Stores the CPU times `times` of the living process `id` of the job `job`. `now` is the time at which they were
    /// read, in ns since boot. Adds the CPU time since the last reading to the usage of the job. `parent` is the
    /// present parent of the process. Has no effect if pjw records no usage of the job.
    pub(crate) fn record_process_times(
        &mut self,
        job: &JobId,
        id: ProcessId,
        parent: Pid,
        times: &ProcessCpuTimes,
        now: Nanos,
    ) {
        // The first thread of the process may have exited before the others. The process has then run on since its exit
        // times were read.
        if self.exit_times.get(&id.pid).is_some_and(|read| read.times != *times) {
            self.exit_times.remove(&id.pid);
        }
        let Some(open) = self.jobs.get_mut(job) else { return };
        let known =
            self.processes.get_mut(id.pid).filter(|known| known.start == id.start && known.job == *job);
        let Some(known) = known else {
            let is_born_in_job = may_have_started_after(id.start, open.usage.began_at);
            let process = ProcessUsage::first_read(job.clone(), id.start, parent, times, now);
            // The processes that an earlier daemon has read are not news of this sample.
            if is_born_in_job && open.is_unread {
                open.usage.cpu_ns += process.total_ns();
            } else if is_born_in_job {
                open.add_cpu(process.total_ns());
            }
            let before = self.processes.insert(id.pid, process);
            self.record_parent(id.pid, before.map(|process| process.parent), parent);
            return;
        };
        let before = core::mem::replace(&mut known.parent, parent);
        open.add_cpu(known.read(times, now));
        self.record_parent(id.pid, Some(before), parent);
    }

    /// Stores in the record of the process `pid` of a job the CPU time that the parent of the process has got so far
    /// from its other ended children. If the parent belongs to a job, removes the stored time instead. Must be called
    /// right after both processes were read.
    pub(crate) fn store_other_child_time_of_parent(&mut self, pid: Pid) {
        if let Some(known) = self.processes.get_mut(pid) {
            let parent = self.outside_parents.get(&known.parent);
            known.parent_before_ns = parent.map(OutsideParent::other_children_ns);
        }
    }

    /// Records that `parent` is the parent of the process `child`. `before` is the parent that was recorded earlier,
    /// `None` if there was none: `child` is removed from its children.
    fn record_parent(&mut self, child: Pid, before: Option<Pid>, parent: Pid) {
        if before == Some(parent) {
            return;
        }
        self.children.entry(parent).or_default().insert(child);
        if let Some(before) = before {
            self.remove_child(before, child);
            self.forget_childless(before);
        }
    }

    /// Records that a scan found that the process `pid` of a job has ended.
    ///
    /// - `times` are its last CPU times, if the process is still a zombie. The kernel adds these times to the parent
    ///   when the parent waits for the process (wait4(2)).
    /// - `idle_until` is the last time at which a scan saw that the process had not run, in ns since boot. `None` if
    ///   there is no such time.
    /// - `now` is the present time, in ns since boot.
    ///
    /// Has no effect if pjw has not read the process as a process of a job.
    pub(crate) fn record_process_end(
        &mut self,
        pid: Pid,
        times: Option<&ProcessCpuTimes>,
        idle_until: Option<Nanos>,
        now: Nanos,
    ) {
        let Some(mut ended) = self.processes.remove(pid) else { return };
        self.remove_child(ended.parent, pid);
        let at_exit = self.exit_times.remove(&pid);
        let is_final = times.is_some() || at_exit.is_some_and(|read| read.is_final);
        let exit_read_from = at_exit.and_then(|read| read.read_from).unwrap_or_default();
        let at_exit = at_exit.as_ref().map(|read| &read.times);
        let times = times.or(at_exit).filter(|times| times.start == ended.start);
        let is_unread = times.is_none() || !is_final;
        if let Some(times) = times
            && let Some(open) = self.jobs.get_mut(&ended.job)
        {
            // Times that are not the last ones were read earlier, when a child of the process had exited.
            let read_at = if is_final { now } else { ended.read_at().max(exit_read_from) };
            open.add_cpu(ended.read(times, read_at));
        }
        let parent_pid = ended.parent;
        if let Some(parent) = self.processes.get_mut(parent_pid) {
            parent.unclaimed_ns += ended.total_ns() + ended.unclaimed_ns;
        } else if let Some(parent) = self.outside_parents.get_mut(&parent_pid) {
            parent.record_ended_child(ended, is_unread, idle_until);
            self.note_expected(parent_pid);
        }
    }

    /// Stores the CPU times `times` of the process `pid`, which belongs to no job and is the parent of processes of
    /// jobs. `now` is the present time, in ns since boot.
    ///
    /// If a child has ended and its last CPU times are unknown, the CPU times of the parent show the missing CPU time
    /// of the child. This time is added to the job of the child. Except if it is more than the PUs of the job could
    /// run since pjw last read the child or saw it idle: then it comes from other children. `usable_pus` returns the
    /// number of PUs on which the processes of a job can run now.
    pub(crate) fn record_outside_parent_times(
        &mut self,
        pid: Pid,
        times: &ProcessCpuTimes,
        now: Nanos,
        usable_pus: impl Fn(&JobId) -> usize,
    ) {
        let Some(known) = self.outside_parents.get_mut(&pid).filter(|known| known.start == times.start)
        else {
            // Another process had the pid.
            self.outside_parents.remove(&pid);
            if self.children.contains_key(&pid) {
                self.outside_parents.insert(pid, OutsideParent::first_read(times, now));
            }
            self.note_expected(pid);
            return;
        };
        let rest = known.read(times, now);
        self.note_expected(pid);
        let Some(LateTime { job, ns, unread_since }) = rest else { return };
        let Some(open) = self.jobs.get_mut(&job) else { return };
        let pus = (open.usage.pus_max as usize).max(usable_pus(&job));
        let unread_ns = now.0.saturating_sub(unread_since.0) + UNREAD_MARGIN_NS;
        if ns <= unread_ns.saturating_mul(pus as u64) {
            open.add_cpu(ns);
        }
    }
}

#[cfg(test)]
mod tests;
