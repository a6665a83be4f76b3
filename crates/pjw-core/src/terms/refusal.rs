//! Refusals: why a command was not carried out.

use thiserror::Error;

use crate::basics::{CpuSet, Pid, Pu, Uid, cpus_are, prelude::*};
use crate::terms::job::JobId;

/// The reason why a command was refused. The message says what was requested, why it is refused, and what the user
/// can do.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum Refusal {
    /// The request is for zero cores.
    #[error("0 cores were asked for: ask for at least 1")]
    ZeroCores,
    /// A request for a new job has neither a number of cores nor a list of PUs.
    #[error("{job} is new and no count was given: add --cores N or --cpus LIST")]
    NoAmount {
        /// The id of the job.
        job: JobId,
    },
    /// The request is for more cores than the machine has for jobs.
    #[error("{} asked for and this machine has {usable} for jobs: ask for at most {usable}", cores_were(*requested))]
    MoreThanMachine {
        /// The number of requested cores.
        requested: u32,
        /// The number of cores that all jobs together can have.
        usable: u32,
    },
    /// The request is for more cores than are free now.
    #[error("{} asked for and {}", cores_were(*requested), what_fits(*free, free_cpus, *largest_l3))]
    NotEnough {
        /// The number of requested cores.
        requested: u32,
        /// The number of free whole cores.
        free: u32,
        /// The PUs of the free cores.
        free_cpus: CpuSet,
        /// The largest number of free cores in one L3.
        largest_l3: u32,
    },
    /// The requested list contains PUs that the machine does not have.
    #[error("{} not on this machine or offline: it has {machine}", cpus_are(cpus))]
    NoSuchPus {
        /// The PUs that the machine does not have.
        cpus: CpuSet,
        /// All PUs of the machine.
        machine: CpuSet,
    },
    /// The requested list contains housekeeping PUs.
    #[error(
        "{} kept for housekeeping: choose others, or change `housekeeping` in the configuration",
        cpus_are(cpus)
    )]
    Housekeeping {
        /// The housekeeping PUs in the list.
        cpus: CpuSet,
    },
    /// The requested list contains a PU that another job holds.
    #[error("CPU {pu} belongs to {holder}: choose others, or release {holder} first")]
    HeldByOtherJob {
        /// The first such PU.
        pu: Pu,
        /// The job that holds the PU.
        holder: JobId,
    },
    /// The requested list contains some PUs of a core and leaves out its other PUs.
    #[error(
        "CPU {pu} shares its core with {siblings}, which the list leaves out: add {siblings}, or set share_smt = true"
    )]
    SplitsCore {
        /// A PU of the list.
        pu: Pu,
        /// The siblings of `pu` that are not in the list.
        siblings: CpuSet,
    },
    /// The requested list is empty.
    #[error("the CPU list is empty: name at least one")]
    EmptyList,
    /// The machine has no device of this name.
    #[error("this machine has no device {device:?}: it has {known}")]
    NoSuchDevice {
        /// The requested name.
        device: String,
        /// The names of the devices that the machine has, as a list for the message.
        known: String,
    },
    /// There is no job with this id.
    #[error("there is no job {job}: pjwctl jobs lists them")]
    NoSuchJob {
        /// The id.
        job: JobId,
    },
    /// The id of a new job is in use.
    #[error("there is a job {job} already: choose another name with --job, or release it first")]
    JobExists {
        /// The id.
        job: JobId,
    },
    /// There is no process with this pid.
    #[error("there is no process {pid}: it may have exited; check the number with ps -p {pid}")]
    NoSuchProcess {
        /// The pid.
        pid: Pid,
    },
    /// There is no process in this session.
    #[error("no process is in session {session}: ps -o sid= -p PID shows a process's session")]
    NoSuchSession {
        /// The session id.
        session: Pid,
    },
    /// The process can't be a member of any job (such as a kernel thread).
    #[error("process {pid} can't be put in a job: {why}")]
    CantBeMember {
        /// The pid.
        pid: Pid,
        /// The reason, as part of a sentence.
        why: &'static str,
    },
    /// The process belongs to another job.
    #[error("process {pid} belongs to {job}: release {job} first")]
    InOtherJob {
        /// The pid.
        pid: Pid,
        /// The job of the process.
        job: JobId,
    },
    /// The process belongs to another user than the caller.
    #[error("process {pid} belongs to user {owner}: only its owner or an administrator may put it in a job")]
    NotYourProcess {
        /// The pid.
        pid: Pid,
        /// The user of the process.
        owner: Uid,
    },
    /// The job belongs to another user than the caller.
    #[error("{job} belongs to user {owner}: only its owner or an administrator may change it")]
    NotYourJob {
        /// The id of the job.
        job: JobId,
        /// The user of the job.
        owner: Uid,
    },
    /// The daemon runs as an unprivileged user that may not change the process.
    #[error(
        "process {pid} belongs to user {owner}, and this warden runs as user {user}, who may not move it: \
         ask the warden that runs as root"
    )]
    NotDaemonsUser {
        /// The pid.
        pid: Pid,
        /// The user of the process.
        owner: Uid,
        /// The user of the daemon.
        user: Uid,
    },
    /// An unprivileged user tried to create a job with the id of a scheduler's job.
    #[error(
        "{job} would be a job of a scheduler: only an administrator may announce one; choose a name without a source"
    )]
    SchedulerJobByUser {
        /// The id of the job.
        job: JobId,
    },
    /// An unprivileged user tried to create a job for another user.
    #[error(
        "{job} would be a job of user {owner}: only an administrator may make one for another user; leave the owner out"
    )]
    JobForOtherUser {
        /// The id of the job.
        job: JobId,
        /// The user that the job would belong to.
        owner: Uid,
    },
    /// The kernel does not allow the processes to be restricted to the cores.
    #[error("{job} was not made: {why}")]
    Unenforceable {
        /// The id of the job.
        job: JobId,
        /// The error of the kernel, and what the user can do.
        why: String,
    },
    /// An unprivileged user tried to defragment, which moves jobs of other users.
    #[error(
        "only an administrator may have jobs moved: ask one; pjwctl plan --defrag shows what that would bring"
    )]
    DefragNeedsAdmin,
    /// An unprivileged user tried to assign cores on a machine where only administrators may.
    #[error(
        "users may not take cores on this machine: ask an administrator, or have user_max_cores raised in the configuration"
    )]
    AssignNeedsAdmin,
    /// The request exceeds the limit for unprivileged users.
    #[error(
        "{} asked for, which makes {total} for you, and the limit is {limit}: release a job first, or ask an administrator to raise user_max_cores", cores_were(*requested)
    )]
    UserLimit {
        /// The number of requested cores.
        requested: u32,
        /// The number of cores that the user would hold in total.
        total: u32,
        /// The limit: `user_max_cores`.
        limit: u32,
    },
    /// The cores of the job were granted by its scheduler and can't be changed.
    #[error("the cores of {job} were chosen by its scheduler: change them there")]
    GrantedByScheduler {
        /// The id of the job.
        job: JobId,
    },
    /// The request could not be written to the journal.
    #[error("the change can't be recorded, so it was not made: {fault}")]
    JournalFailed {
        /// The error of the journal.
        fault: String,
    },
    /// The daemon runs in observe mode and changes nothing.
    #[error("the warden runs with mode = \"observe\" and changes nothing: set mode = \"enforce\" and reload")]
    ObserveOnly,
    /// The daemon is stopping.
    #[error("the warden is stopping: try again when it is back")]
    Stopping,
}

fn cores_were(requested: u32) -> String {
    if requested == 1 { "1 core was".to_owned() } else { format!("{requested} cores were") }
}

fn what_fits(free: u32, free_cpus: &CpuSet, largest_l3: u32) -> String {
    const REMEDY: &str = "release a job first (pjwctl jobs shows who holds what)";
    if free == 0 {
        return format!("no whole core is free: {REMEDY}");
    }
    let free_is = if free == 1 { "1 is".to_owned() } else { format!("{free} are") };
    format!(
        "{free_is} free ({free_cpus}); the largest request that fits now is {free}, \
         {largest_l3} within one L3: ask for fewer, or {REMEDY}"
    )
}
