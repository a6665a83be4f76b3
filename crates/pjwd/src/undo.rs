//! `pjwd --release-all`: puts back what an earlier daemon changed, and ends. For the removal of the package, and for
//! anybody whose daemon is dead: it needs the state directory, no socket and no configuration.
//!
//! It is one cycle of the same warden, which looks for no batch system and pins nothing: nothing new is decided while
//! all is put back, and nothing starts after it as it might behind a `pjwctl release --all`.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, bail};
use nix::unistd::Uid;
use pjw_core::command::{Caller, Command, Reply};
use pjw_core::job::JobId;
use pjw_core::policy::Policy;
use pjw_core::process::{self, Pid};
use pjw_core::snapshot::Seen;
use pjw_core::state::WardenState;
use pjw_linux::node::LinuxNode;
use pjw_linux::topology::{TopologySource, load};
use pjw_linux::{clock, probe};

use crate::cycle::Warden;
use crate::journal::FileJournal;
use crate::places;

/// A job that forks all the time needs a few cycles.
const MOST_CYCLES: usize = 20;

/// Long enough, over all cycles, for a systemd that was silent to be asked again.
const BETWEEN_CYCLES: Duration = Duration::from_millis(700);

/// What was put back.
#[derive(Debug, Default)]
pub struct Undone {
    /// The jobs that were released.
    pub jobs: Vec<JobId>,
    /// What of the journal could not be used, or that there is none: one sentence each.
    pub remarks: Vec<String>,
}

/// Puts back everything that the journal of this directory knows. Without a journal there is nothing to do.
///
/// # Errors
/// If a daemon runs that keeps its state there, the journal can't be used, or a mask can't be put back.
pub fn release_all(state_dir: &Path) -> anyhow::Result<Undone> {
    let has_state = |name: &str| state_dir.join(name).exists();
    if !has_state("journal.jsonl") && !has_state("state.json") {
        let remark = format!(
            "nothing is recorded in {}: a daemon that was started with another --state-dir has its records there",
            state_dir.display()
        );
        return Ok(Undone { jobs: Vec::new(), remarks: vec![remark] });
    }
    let user = Uid::effective();
    places::state_directory(state_dir, user.as_raw())?;
    let (journal, recovered) = FileJournal::open(state_dir, &clock::boot_id())?;
    let own_uid = process::Uid(user.as_raw());
    let capabilities = probe::probe();
    let policy = Policy {
        sources: BTreeSet::new(),
        pin: false,
        own_pid: Some(Pid(std::process::id())),
        only_user: (!capabilities.every_user).then_some(own_uid),
        ground: capabilities.ground,
        ..Policy::default()
    };
    let state = WardenState::new(load(TopologySource::Live)?, &policy.housekeeping);
    let mut node = LinuxNode::new(pjw_sources::wanted_variables()).context("can't open /proc")?;
    node.stand_on(&policy.ground);
    let host = pjw_sources::Host { name: clock::hostname(), flux_user: None };
    let mut warden = Warden::new(node, journal, state, recovered.records, policy, host);

    let mut undone = Undone { jobs: Vec::new(), remarks: recovered.remarks };
    let all = Command::ReleaseAll { caller: Caller { uid: own_uid, admin: true } };
    for _ in 0..MOST_CYCLES {
        let report = warden.cycle(warden.state().regular_look(true), std::slice::from_ref(&all));
        for reply in report.replies {
            if let Reply::Released(jobs) = reply? {
                undone.jobs.extend(jobs);
            }
        }
        let nothing_left = warden.state().touched.is_empty() && warden.state().walls.paths().next().is_none();
        if !report.unfinished && nothing_left {
            break;
        }
        // systemd may be busy: what it left unanswered is asked again after a while.
        if warden.state().walls.paths().next().is_some() {
            std::thread::sleep(BETWEEN_CYCLES);
        }
    }
    if let Some(path) = closed_walls(warden.state()).next() {
        bail!("the cpuset of {path} is still narrow: pjwd --release-all tries again");
    }
    for path in warden.state().walls.paths() {
        undone.remarks.push(format!("{path} is open, and stays until its last process has ended"));
    }
    let left = warden.state().touched.len();
    if left > 0 {
        let refused = warden.troubles().refused.values().next();
        let why =
            refused.map_or_else(|| "they could not be reached".to_owned(), |refused| refused.hint.clone());
        bail!("{left} masks are not as they were: {why}; pjwd --release-all tries again");
    }
    warden.rewrite_journal().context("everything is put back, and the journal can't say so")?;
    Ok(undone)
}

/// The walls that still keep somebody in.
fn closed_walls(state: &WardenState) -> impl Iterator<Item = &str> {
    let online = state.pool.online();
    state.walls.paths().filter(move |path| {
        let place = state.places.get(*path).and_then(Seen::here);
        let cpuset = place.and_then(|place| place.cpuset.as_ref());
        cpuset.is_some_and(|cpuset| !cpuset.effective.is_empty() && !online.is_subset(&cpuset.effective))
    })
}
