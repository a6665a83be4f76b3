//! `pjwctl doctor`: scans the node, diagnoses it with `pjw_core::diagnosis`, and prints the findings.
//!
//! It changes nothing and starts nothing. If no pjwd runs, it does not connect to the socket, because systemd would
//! then start one.

mod scan;
mod warden;

use std::process::ExitCode;

use anyhow::Context;
use nix::unistd::geteuid;
use pjw_core::diagnosis::{DiagnosisInput, conflicting_programs, diagnose, machine_facts};
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
pub(super) fn run(warden: &DaemonAddress, request: &DoctorArgs) -> anyhow::Result<ExitCode> {
    let input = collect_diagnosis_input(warden)?;
    let report = DoctorReport::new(clock::hostname(), &input, &machine_facts(&input), &diagnose(&input));
    output::print_reply(request.json, &report, |report, term| {
        let names = user_names(input.jobs.iter().map(|job| job.owner.0));
        doctor::report_text(report, &names, request.show_all, term)
    })
}

/// Collects the input of the diagnosis: the topology of this machine, its jobs and their threads, facts about the
/// kernel and the host, and the state of the daemon at the address `warden`. Takes more than one second, because the
/// threads are scanned twice.
///
/// # Errors
/// If the topology or `/proc` can't be read. A daemon that does not answer is no error.
fn collect_diagnosis_input(warden: &DaemonAddress) -> anyhow::Result<DiagnosisInput> {
    let topology = load_topology(TopologySource::Live)?;
    let mut scanner = JobScanner::new(topology.clone())
        .context("can't read /proc, which the diagnosis needs: mount it (mount -t proc proc /proc)")?;
    let first = scanner.scan_processes();
    let runs =
        first.processes.values().filter_map(Observed::present).any(|process| {
            process.comm == Comm::from("pjwd") && [Uid::ROOT, viewer()].contains(&process.uid)
        });
    let answer = warden::read_daemon_state(warden, runs);
    let watched = scanner.scan_jobs_twice(&first, &answer.records, &answer.housekeeping);
    let processes: Vec<(Pid, Uid, Comm)> = programs(&watched.after).collect();
    let policy = scanner.policy();
    let mut host = survey::read_host_facts(&watched.after.online);
    host.incomplete_scan_reason =
        watched.after.incomplete_reason.clone().or_else(|| watched.before.incomplete_reason.clone());
    let has_kernel = watched
        .after
        .processes
        .values()
        .filter_map(Observed::present)
        .any(|process| process.is_kernel_thread);
    host.in_container = !has_kernel && !host.hides_processes;
    let watch = scanner.scan_pair(&watched);
    let mut jobs = watch.observed_jobs(&answer.held);
    let mounts = CgroupMounts::read();
    for job in jobs.iter_mut().take(MAX_CGROUPS) {
        job.has_cpuset_controller =
            job.cgroup.as_deref().and_then(|path| survey::has_cpuset_controller(&mounts, path));
    }
    for job in &mut jobs {
        job.enforcement = answer.kept_by.get(&job.id).cloned().unwrap_or_default();
    }
    Ok(DiagnosisInput {
        online: watched.after.online.intersection(topology.cpus()),
        topology,
        scan_interval_ms: watch.scan_interval_ms(),
        jobs,
        unassigned_processes: watch.unassigned_processes(),
        interrupts: watched.interrupts.clone(),
        host,
        conflicting_programs: conflicting_programs(processes.iter().copied(), policy.first_person_uid),
        schedulers: scan::schedulers(&processes, policy.first_person_uid),
        cpuset_support: survey::read_cpuset_support(),
        warden: answer.warden,
        caller_uid: viewer(),
        first_person_uid: policy.first_person_uid,
    })
}

/// The processes that are not kernel threads.
fn programs(snapshot: &Snapshot) -> impl Iterator<Item = (Pid, Uid, Comm)> + '_ {
    let seen = snapshot.processes.values().filter_map(Observed::present);
    seen.filter(|process| !process.is_kernel_thread)
        .map(|process| (process.id.pid, process.uid, process.comm))
}

fn viewer() -> Uid {
    Uid(geteuid().as_raw())
}
