//! The input of the diagnosis, [`DiagnosisInput`], and its output, [`Finding`].

use crate::basics::{Comm, CpuSet, Pid, ProcessId, Pu, Uid, prelude::*};
use crate::machine::Topology;
use crate::terms::own_cgroups::OwnCgroupNames;
use crate::terms::{CpuRequest, CpusetSupport, GrantedBy, JobId};

/// The minimum demand of a hot thread for CPU time: 500 permille of the time between two scans of the machine. The
/// demand is the time in which the thread ran or waited for a PU (logical CPU).
pub const MIN_HOT_PERMILLE: u32 = 500;

/// The maximum number of pids that a finding of the diagnosis lists: 20. The text of the finding gives the number of
/// all processes that the finding is about.
pub(crate) const MAX_FINDING_PIDS: usize = 20;

/// The maximum number of findings of the same kind (with the same [`Finding::code`]) in one diagnosis: 8. An additional
/// finding gives the number of the findings that were left out.
pub(crate) const MAX_FINDINGS_PER_CODE: usize = 8;

/// The severity of a finding of the diagnosis (`pjwctl doctor`), most severe first: problem, advice or note.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, strum::IntoStaticStr)]
#[strum(serialize_all = "kebab-case")]
pub enum Severity {
    /// Jobs run slower than they could, jobs do not run on their own cores only, or `pjwd` does not work.
    Problem,
    /// Something can be improved.
    Advice,
    /// Information. The user need not do anything.
    Note,
}

impl Severity {
    /// Returns the name of the severity, as in text and JSON output: `problem`, `advice` or `note`.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.into()
    }
}

/// One result of the diagnosis (`pjwctl doctor`): an observation about the machine, with a remedy. The
/// severity of the result is problem, advice or note.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// The stable short name of this kind of finding, for scripts, such as `no-warden`.
    pub code: String,
    /// The severity of the finding: problem, advice or note.
    pub severity: Severity,
    /// The observation, in one sentence for the user.
    pub text: String,
    /// The remedy that is proposed to the user, as text.
    pub remedy: String,
    /// The jobs that the finding is about. Empty if the finding is about no job.
    pub jobs: BTreeSet<JobId>,
    /// The pids of the processes that the finding is about: at most 20, the lowest pids. Empty if the
    /// finding is about no process.
    pub pids: BTreeSet<Pid>,
    /// The PUs (logical CPUs) that the finding is about. Empty if the finding is about no PU.
    pub cpus: CpuSet,
}

impl Finding {
    /// Makes a finding that names no jobs, processes or PUs (logical CPUs). To add these, call `with_jobs`, `with_pids`
    /// and `with_cpus`. `code` is the short name of the kind of finding, `text` is the observation, and `remedy` says
    /// what the user can do.
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

    /// Sets the jobs that the finding is about, and returns the finding.
    #[must_use]
    pub fn with_jobs<'a>(mut self, jobs: impl IntoIterator<Item = &'a JobId>) -> Self {
        self.jobs = jobs.into_iter().cloned().collect();
        self
    }

    /// Sets the PUs (logical CPUs) that the finding is about, and returns the finding.
    #[must_use]
    pub fn with_cpus(mut self, cpus: &CpuSet) -> Self {
        self.cpus = cpus.clone();
        self
    }

    /// Sets the pids of the processes that the finding is about, and returns the finding. Stores at most 20
    /// pids, the lowest of `pids`.
    #[must_use]
    pub fn with_pids(mut self, pids: impl IntoIterator<Item = Pid>) -> Self {
        let pids: BTreeSet<Pid> = pids.into_iter().collect();
        self.pids = pids.into_iter().take(MAX_FINDING_PIDS).collect();
        self
    }
}

/// The input of the diagnosis (`pjwctl doctor`): all facts that were observed on the machine.
#[derive(Debug, Clone)]
pub struct DiagnosisInput {
    /// The cores, caches, NUMA nodes and packages of the machine.
    pub topology: Topology,
    /// The PUs (logical CPUs) of `topology` that were online during the observation.
    pub online: CpuSet,
    /// The PUs that a running `pjwd` keeps for the system (the config key `housekeeping`). Empty if there are none, or
    /// if `pjwd` does not answer.
    pub housekeeping_cpus: CpuSet,
    /// The time between the two scans of the machine, in ms. The CPU use of a thread is the difference
    /// between its CPU times at these two scans.
    pub scan_interval_ms: u64,
    /// The jobs on the machine. Either the diagnosis recognised the jobs itself, or a running `pjwd`
    /// reported them.
    pub jobs: Vec<ObservedJob>,
    /// The jobs that a `pjwd` left in its cpusets when it ended. Each is also in `jobs`, unless the diagnosis can't
    /// recognise it. A job with the id of a job of the `pjwd` that answers is not included. Empty if it is unknown
    /// which `pjwd` run, for example because processes are hidden.
    pub orphaned_jobs: Vec<OrphanedJob>,
    /// The processes that belong to no job, except kernel threads and the process that makes the diagnosis.
    pub unassigned_processes: Vec<UnassignedProcess>,
    /// The interrupts of devices, each with the number of times that it occurred between the two scans. The
    /// kernel's own interrupts, such as timers, are not included.
    pub interrupts: Vec<Interrupt>,
    /// The settings and boot parameters of the kernel, and the reasons why the diagnosis may not have seen
    /// all processes.
    pub host: HostFacts,
    /// Other programs on the machine that may work against pjw, because they move threads, move interrupts
    /// or change cpusets.
    pub conflicting_programs: Vec<ConflictingProgram>,
    /// The batch systems (such as Slurm) that run a daemon on the machine.
    pub schedulers: Vec<DetectedBatchSystem>,
    /// Whether `pjwd` could create cpusets on the machine, and in which cgroup hierarchy. The diagnosis
    /// determines this only by reading files.
    pub cpuset_support: CpusetSupport,
    /// Whether the daemon `pjwd` runs on the machine, and its reply to the diagnosis.
    pub daemon: DaemonStatus,
    /// The configuration files with which `pjwd` can't start, or which can't be checked. Empty if `pjwd` runs, because
    /// the files are not checked then.
    pub configuration_problems: Vec<ConfigurationProblem>,
    /// The user id of the user that runs the diagnosis. A user other than root can't read all facts.
    pub caller_uid: Uid,
    /// The lowest user id that belongs to a person (the config key `first_person_uid`). Lower user ids belong
    /// to root and to services.
    pub first_person_uid: u32,
}

/// A job, as `pjwctl doctor` observed it: its PUs (logical CPUs), its processes, and the CPU use of its threads between
/// two scans of the machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObservedJob {
    /// The id of the job.
    pub id: JobId,
    /// The user that owns the job.
    pub owner: Uid,
    /// The number of cores or PUs, or the list of PUs, that the job requested. `None` if the request is
    /// unknown.
    pub requested: Option<CpuRequest>,
    /// The PUs that the job holds, and who granted the PUs: the job's batch scheduler or a running `pjwd`.
    /// `None` if the job holds no PUs. The set is empty if `pjwd` has frozen the job until a core is free.
    pub grant: Option<(CpuSet, GrantedBy)>,
    /// The PUs that `pjwd` would grant to the job if `pjwd` ran. `None` if the job already holds PUs, if
    /// its request is unknown, or if its request can't be served.
    pub expected_cpus: Option<CpuSet>,
    /// The number of processes that belong to the job.
    pub process_count: usize,
    /// The threads of all processes of the job at the time of the second scan.
    pub threads: Vec<ObservedThread>,
    /// The pids of the job's processes outside the cgroup that the batch scheduler made for the job. Empty
    /// if the batch scheduler made no cgroup for the job.
    pub pids_outside_cgroup: Vec<Pid>,
    /// The path of the cgroup that the batch scheduler made for the job, as in `/proc/PID/cgroup`. `None`
    /// if no process of the job was found in such a cgroup.
    pub cgroup: Option<String>,
    /// Whether the cpuset controller is enabled in the cgroup that the batch scheduler made for the job.
    /// `None` if unknown, or if the batch scheduler made no cgroup.
    pub has_cpuset_controller: Option<bool>,
    /// The mechanism by which `pjwd` restricts the processes of the job to the cores of the job: `cpuset`,
    /// `affinity` (affinity masks), or `none` (no mechanism). Empty if `pjwd` does not run.
    pub enforcement: String,
}

/// A job that was left by a daemon `pjwd`, because this daemon has ended, for example by a signal. The processes of the
/// job still run in the cpuset that this daemon made or changed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OrphanedJob {
    /// The id of the job.
    pub id: JobId,
    /// The user that owns the job.
    pub owner: Uid,
    /// The names of the cgroups of the `pjwd` that has ended. By these, several `pjwd` are distinguished.
    pub daemon: OwnCgroupNames,
    /// The path of the cgroup with the cpuset, as in `/proc/PID/cgroup`.
    pub cgroup: String,
    /// The PUs on which the cpuset allows the processes to run. Empty if they can't be read.
    pub cpus: CpuSet,
    /// The processes in the cgroup.
    pub processes: Vec<ProcessId>,
}

/// A thread, as `pjwctl doctor` observed it: its CPU use between two scans of the machine, and its affinity
/// mask at the time of the second scan.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObservedThread {
    /// The pid of the process to which the thread belongs.
    pub pid: Pid,
    /// The effective affinity mask of the thread (sched_getaffinity(2)) at the time of the second scan.
    pub effective_mask: CpuSet,
    /// The PU on which the thread last ran before the second scan.
    pub last_cpu: Pu,
    /// The demand of the thread for CPU time: the time between the two scans in which the thread ran or
    /// waited for a PU, in permille of the time between the scans.
    pub demand_permille: u32,
    /// The time between the two scans in which the thread ran, in permille of the time between the scans.
    pub run_permille: u32,
}

impl ObservedThread {
    /// Whether the thread ran or waited for a PU (logical CPU) during at least half of the time between the two scans
    /// ([`MIN_HOT_PERMILLE`]).
    #[must_use]
    pub fn is_hot(&self) -> bool {
        self.demand_permille >= MIN_HOT_PERMILLE
    }
}

/// A process that belongs to no job, as `pjwctl doctor` observed it, with the CPU use of its threads
/// between two scans of the machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnassignedProcess {
    /// The process id (pid).
    pub pid: Pid,
    /// The real user id of the process.
    pub uid: Uid,
    /// The command name (comm) of the process, at most 15 bytes.
    pub comm: Comm,
    /// Whether the process is a daemon or a helper of a batch system, such as `slurmstepd`. Always false
    /// if the user id is [`DiagnosisInput::first_person_uid`] or higher: such a user is a person, and a person
    /// can choose any process name.
    pub belongs_to_scheduler: bool,
    /// Whether it is normal that the process belongs to no job: it is a part of a login, such as sshd or a login shell,
    /// or it executes a program of pjw. The diagnosis does not report such a process as one that belongs to no job.
    pub is_expected_outside_jobs: bool,
    /// The threads of the process. The diagnosis reads all threads of a process that belongs to no job only
    /// if its pid is among the 4,096 lowest pids of such processes. For a process with a higher pid, the list
    /// has one entry: the first thread, with its affinity mask and a CPU use of 0.
    pub threads: Vec<ObservedThread>,
}

/// An interrupt of a device, with the PUs (logical CPUs) that handle it. An interrupt on a PU of a job slows down the
/// job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Interrupt {
    /// The interrupt number (IRQ), as in `/proc/interrupts`.
    pub number: u32,
    /// The name of the device or of the interrupt handler, as in `/proc/interrupts`.
    pub name: String,
    /// The PUs to which the kernel sends the interrupt, from the file `effective_affinity_list` in
    /// `/proc/irq/NUMBER`. If the kernel does not provide this file, from the file `smp_affinity_list`.
    pub target_cpus: CpuSet,
    /// For each PU, the number of times that the interrupt occurred on it between the two scans of the
    /// diagnosis. A PU with the count 0 has no entry.
    pub counts: BTreeMap<Pu, u64>,
}

/// Facts about the host for the diagnosis: the settings and boot parameters of its kernel, and what the
/// diagnosis could not observe, such as the processes of other users.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostFacts {
    /// The kernel release, as `uname -r` prints it.
    pub kernel_release: String,
    /// The cgroup layout of the host, as text for users: v1, v2, hybrid or none.
    pub cgroup_layout: String,
    /// A description of the cgroup hierarchy that has the cpuset controller, as text for users, such as
    /// `cpusets in v2 at /sys/fs/cgroup, enabled below /`. Never empty: if no hierarchy has the controller,
    /// the text says so.
    pub cpuset_hierarchy: String,
    /// Whether the kernel provides pressure stall information (`/proc/pressure`).
    pub has_psi: bool,
    /// Whether the kernel provides the wait times of threads (`/proc/PID/schedstat`).
    pub has_schedstat: bool,
    /// The reason why the kernel does not report fork events to the user that runs the diagnosis. `None` if
    /// the kernel reports fork events.
    pub no_fork_events_reason: Option<String>,
    /// Whether the kernel provides type information (BTF), which the BPF programs of pjwd need.
    pub has_btf: bool,
    /// The PUs that the boot parameter `isolcpus=` excludes from the kernel's load balancing.
    pub isolated_cpus: CpuSet,
    /// The PUs without a periodic timer tick, by the boot parameter `nohz_full=`.
    pub nohz_full_cpus: CpuSet,
    /// Whether automatic NUMA balancing of the kernel is on. `None` if the kernel does not support it.
    pub numa_balancing_enabled: Option<bool>,
    /// Whether the kernel schedules the threads of each session as a group (autogroup, sched(7)). `None` if
    /// the kernel does not support this.
    pub autogroup_enabled: Option<bool>,
    /// The kernel's preemption model, such as `full` or `lazy`. `None` if unknown: the kernel reports it only to root,
    /// where debugfs is mounted.
    pub preemption_model: Option<String>,
    /// The state of SMT, as the kernel names it: `on`, `off`, `forceoff`, `notsupported` and so on. Empty if
    /// unknown.
    pub smt_state: String,
    /// The names of the CPU frequency governors in use, each with its PUs. Empty if the machine has no
    /// frequency governors.
    pub cpufreq_governors: BTreeMap<String, CpuSet>,
    /// Whether systemd is the service manager of the host: sd_booted(3). Remedies name its commands only then.
    pub has_systemd: bool,
    /// Whether the diagnosis runs in a pid namespace of its own, as in a container. The diagnosis then
    /// can't see kernel threads and processes outside this namespace.
    pub in_container: bool,
    /// Whether `/proc` hides the processes of other users (mount option `hidepid=`).
    pub hides_processes: bool,
    /// The reason why some processes could not be read. `None` if all processes were read.
    pub incomplete_scan_reason: Option<String>,
}

/// A program that may undo changes of pjw or disturb jobs: it moves threads or interrupts, or changes cpusets.
/// Several daemons `pjwd` of one user also conflict with each other, and are then one value of this type.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConflictingProgram {
    /// The command name of the program, such as `irqbalance`. `pjwd` if one user runs several daemons.
    pub name: String,
    /// The pid of one process of the program, or the pids of all daemons `pjwd` of one user.
    pub pids: BTreeSet<Pid>,
    /// How the program may work against pjw, in one sentence for users, such as `cgrulesengd is here too: it moves
    /// processes between cgroups by its rules`.
    pub text: String,
    /// What the user can do to end the conflict, as text.
    pub remedy: &'static str,
    /// Whether the program undoes changes that pjw makes. If false, the program may disturb jobs, but does
    /// not undo changes of pjw.
    pub undoes_pjw_changes: bool,
}

/// The way in which a batch system binds its jobs to cores: by cpusets, by affinity masks, not at all, or unknown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum JobBinding {
    /// By cpusets that the batch system makes. pjw may reduce the PUs of such a cpuset, but never adds PUs.
    Cpusets,
    /// By affinity masks that the batch system sets at the start of each job.
    Masks,
    /// Not at all: the batch system does not bind its jobs to cores.
    Unbound,
    /// Unknown, because the configuration of the batch system could not be read.
    Unknown,
}

/// A batch system, such as Slurm, with a daemon that runs on the machine. Also says how the batch system binds its jobs
/// to cores.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DetectedBatchSystem {
    /// The name of the batch system, for display to users.
    pub name: String,
    /// The way in which the batch system binds its jobs to cores.
    pub binding: JobBinding,
    /// The effect of `binding` on pjw, in one sentence for users.
    pub effect_on_pjw: String,
}

/// Whether the daemon `pjwd` runs on the machine and answers the requests of `pjwctl doctor`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DaemonStatus {
    /// `pjwd` does not run. The text says where the diagnosis expected the socket of `pjwd`, and how to start
    /// `pjwd`.
    Absent(String),
    /// `pjwd` runs, but does not reply. The text gives the reason and the remedy.
    Unresponsive(String),
    /// `pjwd` runs and replies.
    Responsive {
        /// The pid of `pjwd`.
        pid: Pid,
        /// The version of `pjwd`.
        version: String,
        /// The version of the program that makes the diagnosis (`pjwctl`).
        own_version: String,
        /// Whether `pjwd` runs in the mode `observe`, in which it changes no affinity masks and no cpusets.
        observes: bool,
        /// The warnings that `pjwd` reports.
        warnings: Vec<Finding>,
        /// Whether `pjwd` lends the idle cores of jobs to other jobs.
        lending: LendingStatus,
    },
}

/// The reason why a check of the configuration file of `pjwd` failed: mistakes, an unreadable file, or a timeout.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ConfigurationProblem {
    /// The file has mistakes or can't be read.
    Wrong {
        /// The text of the first mistake: the path of the file, the line and the column if they are known, the reason.
        first_mistake: String,
        /// Whether the file has further mistakes.
        has_further_mistakes: bool,
        /// The command that shows the user the mistakes of the file.
        check_command: String,
    },
    /// The check of the file did not end in time.
    CheckTimedOut {
        /// The time limit of the check, in seconds.
        time_limit_s: u64,
        /// The command that checks the file.
        check_command: String,
    },
}

/// Whether a running `pjwd` lends the idle cores of some jobs (the owners) to other jobs, if known. The owners are the
/// jobs of the priority class `guaranteed`. If `pjwd` lends cores, the value also says how `pjwd` notices that an owner
/// needs its cores again.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum LendingStatus {
    /// Unknown: `pjwd` has an older version that does not report this, or has not yet tried to load the BPF program
    /// that reports the wake-ups of owners.
    #[default]
    Unknown,
    /// `pjwd` does not lend such cores. The text is the reason.
    Off(String),
    /// `pjwd` lends such cores. A BPF program reports to `pjwd` when a thread of an owner wakes up.
    WithWakeupReports,
    /// `pjwd` lends such cores. It samples the CPU time of the owners, because it can't use the BPF program. The text
    /// is the reason.
    WithCpuTimeSamples(String),
}

impl HostFacts {
    /// Returns how a user starts pjwd on this host, as a text for the end of a sentence, such as `systemctl start
    /// pjwd`.
    pub(crate) fn pjwd_start_command(&self) -> &'static str {
        if self.has_systemd { "systemctl start pjwd" } else { "pjwd, as root or as yourself" }
    }

    /// Returns how a user restarts pjwd on this host, as a text for the end of a sentence, such as `systemctl restart
    /// pjwd`.
    pub(crate) fn restart_command(&self) -> &'static str {
        if self.has_systemd { "systemctl restart pjwd" } else { "end its process, and start pjwd again" }
    }
}

impl DiagnosisInput {
    /// Returns the ids of the jobs for which `is_concerned` is true.
    pub(crate) fn job_ids(&self, is_concerned: impl Fn(&ObservedJob) -> bool) -> BTreeSet<&JobId> {
        self.jobs.iter().filter(|job| is_concerned(job)).map(|job| &job.id).collect()
    }
}

impl ObservedJob {
    /// Returns the online PUs (logical CPUs) on which the threads of the job may run: each PU that the affinity mask of
    /// at least one thread contains. `online` is the set of online PUs of the machine.
    ///
    /// If the job holds PUs, the function ignores each mask with a PU that the job does not hold. The diagnosis
    /// reports the threads with these masks separately.
    #[must_use]
    pub fn allowed_cpus(&self, online: &CpuSet) -> CpuSet {
        let is_inside = |mask: &&CpuSet| self.grant.as_ref().is_none_or(|(cpus, _)| mask.is_subset(cpus));
        let masks = self.threads.iter().map(|thread| &thread.effective_mask).filter(is_inside);
        masks.fold(CpuSet::new(), |allowed, mask| allowed.union(mask)).intersection(online)
    }

    /// Returns the online PUs (logical CPUs) that the job holds. `None` if the job holds no PUs. `online` is the set of
    /// online PUs of the machine.
    pub(crate) fn held_cpus(&self, online: &CpuSet) -> Option<CpuSet> {
        self.grant.as_ref().map(|(cpus, _)| cpus.intersection(online))
    }

    /// Returns the number of hot threads of the job. A thread is hot if it ran or waited for a PU (logical CPU) during
    /// at least half of the time between the two scans of the machine.
    #[must_use]
    pub fn hot_thread_count(&self) -> usize {
        self.threads.iter().filter(|thread| thread.is_hot()).count()
    }
}

/// Adds `found` (findings of the same kind) to `findings`: at most eight, the most severe first. If there are more,
/// also adds a finding that gives the number of the findings that were left out.
pub(crate) fn push_limited(mut found: Vec<Finding>, findings: &mut Vec<Finding>) {
    found.sort_by_key(|finding| finding.severity);
    let left_out = found.len().saturating_sub(MAX_FINDINGS_PER_CODE);
    let more = found.get(MAX_FINDINGS_PER_CODE).map(|next| {
        let text = format!("{left_out} more of this kind ({})", next.code);
        Finding::new(next.severity, &next.code, text, "deal with those above first, then look again")
    });
    findings.extend(found.into_iter().take(MAX_FINDINGS_PER_CODE));
    findings.extend(more);
}
