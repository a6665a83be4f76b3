//! `pjwd --release-all`: restores what an earlier daemon changed, and exits. For the removal of the package, and for
//! use after the daemon died. Needs only the state directory, no socket and no configuration.
//!
//! The restore uses cycles of the same warden, with all batch systems and pinning switched off. So no new decision is
//! made while everything is restored. No daemon is running that could start a new job afterwards, as after `pjwctl
//! release --all`.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, bail};
use nix::unistd::Uid;
use pjw_core::command::{Caller, Command, Reply};
use pjw_core::cpuset_group::LeftoverCpuset;
use pjw_core::ids::{self, Pid};
use pjw_core::policy::{DaemonMode, Policy};
use pjw_core::ports::{Journal, MachineInterface};
use pjw_core::{job::JobId, record::Record, snapshot::Observed, state::WardenState};
use pjw_linux::topology::{TopologySource, load_topology};
use pjw_linux::{node::LinuxMachine, probe, sys::clock};

use crate::host::directories;
use crate::job_files;
use crate::store::journal::{FileJournal, JOURNAL_FILE_NAMES, JournalError, has_journal_files};
use crate::warden::{CycleReport, Warden};

/// The largest number of cycles. A job that forks all the time needs several.
const MAX_CYCLES: usize = 20;

/// The delay between two cycles. Over all cycles it is long enough to repeat a call to an unresponsive systemd.
const CYCLE_DELAY: Duration = Duration::from_millis(700);

/// The delay between two cycles while only a fork may be unfinished that began before the release.
const FORK_DELAY: Duration = Duration::from_millis(20);

/// The number of scans before the release. A process that was born before the fork events are read, and that ended
/// during the first scan, may have children: the next scan finds these.
const FINDING_SCANS: usize = 2;

/// The result of `pjwd --release-all`, which undoes what an earlier pjwd changed for its jobs: the released jobs, and
/// remarks for the user.
#[derive(Debug, Default)]
pub struct ReleaseSummary {
    /// The ids of the jobs that were released: the changes of affinity masks and cpusets for these jobs were
    /// undone.
    pub released_jobs: Vec<JobId>,
    /// Sentences for the user, for example about records that could not be used or processes whose masks may
    /// be wrong.
    pub remarks: Vec<String>,
    /// Whether all changes of the earlier pjwd were undone. False if neither records nor cpusets of the earlier pjwd
    /// were found. Also false if a process may still have an affinity mask from the earlier pjwd, or if not all
    /// processes could be searched for such masks.
    pub is_complete: bool,
}

/// Undoes what an earlier pjwd changed for its jobs. Restores the affinity masks of the jobs' threads, and removes
/// the cpusets of the jobs. Reads the records of these changes from `state_dir`, the state directory of the earlier
/// pjwd. Also removes cpusets of an earlier pjwd that have no record. If there are neither records nor such cpusets,
/// changes nothing and does not create `state_dir`.
///
/// If records are missing or can't be read, the original masks of some threads are unknown.
/// [`ReleaseSummary::remarks`] then names the processes whose masks an earlier pjwd possibly set.
///
/// `is_second_pjwd` must be true if the earlier pjwd was started with `--beside`, as a second pjwd of the same user.
/// The names of the cpusets of a second pjwd contain a hash of the path `state_dir`.
///
/// # Errors
/// If a running daemon uses `state_dir`. If the journal (the files with the records) can't be used. If, after several
/// attempts, an affinity mask is not restored. If, after several attempts, a cpuset still keeps its processes off an
/// online PU (logical CPU).
pub fn release_all(state_dir: &Path, is_second_pjwd: bool) -> anyhow::Result<ReleaseSummary> {
    let own_cgroups = directories::own_cgroup_names(state_dir, is_second_pjwd);
    let mut node = LinuxMachine::new(pjw_sources::job_variable_names()).context("can't open /proc")?;
    let is_recorded = has_journal_files(state_dir, false);
    // Only a pjwd of root makes cgroups.
    let is_own = |found: &LeftoverCpuset| found.other_writer.is_none();
    let has_cgroups = Uid::effective().is_root() && node.list_job_cpusets(&own_cgroups).iter().any(is_own);
    if !is_recorded && !has_cgroups {
        return find_unrecorded_masks(state_dir, node);
    }
    directories::make_state_directory(state_dir, Uid::effective().as_raw())?;
    let (mut journal, mut recovered) = FileJournal::open(state_dir, &clock::boot_id()?)?;
    recovered.has_lost_records |= !recovered.is_found;
    // A full disk must not prevent the release: it changes only what is recorded already. The journal is written once
    // more at the end.
    let _ = journal.write_recovered_records(&mut recovered);
    let capabilities = probe::probe_kernel_support(&own_cgroups);
    let only_managed_user = only_user(capabilities.can_set_all_masks);
    let cpuset_support = capabilities.cpuset_support;
    let policy = Policy { only_managed_user, cpuset_support, own_cgroups, ..release_policy() };
    let state = WardenState::new(load_topology(TopologySource::Live)?, &policy.housekeeping_cpus);
    let affinity_persists = policy.cpuset_support.affinity_persists;
    node.configure_cpuset_changes(affinity_persists, &policy.own_cgroups).context("can't open /proc")?;
    let events = probe::open_process_events().ok();
    let has_events = events.is_some();
    node.set_process_event_socket(events);
    let mut warden = Warden::new(node, journal, state, recovered.records, policy, local_host());
    warden.set_fork_events_complete_since(has_events.then(|| clock::now().since_boot));
    warden.find_leftover_cpusets();

    let is_any_unrecorded = warden.state().cpusets.has_undecided_leftovers();
    let mut summary = ReleaseSummary { remarks: recovered.remarks, ..ReleaseSummary::default() };
    if is_any_unrecorded {
        // The cpusets without a record become jobs, whose masks are read before the release.
        run_cycle(&mut warden, &[], has_events);
    }
    find_processes(&mut warden, has_events);
    release_all_jobs(&mut warden, has_events, &mut summary)?;
    if warden.state().unknown_masks.is_search_pending() {
        // While changes were planned, a cycle that changes nothing had one scan.
        observe(&mut warden, 1, has_events);
    }
    add_unknown_mask_remarks(warden.state(), &mut summary);
    job_files::remove_files_of_all_jobs(state_dir);
    if let Err(fault) = warden.rewrite_journal() {
        // The next daemon would take up the released jobs again.
        remove_journal_files(state_dir).with_context(|| {
            format!("everything is restored, but {fault}, and the journal can't be removed")
        })?;
        summary.remarks.push(format!("the journal was removed, because {fault}"));
    }
    Ok(summary)
}

/// Removes the files of the journal. That needs no space, as writing an empty journal does.
fn remove_journal_files(state_dir: &Path) -> std::io::Result<()> {
    JOURNAL_FILE_NAMES.iter().try_for_each(|name| directories::remove_file_if_exists(&state_dir.join(name)))
}

/// Searches for processes whose affinity masks an earlier pjwd may have set, if nothing is recorded in `state_dir`
/// and no job has a cpuset. Changes nothing. Returns a summary with a remark about each such process. The release
/// never counts as complete, because another daemon may have its records elsewhere.
fn find_unrecorded_masks(state_dir: &Path, node: LinuxMachine) -> anyhow::Result<ReleaseSummary> {
    let policy = Policy { only_managed_user: only_user(Uid::effective().is_root()), ..release_policy() };
    let state = WardenState::new(load_topology(TopologySource::Live)?, &policy.housekeeping_cpus);
    let mut warden = Warden::new(node, NoJournal, state, Vec::new(), policy, local_host());
    warden.state_mut().unknown_masks.request_search();
    find_processes(&mut warden, false);
    let remarks = vec![format!(
        "nothing is recorded in {}: a daemon with another --state-dir keeps its records there",
        state_dir.display()
    )];
    let mut summary = ReleaseSummary { remarks, ..ReleaseSummary::default() };
    add_unknown_mask_remarks(warden.state(), &mut summary);
    summary.is_complete = false;
    Ok(summary)
}

/// The policy without batch systems and pinning.
fn release_policy() -> Policy {
    let own_pid = Some(Pid(std::process::id()));
    Policy { sources: BTreeSet::new(), pin_hot_threads: false, own_pid, ..Policy::default() }
}

/// Returns the only user whose processes this process can change. `None` if it can change those of all users.
fn only_user(can_set_all_masks: bool) -> Option<ids::Uid> {
    (!can_set_all_masks).then(|| ids::Uid(Uid::effective().as_raw()))
}

fn local_host() -> pjw_sources::LocalHost {
    pjw_sources::LocalHost { name: clock::hostname(), flux_user: None }
}

/// Releases all jobs of `warden`. For this, runs cycles until no recorded mask and no cpuset is left, but at most
/// [`MAX_CYCLES`]. Adds the released jobs to `summary`. Also adds a remark about each cpuset whose cgroup still
/// exists, because processes are left in it. `has_events` says whether the kernel reports forks.
///
/// # Errors
/// If the release is refused, if an affinity mask is not restored, or if a cpuset still restricts its processes.
fn release_all_jobs<J: Journal>(
    warden: &mut Warden<LinuxMachine, J>,
    has_events: bool,
    summary: &mut ReleaseSummary,
) -> anyhow::Result<()> {
    let caller = Caller { uid: ids::Uid(Uid::effective().as_raw()), is_admin: true };
    let release_command = Command::ReleaseAll { caller };
    for _ in 0..MAX_CYCLES {
        let report = run_cycle(warden, std::slice::from_ref(&release_command), has_events);
        for reply in report.replies {
            if let Reply::Released(jobs) = reply? {
                summary.released_jobs.extend(jobs);
            }
        }
        // A process may have been forked before the mask of its parent was restored, and not be found by a scan yet.
        let mut unscanned = warden.state().lineage.unscanned_descendants();
        let no_mask_inherited = unscanned.all(|(_, child)| child.inherited_mask_requests.is_empty());
        let nothing_recorded = warden.state().journaled_masks().next().is_none()
            && warden.state().released_masks.is_empty()
            && warden.state().cpusets.paths().next().is_none();
        if !report.has_unfinished_work && nothing_recorded && no_mask_inherited {
            break;
        }
        // systemd may be busy. Retry the requests without an answer after a delay.
        if warden.state().cpusets.paths().next().is_some() {
            std::thread::sleep(CYCLE_DELAY);
        } else if !report.has_unfinished_work {
            std::thread::sleep(FORK_DELAY);
        }
    }
    if let Some(path) = narrow_cpusets(warden.state()).next() {
        bail!("the cpuset of {path} still restricts its processes: run pjwd --release-all again");
    }
    for path in warden.state().cpusets.paths() {
        let mut remark = format!(
            "the cpuset of {path} no longer restricts its processes; the cgroup stays until its last process has ended"
        );
        if let Some(reason) = warden.state().cpusets.move_back_error(path) {
            remark += &format!(": {reason}, and pjwd --release-all moves it back then");
        }
        summary.remarks.push(remark);
    }
    let unrestored = warden.state().journaled_masks().count();
    if unrestored > 0 {
        let refused = warden.ongoing_failures().refused_masks.values().next();
        let why = refused
            .map_or_else(|| "the threads could not be changed".to_owned(), |refused| refused.reason.clone());
        bail!("{unrestored} affinity masks are not restored: {why}; run pjwd --release-all again");
    }
    Ok(())
}

/// Runs `cycles` cycles in the mode `observe`, which change nothing. `has_events` says whether the kernel reports
/// forks.
fn observe<J: Journal>(warden: &mut Warden<LinuxMachine, J>, cycles: usize, has_events: bool) {
    let enforcing = warden.policy().clone();
    warden.set_policy(Policy { mode: DaemonMode::Observe, ..enforcing.clone() });
    for _ in 0..cycles {
        run_cycle(warden, &[], has_events);
    }
    warden.set_policy(enforcing);
}

/// Finds the processes that were born while no daemon ran, so that they are released with their jobs. After records
/// were lost, also finds the masks that no record explains.
fn find_processes<J: Journal>(warden: &mut Warden<LinuxMachine, J>, has_events: bool) {
    if warden.state().jobs.keys().next().is_some() {
        observe(warden, FINDING_SCANS, has_events);
    }
    if warden.state().unknown_masks.is_search_pending() {
        observe(warden, 1, has_events);
    }
}

/// Adds a remark to `summary` for each process whose mask an earlier pjwd may have set. The remark has the `taskset`
/// command that widens the mask. Also adds a remark if the search for such processes is not complete. Sets
/// `is_complete` of `summary` to true if there is no such process and the search is complete, and to false otherwise.
fn add_unknown_mask_remarks(state: &WardenState, summary: &mut ReleaseSummary) {
    let pids: BTreeSet<Pid> = state.unknown_masks.processes().map(|process| process.pid).collect();
    let is_search_pending = state.unknown_masks.is_search_pending();
    summary.is_complete = pids.is_empty() && !is_search_pending;
    let all = state.topology.cpus();
    summary.remarks.extend(pids.iter().map(|pid| {
        format!(
            "the mask of process {pid} may be that of an earlier pjwd: taskset -pac {all} {pid} widens it"
        )
    }));
    if is_search_pending {
        summary.remarks.push(
            "not all processes could be searched for masks of an earlier pjwd: run pjwd --release-all again"
                .to_owned(),
        );
    }
}

/// Runs one cycle (scan, decision and changes) that scans all processes and executes `commands`. Returns the report
/// of the cycle.
///
/// If the kernel dropped process events, also records since when all forks are known: since now, or not at all if the
/// kernel still drops events or reports no forks (`has_events` is false).
fn run_cycle<J: Journal>(
    warden: &mut Warden<LinuxMachine, J>,
    commands: &[Command],
    has_events: bool,
) -> CycleReport {
    let report = warden.run_cycle(warden.state().scan_request(true), commands);
    let count = warden.take_event_count();
    if count.still_dropping {
        warden.set_fork_events_complete_since(None);
    } else if count.events_lost {
        warden.set_fork_events_complete_since(has_events.then(|| clock::now().since_boot));
    }
    report
}

/// No journal, for cycles that change nothing.
#[derive(Debug)]
struct NoJournal;

impl Journal for NoJournal {
    type Fault = JournalError;

    fn append(&mut self, _: &[Record]) -> Result<(), JournalError> {
        Ok(())
    }

    fn reserve(&mut self, _: u64) -> bool {
        true
    }

    fn rewrite(&mut self, _: &[Record]) -> Result<(), JournalError> {
        Ok(())
    }
}

/// Returns the paths of the cgroups whose cpuset still restricts its processes: the cpuset lacks an online CPU.
fn narrow_cpusets(state: &WardenState) -> impl Iterator<Item = &str> {
    let online = state.pool.online_cpus();
    state.cpusets.paths().filter(move |path| {
        let cgroup = state.cgroups.get(*path).and_then(Observed::present);
        let cpuset = cgroup.and_then(|cgroup| cgroup.cpuset.as_ref());
        cpuset.is_some_and(|cpuset| {
            !cpuset.effective_cpus.is_empty() && !online.is_subset(&cpuset.effective_cpus)
        })
    })
}

#[cfg(test)]
mod tests {
    use pjw_core::testing::regular_topology;

    use super::*;

    #[test]
    fn a_release_is_complete_only_after_the_search_for_unknown_masks() {
        let topology = regular_topology(1, 1, 1, 2, 1);
        let mut state = WardenState::new(topology, &release_policy().housekeeping_cpus);
        let mut summary = ReleaseSummary::default();
        add_unknown_mask_remarks(&state, &mut summary);
        assert!(summary.is_complete && summary.remarks.is_empty());
        state.unknown_masks.request_search();
        add_unknown_mask_remarks(&state, &mut summary);
        assert!(!summary.is_complete && summary.remarks[0].contains("run pjwd --release-all again"));
    }
}
