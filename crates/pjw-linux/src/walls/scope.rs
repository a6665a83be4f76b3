//! Walls that systemd makes: transient scopes below `pjw.slice`, and at the top for what is isolated.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use pjw_core::cpuset::{CpuSet, Pu};
use pjw_core::process::{Pid, ProcessId};
use pjw_core::wall::{SLICE, Wall, WallOutcome};

use super::tree::{Files, Group};
use super::{Site, bounds, bystanders, moving, own, refused};
use crate::systemd::{Fault, Scope};

/// The longest wait until what systemd was asked for is seen in the tree.
const PATIENCE: Duration = Duration::from_secs(2);
const GLANCE: Duration = Duration::from_millis(2);

/// Makes a scope, or gives one its bounds.
pub(super) fn raise(
    site: &mut Site<'_>,
    wall: &Wall,
    group: &Group,
    founders: &[ProcessId],
) -> Result<CpuSet, WallOutcome> {
    let (unit, slice) = names(group)?;
    if let Err(outcome) = switch_on_above(site, group, slice) {
        forget_bounds(site, group, unit);
        return Err(outcome);
    }
    let before = group.exists().then(|| group.files()).and_then(Result::ok);
    let homes: Vec<(ProcessId, String)> = founders
        .iter()
        .filter_map(|&founder| Some((founder, moving::whereabouts(site.proc, founder)?)))
        .collect();
    let raised = match &before {
        Some(now) => change(site, wall, group, unit, now),
        None if group.exists() => Err(refused(format!("the scope {} has no cpuset", group.path))),
        None if homes.is_empty() => return Err(WallOutcome::Gone),
        None => {
            let founders: Vec<Pid> = homes.iter().map(|(founder, _)| founder.pid).collect();
            begin(site, wall, unit, slice, founders)
        }
    };
    let outcome = raised.and_then(|()| settle(site, wall, group, &homes, before.is_none()));
    if outcome.is_err() {
        match before {
            Some(files) => put_back(site, unit, group, &files),
            None => homes.iter().for_each(|(founder, home)| send_home(site, *founder, group, home)),
        }
    }
    outcome
}

/// Where a scope has no cpuset, systemd would bring the last one back with the controller, long after the job has other
/// cores or is over.
fn forget_bounds(site: &mut Site<'_>, group: &Group, unit: &str) {
    if group.exists()
        && let Err(fault) = site.systemd.set(unit, Some(&possible_cpus()), Some(&possible_nodes()))
    {
        tracing::debug!(%fault, unit, "what it may use stays written in its unit");
    }
}

/// The names of a scope's unit and of its slice.
fn names(group: &Group) -> Result<(&str, &'static str), WallOutcome> {
    let stray = || refused(format!("{} is no scope of the warden's", group.path));
    let (above, unit) = group.path.rsplit_once('/').ok_or_else(stray)?;
    let slice = match above.strip_prefix('/') {
        None => "-.slice",
        Some(SLICE) => SLICE,
        Some(_) => return Err(stray()),
    };
    if unit.starts_with("pjw-") && unit.ends_with(".scope") { Ok((unit, slice)) } else { Err(stray()) }
}

/// Whether somebody switched the controller off above a scope that systemd thinks it is on for: every scope of the
/// warden's asks for it. On again, unless systemd was told to keep it from them.
fn switch_on_above(site: &mut Site<'_>, group: &Group, slice: &str) -> Result<(), WallOutcome> {
    let above = group.parent();
    if own::switches(&above, "cpuset") {
        return Ok(());
    }
    for slice in BTreeSet::from(["-.slice", slice]) {
        if site.systemd.withholds_cpusets(slice).map_err(|fault| cant(slice, "be asked for", &fault))? {
            return Err(refused(format!(
                "systemd keeps cpusets from all scopes of {slice}: take cpuset from its DisableControllers="
            )));
        }
    }
    if above.exists() {
        own::switch_on(&site.tree.top(), None)?;
        own::switch_on(&above, None)?;
    }
    Ok(())
}

fn begin(
    site: &mut Site<'_>,
    wall: &Wall,
    unit: &str,
    slice: &str,
    founders: Vec<Pid>,
) -> Result<(), WallOutcome> {
    let scope = Scope {
        unit: unit.to_owned(),
        slice: slice.to_owned(),
        description: format!("Cores of job {}, kept by pjwd", wall.job),
        founders,
        cpus: wall.bounds.cpus.clone(),
        mems: wall.bounds.mems.clone(),
    };
    site.systemd.start(&scope).map_err(|fault| cant(unit, "be made", &fault))
}

/// Asks only for what is not so already.
fn change(
    site: &mut Site<'_>,
    wall: &Wall,
    group: &Group,
    unit: &str,
    now: &Files,
) -> Result<(), WallOutcome> {
    if !wall.bounds.isolated {
        bounds::to_member(group, now)?;
    }
    let mems = match &wall.bounds.mems {
        Some(mems) => Some(mems.clone()),
        // Set empty, systemd would leave the old set in the tree.
        None if now.mems.is_empty() => None,
        None => Some(possible_nodes()),
    };
    let cpus = Some(&wall.bounds.cpus).filter(|&cpus| *cpus != now.cpus);
    let mems = mems.filter(|mems| *mems != now.mems);
    set(site, unit, cpus, mems.as_ref())
}

fn set(
    site: &mut Site<'_>,
    unit: &str,
    cpus: Option<&CpuSet>,
    mems: Option<&CpuSet>,
) -> Result<(), WallOutcome> {
    if cpus.is_none() && mems.is_none() {
        return Ok(());
    }
    match site.systemd.set(unit, cpus, mems) {
        Ok(()) => Ok(()),
        Err(Fault::NoSuchUnit) => Err(WallOutcome::Gone),
        Err(fault) => Err(cant(unit, "be changed", &fault)),
    }
}

/// Waits until the tree is as it was asked for: systemd answers before it is done.
fn settle(
    site: &mut Site<'_>,
    wall: &Wall,
    group: &Group,
    founders: &[(ProcessId, String)],
    is_new: bool,
) -> Result<CpuSet, WallOutcome> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let alive: Vec<String> =
            founders.iter().filter_map(|(founder, _)| moving::whereabouts(site.proc, *founder)).collect();
        if is_new && alive.is_empty() {
            return Err(WallOutcome::Gone);
        }
        let inside = !is_new || alive.iter().all(|path| *path == group.path);
        let asked = group.files().is_ok_and(|files| {
            files.cpus == wall.bounds.cpus && wall.bounds.mems.as_ref().is_none_or(|mems| *mems == files.mems)
        });
        if inside && asked {
            break;
        }
        if Instant::now() >= deadline {
            let what = if inside { "did not get its CPUs" } else { "did not get its processes" };
            return Err(refused(format!(
                "the scope {} {what} within {} s of systemd's yes: is it in a container, or was it changed by hand?",
                group.path,
                PATIENCE.as_secs()
            )));
        }
        std::thread::sleep(GLANCE);
    }
    if wall.bounds.isolated {
        bounds::isolate(group)?;
    }
    bounds::judge(group, &wall.bounds)
}

fn put_back(site: &mut Site<'_>, unit: &str, group: &Group, before: &Files) {
    let everything = |set: &CpuSet, all: fn() -> CpuSet| if set.is_empty() { all() } else { set.clone() };
    let cpus = everything(&before.cpus, possible_cpus);
    let mems = Some(everything(&before.mems, possible_nodes));
    let now = group.files().unwrap_or_default();
    let mems = mems.filter(|mems| *mems != now.mems && !now.mems.is_empty());
    let cpus = Some(&cpus).filter(|&cpus| *cpus != now.cpus);
    if now.partition != before.partition {
        bounds::put_partition_back(group, before);
    }
    if let Err(WallOutcome::Refused { hint }) = set(site, unit, cpus, mems.as_ref()) {
        tracing::warn!(unit, hint, "the cpuset from before could not be put back");
    }
}

/// A scope without anybody ends by itself.
fn send_home(site: &mut Site<'_>, founder: ProcessId, group: &Group, home: &str) {
    let moved = moving::whereabouts(site.proc, founder).is_some_and(|path| path == group.path);
    if let Some(home) = site.tree.group(home).filter(|_| moved) {
        moving::go(site.proc, site.tree, founder, group, &home);
    }
}

/// Lets everything in again.
pub(super) fn open(site: &mut Site<'_>, group: &Group) -> Result<CpuSet, WallOutcome> {
    let (unit, _) = names(group)?;
    if has_none(group) {
        forget_bounds(site, group, unit);
        return Ok(bystanders::effective(site.tree, &group.path));
    }
    let now = group.files().map_err(|errno| bounds::cant(group, "be read", errno))?;
    bounds::to_member(group, &now)?;
    let all = possible_cpus();
    let mems = Some(possible_nodes()).filter(|mems| !now.mems.is_empty() && now.mems != *mems);
    let cpus = Some(&all).filter(|&all| *all != now.cpus && !now.cpus.is_empty());
    set(site, unit, cpus, mems.as_ref())?;
    let deadline = Instant::now() + PATIENCE;
    loop {
        let files = group.files().map_err(|errno| bounds::cant(group, "be read", errno))?;
        if (cpus.is_none() || files.cpus == all) && mems.as_ref().is_none_or(|mems| *mems == files.mems) {
            return group.effective_cpus().map_err(|errno| bounds::cant(group, "be read", errno));
        }
        if Instant::now() >= deadline {
            return Err(refused(format!("the scope {} stays narrow though systemd said yes", group.path)));
        }
        std::thread::sleep(GLANCE);
    }
}

/// A scope ends by itself when it is empty. One that lingers is stopped, and the slice after the last. One without a cpuset
/// is no wall, and stays with whoever is in it.
pub(super) fn raze(site: &mut Site<'_>, group: &Group) -> Result<(), WallOutcome> {
    let (unit, slice) = names(group)?;
    let deadline = Instant::now() + PATIENCE / 2;
    while group.exists() {
        if is_populated(group) {
            if has_none(group) {
                return Ok(());
            }
            return Err(refused(format!("the scope {} stays: processes are still in it", group.path)));
        }
        if Instant::now() >= deadline {
            match site.systemd.stop(unit) {
                Ok(()) | Err(Fault::NoSuchUnit) => break,
                Err(fault) => return Err(cant(unit, "be stopped", &fault)),
            }
        }
        std::thread::sleep(GLANCE);
    }
    let above = group.parent();
    if slice == SLICE && above.exists() && above.children().is_empty() && !is_populated(&above) {
        // Should it stay, nothing but its name is left.
        if let Err(fault) = site.systemd.stop(SLICE) {
            tracing::debug!(%fault, "the empty {SLICE} stays");
        }
    }
    Ok(())
}

/// Whether the controller was switched off for a scope: nothing is left of its wall.
fn has_none(group: &Group) -> bool {
    group.exists() && matches!(group.files(), Err(nix::errno::Errno::ENOENT))
}

/// What can't be read counts as populated: a stop would end what is inside.
fn is_populated(group: &Group) -> bool {
    match group.read("cgroup.events") {
        Ok(text) => !text.lines().any(|line| line == "populated 0"),
        Err(errno) => !matches!(errno, nix::errno::Errno::ENOENT | nix::errno::Errno::ENODEV),
    }
}

fn cant(unit: &str, what: &str, fault: &Fault) -> WallOutcome {
    refused(format!("the scope {unit} can't {what}: {fault}"))
}

/// Every CPU there may ever be: v2 takes those that are not there yet.
pub(super) fn possible_cpus() -> CpuSet {
    machine("/sys/devices/system/cpu/possible")
}

fn possible_nodes() -> CpuSet {
    machine("/sys/devices/system/node/possible")
}

fn machine(file: &str) -> CpuSet {
    let text = std::fs::read_to_string(file).unwrap_or_default();
    text.parse().ok().filter(|set: &CpuSet| !set.is_empty()).unwrap_or_else(|| CpuSet::from(Pu(0)))
}
