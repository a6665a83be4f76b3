//! Reads the memory of one job: the pages of its processes, or the kernel's counters.

mod blocked;
mod denied;
mod map_lock;
mod node_sample;
mod progress;
mod spaces;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::Duration;

use nix::errno::Errno;
use pjw_core::diagnosis::map_lock::MmapLockWaits;
use pjw_core::diagnosis::memory::WorkerMemory;
use pjw_core::ids::{Pid, ProcessId, Tid};
use pjw_core::memory::{JobMemory, ProcessMemory, common_cgroup, estimate_shared_permille};
use pjw_core::time::{Moment, Nanos};
use pjw_linux::cgroup::{CgroupDir, CgroupMounts, MemoryControllerMount, read_memory_peak};
use pjw_linux::proc::memory_use::{ProcessMemoryCounters, ProcessMemoryUse};
use pjw_linux::proc::procfs::ProcDir;
use pjw_linux::sys::{clock, kcmp::compare_address_spaces};

use self::blocked::find_processes_with_held_mmap_lock;
pub use self::denied::DeniedProcess;
use self::denied::{why_blocked, why_unreadable};
use self::node_sample::{MAX_MAPS_BYTES, sample_nodes};
pub use self::progress::ReadingProgress;
pub use self::spaces::{JobProcess, ProcessesToRead};
use self::spaces::{LiveProcess, number_address_spaces};

/// The method by which pjwd measures the memory use of a job. Methods that read only counters of the kernel, or only a
/// sample of the pages, take little CPU time and are less exact. A walk over the pages of each process is exact, but
/// takes much CPU time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum ReadingKind {
    /// Only the kernel's counters of each process, such as its resident memory. These counters do not show how much
    /// memory the processes share.
    ///
    /// If a caller requests a reading of this kind, pjwd chooses the best method that takes little CPU time, and the
    /// result has the kind of this method: [`ReadingKind::Estimate`] if an estimate is possible. Otherwise
    /// [`ReadingKind::Pages`] for a job with at most 256 MiB of resident memory, and this kind for a larger job.
    Counters,
    /// The kernel's counters of each process and of the job's memory cgroup. The share of the memory that several
    /// processes use together is estimated from both.
    Estimate,
    /// A walk over the pages of each process.
    Pages,
    /// A walk over the pages of each process, which also finds the NUMA node of each page.
    PagesByNode,
    /// A sample of the pages of each process, for an estimate of its memory on each NUMA node. Takes little CPU time.
    /// The result contains only processes for which the sample has enough pages, and no sums.
    NodeSample,
}

impl ReadingKind {
    /// Returns the name of the method in JSON. `rss`: the counters of the processes. `cgroup`: an estimate from the
    /// counters of the job's cgroup. `smaps`: a walk over the pages of each process. `sample`: a sample of the pages.
    #[must_use]
    pub fn source_name(self) -> &'static str {
        match self {
            Self::Counters => "rss",
            Self::Estimate => "cgroup",
            Self::Pages | Self::PagesByNode => "smaps",
            Self::NodeSample => "sample",
        }
    }
}

/// The result of one measurement of a job's memory use: the sums over the processes of the job, the values of each
/// process, and the CPU time that the measurement itself took. All sizes are in bytes.
#[derive(Debug, Clone)]
pub struct JobMemoryReading {
    /// The method of the measurement.
    pub kind: ReadingKind,
    /// The time at which the measurement began.
    pub at: Moment,
    /// The time at which the measurement ended, in ns since boot. The measuring thread has a low CPU priority. So the
    /// measurement may last much longer than its CPU time.
    pub ended_at: Nanos,
    /// The CPU time that the measurement took.
    pub cost: Duration,
    /// The sums over the processes of the job. In an estimate, three fields have another meaning. `pss` is the
    /// anonymous memory and the mapped files that the kernel charges to the memory cgroup of the job. `uss` is 0.
    /// `shared_permille` is an estimate for the anonymous memory only. In a reading of the kind
    /// [`ReadingKind::Counters`], these three fields say nothing.
    pub sum: JobMemory,
    /// The memory of each process that could be read. If no pages were read, `pss` and `uss` of each process are 0.
    pub processes: Vec<ProcessMemory>,
    /// The largest amount of memory that the kernel has charged to the memory cgroup of the job so far, in bytes.
    /// `None` if the job has no memory cgroup of its own, or if the kernel does not record the amount.
    pub peak: Option<u64>,
    /// The memory that the job can still use, in bytes. This is the smaller of two amounts: the memory that is
    /// available on the machine, and the memory that the kernel can still charge to the cgroup of the job.
    pub available: u64,
    /// The private memory (memory that no other process maps) of the workers, measured from their pages or estimated
    /// from counters. A worker is a process of the job with much private memory. `None` if this memory is unknown.
    pub workers: Option<WorkerMemory>,
    /// The address spaces whose threads wait for one another to map and unmap memory. `None` if the threads were not
    /// observed: always in an estimate.
    pub map_lock_waits: Option<Vec<MmapLockWaits>>,
    /// The number of processes that ended before their memory was read.
    pub ended_processes: u32,
    /// The processes whose memory could not be read, each with the reason.
    pub denied: Vec<DeniedProcess>,
}

/// The reason why pjwd could not measure the memory use of a job.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ReadingError {
    /// The memory of the job can't be estimated, because the kernel charged most of the memory of its largest process
    /// to another cgroup.
    #[error(
        "no estimate, because one of its processes has {process_bytes} bytes of anonymous memory, and {charged_bytes} are \
         charged to its cgroup: the rest is charged to another cgroup, in which the memory was used first"
    )]
    ChargedElsewhere {
        /// The anonymous memory of the largest process, in bytes.
        process_bytes: u64,
        /// The anonymous memory that is charged to the job's cgroup, in bytes.
        charged_bytes: u64,
    },
    /// The memory of the job can't be estimated, because the job has no memory cgroup of its own.
    #[error("no estimate, because the job has no memory cgroup of its own")]
    NoOwnCgroup,
    /// `/proc` can't be opened.
    #[error("/proc can't be opened: {0}; mount it with: mount -t proc proc /proc")]
    ProcUnavailable(Errno),
    /// The thread that measures memory has ended, or can't be started. The text is the reason.
    #[error("the thread that reads memory can't be started: {0}; check the limit on the number of processes")]
    NoThread(String),
    /// The measuring thread waited for at least 5 s for the memory lock of a process (`mmap_lock`).
    #[error(
        "process {pid} has had its memory locked for at least 5 s, as while it waits for a file system that does not respond. \
         As root: cat /proc/{pid}/task/*/stack says for what. Readings leave this process out until then: try again"
    )]
    Blocked {
        /// The pid of the process whose memory is locked.
        pid: Pid,
    },
    /// Too many measuring threads already wait for the memory locks of processes.
    #[error(
        "{} readings wait for processes whose memory is locked, as while they wait for a file system that does not respond: \
         as root, cat /proc/PID/task/*/stack of {} says for what",
        .pids.len(), .pids.iter().map(Pid::to_string).collect::<Vec<_>>().join(", ")
    )]
    TooManyBlocked {
        /// The pids of the processes whose memory is locked.
        pids: Vec<Pid>,
    },
    /// The measurement was stopped, because the client that requested it has closed its connection.
    #[error("the reading was given up, because its caller has hung up: ask again")]
    Abandoned,
}

/// The memory cgroup in which the processes of a job are.
struct JobCgroup {
    cgroup: CgroupDir,
    /// Whether no other process is in the cgroup, and its memory use can be read.
    is_own: bool,
}

/// The counters of a cgroup lag behind by at most this many bytes: 64 pages for each CPU of a machine of 256 CPUs,
/// which the kernel gathers before it adds them up (`MEMCG_CHARGE_BATCH` in `mm/memcontrol.c`).
const MAX_COUNTER_LAG: u64 = 64 << 20;
/// The pages of a job with at most this resident memory may be read without a request, in bytes: that takes less than
/// 10 ms of CPU time, at 35 us for each MiB.
const MAX_SMALL_JOB: u64 = 256 << 20;

/// Measures the memory use of a job by the method `kind`. `processes` are the processes of the job. With
/// [`ReadingKind::Counters`], the function uses the best method that takes little CPU time, which can be a walk over
/// the pages of a small job. [`JobMemoryReading::kind`] has the method that was used. With [`ReadingKind::NodeSample`],
/// the caller should pass few processes.
///
/// Blocks until the result is complete. The methods [`ReadingKind::Pages`] and [`ReadingKind::PagesByNode`] walk over
/// the pages of each process: a process with 1 TiB of memory takes half a minute of CPU time. A walk over pages calls
/// the functions of `progress` before each process.
///
/// Processes that have ended are only counted, in [`JobMemoryReading::ended_processes`]. Processes that can't be read
/// are listed in [`JobMemoryReading::denied`].
///
/// If `watches_threads` is true, the methods `Pages` and `PagesByNode` also observe the threads of the processes, which
/// takes 0.2 to 2 s. They find threads that wait for one another to map or unmap memory
/// ([`JobMemoryReading::map_lock_waits`]). The other methods ignore `watches_threads`.
///
/// # Errors
/// - If /proc can't be opened.
/// - If [`ReadingProgress::is_wanted`] returned false during a walk over pages.
/// - With [`ReadingKind::Estimate`], if the job has no memory cgroup of its own, or if its counters can't be read.
/// - With [`ReadingKind::Estimate`], if most of the memory of the largest process is charged to another cgroup.
pub fn measure_job_memory(
    processes: &[JobProcess],
    kind: ReadingKind,
    watches_threads: bool,
    progress: &dyn ReadingProgress,
) -> Result<JobMemoryReading, ReadingError> {
    let mut proc = ProcDir::open(Path::new("/proc")).map_err(ReadingError::ProcUnavailable)?;
    let (at, before) = (clock::now(), clock::own_thread_cpu_time());
    let alive: Vec<LiveProcess> =
        processes.iter().filter_map(|process| live_process(&mut proc, *process)).collect();
    let cgroup = (kind != ReadingKind::NodeSample).then(|| job_cgroup(&mut proc, &alive)).flatten();
    let mut reading = JobMemoryReading {
        kind,
        at,
        ended_at: at.since_boot,
        cost: Duration::ZERO,
        sum: JobMemory::default(),
        processes: Vec::with_capacity(alive.len()),
        peak: cgroup.as_ref().filter(|job| job.is_own).and_then(|job| read_memory_peak(&job.cgroup)),
        available: available_memory(&mut proc, cgroup.as_ref()),
        workers: None,
        map_lock_waits: None,
        ended_processes: u32::try_from(processes.len() - alive.len()).unwrap_or(u32::MAX),
        denied: Vec::new(),
    };
    match kind {
        ReadingKind::Counters => read_cheaply(&mut proc, &alive, cgroup.as_ref(), &mut reading, progress)?,
        ReadingKind::Estimate => {
            let own = cgroup.filter(|job| job.is_own).ok_or(ReadingError::NoOwnCgroup)?;
            let anonymous = read_counters(&mut proc, &alive, &mut reading);
            estimate_memory(&own.cgroup, &anonymous, &mut reading)?;
        }
        ReadingKind::Pages | ReadingKind::PagesByNode => {
            read_pages(&mut proc, &alive, &mut reading, watches_threads, progress)?;
        }
        ReadingKind::NodeSample => read_node_sample(&mut proc, &alive, &mut reading, progress)?,
    }
    reading.cost = clock::own_thread_cpu_time().saturating_sub(before);
    reading.ended_at = clock::now().since_boot;
    Ok(reading)
}

/// Returns `process` with two facts for the reading: the thread by which its memory is read (`None` for a zombie),
/// and the start address of its stack. `None` if the process has ended, also if another process has its pid now.
fn live_process(proc: &mut ProcDir, process: JobProcess) -> Option<LiveProcess> {
    let JobProcess { id, group, threads } = process;
    // The file of the first thread: that of the process takes time for each thread.
    let first = proc.thread_stat(id.pid, Tid(id.pid.0)).ok().filter(|first| first.start == id.start)?;
    let mut live =
        LiveProcess { id, group, threads, thread: Some(id.pid), stack_start: first.readable_stack_start() };
    if first.state == 'Z' {
        let other = proc.tids(id.pid).unwrap_or_default().into_iter().find(|tid| tid.0 != id.pid.0);
        let stat = other.and_then(|tid| proc.thread_stat(id.pid, tid).ok());
        live.stack_start = stat.and_then(|stat| stat.readable_stack_start());
        live.thread = other.map(|tid| Pid(tid.0));
    }
    Some(live)
}

/// Returns whether `process` still exists. False if another process has its pid now.
fn is_alive(proc: &mut ProcDir, process: ProcessId) -> bool {
    let first = proc.thread_stat(process.pid, Tid(process.pid.0));
    first.is_ok_and(|stat| stat.start == process.start)
}

/// Reads the memory of `processes` (`/proc/PID/smaps_rollup`), and adds it to `reading`. Reads an address space that
/// several processes share only once. Leaves out a process whose memory map is locked, because the read would block.
/// If `watches_threads` is true, also finds threads that wait for one another to map or unmap memory. Fails if nobody
/// waits for the reading any more ([`ReadingProgress::is_wanted`]).
fn read_pages(
    proc: &mut ProcDir,
    processes: &[LiveProcess],
    reading: &mut JobMemoryReading,
    watches_threads: bool,
    progress: &dyn ReadingProgress,
) -> Result<(), ReadingError> {
    let spaces = number_address_spaces(processes, compare_address_spaces);
    let blocked = find_processes_with_held_mmap_lock(proc, processes, &spaces, progress);
    let mut memory_by_space: BTreeMap<u32, ProcessMemory> = BTreeMap::new();
    for (&LiveProcess { id: process, thread, .. }, address_space) in
        processes.iter().zip(spaces.iter().copied())
    {
        if !progress.is_wanted() {
            return Err(ReadingError::Abandoned);
        }
        let pid = process.pid;
        // The kernel reports the same pages for each process of an address space.
        if let Some(memory) = address_space.and_then(|space| memory_by_space.get(&space)) {
            if is_alive(proc, process) {
                reading.processes.push(ProcessMemory { pid, ..memory.clone() });
            } else {
                reading.ended_processes += 1;
            }
            continue;
        }
        if blocked.contains(&pid) {
            record_unread_process(proc, process, reading, |_| why_blocked(pid));
            continue;
        }
        progress.begin_process(pid);
        match pages_of(proc, thread.unwrap_or(pid), reading.kind) {
            // Another process may have got the pid meanwhile.
            Ok(_) if !is_alive(proc, process) => reading.ended_processes += 1,
            Ok(memory) => {
                let memory = ProcessMemory { pid, address_space, ..memory };
                memory_by_space.extend(address_space.map(|space| (space, memory.clone())));
                reading.processes.push(memory);
            }
            Err(errno) => count_failure(proc, process, errno, reading),
        }
    }
    reading.sum = JobMemory::sum(&reading.processes);
    let without_space = reading.processes.iter().filter(|process| process.address_space.is_none());
    let sizes = memory_by_space.values().chain(without_space).map(|process| process.uss);
    reading.workers = Some(WorkerMemory::from_unique_set_sizes(reading.at.since_boot, sizes));
    if watches_threads {
        reading.map_lock_waits = Some(map_lock::find_map_lock_waits(proc, processes, &spaces, progress));
    }
    Ok(())
}

/// Reads the memory of a process by the files of one of its threads, which /proc has in a directory of its own.
fn pages_of(proc: &mut ProcDir, pid: Pid, kind: ReadingKind) -> Result<ProcessMemory, Errno> {
    let ProcessMemoryUse { rss, pss, uss, swap } = proc.read_memory_use(pid)?;
    let page_tables = proc.read_memory_counters(pid)?.page_tables;
    let bytes_by_node = match kind {
        ReadingKind::PagesByNode => proc.read_memory_by_numa_node(pid)?,
        ReadingKind::Pages | ReadingKind::Estimate | ReadingKind::Counters | ReadingKind::NodeSample => {
            BTreeMap::new()
        }
    };
    Ok(ProcessMemory { pid, rss, pss, uss, page_tables, swap, address_space: None, bytes_by_node })
}

/// Estimates the memory of `processes` on each NUMA node from samples of their pages, and adds it to `reading`. Leaves
/// out a process whose memory map is locked, one that can't be read, and one whose sample says nothing. Fails if nobody
/// waits for the reading any more.
fn read_node_sample(
    proc: &mut ProcDir,
    processes: &[LiveProcess],
    reading: &mut JobMemoryReading,
    progress: &dyn ReadingProgress,
) -> Result<(), ReadingError> {
    let spaces: Vec<Option<u32>> = processes.iter().map(|process| process.group).collect();
    let blocked = find_processes_with_held_mmap_lock(proc, processes, &spaces, progress);
    let max_maps_bytes = MAX_MAPS_BYTES / (processes.len() as u64).max(1);
    for process in processes.iter().filter(|process| !blocked.contains(&process.id.pid)) {
        if !progress.is_wanted() {
            return Err(ReadingError::Abandoned);
        }
        progress.begin_process(process.id.pid);
        let sampled = sample_nodes(proc, process, max_maps_bytes, reading.at.since_boot.0);
        // Another process may have got the pid meanwhile.
        reading.processes.extend(sampled.filter(|_| is_alive(proc, process.id)));
    }
    Ok(())
}

/// Measures the memory of `processes` by a method that takes little CPU time. Adds the memory to `reading`, and sets
/// the kind of `reading` to the method. First reads the memory counters of the processes. Then tries these methods
/// for the memory that processes share:
///
/// - If the job has a memory cgroup of its own, estimates from the counters of `cgroup`.
/// - Otherwise, or if that fails, reads the pages of a job with at most [`MAX_SMALL_JOB`] bytes.
///
/// Fails if nobody waits for the reading any more.
fn read_cheaply(
    proc: &mut ProcDir,
    processes: &[LiveProcess],
    cgroup: Option<&JobCgroup>,
    reading: &mut JobMemoryReading,
    progress: &dyn ReadingProgress,
) -> Result<(), ReadingError> {
    let ended_processes = reading.ended_processes;
    let anonymous = read_counters(proc, processes, reading);
    reading.sum = JobMemory::sum(&reading.processes);
    if let Some(own) = cgroup.filter(|job| job.is_own)
        && estimate_memory(&own.cgroup, &anonymous, reading).is_ok()
    {
        reading.kind = ReadingKind::Estimate;
    } else if reading.sum.rss <= MAX_SMALL_JOB {
        reading.kind = ReadingKind::Pages;
        (reading.ended_processes, reading.processes, reading.denied) =
            (ended_processes, Vec::new(), Vec::new());
        read_pages(proc, processes, reading, false, progress)?;
    }
    Ok(())
}

/// Reads the memory counters of `processes`, and adds each process to `reading`: with its memory, as ended, or as one
/// that can't be read. Returns the anonymous memory of each address space that was read, in bytes.
fn read_counters(proc: &mut ProcDir, processes: &[LiveProcess], reading: &mut JobMemoryReading) -> Vec<u64> {
    let spaces = number_address_spaces(processes, compare_address_spaces);
    let mut counted: BTreeSet<u32> = BTreeSet::new();
    let mut anonymous = Vec::with_capacity(processes.len());
    for (&LiveProcess { id: process, thread, .. }, address_space) in processes.iter().zip(spaces) {
        let pid = process.pid;
        match proc.read_memory_counters(thread.unwrap_or(pid)) {
            Ok(_) if !is_alive(proc, process) => reading.ended_processes += 1,
            Ok(ProcessMemoryCounters { rss, anonymous: anonymous_bytes, page_tables, swap, .. }) => {
                if address_space.is_none_or(|space| counted.insert(space)) {
                    anonymous.push(anonymous_bytes);
                }
                let (pss, uss, bytes_by_node) = (0, 0, BTreeMap::new());
                let memory =
                    ProcessMemory { pid, rss, pss, uss, page_tables, swap, address_space, bytes_by_node };
                reading.processes.push(memory);
            }
            Err(errno) => count_failure(proc, process, errno, reading),
        }
    }
    anonymous
}

/// Estimates the memory of a job from the counters of its cgroup `cgroup`, and from `anonymous`, the anonymous memory
/// of each address space in bytes. Stores the sums, and the memory that each worker has for itself, in `reading`.
///
/// # Errors
/// If the counters can't be read. If most of the memory of the largest address space is charged to another cgroup.
fn estimate_memory(
    cgroup: &CgroupDir,
    anonymous: &[u64],
    reading: &mut JobMemoryReading,
) -> Result<(), ReadingError> {
    let charged = cgroup.read_memory_use().map_err(|_| ReadingError::NoOwnCgroup)?;
    // A page is charged to the cgroup in which its first user was, or, of an address space that several processes
    // share, to that of the process that the kernel holds for its owner.
    let largest = anonymous.iter().copied().max().unwrap_or(0);
    if largest > MAX_COUNTER_LAG && charged.anonymous < largest / 2 {
        return Err(ReadingError::ChargedElsewhere {
            process_bytes: largest,
            charged_bytes: charged.anonymous,
        });
    }
    reading.sum = JobMemory {
        pss: charged.anonymous.saturating_add(charged.mapped_files),
        shared_permille: estimate_shared_permille(charged.anonymous, anonymous),
        ..JobMemory::sum(&reading.processes)
    };
    let workers = WorkerMemory::from_counters(reading.at.since_boot, charged.anonymous, anonymous);
    reading.workers = Some(workers);
    Ok(())
}

/// Counts a process that could not be read: it has ended, or the kernel refused.
fn count_failure(proc: &mut ProcDir, process: ProcessId, errno: Errno, reading: &mut JobMemoryReading) {
    record_unread_process(proc, process, reading, |uid| why_unreadable(errno, uid));
}

/// Records in `reading` that the memory of `process` was not read. If the process still exists, adds it to the denied
/// processes, with the reason that `why` returns for its user id. Otherwise counts it as ended.
fn record_unread_process(
    proc: &mut ProcDir,
    process: ProcessId,
    reading: &mut JobMemoryReading,
    why: impl FnOnce(u32) -> String,
) {
    let pid = process.pid;
    let status = proc.status(pid);
    match status.ok().filter(|_| is_alive(proc, process)) {
        Some(status) => {
            let denied = DeniedProcess { pid, uid: status.uid, reason: why(status.uid) };
            reading.denied.push(denied);
        }
        None => reading.ended_processes += 1,
    }
}

/// Returns the deepest memory cgroup that contains all `processes` of the job. The result also says whether it is the
/// job's own: it contains only these processes and their children, and its memory use can be read. `None` if the
/// deepest one is the root, or if the cgroups can't be read.
fn job_cgroup(proc: &mut ProcDir, processes: &[LiveProcess]) -> Option<JobCgroup> {
    let mount = MemoryControllerMount::from_mounts(&CgroupMounts::read())?;
    let mut paths = BTreeSet::new();
    for &LiveProcess { id: process, thread, .. } in processes {
        // A thread that has exited is in the root of cgroup v1.
        if let Some(Ok(cgroups)) = thread.map(|thread| proc.cgroups(thread))
            && is_alive(proc, process)
        {
            paths.extend(mount.memory_cgroup_path(&cgroups).map(str::to_owned));
        }
    }
    let cgroup = mount.cgroup(&common_cgroup(paths.iter().map(String::as_str))?)?;
    let members: BTreeSet<Pid> = processes.iter().map(|process| process.id.pid).collect();
    // A child that was born a moment ago may not be known yet.
    let mut belongs = |pid: Pid| {
        members.contains(&pid) || proc.stat(pid).map_or(true, |stat| members.contains(&stat.parent))
    };
    let is_own = cgroup.all_processes().into_iter().all(&mut belongs) && cgroup.read_memory_use().is_ok();
    Some(JobCgroup { cgroup, is_own })
}

/// The memory that the job can still get: what its cgroup and the machine have left.
fn available_memory(proc: &mut ProcDir, cgroup: Option<&JobCgroup>) -> u64 {
    let of_machine = proc.available_memory().unwrap_or(u64::MAX);
    let of_cgroup = cgroup.and_then(|job| job.cgroup.available_memory());
    of_cgroup.map_or(of_machine, |left| left.min(of_machine))
}

#[cfg(test)]
pub(super) mod tests;
