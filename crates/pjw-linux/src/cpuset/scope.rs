//! Cpusets in transient scopes of systemd: below the slice of pjwd, `pjw.slice`, and at the root for isolated cpusets.

use std::collections::BTreeSet;
use std::time::Instant;

use pjw_core::cpuset::CpuSet;
use pjw_core::cpuset_group::{CpusetOutcome, JobCpuset};
use pjw_core::ids::{ProcessId, Uid};
use pjw_core::own_cgroups::OwnCgroupNames;

use super::context::{CpusetContext, Result, SYSTEMD_POLL_INTERVAL, SYSTEMD_TIMEOUT, refused_outcome};
use super::writing::KnownCpusets;
use super::{freezer, idle, marks, moving, own, unrelated_threads, writing};
use crate::cgroup::{CgroupDir, CpusetConfig};
use crate::sys::online::{possible_cpus, possible_nodes};
use crate::systemd::{SystemdError, TransientScope};

/// Creates the systemd scope of a job, or changes the cpuset of the scope if it exists. A scope is a systemd unit
/// with a cgroup. `job_cpuset` has the settings of the cpuset, `owner` is the user id of the job's owner, and `group`
/// is the cgroup of the scope. systemd moves `initial_processes` into a new scope. Returns the PUs (logical CPUs)
/// that the kernel grants.
///
/// # Errors
/// [`CpusetOutcome::Gone`] if the scope does not exist and all initial processes have ended.
/// [`CpusetOutcome::Refused`] if systemd or the kernel refuses a step.
pub(super) fn create_or_update_scope(
    context: &mut CpusetContext<'_>,
    job_cpuset: &JobCpuset,
    owner: Uid,
    group: &CgroupDir,
    initial_processes: &[ProcessId],
) -> Result<CpuSet> {
    let (unit, slice) = unit_and_slice(group)?;
    if let Err(outcome) = enable_controller_above(context, group, slice) {
        reset_unit_cpuset(context, group, unit);
        return Err(outcome);
    }
    if job_cpuset.spec.idle
        && let Err(outcome) = idle::ensure_slice(context, slice)
    {
        idle::stop_empty_slice(context, slice);
        return Err(outcome);
    }
    let before = group.exists().then(|| group.read_cpuset()).and_then(Result::ok);
    let initial: Vec<(ProcessId, String)> = initial_processes
        .iter()
        .filter_map(|&process| Some((process, moving::process_cpuset_path(context.proc, process)?)))
        .collect();
    let created = match &before {
        Some(now) => update_scope(context, job_cpuset, group, unit, now),
        None if group.exists() => {
            Err(refused_outcome(format!("the scope {} exists and has no cpuset", group.path)))
        }
        None if initial.is_empty() => return Err(CpusetOutcome::Gone),
        None => {
            let scope = TransientScope {
                unit: unit.to_owned(),
                slice: slice.to_owned(),
                description: format!("Cores of job {}, managed by pjwd", job_cpuset.job),
                pids: initial.iter().map(|(process, _)| process.pid).collect(),
                cpus: job_cpuset.spec.cpus.clone(),
                mems: job_cpuset.spec.mems.clone(),
            };
            context.systemd.start_scope(&scope).map_err(|fault| refusal(unit, "be created", &fault))
        }
    };
    let outcome = created
        .and_then(|()| wait_until_applied(context, job_cpuset, group, &initial, before.is_none()))
        .and_then(|effective| {
            if job_cpuset.spec.idle {
                // The slice may have been stopped as an empty one just before.
                idle::ensure_slice(context, slice)?;
            }
            freezer::set_frozen(context, group, job_cpuset.spec.frozen).map(|()| effective)
        });
    if outcome.is_ok() {
        marks::write_owner(group, owner);
        if before.is_none() {
            for origin in initial.iter().filter_map(|(_, origin)| context.hierarchy.cgroup(origin)) {
                marks::record_origin(group, &origin);
            }
        }
    } else {
        match before {
            Some(files) => restore_scope(context, unit, group, &files),
            None => move_processes_back(context, group, &initial),
        }
        if job_cpuset.spec.idle {
            idle::stop_empty_slice(context, slice);
        }
    }
    outcome
}

/// Moves the processes `initial` from the new scope with the cgroup `group` back to their earlier cgroups, after the
/// creation of the scope has failed. systemd removes the empty scope itself. Errors are ignored.
fn move_processes_back(context: &mut CpusetContext<'_>, group: &CgroupDir, initial: &[(ProcessId, String)]) {
    for (process, earlier_cgroup) in initial {
        if let Some(cgroups) = moving::process_cgroups(context.proc, *process) {
            let _ = moving::move_between(context, *process, &cgroups, &group.path, earlier_cgroup);
        }
    }
}

/// Resets the cpuset in the unit of a scope that has no cpuset controller. When the controller returns,
/// systemd would otherwise restore an outdated cpuset.
fn reset_unit_cpuset(context: &mut CpusetContext<'_>, group: &CgroupDir, unit: &str) {
    if group.exists()
        && let Err(fault) = context.systemd.set_cpuset(unit, Some(&possible_cpus()), Some(&possible_nodes()))
    {
        tracing::debug!(%fault, unit, "the unit keeps an outdated cpuset");
    }
}

/// Returns the names of the systemd unit and of the slice of the scope with the cgroup `group`. The slice of a scope at
/// the root is `-.slice`.
///
/// # Errors
/// If `group` is not the cgroup of a scope of pjwd, according to its path.
fn unit_and_slice(group: &CgroupDir) -> Result<(&str, &str)> {
    let found = OwnCgroupNames::from_cgroup_path(&group.path).and_then(|own| {
        let (above, unit) = group.path.rsplit_once('/')?;
        let (slice, directory) = match above.strip_prefix('/') {
            None => ("-.slice", own.default_parent_path()),
            Some(slice) if slice == own.slice_name() => (slice, own.default_parent_path()),
            Some(slice) if slice == own.besteffort_slice_name() => (slice, own.besteffort_parent_path()),
            Some(_) => return None,
        };
        let name = unit.strip_prefix(directory.trim_start_matches('/'))?;
        (name.starts_with('-') && name.ends_with(".scope")).then_some((unit, slice))
    });
    found.ok_or_else(|| refused_outcome(format!("the cgroup {} is no scope of pjwd", group.path)))
}

/// Enables the cpuset controller for `group`, the cgroup of a scope (a systemd unit with a cgroup), if it is disabled
/// in a cgroup above. Another program can disable it there, and systemd does not notice that. `slice` is the name of
/// the scope's slice. Does nothing if the controller is enabled. If the parent cgroup does not exist yet, only checks
/// the configuration of systemd.
///
/// # Errors
/// If systemd is configured to disable the controller (`DisableControllers=`), or if systemd or the kernel refuses a
/// step.
fn enable_controller_above(context: &mut CpusetContext<'_>, group: &CgroupDir, slice: &str) -> Result<()> {
    let above = group.parent();
    if above.enables_controller("cpuset") {
        return Ok(());
    }
    for slice in BTreeSet::from(["-.slice", slice]) {
        if context.systemd.slice_disables_cpusets(slice).map_err(|fault| refusal(slice, "be read", &fault))? {
            return Err(refused_outcome(format!(
                "systemd disables cpusets for all scopes of {slice}: remove cpuset from the slice's DisableControllers="
            )));
        }
    }
    if above.exists() {
        own::enable_controller(&context.hierarchy.root(), "cpuset", None)?;
        own::enable_controller(&above, "cpuset", None)?;
    }
    Ok(())
}

/// Gives an existing scope (a systemd unit with a cgroup) the PUs and the NUMA nodes of `job_cpuset`. `unit` is the
/// name of the scope's unit, `group` is its cgroup, and `now` is the present configuration of the cgroup.
///
/// - Requests the values from systemd. systemd writes them some milliseconds after its reply.
/// - If the PUs change and the cpuset is not to be isolated, first writes the cpuset to the cgroup itself. So the
///   processes leave the other PUs at once.
/// - If `job_cpuset` has no NUMA nodes, the scope gets all possible nodes.
/// - If systemd refuses, restores the earlier PUs of the cgroup. Also marks the scope, because systemd possibly has
///   other PUs for it than the cgroup ([`marks::mark_systemd_outdated`]).
///
/// # Errors
/// [`CpusetOutcome::Gone`] if the unit does not exist. [`CpusetOutcome::Refused`] if systemd or the kernel refuses a
/// step.
fn update_scope(
    context: &mut CpusetContext<'_>,
    job_cpuset: &JobCpuset,
    group: &CgroupDir,
    unit: &str,
    now: &CpusetConfig,
) -> Result<()> {
    if !job_cpuset.spec.isolated {
        writing::end_partition(group, now)?;
    }
    let mems = match &job_cpuset.spec.mems {
        Some(mems) => Some(mems.clone()),
        // For an empty value, systemd would leave the old value in the cgroup.
        None if now.mems.is_empty() => None,
        None => Some(possible_nodes()),
    };
    let is_written = !job_cpuset.spec.isolated && job_cpuset.spec.cpus != now.cpus;
    if is_written {
        // systemd may write its earlier values meanwhile, as at a reload. It then writes the requested values later.
        writing::write_cpuset(group, &job_cpuset.spec, true, KnownCpusets::default())?;
    }
    // If systemd may have other PUs than the cgroup, the PUs are requested even if the cgroup already has them.
    let is_outdated = marks::is_systemd_outdated(group);
    let cpus = if is_outdated { CpuSet::new() } else { now.cpus.clone() };
    let known = CpusetConfig { cpus, ..now.clone() };
    let requested = request_cpuset(context, unit, &known, Some(&job_cpuset.spec.cpus), mems.as_ref());
    if requested.is_err() {
        marks::mark_systemd_outdated(group);
        if is_written {
            writing::restore_cpuset(group, now);
        }
    } else if is_outdated {
        marks::unmark_systemd_outdated(group);
    }
    requested
}

/// Requests from systemd that the scope with the unit `unit` gets the PUs `cpus` and the NUMA nodes `mems`. Requests
/// only values that differ from those in `now`. With `None`, the value stays.
///
/// # Errors
/// [`CpusetOutcome::Gone`] if the unit does not exist. [`CpusetOutcome::Refused`] if systemd refuses or does not reply.
fn request_cpuset(
    context: &mut CpusetContext<'_>,
    unit: &str,
    now: &CpusetConfig,
    cpus: Option<&CpuSet>,
    mems: Option<&CpuSet>,
) -> Result<()> {
    let cpus = cpus.filter(|cpus| **cpus != now.cpus);
    let mems = mems.filter(|mems| **mems != now.mems);
    if cpus.is_none() && mems.is_none() {
        return Ok(());
    }
    match context.systemd.set_cpuset(unit, cpus, mems) {
        Ok(()) => Ok(()),
        Err(SystemdError::NoSuchUnit) => Err(CpusetOutcome::Gone),
        Err(fault) => Err(refusal(unit, "be changed", &fault)),
    }
}

/// Waits until the cgroup `group` of a scope (a systemd unit with a cgroup) has the PUs and nodes of `job_cpuset`,
/// but at most 2 s: systemd replies before its change is complete. Then isolates the cpuset if `job_cpuset` says so,
/// and returns the PUs that the kernel grants.
///
/// If the scope is new (`is_new`), also waits until all living processes in `initial_processes` are in the cgroup.
/// The text with each of these processes is the path of its earlier cgroup, which is not used here.
///
/// # Errors
/// [`CpusetOutcome::Gone`] if the scope is new and all its initial processes have ended. [`CpusetOutcome::Refused`] if
/// the time has passed, or if the kernel grants another cpuset.
fn wait_until_applied(
    context: &mut CpusetContext<'_>,
    job_cpuset: &JobCpuset,
    group: &CgroupDir,
    initial_processes: &[(ProcessId, String)],
    is_new: bool,
) -> Result<CpuSet> {
    let deadline = Instant::now() + SYSTEMD_TIMEOUT;
    loop {
        let alive: Vec<String> = initial_processes
            .iter()
            .filter_map(|(process, _)| moving::process_cpuset_path(context.proc, *process))
            .collect();
        if is_new && alive.is_empty() {
            return Err(CpusetOutcome::Gone);
        }
        let has_processes = !is_new || alive.iter().all(|path| *path == group.path);
        let has_cpuset = group.read_cpuset().is_ok_and(|files| {
            files.cpus == job_cpuset.spec.cpus
                && job_cpuset.spec.mems.as_ref().is_none_or(|mems| *mems == files.mems)
        });
        if has_processes && has_cpuset {
            break;
        }
        if Instant::now() >= deadline {
            let what = if has_processes { "did not get its CPUs" } else { "did not get its processes" };
            return Err(refused_outcome(format!(
                "the scope {} {what} within {} s after systemd accepted the change: check whether pjwd runs in a container or the scope was changed by hand",
                group.path,
                SYSTEMD_TIMEOUT.as_secs()
            )));
        }
        std::thread::sleep(SYSTEMD_POLL_INTERVAL);
    }
    if job_cpuset.spec.isolated {
        writing::isolate(group)?;
    }
    writing::check_effective(group, &job_cpuset.spec)
}

/// Restores the earlier cpuset `before` of the scope with the unit `unit` and the cgroup `group` through systemd, after
/// a change has failed. If the scope has fewer PUs now, it keeps these ([`writing::cpus_to_restore`]). An error of
/// systemd is only logged.
fn restore_scope(context: &mut CpusetContext<'_>, unit: &str, group: &CgroupDir, before: &CpusetConfig) {
    let or_all = |set: &CpuSet, all: fn() -> CpuSet| if set.is_empty() { all() } else { set.clone() };
    let now = group.read_cpuset().unwrap_or_default();
    let cpus = or_all(&writing::cpus_to_restore(group, before, &now), possible_cpus);
    let mems = or_all(&before.mems, possible_nodes);
    let mems = Some(&mems).filter(|_| !now.mems.is_empty());
    if now.partition != before.partition {
        writing::restore_partition(group, before);
    }
    if let Err(CpusetOutcome::Refused { reason }) = request_cpuset(context, unit, &now, Some(&cpus), mems) {
        tracing::warn!(unit, reason, "the earlier cpuset could not be restored");
    }
}

/// Changes the cpuset of a systemd scope so that the cpuset excludes no possible PU (logical CPU) and no possible NUMA
/// node. Does not write the affinity masks of the processes in the scope. `group` is the cgroup of the scope. Returns
/// the PUs of the effective cpuset, which the cpusets of the cgroups above can still limit. If the scope has no cpuset
/// controller, returns the effective PUs of the nearest cgroup above that has a cpuset.
///
/// # Errors
/// If the kernel or systemd refuses the change, or if the old cpuset is still set 2 s after systemd accepted it.
pub(super) fn remove_limits(context: &mut CpusetContext<'_>, group: &CgroupDir) -> Result<CpuSet> {
    let (unit, _) = unit_and_slice(group)?;
    if has_no_cpuset(group) {
        reset_unit_cpuset(context, group, unit);
        return Ok(unrelated_threads::effective_cpus(context.hierarchy, &group.path));
    }
    let now = writing::read_cpuset(group)?;
    writing::end_partition(group, &now)?;
    let all = possible_cpus();
    let mems = Some(possible_nodes()).filter(|_| !now.mems.is_empty());
    let cpus = Some(&all).filter(|_| !now.cpus.is_empty());
    request_cpuset(context, unit, &now, cpus, mems.as_ref())?;
    let deadline = Instant::now() + SYSTEMD_TIMEOUT;
    loop {
        let present = writing::read_cpuset(group)?;
        let has_cpus = cpus.is_none_or(|cpus| *cpus == present.cpus);
        let has_mems = mems.as_ref().is_none_or(|mems| *mems == present.mems);
        if has_cpus && has_mems {
            return group.effective_cpus().map_err(writing::errno_to_outcome(group, "be read"));
        }
        if Instant::now() >= deadline {
            return Err(refused_outcome(format!(
                "the scope {} keeps its cpuset though systemd accepted the change",
                group.path
            )));
        }
        std::thread::sleep(SYSTEMD_POLL_INTERVAL);
    }
}

/// Waits up to 1 s until systemd removes the scope with the cgroup `group`, and then stops the scope if it still
/// exists. systemd removes a scope when its last process has ended. Afterwards, stops the slice of the scope if the
/// slice is empty.
///
/// # Errors
/// If the scope still contains processes, or if systemd refuses to stop the scope. A scope without the cpuset
/// controller limits no processes. If such a scope contains processes, it stays, and this is no error.
pub(super) fn remove(context: &mut CpusetContext<'_>, group: &CgroupDir) -> Result<()> {
    let (unit, slice) = unit_and_slice(group)?;
    let deadline = Instant::now() + SYSTEMD_TIMEOUT / 2;
    while group.exists() {
        if group.is_populated() {
            if has_no_cpuset(group) {
                return Ok(());
            }
            return Err(refused_outcome(format!(
                "the scope {} can't be removed: processes are still in it",
                group.path
            )));
        }
        if Instant::now() >= deadline {
            match context.systemd.stop_unit(unit) {
                Ok(()) | Err(SystemdError::NoSuchUnit) => break,
                Err(fault) => return Err(refusal(unit, "be stopped", &fault)),
            }
        }
        std::thread::sleep(SYSTEMD_POLL_INTERVAL);
    }
    if group.parent().path != "/" {
        idle::stop_empty_slice(context, slice);
    }
    Ok(())
}

/// Whether the cpuset controller was disabled for a scope, so that no cpuset is left.
fn has_no_cpuset(group: &CgroupDir) -> bool {
    group.exists() && matches!(group.read_cpuset(), Err(nix::errno::Errno::ENOENT))
}

fn refusal(unit: &str, what: &str, fault: &SystemdError) -> CpusetOutcome {
    refused_outcome(format!("the scope {unit} can't {what}: {fault}"))
}
