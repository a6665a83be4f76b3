//! The table of all metrics: name, type, labels, meaning and source of the values.
//!
//! This is the only definition, for the text file, for the endpoint, and for the tests that compare
//! `docs/metrics.md`, the alert rules and the dashboard with it. The names are public: renaming or removing one needs
//! an entry in the CHANGELOG.

use std::fmt::Display;

use pjw_ipc::wire;

use super::counters::{CHANGE_OUTCOME_NAMES, CPUSET_ACTION_NAMES, CycleCause, MASK_ACTION_KINDS};
use super::facts::{JobMetrics, MetricValues, PuCounts};
use super::family::{MetricFamily, MetricKind, SampleWriter};

/// Defines the families. Each is a type, a name, the label names, the HELP text, and a closure that writes the samples.
macro_rules! families {
    ($($kind:ident $name:literal [$($label:literal),*] $help:literal: $write_samples:expr;)*) => {
        &[$(MetricFamily {
            name: $name,
            kind: MetricKind::$kind,
            label_names: &[$($label),*],
            help: $help,
            write_samples: $write_samples,
        }),*]
    };
}

/// The definitions of all metrics of pjwd, in the order in which the metrics text lists them.
pub const METRIC_FAMILIES: &[MetricFamily] = families! {
    Gauge "pjw_build_info" ["version"] "1, with the version of pjwd.":
        |values, to| to.write_labelled(&[&values.snapshot.published.status.summary.version], 1);
    Gauge "pjw_daemon_info" ["mode", "discovery"]
        "1, with the mode (enforce or observe) and how new processes are found (netlink or polling).":
        |values, to| {
            let wire::Status { mode, discovery, .. } = &values.snapshot.published.status.summary;
            to.write_labelled(&[mode, discovery], 1);
        };
    Gauge "pjw_process_start_time_seconds" [] "When pjwd started, in seconds since 1970.":
        |values, to| to.write_value(thousandths(values.snapshot.started_at.0.cast_unsigned()));
    Counter "pjw_process_cpu_seconds_total" [] "CPU time that pjwd used itself, in seconds.":
        |values, to| to.write_seconds(values.own_usage.cpu_time);
    Gauge "pjw_process_resident_memory_bytes" [] "Memory that pjwd holds itself, in bytes.":
        |values, to| to.write_value(values.own_usage.resident_bytes);
    Gauge "pjw_last_cycle_timestamp_seconds" [] "When the last cycle ended, in seconds since 1970.":
        |values, to| to.write_value(thousandths(values.snapshot.published_at.0.cast_unsigned()));
    Counter "pjw_cycles_total" ["cause"]
        "Cycles, by cause: event (scan of some processes), timer (scan of all jobs, and in a rescan of other processes that may have changed), full (scan of all processes).":
        |values, to| {
            for (cause, count) in CycleCause::ALL.iter().zip(values.snapshot.counters.cycles) {
                to.write_labelled(&[cause.name()], count);
            }
        };
    Histogram "pjw_cycle_duration_seconds" []
        "Duration of cycles, from the scan to the last change, in seconds.":
        |values, to| to.write_histogram(&values.snapshot.counters.cycle_times);
    Histogram "pjw_reaction_seconds" []
        "Time from the fork of a new process outside its job's cores to its corrected mask, by the kernel's clock, in seconds.":
        |values, to| to.write_histogram(&values.snapshot.counters.reaction_times);
    Gauge "pjw_behind_seconds" [] "How long after its due time the last timed scan began, in seconds.":
        |values, to| to.write_seconds(values.snapshot.counters.scan_lateness);
    Counter "pjw_kernel_events_total" [] "Process events from the kernel (fork, exec, exit and others).":
        |values, to| to.write_value(values.snapshot.counters.process_events);
    Counter "pjw_overruns_total" []
        "How often process events were lost: they came faster than they were read, or the kernel had no memory for one.":
        |values, to| to.write_value(values.snapshot.counters.event_overruns);
    Counter "pjw_actions_total" ["kind", "outcome"]
        "Changes to masks of threads, by kind (as in pjwctl plan) and outcome: done, gone (the thread had ended), refused (by the kernel).":
        |values, to| by_outcome(to, MASK_ACTION_KINDS.map(|kind| kind.name()), values.snapshot.counters.mask_actions);
    Counter "pjw_wall_actions_total" ["kind", "outcome"]
        "Changes to cpusets of jobs, by kind (as in pjwctl plan) and outcome: done, gone, refused.":
        |values, to| by_outcome(to, CPUSET_ACTION_NAMES, values.snapshot.counters.cpuset_actions);
    Counter "pjw_violations_total" []
        "How often a thread was found outside its job's cores, or requested other CPUs.":
        |values, to| to.write_value(values.snapshot.counters.mask_violations);
    Counter "pjw_audit_failures_total" []
        "Jobs whose plan was dropped because it failed the audit; always a bug of pjw.":
        |values, to| to.write_value(values.snapshot.counters.rejected_plans);
    Counter "pjw_journal_faults_total" []
        "Cycles that changed nothing because the journal could not be written, and failures to rewrite the journal.":
        |values, to| to.write_value(values.snapshot.counters.journal_failures);
    Gauge "pjw_stray_processes" [] "Processes that belong to no job, of users who have jobs here.":
        |values, to| to.write_value(values.snapshot.published.unassigned_processes);
    Gauge "pjw_warnings" ["code"] "Warnings of pjwctl status, by code; a code without a warning has no sample.":
        |values, to| by_label(to, values.warning_counts());
    Gauge "pjw_pool_pus" ["use"]
        "PUs of the machine, each counted once: free, allocated (to jobs), housekeeping, offline.":
        |values, to| {
            let PuCounts { free, allocated, housekeeping, offline } = values.pu_counts;
            let uses = ["free", "allocated", "housekeeping", "offline"];
            by_label(to, uses.into_iter().zip([free, allocated, housekeeping, offline]));
        };
    Gauge "pjw_machine_cores" [] "Cores of the machine.":
        |values, to| to.write_value(values.snapshot.published.status.summary.node.cores);
    Gauge "pjw_fits_cores" ["domain"]
        "The largest request, in cores, that fits into one domain: l3, numa_node, package, machine.":
        |values, to| {
            let wire::Fits { l3, numa_node, package, machine } = values.snapshot.published.status.summary.fits;
            let domains = ["l3", "numa_node", "package", "machine"];
            by_label(to, domains.into_iter().zip([l3, numa_node, package, machine]));
        };
    Gauge "pjw_jobs" ["state"]
        "Jobs, by state: running, reserved (no process yet), waiting (for cores), observed (count unknown), released.":
        |values, to| {
            let states = ["running", "reserved", "waiting", "observed", "released"];
            by_label(to, values.count_jobs_by(states, |job| &job.state));
        };
    Gauge "pjw_jobs_kept" ["by"]
        "Jobs, by what keeps them on their cores: cpuset, affinity (masks) or none.":
        |values, to| by_label(to, values.count_jobs_by(["cpuset", "affinity", "none"], |job| &job.enforcement));
    Gauge "pjw_jobs_folded" []
        "Jobs that have no samples of their own and are summed under the jobid other (metrics.max_jobs).":
        |values, to| to.write_value(values.summed_jobs);
    Gauge "pjw_job_cores" ["jobid"] "Cores that a job holds.":
        |values, to| by_job(values, to, |job| job.cores);
    Gauge "pjw_job_pus" ["jobid"] "PUs that a job holds.":
        |values, to| by_job(values, to, |job| job.pus);
    Gauge "pjw_job_requested_cores" ["jobid"] "Cores that a job requested; 0 if unknown.":
        |values, to| by_job(values, to, |job| job.requested_cores);
    Gauge "pjw_job_processes" ["jobid"] "Processes of a job.":
        |values, to| by_job(values, to, |job| job.processes);
    Gauge "pjw_job_threads" ["jobid"] "Threads of a job.":
        |values, to| by_job(values, to, |job| job.threads);
    Gauge "pjw_job_hot_threads" ["jobid"] "Threads of a job that want a PU most of the time: they run or wait for one.":
        |values, to| by_job(values, to, |job| job.hot_threads);
    Gauge "pjw_job_pinned_threads" ["jobid"] "Threads of a job that are pinned to one PU.":
        |values, to| by_job(values, to, |job| job.pinned_threads);
    Gauge "pjw_job_outside_threads" ["jobid"] "Threads of a job that were last seen outside its cores.":
        |values, to| by_job(values, to, |job| job.outside_threads);
    Gauge "pjw_job_running_pus" ["jobid"]
        "PUs that the threads of a job ran on, on average (smoothed over some intervals).":
        |values, to| by_job(values, to, |job| {
            thousandths(job.demand.total_permille.saturating_sub(job.demand.waiting_permille))
        });
    Gauge "pjw_job_waiting_pus" ["jobid"]
        "PUs that the threads of a job waited for on a run queue, on average (smoothed over some intervals).":
        |values, to| by_job(values, to, |job| thousandths(job.demand.waiting_permille));
};

fn by_job<V: Display>(values: &MetricValues<'_>, to: &mut SampleWriter<'_>, value: fn(&JobMetrics) -> V) {
    by_label(to, values.jobs.iter().map(|job| (job.id.as_str(), value(job))));
}

fn by_label<'l, V: Display>(to: &mut SampleWriter<'_>, samples: impl IntoIterator<Item = (&'l str, V)>) {
    samples.into_iter().for_each(|(label, value)| to.write_labelled(&[label], value));
}

/// Writes one sample for each kind of change and each outcome. `counts` has the numbers in the order of `kinds` and
/// of [`CHANGE_OUTCOME_NAMES`].
fn by_outcome<const N: usize>(
    to: &mut SampleWriter<'_>,
    kinds: [&'static str; N],
    counts: [[u64; CHANGE_OUTCOME_NAMES.len()]; N],
) {
    for (kind, counts) in kinds.iter().zip(counts) {
        for (outcome, count) in CHANGE_OUTCOME_NAMES.iter().zip(counts) {
            to.write_labelled(&[kind, outcome], count);
        }
    }
}

/// Permille as a fraction, or milliseconds as seconds. Exact.
fn thousandths(thousandths: u64) -> String {
    format!("{}.{:03}", thousandths / 1000, thousandths % 1000)
}
