//! `pjwctl doctor`: scans the node, diagnoses it with `pjw_core::diagnosis`, and prints the findings.
//!
//! It changes nothing and starts no daemon. If no pjwd runs, it does not connect to the socket, because systemd would
//! then start one. Instead, it lets the program `pjwd` check the configuration. A mistake there may be the reason why
//! no pjwd runs.

mod configuration;
mod daemon;
mod orphans;
mod scan;
mod time_limit;

use std::process::ExitCode;

use anyhow::Context;
use nix::unistd::geteuid;
use pjw_core::diagnosis::{DaemonStatus, DiagnosisInput, conflicting_programs, diagnose, machine_facts};
use pjw_core::ids::{Comm, Pid, Uid};
use pjw_core::snapshot::{Observed, Snapshot};
use pjw_linux::topology::{TopologySource, load_topology};
use pjw_linux::{cgroup::CgroupMounts, survey, sys::clock};

use super::connection::{DaemonAddress, user_names};
use crate::cli::doctor::DoctorArgs;
use crate::output;
use crate::render::doctor::{self, DoctorReport};
use scan::JobScanner;

/// The maximum number of jobs whose cgroups are checked for a cpuset.
const MAX_CGROUPS: usize = 256;

/// Runs `pjwctl doctor`: examines the setup of the machine, and prints the findings. `request` contains the command
/// line options.
pub(super) fn run(daemon: &DaemonAddress, request: &DoctorArgs) -> anyhow::Result<ExitCode> {
    let input = collect_diagnosis_input(daemon)?;
    let report = DoctorReport::new(clock::hostname(), &input, &machine_facts(&input), &diagnose(&input));
    output::print_reply(request.json, &report, |report, term| {
        let names = user_names(input.jobs.iter().map(|job| job.owner.0));
        doctor::report_text(report, &names, request.show_all, term)
    })
}

/// Collects the input of the diagnosis: the topology of this machine, its jobs and their threads, facts about the
/// kernel and the host, and the state of the daemon at the address `daemon`. Takes more than one second, because the
/// threads are scanned twice.
///
/// # Errors
/// If the topology or `/proc` can't be read. A daemon that does not answer is no error.
fn collect_diagnosis_input(daemon: &DaemonAddress) -> anyhow::Result<DiagnosisInput> {
    let topology = load_topology(TopologySource::Live)?;
    let mut scanner = JobScanner::new(topology.clone())
        .context("can't read /proc, which the diagnosis needs: mount it (mount -t proc proc /proc)")?;
    let first = scanner.scan_processes();
    let daemon_runs = first
        .processes
        .values()
        .filter_map(Observed::present)
        .any(|process| scanner.is_daemon(process) && [Uid::ROOT, caller_uid()].contains(&process.uid));
    let cpuset_support = survey::read_cpuset_support();
    let mounts = CgroupMounts::read();
    let orphaned_jobs = orphans::find_orphaned_jobs(&mut scanner, &first, &mounts, &cpuset_support.hierarchy);
    let mut daemon_state = daemon::read_daemon_state(daemon, daemon_runs);
    let orphaned_jobs = daemon_state.add_orphaned_jobs(orphaned_jobs);
    let scans = scanner.scan_jobs_twice(&first, &daemon_state.records, &daemon_state.housekeeping);
    let processes: Vec<(Pid, Uid, Comm)> = programs(&scanner, &scans.after).collect();
    let policy = scanner.policy();
    let mut host = survey::read_host_facts(&scans.after.online);
    host.incomplete_scan_reason =
        scans.after.incomplete_reason.clone().or_else(|| scans.before.incomplete_reason.clone());
    host.in_container = !scan::sees_kernel_threads(&scans.after) && !host.hides_processes;
    let scan_pair = scanner.scan_pair(&scans);
    let mut jobs = scan_pair.observed_jobs(&daemon_state.held);
    for job in jobs.iter_mut().take(MAX_CGROUPS) {
        job.has_cpuset_controller =
            job.cgroup.as_deref().and_then(|path| survey::has_cpuset_controller(&mounts, path));
    }
    for job in &mut jobs {
        job.enforcement = daemon_state.kept_by.get(&job.id).cloned().unwrap_or_default();
    }
    // After the scans, which would measure the process that checks the configuration.
    let configuration_problems = match &daemon_state.status {
        DaemonStatus::Absent(_) => configuration::find_configuration_problems(),
        DaemonStatus::Unresponsive(_) | DaemonStatus::Responsive { .. } => Vec::new(),
    };
    Ok(DiagnosisInput {
        online: scans.after.online.intersection(topology.cpus()),
        topology,
        housekeeping_cpus: daemon_state.housekeeping,
        scan_interval_ms: scan_pair.scan_interval_ms(),
        jobs,
        orphaned_jobs,
        unassigned_processes: scan_pair.unassigned_processes(),
        interrupts: scans.interrupts.clone(),
        host,
        conflicting_programs: conflicting_programs(processes.iter().copied(), policy.first_person_uid),
        schedulers: scan::schedulers(&processes, policy.first_person_uid),
        cpuset_support,
        daemon: daemon_state.status,
        configuration_problems,
        caller_uid: caller_uid(),
        first_person_uid: policy.first_person_uid,
    })
}

/// The processes in `snapshot`, a scan by `scanner`, with their users and the names of their programs. Leaves out
/// kernel threads, and each pjwd that serves no jobs.
fn programs<'a>(
    scanner: &'a JobScanner,
    snapshot: &'a Snapshot,
) -> impl Iterator<Item = (Pid, Uid, Comm)> + 'a {
    let processes = snapshot.processes.values().filter_map(Observed::present);
    processes
        .filter(|process| !process.is_kernel_thread && !scanner.only_prints(process))
        .map(|process| (process.id.pid, process.uid, process.comm))
}

fn caller_uid() -> Uid {
    Uid(geteuid().as_raw())
}
