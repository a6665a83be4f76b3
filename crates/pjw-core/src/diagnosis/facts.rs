//! Facts about the node, one sentence each: the context for the findings.

use crate::basics::{CpuSet, Uid, cpus_text, prelude::*};
use crate::diagnosis::examination::{DaemonStatus, DiagnosisInput, LendingStatus};
use crate::diagnosis::words::{counted_noun, join_names};
use crate::machine::TopologyLevel;
use crate::terms::{CpusetHierarchy, IdlePrioritySupport};

/// One fact about the machine, as the diagnosis (`pjwctl doctor`) prints it in one line. The diagnosis
/// prints the facts before its [`Finding`](super::Finding)s.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MachineFact {
    /// The stable short name of the fact, for scripts, such as `kernel`.
    pub code: &'static str,
    /// The text of the fact: a few words or a sentence.
    pub text: String,
    /// Whether the fact is shown only by `pjwctl doctor --all`.
    pub is_detail: bool,
}

/// Returns the facts about the machine that the diagnosis (`pjwctl doctor`) prints before its findings, the
/// most important fact first.
#[must_use]
pub fn machine_facts(input: &DiagnosisInput) -> Vec<MachineFact> {
    let fact = |code, text| MachineFact { code, text, is_detail: false };
    let detail = |code, text| MachineFact { code, text, is_detail: true };
    let host = &input.host;
    let mut facts = vec![
        fact("machine", machine_text(input)),
        fact("kernel", format!("Linux {}", host.kernel_release)),
        fact("cgroups", format!("{}; {}", host.cgroup_layout, host.cpuset_hierarchy)),
    ];
    if input.schedulers.is_empty() {
        facts.push(fact("scheduler", no_scheduler_text(input)));
    }
    let schedulers = input.schedulers.iter();
    facts.extend(
        schedulers
            .map(|scheduler| fact("scheduler", format!("{}: {}", scheduler.name, scheduler.effect_on_pjw))),
    );
    facts.push(fact("enforcement", enforcement_text(input)));
    facts.push(fact("lending", lending_text(input)));
    facts.push(fact("warden", daemon_text(input)));
    if input.caller_uid != Uid::ROOT {
        facts.push(fact("viewer", format!("user {}, with less access than root", input.caller_uid)));
    }
    facts.push(detail("watched", format!("for {} ms", input.scan_interval_ms)));
    facts.push(detail("processes", format!("{} belong to no job", input.unassigned_processes.len())));
    facts.push(detail("interrupts", format!("{} of devices", input.interrupts.len())));
    facts.extend(kernel_facts(input).into_iter().map(|(code, text)| detail(code, text)));
    facts
}

/// Returns the fact for a node on which no batch system runs. Jobs may still run: they outlive the daemon of
/// their scheduler.
fn no_scheduler_text(input: &DiagnosisInput) -> String {
    let sources = input.jobs.iter().map(|job| job.id.source()).filter(|source| source.is_batch_system());
    let sources: BTreeSet<_> = sources.collect();
    if sources.is_empty() {
        return "none: jobs are those of pjwctl run and assign".to_owned();
    }
    let names = join_names(sources.iter().map(|source| source.name()));
    format!("none of its daemons runs here, but jobs of {names} do")
}

/// Returns the fact about the parts of the machine, such as its cores and NUMA nodes.
fn machine_text(input: &DiagnosisInput) -> String {
    let count_with_cpus =
        |level| input.topology.domains(level).filter(|domain| !domain.cpus.is_empty()).count().max(1);
    format!(
        "{}, {}, {}, {}",
        counted_noun(count_with_cpus(TopologyLevel::Package), "package"),
        counted_noun(count_with_cpus(TopologyLevel::NumaNode), "NUMA node"),
        counted_noun(input.topology.cores().len(), "core"),
        cpus_text(&input.online)
    )
}

/// Returns the fact about how jobs can be kept on their cores: by cpusets or by affinity masks.
fn enforcement_text(input: &DiagnosisInput) -> String {
    let mechanism = match &input.cpuset_support.hierarchy {
        CpusetHierarchy::Unavailable { why } => format!("affinity masks, because {why}"),
        CpusetHierarchy::Systemd => "cpusets, in scopes that systemd makes below pjw.slice".to_owned(),
        CpusetHierarchy::Unified => "cpusets, in directories of pjwd's own in v2".to_owned(),
        CpusetHierarchy::Legacy => "cpusets, in directories of pjwd's own in v1".to_owned(),
    };
    let mask_note = if input.cpuset_support.affinity_persists {
        ""
    } else {
        "; masks are put back after each change of one"
    };
    let user_note = match input.caller_uid {
        Uid::ROOT => "",
        _ => "; a pjwd of your own: affinity masks",
    };
    let certainty_note = if matches!(input.cpuset_support.hierarchy, CpusetHierarchy::Unavailable { .. }) {
        ""
    } else {
        " (by looking; pjwd tries it when it starts)"
    };
    format!("{mechanism}{mask_note}{certainty_note}{user_note}")
}

/// Returns the fact about lending. Jobs of the class guaranteed lend the cores that they leave idle. The fact says
/// why such cores can't be lent, or how fast an owner gets a lent core back. Uses the report of the running daemon.
/// If there is no report, derives the fact from the features of the machine.
fn lending_text(input: &DiagnosisInput) -> String {
    let reported = match &input.daemon {
        DaemonStatus::Responsive { lending, .. } => lending.clone(),
        DaemonStatus::Absent(_) | DaemonStatus::Unresponsive(_) => LendingStatus::Unknown,
    };
    let why_not = match (&reported, &input.cpuset_support.hierarchy, &input.cpuset_support.idle_priority) {
        (LendingStatus::Off(why), _, _) => Some(why),
        (LendingStatus::WithWakeupReports | LendingStatus::WithCpuTimeSamples(_), _, _) => None,
        (_, CpusetHierarchy::Unavailable { why }, _) | (_, _, IdlePrioritySupport::Unavailable { why }) => {
            Some(why)
        }
        (_, _, IdlePrioritySupport::Available) => None,
    };
    if let Some(why) = why_not {
        return format!("besteffort jobs get free cores only, not those that other jobs leave idle: {why}");
    }
    let mut drawbacks: Vec<String> = Vec::new();
    if input.host.preemption_model.as_deref() == Some("lazy") {
        drawbacks.push(
            "lazy preemption lets a borrower run on for up to half a tick when the owner wakes up (preempt=full on the \
             kernel's command line ends that)"
                .to_owned(),
        );
    }
    let is_known = match &reported {
        LendingStatus::WithCpuTimeSamples(why) => {
            drawbacks
                .push(format!("the owner is sampled each 2 ms instead of reported at its wake-up: {why}"));
            true
        }
        LendingStatus::WithWakeupReports => true,
        _ if !input.host.has_btf => {
            drawbacks.push(
                "without BTF the owner is sampled each 2 ms instead of reported at its wake-up".to_owned(),
            );
            true
        }
        LendingStatus::Unknown | LendingStatus::Off(_) => false,
    };
    if drawbacks.is_empty() {
        let program = if is_known { "" } else { ", as far as pjwd may load its BPF program" };
        let preemption = match (&input.host.preemption_model, input.caller_uid) {
            (Some(_), _) => "",
            (None, Uid::ROOT) => {
                ", unless the preemption model of the kernel is lazy (it is unknown: there is no \
                 /sys/kernel/debug/sched/preempt; if debugfs is not mounted, mount -t debugfs none /sys/kernel/debug \
                 shows it)"
            }
            (None, _) => ", unless the preemption model of the kernel is lazy (it is unknown: root sees it)",
        };
        return format!(
            "a lent core is the owner's again when it wakes up{program}{preemption}: borrowers run at idle priority"
        );
    }
    format!("borrowers run at idle priority, but {}", drawbacks.join("; "))
}

/// Returns the fact about pjwd: whether it runs, and its version and mode.
fn daemon_text(input: &DiagnosisInput) -> String {
    match &input.daemon {
        DaemonStatus::Absent(why) => why.clone(),
        DaemonStatus::Unresponsive(why) => format!("pjwd does not answer: {why}"),
        DaemonStatus::Responsive { version, observes, .. } => {
            let mode = if *observes { "changes nothing (mode observe)" } else { "keeps jobs on their CPUs" };
            format!("pjwd {version} runs and {mode}")
        }
    }
}

/// Returns the facts about features of the kernel, each with its short name.
fn kernel_facts(input: &DiagnosisInput) -> Vec<(&'static str, String)> {
    let host = &input.host;
    let presence_text = |is_there: bool| if is_there { "there" } else { "missing" };
    let switch_text = |is_on: Option<bool>| match is_on {
        Some(true) => "on",
        Some(false) => "off",
        None => "not in this kernel",
    };
    let set_text = |cpus: &CpuSet| if cpus.is_empty() { "none".to_owned() } else { cpus_text(cpus) };
    let governors =
        host.cpufreq_governors.iter().map(|(governor, cpus)| format!("{governor} on {}", cpus_text(cpus)));
    let governors =
        if host.cpufreq_governors.is_empty() { "none here".to_owned() } else { join_names(governors) };
    let events =
        host.no_fork_events_reason.clone().unwrap_or_else(|| "the kernel reports new processes".to_owned());
    vec![
        ("events", events),
        ("schedstat", presence_text(host.has_schedstat).to_owned()),
        ("psi", presence_text(host.has_psi).to_owned()),
        ("btf", presence_text(host.has_btf).to_owned()),
        ("smt", if host.smt_state.is_empty() { "unknown".to_owned() } else { host.smt_state.clone() }),
        ("governors", governors),
        ("isolated", set_text(&host.isolated_cpus)),
        ("nohz_full", set_text(&host.nohz_full_cpus)),
        ("numa_balancing", switch_text(host.numa_balancing_enabled).to_owned()),
        ("autogroup", switch_text(host.autogroup_enabled).to_owned()),
    ]
}
