//! The table of all metrics: name, type, labels, meaning and source of the values.
//!
//! This is the only definition, for the text file, for the endpoint, and for the tests that compare
//! `docs/metrics.md`, the alert rules and the dashboard with it. The names are public: renaming or removing one needs
//! an entry in the CHANGELOG.

use pjw_ipc::wire;

use super::counters::{CPUSET_ACTIONS, CycleCause, MASK_ACTIONS, OUTCOME_LABELS};
use super::facts::{JobMetrics, MetricValues};
use super::family::{MetricFamily, MetricKind, SampleWriter};

/// The label with the job id. The name is not `job`, because Prometheus sets that label to the scrape job.
const JOB: &[&str] = &["jobid"];

const fn counter(
    name: &'static str,
    labels: &'static [&'static str],
    help: &'static str,
    write_samples: fn(&MetricValues<'_>, &mut SampleWriter<'_>),
) -> MetricFamily {
    MetricFamily { name, kind: MetricKind::Counter, labels, help, write_samples }
}

const fn gauge(
    name: &'static str,
    labels: &'static [&'static str],
    help: &'static str,
    write_samples: fn(&MetricValues<'_>, &mut SampleWriter<'_>),
) -> MetricFamily {
    MetricFamily { name, kind: MetricKind::Gauge, labels, help, write_samples }
}

/// The definitions of all metrics of pjwd, in the order in which the text lists them.
pub const FAMILIES: &[MetricFamily] = &[
    gauge("pjw_build_info", &["version"], "1, with the version of pjwd.", |facts, to| {
        to.labelled(&[&facts.snapshot.published.status.version], 1);
    }),
    gauge(
        "pjw_daemon_info",
        &["mode", "discovery"],
        "1, with the mode (enforce or observe) and how new processes are found (netlink or polling).",
        |facts, to| {
            let wire::Status { mode, discovery, .. } = &*facts.snapshot.published.status;
            to.labelled(&[mode, discovery], 1);
        },
    ),
    gauge("pjw_process_start_time_seconds", &[], "When pjwd started, in seconds since 1970.", |facts, to| {
        to.value(thousandths(facts.snapshot.started.0.cast_unsigned()));
    }),
    counter(
        "pjw_process_cpu_seconds_total",
        &[],
        "CPU time that pjwd used itself, in seconds.",
        |facts, to| to.seconds(facts.own.cpu),
    ),
    gauge(
        "pjw_process_resident_memory_bytes",
        &[],
        "Memory that pjwd holds itself, in bytes.",
        |facts, to| {
            to.value(facts.own.resident_bytes);
        },
    ),
    gauge(
        "pjw_last_cycle_timestamp_seconds",
        &[],
        "When the last cycle ended, in seconds since 1970.",
        |facts, to| to.value(thousandths(facts.snapshot.at.0.cast_unsigned())),
    ),
    counter(
        "pjw_cycles_total",
        &["cause"],
        "Cycles, by cause: event (scan of some processes), timer (scan of all jobs, and in a rescan of other processes that may have changed), full (scan of all processes).",
        |facts, to| {
            for (cause, count) in CycleCause::ALL.iter().zip(facts.snapshot.counters.cycles) {
                to.labelled(&[cause.name()], count);
            }
        },
    ),
    MetricFamily {
        name: "pjw_cycle_duration_seconds",
        kind: MetricKind::Histogram,
        labels: &[],
        help: "Duration of cycles, from the scan to the last change, in seconds.",
        write_samples: |facts, to| to.histogram(&facts.snapshot.counters.times),
    },
    MetricFamily {
        name: "pjw_reaction_seconds",
        kind: MetricKind::Histogram,
        labels: &[],
        help: "Time from the fork of a new process outside its job's cores to its corrected mask, by the kernel's clock, in seconds.",
        write_samples: |facts, to| to.histogram(&facts.snapshot.counters.reaction_times),
    },
    gauge(
        "pjw_behind_seconds",
        &[],
        "How long after its due time the last timed scan began, in seconds.",
        |facts, to| to.seconds(facts.snapshot.counters.scan_lateness),
    ),
    counter(
        "pjw_kernel_events_total",
        &[],
        "Process events from the kernel (fork, exec, exit and others).",
        |facts, to| to.value(facts.snapshot.counters.kernel_events),
    ),
    counter(
        "pjw_overruns_total",
        &[],
        "How often process events were lost: they came faster than they were read, or the kernel had no memory for one.",
        |facts, to| to.value(facts.snapshot.counters.overruns),
    ),
    counter(
        "pjw_actions_total",
        &["kind", "outcome"],
        "Changes to masks of threads, by kind (as in pjwctl plan) and outcome: done, gone (the thread had ended), \
         refused (by the kernel).",
        |facts, to| by_outcome(to, MASK_ACTIONS.map(|kind| kind.name()), facts.snapshot.counters.actions),
    ),
    counter(
        "pjw_wall_actions_total",
        &["kind", "outcome"],
        "Changes to cpusets of jobs, by kind (as in pjwctl plan) and outcome: done, gone, refused.",
        |facts, to| by_outcome(to, CPUSET_ACTIONS, facts.snapshot.counters.cpuset_actions),
    ),
    counter(
        "pjw_violations_total",
        &[],
        "How often a thread was found outside its job's cores, or requested other CPUs.",
        |facts, to| to.value(facts.snapshot.counters.violations),
    ),
    counter(
        "pjw_audit_failures_total",
        &[],
        "Jobs whose plan was dropped because it failed the audit; always a bug of pjw.",
        |facts, to| to.value(facts.snapshot.counters.audit_failures),
    ),
    counter(
        "pjw_journal_faults_total",
        &[],
        "Cycles that changed nothing because the journal could not be written, and failures to rewrite the journal.",
        |facts, to| to.value(facts.snapshot.counters.journal_faults),
    ),
    gauge(
        "pjw_stray_processes",
        &[],
        "Processes that belong to no job, of users who have jobs here.",
        |facts, to| to.value(facts.snapshot.published.unassigned),
    ),
    gauge(
        "pjw_warnings",
        &["code"],
        "Warnings of pjwctl status, by code; a code without a warning has no sample.",
        |facts, to| facts.warnings().iter().for_each(|(code, count)| to.labelled(&[code], count)),
    ),
    gauge(
        "pjw_pool_pus",
        &["use"],
        "PUs of the machine, each counted once: free, allocated (to jobs), housekeeping, offline.",
        |facts, to| {
            let pool = facts.pool;
            to.labelled(&["free"], pool.free);
            to.labelled(&["allocated"], pool.allocated);
            to.labelled(&["housekeeping"], pool.housekeeping);
            to.labelled(&["offline"], pool.offline);
        },
    ),
    gauge("pjw_machine_cores", &[], "Cores of the machine.", |facts, to| {
        to.value(facts.snapshot.published.status.node.cores);
    }),
    gauge(
        "pjw_fits_cores",
        &["domain"],
        "The largest request, in cores, that fits into one domain: l3, numa_node, package, machine.",
        |facts, to| {
            let wire::Fits { l3, numa_node, package, machine } = facts.snapshot.published.status.fits;
            to.labelled(&["l3"], l3);
            to.labelled(&["numa_node"], numa_node);
            to.labelled(&["package"], package);
            to.labelled(&["machine"], machine);
        },
    ),
    gauge(
        "pjw_jobs",
        &["state"],
        "Jobs, by state: running, reserved (no process yet), waiting (for cores), observed (count unknown), released.",
        |facts, to| {
            let states = ["running", "reserved", "waiting", "observed", "released"];
            facts
                .jobs_by(states, |job| &job.state)
                .iter()
                .for_each(|(state, jobs)| to.labelled(&[state], jobs));
        },
    ),
    gauge(
        "pjw_jobs_kept",
        &["by"],
        "Jobs, by what keeps them on their cores: cpuset, affinity (masks) or none.",
        |facts, to| {
            let means = ["cpuset", "affinity", "none"];
            facts
                .jobs_by(means, |job| &job.enforcement)
                .iter()
                .for_each(|(by, jobs)| to.labelled(&[by], jobs));
        },
    ),
    gauge(
        "pjw_jobs_folded",
        &[],
        "Jobs that have no samples of their own and are summed under the jobid other (metrics.max_jobs).",
        |facts, to| to.value(facts.summed_jobs),
    ),
    gauge("pjw_job_cores", JOB, "Cores that a job holds.", |facts, to| {
        each(facts, to, |job| job.cores);
    }),
    gauge("pjw_job_pus", JOB, "PUs that a job holds.", |facts, to| each(facts, to, |job| job.pus)),
    gauge("pjw_job_requested_cores", JOB, "Cores that a job requested; 0 if unknown.", |facts, to| {
        each(facts, to, |job| job.requested);
    }),
    gauge("pjw_job_processes", JOB, "Processes of a job.", |facts, to| each(facts, to, |job| job.processes)),
    gauge("pjw_job_threads", JOB, "Threads of a job.", |facts, to| each(facts, to, |job| job.threads)),
    gauge("pjw_job_hot_threads", JOB, "Threads of a job that run most of the time.", |facts, to| {
        each(facts, to, |job| job.hot);
    }),
    gauge("pjw_job_pinned_threads", JOB, "Threads of a job that are pinned to one PU.", |facts, to| {
        each(facts, to, |job| job.pinned);
    }),
    gauge(
        "pjw_job_outside_threads",
        JOB,
        "Threads of a job that were last seen outside its cores.",
        |facts, to| each(facts, to, |job| job.outside),
    ),
    gauge(
        "pjw_job_running_pus",
        JOB,
        "PUs that the threads of a job ran on, on average (smoothed over some intervals).",
        |facts, to| {
            each(facts, to, |job| {
                thousandths(job.demand.total_permille.saturating_sub(job.demand.waiting_permille))
            });
        },
    ),
    gauge(
        "pjw_job_waiting_pus",
        JOB,
        "PUs that the threads of a job waited for on a run queue, on average (smoothed over some intervals).",
        |facts, to| each(facts, to, |job| thousandths(job.demand.waiting_permille)),
    ),
];

fn each<V: std::fmt::Display>(
    facts: &MetricValues<'_>,
    to: &mut SampleWriter<'_>,
    value: fn(&JobMetrics) -> V,
) {
    for job in &facts.jobs {
        to.labelled(&[&job.id], value(job));
    }
}

fn by_outcome<const N: usize>(
    to: &mut SampleWriter<'_>,
    kinds: [&'static str; N],
    counts: [[u64; OUTCOME_LABELS.len()]; N],
) {
    for (kind, counts) in kinds.iter().zip(counts) {
        for (outcome, count) in OUTCOME_LABELS.iter().zip(counts) {
            to.labelled(&[kind, outcome], count);
        }
    }
}

/// Permille as a fraction, or milliseconds as seconds. Exact.
fn thousandths(thousandths: u64) -> String {
    format!("{}.{:03}", thousandths / 1000, thousandths % 1000)
}
