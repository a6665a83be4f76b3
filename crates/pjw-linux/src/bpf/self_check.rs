//! Compares the task scan's record of the calling thread with /proc and the system calls.
//!
//! The BPF program finds fields by the kernel's type information. If a kernel changes the meaning of a field,
//! this check fails instead of decisions going wrong.

use std::collections::BTreeSet;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::{fmt, fs, io};

use nix::errno::Errno;
use nix::unistd::{geteuid, getuid};
use pjw_core::cpuset::CpuSet;
use pjw_core::ids::{Pid, Tid, Uid};

use super::fault::{TaskScanError, TaskScanUnavailable};
use super::object::refusal_error;
use super::task::{TaskRecord, TaskScanSummary, TaskScope};
use crate::proc::procfs::{ProcDir, SchedStat, Stat};
use crate::{cgroup::CgroupMounts, sys::affinity};

/// The function that a task scan calls with the record of each reported thread.
type HandleTask<'a> = &'a mut dyn FnMut(TaskRecord<'_>);
/// The result of a task scan.
type ScanResult = Result<TaskScanSummary, TaskScanError>;

/// The maximum number of comparisons. Between the two readings of one comparison, the thread may move to another PU
/// or get another name. That does not happen every time.
const ATTEMPTS: usize = 5;

/// What `/proc` and system calls say about the calling thread.
struct Facts {
    tid: Tid,
    process: Pid,
    stat: Stat,
    sched: Option<SchedStat>,
    allowed: CpuSet,
    uid: Uid,
    effective_uid: Uid,
    /// The inode of the process's cgroup in the v2 hierarchy. `None` if [`own_cgroup_inode`] finds none.
    cgroup: Option<u64>,
}

/// Tests the task scan (the BPF program that reports the state of threads). Compares the reported state of the
/// calling thread with `/proc` and with system calls. `run_scan` must run a task scan, and call the passed function for
/// each reported thread. The thread can change between the two readings, so the test is repeated up to 5 times.
///
/// # Errors
/// If a task scan fails, if `/proc` can't be read, or if the states differ in each of the 5 attempts.
pub(super) fn check_task_scan(
    mut run_scan: impl FnMut(TaskScope<'_>, HandleTask<'_>) -> ScanResult,
) -> Result<(), TaskScanUnavailable> {
    let mut proc = ProcDir::open(Path::new("/proc")).map_err(|errno| read_error("/proc", errno))?;
    let own_pid = Pid(std::process::id());
    let mut difference = None;
    for _ in 0..ATTEMPTS {
        difference = compare_own_thread(&mut run_scan, &mut proc, own_pid)?;
        if difference.is_none() {
            break;
        }
    }
    difference.map_or(Ok(()), Err)
}

/// Compares once what a task scan reports about the calling thread with `/proc` and with system calls. Returns the
/// first difference, or `None` if all values agree. `run_scan` must run a task scan. `own_pid` is the pid of this
/// process.
///
/// # Errors
/// If the task scan fails, or if `/proc` can't be read.
fn compare_own_thread(
    run_scan: &mut impl FnMut(TaskScope<'_>, HandleTask<'_>) -> ScanResult,
    proc: &mut ProcDir,
    own_pid: Pid,
) -> Result<Option<TaskScanUnavailable>, TaskScanUnavailable> {
    let facts =
        Facts::read(proc, own_pid).map_err(|errno| read_error("the thread of pjwd in /proc", errno))?;
    let mut record_count = 0_u32;
    let mut difference = None;
    let mut scanned_run_ns = 0;
    let mut compare = |record: TaskRecord<'_>| {
        if record.tid == facts.tid {
            record_count += 1;
            scanned_run_ns = record.run_ns;
            difference = facts.find_difference(&record);
        }
    };
    run_scan(TaskScope::ThreadsOf(&BTreeSet::from([own_pid])), &mut compare)
        .map_err(|error| refusal_error("scanning the process of pjwd", &error))?;
    if record_count != 1 {
        return Ok(Some(differs("number of records", record_count, 1)));
    }
    let later =
        sched(proc, own_pid, facts.tid).map_err(|errno| read_error("the schedstat of pjwd", errno))?;
    let exceeded = later.map(|later| later.run_ns).filter(|later_run_ns| scanned_run_ns > *later_run_ns);
    let too_large =
        exceeded.map(|most| differs("run time", scanned_run_ns, format_args!("at most {most} ns")));
    Ok(difference.or(too_large))
}

impl Facts {
    /// Reads the facts about the calling thread in `/proc` and by system calls. `own_pid` is the pid of this process.
    fn read(proc: &mut ProcDir, own_pid: Pid) -> Result<Self, Errno> {
        let tid = affinity::own_thread();
        Ok(Self {
            tid,
            process: own_pid,
            sched: sched(proc, own_pid, tid)?,
            allowed: affinity::get_mask(tid)?,
            uid: Uid(getuid().as_raw()),
            effective_uid: Uid(geteuid().as_raw()),
            cgroup: own_cgroup_inode(proc, own_pid)?,
            stat: proc.thread_stat(own_pid, tid)?,
        })
    }

    /// Returns the first difference between `record` and these facts. `None` if they agree.
    fn find_difference(&self, record: &TaskRecord<'_>) -> Option<TaskScanUnavailable> {
        let (scan, stat) = (&record.stat, &self.stat);
        unequal("process", &record.pid, &self.process)
            .or_else(|| unequal("start", &scan.start, &stat.start))
            .or_else(|| unequal("parent", &scan.parent, &stat.parent))
            .or_else(|| unequal("session", &scan.session, &stat.session))
            .or_else(|| unequal("process group", &scan.process_group, &stat.process_group))
            .or_else(|| unequal("state", &scan.state, &stat.state))
            .or_else(|| unequal("kernel thread", &scan.is_kernel_thread, &stat.is_kernel_thread))
            .or_else(|| unequal("name", &scan.comm, &stat.comm))
            .or_else(|| unequal("stack", &scan.stack_start, &stat.stack_start))
            .or_else(|| unequal("last CPU", &scan.last_cpu, &stat.last_cpu))
            .or_else(|| unequal("mask", &record.allowed_pus(), &self.allowed))
            .or_else(|| unequal("real user", &record.uid, &self.uid))
            .or_else(|| unequal("effective user", &record.effective_uid, &self.effective_uid))
            .or_else(|| self.cgroup.and_then(|cgroup| unequal("cgroup", &record.cgroup_inode, &cgroup)))
            .or_else(|| self.find_smaller_time(record))
    }

    /// Returns the first time in `record` that is smaller than in these facts. Times only increase, and `/proc` was
    /// read before the scan.
    fn find_smaller_time(&self, record: &TaskRecord<'_>) -> Option<TaskScanUnavailable> {
        let sched = self.sched?;
        let at_least = |field, scan: u64, proc: u64| {
            (scan < proc).then(|| differs(field, scan, format_args!("at least {proc} ns")))
        };
        let wait = record.wait_ns.unwrap_or(0);
        at_least("run time", record.run_ns, sched.run_ns)
            .or_else(|| at_least("waiting time", wait, sched.wait_ns))
    }
}

fn unequal<T: PartialEq + fmt::Display>(
    field: &'static str,
    scan: &T,
    proc: &T,
) -> Option<TaskScanUnavailable> {
    (scan != proc).then(|| differs(field, scan, proc))
}

/// The failure for a field with different values.
fn differs(field: &'static str, scan: impl fmt::Display, proc: impl fmt::Display) -> TaskScanUnavailable {
    TaskScanUnavailable::SelfCheckFailed { field, scan: scan.to_string(), proc: proc.to_string() }
}

/// Reads the run time and the waiting time of the thread `tid`. `None` if the kernel does not record these times: there
/// is no file, or all values are zero.
fn sched(proc: &mut ProcDir, own_pid: Pid, tid: Tid) -> Result<Option<SchedStat>, Errno> {
    match proc.schedstat(own_pid, tid) {
        Ok(sched) => Ok(Some(sched).filter(|sched| sched.run_ns != 0)),
        Err(Errno::ENOENT) => Ok(None),
        Err(errno) => Err(errno),
    }
}

/// Returns the inode of the directory of this process's cgroup in the v2 hierarchy. `own_pid` is the pid of
/// this process. Returns `None` if no v2 hierarchy is mounted, if the kernel has no cgroups, or if the directory can't
/// be found.
///
/// # Errors
/// If `/proc/PID/cgroup` exists and can't be read.
fn own_cgroup_inode(proc: &mut ProcDir, own_pid: Pid) -> Result<Option<u64>, Errno> {
    let Some(mount) = CgroupMounts::read().v2_mount_point else { return Ok(None) };
    let cgroups = match proc.cgroups(own_pid) {
        Ok(cgroups) => cgroups,
        // The kernel has no cgroups.
        Err(Errno::ENOENT) => return Ok(None),
        Err(errno) => return Err(errno),
    };
    let Some(path) = cgroups.v2_path().filter(|path| !path.contains("..")) else { return Ok(None) };
    Ok(fs::metadata(mount.join(path.trim_start_matches('/'))).map(|directory| directory.ino()).ok())
}

fn read_error(what: &'static str, errno: Errno) -> TaskScanUnavailable {
    refusal_error(what, &io::Error::from(errno))
}
