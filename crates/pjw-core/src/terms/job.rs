//! Jobs: their ids, their requests and their grants.

use core::fmt;
use core::str::FromStr;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::basics::{CpuSet, Nanos, Pid, Uid, UnixMillis, prelude::*};
use crate::machine::Topology;

/// The system that started a job: a batch system, a user's command, or a login session. It is the first part of a job
/// id.
#[derive(
    Debug,
    Clone,
    Copy,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    Serialize,
    Deserialize,
    strum::Display,
    strum::IntoStaticStr,
    strum::VariantArray,
)]
#[serde(rename_all = "lowercase")]
#[strum(serialize_all = "kebab-case")]
pub enum Source {
    /// Slurm.
    Slurm,
    /// IBM Spectrum LSF and OpenLava.
    Lsf,
    /// OpenPBS, PBS Professional, Torque.
    Pbs,
    /// Grid Engine and its descendants.
    Sge,
    /// HTCondor.
    Condor,
    /// Flux.
    Flux,
    /// OAR.
    Oar,
    /// A user, by `pjwctl assign` or `pjwctl run`.
    Manual,
    /// A login session.
    Session,
}

impl Source {
    /// All sources of jobs, in the order in which they are listed for users.
    pub const ALL: &[Self] = <Self as strum::VariantArray>::VARIANTS;

    /// Returns the name of the source in job ids, config keys and JSON, such as `slurm`.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.into()
    }

    /// Whether the source is a batch system: every source except `manual` (a user's command) and `session` (a login).
    /// pjw never changes which cores a batch system gave to its job.
    #[must_use]
    pub fn is_scheduler(self) -> bool {
        !matches!(self, Source::Manual | Source::Session)
    }
}

/// The id of a job: its source and its name there, written `source:name`, such as `slurm:7`. A name need not be a
/// number: some schedulers use names such as `123[4].srv`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct JobId {
    source: Source,
    name: String,
}

/// The reason why a text is not a valid job id.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum JobIdError {
    /// The name is empty.
    #[error("the job id is empty: name the job, as in mytest or slurm:123")]
    Empty,
    /// The name has more than [`JobId::MAX_LENGTH`] characters.
    #[error("the job id is {length} characters long: at most {max} are allowed", max = JobId::MAX_LENGTH)]
    TooLong {
        /// The number of characters.
        length: usize,
    },
    /// The name contains a character that is not allowed.
    #[error("the job id holds {character:?}: letters, digits and ._-:@+[] are allowed")]
    Character {
        /// The first such character.
        character: char,
    },
    /// The part before the colon is not a known source.
    #[error(
        "{source_name:?} is not a source of jobs: known are slurm, lsf, pbs, sge, condor, flux, oar, manual, session"
    )]
    UnknownSource {
        /// The part before the colon.
        source_name: String,
    },
}

impl JobId {
    /// The maximum number of characters in the name part of a job id (the part after the source).
    pub const MAX_LENGTH: usize = 128;

    /// Makes an id from the system that started the job and the job's name there.
    ///
    /// # Errors
    /// If the name is empty, too long, or has a character outside `[A-Za-z0-9._:@+\[\]-]`.
    pub fn new(source: Source, name: &str) -> Result<Self, JobIdError> {
        if name.is_empty() {
            return Err(JobIdError::Empty);
        }
        let length = name.chars().count();
        if length > Self::MAX_LENGTH {
            return Err(JobIdError::TooLong { length });
        }
        let allowed = |c: char| c.is_ascii_alphanumeric() || "._-:@+[]".contains(c);
        match name.chars().find(|&c| !allowed(c)) {
            Some(character) => Err(JobIdError::Character { character }),
            None => Ok(Self { source, name: name.to_owned() }),
        }
    }

    /// Returns the source of the job (the system that started it, such as Slurm): the part of the id before the first
    /// colon.
    #[must_use]
    pub fn source(&self) -> Source {
        self.source
    }

    /// Returns the name of the job: the part of the id after the first colon.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }
}

impl fmt::Display for JobId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.source, self.name)
    }
}

impl FromStr for JobId {
    type Err = JobIdError;

    /// Parses `source:name`. A text without a known source is the name of a manual job, unless it looks like
    /// a misspelt source: `slrm:1` is an error.
    fn from_str(text: &str) -> Result<Self, JobIdError> {
        let Some((before, name)) = text.split_once(':') else { return Self::new(Source::Manual, text) };
        match Source::ALL.iter().find(|source| source.name() == before) {
            Some(&source) => Self::new(source, name),
            None => {
                Self::new(Source::Manual, text)?;
                Err(JobIdError::UnknownSource { source_name: before.to_owned() })
            }
        }
    }
}

impl Serialize for JobId {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for JobId {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = alloc::borrow::Cow::<'de, str>::deserialize(deserializer)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

/// The priority class of a job. Only `Guaranteed` has an effect: pjw does not lend cores or take them back for a class yet. A
/// scheduler's grant takes its cores from jobs of all classes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PriorityClass {
    /// Defragmentation does not move the job.
    Guaranteed,
    /// The default class.
    #[default]
    Normal,
    /// Treated as `Normal`.
    Besteffort,
}

/// How the cores for a job are chosen: close together, spread over the machine, or as the user lists them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Placement {
    /// Close together, in as few domains of the machine as possible.
    #[default]
    Pack,
    /// Evenly over the domains of the machine.
    Spread,
    /// The user names the PUs.
    Explicit,
}

/// The amount of CPU that a job requests: a number of cores, a number of PUs (logical CPUs), or an explicit list of
/// PUs.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Amount {
    /// This number of whole cores.
    Cores(u32),
    /// This number of PUs, the unit of Slurm on machines with SMT. Rounded up to whole cores, except if the
    /// policy lets SMT siblings serve two jobs.
    Pus(u32),
    /// Exactly these PUs.
    Exactly(CpuSet),
}

impl Amount {
    /// Returns the number of cores that this amount needs on a machine. If the cores of the machine have different
    /// numbers of PUs, the result is an upper bound.
    #[must_use]
    pub fn core_count(&self, topology: &Topology) -> u32 {
        match self {
            Amount::Cores(count) => *count,
            Amount::Pus(count) => {
                let smallest = topology.cores().iter().map(|core| core.pus.len()).min().unwrap_or(1).max(1);
                count.div_ceil(u32::try_from(smallest).unwrap_or(1))
            }
            Amount::Exactly(cpus) => topology.overlapping_core_count(cpus),
        }
    }
}

/// What a job requests: an amount of cores, how they are chosen, and their properties.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Request {
    /// How much CPU the job requests: a number of cores or PUs, or an explicit list of PUs.
    pub amount: Amount,
    /// How the cores are chosen: close together, spread, or as listed.
    pub placement: Placement,
    /// The priority class of the job.
    pub class: PriorityClass,
    /// The name of a device that the cores should be near; `None` for no preference.
    #[serde(default)]
    pub near: Option<String>,
    /// Whether memory is allocated only from the NUMA nodes of the cores (`cpuset.mems`).
    #[serde(default)]
    pub bind_memory: bool,
    /// Whether the cores become an isolated partition (`cpuset.cpus.partition = isolated`).
    #[serde(default)]
    pub isolated: bool,
}

impl Request {
    /// Makes a request for `n` whole cores close together, with the normal priority class and no other condition.
    #[must_use]
    pub fn of_cores(n: u32) -> Self {
        Self {
            amount: Amount::Cores(n),
            placement: Placement::Pack,
            class: PriorityClass::Normal,
            near: None,
            bind_memory: false,
            isolated: false,
        }
    }
}

/// Who chose the PUs of a grant: pjw, or the scheduler that started the job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum GrantedBy {
    /// pjw, from its pool.
    Warden,
    /// The scheduler of the job. pjw never widens such a grant.
    Scheduler,
}

/// A grant: the PUs that are given to a job, who chose them, and the reasons for the choice.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Grant {
    /// The PUs (logical CPUs) that the job holds by this grant.
    pub cpus: CpuSet,
    /// Who chose the PUs: pjw or the scheduler.
    pub granted_by: GrantedBy,
    /// Whether another job may hold some of the PUs too, because of `on_exhausted = "share"` or because a
    /// scheduler granted the same PUs twice. The pool then lists only the other job as the holder.
    pub shared: bool,
    /// Whether the grant was made while `share_smt` was on: SMT siblings may then serve two jobs.
    #[serde(default, rename = "by_pus")]
    pub smt_shared: bool,
    /// The time at which the PUs were granted, in ns since boot.
    #[serde(default)]
    pub since: Nanos,
    /// The reasons for the choice of the PUs, one sentence each, for `pjwctl explain`.
    pub because: Vec<String>,
    /// The second-best choice of PUs, described in a sentence; empty if there was none.
    pub runner_up: String,
}

/// When a job ends: with its last process, or, if it was created as a reservation before it had processes, by a
/// release or a timeout.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Lifetime {
    /// The job ends with its last member process (`run`, `assign --pid`, discovered jobs).
    Members,
    /// The job was created before its processes. It keeps its cores until it is released or the reservation
    /// times out.
    Reservation,
}

/// A job: a group of processes that belong together, with the cores that were requested for them and the cores that
/// they hold.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Job {
    /// The id of the job, such as `slurm:7`.
    pub id: JobId,
    /// The user that owns the job. It may release the job and change its request.
    pub owner: Uid,
    /// The request for cores. `None` if the number of cores is unknown; the job is then only observed.
    pub request: Option<Request>,
    /// The PUs that the job holds. `None` while the job waits for cores or is only observed.
    pub grant: Option<Grant>,
    /// Whether the job ends with its last process, or is a reservation that can exist without processes.
    pub lifetime: Lifetime,
    /// The path of the scheduler's cgroup for the job, as in `/proc/PID/cgroup`. `None` if no such cgroup was seen.
    pub cgroup: Option<String>,
    /// The login sessions whose processes all belong to the job (`assign --session`). Usually empty.
    pub sessions: BTreeSet<Pid>,
    /// The UTC time at which pjw first saw the job.
    pub since: UnixMillis,
    /// The time since which the job has no process, in ns since boot. `None` while it has processes. After
    /// `reservation_timeout` a reservation without processes ends.
    #[serde(default)]
    pub empty_since: Option<Nanos>,
    /// Whether the job was released while its scheduler still runs it. pjw leaves the threads of such
    /// a job alone until the scheduler ends the job, or a user assigns cores to it again.
    #[serde(default, rename = "let_go")]
    pub released: bool,
    /// Whether `pjwctl run` started the job. Its first process is then moved into the job's cpuset from any
    /// cgroup.
    #[serde(default)]
    pub launched: bool,
}

impl Job {
    /// Makes a job that has requested no cores and holds none. `since` is the time when the job was first seen.
    #[must_use]
    pub fn new(id: JobId, owner: Uid, lifetime: Lifetime, since: UnixMillis) -> Self {
        Self {
            id,
            owner,
            request: None,
            grant: None,
            lifetime,
            cgroup: None,
            sessions: BTreeSet::new(),
            since,
            empty_since: None,
            released: false,
            launched: false,
        }
    }

    /// Returns the grant of the job (the PUs that it holds) if the job's threads are kept on it. `None` if the job
    /// holds no PUs, or if it was released while its scheduler still runs it.
    #[must_use]
    pub fn active_grant(&self) -> Option<&Grant> {
        self.grant.as_ref().filter(|_| !self.released)
    }

    /// Returns the grant of the job (the PUs that it holds) if `granted_by` chose these PUs; else `None`.
    #[must_use]
    pub fn grant_by(&self, granted_by: GrantedBy) -> Option<&Grant> {
        self.grant.as_ref().filter(|grant| grant.granted_by == granted_by)
    }

    /// Returns the PUs that the job holds and that are online. `None` if the job holds no PUs, or if all of them are
    /// offline.
    #[must_use]
    pub fn online_cpus(&self, online: &CpuSet) -> Option<CpuSet> {
        self.grant.as_ref().map(|grant| grant.cpus.intersection(online)).filter(|cpus| !cpus.is_empty())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::string::ToString;

    #[test]
    fn ids_print_and_parse_as_source_and_name() {
        for text in ["slurm:123", "pbs:124[3].server", "flux:fABC", "manual:a", "manual:x:y"] {
            assert_eq!(text.parse::<JobId>().unwrap().to_string(), text);
        }
        assert_eq!("mytest".parse::<JobId>().unwrap().to_string(), "manual:mytest");
    }

    #[test]
    fn a_mistyped_source_is_an_error() {
        let error = "slrm:1".parse::<JobId>().unwrap_err().to_string();
        assert!(error.contains("\"slrm\" is not a source"), "{error}");
    }

    #[test]
    fn wrong_ids_are_refused_with_the_reason() {
        let cases = [
            ("", "empty"),
            ("slurm:", "empty"),
            ("a b", "' '"),
            ("a\nb", "'\\n'"),
            ("../../etc", "'/'"),
            ("é", "'é'"),
        ];
        for (text, expected) in cases {
            let error = text.parse::<JobId>().unwrap_err().to_string();
            assert!(error.contains(expected), "{text:?}: {error}");
        }
        let error = "x".repeat(10_000).parse::<JobId>().unwrap_err().to_string();
        assert!(error.contains("10000 characters") && error.len() < 120, "{error}");
        assert!("x".repeat(128).parse::<JobId>().is_ok());
    }
}
