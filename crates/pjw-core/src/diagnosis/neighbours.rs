//! Findings about other users of the jobs' PUs: system daemons, interrupts, and processes that belong to no
//! job.

use core::cmp::Reverse;

use crate::basics::{CpuSet, Pid, Uid, cpus_text, prelude::*};
use crate::diagnosis::contention::is_unbound;
use crate::diagnosis::examination::{DiagnosisInput, Finding, Interrupt, Severity, UnassignedProcess};
use crate::diagnosis::words::{counted_noun, join_names, percent_text};
use crate::terms::{GrantedBy, JobId};

/// System processes that together use less than this share of one PU are normal, in permille.
const DISTURBANCE_PERMILLE: u64 = 10;

/// Interrupts are reported as a disturbance from this rate on, per second.
const FREQUENT_PER_SECOND: u64 = 100;

/// Adds to `findings` what the diagnosis (`pjwctl doctor`) finds about other load on the PUs (logical CPUs) of jobs:
/// system daemons, interrupts, and processes that belong to no job.
pub(super) fn add_findings(input: &DiagnosisInput, findings: &mut Vec<Finding>) {
    let jobs = JobPus::new(input);
    findings.extend(daemons_on_job_cpus(input, &jobs));
    findings.extend(interrupts_on_job_cpus(input, &jobs));
    findings.extend(stray_processes(input));
    findings.extend(hot_processes_of_users_without_jobs(input));
}

/// The PUs of the jobs, and the PUs that no job may use.
struct JobPus<'a> {
    cpus: CpuSet,
    jobs: BTreeSet<&'a JobId>,
    /// The PUs that remain for the system.
    system_cpus: CpuSet,
}

impl<'a> JobPus<'a> {
    /// Collects the PUs of all jobs that are restricted to certain PUs: the PUs that the job holds. For a job that
    /// holds none, the PUs on which its threads may run. Housekeeping PUs that pjwd granted don't count: the job only
    /// shares them with the system while it can borrow no core. All other online PUs remain for the system.
    fn new(input: &'a DiagnosisInput) -> Self {
        let mut cpus = CpuSet::new();
        let mut jobs = BTreeSet::new();
        for job in input.jobs.iter().filter(|job| !is_unbound(input, job)) {
            let held = job.held_cpus(&input.online).unwrap_or_else(|| job.allowed_cpus(&input.online));
            let is_of_pjwd = matches!(&job.grant, Some((_, GrantedBy::Warden)));
            let own = if is_of_pjwd { held.difference(&input.housekeeping_cpus) } else { held };
            if !own.is_empty() {
                cpus = cpus.union(&own);
                jobs.insert(&job.id);
            }
        }
        let system_cpus = input.online.difference(&cpus);
        Self { cpus, jobs, system_cpus }
    }

    /// A finding about all jobs and their PUs.
    fn finding(&self, severity: Severity, code: &str, text: String, remedy: String) -> Finding {
        Finding::new(severity, code, text, remedy).with_jobs(self.jobs.iter().copied()).with_cpus(&self.cpus)
    }
}

/// Returns those of `items` for which `amount` is more than 0, each with this amount. The largest amount is first. Items
/// with equal amounts are in the order of `id`.
fn with_positive_amount<'a, T, I: Ord>(
    items: &[&'a T],
    amount: impl Fn(&T) -> u64,
    id: impl Fn(&T) -> I,
) -> Vec<(u64, &'a T)> {
    let amounts = items.iter().map(|item| (amount(item), *item));
    let mut positive: Vec<(u64, &T)> = amounts.filter(|(amount, _)| *amount > 0).collect();
    positive.sort_by_key(|(amount, item)| (Reverse(*amount), id(item)));
    positive
}

/// Returns the finding that system processes may run on PUs of jobs, with the processes that ran there. Processes of a
/// batch system do not count. `None` if there are no such processes, or if jobs have no PUs.
fn daemons_on_job_cpus(input: &DiagnosisInput, jobs: &JobPus<'_>) -> Option<Finding> {
    if jobs.cpus.is_empty() {
        return None;
    }
    let may_run_there = |process: &&UnassignedProcess| {
        process.uid.0 < input.first_person_uid
            && !process.belongs_to_scheduler
            && process.threads.iter().any(|thread| thread.effective_mask.intersects(&jobs.cpus))
    };
    let allowed: Vec<&UnassignedProcess> = input.unassigned_processes.iter().filter(may_run_there).collect();
    if allowed.is_empty() {
        return None;
    }
    let usage = |process: &UnassignedProcess| -> u64 {
        let on_job_cpus = process.threads.iter().filter(|thread| jobs.cpus.contains(thread.last_cpu));
        on_job_cpus.map(|thread| u64::from(thread.run_permille)).sum()
    };
    let active = with_positive_amount(&allowed, usage, |process| process.pid);
    let used_permille: u64 = active.iter().map(|(run_permille, _)| run_permille).sum();
    let who = join_names(active.iter().map(|(_, process)| format!("{} ({})", process.comm, process.pid)));
    let begin = format!(
        "{} may run on the jobs' {}",
        counted_noun(allowed.len(), "system process"),
        cpus_text(&jobs.cpus)
    );
    let text = match active.len() {
        0 => format!("{begin}; none did"),
        several => format!("{begin}; {several} did, for {} of one CPU: {who}", percent_text(used_permille)),
    };
    let severity = if used_permille >= DISTURBANCE_PERMILLE { Severity::Advice } else { Severity::Note };
    let remedy = daemons_remedy(input, jobs);
    let pids = active.iter().map(|(_, process)| process.pid);
    Some(jobs.finding(severity, "daemons", text, remedy).with_pids(pids))
}

/// Returns the remedy for system processes on PUs of jobs: keep them on other PUs, and keep these from jobs. If
/// housekeeping PUs are set, the system is to use those. Without systemd, the masks of the processes must be set.
fn daemons_remedy(input: &DiagnosisInput, jobs: &JobPus<'_>) -> String {
    let set_affinity = |cpus: &CpuSet| {
        if input.host.has_systemd {
            format!("CPUAffinity={cpus} in /etc/systemd/system.conf (and a restart of the services)")
        } else {
            format!("taskset -pac {cpus} PID, for each of these processes")
        }
    };
    if let Some(text) = shared_housekeeping_remedy(input, jobs) {
        return text;
    }
    let housekeeping = input.housekeeping_cpus.intersection(&jobs.system_cpus);
    if jobs.system_cpus.is_empty() {
        let same = if input.host.has_systemd {
            "the same CPU as CPUAffinity= in /etc/systemd/system.conf"
        } else {
            "taskset -pac CPU PID, with the same CPU, for each of these processes"
        };
        format!("keep a core for the system: housekeeping = \"1\" in pjwd.toml, and {same}")
    } else if housekeeping.is_empty() {
        format!(
            "keep the system elsewhere: {}, and housekeeping in pjwd.toml so that no job gets those",
            set_affinity(&jobs.system_cpus)
        )
    } else {
        format!(
            "keep the system on the housekeeping {}: {}",
            cpus_text(&housekeeping),
            set_affinity(&housekeeping)
        )
    }
}

/// Returns the remedy if no PU remains for the system although housekeeping PUs are set: jobs have these PUs from their
/// batch system. `None` in all other cases.
fn shared_housekeeping_remedy(input: &DiagnosisInput, jobs: &JobPus<'_>) -> Option<String> {
    let housekeeping = input.housekeeping_cpus.intersection(&input.online);
    (jobs.system_cpus.is_empty() && !housekeeping.is_empty()).then(|| {
        format!(
            "every CPU is a job's, also the housekeeping {}: limit the batch system of these jobs to the other CPUs \
             (Slurm: CpuSpecList)",
            cpus_text(&housekeeping)
        )
    })
}

/// Returns the finding that interrupts of devices occurred, or may occur, on PUs of jobs. `None` if there are no such
/// interrupts, or if jobs have no PUs.
fn interrupts_on_job_cpus(input: &DiagnosisInput, jobs: &JobPus<'_>) -> Option<Finding> {
    if jobs.cpus.is_empty() {
        return None;
    }
    let span_ms = input.scan_interval_ms.max(1);
    let rate_on_jobs = |interrupt: &Interrupt| -> u64 {
        let counts = interrupt.counts.iter().filter(|(pu, _)| jobs.cpus.contains(**pu));
        counts.fold(0_u64, |sum, (_, count)| sum.saturating_add(*count)).saturating_mul(1000) / span_ms
    };
    let is_on_jobs = |irq: &&Interrupt| irq.target_cpus.intersects(&jobs.cpus) || rate_on_jobs(irq) > 0;
    let on_jobs: Vec<&Interrupt> = input.interrupts.iter().filter(is_on_jobs).collect();
    if on_jobs.is_empty() {
        return None;
    }
    let occurred = with_positive_amount(&on_jobs, rate_on_jobs, |interrupt| interrupt.number);
    let rate = occurred.iter().fold(0_u64, |sum, (rate, _)| sum.saturating_add(*rate));
    let who =
        join_names(occurred.iter().map(|(rate, irq)| format!("{} (IRQ {}, {rate}/s)", irq.name, irq.number)));
    let interrupts = counted_noun(on_jobs.len(), "interrupt");
    let begin = format!("{interrupts} may come to the jobs' {}", cpus_text(&jobs.cpus));
    let text = if occurred.is_empty() {
        format!("{begin}; none did")
    } else {
        format!("{begin}; {rate}/s did: {who}")
    };
    let severity = if rate >= FREQUENT_PER_SECOND && !jobs.system_cpus.is_empty() {
        Severity::Advice
    } else {
        Severity::Note
    };
    let runs_irqbalance = input.conflicting_programs.iter().any(|program| program.name == "irqbalance");
    let remedy = match (jobs.system_cpus.is_empty(), runs_irqbalance) {
        (true, _) => shared_housekeeping_remedy(input, jobs).unwrap_or_else(|| {
            "every CPU is a job's: keep a core for the system with housekeeping = \"1\" in pjwd.toml first"
                .to_owned()
        }),
        (false, true) => format!(
            "IRQBALANCE_BANNED_CPULIST={} in irqbalance's environment (/etc/default/irqbalance or \
             /etc/sysconfig/irqbalance), then restart it",
            jobs.cpus
        ),
        (false, false) => {
            let number = occurred.first().map_or(on_jobs[0].number, |(_, irq)| irq.number);
            format!(
                "echo {} > /proc/irq/{number}/smp_affinity_list, and so for the others; a driver may refuse",
                jobs.system_cpus
            )
        }
    };
    Some(jobs.finding(severity, "interrupts", text, remedy))
}

/// Returns the finding about processes that belong to no job though their user has jobs on the machine. Processes that
/// are normal outside of jobs, such as a login shell, do not count. `None` if there are no such processes. The finding
/// is a problem if one of them has a hot thread (a thread that ran or waited for a PU for at least half of the time).
/// Otherwise, the finding is a note.
fn stray_processes(input: &DiagnosisInput) -> Option<Finding> {
    let owners: BTreeSet<Uid> =
        input.jobs.iter().map(|job| job.owner).filter(|owner| owner.0 >= input.first_person_uid).collect();
    let mut strays_by_user: BTreeMap<Uid, Vec<&UnassignedProcess>> = BTreeMap::new();
    let is_stray =
        |process: &&UnassignedProcess| owners.contains(&process.uid) && !process.is_expected_outside_jobs;
    for process in input.unassigned_processes.iter().filter(is_stray) {
        strays_by_user.entry(process.uid).or_default().push(process);
    }
    let all: Vec<&UnassignedProcess> = strays_by_user.values().flatten().copied().collect();
    let first = all.first()?;
    let hot = all.iter().filter(|process| has_hot_thread(process)).count();
    let users = join_names(
        strays_by_user
            .iter()
            .map(|(user, strays)| format!("user {user} ({})", counted_noun(strays.len(), "process"))),
    );
    let working = match hot {
        0 => "none has a hot thread".to_owned(),
        1 => "1 has hot threads".to_owned(),
        several => format!("{several} have hot threads"),
    };
    let text = format!("people with jobs here run processes of no job: {users}; {working}");
    let jobs = input.jobs.iter().filter(|job| strays_by_user.contains_key(&job.owner)).map(|job| &job.id);
    let severity = if hot > 0 { Severity::Problem } else { Severity::Note };
    let remedy = format!(
        "pjwctl assign JOB --pid {} makes it a member; adopt_strays = true in pjwd.toml does so by itself (on nodes \
         for jobs only)",
        all.iter().find(|process| has_hot_thread(process)).unwrap_or(first).pid
    );
    Some(Finding::new(severity, "stray", text, remedy).with_jobs(jobs).with_pids(with_hot_threads_first(all)))
}

/// Returns the finding about processes with hot threads whose user has no job on the machine. A thread is hot if it ran
/// or waited for a PU for at least half of the time. Processes of the system and of a batch system do not count. `None`
/// if there are no such processes.
fn hot_processes_of_users_without_jobs(input: &DiagnosisInput) -> Option<Finding> {
    let owners: BTreeSet<Uid> = input.jobs.iter().map(|job| job.owner).collect();
    let is_unmanaged = |process: &&UnassignedProcess| {
        process.uid.0 >= input.first_person_uid
            && !process.belongs_to_scheduler
            && !owners.contains(&process.uid)
    };
    let unmanaged = input.unassigned_processes.iter().filter(is_unmanaged);
    let hot: Vec<&UnassignedProcess> = unmanaged.filter(|process| has_hot_thread(process)).collect();
    let first = hot.first()?;
    let threads: usize =
        hot.iter().map(|process| process.threads.iter().filter(|thread| thread.is_hot()).count()).sum();
    let who = join_names(hot.iter().map(|process| format!("{} ({})", process.comm, process.pid)));
    let verb = if threads == 1 { "keeps" } else { "keep" };
    let text = format!("{} of no job {verb} CPUs busy: {who}", counted_noun(threads, "thread"));
    let remedy = format!(
        "give each cores of its own: pjwctl assign NAME --cores N --pid {}, or start it with pjwctl run",
        first.pid
    );
    let severity = if threads > input.online.len() { Severity::Problem } else { Severity::Advice };
    Some(Finding::new(severity, "unmanaged", text, remedy).with_pids(hot.iter().map(|process| process.pid)))
}

/// Whether a thread of the process ran or waited for a PU for at least half of the time between the two scans.
fn has_hot_thread(process: &UnassignedProcess) -> bool {
    process.threads.iter().any(super::ObservedThread::is_hot)
}

/// Returns the pids of at most [`MAX_FINDING_PIDS`](super::MAX_FINDING_PIDS) processes of `all`. Those with hot threads
/// come first.
fn with_hot_threads_first(mut all: Vec<&UnassignedProcess>) -> Vec<Pid> {
    all.sort_by_key(|process| !has_hot_thread(process));
    all.into_iter().map(|process| process.pid).take(super::MAX_FINDING_PIDS).collect()
}
