//! The commands of users and administrators, and the replies.

use crate::allocate::defrag::DefragPlan;
use crate::basics::{Pid, Uid, prelude::*};
use crate::terms::{Amount, Job, JobId, Placement, PriorityClass};

/// The user that sent a command, and whether the user may change jobs of other users.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Caller {
    /// The user id, as verified by the kernel (`SO_PEERCRED`).
    pub uid: Uid,
    /// Whether the user may change jobs of other users: root, the daemon's own user, or a member of an
    /// administrators' group.
    pub admin: bool,
}

/// A command of a user or administrator that changes jobs: assign, release, release all, or defragment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Command {
    /// Gives cores and processes to a job.
    Assign(Assign),
    /// Takes the cores back from a job and restores the masks of its threads.
    Release {
        /// The job.
        job: JobId,
        /// The user that sent the command.
        caller: Caller,
    },
    /// Releases all jobs that the caller may release.
    ReleaseAll {
        /// The user that sent the command.
        caller: Caller,
    },
    /// Moves jobs so that they use fewer domains of the machine and larger requests fit into one domain.
    Defrag {
        /// The user that sent the command.
        caller: Caller,
    },
}

/// The arguments of the assign command (`pjwctl assign` and `pjwctl run`): a job, the cores that are requested for
/// it, and the processes that join it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Assign {
    /// The job that gets the cores. It is created if it does not exist.
    pub job: JobId,
    /// The amount of CPU for the job: a number of cores or PUs, or an explicit list of PUs. `None` keeps the
    /// present value.
    pub amount: Option<Amount>,
    /// How the cores are chosen, such as close together. `None` keeps the present value; a new job gets
    /// [`Placement::Pack`].
    pub placement: Option<Placement>,
    /// The priority class of the job. `None` keeps the present value; a new job gets [`PriorityClass::Normal`].
    pub class: Option<PriorityClass>,
    /// The name of the device that the cores should be near. `None` keeps the present value, an empty name removes
    /// it.
    pub near: Option<String>,
    /// Whether the job's memory comes only from the NUMA nodes of its cores. `None` keeps the present value; for a
    /// new job, that is false.
    pub bind_memory: Option<bool>,
    /// Whether the cores become an isolated partition (`cpuset.cpus.partition`). `None` keeps the present value;
    /// for a new job, that is false.
    pub isolated: Option<bool>,
    /// The processes that join the job, with their descendants.
    pub pids: Vec<Pid>,
    /// The session (setsid(2)) whose processes join the job, with their descendants. `None` if the command names no
    /// session.
    pub session: Option<Pid>,
    /// Whether the command is refused if the job exists already, as `pjwctl run` demands.
    pub must_be_new: bool,
    /// The owner of the job, as an administrator set it. `None`: the owner of the processes, or the caller if there
    /// are no processes.
    pub owner: Option<Uid>,
    /// The user that sent the command.
    pub caller: Caller,
}

impl Assign {
    /// Makes an assign command without options: no process joins the job, and an existing job keeps its values.
    /// Options are set in the fields afterwards.
    #[must_use]
    pub fn new(job: JobId, caller: Caller) -> Self {
        Self {
            job,
            amount: None,
            placement: None,
            class: None,
            near: None,
            bind_memory: None,
            isolated: None,
            pids: Vec::new(),
            session: None,
            must_be_new: false,
            owner: None,
            caller,
        }
    }
}

/// The result of a command that was carried out. A command that was refused has a `Refusal` instead.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reply {
    /// The job after the command.
    Assigned(Box<Job>),
    /// The jobs that were released.
    Released(Vec<JobId>),
    /// The jobs that were moved, and the result of the moves.
    Moved(Box<DefragPlan>),
}
