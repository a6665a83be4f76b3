//! Whether jobs lie well: their counts, whole cores, one NUMA node, their scheduler's cgroup and its cpuset.

use std::collections::{BTreeMap, BTreeSet};

use super::words::{count, several};
use super::{Binding, Examination, Finding, JobSeen, Severity, keep_few};
use crate::cpuset::{CpuSet, Pu};
use crate::explain::named;
use crate::job::{GrantedBy, JobId};
use crate::topology::Level;
use crate::wall::Cpusets;

/// Members outside the cgroup that their scheduler made.
pub(super) const OUTSIDE_CGROUP: &str = "outside-cgroup";

pub(super) fn judge(exam: &Examination, findings: &mut Vec<Finding>) {
    findings.extend(unknown_counts(exam));
    keep_few(exam.jobs.iter().filter_map(outside_cgroup).collect(), findings);
    findings.extend(without_cpuset(exam));
    findings.extend(without_wall(exam));
    let places = Places::new(exam);
    keep_few(
        places.kept.iter().filter_map(|(job, own)| half_cores(exam, &places, job, own)).collect(),
        findings,
    );
    keep_few(places.kept.iter().filter_map(|(job, own)| spread(&places, job, own)).collect(), findings);
}

/// Where each job is kept, and who is on each PU: made once, since a node may have thousands of jobs and of PUs.
struct Places<'a> {
    /// The jobs that are kept somewhere, and their PUs.
    kept: Vec<(&'a JobSeen, CpuSet)>,
    on: BTreeMap<Pu, BTreeSet<&'a JobId>>,
    /// NUMA nodes with PUs, by number.
    nodes: Vec<(u32, CpuSet)>,
    taken: CpuSet,
}

impl<'a> Places<'a> {
    fn new(exam: &'a Examination) -> Self {
        let kept: Vec<_> = exam.jobs.iter().filter_map(|job| Some((job, kept_on(exam, job)?))).collect();
        let mut on: BTreeMap<Pu, BTreeSet<&JobId>> = BTreeMap::new();
        for (job, cpus) in &kept {
            for pu in cpus.iter() {
                on.entry(pu).or_default().insert(&job.id);
            }
        }
        let taken = on.keys().copied().collect();
        let nodes = exam
            .topology
            .domains(Level::NumaNode)
            .map(|node| (node.number, exam.topology.home_of(node).intersection(&exam.online)))
            .filter(|(_, cpus)| !cpus.is_empty())
            .collect();
        Self { kept, on, nodes, taken }
    }
}

/// The PUs that a job is kept on, if it is.
fn kept_on(exam: &Examination, job: &JobSeen) -> Option<CpuSet> {
    if let Some((cpus, _)) = &job.holds {
        return Some(cpus.intersection(&exam.online));
    }
    let reach = job.reach(&exam.online);
    (!reach.is_empty() && !exam.online.is_subset(&reach)).then_some(reach)
}

fn unknown_counts(exam: &Examination) -> Option<Finding> {
    let jobs: BTreeSet<&JobId> = exam
        .jobs
        .iter()
        .filter(|job| job.amount.is_none() && job.holds.is_none())
        .map(|job| &job.id)
        .collect();
    let first = jobs.first()?;
    let text = format!("nobody says how many cores {} should have", several(&jobs));
    let source = first.source();
    let cause = if exam.viewer.0 == 0 {
        ""
    } else {
        "look as root first: environments of others can't be read otherwise; "
    };
    let remedy = format!(
        "{cause}set cores = N under [sources.{source}] in pjwd.toml, or: pjwctl assign {first} --cores N"
    );
    Some(Finding::new(Severity::Advice, "unknown-count", text, remedy).of(jobs))
}

fn outside_cgroup(job: &JobSeen) -> Option<Finding> {
    let first = job.outside.first()?;
    let (left, they) = if job.outside.len() == 1 { ("is", "it") } else { ("are", "them") };
    let text = format!(
        "{} of {} {left} outside the cgroup of its scheduler, whose accounting and kill miss {they}",
        count(job.outside.len(), "process"),
        job.id
    );
    let remedy = format!(
        "pjwctl explain {first}; a login may have moved {they} (pam_systemd, su, systemd-run --user): use \
         pam_slurm_adopt or its like; pjwd keeps {they} on the job's cores meanwhile"
    );
    Some(
        Finding::new(Severity::Problem, OUTSIDE_CGROUP, text, remedy)
            .of([&job.id])
            .by(job.outside.iter().copied()),
    )
}

/// Jobs whose scheduler says that it keeps them by cpusets, or whose cgroup could have one, and has none.
fn without_cpuset(exam: &Examination) -> Option<Finding> {
    let bare: BTreeSet<&JobId> =
        exam.jobs.iter().filter(|job| job.has_cpuset == Some(false)).map(|job| &job.id).collect();
    let first = bare.first()?;
    let promised = exam.schedulers.iter().find(|scheduler| {
        scheduler.binding == Binding::Cpusets && scheduler.name.eq_ignore_ascii_case(first.source().name())
    });
    let text = match promised {
        Some(scheduler) => format!(
            "{} is set up to keep jobs by cpusets, but the cgroup of {} has none",
            scheduler.name,
            several(&bare)
        ),
        None => {
            format!("the cgroup of {} has no cpuset: only masks can keep it on its cores", several(&bare))
        }
    };
    let severity = if promised.is_some() { Severity::Problem } else { Severity::Note };
    let remedy = "the cpuset controller is missing from cgroup.subtree_control above it: a systemctl daemon-reload \
                  drops it where no unit asks; give the scheduler's unit Delegate=yes and restart it when no job runs";
    Some(Finding::new(severity, "no-cpuset-controller", text, remedy).of(bare))
}

/// Jobs that a warden keeps by masks, though it could build walls.
fn without_wall(exam: &Examination) -> Option<Finding> {
    if matches!(exam.ground.cpusets, Cpusets::Nowhere { .. }) {
        return None;
    }
    let open: BTreeSet<&JobId> =
        exam.jobs.iter().filter(|job| job.kept_by == "affinity").map(|job| &job.id).collect();
    let first = open.first()?;
    let text = format!("{} kept by masks, though this node has cpusets", is_or_are(&open));
    let remedy = format!(
        "nothing, if masks will do; pjwctl explain {first} tells why it has no wall, enforcement = \"cpuset\" in \
         pjwd.toml warns of it"
    );
    Some(Finding::new(Severity::Note, "no-wall", text, remedy).of(open))
}

fn is_or_are(jobs: &BTreeSet<&JobId>) -> String {
    format!("{} {}", several(jobs), if jobs.len() == 1 { "is" } else { "are" })
}

/// A core of which a job has some PUs and not all.
fn half_cores(exam: &Examination, places: &Places<'_>, job: &JobSeen, own: &CpuSet) -> Option<Finding> {
    let siblings: CpuSet = own
        .iter()
        .flat_map(|pu| exam.topology.core_of(pu).iter().collect::<Vec<_>>())
        .filter(|&pu| !own.contains(pu) && exam.online.contains(pu))
        .collect();
    if siblings.is_empty() {
        return None;
    }
    let company: BTreeSet<&JobId> =
        siblings.iter().filter_map(|pu| places.on.get(&pu)).flatten().copied().collect();
    // Each pair is told once, by the job that comes first.
    if company.first().is_some_and(|other| **other < job.id) {
        return None;
    }
    let remedy = match job.holds {
        Some((_, GrantedBy::Scheduler)) => {
            "have the scheduler give whole cores (Slurm: CR_Core, or --hint=nomultithread)"
        }
        _ => "leave share_smt = false in pjwd.toml and assign by --cores, not by --cpus",
    };
    let (severity, text) = if company.is_empty() {
        let text = format!(
            "{} has half of some cores: {} next to it {} nobody's",
            job.id,
            named(&siblings),
            if siblings.len() == 1 { "is" } else { "are" }
        );
        (Severity::Note, text)
    } else {
        let text = format!(
            "{} shares cores with {}: {} next to its own",
            job.id,
            several(&company),
            named(&siblings)
        );
        (Severity::Advice, text)
    };
    Some(
        Finding::new(severity, "half-core", text, remedy)
            .of(company.into_iter().chain([&job.id]))
            .on(&siblings),
    )
}

/// A job on several NUMA nodes that would fit in one.
fn spread(places: &Places<'_>, job: &JobSeen, own: &CpuSet) -> Option<Finding> {
    let nodes = &places.nodes;
    let on: Vec<u32> =
        nodes.iter().filter(|(_, cpus)| cpus.intersects(own)).map(|(number, _)| *number).collect();
    let mut fits = nodes.iter().filter(|(_, cpus)| cpus.len() >= own.len()).peekable();
    if on.len() < 2 || fits.peek().is_none() {
        return None;
    }
    let shared = |pu: &Pu| places.on.get(pu).is_some_and(|jobs| jobs.len() > 1);
    let others = places.taken.difference(own).union(&own.iter().filter(shared).collect());
    let room = fits.find(|(_, cpus)| cpus.difference(&others).len() >= own.len());
    let text = format!(
        "{} lies on NUMA nodes {} and would fit in one{}",
        job.id,
        several(&on),
        room.map_or_else(
            || ", but none has room now".to_owned(),
            |(number, _)| format!("; node {number} has room")
        )
    );
    let remedy = match job.holds {
        Some((_, GrantedBy::Warden)) => {
            "pjwctl plan --defrag shows which jobs would move; pjwctl defrag moves them"
        }
        Some((_, GrantedBy::Scheduler)) => {
            "ask its scheduler for one socket (Slurm: --ntasks-per-socket, --sockets-per-node=1)"
        }
        None => {
            "bind it to one node, or let pjwd choose: it takes the smallest part of the machine that fits"
        }
    };
    let severity = if room.is_some() { Severity::Advice } else { Severity::Note };
    Some(Finding::new(severity, "spread", text, remedy).of([&job.id]).on(own))
}
