//! Jobs: their ids, their requests and their grants.

use core::fmt;
use core::str::FromStr;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::basics::{CpuSet, Nanos, Pid, Uid, UnixMillis, prelude::*};
use crate::machine::{NumaNodeRule, Topology};

mod grant;
mod provision;
mod wanted_cores;

pub use grant::{Grant, GrantedBy, Ownership};
pub use provision::{Provision, ProvisionRule, ProvisionRuleError};
pub use wanted_cores::WantedCores;

/// What started a job: a batch system, a user's command, or a login session. The name of the source is the
/// first part of a job id, such as `slurm` in `slurm:7`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[derive(strum::Display, strum::IntoStaticStr, strum::VariantArray)]
#[strum(serialize_all = "kebab-case")]
pub enum JobSource {
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
    /// A user's command: `pjwctl assign`, `pjwctl run` or `pjwctl spawn`.
    Manual,
    /// A login session.
    Session,
}

impl JobSource {
    /// All sources of jobs, in the order in which they are shown to users.
    pub const ALL: &[Self] = <Self as strum::VariantArray>::VARIANTS;

    /// Returns the name of the source in job ids, config keys and JSON, such as `slurm`.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.into()
    }

    /// Whether the source of the job is a batch system, such as Slurm. False if a user's command (`Manual`) or
    /// a login session (`Session`) started the job.
    #[must_use]
    pub fn is_batch_system(self) -> bool {
        !matches!(self, JobSource::Manual | JobSource::Session)
    }
}

/// The id of a job, written `SOURCE:NAME`, such as `slurm:7`. `SOURCE` is the name of a [`JobSource`]. `NAME`
/// is the id that the batch system gave to the job, and not the label that Slurm calls job name. For a job
/// that a user created, `NAME` is the name that the user chose. `NAME` need not be a number: PBS has job ids
/// such as `123[4].srv`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct JobId {
    source: JobSource,
    name: String,
}

/// The reason why a text is not a valid job id. A job id is written `SOURCE:NAME`, such as `slurm:7`, with the name of
/// a [`JobSource`] as `SOURCE`. A text without a colon is the `NAME` of a job that a user created. A text with a colon
/// but without a valid `SOURCE` is first checked as if the whole text were a `NAME`. The reason is
/// [`JobIdError::UnknownSource`] only if this check finds no mistake.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum JobIdError {
    /// The part `NAME` of the job id, which is written `SOURCE:NAME` or `NAME`, is empty.
    #[error("the job id is empty: name the job, as in mytest or slurm:123")]
    Empty,
    /// The part `NAME` of the job id has more than [`JobId::MAX_NAME_LENGTH`] characters.
    #[error("the job id is {length} characters long: at most {max} are allowed", max = JobId::MAX_NAME_LENGTH)]
    TooLong {
        /// The number of characters in the part `NAME`.
        length: usize,
    },
    /// The part `NAME` of the job id contains a character that is not allowed.
    #[error("the job id holds {character:?}: letters, digits and ._-:@+[] are allowed")]
    InvalidCharacter {
        /// The first character of the part `NAME` that is not allowed.
        character: char,
    },
    /// The text contains a colon, and the part before the first colon is not the name of a [`JobSource`].
    #[error(
        "{source_name:?} is not a source of jobs: known are slurm, lsf, pbs, sge, condor, flux, oar, manual, session"
    )]
    UnknownSource {
        /// The part of the text before the first colon.
        source_name: String,
    },
}

impl JobId {
    /// The maximum number of characters in the name of a job (the part of the id after the first colon). For
    /// a longer name, [`JobId::new`] returns [`JobIdError::TooLong`].
    pub const MAX_NAME_LENGTH: usize = 128;

    /// Makes a job id from its two parts. `source` is the system that started the job. `name` is the id that
    /// this system gave to the job, such as `7` for Slurm, or the name that a user chose for a job of their
    /// own.
    ///
    /// # Errors
    /// If the name is empty, if it has more than [`JobId::MAX_NAME_LENGTH`] characters, or if it has a
    /// character outside `[A-Za-z0-9._:@+\[\]-]`.
    pub fn new(source: JobSource, name: &str) -> Result<Self, JobIdError> {
        if name.is_empty() {
            return Err(JobIdError::Empty);
        }
        let length = name.chars().count();
        if length > Self::MAX_NAME_LENGTH {
            return Err(JobIdError::TooLong { length });
        }
        let is_allowed = |c: char| c.is_ascii_alphanumeric() || "._-:@+[]".contains(c);
        match name.chars().find(|&c| !is_allowed(c)) {
            Some(character) => Err(JobIdError::InvalidCharacter { character }),
            None => Ok(Self { source, name: name.to_owned() }),
        }
    }

    /// Returns the system that started the job, such as Slurm. A job id begins with the name of this system.
    #[must_use]
    pub fn source(&self) -> JobSource {
        self.source
    }

    /// Returns the part of the job id after the first colon: `7` for `slurm:7`. This is the id that the batch
    /// system gave to the job, and not the label that Slurm calls job name. For a job that a user created, this
    /// part is the name that the user chose.
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

    /// Parses `source:name`. A text without a colon is the name of a manual job. A text with an unknown source
    /// before the colon is an error, such as `slrm:1`.
    fn from_str(text: &str) -> Result<Self, JobIdError> {
        let Some((before, name)) = text.split_once(':') else { return Self::new(JobSource::Manual, text) };
        match JobSource::ALL.iter().find(|source| source.name() == before) {
            Some(&source) => Self::new(source, name),
            None => {
                Self::new(JobSource::Manual, text)?;
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

/// The priority class of a job: guaranteed, normal or besteffort. The class says whether the job has cores of
/// its own, and whether pjw may lend these cores to other jobs while the job leaves them idle.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PriorityClass {
    /// The job has cores of its own. pjw may lend idle ones of these cores to jobs of the class `Besteffort`, and takes
    /// them back when the job needs them. pjw does not move the job to other cores to reduce fragmentation.
    Guaranteed,
    /// The default class. The job has cores of its own. pjw never lends these cores. pjw may move the job to other
    /// cores to reduce fragmentation, if an administrator requests this.
    #[default]
    Normal,
    /// The job has no cores of its own. It runs on free cores and on cores that jobs of the class
    /// `Guaranteed` leave idle, at idle priority.
    Besteffort,
}

/// The rule by which the cores for a job are chosen: close together, spread over the machine, or as listed by
/// the user.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Placement {
    /// Close together: in as few packages, NUMA nodes and L3 caches as possible.
    #[default]
    Pack,
    /// Spread evenly over the packages, NUMA nodes and L3 caches.
    Spread,
    /// Exactly the PUs that the user listed.
    Explicit,
}

/// The CPUs that a job requests: a number of cores, a number of PUs (logical CPUs), or an explicit list of
/// PUs.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CpuRequest {
    /// This number of whole cores.
    Cores(u32),
    /// This number of PUs (logical CPUs). Slurm counts in PUs on machines with SMT. pjw rounds the number up
    /// to whole cores, unless the config key `share_smt` is on.
    Pus(u32),
    /// Exactly these PUs.
    Exactly(CpuSet),
}

impl CpuRequest {
    /// Returns whether the request is for no CPU at all: for 0 cores, 0 PUs (logical CPUs) or an empty list of PUs.
    pub(crate) fn requests_no_cpus(&self) -> bool {
        match self {
            CpuRequest::Cores(count) | CpuRequest::Pus(count) => *count == 0,
            CpuRequest::Exactly(cpus) => cpus.is_empty(),
        }
    }

    /// Returns the number of cores that this request needs on the machine with this topology:
    ///
    /// - For a number of cores, the result is this number.
    /// - For a number of PUs (logical CPUs), the result is this number divided by the PU count of the smallest core of
    ///   the machine, rounded up. If the job gets larger cores, fewer cores may be enough.
    /// - For a list of PUs, the result is the number of cores that have at least one of these PUs.
    #[must_use]
    pub fn core_count(&self, topology: &Topology) -> u32 {
        match self {
            CpuRequest::Cores(count) => *count,
            CpuRequest::Pus(count) => {
                let smallest = topology.cores().iter().map(|core| core.pus.len()).min().unwrap_or(1).max(1);
                count.div_ceil(u32::try_from(smallest).unwrap_or(1))
            }
            CpuRequest::Exactly(cpus) => topology.overlapping_core_count(cpus),
        }
    }
}

/// The request of a job: the number or list of CPUs, the rule by which the cores are chosen, and properties
/// that the cores should have.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobRequest {
    /// The requested number of cores or PUs, or the requested list of PUs.
    #[serde(rename = "amount")]
    pub cpu_request: CpuRequest,
    /// The rule by which the cores are chosen: close together, spread, or as listed.
    pub placement: Placement,
    /// The priority class of the job.
    pub class: PriorityClass,
    /// The name or the PCI address of a device near which the cores should be. `None` for no preference.
    #[serde(default, rename = "near")]
    pub near_device: Option<String>,
    /// Whether memory is allocated only from the NUMA nodes of the job's cores (`cpuset.mems`).
    #[serde(default)]
    pub bind_memory: bool,
    /// Whether the job's cores become an isolated partition (`cpuset.cpus.partition = isolated`).
    #[serde(default)]
    pub isolated: bool,
    /// The rule by which a NUMA node is chosen for each new process of a job with cores in several NUMA nodes.
    #[serde(default, skip_serializing_if = "NumaNodeRule::is_default")]
    pub within_job: NumaNodeRule,
}

impl JobRequest {
    /// Makes a request for `core_count` whole cores that are close together. The priority class is normal, and
    /// no further property is requested.
    #[must_use]
    pub fn with_core_count(core_count: u32) -> Self {
        Self {
            cpu_request: CpuRequest::Cores(core_count),
            placement: Placement::Pack,
            class: PriorityClass::Normal,
            near_device: None,
            bind_memory: false,
            isolated: false,
            within_job: NumaNodeRule::Default,
        }
    }
}

/// The condition under which a job ends. A command can release any job earlier, whatever its end condition is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum EndCondition {
    /// The job ends when its last process has exited. This holds for jobs of batch systems, and for jobs that
    /// `pjwctl run` or `pjwctl assign --pid` created.
    #[serde(rename = "members")]
    LastProcessExit,
    /// The job is a reservation: it was created before it had processes. It ends when it has had no process for the
    /// time `reservation_timeout` of the configuration.
    #[serde(rename = "reservation")]
    Timeout,
    /// The job is a provision: cores that are promised to a service. Only a command ends it, or the removal of its
    /// entry from the configuration file.
    #[serde(rename = "provision")]
    Release,
}

/// A job: a group of processes that belong together, with the cores that the job requests and the PUs (logical CPUs)
/// that are granted to the job.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Job {
    /// The id of the job, such as `slurm:7`.
    pub id: JobId,
    /// The user that owns the job. The owner may release the job and change its request.
    pub owner: Uid,
    /// The request of the job. `None` if the number of cores that the job needs is unknown. pjw then grants
    /// no cores to the job and does not restrict it, but shows its processes.
    pub request: Option<JobRequest>,
    /// The PUs that are granted to the job. `None` if the job waits for cores, or if pjw only observes the
    /// job.
    pub grant: Option<Grant>,
    /// The condition under which the job ends without a command: with its last process, after a time without
    /// processes, or never.
    #[serde(rename = "lifetime")]
    pub end_condition: EndCondition,
    /// The path of the cgroup that the batch system made for the job, as in `/proc/PID/cgroup`. `None` if no
    /// such cgroup was found.
    pub cgroup: Option<String>,
    /// The ids of the sessions (setsid(2)) that were assigned to the job by `assign --session`. Usually
    /// empty.
    pub sessions: BTreeSet<Pid>,
    /// The UTC time at which pjw detected or created the job. The job may have started or got its PUs at
    /// another time.
    #[serde(rename = "since")]
    pub detected_at: UnixMillis,
    /// The time since which the job has had no process, in ns since boot. `None` while the job has processes.
    /// A reservation (see [`EndCondition`]) ends if it has had no process for the time `reservation_timeout` of
    /// the policy.
    #[serde(default)]
    pub empty_since: Option<Nanos>,
    /// Whether a command (`pjwctl release`) released the job while its batch system still runs the job. pjw
    /// then does not change the job's threads, until the batch system ends the job or a user assigns cores to
    /// the job again.
    #[serde(default, rename = "let_go")]
    pub was_released: bool,
    /// Whether `pjwctl run` started the job. pjw then moves the first process of the job into the job's
    /// cpuset, whatever cgroup contains the process.
    #[serde(rename = "launched", default)]
    pub started_by_pjwctl_run: bool,
    /// The number of cores that the job can use at present, as its owner or a program in the job reported it to
    /// pjw. `None` if neither reported a number: the job then wants the cores of its grant.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wanted_cores: Option<WantedCores>,
    /// The properties of the provision, if the job is a provision (cores that are promised to a service).
    /// `None` for other jobs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub provision: Option<Box<Provision>>,
}

impl Job {
    /// Makes a job without a request and without PUs (logical CPUs). `owner` is the user id of the owner, and
    /// `end_condition` says when the job ends. `detected_at` is the UTC time at which pjw detected or created the job.
    #[must_use]
    pub fn new(id: JobId, owner: Uid, end_condition: EndCondition, detected_at: UnixMillis) -> Self {
        Self {
            id,
            owner,
            request: None,
            grant: None,
            end_condition,
            cgroup: None,
            sessions: BTreeSet::new(),
            detected_at,
            empty_since: None,
            was_released: false,
            started_by_pjwctl_run: false,
            wanted_cores: None,
            provision: None,
        }
    }

    /// Returns the grant of the job: the PUs (logical CPUs) to which pjw restricts the threads of the job. `None` if
    /// the job has no grant, or if a command released the job.
    ///
    /// A batch system may still run a released job. The job then still holds the PUs that the batch system
    /// chose, but pjw does not restrict the threads of the job.
    #[must_use]
    pub fn active_grant(&self) -> Option<&Grant> {
        self.grant.as_ref().filter(|_| !self.was_released)
    }

    /// Whether the priority class of the job is besteffort. Such a job has no cores of its own. It borrows
    /// cores that are free, and cores that other jobs leave idle.
    #[must_use]
    pub fn is_borrower(&self) -> bool {
        self.has_priority_class(PriorityClass::Besteffort)
    }

    /// Returns whether the job requested the priority class `class`. False if the job has no request.
    pub(crate) fn has_priority_class(&self, class: PriorityClass) -> bool {
        self.request.as_ref().is_some_and(|request| request.class == class)
    }

    /// Returns the grant of the job if `granted_by` chose its PUs (logical CPUs). `granted_by` is pjw or the batch
    /// system. Returns `None` if the job has no grant, or if [`Grant::granted_by`] is different.
    #[must_use]
    pub fn grant_chosen_by(&self, granted_by: GrantedBy) -> Option<&Grant> {
        self.grant.as_ref().filter(|grant| grant.granted_by == granted_by)
    }

    /// Returns the grant of the job if pjw chose its PUs (logical CPUs) and the job owns them. Returns `None` for a job
    /// that borrows its PUs.
    pub(crate) fn owned_grant(&self) -> Option<&Grant> {
        self.grant_chosen_by(GrantedBy::Warden).filter(|grant| grant.ownership == Ownership::Owned)
    }

    /// Returns the upper limit for the number of wanted cores of the job. A user (`pjwctl want`) or a program in the
    /// job reports to pjw how many cores the job can use at present ([`WantedCores`]). If the reported number is above
    /// the limit, pjw uses the limit instead:
    ///
    /// - For a job of the class besteffort that belongs to root, the limit is the number of cores of the machine.
    /// - For any other job of the class besteffort, the limit is the number of cores that the job requested.
    /// - For any other job, the limit is the number of cores that the job requested or holds, whichever is larger.
    ///
    /// Returns `None` if the job has no request and holds no cores.
    #[must_use]
    pub fn max_wanted_cores(&self, topology: &Topology) -> Option<u32> {
        if self.is_borrower() && self.owner == Uid::ROOT {
            return Some(u32::try_from(topology.cores().len()).unwrap_or(u32::MAX));
        }
        let requested = self.request.as_ref().map(|request| request.cpu_request.core_count(topology));
        // What a borrower has changes all the time, and a borrower that can borrow nothing may run on shared cores.
        let own = self.grant.as_ref().filter(|grant| grant.ownership == Ownership::Owned);
        requested.max(own.map(|grant| topology.overlapping_core_count(&grant.cpus)))
    }

    /// Returns the number of cores that the job can use at present, as a user (`pjwctl want`) or a program in
    /// the job reported it to pjw. The result is at most [`Job::max_wanted_cores`]. `None` if neither reported a
    /// number: the job can then use all cores that it holds.
    #[must_use]
    pub fn wanted_core_count(&self, topology: &Topology) -> Option<u32> {
        let reported = self.wanted_cores?.count;
        Some(self.max_wanted_cores(topology).map_or(reported, |limit| reported.min(limit)))
    }

    /// Returns the online PUs (logical CPUs) of the job's grant. `online` is the set of the online PUs of the machine.
    /// Returns `None` if the job has no grant, or if all PUs of the grant are offline.
    #[must_use]
    pub fn online_granted_cpus(&self, online: &CpuSet) -> Option<CpuSet> {
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
