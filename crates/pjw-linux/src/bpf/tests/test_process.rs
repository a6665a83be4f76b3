//! A child process whose threads execute orders of a test. The child is this test program, started again.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::Duration;

use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};
use nix::unistd::{gettid, setsid};
use pjw_core::cpuset::CpuSet;
use pjw_core::ids::{Pid, Tid};

use crate::bpf::{TaskScan, TaskScanUnavailable};
use crate::cgroup::CgroupMounts;
use crate::sys::{affinity, clock::own_thread_cpu_time};
use crate::tests::until;

const ROLE: &str = "PJW_TEST_PROCESS";
/// The CPU time of [`Order::Work`]: more than two clock ticks of any kernel.
const WORK: Duration = Duration::from_millis(30);

/// Loads the task scan. `None`, with a printed reason, if the machine or the user lacks a requirement. Panics
/// on any other error.
pub(crate) fn scan() -> Option<TaskScan> {
    match TaskScan::load() {
        Ok(scan) => Some(scan),
        Err(error @ (TaskScanUnavailable::Refused { .. } | TaskScanUnavailable::SelfCheckFailed { .. })) => {
            panic!("{error}")
        }
        Err(error) => {
            println!("skipped: {error}");
            None
        }
    }
}

/// Handle of the child process.
pub(crate) struct TestProcess {
    child: Child,
    orders: ChildStdin,
    replies: BufReader<ChildStdout>,
}

impl TestProcess {
    /// Starts a child with `threads` sleeping threads besides its own two. Returns their thread ids.
    pub(crate) fn start(threads: usize) -> (Self, Vec<Tid>) {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "bpf::tests::test_process::test_process_main", "--ignored", "--nocapture"]);
        command.env(ROLE, "yes").stdin(Stdio::piped()).stdout(Stdio::piped()).process_group(0);
        let mut child = command.spawn().unwrap();
        let (orders, replies) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
        let mut test_process = Self { child, orders, replies };
        let tids = test_process.order(&format!("threads {threads}"));
        let tids: Vec<Tid> = tids.split_whitespace().map(|tid| Tid(tid.parse().unwrap())).collect();
        assert_eq!(tids.len(), threads);
        (test_process, tids)
    }

    /// Moves the child to a cgroup.
    pub(crate) fn move_to(&self, cgroup: &TestCgroup) {
        std::fs::write(cgroup.path().join("cgroup.procs"), self.pid().to_string()).unwrap();
    }

    pub(crate) fn pid(&self) -> Pid {
        Pid(self.child.id())
    }

    /// Sends an order, waits until it is executed, and returns the reply.
    pub(crate) fn order(&mut self, order: &str) -> String {
        writeln!(self.orders, "{order}").unwrap();
        loop {
            let mut line = String::new();
            assert_ne!(
                self.replies.read_line(&mut line).unwrap(),
                0,
                "the test process ended during the order: {order}"
            );
            // The test harness prints on the same line.
            if let Some((_, answer)) = line.split_once("done:") {
                return answer.trim().to_owned();
            }
        }
    }

    /// Kills the child without waiting for it.
    pub(crate) fn kill(&mut self) {
        self.child.kill().unwrap();
    }

    /// Kills the child and waits for it.
    pub(crate) fn end(mut self) {
        self.kill();
        self.child.wait().unwrap();
    }
}

/// A cgroup for a test, in one hierarchy.
pub(crate) struct TestCgroup(PathBuf);

impl TestCgroup {
    /// A cgroup in the v2 hierarchy. `None` if this user can't create one.
    pub(crate) fn unified() -> Option<Self> {
        let cgroup = CgroupMounts::read().v2_mount_point.and_then(|mount| Self::below(&mount));
        if cgroup.is_none() {
            println!("skipped: the v2 hierarchy is not mounted or not writable");
        }
        cgroup
    }

    /// A cgroup in each writable hierarchy. Except the v1 cpuset hierarchy: a new cgroup there takes no
    /// processes before it has CPUs.
    pub(crate) fn all() -> Vec<Self> {
        let CgroupMounts { v2_mount_point, v1_mounts } = CgroupMounts::read();
        let legacy =
            v1_mounts.into_iter().filter(|(options, _)| !options.split(',').any(|option| option == "cpuset"));
        let cgroups: Vec<Self> = v2_mount_point
            .into_iter()
            .chain(legacy.map(|(_, mount)| mount))
            .filter_map(|mount| Self::below(&mount))
            .collect();
        if cgroups.is_empty() {
            println!("skipped: no hierarchy is writable");
        }
        cgroups
    }

    fn below(mount: &Path) -> Option<Self> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = mount.join(format!("pjw-task-scan-{}-{number}", std::process::id()));
        std::fs::create_dir(&path).is_ok().then_some(Self(path))
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for TestCgroup {
    fn drop(&mut self) {
        let empty = || std::fs::remove_dir(&self.0).is_ok().then_some(());
        until("the test's cgroup is empty", empty);
    }
}

impl Drop for TestProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

enum Order {
    /// Set the name of the thread.
    Name(String),
    /// Use the CPU time [`WORK`].
    Work,
    /// Run until the end of the process.
    WorkOn,
    /// Set every PU, or these PUs, as the mask of this thread or of another one, this many times.
    Request { target: Option<Tid>, cpus: Option<CpuSet>, times: u32 },
    /// End the thread.
    Leave,
}

/// The child process. It reads one order per line: `threads N`; for thread K: `name K TEXT`, `work K`, `work-on K`,
/// `leave K`, and for affinity requests `request K all`, `request K LIST`, `request-for K TID`, `request-many K TIMES`;
/// for the process `session`; for the first thread `first-leaves`.
#[test]
#[ignore = "this is the process that other tests start"]
fn test_process_main() {
    if std::env::var_os(ROLE).is_none() {
        return;
    }
    let mut workers: BTreeMap<usize, (Sender<Order>, Receiver<String>)> = BTreeMap::new();
    for line in std::io::stdin().lines() {
        let line = line.unwrap();
        let mut words = line.splitn(3, ' ');
        let (order, number, text) = (words.next().unwrap(), words.next(), words.next());
        let number = number.map_or(0, |number| number.parse().unwrap());
        let answer = match order {
            "threads" => {
                workers = (0..number).map(|k| (k, worker())).collect();
                workers.values().map(|(_, answers)| answers.recv().unwrap() + " ").collect()
            }
            "session" => setsid().map_or_else(|errno| errno.to_string(), |_| String::new()),
            "first-leaves" => first_leaves(),
            _ => {
                let command = match order {
                    "name" => Order::Name(text.unwrap().to_owned()),
                    "work" => Order::Work,
                    "work-on" => Order::WorkOn,
                    "leave" => Order::Leave,
                    "request" => Order::Request { target: None, cpus: text.unwrap().parse().ok(), times: 1 },
                    "request-for" => Order::Request {
                        target: Some(Tid(text.unwrap().parse().unwrap())),
                        cpus: None,
                        times: 1,
                    },
                    "request-many" => {
                        Order::Request { target: None, cpus: None, times: text.unwrap().parse().unwrap() }
                    }
                    _ => panic!("unknown order {order}"),
                };
                let (orders, answers) = &workers[&number];
                orders.send(command).unwrap();
                answers.recv().unwrap()
            }
        };
        let mut out = std::io::stdout();
        writeln!(out, "done: {answer}").unwrap();
        out.flush().unwrap();
    }
}

fn worker() -> (Sender<Order>, Receiver<String>) {
    let (orders, inbox) = channel();
    let (outbox, answers) = channel();
    let work = move || {
        outbox.send(gettid().to_string()).unwrap();
        for order in inbox {
            match order {
                Order::Name(name) => std::fs::write("/proc/thread-self/comm", name).unwrap(),
                Order::Work => {
                    let end = own_thread_cpu_time() + WORK;
                    while own_thread_cpu_time() < end {}
                }
                Order::WorkOn => {
                    outbox.send(String::new()).unwrap();
                    loop {
                        std::hint::spin_loop();
                    }
                }
                Order::Request { target, cpus, times } => {
                    let target = target.unwrap_or(affinity::own_thread());
                    let set_mask = |_| {
                        cpus.as_ref().map_or_else(
                            || affinity::set_full_mask(target),
                            |cpus| affinity::set_mask(target, cpus),
                        )
                    };
                    let done = (0..times).try_for_each(set_mask);
                    let answer = done.map_or_else(|errno| format!("{errno:?}"), |()| "requested".to_owned());
                    outbox.send(answer).unwrap();
                    continue;
                }
                Order::Leave => break,
            }
            outbox.send(String::new()).unwrap();
        }
        // The receiver may be gone already.
        let _ = outbox.send(String::new());
    };
    thread::Builder::new().stack_size(32 * 1024).spawn(work).unwrap();
    (orders, answers)
}

/// Ends the first thread while the others keep running. The process then shows as a zombie.
fn first_leaves() -> String {
    extern "C" fn leave(_: libc::c_int) {
        // SAFETY: exit(2), unlike exit(3), ends only the calling thread and touches no memory of this
        // process. The calling thread belongs to the test harness, waits for this test, and holds no lock.
        unsafe { libc::syscall(libc::SYS_exit, 0) };
    }
    let action = SigAction::new(SigHandler::Handler(leave), SaFlags::empty(), SigSet::empty());
    // SAFETY: the handler makes one system call and returns to nothing.
    unsafe { sigaction(Signal::SIGUSR1, &action) }.unwrap();
    let pid = std::process::id();
    // SAFETY: tgkill(2) takes three numbers and touches no memory.
    let sent = unsafe { libc::syscall(libc::SYS_tgkill, pid, pid, libc::SIGUSR1) };
    assert_eq!(sent, 0);
    String::new()
}
