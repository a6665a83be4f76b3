//! Refusals: why a command was not carried out.

use thiserror::Error;

use crate::basics::{CpuSet, Pid, Pu, Tid, Uid, cpus_text, cpus_with_is_are, prelude::*};
use crate::terms::job::{JobId, JobSource};

/// The unit of the numbers in a [`Refusal`], such as the numbers of requested and of free CPUs: whole cores
/// or single PUs (logical CPUs).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CpuUnit {
    /// Whole cores.
    Core,
    /// Single PUs. Used if the request is for a number of PUs and the config key `share_smt` is on, so that
    /// pjw grants single PUs instead of whole cores.
    Pu,
}

impl CpuUnit {
    /// Returns the beginning of a sentence about the requested number, such as `4 cores were`.
    fn number_with_was_were(self, requested: u32) -> String {
        let (one, several) = match self {
            Self::Core => ("core", "cores"),
            Self::Pu => ("CPU", "CPUs"),
        };
        if requested == 1 { format!("1 {one} was") } else { format!("{requested} {several} were") }
    }

    /// Returns the name of the smallest unit that can be requested.
    fn smallest(self) -> &'static str {
        match self {
            Self::Core => "whole core",
            Self::Pu => "CPU",
        }
    }
}

/// The reason why pjw refused a command. Its text for users (`Display`) says what the user requested, why pjw
/// refuses this, and what the user can do.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum Refusal {
    /// The request is for zero cores.
    #[error("0 cores were asked for: ask for at least 1")]
    ZeroCores,
    /// A user that is not an administrator requested a provision (cores that are promised to a service).
    #[error(
        "only an administrator may promise cores to a service: ask one, or use pjwctl assign for a job of yours"
    )]
    ProvisionNeedsAdmin,
    /// Another provision already has the same rule. pjw could then not decide to which of the two provisions
    /// a process belongs.
    #[error(
        "{other} has the same rule: a process can belong to one provision only. Give {job} another rule, or pjwctl unprovision {other}"
    )]
    ProvisionWithSameRule {
        /// The id of the new provision.
        job: JobId,
        /// The id of the provision that has the rule.
        other: JobId,
    },
    /// The name of a new provision (cores that are promised to a service) is the name of an existing job that is no
    /// provision.
    #[error(
        "there is a job {job} already, which is no provision: choose another name for the provision, or: pjwctl release {job}"
    )]
    ProvisionNameTaken {
        /// The id of the existing job.
        job: JobId,
    },
    /// The owner of a provision, who is not an administrator, tried to release it or to change what it requests.
    #[error(
        "{job} has cores that an administrator promised: only an administrator may release it or change what it gets; \
         pjwctl want {job} N says how many cores it needs"
    )]
    ProvisionOfAdmin {
        /// The id of the provision.
        job: JobId,
    },
    /// The class besteffort (the job only borrows idle cores) was requested for the job of a batch system.
    #[error("{job} belongs to a batch system, which gives it cores: only jobs of users can be besteffort")]
    SchedulerJobBorrows {
        /// The id of the job.
        job: JobId,
    },
    /// A job of the class besteffort was requested with a property that such a job can't have, such as a CPU list. Such
    /// a job has no cores of its own, and borrows whichever cores are idle.
    #[error(
        "{job} can't have {property}: a besteffort job borrows whichever cores are idle. Ask for a number of cores, or use --class normal"
    )]
    BorrowerWithProperty {
        /// The id of the job.
        job: JobId,
        /// The requested property, as in "a CPU list".
        property: &'static str,
    },
    /// The request has neither a number of cores nor a list of PUs, and the job has no earlier request.
    #[error("the number of cores of {job} is not known: add --cores N or --cpus LIST")]
    NoCpuRequest {
        /// The id of the job.
        job: JobId,
    },
    /// The request is for more cores or PUs than the machine has for jobs.
    #[error("{} asked for and {}", unit.number_with_was_were(*requested), machine_has(*usable))]
    MoreThanMachine {
        /// Whether the numbers count cores or PUs.
        unit: CpuUnit,
        /// The requested number.
        requested: u32,
        /// The number that all jobs together can have.
        usable: u32,
    },
    /// The request is for more cores or PUs than are free now.
    #[error(
        "{} asked for{}",
        unit.number_with_was_were(*requested),
        fitting_requests_text(*unit, *free, free_cpus, *held, *max_cores_in_one_l3)
    )]
    NotEnoughCores {
        /// Whether the numbers count cores or PUs.
        unit: CpuUnit,
        /// The requested number.
        requested: u32,
        /// The number of whole cores, or of PUs, that no job holds.
        free: u32,
        /// The PUs of the free cores, or the free PUs.
        free_cpus: CpuSet,
        /// The number of cores or PUs that the job itself already holds. They count towards the requested
        /// number.
        held: u32,
        /// The largest number of cores or PUs with the same L3 cache that are free or that the job already
        /// holds.
        max_cores_in_one_l3: u32,
    },
    /// The request is for all free cores or PUs, and there are none.
    #[error("no {} is free: have a job released first (pjwctl jobs shows who holds what)", unit.smallest())]
    NothingFree {
        /// Whether cores or PUs were requested.
        unit: CpuUnit,
    },
    /// The request needs more cores than are free now. It is refused although `on_exhausted = "wait"`:
    /// requests of `pjwctl run`, and requests for jobs that already hold cores, never wait.
    #[error("{shortage}; {why}")]
    DoesNotWait {
        /// The reason why the request can't be served now.
        shortage: Box<Refusal>,
        /// The reason why the request does not wait, and the remedy, as part of a sentence.
        why: &'static str,
    },
    /// The requested list contains PUs that are offline or that the machine does not have.
    #[error("{} not on this machine or offline: choose among {online_cpus}", cpus_with_is_are(cpus))]
    NoSuchPus {
        /// The PUs of the list that are offline or that the machine does not have.
        cpus: CpuSet,
        /// All online PUs of the machine.
        online_cpus: CpuSet,
    },
    /// The requested list contains housekeeping PUs (PUs that are reserved for the system).
    #[error(
        "{} kept for housekeeping: choose others, or have `housekeeping` changed in the configuration",
        cpus_with_is_are(cpus)
    )]
    HousekeepingPus {
        /// The housekeeping PUs in the list.
        cpus: CpuSet,
    },
    /// The requested list contains a PU that another job holds.
    #[error("CPU {pu} belongs to {holder}: choose others, or have {holder} released first")]
    HeldByOtherJob {
        /// The first PU of the list that another job holds.
        pu: Pu,
        /// The job that holds the PU.
        holder: JobId,
    },
    /// The requested list contains some PUs of a core, but not all online PUs of this core. The setting
    /// `share_smt` is off.
    #[error(
        "CPU {pu} shares its core with {siblings}, which the list leaves out: add {siblings}, or have share_smt = true \
         set in the configuration"
    )]
    SplitsCore {
        /// A PU of the list, on the core that is not listed completely.
        pu: Pu,
        /// The online PUs on the same core as `pu` that are not in the list.
        siblings: CpuSet,
    },
    /// The requested list is empty.
    #[error("the CPU list is empty: name at least one")]
    EmptyCpuList,
    /// The machine has no device with the requested name.
    #[error("this machine has no device {device:?}: it has {known}")]
    NoSuchDevice {
        /// The requested name of the device.
        device: String,
        /// The names of the devices that the machine has, as part of a sentence.
        known: String,
    },
    /// There is no job with this id.
    #[error("there is no job {job}: pjwctl jobs lists them; if it has ended: pjwctl report {job}")]
    NoSuchJob {
        /// The id that the command named.
        job: JobId,
    },
    /// The command requires a new job, but a job with this id exists.
    #[error("there is a job {job} already: choose another name with --job{}", or_release(*may_release))]
    JobExists {
        /// The id of the existing job.
        job: JobId,
        /// Whether the caller may release the existing job, and so free the id.
        may_release: bool,
    },
    /// There is no process with this pid.
    #[error("there is no process {pid}: it may have exited; check the number with ps -p {pid}")]
    NoSuchProcess {
        /// The pid that the command named.
        pid: Pid,
    },
    /// The command names a process by a pid that is the id of a thread. The thread is not the first one of its process.
    #[error(
        "{tid} is a thread of process {pid}: name the process ({pid}), all its threads belong to the job then"
    )]
    IsThread {
        /// The thread id that the command named as a pid.
        tid: Tid,
        /// The process to which the thread belongs.
        pid: Pid,
    },
    /// A user that is not an administrator named too many processes in one request.
    #[error(
        "{given} processes were named in one request: name at most {most}, and send further requests for the others"
    )]
    TooManyProcesses {
        /// The number of processes that the request names.
        given: usize,
        /// The largest number for this user.
        most: usize,
    },
    /// All processes that a command assigned to a new job ended before the command was complete.
    #[error(
        "process {pid} has ended, and {job} with it: name a process that runs (ps -p {pid} shows whether one does), or \
         start the command with pjwctl run"
    )]
    ProcessEnded {
        /// The pid of the first of these processes.
        pid: Pid,
        /// The id of the new job, which ended with its processes.
        job: JobId,
    },
    /// No process is in the session that the command names.
    #[error("no process is in session {session}: ps -o sid= -p PID shows a process's session")]
    NoSuchSession {
        /// The session id that the command named.
        session: Pid,
    },
    /// The process can't belong to any job, such as a kernel thread.
    #[error("process {pid} can't be put in a job: {why}")]
    CantBeMember {
        /// The pid of the process.
        pid: Pid,
        /// The reason, as part of a sentence.
        why: &'static str,
    },
    /// The process belongs to another job.
    #[error("process {pid} belongs to {job}: {}", how_to_leave(job))]
    InOtherJob {
        /// The pid of the process.
        pid: Pid,
        /// The job to which the process belongs.
        job: JobId,
    },
    /// The process that is to start a program in a new job (`pjwctl run` or `pjwctl spawn`) is itself in another job.
    #[error(
        "this process ({pid}) is in {job} already: inside it, a command has the cores of {job} without pjwctl run, and \
         pjwctl spawn divides them among its instances if --job and options for cores are left out{}",
        how_to_start_in_own_job(job)
    )]
    StarterInOtherJob {
        /// The pid of the process.
        pid: Pid,
        /// The job to which the process belongs.
        job: JobId,
    },
    /// The process that is to start a program belongs to a job already. The caller requested a new job only for a
    /// process that belongs to no job. So the program is started in the present job.
    #[error("this process ({pid}) is in {job} already, and keeps the cores of {job}")]
    StaysInJob {
        /// The pid of the process.
        pid: Pid,
        /// The job to which the process belongs.
        job: JobId,
    },
    /// The new job would be a borrower (a job of the class besteffort) that can borrow no core. Its processes would be
    /// frozen at once. The client requested this refusal, so that it can tell its user before.
    #[error(
        "{job} could borrow no core now, and its processes would be frozen until it can: leave out refuse_frozen, or \
         have a job released first (pjwctl jobs shows who holds what)"
    )]
    WouldFreeze {
        /// The id of the job, which was not made.
        job: JobId,
    },
    /// The process belongs to another user than the caller.
    #[error("process {pid} belongs to user {owner}: only its owner or an administrator may put it in a job")]
    ProcessNotOwned {
        /// The pid of the process.
        pid: Pid,
        /// The user id of the process.
        owner: Uid,
    },
    /// The job belongs to another user than the caller.
    #[error("{job} belongs to user {owner}: only its owner or an administrator may change it")]
    JobNotOwned {
        /// The id of the job.
        job: JobId,
        /// The user id of the job's owner.
        owner: Uid,
    },
    /// The daemon does not run as root, and the process belongs to another user than the daemon. So the
    /// daemon has no permission to change the process.
    #[error(
        "process {pid} belongs to user {owner}, and this pjwd runs as user {user}, who may not move it: \
         send the request to the pjwd that runs as root (--socket)"
    )]
    NotDaemonsUser {
        /// The pid of the process.
        pid: Pid,
        /// The user id of the process.
        owner: Uid,
        /// The user id of the daemon.
        user: Uid,
    },
    /// An unprivileged user tried to create a job with another source than `manual`, such as `slurm:7`.
    #[error(
        "only an administrator may make a job of the source {}, such as {job}: choose a name without a source",
        job.source()
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
        /// The user id for whom the job was to be created.
        owner: Uid,
    },
    /// The kernel refused to restrict the processes of a new job to the cores of the job. The job was
    /// released again.
    #[error("{job} was not made: {why}")]
    Unenforceable {
        /// The id of the new job.
        job: JobId,
        /// The error of the kernel and the remedy, in one sentence for users.
        why: String,
    },
    /// An unprivileged user requested a defragmentation, which may move jobs of other users to other cores.
    #[error(
        "only an administrator may have jobs moved: ask one; pjwctl plan --defrag shows what that would bring"
    )]
    DefragNeedsAdmin,
    /// An unprivileged user requested cores, but the limit `user_max_cores` for unprivileged users is 0.
    #[error(
        "users may not take cores on this machine: ask an administrator, or have user_max_cores raised in the configuration"
    )]
    AssignNeedsAdmin,
    /// The request exceeds the limit `user_max_cores` for the cores of an unprivileged user.
    #[error(
        "{} asked for, which makes {total} for you, besteffort jobs included, and the limit is {limit}: {}, or ask an administrator to raise \
         user_max_cores",
        CpuUnit::Core.number_with_was_were(*requested), limit_remedy(*requested, *total, *limit)
    )]
    UserLimitExceeded {
        /// The number of requested cores.
        requested: u32,
        /// The number of cores that the owner would hold with this request. It includes the cores that the
        /// owner's other jobs hold or wait for, and those that jobs of the class besteffort may borrow.
        total: u32,
        /// The value of `user_max_cores`.
        limit: u32,
    },
    /// The batch system of the job chose the cores of the job, so pjw can't change them.
    #[error("the cores of {job} were chosen by its scheduler: change them there")]
    GrantedByScheduler {
        /// The id of the job.
        job: JobId,
    },
    /// The change could not be written to the journal (the file from which a restarted daemon restores its state). So
    /// the change was not made.
    #[error("the change can't be recorded, so it was not made: {fault}")]
    JournalFailed {
        /// The error of the write to the journal.
        fault: String,
    },
    /// The daemon runs in the mode `observe`, in which it changes nothing.
    #[error("pjwd runs with mode = \"observe\" and changes nothing: set mode = \"enforce\" and reload")]
    ObserveOnly,
    /// The daemon is stopping.
    #[error("pjwd is stopping: try again when it runs again")]
    Stopping,
}

impl Refusal {
    /// Returns whether pjw reports the refusal by an event. False for [`Refusal::StaysInJob`] and
    /// [`Refusal::WouldFreeze`]: pjw refuses a command for one of these two reasons only if the client set an option of
    /// the command for this refusal.
    #[must_use]
    pub fn is_reported(&self) -> bool {
        !matches!(self, Self::StaysInJob { .. } | Self::WouldFreeze { .. })
    }
}

/// Returns the end of the sentence that a request exceeds the machine. `usable` is the number of cores for jobs.
fn machine_has(usable: u32) -> String {
    if usable == 0 {
        return "this machine has none for jobs: have `housekeeping` changed in the configuration".to_owned();
    }
    format!("this machine has {usable} for jobs: ask for at most {usable}")
}

/// Returns the end of the sentence that a request is refused: how many units (cores or PUs) are free, and which
/// requests can be served now.
///
/// - `free` is the number of free units, and `free_cpus` has the PUs of these units.
/// - `held` is the number of units that the job itself holds.
/// - `max_cores_in_one_l3` is the size of the largest request that one L3 cache can serve.
fn fitting_requests_text(
    unit: CpuUnit,
    free: u32,
    free_cpus: &CpuSet,
    held: u32,
    max_cores_in_one_l3: u32,
) -> String {
    const JOBS: &str = "(pjwctl jobs shows who holds what)";
    let is = |n: u32| if n == 1 { "1 is".to_owned() } else { format!("{n} are") };
    let (largest, smallest) = (free.saturating_add(held), unit.smallest());
    match (free, held) {
        (0, 0) => format!(" and no {smallest} is free: have a job released first {JOBS}"),
        (0, _) => format!(
            ", the job has {held}, and no other {smallest} is free: have another job released first {JOBS}"
        ),
        (_, 0) => format!(
            " and {} free ({}); the largest request that fits now is {largest}, \
             {max_cores_in_one_l3} within one L3: ask for fewer, or have a job released first {JOBS}",
            is(free),
            cpus_text(free_cpus)
        ),
        _ => format!(
            ", the job has {held}, and {} free besides ({}); the largest request that fits now is {largest}, \
             {max_cores_in_one_l3} within one L3: ask for fewer, or have another job released first {JOBS}",
            is(free),
            cpus_text(free_cpus)
        ),
    }
}

fn or_release(may_release: bool) -> &'static str {
    if may_release { ", or release it first" } else { "" }
}

/// Returns when a process of `job` can join another job. A release frees the processes of a manual job. The job of a
/// scheduler goes on after a release and keeps its processes.
fn how_to_leave(job: &JobId) -> String {
    if job.source() == JobSource::Manual {
        return format!("it can join another job when {job} is released");
    }
    format!(
        "it stays there until {} ends the job; change the cores of {job} instead (pjwctl assign {job} --cores N)",
        job.source()
    )
}

/// Returns the remedy for a user who wants a new job for a program that a process of `job` starts. Empty if the batch
/// system made `job`: children of its processes stay in it too.
fn how_to_start_in_own_job(job: &JobId) -> &'static str {
    match job.source() {
        JobSource::Manual => "; for a job of its own, let a shell start pjwctl (sh -c 'pjwctl ...; exit $?')",
        _ => "",
    }
}

/// Returns the remedy for a user whose request exceeds the limit of cores for each user. `requested` is the number of
/// requested cores. `total` is the number of cores that the user would have with the request. `limit` is the limit.
fn limit_remedy(requested: u32, total: u32, limit: u32) -> String {
    let elsewhere = total.saturating_sub(requested);
    match limit.saturating_sub(elsewhere) {
        0 => "release a job of yours first".to_owned(),
        left if elsewhere == 0 => format!("ask for at most {left}"),
        left => format!("ask for at most {left}, release a job of yours first"),
    }
}
