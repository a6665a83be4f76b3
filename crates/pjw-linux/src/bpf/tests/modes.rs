//! Whom a pass reports, and whom it passes over.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use pjw_core::cpuset::CpuSet;
use pjw_core::process::{Pid, Tid};

use super::company::{Company, scan, until};
use super::side_by_side::by_scan;
use crate::affinity;
use crate::bpf::{MOST_WATCHED, Mode, TaskScan, WatchError};
use crate::cgroup::Mounts;

fn watch(scan: &mut TaskScan, pids: &[Pid]) {
    scan.watch(&pids.iter().copied().collect()).unwrap();
}

/// Waits until all sleep and no pass has anything to report: those who were just told to be quiet need a moment.
fn settle(scan: &mut TaskScan) {
    until("all are quiet", || {
        let asleep = by_scan(scan, Mode::Watched).values().all(|task| task.state == 'S');
        let quiet = (0..2).all(|_| by_scan(scan, Mode::Changed).is_empty());
        (asleep && quiet).then_some(())
    });
}

/// Looks for changes until this thread is among them; all who were.
fn changed_until(scan: &mut TaskScan, tid: Tid) -> BTreeSet<Tid> {
    let mut all = BTreeSet::new();
    until("the thread is reported", || {
        all.extend(by_scan(scan, Mode::Changed).into_keys());
        all.contains(&tid).then_some(())
    });
    all
}

#[test]
fn only_watched_processes_are_told_and_the_others_are_counted() {
    let Some(mut scan) = scan() else { return };
    let ((one, threads), (other, _)) = (Company::start(4), Company::start(4));
    assert!(by_scan(&mut scan, Mode::Watched).is_empty());
    watch(&mut scan, &[one.pid()]);
    let told = by_scan(&mut scan, Mode::Watched);
    assert_eq!(told.len(), 6);
    assert!(threads.iter().all(|tid| told.contains_key(tid)));
    let summary = scan.pass(Mode::Watched, &mut |_| {}).unwrap();
    assert_eq!((summary.reported, summary.quiet, summary.kernel), (6, 0, 0));
    assert!(summary.unwatched >= 6);
    watch(&mut scan, &[other.pid()]);
    let told = by_scan(&mut scan, Mode::Watched);
    assert!(told.contains_key(&Tid(other.pid().0)) && !told.contains_key(&Tid(one.pid().0)));
    watch(&mut scan, &[one.pid(), other.pid()]);
    assert_eq!(by_scan(&mut scan, Mode::Watched).len(), 12);
}

#[test]
fn who_ran_is_told_and_who_slept_is_not() {
    let Some(mut scan) = scan() else { return };
    let (mut company, threads) = Company::start(10);
    watch(&mut scan, &[company.pid()]);
    assert_eq!(by_scan(&mut scan, Mode::Changed).len(), 12, "all are new");
    settle(&mut scan);
    until("the quiet are counted", || {
        let summary = scan.pass(Mode::Changed, &mut |_| {}).unwrap();
        assert_eq!(summary.reported + summary.quiet, 12);
        (summary.quiet == 12).then_some(())
    });
    company.order("work 5");
    let changed = changed_until(&mut scan, threads[5]);
    let slept = threads.iter().filter(|tid| **tid != threads[5]);
    assert!(slept.clone().all(|tid| !changed.contains(tid)), "{changed:?} of {threads:?}");
    settle(&mut scan);
    assert_eq!(by_scan(&mut scan, Mode::Watched).len(), 12, "who is asked for is told");
    assert_eq!(scan.vanished().count(), 0);
}

#[test]
fn a_pass_over_everything_keeps_no_change_from_being_told() {
    let Some(mut scan) = scan() else { return };
    let (mut company, threads) = Company::start(2);
    watch(&mut scan, &[company.pid()]);
    settle(&mut scan);
    company.order("work 0");
    until("it shows", || by_scan(&mut scan, Mode::Everything).contains_key(&threads[0]).then_some(()));
    assert!(changed_until(&mut scan, threads[0]).contains(&threads[0]));
}

#[test]
fn a_process_that_is_watched_again_is_new() {
    let Some(mut scan) = scan() else { return };
    let (company, _) = Company::start(2);
    watch(&mut scan, &[company.pid()]);
    settle(&mut scan);
    watch(&mut scan, &[]);
    assert!(by_scan(&mut scan, Mode::Changed).is_empty());
    watch(&mut scan, &[company.pid()]);
    assert_eq!(by_scan(&mut scan, Mode::Changed).len(), 4);
}

#[test]
fn a_mask_that_others_change_is_told_of_a_thread_that_sleeps() {
    let Some(mut scan) = scan() else { return };
    let (company, threads) = Company::start(4);
    let all = affinity::get(threads[1]).unwrap();
    if all.len() < 2 {
        println!("skipped: one PU leaves nothing to choose");
        return;
    }
    watch(&mut scan, &[company.pid()]);
    settle(&mut scan);
    let one = CpuSet::from(all.last().unwrap());
    affinity::set(threads[1], &one).unwrap();
    let told = by_scan(&mut scan, Mode::Changed);
    assert_eq!(told[&threads[1]].allowed, Some(one));
    assert!(!told.contains_key(&threads[2]));
    assert!(!by_scan(&mut scan, Mode::Changed).contains_key(&threads[1]), "it is known now");
}

#[test]
fn a_process_that_is_put_into_another_cgroup_is_told() {
    let Some(mut scan) = scan() else { return };
    let Some(yard) = Yard::new() else { return };
    let (company, threads) = Company::start(3);
    watch(&mut scan, &[company.pid()]);
    settle(&mut scan);
    std::fs::write(yard.0.join("cgroup.procs"), company.pid().to_string()).unwrap();
    let mut cgroups = BTreeSet::new();
    let mut told = BTreeSet::new();
    scan.pass(Mode::Changed, &mut |task| {
        cgroups.insert(task.cgroup);
        told.insert(task.tid);
    })
    .unwrap();
    assert!(threads.iter().all(|tid| told.contains(tid)));
    let inode = std::os::unix::fs::MetadataExt::ino(&std::fs::metadata(&yard.0).unwrap());
    assert_eq!(cgroups, BTreeSet::from([inode]));
    company.end();
}

/// A v2 cgroup of a test.
struct Yard(PathBuf);

impl Yard {
    fn new() -> Option<Self> {
        let Some(mount) = Mounts::find().unified else {
            println!("skipped: the v2 hierarchy is not mounted");
            return None;
        };
        let path = mount.join(format!("pjw-task-scan-{}", std::process::id()));
        match std::fs::create_dir(&path) {
            Ok(()) => Some(Self(path)),
            Err(error) => {
                println!("skipped: {}: {error}", path.display());
                None
            }
        }
    }
}

impl Drop for Yard {
    fn drop(&mut self) {
        let empty = || std::fs::remove_dir(&self.0).is_ok().then_some(());
        until("the test's cgroup is empty", empty);
    }
}

#[test]
fn a_vanished_process_is_told_from_a_quiet_one() {
    let Some(mut scan) = scan() else { return };
    let ((quiet, _), (leaving, _)) = (Company::start(2), Company::start(2));
    let gone = leaving.pid();
    watch(&mut scan, &[quiet.pid(), gone]);
    assert_eq!(scan.vanished().count(), 0, "nobody has looked yet");
    settle(&mut scan);
    assert_eq!(scan.vanished().count(), 0);
    leaving.end();
    assert_eq!(scan.vanished().count(), 0, "nobody has looked since");
    until("nothing is left of it", || {
        scan.pass(Mode::Changed, &mut |_| {}).unwrap();
        (scan.vanished().collect::<Vec<_>>() == [gone]).then_some(())
    });
    watch(&mut scan, &[quiet.pid()]);
    assert_eq!(scan.vanished().count(), 0);
}

#[test]
fn a_number_that_is_given_to_another_process_is_new() {
    let Some(mut scan) = scan() else { return };
    let Some(first) = Numbered::fork(None) else { return };
    let pid = first.0;
    watch(&mut scan, &[pid]);
    settle(&mut scan);
    drop(first);
    let Some(_second) = Numbered::fork(Some(pid)) else { return };
    let told = by_scan(&mut scan, Mode::Changed);
    assert_eq!(told.into_keys().collect::<Vec<_>>(), [Tid(pid.0)]);
    assert_eq!(scan.vanished().count(), 0);
}

/// A process of a chosen number that does nothing.
struct Numbered(Pid);

impl Numbered {
    /// `None`, with the reason told, if the number can't be had.
    fn fork(number: Option<Pid>) -> Option<Self> {
        let numbers = [number.map_or(0, |pid| pid.0.cast_signed())];
        let mut order = [0_u64; 10];
        order[4] = u64::from(libc::SIGCHLD.cast_unsigned());
        if number.is_some() {
            // `set_tid` and `set_tid_size` of `struct clone_args`.
            order[8] = numbers.as_ptr() as u64;
            order[9] = 1;
        }
        // SAFETY: `struct clone_args` is ten 64-bit numbers here, and the number that it points to outlives the call.
        // Without CLONE_VM the child has memory of its own, and it makes system calls only.
        let born = unsafe { libc::syscall(libc::SYS_clone3, order.as_ptr(), size_of_val(&order)) };
        if born == 0 {
            loop {
                // SAFETY: pause(2) touches no memory.
                unsafe { libc::pause() };
            }
        }
        if born < 0 {
            println!("skipped: clone3 of a chosen number: {}", std::io::Error::last_os_error());
            return None;
        }
        Some(Self(Pid(u32::try_from(born).unwrap())))
    }
}

impl Drop for Numbered {
    fn drop(&mut self) {
        let pid = nix::unistd::Pid::from_raw(self.0.0.cast_signed());
        nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL).unwrap();
        nix::sys::wait::waitpid(pid, None).unwrap();
    }
}

#[test]
fn an_exec_is_told_by_its_stack() {
    let Some(mut scan) = scan() else { return };
    let mut sh = Command::new("sh");
    sh.args(["-c", "read line; exec sleep 1000"]).stdin(Stdio::piped());
    let mut child = sh.spawn().unwrap();
    let pid = Pid(child.id());
    watch(&mut scan, &[pid]);
    let look = |scan: &mut TaskScan| by_scan(scan, Mode::Watched).into_values().next().unwrap();
    let sh = until("it is sh", || Some(look(&mut scan)).filter(|task| task.comm.to_string() == "sh"));
    drop(child.stdin.take());
    let sleep =
        until("it is sleep", || Some(look(&mut scan)).filter(|task| task.comm.to_string() == "sleep"));
    assert_eq!(sh.start, sleep.start);
    let fixed =
        std::fs::read_to_string("/proc/sys/kernel/randomize_va_space").is_ok_and(|text| text.trim() == "0");
    assert!(fixed || sh.stack != sleep.stack);
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn sixty_five_thousand_processes_can_be_watched_and_too_many_are_refused() {
    let Some(mut scan) = scan() else { return };
    let us = Pid(std::process::id());
    let highest: u32 = std::fs::read_to_string("/proc/sys/kernel/pid_max").unwrap().trim().parse().unwrap();
    // Numbers that the kernel never gives.
    let nobody = |count: u32| (1..=count).map(move |n| Pid(highest + n));
    let many: BTreeSet<Pid> = nobody(65_536).chain([us]).collect();
    scan.watch(&many).unwrap();
    assert!(by_scan(&mut scan, Mode::Changed).contains_key(&Tid(us.0)));
    assert_eq!(scan.vanished().count(), 65_536);
    let error = scan.watch(&nobody(MOST_WATCHED + 1).collect()).unwrap_err();
    assert!(matches!(error, WatchError::TooMany { asked } if asked == MOST_WATCHED as usize + 1));
    assert!(by_scan(&mut scan, Mode::Watched).contains_key(&Tid(us.0)), "what was watched still is");
}
