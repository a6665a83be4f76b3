//! Scans the node twice, as pjwd in observe mode would, and reads the configuration of its batch systems.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use nix::errno::Errno;
use nix::unistd::User;
use pjw_core::cpuset_group::LeftoverCpuset;
use pjw_core::diagnosis::watch::{ScanPair, pids_to_scan_fully};
use pjw_core::diagnosis::{DetectedBatchSystem, Interrupt};
use pjw_core::ids::{Comm, Pid, ProcessId, Uid};
use pjw_core::own_cgroups::OwnCgroupNames;
use pjw_core::policy::{DaemonMode, Policy};
use pjw_core::snapshot::{Observed, Process, Snapshot};
use pjw_core::{
    cpuset::CpuSet, ports::MachineInterface, reconcile::reconcile, record::Record, scan, scan::ScanScope,
    state::WardenState, topology::Topology,
};
use pjw_linux::{node::LinuxMachine, proc::irq, survey, sys::clock};
use pjw_sources::LocalHost;
use pjw_sources::scheduler::{SCHEDULERS, Scheduler};

/// The time between the two scans: long enough to measure which threads run, short enough for the user to wait.
const SCAN_INTERVAL: Duration = Duration::from_secs(1);
/// The maximum number of scans until the members of all jobs are known.
const MAX_SCANS: usize = 4;
/// The options with which pjwd serves no jobs: it reads files, prints a text and exits. `pjwctl` starts such processes.
const PRINT_OPTIONS: [&str; 2] = ["--check-config", "--topology-json"];
/// The maximum number of files that are read from a configuration directory.
const MAX_FILES: usize = 64;

/// The scanner of `pjwctl doctor`: reads the processes of this machine, and finds out which processes belong to which
/// job.
pub(super) struct JobScanner {
    node: LinuxMachine,
    state: WardenState,
    policy: Policy,
    host: LocalHost,
    /// The processes of the program `pjwd` that have one of [`PRINT_OPTIONS`].
    printing: BTreeSet<ProcessId>,
}

/// Two scans of the processes of all jobs, made one second apart. Also contains the interrupts that occurred in this
/// second.
pub(super) struct ScanResults {
    pub(super) before: Snapshot,
    pub(super) after: Snapshot,
    pub(super) interrupts: Vec<Interrupt>,
}

impl JobScanner {
    /// Makes a scanner for this machine, which has the topology `topology`.
    ///
    /// # Errors
    /// If `/proc` can't be read.
    pub(super) fn new(topology: Topology) -> Result<Self, Errno> {
        let policy = Policy {
            mode: DaemonMode::Observe,
            pin_hot_threads: false,
            own_pid: Some(Pid(std::process::id())),
            ..Policy::default()
        };
        let flux_user = User::from_name("flux").ok().flatten().map(|user| Uid(user.uid.as_raw()));
        Ok(Self {
            node: LinuxMachine::new(pjw_sources::job_variable_names())?,
            state: WardenState::new(topology, &CpuSet::new()),
            policy,
            host: LocalHost { name: clock::hostname(), flux_user },
            printing: BTreeSet::new(),
        })
    }

    /// Returns the settings with which the scanner finds the jobs and their processes.
    pub(super) fn policy(&self) -> &Policy {
        &self.policy
    }

    /// Returns whether `process`, which a scan has found, is a pjwd that serves jobs. A `pjwd --check-config`, as
    /// another doctor runs it, serves none.
    pub(super) fn is_daemon(&self, process: &Process) -> bool {
        process.comm == Comm::from("pjwd") && !self.only_prints(process)
    }

    /// Returns whether `process`, which a scan has found, is a pjwd that only prints a text and exits.
    pub(super) fn only_prints(&self, process: &Process) -> bool {
        self.printing.contains(&process.id)
    }

    /// Returns the two scans in `watched`, together with the jobs that the scanner found, as input for the diagnosis.
    pub(super) fn scan_pair<'a>(&'a self, watched: &'a ScanResults) -> ScanPair<'a> {
        ScanPair {
            state: &self.state,
            policy: &self.policy,
            first_scan: &watched.before,
            second_scan: &watched.after,
        }
    }

    /// Lists the existing cpusets that a pjwd made or wrote for jobs. `daemon` has the names of the cgroups of this
    /// pjwd, which need not run.
    pub(super) fn list_job_cpusets(&mut self, daemon: &OwnCgroupNames) -> Vec<LeftoverCpuset> {
        self.node.list_job_cpusets(daemon)
    }

    /// Makes the first scan, which reads all processes of the machine, but not their threads.
    pub(super) fn scan_processes(&mut self) -> Snapshot {
        let processes = scan::ScanRequest {
            scope: ScanScope::Full,
            pids_to_read_threads_of: BTreeSet::new(),
            active_threads: BTreeMap::new(),
            cgroups: BTreeSet::new(),
            idle_watch: Arc::default(),
        };
        self.observe(&processes)
    }

    /// Finds the jobs and their processes, and then scans all processes of the jobs twice, one second apart. Two
    /// scans show which threads run and how many interrupts arrive.
    ///
    /// - `first` is the first scan, which [`JobScanner::scan_processes`] returned.
    /// - `records` contains the jobs and processes that a running daemon reported.
    /// - `housekeeping` contains the PUs (logical CPUs) that are reserved for the system.
    pub(super) fn scan_jobs_twice(
        &mut self,
        first: &Snapshot,
        records: &[Record],
        housekeeping: &CpuSet,
    ) -> ScanResults {
        self.state.pool.set_housekeeping(housekeeping);
        records.iter().cloned().for_each(|record| self.state.apply_record(record));
        let mut next_scan = self.decide(first);
        for _ in 0..MAX_SCANS {
            let Some(request) = next_scan.take() else { break };
            let snapshot = self.observe(&request);
            next_scan = self.decide(&snapshot);
        }
        let pids_to_read_threads_of = pids_to_scan_fully(&self.state);
        let cgroups = self.state.job_cgroup_paths();
        let interrupts_before = irq::InterruptCounts::read();
        let before = self.observe(&scan::ScanRequest {
            scope: ScanScope::Partial(pids_to_read_threads_of.clone()),
            pids_to_read_threads_of,
            active_threads: BTreeMap::new(),
            cgroups: cgroups.clone(),
            idle_watch: Arc::default(),
        });
        self.decide(&before);
        std::thread::sleep(SCAN_INTERVAL);
        let pids_to_read_threads_of = pids_to_scan_fully(&self.state);
        let after = self.observe(&scan::ScanRequest {
            scope: ScanScope::Full,
            pids_to_read_threads_of,
            active_threads: BTreeMap::new(),
            cgroups,
            idle_watch: Arc::default(),
        });
        let interrupts = irq::InterruptCounts::read().interrupts_since(&interrupts_before, irq::target_cpus);
        self.decide(&after);
        ScanResults { before, after, interrupts }
    }

    /// Makes one scan of the processes in `request`, and adds to each process the jobs of batch systems that its cgroup
    /// and its environment variables name.
    fn observe(&mut self, request: &scan::ScanRequest) -> Snapshot {
        let mut snapshot = self.node.scan(request);
        for observed in snapshot.processes.values_mut() {
            let Observed::Present(process) = observed else { continue };
            // Later scans have no attributes if they are unchanged.
            if let Some(attributes) = &process.attributes {
                if process.comm == Comm::from("pjwd") && has_print_option(&attributes.command_line) {
                    self.printing.insert(process.id);
                } else {
                    self.printing.remove(&process.id);
                }
            }
            process.batch_identity = process.attributes.as_ref().map(|attributes| {
                pjw_sources::recognise_jobs(&process.comm, attributes, &self.host, &self.policy.sources)
            });
        }
        snapshot
    }

    /// Runs one decision of the daemon without its actions. Returns the next scan that the decision needs.
    fn decide(&mut self, snapshot: &Snapshot) -> Option<scan::ScanRequest> {
        let decision = reconcile(&mut self.state, snapshot, &[], &self.policy);
        decision.plan.mask_actions.iter().for_each(|action| self.state.record_mask_not_attempted(action));
        // No action is carried out, so only facts that are still missing justify another scan.
        decision.next_scan.filter(|_| decision.plan.mask_actions.is_empty())
    }
}

/// Returns whether a pjwd with this command line only prints a text and exits.
fn has_print_option(command_line: &str) -> bool {
    command_line.split(' ').any(|argument| PRINT_OPTIONS.contains(&argument))
}

/// Returns the batch systems that run on this machine: those with a daemon in `processes`. Each result also says
/// whether the batch system binds jobs to cores, according to its configuration files. A process with a user id of at
/// least `first_person_uid` belongs to a person, and does not count as a daemon.
pub(super) fn schedulers(processes: &[(Pid, Uid, Comm)], first_person_uid: u32) -> Vec<DetectedBatchSystem> {
    let is_running = |scheduler: &&Scheduler| {
        processes.iter().any(|(_, uid, comm)| scheduler.is_daemon(comm, *uid, first_person_uid))
    };
    let describe =
        |scheduler: &Scheduler| scheduler.describe_core_binding(configuration(scheduler).as_deref());
    SCHEDULERS.iter().filter(is_running).map(describe).collect()
}

/// The texts of a batch system's configuration files, from the first directory that contains them. The directory of the
/// path in the environment variable of the batch system comes first.
fn configuration(scheduler: &Scheduler) -> Option<Vec<String>> {
    let path = std::env::var_os(scheduler.config_variable).filter(|_| !scheduler.config_variable.is_empty());
    let path = path.map(PathBuf::from).map(|path| if path.is_file() { parent(&path) } else { path });
    let directories = path.into_iter().chain(scheduler.config_directories.iter().map(PathBuf::from));
    let mut texts = directories.filter_map(|directory| read_configuration_in(scheduler, &directory));
    texts.next()
}

fn parent(path: &Path) -> PathBuf {
    path.parent().map(Path::to_owned).unwrap_or_default()
}

/// Returns the text of each configuration file of `scheduler` in `directory`. The text of a file that can't be read is
/// empty. `None` if the first file can't be read.
fn read_configuration_in(scheduler: &Scheduler, directory: &Path) -> Option<Vec<String>> {
    let (first, others) = scheduler.config_files.split_first()?;
    let first = read_file_or_directory(directory, first)?;
    let others = others.iter().map(|file| read_file_or_directory(directory, file).unwrap_or_default());
    Some(std::iter::once(first).chain(others).collect())
}

/// Returns the text of the file `file` in `directory`, or of all files in a subdirectory. `file` means a subdirectory
/// if it ends with `/`. The result is then the texts of at most [`MAX_FILES`] files in it, and files that can't be
/// read are left out. `None` if the file or the subdirectory can't be read.
fn read_file_or_directory(directory: &Path, file: &str) -> Option<String> {
    let path = directory.join(file);
    if !file.ends_with('/') {
        return survey::read_regular_file(&path);
    }
    let entries = std::fs::read_dir(&path).ok()?.flatten();
    // A map sorts the files by name, because batch systems read such a directory in this order.
    let files: BTreeMap<_, _> =
        entries.take(MAX_FILES).map(|entry| (entry.file_name(), entry.path())).collect();
    Some(
        files
            .into_values()
            .filter_map(|path| survey::read_regular_file(&path))
            .collect::<Vec<_>>()
            .join("\n"),
    )
}

/// Returns whether `snapshot`, a scan of all processes, has a kernel thread. If not, it misses processes of root:
/// `/proc` hides the processes of other users, or the caller is in a PID namespace of its own, as in a container.
pub(super) fn sees_kernel_threads(snapshot: &Snapshot) -> bool {
    snapshot.processes.values().filter_map(Observed::present).any(|process| process.is_kernel_thread)
}

#[cfg(test)]
mod tests {
    use pjw_core::diagnosis::JobBinding;

    use super::*;

    #[test]
    fn a_configuration_is_read_from_the_first_directory_that_has_it() {
        let dir = tempfile::tempdir().unwrap();
        let slurm = SCHEDULERS.iter().find(|scheduler| scheduler.name == "Slurm").unwrap();
        assert_eq!(read_configuration_in(slurm, dir.path()), None);
        std::fs::write(dir.path().join("slurm.conf"), "TaskPlugin=task/cgroup").unwrap();
        assert_eq!(
            slurm.describe_core_binding(read_configuration_in(slurm, dir.path()).as_deref()).binding,
            JobBinding::Unbound
        );
        std::fs::write(dir.path().join("cgroup.conf"), "ConstrainCores=yes").unwrap();
        assert_eq!(
            slurm.describe_core_binding(read_configuration_in(slurm, dir.path()).as_deref()).binding,
            JobBinding::Cpusets
        );
    }

    #[test]
    fn a_pjwd_that_only_prints_is_recognised_by_its_arguments() {
        for (command_line, expected) in [
            ("pjwd", false),
            ("/usr/bin/pjwd --check-config", true),
            ("/usr/bin/pjwd --check-config --config=/etc/pjw/pjwd.toml", true),
            ("/usr/bin/pjwd --topology-json --synthetic=pu:4", true),
            ("/usr/bin/pjwd --config=--check-config", false),
        ] {
            assert_eq!(has_print_option(command_line), expected, "{command_line}");
        }
    }

    #[test]
    fn a_directory_of_files_is_read_in_the_order_of_their_names() {
        let dir = tempfile::tempdir().unwrap();
        let condor = SCHEDULERS.iter().find(|scheduler| scheduler.name == "HTCondor").unwrap();
        std::fs::create_dir(dir.path().join("config.d")).unwrap();
        for (file, text) in [
            ("condor_config", "ASSIGN_CPU_AFFINITY = false\n"),
            ("config.d/20-b", "ASSIGN_CPU_AFFINITY = false\n"),
            ("config.d/30-c", "ASSIGN_CPU_AFFINITY = true\n"),
            ("config.d/10-a", "\u{0}\n"),
        ] {
            std::fs::write(dir.path().join(file), text).unwrap();
        }
        assert_eq!(
            condor.describe_core_binding(read_configuration_in(condor, dir.path()).as_deref()).binding,
            JobBinding::Masks
        );
    }
}
