//! Real processes that sleep, run and end.

use std::io::{Read, Write};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use pjw_core::cpuset::Pu;
use pjw_core::snapshot::Sleepers;

use super::*;

/// A shell that answers each line it reads: it sleeps until it is asked.
struct Shell(Child);

impl Shell {
    fn start() -> Self {
        let mut command = Command::new("sh");
        command.args(["-c", "while read -r line; do echo $line; done"]);
        let mut shell = Self(command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap());
        shell.wake();
        shell
    }

    fn pid(&self) -> Pid {
        Pid(self.0.id())
    }

    /// Lets it run for a moment, and sleep again.
    fn wake(&mut self) {
        self.0.stdin.as_mut().unwrap().write_all(b"x\n").unwrap();
        self.0.stdout.as_mut().unwrap().read_exact(&mut [0; 2]).unwrap();
        let pid = self.pid();
        let state = move || std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
        let deadline = Instant::now() + Duration::from_secs(20);
        while !state().contains(") S ") {
            assert!(Instant::now() < deadline, "it does not fall asleep");
            std::thread::yield_now();
        }
    }
}

impl Drop for Shell {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn watch(cgroup: Option<&str>, pids: &[Pid]) -> Arc<Watch> {
    let within = Some(CpuSet::from(Pu(0)));
    let group = Sleepers { cgroup: cgroup.map(str::to_owned), within, pids: pids.to_vec() };
    Arc::new(Watch { groups: vec![group], ..Watch::default() })
}

fn behind_a_cpuset(pid: Pid) -> Watch {
    let group = Sleepers { cgroup: None, within: None, pids: vec![pid] };
    Watch { groups: vec![group], ..Watch::default() }
}

/// Asks twice: who does not run in between sleeps.
fn settled(sleep: &mut Sleep, watch: &Watch) -> Woken {
    sleep.ask(watch, None, Nanos(1), true);
    sleep.ask(watch, None, Nanos(2), true)
}

#[test]
fn who_did_not_run_is_left_alone_and_who_did_is_looked_at() {
    let mut shell = Shell::start();
    let watch = watch(None, &[shell.pid()]);
    let mut sleep = Sleep::default();
    assert!(sleep.ask(&watch, None, Nanos(1), true).awake.contains(&shell.pid()), "nothing is known yet");
    assert!(settled(&mut sleep, &watch).asleep.contains(&shell.pid()));
    shell.wake();
    let woken = sleep.ask(&watch, None, Nanos(3), true);
    assert!(woken.awake.contains(&shell.pid()) && woken.asleep.is_empty(), "{woken:?}");
    assert_eq!(woken.quiet_until.get(&shell.pid()), Some(&Nanos(2)), "so long it was seen to sleep");
}

#[test]
fn the_longer_somebody_sleeps_the_more_rarely_it_is_asked() {
    let mut shell = Shell::start();
    let pid = shell.pid();
    let watch = behind_a_cpuset(pid);
    let mut sleep = Sleep::default();
    for at in 0..=LONG.into() {
        assert_eq!(sleep.ask(&watch, None, Nanos(at), false).asleep.contains(&pid), at > 0);
    }
    let mut ask = |full| {
        let woken = sleep.ask(&watch, None, Nanos(100), full);
        (woken.asleep.contains(&pid), woken.awake.contains(&pid))
    };
    for (looks, expected) in [(32, 8), (64, 8), (64, 4), (64, 4)] {
        assert_eq!((0..looks).filter(|_| ask(false).0).count(), expected, "of {looks}");
    }
    assert!(
        (0..MOST_TURNS).all(|_| ask(true).0),
        "a full look is told that it sleeps, as far as anybody knows"
    );
    shell.wake();
    assert!((0..MOST_TURNS).any(|_| ask(false).1), "it is found awake when it is its turn");
    assert_eq!(ask(false), (true, false), "from then on it is asked each time");
}

#[test]
fn looks_that_name_nobody_are_nobodys_turn() {
    let shell = Shell::start();
    let watch = behind_a_cpuset(shell.pid());
    let mut sleep = Sleep::default();
    let mut asked = 0;
    for at in 0..41 {
        asked += sleep.ask(&watch, None, Nanos(at), false).asleep.len();
        sleep.ask(&Watch::default(), None, Nanos(at), false);
    }
    assert_eq!(asked, 8 + 8, "as if there were no others: 8 of the first 9, and one of four then");
}

#[test]
fn whoever_was_looked_at_has_not_slept_for_long() {
    let shell = Shell::start();
    let pid = shell.pid();
    let watch = behind_a_cpuset(pid);
    let mut sleep = Sleep::default();
    (0..200).for_each(|at| drop(sleep.ask(&watch, None, Nanos(at), false)));
    sleep.interrupt(pid);
    let asked = (0..LONG).filter(|_| sleep.ask(&watch, None, Nanos(200), false).asleep.contains(&pid));
    assert_eq!(asked.count(), 8);
}

#[test]
fn who_ran_when_it_was_not_its_turn_is_found_when_its_job_falls_asleep() {
    let mut shell = Shell::start();
    let pid = shell.pid();
    let root = tempfile::tempdir().unwrap();
    std::fs::create_dir(root.path().join("job")).unwrap();
    let group = Sleepers { cgroup: Some("/job".into()), within: None, pids: vec![pid] };
    let watch =
        Watch { groups: vec![group.clone(), Sleepers { pids: Vec::new(), ..group }], ..Watch::default() };
    let mut sleep = Sleep::default();
    let mut ask = |used: u64| {
        std::fs::write(root.path().join("job/cpu.stat"), format!("usage_usec {used}\n")).unwrap();
        let woken = sleep.ask(&watch, Some(root.path()), Nanos(used), false);
        (woken.asleep.contains(&pid), woken.awake.contains(&pid))
    };
    // Others run all the time.
    let turns = (0..200).filter(|&used| ask(used).0).count();
    assert!(turns < 50, "it sleeps for long: {turns}");
    let its_turn = (200..300).find(|&used| ask(used).0).unwrap();
    shell.wake();
    assert_eq!(ask(its_turn + 1), (false, false), "it is not its turn");
    assert_eq!(ask(its_turn + 1), (false, true));
    assert_eq!(
        [0; 2].map(|_| ask(its_turn + 1)),
        [(false, false); 2],
        "nobody is asked as long as all sleep"
    );
}

#[test]
fn whom_only_its_masks_keep_inside_is_asked_each_time() {
    let shell = Shell::start();
    let watch = watch(None, &[shell.pid()]);
    let mut sleep = Sleep::default();
    sleep.ask(&watch, None, Nanos(0), false);
    for at in 1..u64::from(LONG + 2 * MOST_TURNS) {
        assert!(sleep.ask(&watch, None, Nanos(at), false).asleep.contains(&shell.pid()), "{at}");
    }
}

#[test]
fn who_is_gone_is_looked_at_and_found_gone() {
    let shell = Shell::start();
    let watch = watch(None, &[shell.pid()]);
    let mut sleep = Sleep::default();
    settled(&mut sleep, &watch);
    let pid = shell.pid();
    drop(shell);
    assert!(sleep.ask(&watch, None, Nanos(3), true).awake.contains(&pid));
}

#[test]
fn sleepers_are_asked_for_their_masks_in_turn_and_those_outside_are_woken() {
    let shells: Vec<Shell> = (0..3).map(|_| Shell::start()).collect();
    let pids: Vec<Pid> = shells.iter().map(Shell::pid).collect();
    let watch = watch(None, &pids);
    let mut sleep = Sleep::default();
    let mut woken = settled(&mut sleep, &watch);
    let mut asked = Vec::new();
    for _ in 0..4 {
        // Each has so many threads that nobody else's turn is in the same look.
        sleep.sample(&mut woken, &watch, |pid, within| {
            assert_eq!(*within, CpuSet::from(Pu(0)));
            asked.push(pid);
            (SAMPLES, pid == pids[1])
        });
    }
    assert_eq!(asked[..3].iter().collect::<BTreeSet<_>>().len(), 3, "{asked:?}");
    assert_eq!(asked[3], asked[0]);
    assert_eq!(woken.awake, BTreeSet::from([pids[1]]));
    sleep.sample(&mut woken, &watch, |pid, _| {
        asked.push(pid);
        (1, false)
    });
    assert_eq!(asked.len(), 4 + 3, "small ones are asked together, each once");
}

#[test]
fn a_jobs_cgroup_that_used_no_cpu_answers_for_all_of_its_processes() {
    let shell = Shell::start();
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("job");
    std::fs::create_dir(&dir).unwrap();
    let write = |used: u32, tasks: u32| {
        std::fs::write(dir.join("cpu.stat"), format!("usage_usec {used}\nuser_usec 1\n")).unwrap();
        std::fs::write(dir.join("pids.current"), format!("{tasks}\n")).unwrap();
    };
    write(10, 1);
    let watch = watch(Some("/job"), &[shell.pid()]);
    let mut sleep = Sleep::default();
    let mut ask = |at: u64| sleep.ask(&watch, Some(root.path()), Nanos(at), false);
    assert!(ask(1).awake.contains(&shell.pid()));
    assert!(ask(2).asleep.contains(&shell.pid()), "it may have run in a look in which it was not asked");
    let quiet = ask(3);
    assert!(quiet.awake.is_empty() && quiet.asleep.is_empty(), "nobody is asked: {quiet:?}");
    write(10, 0);
    let moved = ask(4);
    assert!(moved.awake.len() + moved.asleep.len() == 1, "one was moved out: {moved:?}");
    write(11, 0);
    let ran = ask(5);
    assert!(ran.awake.len() + ran.asleep.len() == 1, "somebody ran: {ran:?}");
}

#[test]
fn a_stranger_is_looked_at_if_it_ran_or_is_gone_and_is_nobodys_sleeper() {
    let mut shell = Shell::start();
    let pid = shell.pid();
    let watch = Watch { groups: Vec::new(), strangers: vec![pid, Pid(u32::MAX >> 1)] };
    let mut sleep = Sleep::default();
    let mut ask = || {
        let woken = sleep.ask(&watch, None, Nanos(1), false);
        assert!(
            woken.awake.is_empty() && woken.asleep.is_empty() && woken.quiet_until.is_empty(),
            "{woken:?}"
        );
        woken.strangers
    };
    let gone = Pid(u32::MAX >> 1);
    assert_eq!(ask(), BTreeSet::from([pid, gone]), "nothing is known yet");
    let deadline = Instant::now() + Duration::from_secs(20);
    while ask() != BTreeSet::from([gone]) {
        assert!(Instant::now() < deadline, "the shell never sleeps");
    }
    shell.wake();
    assert!(ask().contains(&pid));
}
