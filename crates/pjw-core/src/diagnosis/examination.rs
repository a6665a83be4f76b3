//! The input of the diagnosis, [`Examination`], and its output, [`Finding`].

use crate::basics::{Comm, CpuSet, Pid, Pu, Uid, prelude::*};
use crate::machine::Topology;
use crate::terms::{Amount, CpusetSupport, GrantedBy, JobId};

/// The demand from which the diagnosis counts a thread as busy: 500 permille, half of one PU. The demand is the share
/// of the observed time in which the thread ran or waited for a PU.
pub const BUSY_PERMILLE: u32 = 500;

/// The maximum number of processes that a finding lists. The text has the full number.
pub(crate) const MAX_PIDS: usize = 20;

/// The maximum number of findings of one kind. A further finding gives the number of those that were left out.
pub(crate) const MAX_OF_A_KIND: usize = 8;

/// How urgent a finding is, most urgent first: problem, advice or note.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, strum::IntoStaticStr)]
#[strum(serialize_all = "kebab-case")]
pub enum Severity {
    /// Jobs are slowed down, or a promise to a job is not kept.
    Problem,
    /// Something can be improved.
    Advice,
    /// No action is needed.
    Note,
}

impl Severity {
    /// Returns the name of the severity in text and JSON: `problem`, `advice` or `note`.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.into()
    }
}

/// One result of the diagnosis (`pjwctl doctor`): a problem, an advice or a note about the node, with a remedy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// A short name of the kind of finding that scripts can rely on, such as `no-warden`.
    pub code: String,
    /// How urgent the finding is.
    pub severity: Severity,
    /// What was found, in one sentence for the user.
    pub text: String,
    /// What the user can do about the finding, as text.
    pub remedy: String,
    /// The jobs that the finding is about. Empty if it is about no job.
    pub jobs: BTreeSet<JobId>,
    /// The processes that the finding is about: at most 20, those with the lowest pids. Empty if it is about no
    /// process.
    pub pids: BTreeSet<Pid>,
    /// The PUs (logical CPUs) that the finding is about. Empty if it is about no PU.
    pub cpus: CpuSet,
}

impl Finding {
    /// Makes a finding that names no job, process or PU. These are added with `with_jobs`, `with_pids` and
    /// `with_cpus`.
    #[must_use]
    pub fn new(severity: Severity, code: &str, text: String, remedy: impl Into<String>) -> Self {
        Self {
            code: code.to_owned(),
            severity,
            text,
            remedy: remedy.into(),
            jobs: BTreeSet::new(),
            pids: BTreeSet::new(),
            cpus: CpuSet::new(),
        }
    }

    /// Makes a finding of the severity [`Severity::Problem`].
    pub(crate) fn problem(code: &str, text: String, remedy: impl Into<String>) -> Self {
        Self::new(Severity::Problem, code, text, remedy)
    }

    /// Makes a finding of the severity [`Severity::Advice`].
    pub(crate) fn advice(code: &str, text: String, remedy: impl Into<String>) -> Self {
        Self::new(Severity::Advice, code, text, remedy)
    }

    /// Makes a finding of the severity [`Severity::Note`].
    pub(crate) fn note(code: &str, text: String, remedy: impl Into<String>) -> Self {
        Self::new(Severity::Note, code, text, remedy)
    }

    /// Sets the jobs that the finding concerns, and returns the finding.
    #[must_use]
    pub fn with_jobs<'a>(mut self, jobs: impl IntoIterator<Item = &'a JobId>) -> Self {
        self.jobs = jobs.into_iter().cloned().collect();
        self
    }

    /// Sets the PUs that the finding concerns, and returns the finding.
    #[must_use]
    pub fn with_cpus(mut self, cpus: &CpuSet) -> Self {
        self.cpus = cpus.clone();
        self
    }

    /// Sets the processes that the finding concerns, and returns the finding. At most 20 processes are kept, those
    /// with the lowest pids.
    #[must_use]
    pub fn with_pids(mut self, pids: impl IntoIterator<Item = Pid>) -> Self {
        let pids: BTreeSet<Pid> = pids.into_iter().collect();
        self.pids = pids.into_iter().take(MAX_PIDS).collect();
        self
    }
}

/// The input of the diagnosis (`pjwctl doctor`): all facts that were read about the node.
#[derive(Debug, Clone)]
pub struct Examination {
    /// The cores, caches, NUMA nodes and packages of the machine.
    pub topology: Topology,
    /// The PUs (logical CPUs) of the topology that were online during the observation.
    pub online: CpuSet,
    /// The time between the two scans of the node from which CPU use is computed, in ms.
    pub span_ms: u64,
    /// The jobs on the node, as the diagnosis recognised them or a running `pjwd` reported them.
    pub jobs: Vec<ObservedJob>,
    /// The processes that belong to no job, without kernel threads and without the diagnosing process.
    pub unassigned: Vec<UnassignedProcess>,
    /// The interrupts of devices, with their counts during the observation. The kernel's own interrupts, such as
    /// timers, are left out.
    pub interrupts: Vec<Interrupt>,
    /// The settings and the boot parameters of the kernel, and what the diagnosis could not read.
    pub host: HostFacts,
    /// Other programs on the node that move threads or change cpusets.
    pub conflicting_programs: Vec<ConflictingProgram>,
    /// The batch systems whose daemons run on the node.
    pub schedulers: Vec<ObservedScheduler>,
    /// Whether and how `pjwd` could make cpusets on the node. Found out by reading files only.
    pub cpuset_support: CpusetSupport,
    /// Whether the daemon `pjwd` runs on the node, and what it answered.
    pub warden: WardenStatus,
    /// The user id of the user that runs the diagnosis. A user other than root sees less.
    pub viewer: Uid,
    /// The lowest user id of a person. Processes with lower user ids, except root's, belong to services.
    pub first_person_uid: u32,
}

/// A job, as `pjwctl doctor` observed it: its PUs, and its threads with their CPU use. The command scans the node
/// twice; the CPU use is the difference.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObservedJob {
    /// The id of the job.
    pub id: JobId,
    /// The user that owns the job.
    pub owner: Uid,
    /// The number of cores or PUs that the job requested; `None` if unknown.
    pub amount: Option<Amount>,
    /// The PUs that the job holds, and whether its scheduler or a running warden granted them. `None` if the job
    /// holds none.
    pub holds: Option<(CpuSet, GrantedBy)>,
    /// The PUs that `pjwd` would grant to the job if it ran. `None` if the job holds PUs already, or if its request
    /// is unknown or can't be served.
    pub expected_cpus: Option<CpuSet>,
    /// The number of processes that belong to the job.
    pub processes: usize,
    /// The threads of all processes of the job, as the second scan found them.
    pub threads: Vec<ObservedThread>,
    /// The pids of those processes of the job that are not in the scheduler's cgroup for the job. Empty if the job
    /// has no such cgroup.
    pub outside_cgroup: Vec<Pid>,
    /// The path of the scheduler's cgroup for the job, as in `/proc/PID/cgroup`. `None` if no process of the job
    /// was seen in such a cgroup.
    pub cgroup: Option<String>,
    /// Whether the scheduler's cgroup has a cpuset; `None` if unknown.
    pub has_cpuset: Option<bool>,
    /// How a running warden keeps the processes of the job on its cores: `cpuset`, `affinity` or `none`. Empty if
    /// no warden runs.
    pub kept_by: String,
}

/// A thread, as `pjwctl doctor` observed it: its affinity mask at the second of two scans, and its CPU use between
/// them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObservedThread {
    /// The process to which the thread belongs.
    pub pid: Pid,
    /// The effective affinity mask (sched_getaffinity(2)).
    pub effective_mask: CpuSet,
    /// The PU on which the thread ran last, at the second scan.
    pub last_cpu: Pu,
    /// The demand for CPU time between the two scans: the time running or waiting for a PU, in permille of the time
    /// between the scans.
    pub demand_permille: u32,
    /// The time running between the two scans, in permille of the time between the scans.
    pub run_permille: u32,
}

impl ObservedThread {
    /// Whether the thread ran or waited for a PU during at least half of the observed time ([`BUSY_PERMILLE`]).
    #[must_use]
    pub fn is_busy(&self) -> bool {
        self.demand_permille >= BUSY_PERMILLE
    }
}

/// A process that belongs to no job, as `pjwctl doctor` observed it: its threads and their CPU use. The command
/// scans the node twice; the CPU use is the difference.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnassignedProcess {
    /// The process id (pid).
    pub pid: Pid,
    /// The real user id of the process.
    pub uid: Uid,
    /// The command name (comm) of the process, at most 15 bytes.
    pub comm: Comm,
    /// Whether the process is a daemon or a helper of a batch system, such as `slurmstepd`. Always false for
    /// processes of ordinary users.
    pub belongs_to_scheduler: bool,
    /// The threads of the process. Above 4,096 processes in no job, a further process has one entry: the mask of
    /// the first thread, with the CPU use 0.
    pub threads: Vec<ObservedThread>,
}

/// An interrupt of a device, and the PUs that handle it. Interrupts on the PUs of a job disturb the job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Interrupt {
    /// The interrupt number (IRQ) of the kernel, as in `/proc/interrupts`.
    pub number: u32,
    /// The name of the device or of the interrupt handler, as in `/proc/interrupts`.
    pub name: String,
    /// The PUs that the interrupt is sent to (`effective_affinity_list`, or else `smp_affinity_list`).
    pub sent_to: CpuSet,
    /// How often the interrupt occurred on each PU between the two scans of the diagnosis. PUs with the count 0 are
    /// left out.
    pub counts: BTreeMap<Pu, u64>,
}

/// Facts about the host for the diagnosis: the settings of its kernel, its boot parameters, and what the diagnosis
/// can't observe on it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostFacts {
    /// The kernel release, as `uname -r` prints it.
    pub kernel: String,
    /// The cgroup layout: v1, v2, hybrid or none.
    pub cgroup_layout: String,
    /// A description of the cgroup hierarchy that has the cpuset controller, as text for users.
    pub cpuset_hierarchy: String,
    /// Whether pressure stall information is available (`/proc/pressure`).
    pub psi: bool,
    /// Whether wait times of threads are available (`schedstat`).
    pub schedstat: bool,
    /// The reason why the kernel reports no fork events to this user; `None` if it does.
    pub no_events: Option<String>,
    /// Whether the kernel has type information (BTF), which pjwd's BPF programs need.
    pub btf: bool,
    /// PUs that the boot parameter `isolcpus=` excludes from the kernel's load balancing.
    pub isolated: CpuSet,
    /// PUs that the boot parameter `nohz_full=` frees from the periodic timer tick.
    pub nohz_full: CpuSet,
    /// Whether automatic NUMA balancing is on; `None` if the kernel does not support it.
    pub numa_balancing: Option<bool>,
    /// Whether sessions are scheduled as groups (autogroup); `None` if the kernel does not support it.
    pub autogroup: Option<bool>,
    /// The state of SMT (`on`, `off`, `forceoff`, `notsupported`, …); empty if unknown.
    pub smt: String,
    /// The frequency governors and their PUs; empty if there are none.
    pub governors: BTreeMap<String, CpuSet>,
    /// Whether the diagnosis runs in a pid namespace, such as in a container. Kernel threads are not visible
    /// there.
    pub container: bool,
    /// Whether processes of other users are hidden (`hidepid=`).
    pub hides_processes: bool,
    /// The reason why some processes could not be read; `None` if all were read.
    pub incomplete: Option<String>,
}

/// Another program on the node that moves threads, moves interrupts or changes cpusets, and so may work against pjw.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConflictingProgram {
    /// The command name of the program.
    pub name: String,
    /// The pid of one process of the program. `None` if the program runs in the kernel.
    pub pid: Option<Pid>,
    /// What the program does that may work against pjw, as part of a sentence without the subject: `moves processes
    /// between cgroups by its rules`.
    pub effect: &'static str,
    /// What the user can do against the conflict, as text.
    pub remedy: &'static str,
    /// Whether the program undoes changes of pjw. If false, the program may interfere but undoes nothing.
    pub undoes_warden: bool,
}

/// The way in which a batch system binds its jobs to cores: by cpusets, by affinity masks, or not at all.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Binding {
    /// By its own cpusets. pjw never widens these.
    Cpusets,
    /// By affinity masks set at the start of each job.
    Masks,
    /// Not at all.
    Nothing,
    /// Unknown, because the configuration could not be read.
    Unknown,
}

/// A batch system that was found on the node, and how it binds its jobs to cores.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObservedScheduler {
    /// The name of the batch system, for people.
    pub name: String,
    /// The means by which the batch system binds its jobs to cores.
    pub binding: Binding,
    /// What the binding by the batch system means for pjw, in one sentence.
    pub meaning: String,
}

/// Whether the daemon `pjwd` runs on the node and answers the diagnosis.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WardenStatus {
    /// No warden runs. The text says where its socket was expected and how to start the daemon.
    Absent(String),
    /// pjw runs and does not answer. The text has the reason and the remedy.
    Unresponsive(String),
    /// pjw answers.
    Answers {
        /// The version of pjw.
        version: String,
        /// The version of the diagnosing program.
        own_version: String,
        /// Whether pjw runs in observe mode.
        observes: bool,
        /// pjw's own warnings.
        warnings: Vec<Finding>,
    },
}

impl Examination {
    /// Returns the ids of the jobs for which `is_concerned` is true.
    pub(crate) fn job_ids(&self, is_concerned: impl Fn(&ObservedJob) -> bool) -> BTreeSet<&JobId> {
        self.jobs.iter().filter(|job| is_concerned(job)).map(|job| &job.id).collect()
    }
}

impl ObservedJob {
    /// Returns the online PUs on which the job's threads may run by their affinity masks. If the job holds PUs, a
    /// thread whose mask has other PUs is left out, because the diagnosis reports that thread by itself.
    #[must_use]
    pub fn allowed_cpus(&self, online: &CpuSet) -> CpuSet {
        let is_inside = |mask: &&CpuSet| self.holds.as_ref().is_none_or(|(cpus, _)| mask.is_subset(cpus));
        let masks = self.threads.iter().map(|thread| &thread.effective_mask).filter(is_inside);
        masks.fold(CpuSet::new(), |allowed, mask| allowed.union(mask)).intersection(online)
    }

    /// Returns the online PUs that the job holds; `None` if the job holds none.
    pub(crate) fn held_cpus(&self, online: &CpuSet) -> Option<CpuSet> {
        self.holds.as_ref().map(|(cpus, _)| cpus.intersection(online))
    }

    /// Returns the number of busy threads of the job: those that ran or waited for a PU during at least half of the
    /// observed time.
    #[must_use]
    pub fn busy_thread_count(&self) -> usize {
        self.threads.iter().filter(|thread| thread.is_busy()).count()
    }
}

/// Adds at most a fixed number of findings of one kind. A note gives the number of findings that were left
/// out.
pub(crate) fn push_limited(mut found: Vec<Finding>, findings: &mut Vec<Finding>) {
    found.sort_by_key(|finding| finding.severity);
    let left_out = found.len().saturating_sub(MAX_OF_A_KIND);
    let more = found.get(MAX_OF_A_KIND).map(|next| {
        let text = format!("{left_out} more of this kind ({})", next.code);
        Finding::new(next.severity, &next.code, text, "deal with those above first, then look again")
    });
    findings.extend(found.into_iter().take(MAX_OF_A_KIND));
    findings.extend(more);
}
