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
    /// The name of the finding, for scripts.
    pub code: String,
    /// The urgency.
    pub severity: Severity,
    /// The description, one sentence.
    pub text: String,
    /// What the user can do.
    pub remedy: String,
    /// The jobs concerned.
    pub jobs: BTreeSet<JobId>,
    /// The processes concerned; a limited number of them.
    pub pids: BTreeSet<Pid>,
    /// The PUs concerned.
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
    /// The topology of the machine.
    pub topology: Topology,
    /// The online PUs.
    pub online: CpuSet,
    /// The length of the observation, in ms.
    pub span_ms: u64,
    /// The jobs.
    pub jobs: Vec<ObservedJob>,
    /// The processes that belong to no job, without kernel threads and without the diagnosing process.
    pub unassigned: Vec<UnassignedProcess>,
    /// The interrupts of devices.
    pub interrupts: Vec<Interrupt>,
    /// The settings of the kernel and the boot parameters.
    pub host: HostFacts,
    /// Other programs on the node that move threads or change cpusets.
    pub conflicting_programs: Vec<ConflictingProgram>,
    /// The batch systems on the node.
    pub schedulers: Vec<ObservedScheduler>,
    /// The cpuset features of the node.
    pub cpuset_support: CpusetSupport,
    /// pjw's state, if one runs.
    pub warden: WardenStatus,
    /// The user that runs the diagnosis.
    pub viewer: Uid,
    /// The lowest user id of a person.
    pub first_person_uid: u32,
}

/// A job, as the two scans of the diagnosis observed it: its PUs, and its threads with their CPU use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObservedJob {
    /// The id of the job.
    pub id: JobId,
    /// The owner of the job.
    pub owner: Uid,
    /// The requested number of cores; `None` if unknown.
    pub amount: Option<Amount>,
    /// The PUs that the job holds, and whether its scheduler or a running warden granted them. `None` if the job
    /// holds none.
    pub holds: Option<(CpuSet, GrantedBy)>,
    /// The PUs that pjwd would grant to the job.
    pub expected_cpus: Option<CpuSet>,
    /// The number of processes.
    pub processes: usize,
    /// The threads of the job.
    pub threads: Vec<ObservedThread>,
    /// Processes of the job that are not in the scheduler's cgroup for the job.
    pub outside: Vec<Pid>,
    /// The path of the scheduler's cgroup for the job, if one was seen.
    pub cgroup: Option<String>,
    /// Whether the scheduler's cgroup has a cpuset; `None` if unknown.
    pub has_cpuset: Option<bool>,
    /// How a running warden keeps the processes of the job on its cores: `cpuset`, `affinity` or `none`. Empty if
    /// no warden runs.
    pub kept_by: String,
}

/// A thread, as the two scans of the diagnosis observed it: its affinity mask, and its CPU use between the scans.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObservedThread {
    /// The process of the thread.
    pub pid: Pid,
    /// The effective affinity mask (sched_getaffinity(2)).
    pub effective_mask: CpuSet,
    /// The PU on which the thread ran last.
    pub last_cpu: Pu,
    /// The demand: the time running or waiting for a PU, in permille of the observed time.
    pub demand_permille: u32,
    /// The time running, in permille of the observed time.
    pub run_permille: u32,
}

impl ObservedThread {
    /// Whether the thread ran or waited for a PU during at least half of the observed time ([`BUSY_PERMILLE`]).
    #[must_use]
    pub fn is_busy(&self) -> bool {
        self.demand_permille >= BUSY_PERMILLE
    }
}

/// A process that belongs to no job, as the two scans of the diagnosis observed it: its threads and their CPU use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnassignedProcess {
    /// The pid.
    pub pid: Pid,
    /// The user of the process.
    pub uid: Uid,
    /// The command name.
    pub comm: Comm,
    /// Whether the process belongs to a batch system itself.
    pub of_scheduler: bool,
    /// The threads. If there were too many processes to read all threads, one entry with the mask of the
    /// first thread.
    pub threads: Vec<ObservedThread>,
}

/// An interrupt of a device, and the PUs that handle it. Interrupts on the PUs of a job disturb the job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Interrupt {
    /// The number of the interrupt.
    pub number: u32,
    /// The name of the device or of the handler, as given by the kernel.
    pub name: String,
    /// The PUs that the interrupt is sent to (`effective_affinity_list`, or else `smp_affinity_list`).
    pub sent_to: CpuSet,
    /// The number of interrupts on each PU during the observation. PUs without interrupts are left out.
    pub counts: BTreeMap<Pu, u64>,
}

/// Facts about the host for the diagnosis: the settings of its kernel, its boot parameters, and what the diagnosis
/// can't observe on it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostFacts {
    /// The kernel release.
    pub kernel: String,
    /// The cgroup layout: v1, v2, hybrid or none.
    pub layout: String,
    /// A description of the hierarchy that has the cpuset controller.
    pub cpuset: String,
    /// Whether pressure stall information is available (`/proc/pressure`).
    pub psi: bool,
    /// Whether wait times of threads are available (`schedstat`).
    pub schedstat: bool,
    /// The reason why no fork events are available; `None` if they are.
    pub no_events: Option<String>,
    /// Whether type information for BPF programs is available (BTF).
    pub btf: bool,
    /// PUs that are excluded from load balancing by the boot parameter `isolcpus=`.
    pub isolated: CpuSet,
    /// PUs without the timer tick (`nohz_full=`).
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
    /// The name of the program.
    pub name: String,
    /// The process, if the program is a process.
    pub pid: Option<Pid>,
    /// The effect of the program, as part of a sentence.
    pub effect: &'static str,
    /// What the user can do.
    pub remedy: &'static str,
    /// Whether the program undoes changes of pjw; if false, the program may only interfere.
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
    /// The name of the batch system.
    pub name: String,
    /// How the batch system binds jobs to cores.
    pub binding: Binding,
    /// The consequence for pjw, one sentence.
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
