//! What a scheduler's hook is told of a job before the job is there: which it is, whose, and how much of this node it
//! has. From the hook's environment, its arguments or its standard input, as plain data; the formats are those that
//! the systems' own files read.
//!
//! Nothing is guessed: what is missing or can't be is a [`Flaw`], which names the variable and says what to do. A job
//! without a count can still be released; a count can be given by whoever set up the hook.

use pjw_core::job::{Amount, JobId, Source};
use pjw_core::process::Uid;
use pjw_core::snapshot::Marks;
use thiserror::Error;

use crate::counts::CountsError;
use crate::hostlist::HostlistError;
use crate::system::{Environ, plausible};
use crate::{Host, condor, flux, lsf, pbs, sge, slurm};

/// A job that is about to start, or has ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Announcement {
    /// Which.
    pub job: JobId,
    /// Another id that its cgroup may go by.
    pub alias: Option<JobId>,
    /// Whose.
    pub owner: Result<Owner, Flaw>,
    /// How much of this node it has.
    pub amount: Result<Amount, Flaw>,
}

/// A user, as schedulers name them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Owner {
    /// By number.
    Uid(Uid),
    /// By name.
    Name(String),
}

/// What is wrong with what a hook was told.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum Flaw {
    /// Something that the scheduler always tells.
    #[error("{variable} is not set: is this called as the hook it is for?")]
    Missing {
        /// Its name.
        variable: &'static str,
    },
    /// An id that is none.
    #[error("{variable} names no job of this scheduler: {value:?}")]
    NotAnId {
        /// Where it stands.
        variable: &'static str,
        /// It, or its beginning.
        value: String,
    },
    /// A user that can't be.
    #[error("{variable} names no user: {value:?}")]
    NotAUser {
        /// Where it stands.
        variable: &'static str,
        /// It, or its beginning.
        value: String,
    },
    /// A number that is none.
    #[error("{variable} is not a whole number above 0: {value:?}")]
    NotANumber {
        /// Where it stands.
        variable: &'static str,
        /// It, or its beginning.
        value: String,
    },
    /// A list of counts that can't be read.
    #[error("{variable}: {why}")]
    Counts {
        /// Where it stands.
        variable: &'static str,
        /// What is wrong with it.
        why: CountsError,
    },
    /// A list of nodes that can't be read.
    #[error("{variable}: {why}")]
    Nodes {
        /// Where it stands.
        variable: &'static str,
        /// What is wrong with it.
        why: HostlistError,
    },
    /// A list that leaves this host out.
    #[error("{variable} does not name this node, {host}: the scheduler may know it by another name")]
    NotHere {
        /// Where it stands.
        variable: &'static str,
        /// The node.
        host: String,
    },
    /// More than any machine has, or nothing.
    #[error("a job of {count} cores can't be: expected 1 to 65536")]
    Implausible {
        /// The count.
        count: u32,
    },
    /// The scheduler doesn't tell this hook how many cores the job has here.
    #[error(
        "{scheduler} does not tell its hook how many cores the job has on this node: give the hook --cores N"
    )]
    Untold {
        /// Which scheduler.
        scheduler: Source,
    },
}

/// The beginning of a text, for a message.
pub(crate) fn shown(text: &str) -> String {
    const LONGEST: usize = 40;
    match text.char_indices().nth(LONGEST) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

fn pus(count: u32) -> Result<Amount, Flaw> {
    plausible(count).map(Amount::Pus).ok_or(Flaw::Implausible { count })
}

fn cores(count: u32) -> Result<Amount, Flaw> {
    plausible(count).map(Amount::Cores).ok_or(Flaw::Implausible { count })
}

/// A user's number, as the systems' variables have it. The last number stands for nobody (chown(2)).
fn uid(variable: &'static str, text: &str) -> Result<Owner, Flaw> {
    let number =
        text.parse().ok().filter(|&uid| text.bytes().all(|byte| byte.is_ascii_digit()) && uid != u32::MAX);
    number.map(|uid| Owner::Uid(Uid(uid))).ok_or_else(|| Flaw::NotAUser { variable, value: shown(text) })
}

/// A user's name, or number.
fn user(variable: &'static str, text: &str) -> Result<Owner, Flaw> {
    let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let name = |byte: u8| byte.is_ascii_graphic() && !b":/".contains(&byte);
    if digits {
        return uid(variable, text);
    }
    let is_name = (1..=256).contains(&text.len()) && !text.starts_with('-') && text.bytes().all(name);
    let owner = is_name.then(|| Owner::Name(text.to_owned()));
    owner.ok_or_else(|| Flaw::NotAUser { variable, value: shown(text) })
}

/// Slurm's prolog and epilog, and its task prolog.
///
/// # Errors
/// If the environment names no job.
pub fn slurm(marks: &Marks, host: &Host) -> Result<Announcement, Flaw> {
    const VARIABLES: &[&str] = &[
        "SLURM_JOB_ID",
        "SLURM_JOBID",
        "SLURM_JOB_SLUID",
        "SLURM_JOB_UID",
        "SLURM_UID",
        "SLURM_JOB_CPUS_PER_NODE",
        "SLURM_JOB_NODELIST",
        "SLURM_NODELIST",
        "SLURMD_NODENAME",
    ];
    let environ = Environ::of(VARIABLES, marks);
    let (job, alias) = slurm::ids(environ)?;
    let owner =
        environ.first(["SLURM_JOB_UID", "SLURM_UID"]).and_then(|(variable, text)| uid(variable, text));
    Ok(Announcement { job, alias, owner, amount: slurm::count_of_job(environ, host).and_then(pus) })
}

/// LSF's pre- and post-execution commands and its job starter.
///
/// # Errors
/// If the environment names no job.
pub fn lsf(marks: &Marks, host: &Host) -> Result<Announcement, Flaw> {
    const VARIABLES: &[&str] =
        &["LSB_JOBID", "LSB_JOBINDEX", "LSB_MCPU_HOSTS", "LSB_HOSTS", "LSB_JOB_EXECUSER", "LSFUSER"];
    let environ = Environ::of(VARIABLES, marks);
    let owner =
        environ.first(["LSB_JOB_EXECUSER", "LSFUSER"]).and_then(|(variable, text)| user(variable, text));
    let amount = lsf::count(environ, host).and_then(cores);
    Ok(Announcement { job: lsf::id(environ)?, alias: None, owner, amount })
}

/// OpenPBS's hook: the job's id, its user, its `exec_vnode`, and what PBS calls this node. All but the id may be
/// missing at the job's end. A CPU of PBS is what its mom counts: a logical one.
///
/// # Errors
/// If the first argument is no job's id.
pub fn openpbs(words: &[&str]) -> Result<Announcement, Flaw> {
    let amount = match words.get(2..) {
        Some([exec_vnode, node, ..]) => pbs::cpus_on(exec_vnode, node).and_then(pus),
        _ => Err(Flaw::Untold { scheduler: Source::Pbs }),
    };
    pbs_job(words, amount)
}

/// Torque's prologue and epilogue: the job's id, its user and group, its name, the list of its limits, and further
/// on, in new versions, the list of its hosts.
///
/// # Errors
/// If the first argument is no job's id.
pub fn torque(words: &[&str]) -> Result<Announcement, Flaw> {
    let limits = words.get(4).copied().unwrap_or_default();
    let hosts = words.get(8).copied().unwrap_or_default();
    pbs_job(words, pbs::ppn(limits, hosts).and_then(cores))
}

fn pbs_job(words: &[&str], amount: Result<Amount, Flaw>) -> Result<Announcement, Flaw> {
    const ID: &str = "the first argument";
    const USER: &str = "the second argument";
    let id = words.first().filter(|id| !id.is_empty()).ok_or(Flaw::Missing { variable: ID })?;
    let job = pbs::job(id).ok_or_else(|| Flaw::NotAnId { variable: ID, value: shown(id) })?;
    let owner = words.get(1).ok_or(Flaw::Missing { variable: USER }).and_then(|name| user(USER, name));
    Ok(Announcement { job, alias: None, owner, amount })
}

/// OpenPBS's `execjob_launch`, where the environment is the task's.
///
/// # Errors
/// If it names no job.
pub fn pbs_task(marks: &Marks) -> Result<Announcement, Flaw> {
    let id = Environ::of(&["PBS_JOBID"], marks).need("PBS_JOBID")?;
    pbs_job(&[id], Err(Flaw::Untold { scheduler: Source::Pbs }))
}

/// Grid Engine's prolog, epilog and starter method. `owner` is `$job_owner` of the prolog's own line; `hostfile` the
/// text of the file that `PE_HOSTFILE` names, if there is one.
///
/// # Errors
/// If the environment names no job.
pub fn sge(
    marks: &Marks,
    host: &Host,
    owner: Option<&str>,
    hostfile: Option<&str>,
) -> Result<Announcement, Flaw> {
    const OWNER: &str = "the first argument ($job_owner)";
    let environ = Environ::of(&["JOB_ID", "SGE_TASK_ID", "NSLOTS", "NHOSTS"], marks);
    let count = match hostfile {
        Some(text) => sge::count_in_hostfile(text, host),
        None => sge::count(environ),
    };
    let owner = owner.ok_or(Flaw::Missing { variable: OWNER }).and_then(|name| user(OWNER, name));
    Ok(Announcement { job: sge::id(environ)?, alias: None, owner, amount: count.and_then(cores) })
}

/// HTCondor's preparation hook and its job wrapper. The texts are the two files that `_CONDOR_MACHINE_AD` and
/// `_CONDOR_JOB_AD` name, or empty.
///
/// # Errors
/// If the environment names no slot.
pub fn condor(marks: &Marks, machine_ad: &str, job_ad: &str) -> Result<Announcement, Flaw> {
    const OWNER: &str = "Owner in the job's ad";
    let slot = Environ::of(&["_CONDOR_SLOT"], marks).need("_CONDOR_SLOT")?;
    let flaw = |_| Flaw::NotAnId { variable: "_CONDOR_SLOT", value: shown(slot) };
    let told = JobId::new(Source::Condor, slot).map_err(flaw)?;
    // The variable may leave out the machine, which the cgroup's directory names.
    let first = |name: &str| name.split('@').next().map(str::to_owned);
    let full = condor::text(machine_ad, "Name").filter(|name| first(name) == first(slot));
    let (job, alias) = match full.and_then(|name| JobId::new(Source::Condor, name).ok()) {
        Some(full) if full != told => (full, Some(told)),
        _ => (told, None),
    };
    let owner = condor::text(job_ad, "Owner").ok_or(Flaw::Missing { variable: OWNER });
    let count = condor::count(machine_ad).unwrap_or(Err(Flaw::Untold { scheduler: Source::Condor }));
    let owner = owner.and_then(|name| user(OWNER, name));
    Ok(Announcement { job, alias, owner, amount: count.and_then(cores) })
}

/// Flux's prolog and epilog. No variable tells the number of cores.
///
/// # Errors
/// If the environment names no job.
pub fn flux(marks: &Marks) -> Result<Announcement, Flaw> {
    let environ = Environ::of(&["FLUX_JOB_ID", "FLUX_JOB_USERID"], marks);
    let id = environ.need("FLUX_JOB_ID")?;
    let job = flux::job(id).ok_or_else(|| Flaw::NotAnId { variable: "FLUX_JOB_ID", value: shown(id) })?;
    let owner = environ.need("FLUX_JOB_USERID").and_then(|text| uid("FLUX_JOB_USERID", text));
    Ok(Announcement { job, alias: None, owner, amount: Err(Flaw::Untold { scheduler: Source::Flux }) })
}
