//! The settings that decisions depend on. The daemon makes a [`Policy`] from its configuration; tests make
//! their own.

use core::time::Duration;

use crate::basics::{CpuSet, Pid, Uid, prelude::*};
use crate::terms::cpuset_group::{CpusetSupport, Enforcement};
use crate::terms::job::Source;
use crate::terms::own_cgroups::OwnCgroups;

/// The mode of the daemon: it carries out its plans (`enforce`), or only makes and shows them (`observe`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Mode {
    /// Plans are made and not carried out.
    Observe,
    /// Plans are made and carried out.
    #[default]
    Enforce,
}

/// What happens to a request when too few cores are free for it: the request is refused, it waits, or the job shares
/// cores with other jobs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OnExhausted {
    /// The request is refused.
    #[default]
    Refuse,
    /// The job gets cores that another job holds too. Only in this case do two grants overlap.
    Share,
    /// The request is accepted, and served when enough cores are free.
    Wait,
}

/// What is done with hot threads (threads that want a PU most of the time) in a job that has more of them than PUs: they
/// are pinned evenly, or not pinned.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OversubscriptionPolicy {
    /// Hot threads are pinned evenly: the numbers of threads on two PUs differ by at most one.
    Spread,
    /// Hot threads are not pinned; the kernel balances them.
    #[default]
    Float,
}

/// All settings on which the decisions of pjw depend, made from the configuration file and the options of the daemon.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Policy {
    /// Whether pjw carries out its plans, or only makes and shows them.
    pub mode: Mode,
    /// The PUs that no job gets. Already resolved against the topology.
    pub housekeeping: CpuSet,
    /// Whether SMT siblings of a core may serve two jobs.
    pub share_smt: bool,
    /// What happens to a request for which too few cores are free.
    pub on_exhausted: OnExhausted,
    /// Whether a user's processes that belong to no job join the user's job. They do only if the user has exactly
    /// one job.
    pub adopt_strays: bool,
    /// The maximum number of cores that an unprivileged user may hold through `assign` and `run`, over all
    /// jobs.
    pub user_max_cores: u32,
    /// The lowest user id of a person. Processes of users with lower ids are never reported as unassigned.
    pub first_person_uid: u32,
    /// The sources (such as batch systems) whose jobs pjw discovers on the node.
    pub sources: BTreeSet<Source>,
    /// For each source, the number of cores for its jobs that do not say how many cores they need. Such a job of a
    /// source without an entry gets none.
    pub source_cores: BTreeMap<Source, u32>,
    /// Whether jobs are kept on their cores by cpusets or by affinity masks.
    pub enforcement: Enforcement,
    /// Whether and how pjw can make cpusets on this node.
    pub cpuset_support: CpusetSupport,
    /// The names of the cgroups that this warden creates for jobs.
    pub own_cgroups: OwnCgroups,
    /// The sources whose schedulers make a cgroup for each job that pjw may limit by a cpuset. Left out are
    /// schedulers that write the cpuset of a job themselves, unless they grant cores by it.
    pub narrowable_sources: BTreeSet<Source>,
    /// The pid of pjw itself, which never becomes a member of a job. `None` if pjw is no process of the node, as in
    /// simulations.
    pub own_pid: Option<Pid>,
    /// The only user whose processes pjw may change: the user of the daemon, if that is not root. `None` if pjw may
    /// change the processes of all users.
    pub only_user: Option<Uid>,
    /// The demand for CPU time at which a thread becomes hot, in permille of one PU.
    pub hot_permille: u32,
    /// The demand for CPU time at which a hot thread becomes cold again, in permille of one PU. Lower than
    /// `hot_permille`.
    pub cold_permille: u32,
    /// The weight of the newest reading in the smoothed demand of a thread, in permille.
    pub smoothing_permille: u32,
    /// Whether hot threads (threads that run most of the time) are each pinned to one PU.
    pub pin: bool,
    /// What is done with the hot threads of a job that has more of them than PUs.
    pub oversubscribed: OversubscriptionPolicy,
    /// How long a job that was created as a reservation keeps its cores while it has no process.
    pub reservation_timeout: Duration,
}

impl Default for Policy {
    fn default() -> Self {
        Self {
            mode: Mode::default(),
            housekeeping: CpuSet::new(),
            share_smt: false,
            on_exhausted: OnExhausted::default(),
            adopt_strays: false,
            user_max_cores: 0,
            first_person_uid: 1000,
            sources: Source::ALL.iter().copied().collect(),
            source_cores: BTreeMap::new(),
            enforcement: Enforcement::default(),
            cpuset_support: CpusetSupport::default(),
            own_cgroups: OwnCgroups::default(),
            narrowable_sources: BTreeSet::from([Source::Slurm]),
            own_pid: None,
            only_user: None,
            hot_permille: 600,
            cold_permille: 300,
            smoothing_permille: 500,
            pin: true,
            oversubscribed: OversubscriptionPolicy::default(),
            reservation_timeout: Duration::from_secs(24 * 60 * 60),
        }
    }
}
