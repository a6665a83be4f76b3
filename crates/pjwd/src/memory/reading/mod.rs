//! Reads the memory of one job: the pages of its processes, or the kernel's counters.

use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::Duration;

use nix::errno::Errno;
use nix::unistd::Uid;
use pjw_core::diagnosis::memory::WorkerMemory;
use pjw_core::ids::{Pid, ProcessId, Tid};
use pjw_core::memory::{JobMemory, ProcessMemory, common_cgroup, estimate_shared_permille};
use pjw_core::time::{Moment, Nanos};
use pjw_linux::cgroup::{CgroupDir, CgroupMounts, MemoryMount, read_memory_peak};
use pjw_linux::proc::memory_use::{ProcessMemoryCounters, ProcessMemoryUse};
use pjw_linux::proc::procfs::ProcDir;
use pjw_linux::sys::errno::{is_gone, is_permission_denied};
use pjw_linux::sys::{clock, kcmp::compare_address_spaces};

/// The kind of a reading (a measurement of a job's memory use): the method by which pjwd measures. An estimate from
/// counters of the kernel takes little CPU time. A walk over the pages of each process is exact, but takes much CPU
/// time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum ReadingKind {
    /// By the kernel's counters. The shared part is estimated from the job's memory cgroup.
    Estimate,
    /// By the pages of each process.
    Pages,
    /// By the pages of each process, with the NUMA node of each page.
    PagesByNode,
}

impl ReadingKind {
    /// Returns the name of the method in JSON: `cgroup` for an estimate, and `smaps` for a walk over the pages of
    /// each process, with or without their NUMA nodes.
    #[must_use]
    pub fn source_name(self) -> &'static str {
        match self {
            Self::Estimate => "cgroup",
            Self::Pages | Self::PagesByNode => "smaps",
        }
    }
}

/// A process of a job whose memory use pjwd could not read, for example because pjwd has no permission. The memory of
/// the other processes is measured all the same.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeniedProcess {
    /// The process id.
    pub pid: Pid,
    /// The user id of the process.
    pub uid: u32,
    /// The reason, in one sentence.
    pub reason: String,
}

/// A reading: the result of one measurement of a job's memory use. Contains the sums over the processes of the job,
/// the values of each process, and the CPU time of the measurement. All sizes are in bytes.
#[derive(Debug, Clone)]
pub struct JobReading {
    /// How the memory was read.
    pub kind: ReadingKind,
    /// When the reading began.
    pub at: Moment,
    /// When the reading ended, in ns since boot. A reading waits for a CPU with a low priority, so it may last much longer than
    /// its CPU time.
    pub ended_at: Nanos,
    /// The CPU time of the reading.
    pub cost: Duration,
    /// The sums over the processes. In an estimate, `pss` is what is charged to the cgroup, `uss` is 0, and the shared part
    /// concerns anonymous memory.
    pub sum: JobMemory,
    /// The processes that could be read. In an estimate, their `pss` and `uss` are 0.
    pub processes: Vec<ProcessMemory>,
    /// The largest amount that was charged to the job's memory cgroup. `None` if the job has none of its own.
    pub peak: Option<u64>,
    /// The memory that the job can still get.
    pub available: u64,
    /// The memory of the workers. `None` in an estimate.
    pub workers: Option<WorkerMemory>,
    /// The number of processes that ended meanwhile.
    pub gone: u32,
    /// The processes that could not be read.
    pub denied: Vec<DeniedProcess>,
}

/// The reason why pjwd could not measure the memory use of a job.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ReadingError {
    /// There is no estimate for a job without a memory cgroup of its own.
    #[error(
        "the job has no memory cgroup of its own, so nothing can be estimated: read its pages with --memory"
    )]
    NoOwnCgroup,
    /// `/proc` can't be opened.
    #[error("/proc can't be opened: {0}; mount it with: mount -t proc proc /proc")]
    NoProc(Errno),
    /// The reading thread has ended, or can't be started.
    #[error("the thread that reads memory can't be started: {0}; check the limit on the number of processes")]
    NoThread(String),
    /// The reading was given up, because its caller has hung up.
    #[error("the reading was given up, because its caller has hung up: ask again")]
    Abandoned,
}

/// The memory cgroup in which the processes of a job are.
struct JobCgroup {
    cgroup: CgroupDir,
    /// Whether no other process is in it.
    is_own: bool,
}

/// Measures the memory use of a job by the method `kind`. `processes` are the processes of the job. Blocks until the
/// result is complete: a process with 1 TiB of memory takes half a minute of CPU time. Processes that have ended are
/// only counted, in [`JobReading::gone`]. Processes that can't be read are listed in [`JobReading::denied`].
///
/// If the pages of processes are read, `is_wanted` is called before each process. If `is_wanted` returns false, the
/// function stops with [`ReadingError::Abandoned`].
///
/// # Errors
/// If /proc can't be opened. If `is_wanted` returned false. If an estimate is requested, but the job has no readable
/// memory cgroup of its own.
pub fn measure_job_memory(
    processes: &[ProcessId],
    kind: ReadingKind,
    is_wanted: &dyn Fn() -> bool,
) -> Result<JobReading, ReadingError> {
    let mut proc = ProcDir::open(Path::new("/proc")).map_err(ReadingError::NoProc)?;
    let (at, before) = (clock::now(), clock::own_thread_cpu_time());
    let alive: Vec<ProcessId> =
        processes.iter().copied().filter(|process| is_alive(&mut proc, *process)).collect();
    let cgroup = job_cgroup(&mut proc, &alive);
    let mut reading = JobReading {
        kind,
        at,
        ended_at: at.since_boot,
        cost: Duration::ZERO,
        sum: JobMemory::default(),
        processes: Vec::with_capacity(alive.len()),
        peak: cgroup.as_ref().filter(|job| job.is_own).and_then(|job| read_memory_peak(&job.cgroup)),
        available: available(&mut proc, cgroup.as_ref()),
        workers: None,
        gone: u32::try_from(processes.len() - alive.len()).unwrap_or(u32::MAX),
        denied: Vec::new(),
    };
    match kind {
        ReadingKind::Estimate => {
            let own = cgroup.filter(|job| job.is_own).ok_or(ReadingError::NoOwnCgroup)?;
            read_counters(&mut proc, &alive, &own.cgroup, &mut reading)?;
        }
        ReadingKind::Pages | ReadingKind::PagesByNode => {
            read_pages(&mut proc, &alive, &mut reading, is_wanted)?;
        }
    }
    reading.cost = clock::own_thread_cpu_time().saturating_sub(before);
    reading.ended_at = clock::now().since_boot;
    Ok(reading)
}

/// Whether this very process still exists, and no other one has its pid.
fn is_alive(proc: &mut ProcDir, process: ProcessId) -> bool {
    // The file of the first thread: that of the process takes time for each thread.
    let first = proc.thread_stat(process.pid, Tid(process.pid.0));
    first.is_ok_and(|stat| stat.start == process.start)
}

fn read_pages(
    proc: &mut ProcDir,
    processes: &[ProcessId],
    reading: &mut JobReading,
    is_wanted: &dyn Fn() -> bool,
) -> Result<(), ReadingError> {
    let pids: Vec<Pid> = processes.iter().map(|process| process.pid).collect();
    let spaces = number_address_spaces(&pids, compare_address_spaces);
    // The memory of each address space by its number.
    let mut read: BTreeMap<u32, ProcessMemory> = BTreeMap::new();
    for (&process, address_space) in processes.iter().zip(spaces) {
        if !is_wanted() {
            return Err(ReadingError::Abandoned);
        }
        let pid = process.pid;
        // The kernel reports the same pages for each process of an address space.
        if let Some(same) = address_space.and_then(|space| read.get(&space)) {
            match is_alive(proc, process) {
                true => reading.processes.push(ProcessMemory { pid, ..same.clone() }),
                false => reading.gone += 1,
            }
            continue;
        }
        match pages_of(proc, pid, reading.kind) {
            // Another process may have got the pid meanwhile.
            Ok(_) if !is_alive(proc, process) => reading.gone += 1,
            Ok(memory) => {
                let memory = ProcessMemory { address_space, ..memory };
                read.extend(address_space.map(|space| (space, memory.clone())));
                reading.processes.push(memory);
            }
            Err(errno) => count_failure(proc, process, errno, reading),
        }
    }
    reading.sum = JobMemory::sum(&reading.processes);
    let unknown = reading.processes.iter().filter(|process| process.address_space.is_none());
    let sizes = read.values().chain(unknown).map(|process| process.uss);
    reading.workers = Some(WorkerMemory::from_unique_set_sizes(reading.at.since_boot, sizes));
    Ok(())
}

fn pages_of(proc: &mut ProcDir, pid: Pid, kind: ReadingKind) -> Result<ProcessMemory, Errno> {
    let ProcessMemoryUse { rss, pss, uss, swap } = proc.read_memory_use(pid)?;
    let page_tables = proc.read_memory_counters(pid)?.page_tables;
    let by_node = match kind {
        ReadingKind::PagesByNode => proc.read_memory_by_numa_node(pid)?,
        ReadingKind::Pages | ReadingKind::Estimate => BTreeMap::new(),
    };
    Ok(ProcessMemory { pid, rss, pss, uss, page_tables, swap, address_space: None, by_node })
}

fn read_counters(
    proc: &mut ProcDir,
    processes: &[ProcessId],
    cgroup: &CgroupDir,
    reading: &mut JobReading,
) -> Result<(), ReadingError> {
    let mut anonymous = Vec::with_capacity(processes.len());
    for &process in processes {
        let pid = process.pid;
        match proc.read_memory_counters(pid) {
            Ok(_) if !is_alive(proc, process) => reading.gone += 1,
            Ok(ProcessMemoryCounters { rss, anonymous: own, page_tables, swap }) => {
                anonymous.push(own);
                let (by_node, address_space) = (BTreeMap::new(), None);
                let memory =
                    ProcessMemory { pid, rss, pss: 0, uss: 0, page_tables, swap, address_space, by_node };
                reading.processes.push(memory);
            }
            Err(errno) => count_failure(proc, process, errno, reading),
        }
    }
    let charged = cgroup.read_memory().map_err(|_| ReadingError::NoOwnCgroup)?;
    reading.sum = JobMemory {
        pss: charged.anonymous.saturating_add(charged.mapped_files),
        shared_permille: estimate_shared_permille(charged.anonymous, &anonymous),
        ..JobMemory::sum(&reading.processes)
    };
    Ok(())
}

/// Counts a process that could not be read: it has ended, or it is denied.
fn count_failure(proc: &mut ProcDir, process: ProcessId, errno: Errno, reading: &mut JobReading) {
    let pid = process.pid;
    let status = proc.status(pid);
    let Some(status) = status.ok().filter(|_| is_alive(proc, process)) else {
        reading.gone += 1;
        return;
    };
    let own = Uid::effective().as_raw();
    let reason = if is_gone(errno) {
        "the kernel has no such file for it: /proc/PID/smaps_rollup needs Linux 4.14, numa_maps needs CONFIG_NUMA".to_owned()
    } else if is_permission_denied(errno) && status.uid != own {
        format!(
            "it belongs to user {}, and pjwd runs as user {own} without CAP_SYS_PTRACE: have root's pjwd read it",
            status.uid
        )
    } else if is_permission_denied(errno) {
        format!(
            "it forbids to be read (PR_SET_DUMPABLE of prctl(2)), it changed its user, or it has more capabilities than \
             pjwd, which runs as user {own} without CAP_SYS_PTRACE: have root's pjwd read it"
        )
    } else {
        format!("its memory can't be read: {}", errno.desc())
    };
    reading.denied.push(DeniedProcess { pid, uid: status.uid, reason });
}

/// Numbers the address spaces of the processes. `None` for a process that can't be compared with others: kcmp(2) needs the
/// rights of ptrace(2) for both processes, a container may forbid it, and a kernel may have been built without it.
fn number_address_spaces(
    pids: &[Pid],
    compare: impl Fn(Pid, Pid) -> Result<Ordering, Errno> + Copy,
) -> Vec<Option<u32>> {
    // The first process of each address space with its number, in the order of the kernel.
    let mut known: Vec<(Pid, u32)> = Vec::new();
    (0..).zip(pids).map(|(unused, &pid)| number_address_space(&mut known, pid, unused, compare)).collect()
}

/// Returns the number of the address space of a process: `unused` if no known process has the same one.
fn number_address_space(
    known: &mut Vec<(Pid, u32)>,
    pid: Pid,
    unused: u32,
    compare: impl Fn(Pid, Pid) -> Result<Ordering, Errno>,
) -> Option<u32> {
    // A process that may not be compared with any other may not be compared with itself either.
    while compare(pid, pid).is_ok() {
        let mut failed = None;
        let found = known.binary_search_by(|&(other, _)| {
            compare(other, pid).unwrap_or_else(|_| {
                failed = Some(other);
                Ordering::Less
            })
        });
        let Some(other) = failed else {
            if let Err(index) = found {
                known.insert(index, (pid, unused));
            }
            return Some(found.map_or(unused, |index| known[index].1));
        };
        // One of the two has ended meanwhile. If that is the other one, it is left out.
        if compare(other, other).is_ok() {
            return None;
        }
        known.retain(|(known, _)| *known != other);
    }
    None
}

/// The deepest memory cgroup that contains all processes. `None` if that is the root, or if it can't be read.
fn job_cgroup(proc: &mut ProcDir, processes: &[ProcessId]) -> Option<JobCgroup> {
    let mount = MemoryMount::from_mounts(&CgroupMounts::read())?;
    let mut paths = BTreeSet::new();
    for &process in processes {
        if let Ok(lines) = proc.cgroups(process.pid)
            && is_alive(proc, process)
        {
            paths.extend(mount.memory_cgroup_path(&lines).map(str::to_owned));
        }
    }
    let cgroup = mount.cgroup(&common_cgroup(paths.iter().map(String::as_str))?)?;
    let members: BTreeSet<Pid> = processes.iter().map(|process| process.pid).collect();
    // A child that was born a moment ago may not be known yet.
    let mut belongs = |pid: Pid| {
        members.contains(&pid) || proc.stat(pid).map_or(true, |stat| members.contains(&stat.parent))
    };
    let is_own = cgroup.all_processes().into_iter().all(&mut belongs) && cgroup.read_memory().is_ok();
    Some(JobCgroup { cgroup, is_own })
}

/// The memory that the job can still get: what its cgroup and the machine have left.
fn available(proc: &mut ProcDir, cgroup: Option<&JobCgroup>) -> u64 {
    let of_machine = proc.available_memory().unwrap_or(u64::MAX);
    let of_cgroup = cgroup.and_then(|job| job.cgroup.available_memory());
    of_cgroup.map_or(of_machine, |left| left.min(of_machine))
}

#[cfg(test)]
mod tests;
