//! Demand of owners on lent PUs, with live processes.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;
use std::fs;
use std::io::Write;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, waitpid};
use nix::time::{ClockId, clock_gettime};
use pjw_core::cpuset::{CpuSet, Pu};
use pjw_core::ids::{Pid, Tid};

use crate::bpf::{LentCpuMonitor, LentCpuMonitorUnavailable};
use crate::cgroup::{CgroupDir, CgroupMounts, CpusetMount};
use crate::sys::{affinity, cpu_time::process_cpu_time};
use crate::tests::{shell_that_ends_with_its_thread, until};

/// Serialises the tests: each looks for the program in the kernel.
static ALONE: Mutex<()> = Mutex::new(());

/// A monitor of one PU. `None`, with a printed reason, if the machine or the user lacks a requirement. The lock comes
/// first, so that a test drops it last: until then its program is in the kernel.
fn monitor() -> Option<(MutexGuard<'static, ()>, LentCpuMonitor, Pu)> {
    let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let pu = affinity::get_mask(Tid(std::process::id())).unwrap().last().unwrap();
    match LentCpuMonitor::new() {
        Ok(mut monitor) => {
            monitor.set_lent_pus(&of_an_owner_with(1, pu), &CpuSet::new()).unwrap();
            Some((alone, monitor, pu))
        }
        Err(
            error @ (LentCpuMonitorUnavailable::Refused(_) | LentCpuMonitorUnavailable::SelfCheckFailed(_)),
        ) => {
            panic!("{error}")
        }
        Err(error) => {
            println!("skipped: {error}");
            None
        }
    }
}

/// The PU, lent by an owner with so many PUs.
fn of_an_owner_with(owner_pus: u32, pu: Pu) -> BTreeMap<Pu, u32> {
    BTreeMap::from([(pu, owner_pus)])
}

/// The number of windows of time in which a test measures.
const WINDOWS: usize = 9;

/// Measures in several windows. `Err` with all figures if those of half of the windows or more are wrong. In a few they
/// may be wrong: the hypervisor can stop the CPU between two readings, or in the middle of a switch, and then both
/// threads have the time of the stop.
fn measure<T: Debug>(window: &mut impl FnMut() -> T, is_right: impl Fn(&T) -> bool) -> Result<(), String> {
    let windows: Vec<T> = (0..WINDOWS).map(|_| window()).collect();
    let right = windows.iter().filter(|window| is_right(window)).count();
    let figures = || format!("only in {right} of {WINDOWS} windows: {windows:?}");
    if right > WINDOWS / 2 { Ok(()) } else { Err(figures()) }
}

/// Checks that the figures of more than half of the windows are right.
fn assert_most<T: Debug>(what: &str, mut window: impl FnMut() -> T, is_right: impl Fn(&T) -> bool) {
    assert_eq!(measure(&mut window, is_right), Ok(()), "{what}");
}

/// A shell on one PU, which runs a script until it is dropped.
struct Shell(Child);

impl Shell {
    fn start(pu: Pu, script: &str) -> Self {
        let child = shell_that_ends_with_its_thread(script).spawn().unwrap();
        affinity::set_mask(Tid(child.id()), &CpuSet::from(pu)).unwrap();
        Self(child)
    }
}

impl Drop for Shell {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn is_readable(monitor: &LentCpuMonitor, timeout: PollTimeout) -> bool {
    let mut fds = [PollFd::new(monitor.fd(), PollFlags::POLLIN)];
    poll(&mut fds, timeout).unwrap() == 1
}

fn run_time(monitor: &LentCpuMonitor, pu: Pu) -> Duration {
    monitor.owner_run_times().into_iter().find(|seen| seen.pu == pu).map(|seen| seen.run_time).unwrap()
}

/// The ids of the programs of this name in the kernel. Other daemons on this machine may have such programs too.
fn program_ids() -> BTreeSet<u32> {
    let has_name = |program: &aya::programs::ProgramInfo| program.name_as_str() == Some("switched");
    aya::programs::loaded_programs().flatten().filter(has_name).map(|program| program.id()).collect()
}

/// The ids of the programs of this name that this process holds open (`prog_id` in `/proc/self/fdinfo`).
fn own_program_ids() -> BTreeSet<u32> {
    let files = fs::read_dir("/proc/self/fdinfo").unwrap().flatten();
    let texts = files.filter_map(|file| fs::read_to_string(file.path()).ok());
    let id = |text: String| text.lines().find_map(|line| line.strip_prefix("prog_id:")?.trim().parse().ok());
    let open: BTreeSet<u32> = texts.filter_map(id).collect();
    &open & &program_ids()
}

/// The number of places at which this process has attached programs with these ids (`link_type` in `/proc/self/fdinfo`).
fn own_link_count(programs: &BTreeSet<u32>) -> usize {
    let files = fs::read_dir("/proc/self/fdinfo").unwrap().flatten();
    let texts = files.filter_map(|file| fs::read_to_string(file.path()).ok());
    let field = |text: &str, name: &str| {
        text.lines().find_map(|line| Some(line.strip_prefix(name)?.trim().to_owned()))
    };
    let is_link = |text: &String| {
        let program = field(text, "prog_id:").and_then(|id| id.parse().ok());
        field(text, "link_type:").is_some() && program.is_some_and(|id: u32| programs.contains(&id))
    };
    texts.filter(is_link).count()
}

#[test]
fn an_owner_that_wakes_up_is_reported_once_until_the_pu_is_armed_again() {
    let Some((_alone, mut monitor, pu)) = monitor() else { return };
    let _owner = Shell::start(pu, "while :; do sleep 0.001; done");
    for _ in 0..3 {
        let reported = until("the PU is reported", || {
            is_readable(&monitor, PollTimeout::from(100_u16));
            Some(monitor.take_reported_pus()).filter(|reported| !reported.is_empty())
        });
        assert_eq!(reported, CpuSet::from(pu));
        until("the owner has run", || (run_time(&monitor, pu) > Duration::from_millis(1)).then_some(()));
        assert!(monitor.take_reported_pus().is_empty() && !is_readable(&monitor, PollTimeout::ZERO), "once");
        monitor.report_again(&CpuSet::from(pu)).unwrap();
    }
}

#[test]
fn the_run_time_of_an_owner_that_runs_on_is_that_of_its_clock() {
    let Some((_alone, monitor, pu)) = monitor() else { return };
    let owner = Shell::start(pu, "while :; do :; done");
    let pid = Pid(owner.0.id());
    until("the owner has run", || (run_time(&monitor, pu) > Duration::from_millis(50)).then_some(()));
    // Other processes may run there, too. So the run time of the PU is at least that of the owner.
    let window = || {
        let (seen, used) = (run_time(&monitor, pu), process_cpu_time(pid).unwrap());
        let time = || process_cpu_time(pid).unwrap() - used;
        let ran =
            until("the owner has run on", || Some(time()).filter(|ran| *ran > Duration::from_millis(100)));
        [ran, run_time(&monitor, pu) - seen]
    };
    assert_most("the run time is that of the clock", window, |[ran, counted]| is_counted(*ran, *counted));
}

/// The two times are of two clocks of the kernel.
fn is_counted(ran: Duration, counted: Duration) -> bool {
    counted > ran * 9 / 10
}

/// Lets a thread run on the PU, and returns its run time, that of all counted threads of the PU, and the time that
/// passed, for a window in which the thread ran most of the time. Other processes of the machine run there, too.
fn in_a_window(
    monitor: &mut LentCpuMonitor,
    pu: Pu,
    time: impl Fn() -> Duration,
    wait: impl Fn(),
) -> [Duration; 3] {
    until("a window in which the thread ran most of the time", || {
        let begin = Instant::now();
        monitor.report_again(&CpuSet::from(pu)).unwrap();
        let start = time();
        wait();
        let ran = time() - start;
        let counted = run_time(monitor, pu);
        let passed = begin.elapsed();
        (ran > passed * 2 / 3).then_some([ran, counted, passed])
    })
}

/// Checks that the run time of the thread is not in that of all counted threads. If the thread counted, its run time
/// would be in both figures of each window, and their sum would be more than the time.
fn assert_uncounted(window: impl FnMut() -> [Duration; 3]) {
    let is_uncounted = |[ran, counted, passed]: &[Duration; 3]| *ran + *counted < *passed * 11 / 10;
    assert_most("the run time of the thread is not counted", window, is_uncounted);
}

/// Takes a child off its PU for a moment. A thread that runs on from before the PU is armed counts when it is switched,
/// so without a switch a window would show nothing.
fn switch_off_and_on(pid: Pid) {
    let pid = nix::unistd::Pid::from_raw(pid.0.cast_signed());
    kill(pid, Signal::SIGSTOP).unwrap();
    waitpid(pid, Some(WaitPidFlag::WUNTRACED)).unwrap();
    kill(pid, Signal::SIGCONT).unwrap();
}

/// A cgroup that gets the PUs that it wants, in the v1 hierarchy of the cpu controller, and a cgroup in it.
struct Favoured {
    group: CgroupDir,
    below: CgroupDir,
}

impl Favoured {
    /// `None`, with a printed reason, if there is no such hierarchy, or this user may not write it.
    fn new(name: &str) -> Option<Self> {
        let hierarchy = CpusetMount::from_mounts(&CgroupMounts::read());
        let path = format!("/made-by-test-{name}-{}", std::process::id());
        let at = |path: &str| hierarchy.as_ref().and_then(|hierarchy| hierarchy.v1_cpu_cgroup(path));
        let (Some(group), Some(below)) = (at(&path), at(&format!("{path}/below"))) else {
            println!("skipped: there is no v1 hierarchy of the cpu controller");
            return None;
        };
        if let Err(errno) = group.create().and_then(|()| below.create()) {
            println!("skipped: this user may not create cgroups ({errno})");
            return None;
        }
        group.write_file("cpu.shares", "262144").unwrap();
        Some(Self { group, below })
    }
}

impl Drop for Favoured {
    fn drop(&mut self) {
        until("the cgroup can be removed", || self.group.remove().ok());
    }
}

/// A borrower in the inner cgroup, and the window in which it ran.
fn window_of_borrower(
    monitor: &mut LentCpuMonitor,
    pu: Pu,
    favoured: &Favoured,
    policy: i32,
) -> [Duration; 3] {
    let borrower = Shell::start(pu, "while :; do :; done");
    let pid = Pid(borrower.0.id());
    // SAFETY: the parameter is a valid value, and the process is a child of this one.
    let done = unsafe {
        let usual = libc::sched_param { sched_priority: 0 };
        libc::sched_setscheduler(pid.0.cast_signed(), policy, &raw const usual)
    };
    assert_eq!(done, 0);
    favoured.below.write_file("cgroup.procs", &pid.to_string()).unwrap();
    let wait = || {
        switch_off_and_on(pid);
        std::thread::sleep(Duration::from_millis(20));
    };
    in_a_window(monitor, pu, || process_cpu_time(pid).unwrap(), wait)
}

#[test]
fn a_borrower_with_the_policy_for_idle_threads_is_not_counted() {
    let Some((_alone, mut monitor, pu)) = monitor() else { return };
    let Some(favoured) = Favoured::new("policy") else { return };
    assert_uncounted(|| window_of_borrower(&mut monitor, pu, &favoured, libc::SCHED_IDLE));
}

#[test]
fn a_borrower_in_a_cgroup_at_idle_priority_is_not_counted_and_another_one_is() {
    let Some((_alone, mut monitor, pu)) = monitor() else { return };
    let Some(favoured) = Favoured::new("idle") else { return };
    let mut window = || window_of_borrower(&mut monitor, pu, &favoured, libc::SCHED_OTHER);
    assert_most("its run time is counted", &mut window, |[ran, counted, _]| is_counted(*ran, *counted));
    // The inner cgroup is the only one in its parent, so its processes run as before.
    favoured.below.write_file("cpu.idle", "1").unwrap();
    assert_uncounted(window);
}

#[test]
fn an_owner_that_waits_for_a_borrower_counts_as_one_that_runs() {
    let Some((_alone, mut monitor, pu)) = monitor() else { return };
    let Some(favoured) = Favoured::new("waits") else { return };
    favoured.below.write_file("cpu.idle", "1").unwrap();
    let owner = Shell::start(pu, "while :; do :; done");
    let owner_time = || process_cpu_time(Pid(owner.0.id())).unwrap();
    let is_most = |part: Duration, all: Duration| part > all * 3 / 4;
    // The cgroup of the borrower gets nearly all of the PU, and the owner is runnable all the time.
    let mut window = || {
        let before = owner_time();
        let [ran, counted, passed] = window_of_borrower(&mut monitor, pu, &favoured, libc::SCHED_OTHER);
        [owner_time() - before, ran, counted, passed]
    };
    // Where other programs compute too, the owner may not run at the begin of a window, and counts only from then on.
    let is_counted =
        |[own, _, counted, passed]: &[Duration; 4]| !is_most(*own, *passed) && is_most(*counted, *passed);
    until("the waiting time of the owner is counted in most windows", || {
        measure(&mut window, is_counted).inspect_err(|figures| println!("{figures}")).ok()
    });
}

/// One spinning process for each PU of this process, each allowed on all of them. So one runs on the PU that is lent.
fn unconfined_spinners(pus: &CpuSet) -> Vec<Shell> {
    let start = |_| Shell(shell_that_ends_with_its_thread("while :; do :; done").spawn().unwrap());
    pus.iter().map(start).collect()
}

/// Sets the flag when this value is dropped.
struct SetOnDrop<'a>(&'a AtomicBool);

impl Drop for SetOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn bind_this_thread(pu: Pu) {
    affinity::set_mask(affinity::own_thread(), &CpuSet::from(pu)).unwrap();
}

/// Calls `act` while a thread of this process, which never counts, runs on the PU for a moment again and again. So the
/// other threads of the PU are switched all the time.
fn beside_switches(pu: Pu, act: impl FnOnce()) {
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            bind_this_thread(pu);
            while !is_over.load(Ordering::Relaxed) {
                std::thread::sleep(Duration::from_millis(1));
            }
        });
        let _end = SetOnDrop(&is_over);
        act();
    });
}

#[test]
fn programs_that_are_not_confined_to_the_owners_pus_are_not_counted_beside_an_owner_that_sleeps() {
    let Some((_alone, mut monitor, pu)) = monitor() else { return };
    let pus = affinity::get_mask(Tid(std::process::id())).unwrap();
    if pus.len() < 2 {
        println!("skipped: this process may use one PU only");
        return;
    }
    let _others = unconfined_spinners(&pus);
    // If they counted, they would be counted in each window that they leave to nothing else.
    let mut window = || {
        monitor.report_again(&CpuSet::from(pu)).unwrap();
        monitor.take_reported_pus();
        std::thread::sleep(Duration::from_millis(20));
        run_time(&monitor, pu)
    };
    let is_nothing = |counted: &Duration| *counted < Duration::from_millis(2);
    // Another test of this program may have bound a process to this PU, which counts until it ends.
    let is_measured = || measure(&mut window, is_nothing).inspect_err(|figures| println!("{figures}")).ok();
    beside_switches(pu, || until("nothing is counted in most windows", is_measured));
    // A process that was just forked and confined is the owner's, beside them.
    let _owner = Shell::start(pu, "while :; do :; done");
    until("the owner has run", || (run_time(&monitor, pu) > Duration::from_millis(20)).then_some(()));
    until("the PU is reported", || monitor.take_reported_pus().contains(pu).then_some(()));
}

#[test]
fn the_same_programs_are_counted_if_the_owner_has_as_many_pus_as_they_may_use() {
    let Some((_alone, mut monitor, pu)) = monitor() else { return };
    let pus = affinity::get_mask(Tid(std::process::id())).unwrap();
    let _others = unconfined_spinners(&pus);
    let all = u32::try_from(pus.len()).unwrap();
    for owner_pus in [all, 0] {
        monitor.set_lent_pus(&of_an_owner_with(owner_pus, pu), &CpuSet::new()).unwrap();
        monitor.report_again(&CpuSet::from(pu)).unwrap();
        until("they have run", || (run_time(&monitor, pu) > Duration::from_millis(20)).then_some(()));
    }
}

#[test]
fn another_number_of_pus_of_the_owner_counts_from_the_next_switch_and_keeps_the_run_time() {
    let Some((_alone, mut monitor, pu)) = monitor() else { return };
    let _owner = Shell::start(pu, "while :; do sleep 0.001; done");
    until("the owner has run", || (run_time(&monitor, pu) > Duration::from_millis(5)).then_some(()));
    let before = run_time(&monitor, pu);
    monitor.set_lent_pus(&of_an_owner_with(2, pu), &CpuSet::new()).unwrap();
    assert!(run_time(&monitor, pu) >= before, "the run time goes on");
    until("the owner runs on", || (run_time(&monitor, pu) > before * 2).then_some(()));
}

#[test]
fn a_silent_pu_is_measured_and_not_reported_until_it_is_to_be_reported_again() {
    let Some((_alone, mut monitor, pu)) = monitor() else { return };
    monitor.set_lent_pus(&BTreeMap::new(), &CpuSet::new()).unwrap();
    monitor.set_lent_pus(&of_an_owner_with(1, pu), &CpuSet::from(pu)).unwrap();
    monitor.take_reported_pus();
    let _owner = Shell::start(pu, "while :; do sleep 0.001; done");
    until("the owner has run", || (run_time(&monitor, pu) > Duration::from_millis(5)).then_some(()));
    assert_eq!(monitor.take_reported_pus(), CpuSet::new());
    monitor.set_lent_pus(&of_an_owner_with(2, pu), &CpuSet::new()).unwrap();
    let before = run_time(&monitor, pu);
    until("the owner runs on", || (run_time(&monitor, pu) > before * 2).then_some(()));
    assert_eq!(monitor.take_reported_pus(), CpuSet::new(), "it was lent already");
    monitor.report_again(&CpuSet::from(pu)).unwrap();
    until("the PU is reported", || monitor.take_reported_pus().contains(pu).then_some(()));
}

#[test]
fn threads_of_this_process_do_not_count() {
    let Some((_alone, mut monitor, pu)) = monitor() else { return };
    let mut spin = || {
        bind_this_thread(pu);
        let time = || clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).map(Duration::from).unwrap();
        // The sleep is for a switch, as in `switch_off_and_on`. On a busy CPU a thread runs without a pause for a few
        // milliseconds only.
        let wait = || {
            std::thread::sleep(Duration::from_micros(100));
            let begin = Instant::now();
            while begin.elapsed() < Duration::from_millis(3) {}
        };
        in_a_window(&mut monitor, pu, time, wait)
    };
    assert_uncounted(|| std::thread::scope(|scope| scope.spawn(&mut spin).join().unwrap()));
}

#[test]
fn the_program_is_attached_while_pus_are_lent_and_gone_with_the_monitor() {
    let Some((_alone, mut monitor, pu)) = monitor() else { return };
    let own = own_program_ids();
    assert_eq!((own.len(), monitor.lent_pus().clone()), (1, of_an_owner_with(1, pu)));
    assert_eq!(own_link_count(&own), 1, "it is attached");
    let _owner = Shell::start(pu, "while :; do sleep 0.001; done");
    monitor.set_lent_pus(&BTreeMap::new(), &CpuSet::new()).unwrap();
    assert!(
        monitor.take_reported_pus().is_empty() && monitor.owner_run_times().is_empty(),
        "nothing is lent"
    );
    assert_eq!(own_link_count(&own), 0, "it costs nothing while nothing is lent");
    monitor.set_lent_pus(&of_an_owner_with(1, pu), &CpuSet::new()).unwrap();
    assert_eq!(own_link_count(&own), 1, "it is attached again");
    let reported = until("the PU is reported", || {
        Some(monitor.take_reported_pus()).filter(|reported| !reported.is_empty())
    });
    assert_eq!(reported, CpuSet::from(pu));
    drop(monitor);
    until("the kernel drops the program", || own.is_disjoint(&program_ids()).then_some(()));
}

#[test]
#[ignore = "a measurement: run it in release, alone, with --nocapture"]
fn how_soon_a_wake_up_beside_a_borrower_is_reported() {
    const ROUNDS: usize = 1_000;
    let Some((_alone, mut monitor, pu)) = monitor() else { return };
    let Some(favoured) = Favoured::new("figures") else { return };
    let borrower = Shell::start(pu, "while :; do :; done");
    favoured.group.write_file("cpu.shares", "1024").unwrap();
    favoured.group.write_file("cpu.idle", "1").unwrap();
    favoured.below.write_file("cgroup.procs", &borrower.0.id().to_string()).unwrap();
    let mut owner = Shell(Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap());
    affinity::set_mask(Tid(owner.0.id()), &CpuSet::from(pu)).unwrap();
    let mut times: Vec<Duration> = (0..ROUNDS)
        .map(|_| {
            // The owner sleeps, and nothing else runs there for the moment.
            std::thread::sleep(Duration::from_millis(2));
            monitor.take_reported_pus();
            monitor.report_again(&CpuSet::from(pu)).unwrap();
            let begin = Instant::now();
            owner.0.stdin.as_mut().unwrap().write_all(b"go").unwrap();
            while !is_readable(&monitor, PollTimeout::from(1_000_u16)) {}
            begin.elapsed()
        })
        .collect();
    times.sort();
    let at = |permille: usize| times[ROUNDS * permille / 1_000];
    println!("from the write to the report: p50 {:?}, p99 {:?}, max {:?}", at(500), at(990), at(999));
    let begin = Instant::now();
    for _ in 0..100 {
        monitor.set_lent_pus(&BTreeMap::new(), &CpuSet::new()).unwrap();
        monitor.set_lent_pus(&of_an_owner_with(1, pu), &CpuSet::new()).unwrap();
    }
    println!("detaching and attaching: {:?}", begin.elapsed() / 100);
    drop(monitor);
    let begin = Instant::now();
    let monitor = LentCpuMonitor::new();
    println!("loading: {:?}", begin.elapsed());
    drop((monitor, borrower));
}
