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
use pjw_core::{ids, ids::Pid, job::JobId, policy::Policy, snapshot::Observed, state::WardenState};
use pjw_linux::topology::{TopologySource, load};
use pjw_linux::{node::LinuxNode, probe, sys::clock};

use crate::{host::directories, store::journal::FileJournal, warden::Warden};

/// The largest number of cycles. A job that forks all the time needs several.
const MAX_CYCLES: usize = 20;

/// The delay between two cycles. Over all cycles it is long enough to repeat a call to an unresponsive systemd.
const CYCLE_DELAY: Duration = Duration::from_millis(700);

/// What `pjwd --release-all` did, for its output.
#[derive(Debug, Default)]
pub struct ReleaseSummary {
    /// The ids of the jobs that were released.
    pub jobs: Vec<JobId>,
    /// Sentences for the user: which records could not be used, or that there were no records.
    pub remarks: Vec<String>,
}

/// Releases all jobs that an earlier daemon recorded in the directory `state_dir`: restores affinity masks and removes
/// cpusets. Does nothing if the directory has no journal. `beside`: a daemon with another state directory may run.
///
/// # Errors
/// If a running daemon uses the directory, the journal can't be used, or a mask or cpuset can't be restored.
pub fn release_all(state_dir: &Path, beside: bool) -> anyhow::Result<ReleaseSummary> {
    let has_state = |name: &str| state_dir.join(name).exists();
    if !has_state("journal.jsonl") && !has_state("state.json") {
        let remark = format!(
            "nothing is recorded in {}: a daemon with another --state-dir keeps its records there",
            state_dir.display()
        );
        return Ok(ReleaseSummary { jobs: Vec::new(), remarks: vec![remark] });
    }
    let user = Uid::effective();
    directories::make_state_directory(state_dir, user.as_raw())?;
    let (journal, recovered) = FileJournal::open(state_dir, &clock::boot_id())?;
    let own_uid = ids::Uid(user.as_raw());
    let own_cgroups = directories::own_cgroups(state_dir, beside);
    let capabilities = probe::probe_capabilities(&own_cgroups);
    let policy = Policy {
        sources: BTreeSet::new(),
        pin: false,
        own_pid: Some(Pid(std::process::id())),
        only_user: (!capabilities.can_set_all_masks).then_some(own_uid),
        cpuset_support: capabilities.cpuset_support,
        own_cgroups,
        ..Policy::default()
    };
    let state = WardenState::new(load(TopologySource::Live)?, &policy.housekeeping);
    let mut node = LinuxNode::new(pjw_sources::wanted_variables()).context("can't open /proc")?;
    node.set_cpuset_support(&policy.cpuset_support);
    let host = pjw_sources::Host { name: clock::hostname(), flux_user: None };
    let mut warden = Warden::new(node, journal, state, recovered.records, policy, host);

    let mut undone = ReleaseSummary { jobs: Vec::new(), remarks: recovered.remarks };
    let all = Command::ReleaseAll { caller: Caller { uid: own_uid, admin: true } };
    for _ in 0..MAX_CYCLES {
        let report = warden.run_cycle(warden.state().scan_request(true), std::slice::from_ref(&all));
        for reply in report.replies {
            if let Reply::Released(jobs) = reply? {
                undone.jobs.extend(jobs);
            }
        }
        let nothing_left = warden.state().journaled_masks().next().is_none()
            && warden.state().cpusets.paths().next().is_none();
        if !report.unfinished && nothing_left {
            break;
        }
        // systemd may be busy. Retry the requests without an answer after a delay.
        if warden.state().cpusets.paths().next().is_some() {
            std::thread::sleep(CYCLE_DELAY);
        }
    }
    if let Some(path) = narrow_cpusets(warden.state()).next() {
        bail!("the cpuset of {path} still restricts its processes: run pjwd --release-all again");
    }
    for path in warden.state().cpusets.paths() {
        undone.remarks.push(format!("the cpuset of {path} no longer restricts its processes; the cgroup stays until its last process has ended"));
    }
    let left = warden.state().journaled_masks().count();
    if left > 0 {
        let refused = warden.faults().refused.values().next();
        let why = refused
            .map_or_else(|| "the threads could not be changed".to_owned(), |refused| refused.hint.clone());
        bail!("{left} affinity masks are not restored: {why}; run pjwd --release-all again");
    }
    warden.rewrite_journal().context("everything is restored, but the journal can't be rewritten")?;
    Ok(undone)
}

/// The paths of cpuset cgroups that are still narrower than the online CPUs.
fn narrow_cpusets(state: &WardenState) -> impl Iterator<Item = &str> {
    let online = state.pool.online_cpus();
    state.cpusets.paths().filter(move |path| {
        let place = state.cgroups.get(*path).and_then(Observed::present);
        let cpuset = place.and_then(|place| place.cpuset.as_ref());
        cpuset.is_some_and(|cpuset| !cpuset.effective.is_empty() && !online.is_subset(&cpuset.effective))
    })
}
