//! The warnings in the status: lasting conditions, each with its remedy.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use pjw_core::job::{Grant, GrantedBy, Job, Ownership};
use pjw_core::own_cgroups::OwnCgroupNames;
use pjw_core::policy::{DaemonMode, Policy, StarvedPolicy};
use pjw_core::provision_rules::{ambiguous_rule_warning, unmatched_rule_warning};
use pjw_core::state::WardenState;
use pjw_core::text::cpus_text;
use pjw_core::{cpuset::CpuSet, plan::Warning};
use pjw_ipc::wire;

use super::counts::ProcessCounts;
use super::to_wire::status_warning_to_wire;
use crate::warden::OngoingFailures;

fn warning(code: &str, job: String, text: String, remedy: &str) -> wire::Warning {
    wire::Warning { code: code.to_owned(), job, text, remedy: remedy.to_owned() }
}

/// Returns the warnings for the status about the `failures`, such as a failed write of the journal. Also
/// returns a warning if pjwd was started with `--beside`, as a second pjwd on the same machine. `own_cgroups` has the
/// names of pjwd's cgroups, by which the second pjwd is recognised.
pub(super) fn failure_warnings(
    failures: &OngoingFailures,
    own_cgroups: &OwnCgroupNames,
) -> Vec<wire::Warning> {
    let mut warnings = Vec::from_iter(beside_warning(own_cgroups));
    for (job, violation) in &failures.audit_violations {
        let job = job.as_ref().map(ToString::to_string).unwrap_or_default();
        let remedy = "this is a bug of pjw: nothing is changed for this job; please report it with the log";
        warnings.push(warning("audit", job, violation.clone(), remedy));
    }
    if let Some(fault) = &failures.journal_error {
        let text = format!("jobs are only released, because other changes can't be recorded: {fault}");
        let remedy = "do what the text says; jobs continue unchanged, pjwd retries in each cycle, and a job that is released meanwhile comes back \
                      if pjwd is restarted before it can write";
        warnings.push(warning("journal", String::new(), text, remedy));
    }
    let mut refused_jobs: BTreeMap<String, (usize, String)> = BTreeMap::new();
    for refused in failures.refused_masks.values() {
        let (threads, _) =
            refused_jobs.entry(refused.job.to_string()).or_insert_with(|| (0, refused.reason.clone()));
        *threads += 1;
    }
    for (job, (threads, reason)) in refused_jobs {
        let text = format!("{threads} threads can't be put on their cores: {reason}");
        warnings.push(warning("unconfined", job, text, "pjwd retries in each cycle"));
    }
    warnings
}

/// The warnings of the last decision, in the form in which clients receive warnings. They are kept from one cycle to
/// the next. An update converts only the warnings that changed.
#[derive(Debug, Default)]
pub(super) struct ConvertedWarnings {
    /// The warnings as the decision made them.
    plan_warnings: Vec<Arc<Warning>>,
    /// The same warnings, in the same order, as clients receive them.
    converted: Vec<Arc<wire::Warning>>,
}

impl ConvertedWarnings {
    /// Replaces the warnings by `plan_warnings`, those of the present cycle. Returns them in the form for clients, in
    /// the same order.
    pub(super) fn update(&mut self, plan_warnings: &[Arc<Warning>]) -> &[Arc<wire::Warning>] {
        if self.plan_warnings != plan_warnings {
            let before = self.plan_warnings.drain(..).zip(self.converted.drain(..));
            let before: BTreeMap<Arc<Warning>, Arc<wire::Warning>> = before.collect();
            let convert = |warning: &Arc<Warning>| {
                let unchanged = before.get(warning).cloned();
                unchanged.unwrap_or_else(|| Arc::new(status_warning_to_wire(warning)))
            };
            self.converted = plan_warnings.iter().map(convert).collect();
            self.plan_warnings = plan_warnings.to_vec();
        }
        &self.converted
    }
}

/// Returns the warnings about the rule of the provision `job`. A provision is a job whose cores are promised to a
/// service, and by the rule pjwd recognises the processes of the service. There is a warning if the rule matches no
/// process, and one if a process also matches the rule of another provision. Empty if the job is no provision or has
/// no rule.
pub(super) fn rule_warnings(state: &WardenState, policy: &Policy, job: &Job) -> Vec<wire::Warning> {
    let of_job = |code, text, remedy| warning(code, job.id.to_string(), text, remedy);
    let ambiguous = ambiguous_rule_warning(state, policy, job).map(|text| {
        of_job("ambiguous-rule", text, "change one of the rules, so that no process matches both")
    });
    let unmatched = unmatched_rule_warning(state, job).map(|text| {
        of_job("unmatched-rule", text, "start the service, or correct the rule of the provision: a rule with comm alone recognises no process of a user id from \
             first_person_uid on, so add user=NAME for one (DynamicUser and nobody too)")
    });
    ambiguous.into_iter().chain(unmatched).collect()
}

/// Returns the warnings about the cores and threads of `job`. `counts` has the numbers of the job's processes and
/// threads. There is a warning for each of these facts:
///
/// - Other jobs hold the same PUs (logical CPUs).
/// - PUs of the job are reserved for the system.
/// - The job has more hot threads (which run most of the time) than PUs.
/// - The job is frozen.
pub(super) fn job_warnings(job: &Job, policy: &Policy, counts: ProcessCounts) -> Vec<wire::Warning> {
    let of_job = |code: &str, text: String, remedy: &str| warning(code, job.id.to_string(), text, remedy);
    let overlap = overlap_text(job)
        .map(|text| of_job("overlap", text, "release one of the jobs, or set on_exhausted = \"refuse\""));
    let housekeeping = housekeeping_text(job, &policy.housekeeping_cpus).map(|text| {
        of_job("housekeeping", text, "the CPUs become housekeeping when the job ends or is released")
    });
    let oversubscribed = oversubscribed_text(job, counts).map(|text| {
        let remedy =
            "it slows down only itself; ask for more cores, or start fewer threads (OMP_NUM_THREADS)";
        of_job("oversubscribed", text, remedy)
    });
    let is_frozen = policy.mode == DaemonMode::Enforce
        && job.grant.as_ref().is_some_and(|grant| grant.ownership == Ownership::Frozen);
    let frozen = is_frozen.then(|| {
        let text = format!("{} can borrow no core: its processes are frozen until it can", job.id);
        of_job("frozen", text, &frozen_remedy(policy))
    });
    overlap.into_iter().chain(housekeeping).chain(oversubscribed).chain(frozen).collect()
}

/// The delay of a cycle (scan, decision and changes) of the daemon: how long after its due time the cycle began.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CycleDelay {
    /// The time from the due time to the beginning of the cycle.
    pub length: Duration,
    /// Whether the cycle was put off because cycles for process events had used up their CPU budget. If false, pjwd did
    /// not run, or an earlier cycle took long.
    pub is_by_cpu_budget: bool,
}

/// Returns the warning that the cycles (scan, decision and changes) of pjwd begin late. `longest` is the longest recent
/// delay. The warning speaks of programs that start processes only if the CPU budget for process events caused it.
pub(super) fn lateness_warning(longest: CycleDelay) -> wire::Warning {
    let delay = longest.length.as_millis();
    let (text, remedy) = if longest.is_by_cpu_budget {
        let text = format!(
            "pjwd is late: process events waited up to {delay} ms, because their CPU budget was used up"
        );
        let remedy =
            "nothing is lost; find out which program starts these processes, or raise cpu_budget_permille";
        (text, remedy)
    } else {
        let text = format!(
            "pjwd is late: due work waited up to {delay} ms, because pjwd did not run or a cycle took long"
        );
        let remedy = "nothing is lost; if it goes on, find out what stops pjwd or takes its CPU, keep a core for the \
                      system (housekeeping = \"1\"), or raise interval";
        (text, remedy)
    };
    warning("behind", String::new(), text, remedy)
}

/// The warning of a daemon that was started with `--beside`.
fn beside_warning(own_cgroups: &OwnCgroupNames) -> Option<wire::Warning> {
    let text = format!(
        "this pjwd was started with --beside: another one may give the same cores to jobs of its own; the cgroups of \
         this one are in {} or {}",
        own_cgroups.default_parent_path(),
        own_cgroups.slice_name()
    );
    let remedy =
        "--beside is for tests: stop this pjwd, or the other one and start this one without --beside";
    (*own_cgroups != OwnCgroupNames::default()).then(|| warning("beside", String::new(), text, remedy))
}

/// Returns the text of the warning if other jobs hold PUs of `job`.
fn overlap_text(job: &Job) -> Option<String> {
    let grant = job.grant.as_ref().filter(|grant| grant.is_shared)?;
    Some(format!("{} holds {}, and other jobs hold some of these too", job.id, cpus_text(&grant.cpus)))
}

/// Returns the text of the warning if the job owns PUs that the configuration has since reserved for housekeeping.
/// Jobs with a scheduler's grant are exempt. So are borrowers: they own no PU. A borrower without a core may share the
/// housekeeping PUs, and the PUs in the grant of a frozen borrower have no effect.
fn housekeeping_text(job: &Job, housekeeping: &CpuSet) -> Option<String> {
    let is_own =
        |grant: &&Grant| grant.granted_by == GrantedBy::Warden && grant.ownership == Ownership::Owned;
    let grant = job.grant.as_ref().filter(is_own)?;
    let both = grant.cpus.intersection(housekeeping);
    let verb = if both.len() == 1 { "is" } else { "are" };
    (!both.is_empty())
        .then(|| format!("{} holds {}, which {verb} configured for housekeeping", job.id, cpus_text(&both)))
}

/// Returns the remedy for a borrower that is frozen because it can borrow no core. A setting that is in force already
/// is not part of the remedy.
fn frozen_remedy(policy: &Policy) -> String {
    let runs_again = "it runs again as soon as a core is free or left idle by a guaranteed job";
    let release = "release a job (pjwctl jobs shows which hold the cores)";
    let housekeeping = &policy.housekeeping_cpus;
    match policy.lending.starved {
        _ if housekeeping.is_empty() => format!(
            "{runs_again}; {release}, or set housekeeping and starved = \"squeeze\" (a CPU that a job holds becomes \
             housekeeping when the job ends or is released)"
        ),
        StarvedPolicy::Freeze => format!("{runs_again}; {release}, or set starved = \"squeeze\""),
        StarvedPolicy::Squeeze => format!(
            "{runs_again}, or a job that holds the housekeeping {} ends or is released; {release}",
            cpus_text(housekeeping)
        ),
    }
}

/// Returns the text of the warning if the job has more hot threads than PUs.
fn oversubscribed_text(job: &Job, counts: ProcessCounts) -> Option<String> {
    let pus = job.grant.as_ref()?.cpus.len();
    let hot = usize::try_from(counts.hot_threads).unwrap_or(usize::MAX);
    let cpus = if pus == 1 { "1 CPU".to_owned() } else { format!("{pus} CPUs") };
    (hot > pus).then(|| format!("{hot} threads of {} want a CPU most of the time, and it has {cpus}", job.id))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan_warning(code: &'static str, text: &str) -> Arc<Warning> {
        Arc::new(Warning::new(code, text.to_owned(), "a remedy"))
    }

    #[test]
    fn a_late_daemon_blames_programs_that_start_processes_only_if_their_events_used_up_the_budget() {
        let length = Duration::from_millis(600);
        let [by_budget, other] =
            [true, false].map(|is_by_cpu_budget| lateness_warning(CycleDelay { length, is_by_cpu_budget }));
        assert!(by_budget.text.contains("600 ms") && by_budget.remedy.contains("which program starts"));
        assert!(other.text.contains("600 ms") && other.text.contains("pjwd did not run"), "{other:?}");
        assert!(!other.remedy.contains("processes") && !other.remedy.contains("cpu_budget"), "{other:?}");
    }

    #[test]
    fn only_changed_warnings_are_converted_again() {
        let mut warnings = ConvertedWarnings::default();
        let first = || [plan_warning("stray", "one"), plan_warning("unserved", "two")];
        let before = warnings.update(&first()).to_vec();
        let equal = warnings.update(&first());
        assert!(equal.iter().zip(&before).all(|(now, before)| Arc::ptr_eq(now, before)));
        let now = [("new", "zero"), ("stray", "one"), ("unserved", "three")];
        let after = warnings.update(&now.map(|(code, text)| plan_warning(code, text))).to_vec();
        assert!(Arc::ptr_eq(&after[1], &before[0]), "it has another place, and is the same");
        assert!(after.iter().skip(2).all(|now| !Arc::ptr_eq(now, &before[1])));
        let texts = after.iter().map(|warning| (warning.code.as_str(), warning.text.as_str()));
        assert_eq!(texts.collect::<Vec<_>>(), now);
        assert!(warnings.update(&[]).is_empty());
    }
}
