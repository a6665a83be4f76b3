//! The live machine as a node, with real processes and masks.

use std::io::Write;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use pjw_core::ids::{Comm, StartTime, ThreadId};
use pjw_core::{cpuset::Pu, plan::MaskActionKind, snapshot::Process, time::Nanos};

use super::*;
use crate::proc::{memory_files::MemoryFiles, procfs::ProcDir};
use crate::tests::{alone_with_cpusets, until, until_true};

struct Running(Child);

impl Running {
    fn start(program: &str, args: &[&str]) -> Self {
        let mut command = Command::new(program);
        command.args(args).env("SLURM_JOB_ID", "77").env("SECRET", "x").stdin(Stdio::piped());
        Self(command.spawn().unwrap())
    }

    fn pid(&self) -> Pid {
        Pid(self.0.id())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn node() -> LinuxMachine {
    LinuxMachine::new(BTreeSet::from(["SLURM_JOB_ID"])).unwrap()
}

fn at(pids: &[Pid]) -> ScanRequest {
    let pids: BTreeSet<Pid> = pids.iter().copied().collect();
    ScanRequest {
        scope: ScanScope::Partial(pids.clone()),
        pids_to_read_threads_of: pids,
        active_threads: BTreeMap::new(),
        cgroups: BTreeSet::new(),
        idle_watch: Arc::default(),
    }
}

fn see(node: &mut LinuxMachine, pid: Pid) -> Option<Process> {
    node.scan(&at(&[pid])).processes.remove(&pid).and_then(|seen| seen.present().cloned())
}

fn set_to(process: &Process, to: CpuSet) -> MaskAction {
    let thread = &process.threads.as_ref().unwrap()[0];
    MaskAction {
        kind: MaskActionKind::Confine,
        job: "manual:a".parse().unwrap(),
        thread: ThreadId { process: process.id, tid: thread.tid, start: thread.start },
        current_mask: thread.effective_mask.clone(),
        requested_mask: to.clone(),
        target_mask: to,
        program_request: None,
        reason: String::new(),
    }
}

#[test]
fn a_full_scan_lists_every_process_and_the_requested_threads() {
    let idle_process = Running::start("sleep", &["1000"]);
    let mut node = node();
    let scan_request = ScanRequest {
        scope: ScanScope::Full,
        pids_to_read_threads_of: BTreeSet::from([idle_process.pid()]),
        active_threads: BTreeMap::new(),
        cgroups: BTreeSet::new(),
        idle_watch: Arc::default(),
    };
    let snapshot = node.scan(&scan_request);
    let me = snapshot.processes[&Pid(std::process::id())].present().unwrap();
    assert!(me.threads.is_none() && !me.is_kernel_thread);
    let observed = snapshot.processes[&idle_process.pid()].present().unwrap();
    assert_eq!(observed.parent, Pid(std::process::id()));
    assert_eq!(observed.threads.as_ref().unwrap().len(), 1);
    assert_eq!(observed.uid.0, nix::unistd::getuid().as_raw());
}

fn see_until(node: &mut LinuxMachine, pid: Pid, what: &str, seen: impl Fn(&Process) -> bool) -> Process {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        let process = see(node, pid).unwrap();
        if seen(&process) {
            return process;
        }
        assert!(Instant::now() < deadline, "{what}");
        std::thread::yield_now();
    }
}

#[test]
fn attributes_are_reported_once_and_contain_only_wanted_variables() {
    let idle_process = Running::start("sleep", &["1000"]);
    // Amid execve(2), a process may have its new command line before the address of its new stack. The next scan then
    // takes it for another program, and reads the attributes again.
    let stat = format!("/proc/{}/stat", idle_process.pid());
    until_true("the program sleeps", || std::fs::read_to_string(&stat).unwrap().contains(" (sleep) S "));
    let mut node = node();
    // The files are read by another thread, which may take longer than a scan waits.
    let has_attributes = |process: &Process| {
        process.attributes.as_ref().is_some_and(|attributes| attributes.command_line == "sleep 1000")
    };
    let observed = see_until(&mut node, idle_process.pid(), "the attributes of sleep", has_attributes);
    let attributes = observed.attributes.unwrap();
    let unit_lines = attributes.cgroups.lines.iter().filter(|(controllers, _)| controllers == "name=systemd");
    let unit_cgroup = unit_lines.map(|(_, path)| path.as_str()).next();
    assert_eq!(observed.unit_cgroup.as_deref(), unit_cgroup, "only cgroup v1 has such a hierarchy");
    assert_eq!(attributes.environ, BTreeMap::from([("SLURM_JOB_ID".to_owned(), "77".to_owned())]));
    assert!(see(&mut node, idle_process.pid()).unwrap().attributes.is_none());
}

#[test]
fn attributes_are_read_again_after_an_exec_of_the_same_name_without_an_event() {
    let mut shell = Running::start("sh", &["-c", "read x; SLURM_JOB_ID=78 exec sh -c 'read y'"]);
    let mut node = node();
    let of_job = |id: &'static str| {
        move |process: &Process| {
            let attributes = process.attributes.as_ref();
            attributes.is_some_and(|attributes| {
                attributes.environ.get("SLURM_JOB_ID").map(String::as_str) == Some(id)
            })
        }
    };
    see_until(&mut node, shell.pid(), "the first shell", of_job("77"));
    shell.0.stdin.as_mut().unwrap().write_all(b"go\n").unwrap();
    see_until(&mut node, shell.pid(), "the second shell", of_job("78"));
}

#[test]
fn a_mask_is_set_and_read_back() {
    let _alone = alone_with_cpusets();
    let idle_process = Running::start("sleep", &["1000"]);
    let mut node = node();
    let before = see(&mut node, idle_process.pid()).unwrap();
    let one = CpuSet::from(before.first_thread_mask.as_ref().unwrap().last().unwrap());
    assert_eq!(node.change_mask(&set_to(&before, one.clone())), MaskOutcome::Done { effective: one.clone() });
    assert_eq!(see(&mut node, idle_process.pid()).unwrap().threads.unwrap()[0].effective_mask, one);
    let all = node.online.clone();
    assert_eq!(node.change_mask(&set_to(&before, all.clone())), MaskOutcome::Done { effective: all });
}

#[test]
fn pus_that_go_offline_during_a_scan_are_removed_from_its_masks() {
    let idle_process = Running::start("sleep", &["1000"]);
    let process = see(&mut node(), idle_process.pid()).unwrap();
    let all = process.first_thread_mask.clone().unwrap();
    let one = CpuSet::from(all.first().unwrap());
    let mut seen = BTreeMap::from([(idle_process.pid(), Observed::Present(process))]);
    let masks = |seen: &BTreeMap<Pid, Observed<Process>>| {
        let process = seen[&idle_process.pid()].present().unwrap();
        (
            process.first_thread_mask.clone().unwrap(),
            process.threads.as_ref().unwrap()[0].effective_mask.clone(),
        )
    };
    cut_masks(&mut seen, &CpuSet::new());
    assert_eq!(masks(&seen), (all.clone(), all), "a mask without an online PU is kept");
    cut_masks(&mut seen, &one);
    assert_eq!(masks(&seen), (one.clone(), one));
}

#[test]
fn an_action_on_an_ended_or_replaced_thread_is_gone() {
    let mut node = node();
    let mut idle_process = Running::start("sleep", &["1000"]);
    let seen = see(&mut node, idle_process.pid()).unwrap();
    let mut other = set_to(&seen, node.online.clone());
    other.thread.start = StartTime(other.thread.start.0 + 1);
    assert_eq!(node.change_mask(&other), MaskOutcome::Gone);
    idle_process.0.kill().unwrap();
    idle_process.0.wait().unwrap();
    assert_eq!(node.change_mask(&set_to(&seen, node.online.clone())), MaskOutcome::Gone);
    assert_eq!(see(&mut node, idle_process.pid()), None);
    assert!(node.cache.processes.is_empty());
}

#[test]
fn an_impossible_mask_is_refused_with_a_hint() {
    let idle_process = Running::start("sleep", &["1000"]);
    let mut node = node();
    let seen = see(&mut node, idle_process.pid()).unwrap();
    let outcome = node.change_mask(&set_to(&seen, CpuSet::from(Pu(8000))));
    assert!(
        matches!(&outcome, MaskOutcome::Refused { reason, .. } if reason.contains("cpuset")),
        "{outcome:?}"
    );
}

#[test]
fn a_zombie_is_reported_as_gone() {
    let mut node = node();
    let mut child = Running::start("true", &[]);
    let pid = child.pid();
    // This test, the parent, has not waited for the child yet. So the child stays a zombie.
    let status = nix::sys::wait::Id::Pid(nix::unistd::Pid::from_raw(pid.0.cast_signed()));
    let flags = nix::sys::wait::WaitPidFlag::WEXITED | nix::sys::wait::WaitPidFlag::WNOWAIT;
    nix::sys::wait::waitid(status, flags).unwrap();
    assert_eq!(see(&mut node, pid), None);
    child.0.wait().unwrap();
}

/// A directory in the format of `/proc` with the process 77, which is in the batch job 77.
struct ProcOfOneProcess(tempfile::TempDir);

impl ProcOfOneProcess {
    fn new() -> Self {
        let proc = Self(tempfile::tempdir().unwrap());
        proc.write("status", "Name:\tsh\nUid:\t1 1 1 1\nGroups:\t\n");
        proc.write("cmdline", "sh\0");
        proc.write("environ", "SLURM_JOB_ID=77\0");
        proc
    }

    fn path(&self, file: &str) -> PathBuf {
        self.0.path().join("77").join(file)
    }

    fn write(&self, file: &str, text: &str) {
        let path = self.path(file);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }

    /// Writes the files that change: the process has these flags, this address of its stack, and this cgroup.
    fn show(&self, flags: u32, stack: u32, cgroup: &str) {
        let stat = format!(
            "77 (sh) R 7 8 9 0 -1 {flags} 1 2 3 4 150 50 0 0 20 0 1 0 4711 1000 200 1 1 1 {stack} 0 0 0 0 0 0 0 0 0 17 5 0 0 0\n"
        );
        self.write("task/77/stat", &stat);
        self.write("stat", &stat);
        self.write("cgroup", &format!("4:cpuset:{cgroup}\n"));
    }

    fn cache(&self) -> ProcessCache {
        let mut cache = ProcessCache::new(BTreeSet::from(["SLURM_JOB_ID"])).unwrap();
        cache.proc = ProcDir::open(self.0.path()).unwrap();
        cache.memory_files = MemoryFiles::with_proc_path(self.0.path(), BTreeSet::from(["SLURM_JOB_ID"]));
        cache
    }
}

/// In cgroup v1 the kernel shows the root as the cgroup of a process that exits, before the process is a zombie.
#[test]
fn a_process_that_exits_keeps_its_cgroup_and_its_environment() {
    let proc = ProcOfOneProcess::new();
    let mut cache = proc.cache();
    let mut seen = || cache.observe_process(Pid(77), false, None).unwrap();

    proc.show(0, 9, "/pjw/a");
    let first = seen();
    assert_eq!(first.cgroup.as_deref(), Some("/pjw/a"));
    assert_eq!(first.attributes.unwrap().environ["SLURM_JOB_ID"], "77");
    proc.show(4, 0, "/");
    let exiting = seen();
    assert_eq!((exiting.cgroup.as_deref(), exiting.attributes), (Some("/pjw/a"), None));
    proc.show(0, 9, "/");
    assert_eq!(seen().cgroup.as_deref(), Some("/"), "a process that was moved");
}

/// A pipe blocks its reader as the kernel blocks the reader of an environment in locked memory.
#[test]
fn an_environment_counts_as_unread_until_a_scan_has_read_it() {
    let proc = ProcOfOneProcess::new();
    proc.show(0, 9, "/pjw/a");
    let environ = proc.path("environ");
    std::fs::remove_file(&environ).unwrap();
    nix::unistd::mkfifo(&environ, nix::sys::stat::Mode::S_IRWXU).unwrap();
    let mut cache = proc.cache();
    let mut seen = || cache.observe_process(Pid(77), false, None).unwrap();
    for _ in 0..2 {
        let locked = seen();
        assert!(locked.has_unread_environment && locked.attributes.unwrap().environ.is_empty());
    }
    // This waits for the reader.
    let unlock = std::fs::OpenOptions::new().write(true).open(&environ).unwrap();
    std::fs::remove_file(&environ).unwrap();
    proc.write("environ", "SLURM_JOB_ID=77\0");
    drop(unlock);
    let read = until("the environment is read", || Some(seen()).filter(|seen| !seen.has_unread_environment));
    assert_eq!(read.attributes.unwrap().environ["SLURM_JOB_ID"], "77");
    let unchanged = seen();
    assert!(!unchanged.has_unread_environment && unchanged.attributes.is_none());
}

#[test]
fn processes_that_come_and_go_while_they_are_read_are_no_errors() {
    let mut node = node();
    for _ in 0..50 {
        let mut child = Command::new("true").spawn().unwrap();
        let scan_request = ScanRequest {
            scope: ScanScope::Full,
            pids_to_read_threads_of: BTreeSet::from([Pid(child.id())]),
            active_threads: BTreeMap::new(),
            cgroups: BTreeSet::new(),
            idle_watch: Arc::default(),
        };
        let snapshot = node.scan(&scan_request);
        assert!(snapshot.processes.contains_key(&Pid(std::process::id())));
        child.wait().unwrap();
    }
}

#[test]
fn a_thread_with_any_name_is_found() {
    let (stop, wait) = std::sync::mpsc::channel::<()>();
    let name = ") R 1 (\n";
    let thread =
        std::thread::Builder::new().name(name.to_owned()).spawn(move || wait.recv().is_err()).unwrap();
    let mut node = node();
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        let me = see(&mut node, Pid(std::process::id())).unwrap();
        if me.threads.unwrap().iter().any(|thread| thread.comm == Comm::from(name)) {
            break;
        }
        // A new thread sets its name when it first runs. The name is read again afterwards.
        assert!(Instant::now() < deadline, "no thread of that name");
        node = tests::node();
    }
    drop(stop);
    assert!(thread.join().unwrap());
}

#[test]
fn a_request_for_every_pu_lets_the_thread_follow_its_cpuset() {
    let _alone = alone_with_cpusets();
    let idle_process = Running::start("sleep", &["1000"]);
    let mut node = node();
    let seen = see(&mut node, idle_process.pid()).unwrap();
    let (all, tid) = (node.online.clone(), Tid(idle_process.pid().0));
    let one = CpuSet::from(all.last().unwrap());
    assert_eq!(node.change_mask(&set_to(&seen, one.clone())), MaskOutcome::Done { effective: one });
    assert_eq!(node.change_mask(&set_to(&seen, all.clone())), MaskOutcome::Done { effective: all.clone() });
    assert_eq!(affinity::get_mask(tid).unwrap(), all);
}

#[test]
fn a_mask_probe_reports_processes_with_an_unexpected_mask() {
    let child = Running::start("sleep", &["1000"]);
    let mut over = Running::start("true", &[]);
    over.0.wait().unwrap();
    let mut node = node();
    let seen = see(&mut node, child.pid()).unwrap();
    let mask = seen.first_thread_mask.clone().unwrap();
    let other = CpuSet::from(Pu(4000));
    // The reported start time now differs from the child's.
    let deadline = Instant::now() + Duration::from_secs(60);
    while clock::now().since_boot.0 <= seen.id.start.latest_time().0 {
        assert!(Instant::now() < deadline, "a tick is 10 ms");
        std::thread::yield_now();
    }
    let born = || clock::now().since_boot;
    let mut probe = |pid: Pid, mask: &CpuSet, forked_at: Nanos| {
        node.probe_masks(&BTreeMap::from([(pid, ExpectedMask { mask: mask.clone(), forked_at })])).mismatches
    };
    assert_eq!(probe(child.pid(), &mask, born()), []);
    assert_eq!(probe(over.pid(), &other, born()), []);
    assert_eq!(
        probe(child.pid(), &other, Nanos(0)),
        [],
        "the id may have belonged to another process at the fork"
    );
    let now = clock::now().since_boot;
    let reported = probe(child.pid(), &other, born());
    let [mismatch] = reported.as_slice() else { panic!("{reported:?}") };
    assert_eq!((mismatch.id.pid, &mismatch.effective_mask), (child.pid(), &mask));
    let start = mismatch.id.start;
    assert!(
        start.latest_time() >= now && start > seen.id.start,
        "the start time follows from the event: {start}"
    );

    // The mask can be set at once, although the start time differs.
    let action = set_to(&Process { id: mismatch.id, ..seen }, mask);
    let action = MaskAction { thread: ThreadId { start, ..action.thread }, ..action };
    assert!(matches!(node.change_mask(&action), MaskOutcome::Done { .. }));
    see(&mut node, child.pid());
    assert_eq!(node.change_mask(&action), MaskOutcome::Gone, "a scan followed");
}
