//! What people ask of the warden, and how it says no.

use thiserror::Error;

use crate::cpuset::{CpuSet, Pu};
use crate::defrag::Defrag;
use crate::explain::are;
use crate::job::{Amount, Class, Job, JobId, Placement};
use crate::process::{Pid, Uid};

/// Who asks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Caller {
    /// The user, as the kernel vouches for it (`SO_PEERCRED`).
    pub uid: Uid,
    /// Whether this user may change anyone's jobs.
    pub admin: bool,
}

/// A wish for a change.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Command {
    /// Give a job cores, and processes.
    Assign(Assign),
    /// Take a job's cores back and undo what was done to its threads.
    Release {
        /// Which job.
        job: JobId,
        /// Who asks.
        caller: Caller,
    },
    /// The same for every job of the warden.
    ReleaseAll {
        /// Who asks.
        caller: Caller,
    },
    /// Move jobs so that they lie on fewer parts of the machine and larger requests fit into one.
    Defrag {
        /// Who asks.
        caller: Caller,
    },
}

/// The wish of `assign` and `run`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Assign {
    /// The job, made if it doesn't exist.
    pub job: JobId,
    /// How many cores, or which; `None` keeps what the job has.
    pub amount: Option<Amount>,
    /// How they are chosen; `None` keeps what the job has, or packs.
    pub placement: Option<Placement>,
    /// How much the job matters; `None` keeps what it has, or normal.
    pub class: Option<Class>,
    /// The device to be near; `None` keeps what the job has, an empty name ends it.
    pub near: Option<String>,
    /// Whether memory comes from the cores' NUMA nodes only; `None` keeps what the job has, or no.
    pub bind_memory: Option<bool>,
    /// Whether the cores are to be a partition of their own; `None` keeps what the job has, or no.
    pub isolated: Option<bool>,
    /// Processes that join, with their descendants.
    pub pids: Vec<Pid>,
    /// A session whose processes join, with their descendants.
    pub session: Option<Pid>,
    /// Whether the job must be new (`run`): joining one of that name would break its promise of cores of its own.
    pub fresh: bool,
    /// Whose job it is, as an administrator says; `None`: whose processes it is made for, or who asks.
    pub owner: Option<Uid>,
    /// Who asks.
    pub caller: Caller,
}

/// What became of a wish.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reply {
    /// The job as it is now.
    Assigned(Box<Job>),
    /// These jobs were let go.
    Released(Vec<JobId>),
    /// These jobs were moved.
    Moved(Box<Defrag>),
}

/// Why a wish was not granted: what, why, and what to do.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum Refusal {
    /// Zero cores.
    #[error("0 cores were asked for: ask for at least 1")]
    ZeroCores,
    /// Neither a count nor a list for a new job.
    #[error("{job} is new and no count was given: add --cores N or --cpus LIST")]
    NoAmount {
        /// The job.
        job: JobId,
    },
    /// More than the machine has for jobs.
    #[error("{} asked for and this machine has {usable} for jobs: ask for at most {usable}", cores_were(*asked))]
    MoreThanMachine {
        /// What was asked, in cores.
        asked: u32,
        /// What all jobs together can have.
        usable: u32,
    },
    /// Not enough free now.
    #[error("{} asked for and {}", cores_were(*asked), what_fits(*free, free_cpus, *largest_l3))]
    NotEnough {
        /// What was asked, in cores.
        asked: u32,
        /// How many whole cores are free.
        free: u32,
        /// Their PUs.
        free_cpus: CpuSet,
        /// The most that fits one L3.
        largest_l3: u32,
    },
    /// An explicit list names what this machine doesn't have.
    #[error("{} not on this machine or offline: it has {machine}", are(cpus))]
    NoSuchPus {
        /// Those.
        cpus: CpuSet,
        /// What there is.
        machine: CpuSet,
    },
    /// An explicit list names housekeeping PUs.
    #[error(
        "{} kept for housekeeping: choose others, or change `housekeeping` in the configuration",
        are(cpus)
    )]
    Housekeeping {
        /// Those.
        cpus: CpuSet,
    },
    /// An explicit list names what another job holds.
    #[error("CPU {pu} belongs to {holder}: choose others, or release {holder} first")]
    Held {
        /// The first such PU.
        pu: Pu,
        /// Who holds it.
        holder: JobId,
    },
    /// An explicit list takes half a core.
    #[error(
        "CPU {pu} shares its core with {siblings}, which the list leaves out: add {siblings}, or set share_smt = true"
    )]
    SplitsCore {
        /// A PU of the list.
        pu: Pu,
        /// Its siblings outside the list.
        siblings: CpuSet,
    },
    /// An empty explicit list.
    #[error("the CPU list is empty: name at least one")]
    EmptyList,
    /// No such device.
    #[error("this machine has no device {device:?}: it has {known}")]
    NoSuchDevice {
        /// The name.
        device: String,
        /// Those it has.
        known: String,
    },
    /// No such job.
    #[error("there is no job {job}: pjwctl jobs lists them")]
    NoSuchJob {
        /// The id.
        job: JobId,
    },
    /// A fresh name that is taken.
    #[error("there is a job {job} already: choose another name with --job, or release it first")]
    JobExists {
        /// The id.
        job: JobId,
    },
    /// A process that isn't there.
    #[error("there is no process {pid}: it may have exited; check the number with ps -p {pid}")]
    NoSuchProcess {
        /// Its number.
        pid: Pid,
    },
    /// A session nobody is in.
    #[error("no process is in session {session}: ps -o sid= -p PID shows a process's session")]
    NoSuchSession {
        /// Its number.
        session: Pid,
    },
    /// A process nobody may jail.
    #[error("process {pid} can't be put in a job: {why}")]
    Unjailable {
        /// Its number.
        pid: Pid,
        /// The reason.
        why: &'static str,
    },
    /// A process of another job.
    #[error("process {pid} belongs to {job}: release {job} first")]
    InOtherJob {
        /// Its number.
        pid: Pid,
        /// Whose it is.
        job: JobId,
    },
    /// Someone else's process.
    #[error("process {pid} belongs to user {owner}: only its owner or an administrator may put it in a job")]
    NotYourProcess {
        /// Its number.
        pid: Pid,
        /// Its user.
        owner: Uid,
    },
    /// Someone else's job.
    #[error("{job} belongs to user {owner}: only its owner or an administrator may change it")]
    NotYourJob {
        /// Its id.
        job: JobId,
        /// Its user.
        owner: Uid,
    },
    /// A process that the daemon's own user may not change.
    #[error(
        "process {pid} belongs to user {owner}, and this warden runs as user {user}, who may not move it: \
         ask the warden that runs as root"
    )]
    OutOfReach {
        /// Its number.
        pid: Pid,
        /// Its user.
        owner: Uid,
        /// The daemon's user.
        user: Uid,
    },
    /// A scheduler's job that a plain user makes up.
    #[error(
        "{job} would be a job of a scheduler: only an administrator may announce one; choose a name without a source"
    )]
    NotYoursToName {
        /// Its id.
        job: JobId,
    },
    /// A job that a plain user makes for somebody else.
    #[error(
        "{job} would be a job of user {owner}: only an administrator may make one for another user; leave the owner out"
    )]
    NotYoursToGive {
        /// Its id.
        job: JobId,
        /// Whose it would be.
        owner: Uid,
    },
    /// Processes that the kernel lets nobody confine.
    #[error("{job} was not made: {why}")]
    Unenforceable {
        /// Its id.
        job: JobId,
        /// The kernel's refusal, and what to do.
        why: String,
    },
    /// A plain user who would have other users' jobs moved.
    #[error(
        "only an administrator may have jobs moved: ask one; pjwctl plan --defrag shows what that would bring"
    )]
    MovesAreForAdmins,
    /// A plain user where only administrators assign.
    #[error(
        "users may not take cores on this machine: ask an administrator, or have user_max_cores raised in the configuration"
    )]
    UsersMayNot,
    /// A plain user over the limit.
    #[error(
        "{} asked for, which makes {total} for you, and the limit is {limit}: release a job first, or ask an administrator to raise user_max_cores", cores_were(*asked)
    )]
    UserLimit {
        /// What was asked.
        asked: u32,
        /// What that would make in total.
        total: u32,
        /// `user_max_cores`.
        limit: u32,
    },
    /// A scheduler's own grant can't be changed.
    #[error("the cores of {job} were chosen by its scheduler: change them there")]
    SchedulersGrant {
        /// Its id.
        job: JobId,
    },
    /// The wish can't be remembered.
    #[error("the change can't be recorded, so it was not made: {fault}")]
    Unrecorded {
        /// The journal's own words.
        fault: String,
    },
    /// The daemon only watches.
    #[error("the warden runs with mode = \"observe\" and changes nothing: set mode = \"enforce\" and reload")]
    ObserveOnly,
    /// The daemon is going down.
    #[error("the warden is stopping: try again when it is back")]
    Stopping,
}

fn cores_were(asked: u32) -> String {
    if asked == 1 { "1 core was".to_owned() } else { format!("{asked} cores were") }
}

fn what_fits(free: u32, free_cpus: &CpuSet, largest_l3: u32) -> String {
    const WHO: &str = "release a job first (pjwctl jobs shows who holds what)";
    if free == 0 {
        return format!("no whole core is free: {WHO}");
    }
    let free_is = if free == 1 { "1 is".to_owned() } else { format!("{free} are") };
    format!(
        "{free_is} free ({free_cpus}); the largest request that fits now is {free}, \
         {largest_l3} within one L3: ask for fewer, or {WHO}"
    )
}
