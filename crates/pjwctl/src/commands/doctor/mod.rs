//! `pjwctl doctor`: looks at the node, has it judged by `pjw_core::diagnosis`, prints what was found.
//!
//! Nothing is changed, and nothing is started: where no pjwd runs, its socket is not touched either, behind which
//! systemd would start one.

mod ask;
mod look;

use std::process::ExitCode;

use anyhow::Context;
use nix::unistd::geteuid;
use pjw_core::diagnosis::{Examination, WardenSeen, diagnose, facts, masters};
use pjw_core::process::{Comm, Pid, Uid};
use pjw_core::snapshot::{Seen, Snapshot};
use pjw_linux::cgroup::Mounts;
use pjw_linux::topology::{TopologySource, load};
use pjw_linux::{clock, survey};

use super::{Warden, user_names};
use crate::cli::doctor::Doctor;
use crate::output;
use crate::render::doctor::{self, Report};
use look::Look;

/// Jobs whose cgroups are looked into for a cpuset.
const MOST_CGROUPS: usize = 256;

pub(super) fn run(warden: &Warden, wish: &Doctor) -> anyhow::Result<ExitCode> {
    let exam = examine(warden)?;
    let report = Report::new(clock::hostname(), &exam, &facts(&exam), &diagnose(&exam));
    if wish.json.json {
        output::print_json(&report)?;
    } else {
        let names = user_names(exam.jobs.iter().map(|job| job.owner.0));
        output::print(&doctor::report(&report, &names, wish.all, output::page()))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn examine(warden: &Warden) -> anyhow::Result<Examination> {
    let topology = load(TopologySource::Live)?;
    let mut look = Look::new(topology.clone()).context(
        "can't look at /proc, without which nothing can be told: mount it (mount -t proc proc /proc)",
    )?;
    let first = look.first();
    let runs =
        first.processes.values().filter_map(Seen::here).any(|process| {
            process.comm == Comm::from("pjwd") && [Uid::ROOT, viewer()].contains(&process.uid)
        });
    let answer = ask::warden(warden, runs);
    let watched = look.watch(&first, &answer.books, &answer.housekeeping);
    let everybody: Vec<(Pid, Uid, Comm)> = programs(&watched.after).collect();
    let policy = look.policy();
    let mut host = survey::host_facts(&watched.after.online);
    host.blind = watched.after.blind.clone().or_else(|| watched.before.blind.clone());
    let has_kernel = watched.after.processes.values().filter_map(Seen::here).any(|process| process.kernel);
    host.container = !has_kernel && !host.hides_processes;
    let watch = look.judged(&watched);
    let mut jobs = watch.jobs(&answer.held);
    let mounts = Mounts::find();
    for job in jobs.iter_mut().take(MOST_CGROUPS) {
        job.has_cpuset = job.cgroup.as_deref().and_then(|path| survey::has_cpuset(&mounts, path));
    }
    for job in &mut jobs {
        job.kept_by = answer.kept_by.get(&job.id).cloned().unwrap_or_default();
    }
    Ok(Examination {
        online: watched.after.online.intersection(topology.cpus()),
        topology,
        span_ms: watch.span_ms(),
        jobs,
        bystanders: watch.bystanders(),
        interrupts: watched.interrupts.clone(),
        host,
        masters: masters(everybody.iter().copied(), policy.first_person_uid),
        schedulers: look::schedulers(&everybody, policy.first_person_uid),
        ground: survey::ground_by_looking(),
        warden: answer.warden,
        viewer: viewer(),
        first_person_uid: policy.first_person_uid,
    })
}

/// The processes that are not the kernel's.
fn programs(snapshot: &Snapshot) -> impl Iterator<Item = (Pid, Uid, Comm)> + '_ {
    let seen = snapshot.processes.values().filter_map(Seen::here);
    seen.filter(|process| !process.kernel).map(|process| (process.id.pid, process.uid, process.comm))
}

fn viewer() -> Uid {
    Uid(geteuid().as_raw())
}

/// What is said where no warden runs.
fn absent() -> WardenSeen {
    WardenSeen::Absent(
        "pjwd is not running; start it with: systemctl start pjwd, or as yourself: pjwd".to_owned(),
    )
}
