//! The report of an ended job, as clients receive it.

use pjw_core::diagnosis::verdict::{Verdict, why_not_judged};
use pjw_core::usage::{JobReport, JobUsage, SharedMemory};
use pjw_ipc::report::{Report, Thousandths, UseLevel};

use super::to_wire::format_rfc3339;
use crate::memory::reading::ReadingKind;

/// Converts the report of an ended job to the form in which clients receive the report. `verdict` says how well the
/// job used its cores. `None` if pjwd gave no verdict on the job.
#[must_use]
pub fn report_to_wire(report: &JobReport, verdict: Option<&Verdict>) -> Report {
    let usage = &report.usage;
    let most_used = u64::from(usage.pus_max) * 1000;
    let peak = largest_memory_use(usage);
    Report {
        id: report.id.to_string(),
        owner: report.owner.0,
        cpus: report.cpus.to_string(),
        cores: usage.cores_max,
        started: format_rfc3339(report.started),
        ended: format_rfc3339(report.ended),
        wall_s: seconds(report.wall_ns),
        cpu_s: seconds(usage.cpu_ns),
        waited_s: seconds(usage.stranded_ns),
        without_cores_s: seconds(usage.without_pus_ns),
        without_cores_cpu_s: seconds(usage.without_pus_cpu_ns),
        cores_held_mean: Thousandths(report.mean_held_cores_permille()),
        cpus_held_mean: Thousandths(report.mean_held_pus_permille()),
        cores_used_mean: Thousandths(report.mean_used_pus_permille()),
        cores_used_p95: Thousandths(usage.levels.upper_quantile(50, most_used)),
        use_levels: report.time_by_used_pus().into_iter().map(level_to_wire).collect(),
        threads_max: usage.threads_max,
        threads_mean: Thousandths(report.mean_hot_threads_permille()),
        serial_s: seconds(usage.serial_ns),
        serial_phases: usage.serial_phases,
        serial_longest_s: seconds(usage.serial_longest_ns),
        repairs: usage.repairs,
        violations: usage.violations,
        memory_peak: peak.map(|(bytes, _)| bytes),
        memory_limit: usage.memory_limit,
        memory_peak_source: peak.map(|(_, kind)| kind.source_name().to_owned()),
        shared_permille: usage.shared.map(|shared| shared.permille),
        shared_source: usage.shared.map(|shared| shared_kind(shared).source_name().to_owned()),
        verdict: verdict.map(|verdict| verdict.kind.name().to_owned()),
        no_verdict: verdict.map_or_else(|| why_not_judged(report), |_| None).map(str::to_owned),
        advice: verdict.map(|verdict| verdict.advice.clone()).unwrap_or_default(),
        incomplete: report.incomplete_reason.clone(),
    }
}

/// Returns the largest memory use of a job, in bytes, and how it was measured. The peak of the job's cgroup is used if
/// it is known. The sum of the resident set sizes counts shared pages several times. So it is used only if no pages
/// were read, or if it is at least the sum of the proportional set sizes: the job may have grown after that reading.
fn largest_memory_use(usage: &JobUsage) -> Option<(u64, ReadingKind)> {
    let from_cgroup = usage.memory_peak.map(|bytes| (bytes, ReadingKind::Estimate));
    let from_pages = usage.largest_pss.map(|bytes| (bytes, ReadingKind::Pages));
    let from_counters = usage.largest_rss.map(|bytes| (bytes, ReadingKind::Counters));
    from_cgroup.or_else(|| from_pages.into_iter().chain(from_counters).max_by_key(|(bytes, _)| *bytes))
}

fn shared_kind(shared: SharedMemory) -> ReadingKind {
    if shared.is_estimate { ReadingKind::Estimate } else { ReadingKind::Pages }
}

fn level_to_wire((pus, ns): (u64, u64)) -> UseLevel {
    UseLevel { cpus: u32::try_from(pus).unwrap_or(u32::MAX), seconds: seconds(ns) }
}

/// Converts `ns` to seconds, rounded to milliseconds.
fn seconds(ns: u64) -> Thousandths {
    Thousandths((ns + 500_000) / 1_000_000)
}
