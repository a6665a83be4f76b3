//! What the node is, in sentences: the background of the findings.

use std::collections::BTreeSet;

use super::words::{count, several};
use super::{Examination, WardenSeen};
use crate::explain::named;
use crate::process::Uid;
use crate::topology::Level;
use crate::wall::Cpusets;

/// Something that is so.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fact {
    /// Its name for scripts.
    pub code: &'static str,
    /// It, in a sentence.
    pub text: String,
    /// Whether only who asks for everything wants to know.
    pub detail: bool,
}

/// The facts, the important ones first.
#[must_use]
pub fn facts(exam: &Examination) -> Vec<Fact> {
    let fact = |code, text| Fact { code, text, detail: false };
    let detail = |code, text| Fact { code, text, detail: true };
    let host = &exam.host;
    let mut facts = vec![
        fact("machine", machine(exam)),
        fact("kernel", format!("Linux {}", host.kernel)),
        fact("cgroups", format!("{}; {}", host.layout, host.cpuset)),
    ];
    if exam.schedulers.is_empty() {
        facts.push(fact("scheduler", no_scheduler(exam)));
    }
    let schedulers = exam.schedulers.iter();
    facts.extend(
        schedulers.map(|scheduler| fact("scheduler", format!("{}: {}", scheduler.name, scheduler.meaning))),
    );
    facts.push(fact("enforcement", enforcement(exam)));
    facts.push(fact("warden", warden(exam)));
    if exam.viewer != Uid::ROOT {
        facts.push(fact("viewer", format!("user {}, who sees less than root", exam.viewer)));
    }
    facts.push(detail("watched", format!("for {} ms", exam.span_ms)));
    facts.push(detail("processes", format!("{} belong to no job", exam.bystanders.len())));
    facts.push(detail("interrupts", format!("{} of devices", exam.interrupts.len())));
    facts.extend(kernel(exam).into_iter().map(|(code, text)| detail(code, text)));
    facts
}

/// Jobs outlive their scheduler's daemon.
fn no_scheduler(exam: &Examination) -> String {
    let sources = exam.jobs.iter().map(|job| job.id.source()).filter(|source| source.is_scheduler());
    let sources: BTreeSet<_> = sources.collect();
    if sources.is_empty() {
        return "none: jobs are those of pjwctl run and assign".to_owned();
    }
    let names = several(sources.iter().map(|source| source.name()));
    format!("none of its daemons runs here, but jobs of {names} do")
}

fn machine(exam: &Examination) -> String {
    let inhabited =
        |level| exam.topology.domains(level).filter(|domain| !domain.cpus.is_empty()).count().max(1);
    format!(
        "{}, {}, {}, {}",
        count(inhabited(Level::Package), "package"),
        count(inhabited(Level::NumaNode), "NUMA node"),
        count(exam.topology.cores().len(), "core"),
        named(&exam.online)
    )
}

/// Which enforcement would be used, and why.
fn enforcement(exam: &Examination) -> String {
    let by_root = match &exam.ground.cpusets {
        Cpusets::Nowhere { why } => format!("affinity masks, because {why}"),
        Cpusets::Systemd => "cpusets, in scopes that systemd makes below pjw.slice".to_owned(),
        Cpusets::Unified => "cpusets, in directories of pjwd's own in v2".to_owned(),
        Cpusets::Legacy => "cpusets, in directories of pjwd's own in v1".to_owned(),
    };
    let masks = if exam.ground.masks_last { "" } else { "; masks are put back after each change of one" };
    let by_whom = match exam.viewer {
        Uid::ROOT => "",
        _ => "; a pjwd of your own: affinity masks",
    };
    let sure = if matches!(exam.ground.cpusets, Cpusets::Nowhere { .. }) {
        ""
    } else {
        " (by looking; pjwd tries it when it starts)"
    };
    format!("{by_root}{masks}{sure}{by_whom}")
}

fn warden(exam: &Examination) -> String {
    match &exam.warden {
        WardenSeen::Absent(why) => why.clone(),
        WardenSeen::Mute(why) => format!("pjwd does not answer: {why}"),
        WardenSeen::Answers { version, observes, .. } => {
            let mode = if *observes { "only looks (mode observe)" } else { "keeps jobs on their CPUs" };
            format!("pjwd {version} runs and {mode}")
        }
    }
}

fn kernel(exam: &Examination) -> Vec<(&'static str, String)> {
    let host = &exam.host;
    let there = |is: bool| if is { "there" } else { "missing" };
    let on = |is: Option<bool>| match is {
        Some(true) => "on",
        Some(false) => "off",
        None => "not in this kernel",
    };
    let set = |cpus: &crate::cpuset::CpuSet| {
        if cpus.is_empty() { "none".to_owned() } else { named(cpus) }
    };
    let governors = host.governors.iter().map(|(governor, cpus)| format!("{governor} on {}", named(cpus)));
    let governors = if host.governors.is_empty() { "none here".to_owned() } else { several(governors) };
    let events = host.no_events.clone().unwrap_or_else(|| "the kernel tells of new processes".to_owned());
    vec![
        ("events", events),
        ("schedstat", there(host.schedstat).to_owned()),
        ("psi", there(host.psi).to_owned()),
        ("btf", there(host.btf).to_owned()),
        ("smt", if host.smt.is_empty() { "unknown".to_owned() } else { host.smt.clone() }),
        ("governors", governors),
        ("isolated", set(&host.isolated)),
        ("nohz_full", set(&host.nohz_full)),
        ("numa_balancing", on(host.numa_balancing).to_owned()),
        ("autogroup", on(host.autogroup).to_owned()),
    ]
}
