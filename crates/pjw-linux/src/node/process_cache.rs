//! The cached facts of each process, and the observation of one process.
//!
//! Facts that the task scan reported are not read again. All other facts are read in `/proc`. A thread's
//! `stat` is read only if the thread ran since the last scan. A scan allocates memory for each process, but
//! for a thread only if it is new or its mask has more than 128 PUs.

use std::collections::{BTreeMap, BTreeSet};
use std::mem;
use std::path::Path;
use std::sync::Arc;

use nix::errno::Errno;
use pjw_core::cpuset::Pu;
use pjw_core::ids::{Comm, Pid, ProcessId, StartTime, Tid, Uid};
use pjw_core::process_cgroups::ProcessCgroups;
use pjw_core::snapshot::{BatchAttributes, Process, Thread};

use super::address_spaces::AddressSpaces;
use super::task_scan_result::ScannedProcess;
use crate::proc::memory_files::{BegunRead, EnvironAndCommandLine, MemoryFiles};
use crate::proc::procfs::{ProcDir, SchedStat, Stat, Status};
use crate::sys::errno::{is_gone, is_permission_denied};
use crate::sys::{affinity, clock::process_cpu_time_ns, kcmp::compare_address_spaces};

/// Maximum number of thread listings per scan. The threads are listed until two listings agree. A process
/// that keeps creating threads is observed again in the next round.
const MAX_LISTINGS: usize = 4;
/// The number of full scans after which the cgroups of a process are read again, even if the fingerprint (hash) of
/// its cgroups is unchanged.
pub(super) const FINGERPRINT_SCANS: u32 = 7;

/// A limit for the CPU time of the threads that a scan does not read, in ns. If they used more since the last scan,
/// all threads of the process are read.
const NOTICED_NS: u64 = 5_000_000;

/// What earlier scans have read about a process, such as its cgroups and its environment variables. A scan reads
/// these values again only if they may have changed.
#[derive(Debug)]
pub(super) struct CachedProcess {
    id: ProcessId,
    uid: Uid,
    pub(super) attributes: BatchAttributes,
    /// Path of the process in the cpuset hierarchy, from the attributes.
    cgroup: Option<Arc<str>>,
    /// Path of the process in the v1 hierarchy of systemd, from the attributes.
    unit_cgroup: Option<Arc<str>>,
    /// The program for which the attributes were read. `None` before the first read, and while its environment can't be
    /// read.
    program: Option<Program>,
    /// The threads, ordered by thread id.
    threads: Vec<ThreadFacts>,
    /// The CPU time of all threads except the active ones, in ns, at the last scan that read only the active threads.
    /// An upper bound. `None` if a later scan has read all threads.
    other_threads_ns: Option<u64>,
    /// The number of threads at the last scan.
    pub(super) thread_count: usize,
    /// The fingerprint (a hash of the cgroups, [`crate::bpf::TaskRecord::cgroup_fingerprint`]) in the last task scan
    /// before the cgroups were read. 0 if unknown.
    pub(super) scanned_fingerprint: u64,
    /// The fingerprint (a hash of the cgroups) for which the cached cgroups are valid. 0 if the cgroups must be read.
    pub(super) fingerprint: u64,
}

/// Identifies the program of a process. A new name or another stack address shows that the process has executed a
/// program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Program {
    comm: Comm,
    stack: u64,
}

/// Cached facts of a thread. They are valid while the thread has not run.
#[derive(Debug, Clone, Copy)]
struct ThreadFacts {
    tid: Tid,
    start: StartTime,
    comm: Comm,
    state: char,
    last_cpu: Pu,
    ran: SchedStat,
}

/// Whether the attributes of a process (such as its cgroups and environment variables) changed since the last scan, and
/// what was read of them until now. [`ProcessCache::begin_attribute_read`] makes this value, and
/// [`ProcessCache::finish_attribute_read`] completes the read.
enum AttributeRead {
    /// The attributes did not change.
    Unchanged,
    /// A kernel thread has no attributes. This kernel thread was not reported before.
    NewKernelThread,
    /// The attributes changed, or may have changed.
    Changed {
        program: Option<Program>,
        cgroups: ProcessCgroups,
        status: Status,
        begun: Result<BegunRead, Errno>,
    },
}

impl CachedProcess {
    fn last_memory_contents(&self) -> EnvironAndCommandLine {
        let BatchAttributes { environ, command_line, .. } = &self.attributes;
        EnvironAndCommandLine { environ: environ.clone(), command_line: command_line.clone() }
    }
}

/// Reads the state of processes in `/proc`, and keeps what earlier scans have read about each process.
#[derive(Debug)]
pub(super) struct ProcessCache {
    pub(super) proc: ProcDir,
    pub(super) processes: BTreeMap<Pid, CachedProcess>,
    pub(super) memory_files: MemoryFiles,
    pub(super) ns_per_tick: u64,
    /// Whether the kernel has the files `schedstat`.
    has_schedstat: bool,
    /// Number of full scans since the start. It wraps around.
    full_scans: u32,
    /// Which processes share an address space.
    pub(super) address_spaces: AddressSpaces,
}

/// Returns whether `errno`, the error of reading a file in `/proc`, means that the process has ended or that this
/// user has no permission to read the file. Other errors say nothing about the process, for example that no file
/// descriptor is free.
pub(super) fn is_ended_or_unreadable(errno: Errno) -> bool {
    is_gone(errno) || is_permission_denied(errno)
}

impl ProcessCache {
    /// Makes a cache without processes. `wanted` has the names of the environment variables that are read from each
    /// process.
    ///
    /// # Errors
    /// If `/proc` can't be opened.
    pub(super) fn new(wanted: BTreeSet<&'static str>) -> Result<Self, Errno> {
        let ticks = nix::unistd::sysconf(nix::unistd::SysconfVar::CLK_TCK).ok().flatten();
        let ticks =
            ticks.and_then(|ticks| u64::try_from(ticks).ok()).filter(|&ticks| ticks > 0).unwrap_or(100);
        Ok(Self {
            proc: ProcDir::open(Path::new("/proc"))?,
            processes: BTreeMap::new(),
            memory_files: MemoryFiles::new(wanted),
            ns_per_tick: 1_000_000_000 / ticks,
            has_schedstat: Path::new("/proc/self/schedstat").exists(),
            full_scans: 0,
            address_spaces: AddressSpaces::new(compare_address_spaces),
        })
    }

    /// Returns the state of the process `pid`. `scanned` is what the task scan (a BPF program) reported about the
    /// process and its threads. Without `scanned`, the process is read in `/proc`, and `with_threads` says whether
    /// its threads are read too. Cgroups and environment variables are always read in `/proc`, but only if they may
    /// have changed.
    ///
    /// # Errors
    /// `ESRCH` if the process has ended or is a zombie. Otherwise the error of reading `/proc`.
    pub(super) fn observe_process(
        &mut self,
        pid: Pid,
        with_threads: bool,
        scanned: Option<ScannedProcess>,
    ) -> Result<Process, Errno> {
        let stat = match &scanned {
            Some(scanned) => scanned.stat,
            // The `stat` of the first thread. The kernel would sum over all threads for the `stat` of the
            // process.
            None => self.proc.thread_stat(pid, Tid(pid.0))?,
        };
        let id = ProcessId { pid, start: stat.start };
        self.address_spaces.record_process(
            pid,
            &stat,
            scanned.as_ref().and_then(|scanned| scanned.address_space),
        );
        let is_known = self.processes.get(&pid).is_some_and(|cached| cached.id == id);
        if !is_known {
            self.insert(id);
        }
        // An ended first thread has no cgroups and no mask.
        let representative = if matches!(stat.state, 'Z' | 'X') { self.living_thread(pid)? } else { pid };
        let scanned_representative = scanned.as_ref().filter(|_| representative == pid);
        let fingerprint = scanned_representative.map_or(0, |scanned| scanned.fingerprint);
        let first_thread_mask = match scanned_representative {
            Some(scanned) => Some(scanned.mask.clone()),
            None => affinity::get_mask(Tid(representative.0)).ok(),
        };
        let changed = self.begin_attribute_read(&stat, pid, representative, fingerprint, !is_known)?;
        let threads = match scanned {
            Some(scanned) => {
                self.apply_scanned(pid, &scanned);
                scanned.threads.filter(|_| !stat.is_kernel_thread)
            }
            None => (with_threads && !stat.is_kernel_thread).then(|| self.read_threads(pid)).transpose()?,
        };
        let attributes = self.finish_attribute_read(pid, changed)?;
        let cached = self.processes.get(&pid).ok_or(Errno::ESRCH)?;
        Ok(Process {
            id,
            parent: stat.parent,
            process_group: stat.process_group,
            session: stat.session,
            uid: cached.uid,
            comm: stat.comm,
            is_kernel_thread: stat.is_kernel_thread,
            first_thread_mask,
            cgroup: cached.cgroup.clone(),
            unit_cgroup: cached.unit_cgroup.clone(),
            attributes,
            has_unread_environment: !stat.is_kernel_thread && cached.program.is_none(),
            batch_identity: None,
            threads,
            has_all_threads: true,
            idle_until: None,
        })
    }

    /// Returns the state of the process `pid` with only those of its threads that are in `active`. Returns `None` if
    /// the caller must read all threads instead: a thread in `active` has ended, the other threads used more than 5 ms
    /// of CPU time since the last scan, or the process can't be read.
    pub(super) fn observe_active(&mut self, pid: Pid, active: &BTreeSet<Tid>) -> Option<Process> {
        let known_ns = self.processes.get(&pid)?.other_threads_ns;
        let mut before_ns = 0;
        for &tid in active {
            before_ns += self.proc.schedstat(pid, tid).ok()?.run_ns;
        }
        let process_ns = process_cpu_time_ns(pid).ok()?;
        let process = self.observe_process(pid, false, None).ok()?;
        let mut threads = Vec::with_capacity(active.len());
        for &tid in active {
            threads.push(self.read_thread(pid, tid, None).ok()?.0);
        }
        let after_ns: u64 = threads.iter().map(|thread| thread.run_ns).sum();
        // The process ran for the time `process_ns` between the two readings of its active threads.
        let (least, most) = (process_ns.saturating_sub(after_ns), process_ns.saturating_sub(before_ns));
        let cached = self.processes.get_mut(&pid).filter(|cached| cached.id == process.id)?;
        if known_ns.is_some_and(|known_ns| least > known_ns + NOTICED_NS) {
            return None;
        }
        cached.other_threads_ns = Some(most.max(known_ns.unwrap_or_default()));
        Some(Process { threads: Some(threads), has_all_threads: false, ..process })
    }

    /// Removes the process `pid`, which has ended, from this cache.
    pub(super) fn remove_process(&mut self, pid: Pid) {
        self.processes.remove(&pid);
        self.address_spaces.remove_process(pid);
    }

    /// Removes all processes for which `is_there` returns false. Called after a full scan, which has found all
    /// existing processes.
    pub(super) fn retain(&mut self, is_there: impl Fn(Pid) -> bool) {
        self.processes.retain(|&pid, _| is_there(pid));
        self.address_spaces.retain(is_there);
    }

    /// Adds the process `id` to the cache. Nothing is known about the process yet. Replaces an earlier process with
    /// the same pid.
    fn insert(&mut self, id: ProcessId) {
        let cached = CachedProcess {
            id,
            // The user id is read with the attributes. Kernel threads belong to root.
            uid: Uid::ROOT,
            attributes: BatchAttributes::default(),
            cgroup: None,
            unit_cgroup: None,
            program: None,
            threads: Vec::new(),
            other_threads_ns: None,
            thread_count: 1,
            scanned_fingerprint: 0,
            fingerprint: 0,
        };
        self.processes.insert(id.pid, cached);
    }

    /// Records what the task scan (a BPF program) reported about the process `pid`. Removes the cached facts of its
    /// threads, which are outdated.
    fn apply_scanned(&mut self, pid: Pid, scanned: &ScannedProcess) {
        if let Some(cached) = self.processes.get_mut(&pid) {
            cached.uid = scanned.uid;
            cached.thread_count = scanned.thread_count.unwrap_or(cached.thread_count);
            cached.threads = Vec::new();
            cached.other_threads_ns = None;
        }
    }

    /// Makes the next full scan read the cgroups of some processes again, although the fingerprint (hash) of their
    /// cgroups is unchanged. A few changes leave the fingerprint unchanged, for example if a v1 cgroup is renamed.
    /// Each call chooses other processes, so that each process is read again within 7 full scans. If `all` is true,
    /// all processes are chosen. This is necessary after a cgroup hierarchy was mounted or unmounted.
    pub(super) fn expire_fingerprints(&mut self, all: bool) {
        self.full_scans = self.full_scans.wrapping_add(1);
        for (pid, cached) in &mut self.processes {
            if all || pid.0.wrapping_add(self.full_scans).is_multiple_of(FINGERPRINT_SCANS) {
                cached.fingerprint = 0;
            }
        }
    }

    /// Reads the user id of the process `pid` again, because a login program changes its user without executing
    /// another program.
    pub(super) fn refresh_uid(&mut self, pid: Pid) {
        if let Some(cached) = self.processes.get_mut(&pid)
            && let Ok(status) = self.proc.status(pid)
        {
            cached.uid = Uid(status.uid);
        }
    }

    /// A living thread of a process whose first thread has ended.
    ///
    /// # Errors
    /// `ESRCH` if there is none: the process is a zombie.
    fn living_thread(&mut self, pid: Pid) -> Result<Pid, Errno> {
        let others = self.proc.tids(pid)?.into_iter().filter(|tid| tid.0 != pid.0);
        others.map(|tid| Pid(tid.0)).next().ok_or(Errno::ESRCH)
    }

    /// Starts to read the attributes of the process `pid` (such as its cgroups and environment variables), if they
    /// may have changed since the last scan. Returns [`AttributeRead::Unchanged`] if not.
    /// [`ProcessCache::finish_attribute_read`] completes the read.
    ///
    /// - `representative` is a living thread of the process: the first one, or another if the first has ended.
    /// - `stat` has the values of the process's first thread.
    /// - `fingerprint` is the hash of the process's cgroups from the task scan (a BPF program); 0 if unknown.
    /// - `first` says whether the process was not known before this scan.
    ///
    /// # Errors
    /// `ESRCH` if the process or `representative` has ended, or if the process is not in the cache. Otherwise the error
    /// of reading `/proc`. An error of reading the environment variables is part of the result.
    fn begin_attribute_read(
        &mut self,
        stat: &Stat,
        pid: Pid,
        representative: Pid,
        fingerprint: u64,
        first: bool,
    ) -> Result<AttributeRead, Errno> {
        if stat.is_kernel_thread {
            return Ok(if first { AttributeRead::NewKernelThread } else { AttributeRead::Unchanged });
        }
        let stack = if representative == pid {
            stat.stack_start
        } else {
            self.proc.thread_stat(pid, Tid(representative.0))?.stack_start
        };
        let program = Some(Program { comm: stat.comm, stack });
        let cached = self.processes.get_mut(&pid).ok_or(Errno::ESRCH)?;
        if cached.program == program && fingerprint != 0 && cached.fingerprint == fingerprint {
            return Ok(AttributeRead::Unchanged);
        }
        let cgroups = self.proc.cgroups(representative)?;
        let has_same_cgroups = cached.attributes.cgroups == cgroups;
        // A thread that exits has no memory any more, and shows the root as its cgroup in the v1 hierarchies
        // (proc_cgroup_show, kernel/cgroup/cgroup.c). What is known of its process holds until the process has ended.
        let has_changed = !has_same_cgroups || cached.program != program;
        if has_changed && !first && self.proc.is_exiting(pid, Tid(representative.0))? {
            return Ok(AttributeRead::Unchanged);
        }
        // The process may move between the task scan and this read. Then the fingerprint and the file belong to
        // different cgroups. So both must be the same twice in a row.
        if fingerprint != 0 {
            cached.fingerprint =
                if has_same_cgroups && cached.scanned_fingerprint == fingerprint { fingerprint } else { 0 };
            cached.scanned_fingerprint = fingerprint;
        } else if !has_same_cgroups {
            (cached.fingerprint, cached.scanned_fingerprint) = (0, 0);
        }
        if cached.program == program && has_same_cgroups {
            return Ok(AttributeRead::Unchanged);
        }
        // A process that only moved to another cgroup has the memory that it had.
        let unchanged = (cached.program == program).then(|| cached.last_memory_contents());
        let status = self.proc.status(representative)?;
        let begun = match unchanged {
            Some(contents) => Ok(BegunRead::Known(contents)),
            None => self.memory_files.begin_read(representative, Uid(status.uid)),
        };
        Ok(AttributeRead::Changed { program, cgroups, status, begun })
    }

    /// Completes the read that [`ProcessCache::begin_attribute_read`] has begun, and stores the attributes in the
    /// cache. Returns the attributes, or `None` if they have not changed. If the environment can't be read now because
    /// the memory of the process is locked, uses the last known one, and the next scan reads it again
    /// ([`Process::has_unread_environment`]).
    ///
    /// # Errors
    /// `ESRCH` if the process is not in the cache. Otherwise the error of reading `/proc`.
    fn finish_attribute_read(
        &mut self,
        pid: Pid,
        changed: AttributeRead,
    ) -> Result<Option<BatchAttributes>, Errno> {
        let (program, cgroups, status, begun) = match changed {
            AttributeRead::Unchanged => return Ok(None),
            AttributeRead::NewKernelThread => return Ok(Some(BatchAttributes::default())),
            AttributeRead::Changed { program, cgroups, status, begun } => (program, cgroups, status, begun),
        };
        let cached = self.processes.get_mut(&pid).ok_or(Errno::ESRCH)?;
        let contents = begun.and_then(|begun| self.memory_files.finish_read(begun));
        let (program, EnvironAndCommandLine { environ, command_line }) = match contents {
            // The last known contents hold until the next scan, which reads the files again.
            Err(Errno::EAGAIN) => (None, cached.last_memory_contents()),
            contents => (program, contents?),
        };
        let attributes =
            BatchAttributes { cgroups, environ, supplementary_groups: status.groups, command_line };
        cached.uid = Uid(status.uid);
        cached.program = program;
        cached.cgroup = attributes.cgroups.cpuset_path().map(Arc::from);
        cached.unit_cgroup = attributes.cgroups.v1_path("name=systemd").map(Arc::from);
        cached.attributes = attributes.clone();
        Ok(Some(attributes))
    }

    /// Reads all threads of the process `pid` in `/proc`, and returns them in the order of their ids. Lists the threads
    /// again until a list has no new thread, at most [`MAX_LISTINGS`] times. Leaves out threads that have ended or that
    /// this user may not read. Updates the cached facts of the threads.
    ///
    /// # Errors
    /// The error of reading `/proc`.
    fn read_threads(&mut self, pid: Pid) -> Result<Vec<Thread>, Errno> {
        let earlier_facts =
            self.processes.get_mut(&pid).map(|cached| mem::take(&mut cached.threads)).unwrap_or_default();
        let facts_before = |tid| {
            let found = earlier_facts.binary_search_by_key(&tid, |facts: &ThreadFacts| facts.tid);
            found.ok().map(|at| earlier_facts[at])
        };
        let mut facts: Vec<ThreadFacts> = Vec::with_capacity(earlier_facts.len());
        let mut threads: Vec<Thread> = Vec::with_capacity(earlier_facts.len());
        for _ in 0..MAX_LISTINGS {
            let listed = threads.len();
            let mut has_new_thread = false;
            for tid in self.proc.tids(pid)? {
                if threads[..listed].binary_search_by_key(&tid, |thread| thread.tid).is_ok() {
                    continue;
                }
                has_new_thread = true;
                match self.read_thread(pid, tid, facts_before(tid)) {
                    Ok((thread, fact)) => {
                        threads.push(thread);
                        facts.push(fact);
                    }
                    // The thread ended while it was read.
                    Err(errno) if is_ended_or_unreadable(errno) => {}
                    Err(errno) => return Err(errno),
                }
            }
            if !has_new_thread {
                break;
            }
            // A listing that changes while it is read may contain a thread twice.
            threads.sort_unstable_by_key(|thread| thread.tid);
            threads.dedup_by_key(|thread| thread.tid);
            facts.sort_unstable_by_key(|facts| facts.tid);
            facts.dedup_by_key(|facts| facts.tid);
        }
        if let Some(cached) = self.processes.get_mut(&pid) {
            cached.thread_count = facts.len();
            cached.threads = facts;
            cached.other_threads_ns = None;
        }
        Ok(threads)
    }

    /// Reads the thread `tid` of the process `pid` in `/proc`, and its affinity mask. `before` has the facts from an
    /// earlier scan, which are used again if the thread has not run since. Returns the thread, and its facts for the
    /// next scan.
    ///
    /// # Errors
    /// `ESRCH` if the thread has ended. Otherwise the error of reading `/proc` or the affinity mask.
    fn read_thread(
        &mut self,
        pid: Pid,
        tid: Tid,
        before: Option<ThreadFacts>,
    ) -> Result<(Thread, ThreadFacts), Errno> {
        let ran = if self.has_schedstat { Some(self.proc.schedstat(pid, tid)?) } else { None };
        let facts = match before {
            Some(facts) if Some(facts.ran) == ran => facts,
            _ => {
                let stat = self.proc.thread_stat(pid, tid)?;
                let by_ticks = SchedStat { run_ns: stat.run_ticks * self.ns_per_tick, wait_ns: 0 };
                ThreadFacts {
                    tid,
                    start: stat.start,
                    comm: stat.comm,
                    state: stat.state,
                    last_cpu: stat.last_cpu,
                    ran: ran.unwrap_or(by_ticks),
                }
            }
        };
        let ThreadFacts { start, comm, state, last_cpu, ran: SchedStat { run_ns, wait_ns }, .. } = facts;
        let effective_mask = affinity::get_mask(tid)?;
        Ok((Thread { tid, start, comm, state, last_cpu, run_ns, wait_ns, effective_mask }, facts))
    }
}
