//! The address spaces in the records of the task scan: of processes that share one (clone(2), `CLONE_VM`), of a forked
//! child, and of a child of vfork(2).

use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::num::NonZeroU64;
use std::process::{Child, Command, Stdio};

use nix::errno::Errno;
use pjw_core::ids::Pid;

use super::test_process::scan;
use crate::bpf::{TaskScan, TaskScope};
use crate::sys::kcmp::compare_address_spaces;
use crate::tests::{skip, until_true};

/// A program of four processes: the first one, a process that shares its address space, a forked child, and a child of
/// vfork(2). The child of vfork prints their pids in this order. When it has read a byte, it executes `sleep`.
const PROGRAM: &str = r#"
#define _GNU_SOURCE
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <unistd.h>

static int pause_until_killed(void *unused) {
    (void)unused;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    for (;;) pause();
}

int main(void) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    char *stack = malloc(1 << 16);
    int sharing = clone(pause_until_killed, stack + (1 << 16), CLONE_VM | SIGCHLD, NULL);
    int forked = fork();
    if (forked == 0) pause_until_killed(NULL);
    if (vfork() == 0) {
        char byte;
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        dprintf(1, "%d %d %d %d\n", getppid(), sharing, forked, getpid());
        if (read(0, &byte, 1) == 1) execlp("sleep", "sleep", "1000", NULL);
        _exit(1);
    }
    for (;;) pause();
}
"#;

/// The processes of the program, in the order in which it prints them. They end with this value.
struct Processes {
    first: Child,
    pids: [Pid; 4],
}

impl Processes {
    /// Compiles and starts the program. Returns when its child of vfork(2) runs. `None`, with a printed reason, if
    /// there is no compiler.
    fn start() -> Option<Self> {
        let dir = tempfile::tempdir().unwrap();
        let (source, program) = (dir.path().join("spaces.c"), dir.path().join("spaces"));
        fs::write(&source, PROGRAM).unwrap();
        let Ok(built) = Command::new("cc").arg("-o").args([&program, &source]).status() else {
            skip("there is no C compiler");
            return None;
        };
        assert!(built.success());
        let mut command = Command::new(&program);
        let mut first = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(first.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let pids: Vec<Pid> = line.split_whitespace().map(|pid| Pid(pid.parse().unwrap())).collect();
        Some(Self { first, pids: pids.try_into().unwrap() })
    }

    /// Lets the child of vfork(2) execute its program, and waits until it has done so.
    fn let_child_of_vfork_execute(&mut self) {
        self.first.stdin.as_mut().unwrap().write_all(b"x").unwrap();
        // The kernel sets the name of the program after the child has got an address space of its own (begin_new_exec
        // in fs/exec.c).
        let name = format!("/proc/{}/comm", self.pids[3]);
        until_true("the child executes sleep", || fs::read_to_string(&name).unwrap() == "sleep\n");
    }
}

impl Drop for Processes {
    fn drop(&mut self) {
        // The kernel kills the others then.
        let _ = self.first.kill();
        let _ = self.first.wait();
    }
}

/// What the task scan reports about the address space of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Space {
    number: Option<NonZeroU64>,
    is_in_vfork: bool,
}

fn spaces_of(scan: &mut TaskScan, pids: [Pid; 4]) -> [Space; 4] {
    let mut spaces = BTreeMap::new();
    let scope = BTreeSet::from(pids);
    scan.for_each_task(TaskScope::ThreadsOf(&scope), &mut |task| {
        spaces.insert(task.pid, Space { number: task.address_space, is_in_vfork: task.is_in_vfork });
    })
    .unwrap();
    pids.map(|pid| spaces[&pid])
}

/// Checks that the numbers of two processes are equal exactly if kcmp(2) says that they share an address space.
fn check_by_kcmp(pids: [Pid; 4], spaces: [Space; 4]) {
    for (one, one_space) in pids.into_iter().zip(spaces) {
        for (other, other_space) in pids.into_iter().zip(spaces) {
            let order = match compare_address_spaces(one, other) {
                Err(errno @ (Errno::ENOSYS | Errno::EPERM)) => {
                    return skip(&format!("the comparison with kcmp(2): {errno}"));
                }
                order => order.unwrap(),
            };
            let is_same_number = one_space.number == other_space.number;
            assert_eq!(is_same_number, order == Ordering::Equal, "{one} {other}: {spaces:?}, {pids:?}");
        }
    }
}

#[test]
fn processes_have_the_same_number_exactly_if_they_share_an_address_space() {
    let Some(mut scan) = scan() else { return };
    let Some(mut processes) = Processes::start() else { return };
    let pids = processes.pids;
    let before = spaces_of(&mut scan, pids);
    let [first, sharing, forked, in_vfork] = before.map(|space| space.number.unwrap());
    assert_eq!([sharing, in_vfork], [first; 2]);
    assert_ne!(forked, first);
    assert_eq!(before.map(|space| space.is_in_vfork), [false, false, false, true]);
    check_by_kcmp(pids, before);

    processes.let_child_of_vfork_execute();
    let after = spaces_of(&mut scan, pids);
    assert_eq!(after[..3], before[..3], "the others keep their address spaces");
    let own = after[3].number.unwrap();
    assert!(![first, forked].contains(&own), "{own} {before:?}");
    assert!(!after[3].is_in_vfork);
    check_by_kcmp(pids, after);
}
