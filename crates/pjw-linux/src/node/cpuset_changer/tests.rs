//! A thread that changes cpusets. A move into a cgroup whose file is a FIFO takes until the test reads the FIFO.

use std::io::Write;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::stat::Mode;
use nix::unistd::mkfifo;
use pjw_core::cpuset_group::CpusetChange;
use pjw_core::ids::{Pid, ProcessId};

use super::*;

const DONE: CpusetOutcome = CpusetOutcome::Done { effective: None };

#[test]
fn changes_that_take_long_are_completed_later_in_the_order_of_the_calls() {
    let dir = tempfile::tempdir().unwrap();
    let file = |cgroup: &str| dir.path().join(cgroup).join("cgroup.procs");
    for cgroup in ["slow", "quick"] {
        std::fs::create_dir(dir.path().join(cgroup)).unwrap();
    }
    mkfifo(&file("slow"), Mode::S_IRWXU).unwrap();
    std::fs::write(file("quick"), "").unwrap();
    let hierarchy = CpusetMount {
        mount_point: dir.path().to_owned(),
        is_unified: false,
        v1_cpu_mount_point: None,
        v1_freezer_mount_point: None,
    };
    let pid = Pid(std::process::id());
    let mut proc = ProcDir::open(Path::new("/proc")).unwrap();
    let process = ProcessId { pid, start: proc.thread_stat(pid, Tid(pid.0)).unwrap().start };
    let Some(from) = proc.cpuset_path(pid) else {
        let _ = writeln!(io::stderr(), "skipped: there are no cgroups here");
        return;
    };
    let move_to = |cgroup: &str| CpusetAction {
        job: "manual:a".parse().unwrap(),
        change: CpusetChange::MoveBack { process, from: from.clone(), to: cgroup.to_owned() },
        is_repair: false,
        reason: String::new(),
    };

    let mut changer = CpusetChanger::new(true, OwnCgroupNames::default()).unwrap();
    changer.start_thread().unwrap();
    let wait = Duration::from_millis(5);
    assert!(changer.wait_until_complete(Duration::ZERO), "no change was requested");
    assert_eq!(changer.change(&move_to("/slow"), &hierarchy, wait), CpusetOutcome::Delayed);
    assert_eq!(changer.change(&move_to("/quick"), &hierarchy, wait), CpusetOutcome::Delayed);
    assert!(!changer.has_finished() && !changer.wait_until_complete(wait));
    assert_eq!(std::fs::read_to_string(file("quick")).unwrap(), "");

    let moved = io::read_to_string(std::fs::File::open(file("slow")).unwrap()).unwrap();
    assert_eq!(moved.trim(), pid.to_string());
    let mut finished = Vec::new();
    while finished.len() < 2 {
        let fd = changer.fd().expect("a change is delayed");
        let ready = poll(&mut [PollFd::new(fd, PollFlags::POLLIN)], PollTimeout::from(60_000u16));
        assert_eq!(ready, Ok(1), "the end of a delayed change is reported");
        assert!(changer.has_finished());
        finished.extend(changer.take_finished());
    }
    assert_eq!(finished, [(move_to("/slow"), DONE), (move_to("/quick"), DONE)]);
    assert!(changer.fd().is_none() && !changer.has_finished());
    assert_eq!(changer.change(&move_to("/quick"), &hierarchy, Duration::MAX), DONE);
    assert!(changer.fd().is_none(), "the caller has waited for it");

    assert_eq!(changer.change(&move_to("/slow"), &hierarchy, wait), CpusetOutcome::Delayed);
    let file = file("slow");
    let reader = std::thread::spawn(move || io::read_to_string(std::fs::File::open(file).unwrap()).unwrap());
    assert!(changer.wait_until_complete(Duration::from_secs(60)));
    assert_eq!(reader.join().unwrap().trim(), pid.to_string());
    assert_eq!(changer.take_finished(), [(move_to("/slow"), DONE)]);
}
