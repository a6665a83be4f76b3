//! The settings that decisions depend on. The daemon makes a [`Policy`] from its configuration; tests make
//! their own.

use core::time::Duration;

use crate::basics::{CpuSet, Pid, Uid, prelude::*};
use crate::terms::cpuset_group::{CpusetSupport, EnforcementMethod};
use crate::terms::job::JobSource;
use crate::terms::own_cgroups::OwnCgroupNames;

/// The mode of the daemon. The daemon either makes the changes of affinity masks and cpusets that it has
/// decided, or only shows these changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DaemonMode {
    /// The daemon decides which changes it would make, and shows them. It makes no change.
    Observe,
    /// The daemon decides which changes to make, and makes them.
    #[default]
    Enforce,
}

/// What pjw does with a request for which too few cores are free. pjw refuses the request, lets the request
/// wait, or gives the job cores that other jobs hold too.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ExhaustionPolicy {
    /// The request is refused.
    #[default]
    Refuse,
    /// The job gets cores that another job holds too. With the other two settings, pjw never chooses PUs of
    /// another job. With any setting, PUs that batch systems chose may overlap.
    Share,
    /// The request is accepted, and the job gets cores when enough cores are free.
    Wait,
}

/// What pjw does with hot threads if a job has more hot threads than PUs (logical CPUs). A thread is hot if it runs or
/// waits for a PU most of the time. pjw either pins each hot thread to one PU, or pins no hot thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OversubscriptionPolicy {
    /// Hot threads are pinned evenly: the numbers of hot threads on two PUs differ by at most one.
    Spread,
    /// Hot threads are not pinned; the kernel balances them.
    #[default]
    Float,
}

/// What pjw does with bindings. A binding is an affinity mask that a program set for one of its threads, inside the
/// cores of its job. pjw keeps all bindings (`Respect`), replaces only harmful bindings (`Repair`), or replaces all
/// bindings (`Override`). A binding is harmful if it makes hot threads share PUs (logical CPUs) while other PUs of the
/// job are idle. With each setting, pjw corrects an affinity mask that contains PUs outside the cores of the job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum BindingPolicy {
    /// pjw keeps every binding inside the cores of the job.
    Respect,
    /// pjw replaces a binding if it is harmful: hot threads share the PUs of the binding, while other PUs of the job
    /// are idle. pjw keeps all other bindings.
    #[default]
    Repair,
    /// pjw replaces every binding: pjw alone chooses the PUs of each thread.
    Override,
}

/// The settings of lending. A job of the class guaranteed (the owner) may leave some of its cores idle. pjw
/// lends idle cores to jobs of the class besteffort (the borrowers), and takes them back when the owner needs
/// them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LendingPolicy {
    /// Whether pjw lends the cores of owners. If false, jobs of the class besteffort run on free cores only.
    pub enabled: bool,
    /// The number of idle cores of each owner that pjw does not lend. Several threads of the owner can then
    /// start to run at the same time without waiting for a lent core.
    pub buffer_cores: u32,
    /// The time for which a core of an owner must be idle before pjw lends it.
    pub lend_after: Duration,
    /// The maximum number of cores of one owner that pjw lends at once. pjw lends further cores after the
    /// time `lend_after`.
    pub cores_at_once: u32,
    /// The time from the announcement to a borrower that it loses a core until pjw takes the core from it.
    pub revocation_grace: Duration,
    /// The treatment of a job of the class besteffort that can borrow no core.
    pub starved: StarvedPolicy,
    /// Whether a job of the class besteffort borrows cores even while it has no process. False in the daemon. True in a
    /// simulation of recorded demand, in which no process runs.
    pub lends_to_empty_jobs: bool,
}

impl Default for LendingPolicy {
    fn default() -> Self {
        Self {
            enabled: false,
            buffer_cores: 1,
            lend_after: Duration::from_secs(2),
            cores_at_once: 4,
            revocation_grace: Duration::ZERO,
            starved: StarvedPolicy::default(),
            lends_to_empty_jobs: false,
        }
    }
}

/// What pjw does with a starved job: a job of the class besteffort that can borrow no core at present. Such a job has
/// no cores of its own, no core is free, and no other job leaves a core idle. pjw either runs the job on the
/// housekeeping PUs (logical CPUs that are reserved for the system), or freezes the processes of the job. If the chosen
/// treatment is impossible, pjw uses the other one. If both are impossible, pjw does not restrict the job, and shows a
/// warning.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum StarvedPolicy {
    /// The job runs on the housekeeping PUs, at idle priority. If the machine has no housekeeping PUs, the
    /// job is frozen.
    #[default]
    Squeeze,
    /// The processes of the job are frozen. If the job can't be frozen, because it has no cpuset or the kernel can't
    /// freeze cgroups, the job runs on the housekeeping PUs.
    Freeze,
}

/// All settings on which decisions of pjw depend. The daemon makes a policy from its configuration file, its
/// options and the facts about the machine that it read at its start.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Policy {
    /// Whether pjw carries out its plans, or only makes and shows them.
    pub mode: DaemonMode,
    /// The housekeeping PUs, which are reserved for the system. No job gets them from pjw. They are computed
    /// from the config key `housekeeping` and the topology of the machine.
    pub housekeeping_cpus: CpuSet,
    /// Whether the SMT siblings of a core may belong to two jobs.
    pub share_smt: bool,
    /// The treatment of a request for which too few cores are free.
    pub exhaustion_policy: ExhaustionPolicy,
    /// Whether a process that belongs to no job joins the job of its user. The process joins only if its user
    /// has exactly one job.
    pub adopt_unassigned_processes: bool,
    /// The maximum number of cores that an unprivileged user may hold through `assign` and `run`, in all jobs
    /// together. For a job of the class besteffort, the number of cores that it may borrow counts.
    pub user_max_cores: u32,
    /// The config key `first_person_uid`: the lowest user id that belongs to a person. Lower user ids belong
    /// to root and to services. pjw never reports processes of users with lower ids as unassigned (belonging
    /// to no job).
    pub first_person_uid: u32,
    /// The sources (such as batch systems) whose jobs pjw detects on the machine.
    pub sources: BTreeSet<JobSource>,
    /// For each source of jobs (such as a batch system): the default number of cores for one job that does not
    /// say how many cores it needs. If a source has no entry, such a job gets no cores.
    pub source_cores: BTreeMap<JobSource, u32>,
    /// Whether pjw restricts jobs to their cores by cpusets or by affinity masks.
    pub enforcement: EnforcementMethod,
    /// Whether pjw keeps the affinity masks that programs request for their own threads.
    pub bindings: BindingPolicy,
    /// Whether pjw can create cpusets on this machine, and in which cgroup hierarchy.
    pub cpuset_support: CpusetSupport,
    /// The names of the cgroups that this daemon creates for jobs.
    pub own_cgroups: OwnCgroupNames,
    /// The batch systems whose job cpusets pjw may narrow: pjw may reduce the PUs of a cpuset that the batch
    /// system made for a job to the PUs that pjw granted to the job. Only batch systems that make a cgroup
    /// with a cpuset for each job are included. If such a batch system writes PUs to the cpuset of a job, it
    /// grants these PUs to the job. The grant by the batch system then replaces the grant by pjw.
    pub sources_with_narrowable_cpusets: BTreeSet<JobSource>,
    /// The pid of pjwd itself, which never belongs to a job. `None` if pjwd is not a process of the scanned
    /// machine, as in simulations.
    pub own_pid: Option<Pid>,
    /// The pid of the process that thaws the frozen jobs if pjwd is killed. It never belongs to a job. `None`
    /// while there is no such process.
    pub thaw_watcher_pid: Option<Pid>,
    /// The config key `interval`: the time between two scans of the processes of jobs.
    pub scan_interval: Duration,
    /// The only user whose processes pjw may change: the user of the daemon, if that is not root. `None` if
    /// the daemon runs as root, so that it may change the processes of all users.
    pub only_managed_user: Option<Uid>,
    /// The demand at or above which a thread becomes hot: pjw may then pin it to one PU. The
    /// unit is permille of one PU. The demand of a thread is the smoothed share of time in which the thread
    /// runs or waits for a PU.
    pub hot_threshold_permille: u32,
    /// The demand at or below which a hot thread (a thread that pjw may pin to one PU) is no
    /// longer hot, in permille of one PU. It is lower than `hot_threshold_permille`, so that a thread with a
    /// slightly varying demand does not alternate between hot and not hot.
    pub cold_threshold_permille: u32,
    /// The weight of the newest reading in the smoothed demand of a thread, in permille. The new demand is
    /// the weighted mean of the newest reading and the demand before this reading. With 1000, the demand is
    /// not smoothed. With a small value, the demand changes slowly.
    pub smoothing_weight_permille: u32,
    /// Whether pjw restricts each hot thread (a thread that runs or waits for a PU most of the time) to one
    /// PU.
    pub pin_hot_threads: bool,
    /// The treatment of hot threads (threads that run or wait for a PU most of the time) in a job that has
    /// more hot threads than PUs.
    pub oversubscription: OversubscriptionPolicy,
    /// The time for which a reservation (a job that was created before it had processes) keeps its cores
    /// without a process.
    pub reservation_timeout: Duration,
    /// The settings of lending: jobs of the class besteffort run on cores that other jobs leave idle.
    pub lending: LendingPolicy,
    /// Whether pjw may give cores to waiting jobs. This needs a record in the journal (the file from which a restarted
    /// daemon restores its state). So the value is false while pjwd can't write its journal. Cores are lent and taken
    /// back also then: borrowed cores stay with their holder. Not part of the configuration.
    pub may_grant: bool,
}

impl Policy {
    /// Whether the user id `user` belongs to a person, not to root or a service ([`Policy::first_person_uid`]).
    #[must_use]
    pub fn is_person(&self, user: Uid) -> bool {
        user.0 >= self.first_person_uid
    }

    /// Whether `pid` is a process of the daemon: pjwd itself, or the process that thaws the frozen jobs if pjwd is
    /// killed. Such a process never belongs to a job, and pjw never changes its affinity masks.
    #[must_use]
    pub fn is_daemon_process(&self, pid: Pid) -> bool {
        [self.own_pid, self.thaw_watcher_pid].contains(&Some(pid))
    }
}

impl Default for Policy {
    fn default() -> Self {
        Self {
            mode: DaemonMode::default(),
            housekeeping_cpus: CpuSet::new(),
            share_smt: false,
            exhaustion_policy: ExhaustionPolicy::default(),
            adopt_unassigned_processes: false,
            user_max_cores: 0,
            first_person_uid: 1000,
            sources: JobSource::ALL.iter().copied().collect(),
            source_cores: BTreeMap::new(),
            enforcement: EnforcementMethod::default(),
            bindings: BindingPolicy::default(),
            cpuset_support: CpusetSupport::default(),
            own_cgroups: OwnCgroupNames::default(),
            sources_with_narrowable_cpusets: BTreeSet::from([JobSource::Slurm]),
            own_pid: None,
            thaw_watcher_pid: None,
            scan_interval: Duration::from_secs(1),
            only_managed_user: None,
            hot_threshold_permille: 600,
            cold_threshold_permille: 300,
            smoothing_weight_permille: 500,
            pin_hot_threads: true,
            oversubscription: OversubscriptionPolicy::default(),
            reservation_timeout: Duration::from_secs(24 * 60 * 60),
            lending: LendingPolicy::default(),
            may_grant: true,
        }
    }
}
