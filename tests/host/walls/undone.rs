//! A wall outlives its daemon and nothing else: the next one has it, and whoever lets go leaves all as it was.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use pjw_core::cpuset_group::PJW_DIRECTORY;
use pjw_core::ids::Tid;
use pjw_linux::cgroup::CgroupDir;
use pjw_linux::proc::procfs::parse_stat;
use pjw_linux::sys::affinity;
use pjw_tests::daemon::Daemon;
use pjw_tests::patience::{until_none, until_true};
use pjw_tests::programs::program;
use pjw_tests::walls::{of_process, place};

use super::{cgroup, daemon, directory, enforcement, everything, put, read};
use crate::processes::{EndOf, Shell, mask, masks, walls};

/// Cgroups that other tests make, which may run at the same time, and remove themselves.
const OF_OTHER_TESTS: [&str; 3] = ["/made-by-test", "/slurm_doctor", "/pjw_test"];

/// All cpusets, and the mask and cgroup of every thread, of this machine.
struct Dump {
    cpusets: BTreeMap<PathBuf, String>,
    threads: BTreeMap<(u32, u32, u64), String>,
}

impl Dump {
    /// As they are now. Walls of other daemons come and go meanwhile, in another test say, and are left out.
    fn now(ours: &str) -> Self {
        let mut dump = Self { cpusets: BTreeMap::new(), threads: BTreeMap::new() };
        dump.describe(&place().unwrap().root(), ours);
        for pid in numbers(Path::new("/proc")) {
            for tid in numbers(Path::new(&format!("/proc/{pid}/task"))) {
                let stat = std::fs::read(format!("/proc/{pid}/task/{tid}/stat")).unwrap_or_default();
                if let (Some(stat), Some(cgroup)) = (parse_stat(&stat), of_process(tid)) {
                    let at = format!("{} in {cgroup}", mask(tid));
                    dump.threads.insert((pid, tid, stat.start.0), at);
                }
            }
        }
        dump
    }

    fn describe(&mut self, group: &CgroupDir, ours: &str) {
        let below = group.children();
        let is_ours = |group: &CgroupDir| group.path.ends_with(ours);
        let is_own = group.path == PJW_DIRECTORY;
        if !is_own || below.iter().all(is_ours) {
            let files = ["cpuset.cpus", "cpuset.mems", "cpuset.cpus.partition", "cgroup.subtree_control"];
            let told: Vec<_> = files.iter().map(|file| group.read_file(file).ok()).collect();
            self.cpusets.insert(group.dir.clone(), format!("{told:?}"));
        }
        let of_tests = |group: &CgroupDir| OF_OTHER_TESTS.iter().any(|name| group.path.starts_with(name));
        for group in below.iter().filter(|group| !of_tests(group) && (!is_own || is_ours(group))) {
            self.describe(group, ours);
        }
    }

    /// What is not as it was, of what still lives.
    fn changes(&self, ours: &str) -> Vec<String> {
        let now = Self::now(ours);
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

    /// Nothing is left of what the daemon did. What others do meanwhile ends sooner or later.
    fn is_restored(&self, daemon: &Daemon) {
        until_none("all is as it was at the start", || self.changes(daemon.tag()));
    }
}

fn numbers(dir: &Path) -> Vec<u32> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
}

fn release_all_without_a_daemon(daemon: &Daemon) {
    let mut command = Command::new(program("pjwd"));
    let done = command.arg("--release-all").arg("--state-dir").arg(daemon.state_dir()).output().unwrap();
    assert!(done.status.success() && done.stderr.is_empty(), "{done:?}");
}

/// Two shells with children, of which one chose a mask, and what they all had.
struct Jobs {
    shells: [Shell; 2],
    pids: Vec<u32>,
    before: Dump,
    _ends: Vec<EndOf>,
}

impl Jobs {
    fn new() -> Self {
        let mut shells = [Shell::start(), Shell::start()];
        let mut pids: Vec<u32> = shells.iter().map(Shell::pid).collect();
        let children = shells.iter_mut().flat_map(|shell| [(); 2].map(|()| shell.background("sleep 1000")));
        pids.extend(children.collect::<Vec<_>>());
        let last = mask(pids[2]).last().unwrap();
        affinity::set_mask(Tid(pids[2]), &last.into()).unwrap();
        let _ends = pids[2..].iter().map(|&pid| EndOf(pid)).collect();
        Self { shells, pids, before: Dump::now("nobody's"), _ends }
    }

    /// One job each, and somebody born inside.
    fn begin(&mut self, daemon: &Daemon) -> EndOf {
        for (name, shell) in ["a", "b"].iter().zip(&self.shells) {
            daemon.assign(name, 1, &[shell.pid()]).unwrap();
            assert_eq!(enforcement(daemon, name), "cpuset");
        }
        for (n, pid) in self.pids.iter().enumerate() {
            let job = if n == 0 || n == 2 || n == 3 { "a" } else { "b" };
            assert_eq!(of_process(*pid), Some(cgroup(daemon, job)));
        }
        let late = self.shells[0].background("sleep 1000");
        assert_eq!(of_process(late), Some(cgroup(daemon, "a")));
        self.pids.push(late);
        EndOf(late)
    }

    /// Nobody is anywhere but where they were, whoever was born inside as their parents.
    fn are_restored(&self, daemon: &Daemon) {
        self.before.is_restored(daemon);
        let (late, father) = (self.pids[self.pids.len() - 1], self.pids[0]);
        until_true("who was born inside is where its father is", || {
            (mask(late), of_process(late)) == (mask(father), of_process(father))
        });
    }
}

#[test]
fn a_release_restores_masks_and_cgroups_and_removes_the_cpuset() {
    if !walls() {
        return;
    }
    let mut jobs = Jobs::new();
    let Some(daemon) = daemon("") else { return };
    let _late = jobs.begin(&daemon);
    for job in ["a", "b"] {
        daemon.release(job).unwrap();
        assert!(!directory(&cgroup(&daemon, job)).exists(), "it is gone when the release is answered");
    }
    jobs.are_restored(&daemon);
    assert_eq!(daemon.status().warnings.iter().find(|warning| warning.code == "wall-stays"), None);
}

#[test]
fn release_all_leaves_nothing_behind() {
    if !walls() {
        return;
    }
    let mut jobs = Jobs::new();
    let Some(daemon) = daemon("") else { return };
    let _late = jobs.begin(&daemon);
    let output = daemon.pjwctl(&["release", "--all"]);
    assert!(output.status.success(), "{output:?}");
    jobs.are_restored(&daemon);
}

#[test]
fn release_all_without_a_daemon_removes_the_cpusets_of_a_killed_daemon() {
    if !walls() {
        return;
    }
    let mut jobs = Jobs::new();
    let Some(mut daemon) = daemon("interval = \"50ms\"\n") else { return };
    let _late = jobs.begin(&daemon);
    daemon.kill();
    // Whom somebody took out meanwhile stays where that somebody put them.
    put(jobs.pids[1], "/");
    release_all_without_a_daemon(&daemon);
    jobs.are_restored(&daemon);
    release_all_without_a_daemon(&daemon);
    daemon.spawn();
    assert!(daemon.status().jobs.is_empty(), "what was released stays released");
    jobs.are_restored(&daemon);
}

#[test]
fn the_cpusets_of_a_killed_daemon_stay_and_the_next_daemon_uses_them() {
    let Some(mut daemon) = daemon("interval = \"50ms\"\n") else { return };
    let mut shell = Shell::start();
    let cpus = daemon.assign("a", 1, &[shell.pid()]).unwrap();
    let wall = cgroup(&daemon, "a");
    let inode = || std::os::unix::fs::MetadataExt::ino(&std::fs::metadata(directory(&wall)).unwrap());
    let first = inode();
    for round in 0..3 {
        daemon.kill();
        let child = shell.background("sleep 1000");
        let _end = EndOf(child);
        affinity::set_full_mask(Tid(child)).unwrap();
        affinity::set_full_mask(Tid(shell.pid())).unwrap();
        let standing = || {
            assert_eq!((inode(), read(&wall, "cpuset.cpus")), (first, cpus.to_string()), "{round}");
            for pid in [shell.pid(), child] {
                assert_eq!((mask(pid), of_process(pid)), (cpus.clone(), Some(wall.clone())), "{round}");
            }
        };
        standing();
        daemon.spawn();
        standing();
        let job = daemon.job("a").unwrap();
        assert_eq!((job.cpus, job.enforcement), (cpus.to_string(), "cpuset".to_owned()), "{round}");
        until_true("the child is known", || daemon.job("a").unwrap().processes >= 2);
    }
    daemon.release("a").unwrap();
    assert_eq!((mask(shell.pid()), of_process(shell.pid())), (everything(&daemon), Some("/".to_owned())));
}

#[test]
fn a_change_to_enforcement_by_masks_removes_the_cpuset_and_keeps_the_cores() {
    let Some(mut daemon) = daemon("interval = \"50ms\"\n") else { return };
    let mut shell = Shell::start();
    let own = shell.background("sleep 1000");
    let _end = EndOf(own);
    let before = masks(&[shell.pid(), own]);
    let cpus = daemon.assign("a", 1, &[shell.pid()]).unwrap();
    let wall = cgroup(&daemon, "a");
    daemon.stop();
    daemon.configure("enforcement = \"affinity\"\ninterval = \"50ms\"\n");
    daemon.spawn();
    until_true("the wall is gone", || !directory(&wall).exists());
    until_true("masks keep the job", || {
        let inside = [shell.pid(), own].iter().all(|&pid| mask(pid) == cpus);
        inside && enforcement(&daemon, "a") == "affinity"
    });
    assert_eq!(of_process(shell.pid()).as_deref(), Some("/"));
    daemon.release("a").unwrap();
    assert_eq!(masks(&[shell.pid(), own]), before);

    // And back again, while it runs.
    daemon.assign("a", 1, &[shell.pid()]).unwrap();
    daemon.configure("enforcement = \"cpuset\"\ninterval = \"50ms\"\n");
    daemon.signal(nix::sys::signal::Signal::SIGHUP);
    until_true("the wall is back", || enforcement(&daemon, "a") == "cpuset");
    assert_eq!(of_process(own), Some(wall));
    daemon.release("a").unwrap();
    assert_eq!(masks(&[shell.pid(), own]), before);
}
