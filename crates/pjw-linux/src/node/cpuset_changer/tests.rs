//! A thread that changes cpusets. A move into a cgroup whose file is a FIFO takes until the test reads the FIFO. In
//! place of a thread that the kernel blocks, or that panics, the test has one of its own, which makes no change.

use std::io::Write;
use std::path::PathBuf;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::stat::Mode;
use nix::unistd::mkfifo;
use pjw_core::cpuset::CpuSet;
use pjw_core::cpuset_group::{CgroupCreator, CpusetChange, CpusetSpec, JobCpuset};
use pjw_core::ids::{Pid, ProcessId, Uid};

use super::*;

/// How long poll(2) waits for what must happen, in ms.
const POLL_TIMEOUT: u16 = 60_000;

const DONE: CpusetOutcome = CpusetOutcome::Done { effective: None };

/// A directory that serves as a hierarchy, with the cgroups `slow` and `quick`. The process that is moved is this one.
struct TestHierarchy {
    directory: tempfile::TempDir,
    mount: CpusetMount,
    process: ProcessId,
    /// The cgroup of the process.
    from: String,
}

impl TestHierarchy {
    /// `None` if there are no cgroups.
    fn new() -> Option<Self> {
        let directory = tempfile::tempdir().unwrap();
        for cgroup in ["slow", "quick"] {
            std::fs::create_dir(directory.path().join(cgroup)).unwrap();
        }
        let mount = mount_at(directory.path());
        let pid = Pid(std::process::id());
        let mut proc = ProcDir::open(Path::new("/proc")).unwrap();
        let process = ProcessId { pid, start: proc.thread_stat(pid, Tid(pid.0)).unwrap().start };
        let Some(from) = proc.cpuset_path(pid) else {
            let _ = writeln!(io::stderr(), "skipped: there are no cgroups here");
            return None;
        };
        let hierarchy = Self { directory, mount, process, from };
        mkfifo(&hierarchy.file("slow"), Mode::S_IRWXU).unwrap();
        std::fs::write(hierarchy.file("quick"), "").unwrap();
        Some(hierarchy)
    }

    fn file(&self, cgroup: &str) -> PathBuf {
        self.directory.path().join(cgroup).join("cgroup.procs")
    }

    fn move_to(&self, path: &str) -> CpusetAction {
        let (process, from, to) = (self.process, self.from.clone(), path.to_owned());
        action(CpusetChange::MoveBack { process, from, to })
    }

    /// Requests the moves to the cgroups at `paths`.
    fn change(&self, changer: &mut CpusetChanger, paths: &[&str], max_wait: Duration) -> Vec<CpusetOutcome> {
        let actions: Vec<CpusetAction> = paths.iter().map(|path| self.move_to(path)).collect();
        changer.change(&actions, &self.mount, max_wait)
    }
}

fn mount_at(mount_point: &Path) -> CpusetMount {
    CpusetMount {
        mount_point: mount_point.to_owned(),
        is_unified: false,
        v1_cpu_mount_point: None,
        v1_freezer_mount_point: None,
    }
}

/// The change that removes the cpuset at `path`.
fn removal(path: &str) -> CpusetAction {
    let (creator, spec) = (CgroupCreator::Warden, CpusetSpec::from_cpus(CpuSet::new()));
    let job = "manual:a".parse().unwrap();
    action(CpusetChange::Remove { job_cpuset: JobCpuset { job, creator, path: path.to_owned(), spec } })
}

fn changer_with(thread: ChangeThread) -> CpusetChanger {
    let (worker, own_cgroups) = (Worker::Thread(Box::new(thread)), OwnCgroupNames::default());
    CpusetChanger { worker, affinity_persists: false, own_cgroups }
}

fn action(change: CpusetChange) -> CpusetAction {
    CpusetAction { job: "manual:a".parse().unwrap(), change, is_repair: false, reason: String::new() }
}

fn changer_with_thread() -> CpusetChanger {
    let mut changer = CpusetChanger::new(true, OwnCgroupNames::default()).unwrap();
    changer.start_thread().unwrap();
    changer
}

#[test]
fn changes_that_take_long_are_completed_later_in_the_order_of_the_calls() {
    let Some(hierarchy) = TestHierarchy::new() else { return };
    let pid = hierarchy.process.pid.to_string();
    let [to_slow, to_quick] = ["/slow", "/quick"].map(|path| hierarchy.move_to(path));
    let mut changer = changer_with_thread();
    let wait = Duration::from_millis(5);
    assert!(changer.wait_until_complete(Duration::ZERO), "no change was requested");
    let delayed = hierarchy.change(&mut changer, &["/slow", "/quick"], wait);
    assert_eq!(delayed, [CpusetOutcome::Delayed, CpusetOutcome::Delayed]);
    assert!(!changer.has_finished() && !changer.wait_until_complete(wait));
    assert_eq!(std::fs::read_to_string(hierarchy.file("quick")).unwrap(), "");

    let moved = io::read_to_string(std::fs::File::open(hierarchy.file("slow")).unwrap()).unwrap();
    assert_eq!(moved.trim(), pid);
    let mut finished = Vec::new();
    while finished.len() < 2 {
        let fd = changer.fd().expect("a change is delayed");
        let ready = poll(&mut [PollFd::new(fd, PollFlags::POLLIN)], PollTimeout::from(POLL_TIMEOUT));
        assert_eq!(ready, Ok(1), "the end of a delayed change is reported");
        assert!(changer.has_finished());
        finished.extend(changer.take_finished());
    }
    assert_eq!(finished, [(to_slow.clone(), DONE), (to_quick.clone(), DONE)]);
    assert!(changer.fd().is_none() && !changer.has_finished());
    assert_eq!(hierarchy.change(&mut changer, &["/quick", "/quick"], Duration::MAX), [DONE, DONE]);
    assert!(changer.fd().is_none(), "the caller has waited for them");

    // On a busy machine, the quick change may be delayed too.
    let mut outcomes = hierarchy.change(&mut changer, &["/quick", "/slow"], Duration::from_millis(100));
    outcomes.extend(hierarchy.change(&mut changer, &["/quick"], wait));
    assert_eq!(outcomes[1..], [CpusetOutcome::Delayed, CpusetOutcome::Delayed]);
    let file = hierarchy.file("slow");
    let reader = std::thread::spawn(move || io::read_to_string(std::fs::File::open(file).unwrap()).unwrap());
    assert!(changer.wait_until_complete(Duration::from_secs(60)));
    assert_eq!(reader.join().unwrap().trim(), pid);
    let delayed = [to_quick.clone(), to_slow, to_quick].into_iter().zip(outcomes);
    let delayed = delayed.filter(|(_, outcome)| *outcome == CpusetOutcome::Delayed);
    let expected: Vec<_> = delayed.map(|(action, _)| (action, DONE)).collect();
    assert_eq!(changer.take_finished(), expected);
}

#[test]
fn a_process_stays_in_its_cgroup_if_the_cpuset_of_the_same_request_was_refused() {
    let Some(hierarchy) = TestHierarchy::new() else { return };
    let (process, from, path) = (hierarchy.process, hierarchy.from.clone(), "/missing".to_owned());
    // In the cgroup of a batch system, pjw gives no idle priority.
    let spec = CpusetSpec { idle: true, ..CpusetSpec::from_cpus(CpuSet::new()) };
    let creator = CgroupCreator::Scheduler;
    let job_cpuset = JobCpuset { job: "manual:a".parse().unwrap(), creator, path: path.clone(), spec };
    let actions = [
        action(CpusetChange::Create { job_cpuset, owner: Uid::ROOT, initial_processes: Vec::new() }),
        action(CpusetChange::MoveIn { process, from, to: path }),
        hierarchy.move_to("/quick"),
    ];
    let outcomes = changer_with_thread().change(&actions, &hierarchy.mount, Duration::MAX);
    let why: Vec<&str> = outcomes
        .iter()
        .map(|outcome| match outcome {
            CpusetOutcome::Refused { reason } => reason.as_str(),
            _ => "",
        })
        .collect();
    assert_eq!(why.len(), 3);
    assert!(why[0].contains("it gets no idle priority"), "{why:?}");
    assert!(why[1].contains("the cgroup no longer exists"), "{why:?}");
    assert_eq!(outcomes[2], DONE, "the other changes are made");
}

#[test]
fn a_blocked_thread_gets_one_request_to_restore_masks_for_all_attempts() {
    let mount = mount_at(Path::new("/"));
    let (unblock, blocked) = channel();
    let (sender, received) = channel();
    let thread = ChangeThread::start(move |ends| {
        for request in &ends.requests {
            let Request::Restore(paths, _) = request else { panic!("nothing else was requested") };
            let _ = blocked.recv();
            ends.completion.is_partition_ending.store(false, Ordering::SeqCst);
            let _ = ends.answers.send(Answer::Restored);
            let _ = sender.send(paths);
        }
    });
    let thread = thread.unwrap();
    thread.completion.is_partition_ending.store(true, Ordering::SeqCst);
    let mut changer = changer_with(thread);
    changer.restore_after_removal(vec!["/a".to_owned()], &mount);
    for _ in 0..1000 {
        changer.restore_after_removal(Vec::new(), &mount);
        changer.restore_after_removal(vec!["/b".to_owned()], &mount);
    }
    let _ = unblock.send(());
    assert_eq!(received.recv().unwrap(), ["/a"]);
    // The next scan sends what has waited. After that nothing is left to restore.
    changer.restore_after_removal(Vec::new(), &mount);
    let _ = unblock.send(());
    assert_eq!(received.recv().unwrap(), ["/b"]);
    changer.restore_after_removal(Vec::new(), &mount);
    drop((changer, unblock));
    assert!(received.recv().is_err(), "the thread ends, and has received no other request");
}

#[test]
fn the_changes_of_a_thread_that_panics_are_refused_and_the_panic_is_named() {
    let mount = mount_at(Path::new("/"));
    let (unblock, blocked) = channel::<()>();
    let thread = ChangeThread::start(move |ends| {
        let _ = ends.requests.recv();
        let _ = blocked.recv();
        panic!("no such\nlist");
    });
    let mut changer = changer_with(thread.unwrap());
    let actions = [removal("/a"), removal("/b")];
    let delayed = changer.change(&actions, &mount, Duration::ZERO);
    assert_eq!(delayed, [CpusetOutcome::Delayed, CpusetOutcome::Delayed]);
    assert!(!changer.has_finished());

    drop(unblock);
    let fd = changer.fd().expect("two changes are delayed");
    let ready = poll(&mut [PollFd::new(fd, PollFlags::POLLIN)], PollTimeout::from(POLL_TIMEOUT));
    assert_eq!(ready, Ok(1), "the end of the thread is reported");
    assert!(changer.has_finished());
    let refused = outcome_without_thread(&actions[0]);
    let expected = actions.clone().map(|action| (action, refused.clone()));
    assert_eq!(changer.take_finished(), expected);
    assert!(changer.fd().is_none() && !changer.has_finished());

    let cause = "no such list".to_owned();
    assert_eq!(changer.thread_problem(), Some(CpusetThreadProblem::Ended { cause }));
    assert_eq!(changer.change(&actions[..1], &mount, Duration::MAX), [refused]);
    changer.restore_after_removal(vec!["/a".to_owned()], &mount);
    assert!(changer.fd().is_none() && changer.wait_until_complete(Duration::MAX), "no change is open");
}

#[test]
fn a_caller_that_waits_for_a_thread_does_not_wait_after_its_panic() {
    let thread = ChangeThread::start(|ends| {
        let _ = ends.requests.recv();
        let _ = ends.answers.send(Answer::Changed(DONE));
        panic!("no list");
    });
    let actions = [removal("/a"), removal("/b")];
    let outcomes = changer_with(thread.unwrap()).change(&actions, &mount_at(Path::new("/")), Duration::MAX);
    assert_eq!(outcomes, [DONE, outcome_without_thread(&actions[1])]);
}
