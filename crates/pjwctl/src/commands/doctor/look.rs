//! Looking at the node twice, as a warden in observe mode would, and reading what its batch systems were told.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use nix::errno::Errno;
use nix::unistd::User;
use pjw_core::cpuset::CpuSet;
use pjw_core::diagnosis::watch::{Watch, worth_a_closer_look};
use pjw_core::diagnosis::{Interrupt, SchedulerSeen};
use pjw_core::node::Node;
use pjw_core::policy::{Mode, Policy};
use pjw_core::process::{Comm, Pid, Uid};
use pjw_core::reconcile::reconcile;
use pjw_core::record::Record;
use pjw_core::snapshot::{self, Scope, Seen, Snapshot};
use pjw_core::state::WardenState;
use pjw_core::topology::Topology;
use pjw_linux::node::LinuxNode;
use pjw_linux::{clock, irq, survey};
use pjw_sources::Host;
use pjw_sources::service::{SERVICES, Service};

/// How long is watched: long enough to tell who is busy, short enough to wait for.
const SPAN: Duration = Duration::from_secs(1);
/// Rounds until nothing more is to be learned of who is whose.
const MOST_ROUNDS: usize = 4;
/// Files of a directory of configuration that are read.
const MOST_FILES: usize = 64;

/// The node, and what is made of it.
pub(super) struct Look {
    node: LinuxNode,
    state: WardenState,
    policy: Policy,
    host: Host,
}

/// What was seen in two looks.
pub(super) struct Watched {
    pub(super) before: Snapshot,
    pub(super) after: Snapshot,
    pub(super) interrupts: Vec<Interrupt>,
}

impl Look {
    pub(super) fn new(topology: Topology) -> Result<Self, Errno> {
        let policy = Policy {
            mode: Mode::Observe,
            pin: false,
            own_pid: Some(Pid(std::process::id())),
            ..Policy::default()
        };
        let flux_user = User::from_name("flux").ok().flatten().map(|user| Uid(user.uid.as_raw()));
        Ok(Self {
            node: LinuxNode::new(pjw_sources::wanted_variables())?,
            state: WardenState::new(topology, &CpuSet::new()),
            policy,
            host: Host { name: clock::hostname(), flux_user },
        })
    }

    pub(super) fn policy(&self) -> &Policy {
        &self.policy
    }

    /// The two looks, judged.
    pub(super) fn judged<'a>(&'a self, watched: &'a Watched) -> Watch<'a> {
        Watch { state: &self.state, policy: &self.policy, before: &watched.before, after: &watched.after }
    }

    /// Who is there.
    pub(super) fn first(&mut self) -> Snapshot {
        let everybody = snapshot::Look {
            scope: Scope::Full,
            threads_of: BTreeSet::new(),
            cgroups: BTreeSet::new(),
            watch: Arc::default(),
        };
        self.observe(&everybody)
    }

    /// Goes on from what a warden that runs knows, finds out who is whose, and watches them.
    pub(super) fn watch(&mut self, first: &Snapshot, books: &[Record], housekeeping: &CpuSet) -> Watched {
        self.state.pool.set_housekeeping(housekeeping);
        books.iter().cloned().for_each(|record| self.state.replay(record));
        let mut more = self.take_in(first);
        for _ in 0..MOST_ROUNDS {
            let Some(look) = more.take() else { break };
            let snapshot = self.observe(&look);
            more = self.take_in(&snapshot);
        }
        let threads_of = worth_a_closer_look(&self.state);
        let cgroups = self.state.job_cgroups();
        let closer = Scope::Partial(threads_of.clone());
        let interrupts = irq::Counts::read();
        let before = self.observe(&snapshot::Look {
            scope: closer,
            threads_of,
            cgroups: cgroups.clone(),
            watch: Arc::default(),
        });
        self.take_in(&before);
        std::thread::sleep(SPAN);
        let threads_of = worth_a_closer_look(&self.state);
        let after =
            self.observe(&snapshot::Look { scope: Scope::Full, threads_of, cgroups, watch: Arc::default() });
        let interrupts = irq::Counts::read().since(&interrupts, irq::sent_to);
        self.take_in(&after);
        Watched { before, after, interrupts }
    }

    fn observe(&mut self, look: &snapshot::Look) -> Snapshot {
        let mut snapshot = self.node.observe(look);
        for seen in snapshot.processes.values_mut() {
            let Seen::Here(process) = seen else { continue };
            process.claims = process
                .marks
                .as_ref()
                .map(|marks| pjw_sources::recognise(&process.comm, marks, &self.host, &self.policy.sources));
        }
        snapshot
    }

    /// Decides as the warden would, and does nothing of it; returns where else to look.
    fn take_in(&mut self, snapshot: &Snapshot) -> Option<snapshot::Look> {
        let decision = reconcile(&mut self.state, snapshot, &[], &self.policy);
        decision.plan.actions.iter().for_each(|action| self.state.not_applied(action));
        // What the plan would change is as it was: only what could not be seen yet is worth another look.
        decision.look.filter(|_| decision.plan.actions.is_empty())
    }
}

/// The batch systems whose daemons are here, and how they bind.
pub(super) fn schedulers(processes: &[(Pid, Uid, Comm)], first_person_uid: u32) -> Vec<SchedulerSeen> {
    let here = |service: &&Service| {
        processes.iter().any(|(_, uid, comm)| service.runs_as(comm, *uid, first_person_uid))
    };
    let seen = |service: &Service| service.seen(configuration(service).as_deref());
    SERVICES.iter().filter(here).map(seen).collect()
}

/// The text of a batch system's configuration: of the first directory that has it.
fn configuration(service: &Service) -> Option<String> {
    let named = std::env::var_os(service.variable).filter(|_| !service.variable.is_empty());
    let named = named.map(PathBuf::from).map(|path| if path.is_file() { parent(&path) } else { path });
    let directories = named.into_iter().chain(service.directories.iter().map(PathBuf::from));
    let mut texts = directories.filter_map(|directory| text_in(service, &directory));
    texts.next()
}

fn parent(path: &Path) -> PathBuf {
    path.parent().map(Path::to_owned).unwrap_or_default()
}

fn text_in(service: &Service, directory: &Path) -> Option<String> {
    let (first, others) = service.files.split_first()?;
    let mut text = text_of(directory, first)?;
    for file in others {
        text.push('\n');
        text.push_str(&text_of(directory, file).unwrap_or_default());
    }
    Some(text)
}

fn text_of(directory: &Path, file: &str) -> Option<String> {
    let path = directory.join(file);
    if !file.ends_with('/') {
        return survey::text_of(&path);
    }
    let entries = std::fs::read_dir(&path).ok()?.flatten();
    // In the order in which such directories are read: by name.
    let files: BTreeMap<_, _> =
        entries.take(MOST_FILES).map(|entry| (entry.file_name(), entry.path())).collect();
    Some(files.into_values().filter_map(|path| survey::text_of(&path)).collect::<Vec<_>>().join("\n"))
}

#[cfg(test)]
mod tests {
    use pjw_core::diagnosis::Binding;

    use super::*;

    #[test]
    fn a_configuration_is_read_from_the_first_directory_that_has_it() {
        let dir = tempfile::tempdir().unwrap();
        let slurm = SERVICES.iter().find(|service| service.name == "Slurm").unwrap();
        assert_eq!(text_in(slurm, dir.path()), None);
        std::fs::write(dir.path().join("slurm.conf"), "TaskPlugin=task/cgroup").unwrap();
        assert_eq!(slurm.seen(text_in(slurm, dir.path()).as_deref()).binding, Binding::Nothing);
        std::fs::write(dir.path().join("cgroup.conf"), "ConstrainCores=yes").unwrap();
        assert_eq!(slurm.seen(text_in(slurm, dir.path()).as_deref()).binding, Binding::Cpusets);
    }

    #[test]
    fn a_directory_of_files_is_read_in_the_order_of_their_names() {
        let dir = tempfile::tempdir().unwrap();
        let condor = SERVICES.iter().find(|service| service.name == "HTCondor").unwrap();
        std::fs::create_dir(dir.path().join("config.d")).unwrap();
        for (file, text) in [
            ("condor_config", "ASSIGN_CPU_AFFINITY = false\n"),
            ("config.d/20-b", "ASSIGN_CPU_AFFINITY = false\n"),
            ("config.d/30-c", "ASSIGN_CPU_AFFINITY = true\n"),
            ("config.d/10-a", "\u{0}\n"),
        ] {
            std::fs::write(dir.path().join(file), text).unwrap();
        }
        assert_eq!(condor.seen(text_in(condor, dir.path()).as_deref()).binding, Binding::Masks);
    }
}
