//! Jobs: what a scheduler or a person calls a job, what it asked for, what it holds.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::cpuset::CpuSet;
use crate::process::{Pid, Uid};
use crate::snapshot::{Nanos, UnixMillis};
use crate::topology::Topology;

/// Where a job comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
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
    /// A person, by `pjwctl assign` or `pjwctl run`.
    Manual,
    /// A login session.
    Session,
}

impl Source {
    /// Every source, in the order in which they are listed anywhere.
    pub const ALL: [Source; 9] = [
        Source::Slurm,
        Source::Lsf,
        Source::Pbs,
        Source::Sge,
        Source::Condor,
        Source::Flux,
        Source::Oar,
        Source::Manual,
        Source::Session,
    ];

    /// Its name in job ids, config keys and JSON.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Source::Slurm => "slurm",
            Source::Lsf => "lsf",
            Source::Pbs => "pbs",
            Source::Sge => "sge",
            Source::Condor => "condor",
            Source::Flux => "flux",
            Source::Oar => "oar",
            Source::Manual => "manual",
            Source::Session => "session",
        }
    }

    /// Whether a batch system stands behind it, whose word about its jobs is law.
    #[must_use]
    pub fn is_scheduler(self) -> bool {
        !matches!(self, Source::Manual | Source::Session)
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A job's id: `source:name`. Names are whatever the scheduler uses (`123[4].srv`, `fABC`, `s1K…`), so they
/// are never numbers here.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct JobId {
    source: Source,
    name: String,
}

/// Why a text is not a job id.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum JobIdError {
    /// Nothing there.
    #[error("the job id is empty: name the job, as in mytest or slurm:123")]
    Empty,
    /// More than [`JobId::MAX_LENGTH`] characters.
    #[error("the job id is {length} characters long: at most {max} are allowed", max = JobId::MAX_LENGTH)]
    TooLong {
        /// Its length.
        length: usize,
    },
    /// A character outside the allowed set.
    #[error("the job id holds {character:?}: letters, digits and ._-:@+[] are allowed")]
    Character {
        /// The first such character.
        character: char,
    },
    /// A source this program doesn't know.
    #[error(
        "{source_name:?} is not a source of jobs: known are slurm, lsf, pbs, sge, condor, flux, oar, manual, session"
    )]
    UnknownSource {
        /// What stood before the colon.
        source_name: String,
    },
}

impl JobId {
    /// The most characters an id may have, its source not counted.
    pub const MAX_LENGTH: usize = 128;

    /// Makes an id after checking the name.
    ///
    /// # Errors
    /// If the name is empty, too long, or holds a character outside `[A-Za-z0-9._:@+\[\]-]`.
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

    /// Where the job comes from.
    #[must_use]
    pub fn source(&self) -> Source {
        self.source
    }

    /// The id without its source.
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

    /// `source:name`; without a known source in front, `manual:` is meant, as long as that leaves no doubt:
    /// `slrm:1` is refused, not taken for a manual job of that name.
    fn from_str(text: &str) -> Result<Self, JobIdError> {
        let Some((before, name)) = text.split_once(':') else { return Self::new(Source::Manual, text) };
        match Source::ALL.into_iter().find(|source| source.name() == before) {
            Some(source) => Self::new(source, name),
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
        let text = std::borrow::Cow::<'de, str>::deserialize(deserializer)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

/// How much a job matters when cores are short.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Class {
    /// Its cores are never lent out nor taken back.
    Guaranteed,
    /// The usual.
    #[default]
    Normal,
    /// Its cores may be taken back.
    Besteffort,
}

/// How cores are chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Placement {
    /// Close together: the fewest domains of the machine.
    #[default]
    Pack,
    /// Far apart: evenly over the domains.
    Spread,
    /// The caller names the PUs.
    Explicit,
}

/// How many or which cores.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Amount {
    /// Whole cores.
    Cores(u32),
    /// Logical CPUs, as Slurm counts where a core has several threads. Rounded up to whole cores unless the
    /// policy lets siblings serve two jobs.
    Pus(u32),
    /// Exactly these PUs.
    Exactly(CpuSet),
}

impl Amount {
    /// How many cores that is on this machine; where cores are of unequal size, at most.
    #[must_use]
    pub fn in_cores(&self, topology: &Topology) -> u32 {
        match self {
            Amount::Cores(count) => *count,
            Amount::Pus(count) => {
                let smallest = topology.cores().iter().map(|core| core.pus.len()).min().unwrap_or(1).max(1);
                count.div_ceil(u32::try_from(smallest).unwrap_or(1))
            }
            Amount::Exactly(cpus) => topology.cores_touched_by(cpus),
        }
    }
}

/// What a job asked for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Request {
    /// How many cores, or which.
    pub amount: Amount,
    /// How they are chosen.
    pub placement: Placement,
    /// How much the job matters.
    pub class: Class,
    /// The device that its cores should be near, by a name the machine knows it by; `None` if any place will do.
    #[serde(default)]
    pub near: Option<String>,
    /// Whether its memory is to come from the NUMA nodes of its cores only (`cpuset.mems`).
    #[serde(default)]
    pub bind_memory: bool,
    /// Whether its cores are to be a partition of their own (`cpuset.cpus.partition = isolated`).
    #[serde(default)]
    pub isolated: bool,
}

impl Request {
    /// `n` whole cores, packed, of normal class: the request most jobs make.
    #[must_use]
    pub fn cores(n: u32) -> Self {
        Self {
            amount: Amount::Cores(n),
            placement: Placement::Pack,
            class: Class::Normal,
            near: None,
            bind_memory: false,
            isolated: false,
        }
    }
}

/// Who decided which cores a job holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum GrantedBy {
    /// This program, from its pool.
    Warden,
    /// The job's scheduler; the warden never widens such a grant.
    Scheduler,
}

/// The cpuset a job holds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Grant {
    /// Its PUs.
    pub cpus: CpuSet,
    /// Who chose them.
    pub granted_by: GrantedBy,
    /// Whether another job holds some of them too (`on_exhausted = "share"`, or a scheduler that gave the same
    /// PUs twice). The ledger then names the other job.
    pub shared: bool,
    /// Whether it was made while SMT siblings could serve two jobs (`share_smt`).
    #[serde(default)]
    pub by_pus: bool,
    /// When it was given.
    #[serde(default)]
    pub since: Nanos,
    /// Why these: one sentence a line, for `explain`.
    pub because: Vec<String>,
    /// The second-best choice, in words; empty if there was no other.
    pub runner_up: String,
}

/// How long a job lives on without processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Lifetime {
    /// It ends with its last member (`run`, `assign --pid`, jobs found by discovery).
    Members,
    /// It was announced before its processes and keeps its cores until it is released or the reservation
    /// times out.
    Reservation,
}

/// A job.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Job {
    /// Its id.
    pub id: JobId,
    /// The user it belongs to.
    pub owner: Uid,
    /// What it asked for; `None` while nobody said how many cores it should have: then it is observed only.
    pub request: Option<Request>,
    /// What it holds; `None` while it waits for cores or is observed only.
    pub grant: Option<Grant>,
    /// How long it lives without members.
    pub lifetime: Lifetime,
    /// The scheduler's directory for it, if one was seen.
    pub cgroup: Option<String>,
    /// Sessions whose processes were registered as a whole (`assign --session`).
    pub sessions: BTreeSet<Pid>,
    /// When it was first known.
    pub since: UnixMillis,
    /// Since when it has had no member, for `reservation_timeout`; `None` while it has.
    #[serde(default)]
    pub empty_since: Option<Nanos>,
    /// Whether somebody released it though its scheduler still runs it: the warden leaves its threads alone until
    /// its scheduler ends it, or somebody assigns it cores again.
    #[serde(default)]
    pub let_go: bool,
    /// Whether `pjwctl run` started it: its first process asked to be moved, wherever it was.
    #[serde(default)]
    pub launched: bool,
}

impl Job {
    /// A job that nobody has served yet.
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
            let_go: false,
            launched: false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_print_and_parse_as_source_and_name() {
        for text in ["slurm:123", "pbs:124[3].server", "flux:fABC", "manual:a", "manual:x:y"] {
            assert_eq!(text.parse::<JobId>().unwrap().to_string(), text);
        }
        assert_eq!("mytest".parse::<JobId>().unwrap().to_string(), "manual:mytest");
    }

    #[test]
    fn a_mistyped_source_is_not_taken_for_a_name() {
        let error = "slrm:1".parse::<JobId>().unwrap_err().to_string();
        assert!(error.contains("\"slrm\" is not a source"), "{error}");
    }

    #[test]
    fn odd_ids_are_refused_with_the_reason() {
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
