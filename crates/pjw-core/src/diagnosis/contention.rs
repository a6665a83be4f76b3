//! Contention findings: overlapping jobs, oversubscription, hot threads stacked on few PUs, and threads
//! outside of the cores that their job holds.

use crate::basics::{CpuSet, Pid, Pu, cpus_text, cpus_with_is_are, prelude::*};
use crate::diagnosis::examination::{
    DaemonStatus, DiagnosisInput, Finding, ObservedJob, Severity, push_limited,
};
use crate::diagnosis::words::{counted_noun, join_names};
use crate::terms::{CpuRequest, GrantedBy, JobId};

/// The short name of the finding that threads of a job may run on PUs (logical CPUs) that the job does not hold.
pub(super) const OUTSIDE_GRANT_CODE: &str = "outside";

/// Adds to `findings` what the diagnosis (`pjwctl doctor`) finds about contention for PUs (logical CPUs): several jobs
/// on the same PUs, jobs with more hot threads than PUs, and threads that may run outside of the PUs of their job. A
/// thread is hot if it ran or waited for a PU for most of the time between the two scans.
pub(super) fn add_findings(input: &DiagnosisInput, findings: &mut Vec<Finding>) {
    let stacks = oversubscription_findings(input);
    // If a stack has all PUs and all jobs of an overlap, both have the same cause, and only the stack is reported.
    let overlaps = overlap_findings(input).into_iter().filter(|overlap| {
        !stacks.iter().any(|stack| overlap.cpus.is_subset(&stack.cpus) && overlap.jobs.is_subset(&stack.jobs))
    });
    let overlaps = overlaps.collect();
    push_limited(stacks, findings);
    push_limited(overlaps, findings);
    findings.extend(unbound_jobs(input));
    let max_pus_per_core = input.topology.cores().iter().map(|core| core.pus.len()).max().unwrap_or(1);
    let oversubscribed = input.jobs.iter().filter_map(|job| oversubscribed_job(input, job, max_pus_per_core));
    push_limited(oversubscribed.collect(), findings);
    let outside = input.jobs.iter().filter_map(|job| threads_outside_grant(input, job));
    push_limited(outside.collect(), findings);
}

/// Returns the remedy for jobs that nothing keeps on cores of their own: start pjwd, restart it, or let it enforce.
/// Returns `if_enforcing` if pjwd runs and enforces already.
fn remedy_of_daemon(input: &DiagnosisInput, if_enforcing: &str) -> String {
    match input.daemon {
        DaemonStatus::Responsive { observes: true, .. } => {
            "pjwd changes nothing: set mode = \"enforce\" and pjwctl reload".to_owned()
        }
        DaemonStatus::Responsive { .. } => if_enforcing.to_owned(),
        DaemonStatus::Unresponsive(_) => {
            format!("pjwd does not answer: restart it ({})", input.host.restart_command())
        }
        DaemonStatus::Absent(_) => {
            format!("start pjwd: it gives each job cores of its own ({})", input.host.pjwd_start_command())
        }
    }
}

/// Returns true if nothing restricts `job` to certain PUs (logical CPUs): the job holds no PUs, and its threads may run
/// on all online PUs.
pub(super) fn is_unbound(input: &DiagnosisInput, job: &ObservedJob) -> bool {
    job.grant.is_none() && input.online.is_subset(&job.allowed_cpus(&input.online))
}

/// Returns a finding for each group of jobs that may use the same PUs. Ignores jobs that are not restricted to certain
/// PUs ([`is_unbound`]).
fn overlap_findings(input: &DiagnosisInput) -> Vec<Finding> {
    let bound = input.jobs.iter().filter(|job| !is_unbound(input, job)).map(|job| {
        let held = job.held_cpus(&input.online).unwrap_or_default();
        (job, held.union(&job.allowed_cpus(&input.online)))
    });
    let bound: Vec<(&ObservedJob, CpuSet)> = bound.collect();
    let mut jobs_by_pu: BTreeMap<Pu, Vec<usize>> = BTreeMap::new();
    for (index, (_, cpus)) in bound.iter().enumerate() {
        cpus.iter().for_each(|pu| jobs_by_pu.entry(pu).or_default().push(index));
    }
    let mut groups: BTreeMap<Vec<usize>, CpuSet> = BTreeMap::new();
    for (pu, group) in jobs_by_pu.into_iter().filter(|(_, group)| group.len() > 1) {
        groups.entry(group).or_default().insert(pu);
    }
    let found = groups.into_iter().map(|(group, cpus)| {
        let jobs: BTreeSet<&JobId> = group.iter().map(|&index| &bound[index].0.id).collect();
        let text = format!("{} given to {} at once", cpus_with_is_are(&cpus), join_names(&jobs));
        let by_scheduler = group.iter().all(|&index| {
            bound[index].0.grant.as_ref().is_some_and(|(_, granted_by)| *granted_by == GrantedBy::Scheduler)
        });
        let remedy = if by_scheduler {
            "their scheduler gave the same CPUs twice: see its log and configuration (OverSubscribe of the partition)"
                .to_owned()
        } else {
            remedy_of_daemon(input, "pjwctl release one of them, or set on_exhausted = \"refuse\"")
        };
        Finding::problem("overlap", text, remedy).with_jobs(jobs).with_cpus(&cpus)
    });
    found.collect()
}

/// Returns the finding that jobs may run on all PUs. `None` if there is no such job with threads, or if the machine has
/// only one job. The finding is a problem if all jobs together have more hot threads than there are online PUs: threads
/// that ran or waited for a PU for most of the time between the two scans. Otherwise, the finding is advice.
fn unbound_jobs(input: &DiagnosisInput) -> Option<Finding> {
    let unbound: Vec<&ObservedJob> =
        input.jobs.iter().filter(|job| !job.threads.is_empty() && is_unbound(input, job)).collect();
    let first = unbound.first()?;
    if input.jobs.len() < 2 {
        return None;
    }
    let hot: usize = input.jobs.iter().map(ObservedJob::hot_thread_count).sum();
    let is_oversubscribed = hot > input.online.len();
    let ids = unbound.iter().map(|job| &job.id);
    let who = match unbound.len() {
        1 => first.id.to_string(),
        several_jobs => format!("{} ({})", counted_noun(several_jobs, "job"), join_names(ids.clone())),
    };
    let mut text = format!("{who} may run on every CPU, so also on those of other jobs");
    if is_oversubscribed {
        text += &format!("; now {hot} threads want {}", counted_noun(input.online.len(), "CPU"));
    }
    let severity = if is_oversubscribed { Severity::Problem } else { Severity::Advice };
    let remedy = remedy_of_daemon(input, "pjwctl status shows why: unknown core counts, or nothing free");
    Some(Finding::new(severity, "unbound", text, remedy).with_jobs(ids).with_cpus(&input.online))
}

/// Returns the finding that `job` has more hot threads than PUs. A thread is hot if it ran or waited for a PU for most
/// of the time between the two scans. `None` if there are enough PUs, or none at all. The number of PUs is:
///
/// - If the job holds PUs: the number of these.
/// - Otherwise, if its request is known: the number of requested PUs, but at most the number of PUs on which its
///   threads may run. `max_pus_per_core` is the number of PUs of the largest core: each requested core counts as so
///   many PUs.
/// - Otherwise: the number of PUs on which its threads may run.
fn oversubscribed_job(input: &DiagnosisInput, job: &ObservedJob, max_pus_per_core: usize) -> Option<Finding> {
    let requested_cpu_count = |amount: &CpuRequest| match amount {
        CpuRequest::Cores(cores) => {
            usize::try_from(*cores).unwrap_or(usize::MAX).saturating_mul(max_pus_per_core)
        }
        CpuRequest::Pus(pus) => usize::try_from(*pus).unwrap_or(usize::MAX),
        CpuRequest::Exactly(cpus) => cpus.len(),
    };
    let allowed = job.allowed_cpus(&input.online);
    let cpu_count = match (&job.grant, &job.requested) {
        (Some((cpus, _)), _) => cpus.len(),
        (None, Some(amount)) => requested_cpu_count(amount).min(allowed.len().max(1)),
        (None, None) => allowed.len(),
    };
    let hot = job.hot_thread_count();
    if hot <= cpu_count || cpu_count == 0 {
        return None;
    }
    let has = if job.grant.is_some() || job.requested.is_none() { "has" } else { "asked for" };
    let (threads, cpus) = (counted_noun(hot, "thread"), counted_noun(cpu_count, "CPU"));
    let text = format!("{threads} of {} want a CPU most of the time, and it {has} {cpus}", job.id);
    let (severity, remedy) = if job.grant.is_some() {
        let remedy =
            "it slows down only itself; ask for more cores, or start fewer threads (OMP_NUM_THREADS)";
        (Severity::Advice, remedy.to_owned())
    } else {
        let remedy = remedy_of_daemon(input, "pjwctl status shows why it holds no cores");
        (
            Severity::Problem,
            format!("it takes CPUs from others; {remedy}; or start fewer threads (OMP_NUM_THREADS)"),
        )
    };
    let pids = job.threads.iter().filter(|thread| thread.is_hot()).map(|thread| thread.pid);
    let finding = Finding::new(severity, "oversubscribed", text, remedy);
    Some(finding.with_jobs([&job.id]).with_pids(pids).with_cpus(&allowed))
}

/// The hot threads with the same mask, or on the same core.
#[derive(Default)]
struct HotThreads<'a> {
    threads: usize,
    jobs: BTreeMap<&'a JobId, usize>,
    /// The number of threads that belong to no job.
    others: usize,
    pids: BTreeSet<Pid>,
}

impl<'a> HotThreads<'a> {
    fn add(&mut self, job: Option<&'a ObservedJob>, pid: Pid) {
        self.threads += 1;
        self.pids.insert(pid);
        match job {
            Some(job) => *self.jobs.entry(&job.id).or_default() += 1,
            None => self.others += 1,
        }
    }
}

/// A hot thread that may run only on some of the online PUs, and not on all PUs of its job.
struct BoundThread<'a> {
    job: Option<&'a ObservedJob>,
    pid: Pid,
    mask: CpuSet,
}

/// Returns the PUs on which hot threads ran last, and the hot threads that are bound. A thread is hot if it ran or
/// waited for a PU for most of the time between the two scans. A thread is bound if it may run only on some of the
/// online PUs, and not on all PUs of its job.
fn hot_threads(input: &DiagnosisInput) -> (CpuSet, Vec<BoundThread<'_>>) {
    let mut used = CpuSet::new();
    let mut bound = Vec::new();
    let job_threads =
        input.jobs.iter().flat_map(|job| job.threads.iter().map(move |thread| (Some(job), thread)));
    let other_threads =
        input.unassigned_processes.iter().flat_map(|other| other.threads.iter().map(|thread| (None, thread)));
    for (job, thread) in job_threads.chain(other_threads).filter(|(_, thread)| thread.is_hot()) {
        used.insert(thread.last_cpu);
        let mask = thread.effective_mask.intersection(&input.online);
        let has_whole_grant =
            job.and_then(|job| job.grant.as_ref()).is_some_and(|(cpus, _)| cpus.is_subset(&mask));
        if !mask.is_empty() && !input.online.is_subset(&mask) && !has_whole_grant {
            bound.push(BoundThread { job, pid: thread.pid, mask });
        }
    }
    (used, bound)
}

/// Returns the findings about hot threads that are bound to too few PUs. A thread is hot if it ran or waited for a PU
/// for most of the time between the two scans. A typical cause are two `mpirun` that both bind from CPU 0. There are
/// two kinds:
///
/// - Several threads have the same mask, the mask has fewer PUs than threads, and other PUs are idle.
/// - Threads of several processes are bound to the same core, and another core is idle.
fn oversubscription_findings(input: &DiagnosisInput) -> Vec<Finding> {
    let (used, bound) = hot_threads(input);
    let mut by_mask: BTreeMap<&CpuSet, HotThreads<'_>> = BTreeMap::new();
    for thread in &bound {
        by_mask.entry(&thread.mask).or_default().add(thread.job, thread.pid);
    }
    let unused = input.online.difference(&used);
    by_mask.retain(|mask, hot| hot.threads > mask.len() && !unused.is_subset(mask));
    let mut findings: Vec<Finding> = by_mask
        .iter()
        .map(|(mask, hot)| shared_pus_finding(input, (&cpus_text(mask), mask), hot, &unused.difference(mask)))
        .collect();
    for (core, hot) in shared_cores(input, &bound) {
        let idle = idle_cores(input, &used.union(&core));
        if !idle.is_empty() && !by_mask.contains_key(&core) {
            let bound_to = format!("one core, {}", cpus_text(&core));
            findings.push(shared_pus_finding(input, (&bound_to, &core), &hot, &idle));
        }
    }
    findings
}

/// Returns the cores to which hot threads of several processes are bound, with these threads. Only cores with several
/// online PUs are in the result. At least one of the threads must be bound to all online PUs of the core. In this
/// case, a launcher such as `mpirun` has reserved the whole core for one process. `bound` has all bound hot threads.
fn shared_cores<'a>(input: &'a DiagnosisInput, bound: &[BoundThread<'a>]) -> Vec<(CpuSet, HotThreads<'a>)> {
    let mut by_core: BTreeMap<CpuSet, (bool, HotThreads<'_>)> = BTreeMap::new();
    for BoundThread { job, pid, mask } in bound {
        let Some(first) = mask.first() else { continue };
        let core = input.topology.core_cpus(first).intersection(&input.online);
        if core.len() > 1 && mask.is_subset(&core) {
            let is_whole = *mask == core;
            let (has_whole, hot) = by_core.entry(core).or_default();
            *has_whole |= is_whole;
            hot.add(*job, *pid);
        }
    }
    let shared = by_core.into_iter().filter(|(_, (has_whole, hot))| *has_whole && hot.pids.len() > 1);
    shared.map(|(core, (_, hot))| (core, hot)).collect()
}

/// The online PUs of the cores that have none of the PUs in `used`.
fn idle_cores(input: &DiagnosisInput, used: &CpuSet) -> CpuSet {
    let cores = input.topology.cores().iter().filter(|core| !core.pus.intersects(used));
    cores.fold(CpuSet::new(), |idle, core| idle.union(&core.pus)).intersection(&input.online)
}

/// Returns the finding that hot threads are bound to the same PUs (logical CPUs) while other PUs are idle. A thread is
/// hot if it runs or waits for a PU most of the time. `hot` has these threads, and `idle` has the idle PUs. `bound_to`
/// and `cpus` are the PUs to which the threads are bound, as text and as a set.
fn shared_pus_finding(
    input: &DiagnosisInput,
    (bound_to, cpus): (&str, &CpuSet),
    hot: &HotThreads<'_>,
    idle: &CpuSet,
) -> Finding {
    let of_each_job = hot.jobs.iter().map(|(job, threads)| format!("{threads} of {job}"));
    let others = (hot.others > 0).then(|| format!("{} of no job", hot.others));
    let text = format!(
        "{} hot threads are bound to {bound_to} ({}), while {} {}",
        hot.threads,
        join_names(of_each_job.chain(others)),
        cpus_text(idle),
        if idle.len() == 1 { "idles" } else { "idle" }
    );
    let remedy = shared_pus_remedy(input, hot, idle);
    Finding::problem("stacked", text, remedy)
        .with_jobs(hot.jobs.keys().copied())
        .with_pids(hot.pids.iter().copied())
        .with_cpus(cpus)
}

/// Returns the remedy for hot threads that are bound to the same PUs while other PUs are idle. `hot` has these
/// threads, and `idle` has the idle PUs. The remedy depends on whether pjwd itself will spread the threads:
///
/// - pjwd spreads threads if it enforces, and if each thread belongs to a job that holds idle PUs.
/// - If all threads belong to one process, pjwd spreads them only if they inherited a mask inside one core. Masks
///   that a program chose for its own threads are kept.
fn shared_pus_remedy(input: &DiagnosisInput, hot: &HotThreads<'_>, idle: &CpuSet) -> &'static str {
    let pjwd_enforces = matches!(input.daemon, DaemonStatus::Responsive { observes: false, .. });
    let mut jobs = input.jobs.iter().filter(|job| hot.jobs.contains_key(&job.id));
    let has_idle = |job: &ObservedJob| job.held_cpus(&input.online).is_some_and(|held| held.intersects(idle));
    let is_spread = pjwd_enforces && hot.others == 0 && jobs.all(has_idle);
    if hot.pids.len() == 1 && is_spread {
        "one process: pjwd moves its threads in its next cycles if all of them inherited one core (pjwctl events shows it), and keeps \
         masks that its program gave them one by one; if this stays, give each process enough CPUs (mpirun --map-by slot:PE=N) or \
         do not bind it (mpirun --bind-to none)"
    } else if hot.pids.len() == 1 {
        "one process: its program, or the launcher, bound all its threads; give each process enough CPUs (mpirun --map-by slot:PE=N) \
         or do not bind it (mpirun --bind-to none)"
    } else if is_spread {
        "pjwd spreads them in its next cycles; pjwctl events shows it"
    } else {
        "start them without binding (mpirun --bind-to none), or each under pjwctl run --cores N: it translates the masks"
    }
}

/// Returns the finding that threads of `job` may run on PUs that the job does not hold. `None` if there are no such
/// threads, or if the job holds no PUs. A frozen job holds none: its threads don't run, whatever their masks are.
fn threads_outside_grant(input: &DiagnosisInput, job: &ObservedJob) -> Option<Finding> {
    let (held, granted_by) = job.grant.as_ref().filter(|(held, _)| !held.is_empty())?;
    let outside = job.threads.iter().filter(|thread| !thread.effective_mask.is_subset(held));
    let outside: Vec<_> = outside.collect();
    if outside.is_empty() {
        return None;
    }
    let allowed = outside.iter().fold(CpuSet::new(), |cpus, thread| cpus.union(&thread.effective_mask));
    let cpus = allowed.difference(held);
    let text = format!(
        "{} of {} may run outside its {}: on {}",
        counted_noun(outside.len(), "thread"),
        job.id,
        cpus_text(held),
        cpus_text(&cpus)
    );
    let remedy = match granted_by {
        GrantedBy::Warden => remedy_of_daemon(
            input,
            "pjwd puts them back within a cycle; if this stays: pjwctl events, and pjwctl explain of the process",
        ),
        GrantedBy::Scheduler => {
            "pjwctl explain of the process; a login, su or systemd-run takes processes out of a scheduler's cgroup: use \
             pam_slurm_adopt or its like; pjwd keeps them on the job's CPUs"
                .to_owned()
        }
    };
    let pids = outside.iter().map(|thread| thread.pid);
    Some(
        Finding::problem(OUTSIDE_GRANT_CODE, text, remedy)
            .with_jobs([&job.id])
            .with_pids(pids)
            .with_cpus(&cpus),
    )
}
