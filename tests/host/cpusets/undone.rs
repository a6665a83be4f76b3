//! The cpusets of a killed daemon stay, and the next daemon uses them. A release restores all masks and cgroups.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use pjw_core::cpuset::CpuSet;
use pjw_core::cpuset_group::CgroupCreator;
use pjw_core::ids::Tid;
use pjw_core::own_cgroups::{CgroupPlace, OwnCgroupNames};
use pjw_linux::cgroup::CgroupDir;
use pjw_linux::proc::procfs::parse_stat;
use pjw_linux::sys::affinity;
use pjw_tests::cpusets::{cgroup_of_process, find_hierarchy};
use pjw_tests::daemon::{Daemon, Enforcement};
use pjw_tests::waiting::{wait_until, wait_until_empty};
use serde_json::{Value, json};

use super::{
    all_cpus, cgroup_dir, cgroup_of_job, check_kept_by_cpuset, enforcement, move_process, prepare_daemon,
    read_file, start_daemon,
};
use crate::processes::{KillOnDrop, Shell, has_two_cores, mask, masks};

/// Cgroups of other tests, which may run at the same time and remove these cgroups themselves.
const OTHER_TESTS_CGROUPS: [&str; 4] = ["/made-by-test", "/slurm_doctor", "/pjw_test", "/pjw-test"];

/// All cpusets of the machine, and the mask and cgroup of every thread.
pub(crate) struct MachineState {
    cpusets: BTreeMap<PathBuf, String>,
    threads: BTreeMap<(u32, u32, u64), String>,
}

impl MachineState {
    /// Reads the state before the jobs of a test, of which the daemon must have its turn already: what the daemon of
    /// another test has changed is put back by then. A thread is left out if its mask or its cgroup changes meanwhile:
    /// hwloc binds a thread that reads the topology to one PU after the other.
    pub(crate) fn read_before() -> Self {
        let first = Self::read(None);
        let mut state = Self::read(None);
        state.threads.retain(|thread, at| first.threads.get(thread) == Some(at));
        state
    }

    /// Reads the state of the machine, without the process of the tests: its threads read the topology. Of the cgroups
    /// of daemons, only those of the daemon with the names `own` are read: another test may make and remove others at
    /// the same time.
    fn read(own: Option<&OwnCgroupNames>) -> Self {
        let mut state = Self { cpusets: BTreeMap::new(), threads: BTreeMap::new() };
        state.add_cgroup(&find_hierarchy().unwrap().root(), own);
        let is_other = |pid: &u32| *pid != std::process::id();
        for pid in numeric_entries(Path::new("/proc")).into_iter().filter(is_other) {
            for tid in numeric_entries(Path::new(&format!("/proc/{pid}/task"))) {
                let stat = std::fs::read(format!("/proc/{pid}/task/{tid}/stat")).unwrap_or_default();
                if let (Some(stat), Some(cgroup)) = (parse_stat(&stat), cgroup_of_process(tid)) {
                    let at = format!("{} in {cgroup}", mask(tid));
                    state.threads.insert((pid, tid, stat.start.0), at);
                }
            }
        }
        state
    }

    fn add_cgroup(&mut self, group: &CgroupDir, own: Option<&OwnCgroupNames>) {
        let files = ["cpuset.cpus", "cpuset.mems", "cpuset.cpus.partition", "cgroup.subtree_control"];
        let contents: Vec<_> = files.iter().map(|file| group.read_file(file).ok()).collect();
        self.cpusets.insert(group.dir.clone(), format!("{contents:?}"));
        let is_of_other_tests = |group: &CgroupDir| {
            let of_daemon = OwnCgroupNames::from_cgroup_path(&group.path);
            let is_of_other_daemon = of_daemon.is_some_and(|found| Some(&found) != own);
            is_of_other_daemon || OTHER_TESTS_CGROUPS.iter().any(|name| group.path.starts_with(name))
        };
        for group in group.children().iter().filter(|group| !is_of_other_tests(group)) {
            self.add_cgroup(group, own);
        }
    }

    /// Returns the differences between the saved state and the present state. Ended threads are left out.
    fn changes(&self, own: &OwnCgroupNames) -> Vec<String> {
        let now = Self::read(Some(own));
        let paths = self.cpusets.keys().chain(now.cpusets.keys());
        let cpusets = paths.filter_map(|path| {
            let (was, is) = (self.cpusets.get(path), now.cpusets.get(path));
            (was != is).then(|| format!("{}: {was:?}, now {is:?}", path.display()))
        });
        let threads = now.threads.iter().filter_map(|(thread, is)| {
            let was = self.threads.get(thread).filter(|was| *was != is)?;
            Some(format!("{thread:?}: {was}, now {is}"))
        });
        cpusets.chain(threads).collect()
    }

    /// Waits until the saved state is restored. Changes by other programs end after some time.
    pub(crate) fn wait_until_restored(&self, daemon: &Daemon) {
        self.wait_until_restored_beside(&daemon.own_cgroups().unwrap());
    }

    /// The same, for the daemon whose cgroups have these names.
    pub(crate) fn wait_until_restored_beside(&self, own: &OwnCgroupNames) {
        wait_until_empty("the state is restored", || self.changes(own));
    }
}

fn numeric_entries(dir: &Path) -> Vec<u32> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
}

/// Undoes everything by `pjwd --release-all`, and checks that it has nothing to say about the processes `pids`. Of a
/// process of another test that has lost its parent, it may say that an earlier pjwd may have set the mask.
fn release_all_without_a_daemon(daemon: &Daemon, pids: &[u32]) {
    let done = daemon.release_all_command().output().unwrap();
    let told = String::from_utf8_lossy(&done.stderr).into_owned();
    let is_about_another = |line: &str| {
        let rest = line.strip_prefix("pjwd: the mask of process ");
        let rest = rest.and_then(|rest| rest.split_once(" may be that of an earlier pjwd: "));
        rest.and_then(|(pid, _)| pid.parse::<u32>().ok()).is_some_and(|pid| !pids.contains(&pid))
    };
    assert!(done.status.success() && told.lines().all(is_about_another), "{done:?}");
}

/// Two shells with children, one of which has set its own mask, and the state of the machine before the jobs.
struct Jobs {
    shells: [Shell; 2],
    pids: Vec<u32>,
    before: MachineState,
    _ends: Vec<KillOnDrop>,
}

impl Jobs {
    fn new() -> Self {
        let mut shells = [Shell::start(), Shell::start()];
        let mut pids: Vec<u32> = shells.iter().map(Shell::pid).collect();
        let children = shells.iter_mut().flat_map(|shell| [(); 2].map(|()| shell.background("sleep 1000")));
        pids.extend(children.collect::<Vec<_>>());
        let last = mask(pids[2]).last().unwrap();
        affinity::set_mask(Tid(pids[2]), &last.into()).unwrap();
        let _ends = pids[2..].iter().map(|&pid| KillOnDrop(pid)).collect();
        Self { shells, pids, before: MachineState::read_before(), _ends }
    }

    /// Assigns each shell to a job, and starts a child in job a.
    fn start(&mut self, daemon: &Daemon) -> KillOnDrop {
        for (name, shell) in ["a", "b"].iter().zip(&self.shells) {
            daemon.assign(name, 1, &[shell.pid()]).unwrap();
            check_kept_by_cpuset(daemon, name);
        }
        for (n, pid) in self.pids.iter().enumerate() {
            let job = if n == 0 || n == 2 || n == 3 { "a" } else { "b" };
            assert_eq!(cgroup_of_process(*pid), Some(cgroup_of_job(daemon, job)));
        }
        let late_child = self.shells[0].background("sleep 1000");
        assert_eq!(cgroup_of_process(late_child), Some(cgroup_of_job(daemon, "a")));
        self.pids.push(late_child);
        KillOnDrop(late_child)
    }

    /// Waits until all processes have their masks and cgroups again. The child that started in the job must have
    /// those of its parent.
    fn wait_until_restored(&self, daemon: &Daemon) {
        self.before.wait_until_restored(daemon);
        let (late_child, parent) = (self.pids[self.pids.len() - 1], self.pids[0]);
        wait_until("the child has the mask and cgroup of its parent", || {
            (mask(late_child), cgroup_of_process(late_child)) == (mask(parent), cgroup_of_process(parent))
        });
    }
}

/// Processes for jobs, and a daemon that was started when the state of the machine had been read. In the order in which
/// they are dropped again: the daemon first.
fn jobs_and_daemon(config: &str) -> Option<(Jobs, Daemon)> {
    let mut daemon = prepare_daemon(config)?;
    let jobs = Jobs::new();
    daemon.spawn();
    Some((jobs, daemon))
}

#[test]
fn a_release_restores_masks_and_cgroups_and_removes_the_cpuset() {
    let Some((mut jobs, daemon)) = jobs_and_daemon("") else { return };
    let _late = jobs.start(&daemon);
    for job in ["a", "b"] {
        daemon.release(job).unwrap();
        // The cgroup is removed before the release is answered.
        let is_left = || cgroup_dir(&cgroup_of_job(&daemon, job)).exists();
        daemon.check_after_reply(&daemon.job_id(job), &false, is_left);
    }
    jobs.wait_until_restored(&daemon);
    assert_eq!(daemon.status().warnings.iter().find(|warning| warning.code == "wall-stays"), None);
}

#[test]
fn release_all_leaves_nothing_behind() {
    let Some((mut jobs, daemon)) = jobs_and_daemon("") else { return };
    let _late = jobs.start(&daemon);
    let output = daemon.pjwctl(&["release", "--all"]);
    assert!(output.status.success(), "{output:?}");
    jobs.wait_until_restored(&daemon);
}

/// The names of files that the kernel makes in each cgroup.
const FILE_NAMES: [&str; 4] = ["tasks", "cpuset.cpus", "cgroup.procs", "cpuset.mems"];

/// Assigns a core to a job with the name of a file of a cgroup, releases the job, and checks that nothing is left.
fn check_job_named_like_a_file(daemon: &mut Daemon, name: &str, enforced_by: &str) {
    let shell = Shell::start();
    let before = (mask(shell.pid()), cgroup_of_process(shell.pid()));
    let id = format!("manual:{name}");
    let request = json!({ "job": id, "cores": 1, "pids": [shell.pid()] });
    let delayed_before = daemon.delayed_cpuset_changes(&id);
    let reply: Value = daemon.call("Assign", &request).unwrap();
    let is_delayed = daemon.delayed_cpuset_changes(&id) > delayed_before;
    assert!(reply["job"]["enforcement"] == enforced_by || is_delayed, "{reply}");
    let granted: CpuSet = reply["job"]["cpus"].as_str().unwrap().parse().unwrap();
    assert_eq!(mask(shell.pid()), granted);
    let cgroup = (enforced_by == "cpuset").then(|| {
        let names = daemon.own_cgroups().unwrap();
        names.job_path(&id.parse().unwrap(), CgroupCreator::Warden, CgroupPlace::Usual)
    });
    if let Some(cgroup) = &cgroup {
        daemon.check_after_reply(&id, &Some(cgroup.clone()), || cgroup_of_process(shell.pid()));
        assert_eq!(read_file(cgroup, "cpuset.cpus"), granted.to_string());
    }
    daemon.call::<Value>("Release", &json!({ "job": id })).unwrap();
    wait_until("the process is as before", || (mask(shell.pid()), cgroup_of_process(shell.pid())) == before);
    let is_left = || cgroup.as_ref().is_some_and(|cgroup| cgroup_dir(cgroup).exists());
    daemon.check_after_reply(&id, &false, is_left);
    assert!(daemon.status().jobs.iter().all(|job| job.id != id));
    drop(shell);
    let records = |daemon: &Daemon| {
        let read = |file| std::fs::read_to_string(daemon.state_dir().join(file)).unwrap_or_default();
        // A rewrite moves the records from the second file to the first one. In this order, none is missed.
        let lines = read("journal.jsonl");
        read("state.json") + &lines
    };
    // The masks of a released job are kept until no child can have inherited one.
    wait_until("the release is settled", || {
        let records = records(daemon);
        !records.contains("released_masks") || records.contains("release_settled")
    });
    // A daemon that starts writes the records that it still needs.
    daemon.stop();
    daemon.spawn();
    assert!(!records(daemon).contains(&id), "{}", records(daemon));
}

#[test]
fn a_job_that_is_named_like_a_file_of_a_cgroup_is_kept_and_released_without_a_trace() {
    if !has_two_cores() {
        return;
    }
    for by in Enforcement::available() {
        let mut daemon = Daemon::start_with(by, "rescan_interval = \"50ms\"\ninterval = \"50ms\"\n");
        for name in FILE_NAMES {
            let enforced_by = if by == Enforcement::Cpuset { "cpuset" } else { "affinity" };
            check_job_named_like_a_file(&mut daemon, name, enforced_by);
        }
    }
}

#[test]
fn release_all_without_a_daemon_removes_the_cpusets_of_a_killed_daemon() {
    let Some((mut jobs, mut daemon)) = jobs_and_daemon("interval = \"50ms\"\n") else { return };
    let _late = jobs.start(&daemon);
    daemon.kill();
    // A process that another program has moved to another cgroup stays there.
    move_process(jobs.pids[1], "/");
    release_all_without_a_daemon(&daemon, &jobs.pids);
    jobs.wait_until_restored(&daemon);
    release_all_without_a_daemon(&daemon, &jobs.pids);
    daemon.spawn();
    assert!(daemon.status().jobs.is_empty(), "the released jobs are not found again");
    jobs.wait_until_restored(&daemon);
}

#[test]
fn the_cpusets_of_a_killed_daemon_stay_and_the_next_daemon_uses_them() {
    let Some(mut daemon) = start_daemon("interval = \"50ms\"\n") else { return };
    let mut shell = Shell::start();
    let cpus = daemon.assign("a", 1, &[shell.pid()]).unwrap();
    check_kept_by_cpuset(&daemon, "a");
    let cgroup = cgroup_of_job(&daemon, "a");
    let inode = || std::os::unix::fs::MetadataExt::ino(&std::fs::metadata(cgroup_dir(&cgroup)).unwrap());
    let first = inode();
    for round in 0..3 {
        daemon.kill();
        let child = shell.background("sleep 1000");
        let _end = KillOnDrop(child);
        affinity::set_full_mask(Tid(child)).unwrap();
        affinity::set_full_mask(Tid(shell.pid())).unwrap();
        let check_unchanged = || {
            assert_eq!((inode(), read_file(&cgroup, "cpuset.cpus")), (first, cpus.to_string()), "{round}");
            for pid in [shell.pid(), child] {
                assert_eq!(
                    (mask(pid), cgroup_of_process(pid)),
                    (cpus.clone(), Some(cgroup.clone())),
                    "{round}"
                );
            }
        };
        check_unchanged();
        daemon.spawn();
        check_unchanged();
        let job = daemon.job("a").unwrap();
        assert_eq!((job.cpus, job.enforcement), (cpus.to_string(), "cpuset".to_owned()), "{round}");
        wait_until("the child is a member", || daemon.job("a").unwrap().processes >= 2);
    }
    daemon.release("a").unwrap();
    let released = (all_cpus(&daemon), Some("/".to_owned()));
    let found = || (mask(shell.pid()), cgroup_of_process(shell.pid()));
    daemon.check_after_reply(&daemon.job_id("a"), &released, found);
}

#[test]
fn a_change_to_enforcement_by_masks_removes_the_cpuset_and_keeps_the_cores() {
    let Some(mut daemon) = start_daemon("interval = \"50ms\"\n") else { return };
    let mut shell = Shell::start();
    let own = shell.background("sleep 1000");
    let _end = KillOnDrop(own);
    let before = masks(&[shell.pid(), own]);
    let cpus = daemon.assign("a", 1, &[shell.pid()]).unwrap();
    let cgroup = cgroup_of_job(&daemon, "a");
    daemon.stop();
    daemon.configure("enforcement = \"affinity\"\ninterval = \"50ms\"\n");
    daemon.spawn();
    wait_until("the cgroup is removed", || !cgroup_dir(&cgroup).exists());
    wait_until("the job is kept by masks", || {
        let inside = [shell.pid(), own].iter().all(|&pid| mask(pid) == cpus);
        inside && enforcement(&daemon, "a") == "affinity"
    });
    assert_eq!(cgroup_of_process(shell.pid()).as_deref(), Some("/"));
    daemon.release("a").unwrap();
    assert_eq!(masks(&[shell.pid(), own]), before);

    // Back to cpusets while the daemon runs.
    daemon.assign("a", 1, &[shell.pid()]).unwrap();
    daemon.configure("enforcement = \"cpuset\"\ninterval = \"50ms\"\n");
    daemon.signal(nix::sys::signal::Signal::SIGHUP);
    wait_until("the job has a cpuset again", || enforcement(&daemon, "a") == "cpuset");
    assert_eq!(cgroup_of_process(own), Some(cgroup));
    daemon.release("a").unwrap();
    daemon.check_after_reply(&daemon.job_id("a"), &before, || masks(&[shell.pid(), own]));
}
