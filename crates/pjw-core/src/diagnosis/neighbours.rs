//! Who else runs on the jobs' PUs: system daemons, interrupts, strays, and people's processes of no job.

use std::collections::{BTreeMap, BTreeSet};

use super::contention::is_unbound;
use super::words::{count, percent, several};
use super::{Bystander, Examination, Finding, Interrupt, Severity};
use crate::cpuset::CpuSet;
use crate::explain::named;
use crate::job::JobId;
use crate::process::{Pid, Uid};

/// System processes that used less than this share of one PU, all together, are what every system has.
const DISTURBANCE_PERMILLE: u64 = 10;
/// An interrupt that comes less often in a second disturbs nobody.
const OFTEN_PER_SECOND: u64 = 100;

pub(super) fn judge(exam: &Examination, findings: &mut Vec<Finding>) {
    let jobs = JobPus::new(exam);
    findings.extend(daemons(exam, &jobs));
    findings.extend(interrupts(exam, &jobs));
    findings.extend(strays(exam));
    findings.extend(unmanaged(exam));
}

/// The PUs on which jobs are kept.
struct JobPus<'a> {
    cpus: CpuSet,
    jobs: BTreeSet<&'a JobId>,
    /// Whether any other PU is left for the system.
    elsewhere: CpuSet,
}

impl<'a> JobPus<'a> {
    fn new(exam: &'a Examination) -> Self {
        let mut cpus = CpuSet::new();
        let mut jobs = BTreeSet::new();
        for job in exam.jobs.iter().filter(|job| !is_unbound(exam, job)) {
            let held = job.holds.as_ref().map(|(cpus, _)| cpus.intersection(&exam.online));
            cpus = cpus.union(&held.unwrap_or_else(|| job.reach(&exam.online)));
            jobs.insert(&job.id);
        }
        let elsewhere = exam.online.difference(&cpus);
        Self { cpus, jobs, elsewhere }
    }
}

fn is_system(exam: &Examination, other: &Bystander) -> bool {
    other.uid.0 < exam.first_person_uid && !other.staff
}

fn daemons(exam: &Examination, jobs: &JobPus<'_>) -> Option<Finding> {
    if jobs.cpus.is_empty() {
        return None;
    }
    let may: Vec<&Bystander> = exam
        .bystanders
        .iter()
        .filter(|other| is_system(exam, other))
        .filter(|other| other.threads.iter().any(|thread| thread.allowed.intersects(&jobs.cpus)))
        .collect();
    let mut did: Vec<(u64, &Bystander)> = may
        .iter()
        .map(|other| {
            let there = other.threads.iter().filter(|thread| jobs.cpus.contains(thread.last_cpu));
            (there.map(|thread| u64::from(thread.ran)).sum(), *other)
        })
        .filter(|(ran, _)| *ran > 0)
        .collect();
    did.sort_by_key(|(ran, other)| (std::cmp::Reverse(*ran), other.pid));
    if may.is_empty() {
        return None;
    }
    let used: u64 = did.iter().map(|(ran, _)| ran).sum();
    let who = several(did.iter().map(|(_, other)| format!("{} ({})", other.comm, other.pid)));
    let text = if did.is_empty() {
        format!("{} may run on the jobs' {}; none did", count(may.len(), "system process"), named(&jobs.cpus))
    } else {
        format!(
            "{} may run on the jobs' {}; {} did, for {} of one CPU: {who}",
            count(may.len(), "system process"),
            named(&jobs.cpus),
            did.len(),
            percent(used)
        )
    };
    let disturbing = used >= DISTURBANCE_PERMILLE;
    let severity = if disturbing { Severity::Advice } else { Severity::Note };
    let remedy = if jobs.elsewhere.is_empty() {
        "keep a core for the system: housekeeping = \"1\" in pjwd.toml, and the same CPU as CPUAffinity= in \
         /etc/systemd/system.conf"
            .to_owned()
    } else {
        format!(
            "keep the system elsewhere: CPUAffinity={} in /etc/systemd/system.conf (and a restart of the services), \
             and housekeeping in pjwd.toml so that no job gets those",
            jobs.elsewhere
        )
    };
    let pids = did.iter().map(|(_, other)| other.pid);
    Some(
        Finding::new(severity, "daemons", text, remedy).of(jobs.jobs.iter().copied()).by(pids).on(&jobs.cpus),
    )
}

fn interrupts(exam: &Examination, jobs: &JobPus<'_>) -> Option<Finding> {
    if jobs.cpus.is_empty() {
        return None;
    }
    let span_ms = exam.span_ms.max(1);
    let on_jobs = |interrupt: &Interrupt| -> u64 {
        let there = interrupt.came.iter().filter(|(pu, _)| jobs.cpus.contains(**pu));
        there.fold(0_u64, |sum, (_, came)| sum.saturating_add(*came)).saturating_mul(1000) / span_ms
    };
    let sent: Vec<&Interrupt> = exam
        .interrupts
        .iter()
        .filter(|interrupt| interrupt.sent_to.intersects(&jobs.cpus) || on_jobs(interrupt) > 0)
        .collect();
    if sent.is_empty() {
        return None;
    }
    let mut came: Vec<(u64, &Interrupt)> =
        sent.iter().map(|interrupt| (on_jobs(interrupt), *interrupt)).filter(|(rate, _)| *rate > 0).collect();
    came.sort_by_key(|(rate, interrupt)| (std::cmp::Reverse(*rate), interrupt.number));
    let rate = came.iter().fold(0_u64, |sum, (rate, _)| sum.saturating_add(*rate));
    let who = several(came.iter().map(|(rate, irq)| format!("{} (IRQ {}, {rate}/s)", irq.name, irq.number)));
    let begin = format!("{} may come to the jobs' {}", count(sent.len(), "interrupt"), named(&jobs.cpus));
    let text =
        if came.is_empty() { format!("{begin}; none did") } else { format!("{begin}; {rate}/s did: {who}") };
    let severity = if rate >= OFTEN_PER_SECOND && !jobs.elsewhere.is_empty() {
        Severity::Advice
    } else {
        Severity::Note
    };
    let balanced = exam.masters.iter().any(|master| master.name == "irqbalance");
    let remedy = match (jobs.elsewhere.is_empty(), balanced) {
        (true, _) => {
            "every CPU is a job's: keep a core for the system with housekeeping = \"1\" in pjwd.toml first"
                .to_owned()
        }
        (false, true) => format!(
            "IRQBALANCE_BANNED_CPULIST={} in irqbalance's environment (/etc/default/irqbalance or \
             /etc/sysconfig/irqbalance), then restart it",
            jobs.cpus
        ),
        (false, false) => {
            let number = came.first().map_or(sent[0].number, |(_, irq)| irq.number);
            format!(
                "echo {} > /proc/irq/{number}/smp_affinity_list, and so for the others; a driver may refuse",
                jobs.elsewhere
            )
        }
    };
    Some(Finding::new(severity, "interrupts", text, remedy).of(jobs.jobs.iter().copied()).on(&jobs.cpus))
}

/// Processes of no job whose user has jobs here.
fn strays(exam: &Examination) -> Option<Finding> {
    let owners: BTreeSet<Uid> =
        exam.jobs.iter().map(|job| job.owner).filter(|owner| owner.0 >= exam.first_person_uid).collect();
    let mut found: BTreeMap<Uid, Vec<&Bystander>> = BTreeMap::new();
    for other in exam.bystanders.iter().filter(|other| owners.contains(&other.uid)) {
        found.entry(other.uid).or_default().push(other);
    }
    let all: Vec<&Bystander> = found.values().flatten().copied().collect();
    let first = all.first()?;
    let busy = all.iter().filter(|other| is_busy(other)).count();
    let users =
        several(found.iter().map(|(user, pids)| format!("user {user} ({})", count(pids.len(), "process"))));
    let working = match busy {
        0 => "none is busy".to_owned(),
        1 => "1 is busy".to_owned(),
        several => format!("{several} are busy"),
    };
    let text = format!("people with jobs here run processes of no job: {users}; {working}");
    let jobs = exam.jobs.iter().filter(|job| found.contains_key(&job.owner)).map(|job| &job.id);
    let severity = if busy > 0 { Severity::Problem } else { Severity::Note };
    let remedy = format!(
        "pjwctl assign JOB --pid {} makes it a member; adopt_strays = true in pjwd.toml does so by itself (on nodes \
         for jobs only)",
        all.iter().find(|other| is_busy(other)).unwrap_or(first).pid
    );
    let pids = busy_first(&all);
    Some(Finding::new(severity, "stray", text, remedy).of(jobs).by(pids))
}

/// Busy processes of people without jobs.
fn unmanaged(exam: &Examination) -> Option<Finding> {
    let owners: BTreeSet<Uid> = exam.jobs.iter().map(|job| job.owner).collect();
    let busy: Vec<&Bystander> = exam
        .bystanders
        .iter()
        .filter(|other| other.uid.0 >= exam.first_person_uid && !other.staff && !owners.contains(&other.uid))
        .filter(|other| is_busy(other))
        .collect();
    let first = busy.first()?;
    let threads: usize =
        busy.iter().map(|other| other.threads.iter().filter(|thread| thread.is_busy()).count()).sum();
    let who = several(busy.iter().map(|other| format!("{} ({})", other.comm, other.pid)));
    let text = format!("{} of no job keep CPUs busy: {who}", count(threads, "thread"));
    let remedy = format!(
        "give each cores of its own: pjwctl assign NAME --cores N --pid {}, or start it with pjwctl run",
        first.pid
    );
    let severity = if threads > exam.online.len() { Severity::Problem } else { Severity::Advice };
    Some(
        Finding::new(
            severity,
            "unmanaged",
            text.replacen("1 thread of no job keep ", "1 thread of no job keeps ", 1),
            remedy,
        )
        .by(busy.iter().map(|other| other.pid)),
    )
}

fn is_busy(other: &Bystander) -> bool {
    other.threads.iter().any(super::ThreadSeen::is_busy)
}

fn busy_first(all: &[&Bystander]) -> Vec<Pid> {
    let busy = all.iter().filter(|other| is_busy(other));
    let rest = all.iter().filter(|other| !is_busy(other));
    busy.chain(rest).map(|other| other.pid).take(super::MOST_PIDS).collect()
}
