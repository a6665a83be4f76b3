//! Is what the kernel's program tells of our own task what /proc and the system calls tell?
//!
//! The program finds its facts by the kernel's own description of its structures. If a kernel changed what a field
//! means, this is where it shows, and not in where jobs are put.

use std::collections::BTreeSet;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::{fmt, fs, io};

use nix::errno::Errno;
use nix::unistd::{geteuid, gettid, getuid};
use pjw_core::cpuset::CpuSet;
use pjw_core::process::{Pid, Tid, Uid};

use super::{ScanUnavailable, TaskRecord, TaskScan, Whom};
use crate::affinity;
use crate::cgroup::Mounts;
use crate::procfs::{Proc, SchedStat, Stat};

/// A task may be moved, or its name be changed, between two looks. It is not moved every time.
const ATTEMPTS: usize = 5;

/// What /proc and the system calls say of the calling thread.
struct Facts {
    tid: Tid,
    process: Pid,
    stat: Stat,
    sched: Option<SchedStat>,
    allowed: CpuSet,
    uid: Uid,
    effective_uid: Uid,
    /// `None` where the hierarchy is not mounted.
    cgroup: Option<u64>,
}

/// A fact on which the two differ.
struct Difference {
    field: &'static str,
    scan: String,
    proc: String,
}

/// Has the scan tell of the calling thread, and compares.
pub(super) fn run(scan: &mut TaskScan) -> Result<(), ScanUnavailable> {
    let mut proc = Proc::open(Path::new("/proc")).map_err(|errno| unread("/proc", errno))?;
    let us = Pid(std::process::id());
    let mut last = None;
    for _ in 0..ATTEMPTS {
        last = attempt(scan, &mut proc, us)?;
        if last.is_none() {
            break;
        }
    }
    last.map_or(Ok(()), |Difference { field, scan, proc }| {
        Err(ScanUnavailable::SelfCheck { field, scan, proc })
    })
}

fn attempt(scan: &mut TaskScan, proc: &mut Proc, us: Pid) -> Result<Option<Difference>, ScanUnavailable> {
    let facts = Facts::read(proc, us).map_err(|errno| unread("our own task in /proc", errno))?;
    let mut seen = 0_u32;
    let mut difference = None;
    let mut ran = 0;
    let mut compare = |record: TaskRecord<'_>| {
        if record.tid == facts.tid {
            seen += 1;
            ran = record.run_ns;
            difference = facts.differ(&record);
        }
    };
    scan.pass(Whom::These(&BTreeSet::from([us])), &mut compare)
        .map_err(|error| ScanUnavailable::Refused { step: "scanning ourselves", why: error.to_string() })?;
    if seen != 1 {
        let (scan, proc) = (format!("seen {seen} times"), String::from("once"));
        return Ok(Some(Difference { field: "that it is", scan, proc }));
    }
    let later = sched(proc, us, facts.tid).map_err(|errno| unread("our own schedstat", errno))?;
    let late = later.filter(|later| ran > later.run_ns);
    let late = late.map(|later| Difference {
        field: "run time",
        scan: ran.to_string(),
        proc: format!("at most {}", later.run_ns),
    });
    Ok(difference.or(late))
}

impl Facts {
    fn read(proc: &mut Proc, us: Pid) -> Result<Self, Errno> {
        let tid = Tid(gettid().as_raw().cast_unsigned());
        Ok(Self {
            tid,
            process: us,
            sched: sched(proc, us, tid)?,
            allowed: affinity::get(tid)?,
            uid: Uid(getuid().as_raw()),
            effective_uid: Uid(geteuid().as_raw()),
            cgroup: cgroup(proc, us)?,
            stat: proc.thread_stat(us, tid)?,
        })
    }

    fn differ(&self, record: &TaskRecord<'_>) -> Option<Difference> {
        let stat = &self.stat;
        unequal("process", &record.process, &self.process)
            .or_else(|| unequal("start", &record.start, &stat.start))
            .or_else(|| unequal("parent", &record.parent, &stat.parent))
            .or_else(|| unequal("session", &record.session, &stat.session))
            .or_else(|| unequal("process group", &record.group, &stat.group))
            .or_else(|| unequal("state", &record.state, &stat.state))
            .or_else(|| unequal("kernel thread", &record.kernel, &stat.kernel))
            .or_else(|| unequal("name", &record.comm, &stat.comm))
            .or_else(|| unequal("stack", &record.stack, &stat.stack))
            .or_else(|| unequal("last CPU", &record.last_cpu, &stat.last_cpu))
            .or_else(|| unequal("mask", &record.allowed(), &self.allowed))
            .or_else(|| unequal("real user", &record.uid, &self.uid))
            .or_else(|| unequal("effective user", &record.effective_uid, &self.effective_uid))
            .or_else(|| self.cgroup.and_then(|cgroup| unequal("cgroup", &record.cgroup, &cgroup)))
            .or_else(|| self.ran_less(record))
    }

    /// The clocks only go forward, and /proc was read first.
    fn ran_less(&self, record: &TaskRecord<'_>) -> Option<Difference> {
        let sched = self.sched?;
        let at_least = |field, scan: u64, proc: u64| {
            (scan < proc).then(|| Difference {
                field,
                scan: scan.to_string(),
                proc: format!("at least {proc}"),
            })
        };
        let wait = record.wait_ns.unwrap_or(0);
        at_least("run time", record.run_ns, sched.run_ns)
            .or_else(|| at_least("waiting time", wait, sched.wait_ns))
    }
}

fn unequal<T: PartialEq + fmt::Display>(field: &'static str, scan: &T, proc: &T) -> Option<Difference> {
    (scan != proc).then(|| Difference { field, scan: scan.to_string(), proc: proc.to_string() })
}

/// `None` on a kernel that does not keep it, or, all zeros, that was told not to.
fn sched(proc: &mut Proc, us: Pid, tid: Tid) -> Result<Option<SchedStat>, Errno> {
    match proc.schedstat(us, tid) {
        Ok(sched) => Ok(Some(sched).filter(|sched| sched.run_ns != 0)),
        Err(Errno::ENOENT) => Ok(None),
        Err(errno) => Err(errno),
    }
}

/// The inode of our directory in the v2 hierarchy; `None` if it can't be looked at.
fn cgroup(proc: &mut Proc, us: Pid) -> Result<Option<u64>, Errno> {
    let Some(mount) = Mounts::find().unified else { return Ok(None) };
    let cgroups = match proc.cgroups(us) {
        Ok(cgroups) => cgroups,
        // A kernel without cgroups.
        Err(Errno::ENOENT) => return Ok(None),
        Err(errno) => return Err(errno),
    };
    let path = cgroups.into_iter().find_map(|(controllers, path)| controllers.is_empty().then_some(path));
    let Some(path) = path.filter(|path| !path.contains("..")) else { return Ok(None) };
    Ok(fs::metadata(mount.join(path.trim_start_matches('/'))).map(|directory| directory.ino()).ok())
}

fn unread(what: &'static str, errno: Errno) -> ScanUnavailable {
    ScanUnavailable::Refused { step: what, why: io::Error::from(errno).to_string() }
}
