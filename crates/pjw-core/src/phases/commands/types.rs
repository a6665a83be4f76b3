//! The commands of users and administrators, and the replies.

use crate::allocate::defrag::DefragPlan;
use crate::basics::{Pid, Uid, prelude::*};
use crate::machine::NumaNodeRule;
use crate::terms::{CpuRequest, CpuUnit, Job, JobId, Placement, PriorityClass, Provision};

/// The user that sent a command to pjwd. Also says whether this user may change the jobs of other users.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Caller {
    /// The user id of the caller, as verified by the kernel (`SO_PEERCRED`).
    pub uid: Uid,
    /// Whether the user may change jobs of other users. True for root, the user of the daemon, and members of
    /// `admin_groups`.
    pub is_admin: bool,
}

/// A command of a user or an administrator that changes jobs. Most commands are sent by `pjwctl`: for
/// example, `pjwctl release` sends [`Command::Release`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Command {
    /// Grants cores to a job, and adds processes to the job.
    Assign(AssignCommand),
    /// Takes the cores back from a job, and restores the affinity masks that the threads of the job had
    /// before pjw changed them.
    Release {
        /// The job that loses its cores.
        job: JobId,
        /// The user that sent the command.
        caller: Caller,
    },
    /// Does the same as [`Command::Release`] for a new job on whose cores the kernel refused to keep the processes.
    /// Sent by the daemon itself, right after it has tried to restrict the processes to these cores.
    Undo {
        /// The job that loses its cores.
        job: JobId,
        /// The user whose command made the job.
        caller: Caller,
        /// The error of the kernel, in one sentence for users.
        why: String,
    },
    /// Does the same as [`Command::Release`] for all jobs that the caller may release.
    ReleaseAll {
        /// The user that sent the command.
        caller: Caller,
    },
    /// Records how many cores a job can use at present. Does not change the request of the job.
    Want {
        /// The job that can use the cores.
        job: JobId,
        /// The number of cores. `None` deletes the number of an earlier command. The job then wants all cores that it
        /// holds. A job of the class besteffort (which borrows cores) then wants as many cores as it requested.
        cores: Option<u32>,
        /// The user that sent the command.
        caller: Caller,
    },
    /// Makes a provision: a job whose cores are promised to a service. The job keeps its cores even while no
    /// process of the service runs. Only administrators may do this.
    Provision(ProvisionCommand),
    /// Moves jobs to other cores, so that the jobs use fewer packages, NUMA nodes and L3s, or larger
    /// requests fit into one package, NUMA node or L3.
    Defrag {
        /// The user that sent the command.
        caller: Caller,
    },
}

/// The assign command (`pjwctl assign` and `pjwctl run`): a job, the cores that are requested for the job,
/// and the processes that are to join the job. If the job exists, a setting that is `None` does not change.
/// If the job is new, the description of each field says what `None` means.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AssignCommand {
    /// The job that is to get the cores. It is created if it does not exist.
    pub job: JobId,
    /// The number of cores or PUs, or the list of PUs, that is requested for the job. `None` leaves the
    /// earlier request of the job unchanged. If the job has no earlier request, a command with `None` is
    /// refused.
    pub cpu_request: Option<CpuRequest>,
    /// Whether the job requests everything that it can have when the command is carried out: what is free, and what the
    /// job holds already. The value says whether whole cores or PUs (logical CPUs) are counted. If it is not `None`,
    /// `cpu_request` is ignored. The number that was found is recorded as the request of the job. So the request does
    /// not grow when more cores become free.
    pub everything: Option<CpuUnit>,
    /// The rule by which the cores are chosen, such as close together. `None` leaves the rule of the job
    /// unchanged; for a new job it means [`Placement::Pack`].
    pub placement: Option<Placement>,
    /// The priority class of the job. `None` leaves the class of the job unchanged; for a new job it means
    /// [`PriorityClass::Normal`].
    pub class: Option<PriorityClass>,
    /// The name or the PCI address of the device near which the cores should be. `None` leaves the device of
    /// the job unchanged; for a new job it means no device. An empty name removes the device from the
    /// request.
    pub near_device: Option<String>,
    /// Whether the memory of the job is allocated only from the NUMA nodes of its cores. `None` leaves the
    /// setting of the job unchanged; for a new job it means false.
    pub bind_memory: Option<bool>,
    /// Whether the job's cpuset becomes an isolated partition of the kernel (`cpuset.cpus.partition`).
    /// `None` leaves the setting of the job unchanged; for a new job it means false.
    pub isolated: Option<bool>,
    /// Where new processes go if the cores are in several NUMA nodes. `None` leaves the rule of the job unchanged;
    /// for a new job it means [`NumaNodeRule::Default`].
    pub within_job: Option<NumaNodeRule>,
    /// The pids of the processes that are to join the job. The descendants of these processes join the job
    /// too.
    pub pids: Vec<Pid>,
    /// The id of a session (setsid(2)). All processes of the session and their descendants are to join the
    /// job. `None` if the command names no session.
    pub session: Option<Pid>,
    /// Whether the command is refused if the job exists already. True for `pjwctl run` and `pjwctl spawn`: these
    /// commands add only the process of `pjwctl` itself to the job.
    pub must_be_new: bool,
    /// Whether the command is refused if one of the processes already belongs to another job. This does not apply to an
    /// adopted process ([`MembershipEvidence::Adopted`](crate::terms::MembershipEvidence::Adopted)): it belongs to the
    /// other job only because its user has no other job, and can join this job in any case.
    ///
    /// If false, a process with weak evidence, such as a child of a process of the other job, leaves the other job and
    /// joins this job. The command is still refused if the evidence of a process is strong, such as the cgroup of a
    /// batch system. True for `pjwctl spawn`.
    pub keeps_members: bool,
    /// Whether the command is refused with [`Refusal::WouldFreeze`](crate::terms::Refusal) if the processes of a new
    /// job would be frozen at once. Only a borrower (a job of the class besteffort) is frozen, while it can borrow no
    /// core.
    ///
    /// A client that is one of these processes can print nothing while it is frozen. After the refusal, it prints why
    /// it has to wait. It then sends the command once more without this setting.
    pub refuses_frozen: bool,
    /// The user that is to own the job. Only an administrator may name another user. If `None`, an existing
    /// job keeps its owner. A new job is then owned by the user of the first named process, or by the
    /// caller if no process is named.
    pub owner: Option<Uid>,
    /// The user that sent the command.
    pub caller: Caller,
}

impl AssignCommand {
    /// Makes an assign command that names no process and changes no setting of an existing job. Set the
    /// other fields of the result to request cores, to add processes or to change settings.
    #[must_use]
    pub fn new(job: JobId, caller: Caller) -> Self {
        Self {
            job,
            cpu_request: None,
            everything: None,
            placement: None,
            class: None,
            near_device: None,
            bind_memory: None,
            isolated: None,
            within_job: None,
            pids: Vec::new(),
            session: None,
            must_be_new: false,
            keeps_members: false,
            refuses_frozen: false,
            owner: None,
            caller,
        }
    }
}

/// The command that promises cores to a service, or changes such a promise. The promise is a job (a provision), which
/// keeps its cores even while no process of the service runs. The command comes from `pjwctl provision`, or from an
/// entry in the configuration file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProvisionCommand {
    /// The job that is to keep the cores. If it does not exist, it is created. If it exists and is no
    /// provision, the command is refused.
    pub job: JobId,
    /// The number of cores that are promised to the service.
    pub cores: u32,
    /// The rule by which the processes of the service are recognised, and whether the provision comes from the
    /// configuration file. A command from `pjwctl` without a rule keeps the rule that the provision has. A command from
    /// the configuration file always replaces the rule. If the rule changes, the processes that only the former rule
    /// recognised leave the job.
    pub provision: Provision,
    /// The user that sent the command.
    pub caller: Caller,
}

/// The reply to a command that was carried out. A command that was refused has a
/// [`Refusal`](crate::terms::Refusal) as its reply.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reply {
    /// The job after [`Command::Assign`] or [`Command::Provision`] was carried out.
    Assigned(Box<Job>),
    /// The job after [`Command::Want`] was carried out.
    Wanted(Box<Job>),
    /// The ids of the jobs that [`Command::Release`], [`Command::Undo`] or [`Command::ReleaseAll`] released.
    Released(Vec<JobId>),
    /// The moves of jobs that [`Command::Defrag`] made, and the sizes of the largest requests for cores that
    /// the machine can serve before and after the moves.
    Moved(Box<DefragPlan>),
}
