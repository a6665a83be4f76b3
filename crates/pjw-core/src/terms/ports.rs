//! The two interfaces to the outside: the node, which is scanned and changed, and the journal.

use core::{error::Error, time::Duration};

use crate::basics::{Nanos, Pid, prelude::*};
use crate::terms::cpuset_group::{CpusetAction, CpusetOutcome, LeftoverCpuset};
use crate::terms::own_cgroups::OwnCgroupNames;
use crate::terms::plan::{MaskAction, MaskOutcome};
use crate::terms::snapshot::{
    ExpectedMask, MaskProbeResult, Observed, ProcessCpuTimes, ProcessEventBatch, Snapshot,
};
use crate::terms::{record::Record, scan::ScanRequest, usage::JobReport};

/// The interface through which pjwd scans and changes the machine on which it runs. `pjw-linux` implements
/// the interface for Linux, `pjw-sim` for a simulated machine.
pub trait MachineInterface {
    /// Scans the processes, threads and cgroups that `request` names, and returns what was read. A process or
    /// cgroup that vanishes during the scan is reported as [`crate::terms::snapshot::Observed::Gone`], not as
    /// an error.
    fn scan(&mut self, request: &ScanRequest) -> Snapshot;

    /// Reads the CPU times of the processes with these pids, and returns them by pid. A process that does not exist is
    /// [`Observed::Gone`]. A zombie (a process that has ended and for which its parent has not waited yet) is present.
    /// A process that can't be read for another reason is left out.
    ///
    /// The result has two times for each process: its own CPU time, and the CPU time of its ended children. All times
    /// of ended children are read first. So the time of a process that ends during the call is not counted twice. The
    /// default implementation reads nothing, and returns an empty map.
    fn read_cpu_times(&mut self, _pids: &BTreeSet<Pid>) -> BTreeMap<Pid, Observed<ProcessCpuTimes>> {
        BTreeMap::new()
    }

    /// Returns for each process in `pids` the time of its last idle check ([`ScanRequest::idle_watch`]), in ns since
    /// boot. A process is left out if that check found that it had run, or if it was never checked. A process may have
    /// ended since. The default implementation returns an empty map.
    fn idle_until(&self, _pids: &BTreeSet<Pid>) -> BTreeMap<Pid, Nanos> {
        BTreeMap::new()
    }

    /// Returns the present time, in ns since boot, from the clock of [`Snapshot::taken_at`]. The default implementation
    /// returns `None`: the time does not pass while the machine is read.
    fn time_since_boot(&self) -> Option<Nanos> {
        None
    }

    /// Reads the largest memory use of the cgroup at `path`, in bytes. `None` if the kernel does not measure it for
    /// this cgroup, or if the cgroup does not exist. The default implementation returns `None`.
    fn read_memory_peak(&mut self, _path: &str) -> Option<u64> {
        None
    }

    /// Reads the affinity masks of processes that were just forked, without a call that may block. `expected`
    /// contains the expected mask of each process. The result contains only the processes whose mask differs
    /// from the expected mask. Processes that have exited are left out. So are processes that were forked
    /// longer ago than [`crate::basics::ids::ProcessId::MIN_PID_REUSE_TIME`].
    fn probe_masks(&mut self, expected: &BTreeMap<Pid, ExpectedMask>) -> MaskProbeResult;

    /// Reads the cgroups of the processes in `pids`. Returns for each pid the path of the cgroup in the hierarchy with
    /// the cpuset controller. A process that has exited is left out. The call may block while the kernel moves
    /// processes between cgroups.
    fn read_cpuset_paths(&mut self, pids: &BTreeSet<Pid>) -> BTreeMap<Pid, String>;

    /// Reads the process events that the kernel has sent since the last call, without waiting. Called after
    /// each scan. The events then include the fork event of every process that the scan read, unless events
    /// were lost.
    fn read_process_events(&mut self) -> ProcessEventBatch;

    /// Returns the existing cgroups whose cpusets may have been written by an earlier run of this daemon or by another
    /// daemon of pjw. These are the cgroups of jobs with the names in `own_cgroups`, and the cgroups of batch systems
    /// with an extended attribute of pjw. Called only when the daemon starts.
    fn list_job_cpusets(&mut self, own_cgroups: &OwnCgroupNames) -> Vec<LeftoverCpuset>;

    /// Sets the affinity mask of a thread as planned in `action`, and reads the new mask back. Returns
    /// [`MaskOutcome::Gone`] if the thread no longer exists, even if another thread has the same tid now.
    fn change_mask(&mut self, action: &MaskAction) -> MaskOutcome;

    /// Makes changes of the cpusets of jobs, as planned in `actions`, and reads the new state of each cpuset. The
    /// changes are made one after another in this order. A change is also made if an earlier one was refused. Returns
    /// one outcome for each action, in the same order. The outcome is [`CpusetOutcome::Delayed`] for each change that
    /// is not complete after about `max_wait`. These changes then continue in the background. While an earlier change
    /// has been blocked for longer than `max_wait`, the call does not wait at all. An implementation that can't make
    /// changes in the background ignores `max_wait` and returns when all changes are complete.
    fn change_cpusets(&mut self, actions: &[CpusetAction], max_wait: Duration) -> Vec<CpusetOutcome>;

    /// Returns the changes of cpusets for which [`MachineInterface::change_cpusets`] returned
    /// [`CpusetOutcome::Delayed`] and that are complete. Each change is returned once, with its outcome. The changes
    /// are in the order in which they were requested.
    fn take_finished_cpuset_changes(&mut self) -> Vec<(CpusetAction, CpusetOutcome)> {
        Vec::new()
    }
}

/// The interface through which pjwd writes the journal, and also stores the reports of ended jobs. The journal is the
/// file from which pjwd restores its state after a restart. pjwd must write a record to the journal before it makes the
/// change that the record describes.
pub trait Journal {
    /// The error of a failed write to the journal.
    type Fault: Error + Send + Sync + 'static;

    /// Appends records to the journal. If the write is interrupted, a later reader sees either all of these
    /// records or no record of them.
    ///
    /// # Errors
    /// If the records could not be written. The changes that the records describe must then not be made.
    fn append(&mut self, records: &[Record]) -> Result<(), Self::Fault>;

    /// Stores the reports of jobs that end. The default implementation stores nothing.
    ///
    /// The caller calls this method before it writes the ends of these jobs to the journal ([`Journal::append`]). So no
    /// report is lost if the daemon is killed between the two calls. After a restart, the journal still has such a job,
    /// and the daemon ends the job once more, with a second report. Both reports have the same job id and start time
    /// ([`JobReport::started`]). The store keeps only one of them, and prefers a complete report to an incomplete one.
    fn store_reports(&mut self, _reports: &[JobReport]) {}

    /// Removes reports that [`Journal::store_reports`] has just stored. Called if the ends of the jobs could not be
    /// written to the journal, so that the jobs go on. The default implementation removes nothing.
    fn withdraw_reports(&mut self, _reports: &[JobReport]) {}

    /// Returns whether the journal file is still at its path, so that a later daemon can read it. If false,
    /// another program removed or replaced the file. The caller must then write all records by
    /// [`Journal::rewrite`], which makes a new file.
    fn is_in_place(&self) -> bool {
        true
    }

    /// Reserves disk space for the next call of [`Journal::append`], for up to `bytes` bytes of records.
    /// Returns true if this next call certainly can't fail for lack of space.
    fn reserve(&mut self, bytes: u64) -> bool;

    /// Replaces the content of the journal by these records, atomically.
    ///
    /// # Errors
    /// If the records could not be written. The old content is then still in place.
    fn rewrite(&mut self, records: &[Record]) -> Result<(), Self::Fault>;
}
