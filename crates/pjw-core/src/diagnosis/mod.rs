//! Diagnosis: finds problems on a node and gives a remedy for each.
//!
//! [`diagnose`] is a pure function from a [`DiagnosisInput`] (all observed facts) to [`Finding`]s, which
//! `pjwctl doctor` prints. [`watch`] makes the part about processes from two scans and the state that
//! [`crate::reconcile`] computes from them, so the doctor and pjw agree on the jobs of all processes.

use crate::basics::prelude::*;

mod contention;
mod examination;
mod facts;
mod host;
pub mod map_lock;
pub mod memory;
mod neighbours;
pub mod page_sample;
mod placement;
pub mod remote_numa_memory;
pub mod verdict;
pub mod watch;
mod words;

pub use examination::*;
pub use facts::{MachineFact, machine_facts};
pub use host::conflicting_programs;

/// The codes of findings and warnings about a failure of `pjwd` itself: it can't record or make changes, does not
/// answer, or can't start.
const DAEMON_FAILURE_CODES: [&str; 5] =
    ["cpuset-thread", "journal", "mute-warden", "unchecked-configuration", "wrong-configuration"];

/// Returns whether `code` is the code of a failure of `pjwd` itself. `code` is the short name of a kind of finding of
/// the diagnosis (`pjwctl doctor`), or of a kind of warning of `pjwd`. A failure of `pjwd` means that one of these is
/// the case:
///
/// - `pjwd` can't write its journal (the file from which a restarted `pjwd` restores its state).
/// - `pjwd` can't change cpusets.
/// - `pjwd` does not answer.
/// - `pjwd` can't start with its configuration file, or the check of this file timed out.
#[must_use]
pub fn is_daemon_failure(code: &str) -> bool {
    DAEMON_FAILURE_CODES.contains(&code)
}

/// Diagnoses the machine that `input` describes. Returns the findings: what slows down jobs, and what can be improved.
/// The most severe findings come first. Among findings of the same severity, failures of `pjwd` itself come first
/// ([`is_daemon_failure`]).
#[must_use]
pub fn diagnose(input: &DiagnosisInput) -> Vec<Finding> {
    let mut findings = Vec::new();
    contention::add_findings(input, &mut findings);
    placement::add_findings(input, &mut findings);
    neighbours::add_findings(input, &mut findings);
    host::add_findings(input, &mut findings);
    add_daemon_warnings(input, &mut findings);
    remove_repeated_findings(&mut findings);
    findings.sort_by_key(|finding| (finding.severity, !is_daemon_failure(&finding.code)));
    findings
}

/// Adds the warnings of the running daemon to `findings`, except those that the diagnosis found too. Such a finding has
/// the same code, and names at least the same jobs. Adds nothing if no daemon answers.
fn add_daemon_warnings(input: &DiagnosisInput, findings: &mut Vec<Finding>) {
    let DaemonStatus::Responsive { warnings, .. } = &input.daemon else { return };
    for warning in warnings {
        let is_same = |finding: &Finding| {
            finding.code == warning.code
                && (warning.jobs.is_empty() || finding.jobs.is_superset(&warning.jobs))
        };
        if !findings.iter().any(is_same) {
            findings.push(warning.clone());
        }
    }
}

/// Removes the finding that processes are outside of their cgroup if another finding covers them. The other finding
/// says that the same processes of the same jobs may run outside of their PUs.
fn remove_repeated_findings(findings: &mut Vec<Finding>) {
    let outside: Vec<Finding> =
        findings.iter().filter(|finding| finding.code == contention::OUTSIDE_GRANT_CODE).cloned().collect();
    let is_reported = |finding: &Finding| {
        outside.iter().any(|other| other.jobs == finding.jobs && other.pids.is_superset(&finding.pids))
    };
    findings.retain(|finding| {
        finding.code != placement::OUTSIDE_CGROUP_CODE || finding.pids.is_empty() || !is_reported(finding)
    });
}

#[cfg(test)]
mod tests;
