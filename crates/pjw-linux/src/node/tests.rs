//! The live machine, seen through the node: real processes, real masks.

use std::io::Write;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use pjw_core::cpuset::Pu;
use pjw_core::plan::ActionKind;
use pjw_core::process::{Comm, StartTime, ThreadId};
use pjw_core::snapshot::{Nanos, Process};

use super::*;

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

fn node() -> LinuxNode {
    LinuxNode::new(BTreeSet::from(["SLURM_JOB_ID"])).unwrap()
}

fn at(pids: &[Pid]) -> Look {
    let pids: BTreeSet<Pid> = pids.iter().copied().collect();
    Look {
        scope: Scope::Partial(pids.clone()),
        threads_of: pids,
        cgroups: BTreeSet::new(),
        watch: Arc::default(),
    }
}

fn see(node: &mut LinuxNode, pid: Pid) -> Option<Process> {
    node.observe(&at(&[pid])).processes.remove(&pid).and_then(|seen| seen.here().cloned())
}

fn set_to(process: &Process, to: CpuSet) -> Action {
    let thread = &process.threads.as_ref().unwrap()[0];
    Action {
        kind: ActionKind::Confine,
        job: "manual:a".parse().unwrap(),
        thread: ThreadId { process: process.id, tid: thread.tid, start: thread.start },
        from: thread.allowed.clone(),
        to,
        walled: false,
        why: String::new(),
    }
}

#[test]
fn a_full_look_lists_every_process_and_the_threads_that_are_wanted() {
    let sleeper = Running::start("sleep", &["1000"]);
    let mut node = node();
    let look = Look {
        scope: Scope::Full,
        threads_of: BTreeSet::from([sleeper.pid()]),
        cgroups: BTreeSet::new(),
        watch: Arc::default(),
    };
    let snapshot = node.observe(&look);
    let me = snapshot.processes[&Pid(std::process::id())].here().unwrap();
    assert!(me.threads.is_none() && !me.kernel);
    let it = snapshot.processes[&sleeper.pid()].here().unwrap();
    assert_eq!(it.parent, Pid(std::process::id()));
    assert_eq!(it.threads.as_ref().unwrap().len(), 1);
    assert_eq!(it.uid.0, nix::unistd::getuid().as_raw());
}

fn see_until(node: &mut LinuxNode, pid: Pid, what: &str, seen: impl Fn(&Process) -> bool) -> Process {
    let deadline = Instant::now() + Duration::from_secs(20);
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
fn marks_are_told_once_and_hold_only_what_was_asked_for() {
    let sleeper = Running::start("sleep", &["1000"]);
    let mut node = node();
    // The fork may be seen before the exec.
    let told =
        |process: &Process| process.marks.as_ref().is_some_and(|marks| marks.command_line == "sleep 1000");
    let marks = see_until(&mut node, sleeper.pid(), "the marks of sleep", told).marks.unwrap();
    assert_eq!(marks.environ, BTreeMap::from([("SLURM_JOB_ID".to_owned(), "77".to_owned())]));
    assert!(see(&mut node, sleeper.pid()).unwrap().marks.is_none());
}

#[test]
fn marks_are_read_again_when_another_program_of_the_same_name_runs_though_no_event_told() {
    let mut shell = Running::start("sh", &["-c", "read x; SLURM_JOB_ID=78 exec sh -c 'read y'"]);
    let mut node = node();
    let of_job = |id: &'static str| {
        move |process: &Process| {
            let marks = process.marks.as_ref();
            marks.is_some_and(|marks| marks.environ.get("SLURM_JOB_ID").map(String::as_str) == Some(id))
        }
    };
    see_until(&mut node, shell.pid(), "the first shell", of_job("77"));
    shell.0.stdin.as_mut().unwrap().write_all(b"go\n").unwrap();
    see_until(&mut node, shell.pid(), "the second shell", of_job("78"));
}

#[test]
fn a_mask_is_set_and_read_back() {
    let sleeper = Running::start("sleep", &["1000"]);
    let mut node = node();
    let before = see(&mut node, sleeper.pid()).unwrap();
    let one = CpuSet::from(before.mask.as_ref().unwrap().last().unwrap());
    assert_eq!(node.apply(&set_to(&before, one.clone())), Outcome::Done { effective: one.clone() });
    assert_eq!(see(&mut node, sleeper.pid()).unwrap().threads.unwrap()[0].allowed, one);
    let all = node.online.clone();
    assert_eq!(node.apply(&set_to(&before, all.clone())), Outcome::Done { effective: all });
}

#[test]
fn pus_that_went_during_a_look_are_taken_from_what_it_read() {
    let sleeper = Running::start("sleep", &["1000"]);
    let process = see(&mut node(), sleeper.pid()).unwrap();
    let all = process.mask.clone().unwrap();
    let one = CpuSet::from(all.first().unwrap());
    let mut seen = BTreeMap::from([(sleeper.pid(), Seen::Here(process))]);
    let masks = |seen: &BTreeMap<Pid, Seen<Process>>| {
        let process = seen[&sleeper.pid()].here().unwrap();
        (process.mask.clone().unwrap(), process.threads.as_ref().unwrap()[0].allowed.clone())
    };
    cut_masks(&mut seen, &CpuSet::new());
    assert_eq!(masks(&seen), (all.clone(), all), "who has nothing left is about to be driven out");
    cut_masks(&mut seen, &one);
    assert_eq!(masks(&seen), (one.clone(), one));
}

#[test]
fn an_action_on_who_is_gone_or_another_is_gone() {
    let mut node = node();
    let mut sleeper = Running::start("sleep", &["1000"]);
    let seen = see(&mut node, sleeper.pid()).unwrap();
    let mut other = set_to(&seen, node.online.clone());
    other.thread.start = StartTime(other.thread.start.0 + 1);
    assert_eq!(node.apply(&other), Outcome::Gone);
    sleeper.0.kill().unwrap();
    sleeper.0.wait().unwrap();
    assert_eq!(node.apply(&set_to(&seen, node.online.clone())), Outcome::Gone);
    assert_eq!(see(&mut node, sleeper.pid()), None);
    assert!(node.known.is_empty());
}

#[test]
fn an_impossible_mask_is_refused_with_a_hint() {
    let sleeper = Running::start("sleep", &["1000"]);
    let mut node = node();
    let seen = see(&mut node, sleeper.pid()).unwrap();
    let outcome = node.apply(&set_to(&seen, CpuSet::from(Pu(8000))));
    assert!(matches!(&outcome, Outcome::Refused { hint, .. } if hint.contains("cpuset")), "{outcome:?}");
}

#[test]
fn a_zombie_is_gone() {
    let mut node = node();
    let mut child = Running::start("true", &[]);
    let pid = child.pid();
    // Its parent, this test, has not waited for it: it stays a zombie until then.
    let status = nix::sys::wait::Id::Pid(nix::unistd::Pid::from_raw(pid.0.cast_signed()));
    let flags = nix::sys::wait::WaitPidFlag::WEXITED | nix::sys::wait::WaitPidFlag::WNOWAIT;
    nix::sys::wait::waitid(status, flags).unwrap();
    assert_eq!(see(&mut node, pid), None);
    child.0.wait().unwrap();
}

#[test]
fn processes_that_come_and_go_while_they_are_read_are_no_errors() {
    let mut node = node();
    for _ in 0..50 {
        let mut child = Command::new("true").spawn().unwrap();
        let look = Look {
            scope: Scope::Full,
            threads_of: BTreeSet::from([Pid(child.id())]),
            cgroups: BTreeSet::new(),
            watch: Arc::default(),
        };
        let snapshot = node.observe(&look);
        assert!(snapshot.processes.contains_key(&Pid(std::process::id())));
        child.wait().unwrap();
    }
}

#[test]
fn every_thread_is_seen_whatever_its_name() {
    let (stop, wait) = std::sync::mpsc::channel::<()>();
    let name = ") R 1 (\n";
    let thread =
        std::thread::Builder::new().name(name.to_owned()).spawn(move || wait.recv().is_err()).unwrap();
    let mut node = node();
    let deadline = Instant::now() + Duration::from_secs(10);
    loop {
        let me = see(&mut node, Pid(std::process::id())).unwrap();
        if me.threads.unwrap().iter().any(|thread| thread.comm == Comm::from(name)) {
            break;
        }
        // A new thread names itself only once it runs; its name is read again when it has run.
        assert!(Instant::now() < deadline, "no thread of that name");
        node = tests::node();
    }
    drop(stop);
    assert!(thread.join().unwrap());
}

#[test]
fn a_walled_thread_follows_its_wall_unless_it_is_to_be_narrower() {
    let sleeper = Running::start("sleep", &["1000"]);
    let mut node = node();
    let seen = see(&mut node, sleeper.pid()).unwrap();
    let (all, tid) = (node.online.clone(), Tid(sleeper.pid().0));
    let one = CpuSet::from(all.last().unwrap());
    let walled = |to: &CpuSet| Action { walled: true, ..set_to(&seen, to.clone()) };
    assert_eq!(node.apply(&walled(&one)), Outcome::Done { effective: one });
    assert_eq!(node.apply(&walled(&all)), Outcome::Done { effective: all.clone() });
    assert_eq!(affinity::get(tid).unwrap(), all);
}

#[test]
fn a_glance_tells_of_newborns_whose_mask_is_another_than_expected() {
    let child = Running::start("sleep", &["1000"]);
    let mut over = Running::start("true", &[]);
    over.0.wait().unwrap();
    let mut node = node();
    let seen = see(&mut node, child.pid()).unwrap();
    let mask = seen.mask.clone().unwrap();
    let other = CpuSet::from(Pu(4000));
    // By now the start that is told is another than the child's.
    let deadline = Instant::now() + Duration::from_secs(10);
    while clock::now().since_boot.0 <= seen.id.start.at_the_latest().0 {
        assert!(Instant::now() < deadline, "a tick is 10 ms");
        std::thread::yield_now();
    }
    let born = || clock::monotonic();
    let mut glance = |pid: Pid, mask: &CpuSet, born: Nanos| {
        node.glance(&BTreeMap::from([(pid, Expected { mask: mask.clone(), born })])).newborns
    };
    assert_eq!(glance(child.pid(), &mask, born()), []);
    assert_eq!(glance(over.pid(), &other, born()), []);
    assert_eq!(
        glance(child.pid(), &other, Nanos(0)),
        [],
        "its number may have been another's when it was born"
    );
    let now = clock::now().since_boot;
    let told = glance(child.pid(), &other, born());
    let [newborn] = told.as_slice() else { panic!("{told:?}") };
    assert_eq!((newborn.id.pid, &newborn.mask), (child.pid(), &mask));
    let start = newborn.id.start;
    assert!(start.at_the_latest() >= now && start > seen.id.start, "as the event dates it: {start}");

    // Its mask may be set at once, though its start is another.
    let action = set_to(&Process { id: newborn.id, ..seen }, mask);
    let action = Action { thread: ThreadId { start, ..action.thread }, ..action };
    assert!(matches!(node.apply(&action), Outcome::Done { .. }));
    see(&mut node, child.pid());
    assert_eq!(node.apply(&action), Outcome::Gone, "a look was taken since");
}
