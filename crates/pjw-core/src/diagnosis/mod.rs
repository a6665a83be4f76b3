//! Diagnosis: what is wrong on a node, and what to do about it, from facts alone.
//!
//! An [`Examination`] is everything that was looked at, a [`Finding`] one thing that a person should know, with its
//! remedy. Nothing here is carried out: `pjwctl doctor` prints it. [`watch`] makes the part about processes out of
//! two looks and the state that [`crate::reconcile`] makes of them, so that the doctor and the warden agree on who
//! belongs to which job.

mod contention;
mod facts;
mod host;
mod neighbours;
mod placement;
pub mod watch;
mod words;

use std::collections::{BTreeMap, BTreeSet};

use crate::cpuset::{CpuSet, Pu};
use crate::job::{Amount, GrantedBy, JobId};
use crate::process::{Comm, Pid, Uid};
use crate::topology::Topology;
use crate::wall::Ground;

pub use facts::{Fact, facts};
pub use host::masters;

/// A thread that wants a PU for at least this share of the time, in permille, is busy.
pub const BUSY_PERMILLE: u32 = 500;
/// A finding names no more processes than this; its text has their number.
const MOST_PIDS: usize = 20;
/// So many findings of one kind; one more says how many were left out.
const MOST_OF_A_KIND: usize = 8;

/// How urgent a finding is, most urgent first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Severity {
    /// Jobs suffer, or a promise is not kept.
    Problem,
    /// Something could be better.
    Advice,
    /// Nothing needs doing.
    Note,
}

impl Severity {
    /// Its name for scripts.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Severity::Problem => "problem",
            Severity::Advice => "advice",
            Severity::Note => "note",
        }
    }
}

/// One thing that a person should know.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// Its name for scripts.
    pub code: String,
    /// How urgent it is.
    pub severity: Severity,
    /// What is the matter, in a sentence.
    pub text: String,
    /// What to do.
    pub remedy: String,
    /// The jobs it concerns.
    pub jobs: BTreeSet<JobId>,
    /// The processes it concerns, the first of many.
    pub pids: BTreeSet<Pid>,
    /// The PUs it concerns.
    pub cpus: CpuSet,
}

impl Finding {
    /// A finding about the node.
    #[must_use]
    pub fn new(severity: Severity, code: &str, text: String, remedy: impl Into<String>) -> Self {
        Self {
            code: code.to_owned(),
            severity,
            text,
            remedy: remedy.into(),
            jobs: BTreeSet::new(),
            pids: BTreeSet::new(),
            cpus: CpuSet::new(),
        }
    }

    /// The same, about these jobs.
    #[must_use]
    pub fn of<'a>(mut self, jobs: impl IntoIterator<Item = &'a JobId>) -> Self {
        self.jobs = jobs.into_iter().cloned().collect();
        self
    }

    /// The same, about these PUs.
    #[must_use]
    pub fn on(mut self, cpus: &CpuSet) -> Self {
        self.cpus = cpus.clone();
        self
    }

    /// The same, about these processes.
    #[must_use]
    pub fn by(mut self, pids: impl IntoIterator<Item = Pid>) -> Self {
        let pids: BTreeSet<Pid> = pids.into_iter().collect();
        self.pids = pids.into_iter().take(MOST_PIDS).collect();
        self
    }
}

/// Everything that is judged.
#[derive(Debug, Clone)]
pub struct Examination {
    /// The machine.
    pub topology: Topology,
    /// Its PUs that are on.
    pub online: CpuSet,
    /// How long was watched, in ms.
    pub span_ms: u64,
    /// The jobs.
    pub jobs: Vec<JobSeen>,
    /// The processes of no job, without the kernel's and without the doctor.
    pub bystanders: Vec<Bystander>,
    /// The interrupts of devices.
    pub interrupts: Vec<Interrupt>,
    /// What the kernel and its administrator set up.
    pub host: HostFacts,
    /// Which programs are there that also move threads or narrow cpusets.
    pub masters: Vec<Master>,
    /// The batch systems that are here.
    pub schedulers: Vec<SchedulerSeen>,
    /// What the node offers for walls.
    pub ground: Ground,
    /// The warden.
    pub warden: WardenSeen,
    /// Who looks.
    pub viewer: Uid,
    /// The lowest user id of a person.
    pub first_person_uid: u32,
}

/// A job, as two looks found it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JobSeen {
    /// Which.
    pub id: JobId,
    /// Whose.
    pub owner: Uid,
    /// What it asked for; `None` if nobody says.
    pub amount: Option<Amount>,
    /// The PUs it holds by its scheduler's cpuset, or by a warden that runs; `None` if it holds none.
    pub holds: Option<(CpuSet, GrantedBy)>,
    /// What a warden would give it.
    pub would_get: Option<CpuSet>,
    /// How many processes it has.
    pub processes: usize,
    /// Its threads.
    pub threads: Vec<ThreadSeen>,
    /// Processes of it that are not in the cgroup that its scheduler made for it.
    pub outside: Vec<Pid>,
    /// Its scheduler's cgroup for it, if one was seen.
    pub cgroup: Option<String>,
    /// Whether that has a cpuset; `None` if nobody could look.
    pub has_cpuset: Option<bool>,
    /// How a warden that runs keeps it: `cpuset`, `affinity` or `none`; empty if none does.
    pub kept_by: String,
}

/// A thread, as two looks found it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ThreadSeen {
    /// Its process.
    pub pid: Pid,
    /// Where it may run.
    pub allowed: CpuSet,
    /// The PU it was on last.
    pub last_cpu: Pu,
    /// How much it ran or wanted to, in permille of one PU.
    pub wanted: u32,
    /// How much it ran, in permille of one PU.
    pub ran: u32,
}

impl ThreadSeen {
    /// Whether it wants a PU most of the time.
    #[must_use]
    pub fn is_busy(&self) -> bool {
        self.wanted >= BUSY_PERMILLE
    }
}

/// A process of no job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bystander {
    /// Its number.
    pub pid: Pid,
    /// Its user.
    pub uid: Uid,
    /// Its name.
    pub comm: Comm,
    /// Whether it is a scheduler's own, beside its jobs.
    pub staff: bool,
    /// Its threads; where there were too many processes to look at each thread, the first one's mask alone.
    pub threads: Vec<ThreadSeen>,
}

/// A device's interrupt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Interrupt {
    /// Its number.
    pub number: u32,
    /// Its device or action, as the kernel names it.
    pub name: String,
    /// Where it is sent (`effective_affinity_list`, or else `smp_affinity_list`).
    pub sent_to: CpuSet,
    /// How often it came while it was watched, on each PU on which it did.
    pub came: BTreeMap<Pu, u64>,
}

/// What the kernel and its administrator set up.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostFacts {
    /// The kernel's release.
    pub kernel: String,
    /// The cgroup layout: v1, v2, hybrid or none.
    pub layout: String,
    /// Where the cpuset controller is, in words.
    pub cpuset: String,
    /// Pressure stall information (`/proc/pressure`).
    pub psi: bool,
    /// Wait times of threads (`schedstat`).
    pub schedstat: bool,
    /// Why the kernel doesn't tell of new processes; `None` if it does.
    pub no_events: Option<String>,
    /// Type information for BPF programs.
    pub btf: bool,
    /// PUs that were taken from the kernel's balancing at boot (`isolcpus=`).
    pub isolated: CpuSet,
    /// PUs without the timer tick (`nohz_full=`).
    pub nohz_full: CpuSet,
    /// Whether the kernel moves memory after threads; `None` if it can't.
    pub numa_balancing: Option<bool>,
    /// Whether sessions are scheduled as groups; `None` if it can't.
    pub autogroup: Option<bool>,
    /// State of SMT (`on`, `off`, `forceoff`, `notsupported`, …); empty if unknown.
    pub smt: String,
    /// Frequency governors, with their PUs; empty where there are none.
    pub governors: BTreeMap<String, CpuSet>,
    /// Whether this is a pid namespace, as of a container: the kernel's own threads are not seen then.
    pub container: bool,
    /// Whether other users' processes are hidden (`hidepid=`).
    pub hides_processes: bool,
    /// Why some processes could not be looked at.
    pub blind: Option<String>,
}

/// A program that also decides where threads run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Master {
    /// What it is called.
    pub name: String,
    /// Its process, if it is one.
    pub pid: Option<Pid>,
    /// What it does that gets in the way; a part of a sentence.
    pub does: &'static str,
    /// What to do about it.
    pub remedy: &'static str,
    /// Whether it undoes what a warden does, or only may.
    pub clashes: bool,
}

/// How a batch system keeps its jobs on their cores.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Binding {
    /// By cpusets of its own: these are law.
    Cpusets,
    /// By masks at the start of each job.
    Masks,
    /// Not at all.
    Nothing,
    /// Nobody could read how.
    Unknown,
}

/// A batch system on this node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SchedulerSeen {
    /// What it is called.
    pub name: String,
    /// How it binds.
    pub binding: Binding,
    /// What that means for a warden, in a sentence.
    pub meaning: String,
}

/// The warden, as far as it answers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WardenSeen {
    /// Nobody is there; where it was looked for and how to start it, in a sentence.
    Absent(String),
    /// It is there and doesn't answer; why, with the remedy.
    Mute(String),
    /// It answers.
    Answers {
        /// Its version.
        version: String,
        /// The version of who asks.
        own_version: String,
        /// Whether it only looks.
        observes: bool,
        /// What it warns of.
        warnings: Vec<Finding>,
    },
}

impl JobSeen {
    /// Where its threads may run, without those that are outside what it holds: they are a finding of their own.
    #[must_use]
    pub fn reach(&self, online: &CpuSet) -> CpuSet {
        let mut reach = CpuSet::new();
        for thread in &self.threads {
            if self.holds.as_ref().is_none_or(|(cpus, _)| thread.allowed.is_subset(cpus)) {
                reach = reach.union(&thread.allowed);
            }
        }
        reach.intersection(online)
    }

    /// How many of its threads are busy.
    #[must_use]
    pub fn busy(&self) -> usize {
        self.threads.iter().filter(|thread| thread.is_busy()).count()
    }
}

/// Judges, most urgent findings first.
#[must_use]
pub fn diagnose(exam: &Examination) -> Vec<Finding> {
    let mut findings = Vec::new();
    contention::judge(exam, &mut findings);
    placement::judge(exam, &mut findings);
    neighbours::judge(exam, &mut findings);
    host::judge(exam, &mut findings);
    heed_warden(exam, &mut findings);
    tell_once(&mut findings);
    findings.sort_by_key(|finding| finding.severity);
    findings
}

/// The warden's own warnings, without those that were found here too.
fn heed_warden(exam: &Examination, findings: &mut Vec<Finding>) {
    let WardenSeen::Answers { warnings, .. } = &exam.warden else { return };
    for warning in warnings {
        let known = findings.iter().any(|finding| {
            finding.code == warning.code
                && (warning.jobs.is_empty() || finding.jobs.is_superset(&warning.jobs))
        });
        if !known {
            findings.push(warning.clone());
        }
    }
}

/// Who is outside the CPUs is outside the cgroup too: one of the two is enough.
fn tell_once(findings: &mut Vec<Finding>) {
    let outside: Vec<Finding> =
        findings.iter().filter(|finding| finding.code == contention::OUTSIDE).cloned().collect();
    let is_told = |finding: &Finding| {
        outside.iter().any(|other| other.jobs == finding.jobs && other.pids.is_superset(&finding.pids))
    };
    findings.retain(|finding| {
        finding.code != placement::OUTSIDE_CGROUP || finding.pids.is_empty() || !is_told(finding)
    });
}

/// Keeps the first of a kind, and says how many were left out.
fn keep_few(mut found: Vec<Finding>, findings: &mut Vec<Finding>) {
    found.sort_by_key(|finding| finding.severity);
    let left_out = found.len().saturating_sub(MOST_OF_A_KIND);
    let more = found.get(MOST_OF_A_KIND).map(|next| {
        let text = format!("{left_out} more of this kind ({})", next.code);
        Finding::new(next.severity, &next.code, text, "deal with those above first, then look again")
    });
    findings.extend(found.into_iter().take(MOST_OF_A_KIND));
    findings.extend(more);
}

#[cfg(test)]
mod tests;
