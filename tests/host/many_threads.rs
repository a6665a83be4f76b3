//! A process with many threads of which few run: the masks of all of them stay right, although most scans read only the
//! active ones.

use std::io::{BufRead, BufReader, Write, stdin, stdout};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use pjw_core::cpuset::CpuSet;
use pjw_core::ids::Tid;
use pjw_core::state::members::MIN_THREADS_FOR_PARTIAL_READING;
use pjw_linux::sys::affinity;
use pjw_tests::daemon::{Daemon, Enforcement};
use pjw_tests::waiting::{wait_until, wait_until_empty};

use crate::processes::{has_two_cores, mask, masks};

const ROLE: &str = "PJW_TEST_MANY_THREADS";
/// Begins each reply of the child, so that the lines of the test harness are not taken for replies.
const REPLY: &str = "reply ";

/// A child with many sleeping threads, which starts and ends active ones on request.
struct ManyThreads {
    child: Child,
    orders: ChildStdin,
    replies: BufReader<ChildStdout>,
}

impl Drop for ManyThreads {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl ManyThreads {
    fn start() -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "many_threads::child_with_many_threads", "--ignored", "--nocapture"]);
        let mut child =
            command.env(ROLE, "yes").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (orders, replies) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
        Self { child, orders, replies }
    }

    /// Sends an order and returns the thread id that the child replies with.
    fn order(&mut self, order: &str) -> u32 {
        writeln!(self.orders, "{order}").unwrap();
        let mut line = String::new();
        loop {
            line.clear();
            assert_ne!(self.replies.read_line(&mut line).unwrap(), 0, "the child has ended");
            // With one CPU, the test harness prints the name of the test before the first reply, on the same line.
            if let Some((_, tid)) = line.split_once(REPLY) {
                return tid.trim().parse().unwrap();
            }
        }
    }
}

fn own_tid() -> u32 {
    nix::unistd::gettid().as_raw().cast_unsigned()
}

fn start_thread(run: impl FnOnce() + Send + 'static) -> u32 {
    let (tell, told) = std::sync::mpsc::channel();
    let body = move || {
        tell.send(own_tid()).unwrap();
        run();
    };
    thread::Builder::new().stack_size(64 * 1024).spawn(body).unwrap();
    told.recv().unwrap()
}

#[test]
#[ignore = "run in a child by the tests of this module"]
fn child_with_many_threads() {
    if std::env::var_os(ROLE).is_none() {
        return;
    }
    let mut busy: Vec<Arc<AtomicBool>> = Vec::new();
    let sleep = || {
        loop {
            thread::park();
        }
    };
    for line in stdin().lines().map_while(Result::ok) {
        let tid = match line.as_str() {
            "sleepers" => {
                let tids: Vec<u32> =
                    (0..MIN_THREADS_FOR_PARTIAL_READING + 50).map(|_| start_thread(sleep)).collect();
                tids[0]
            }
            "start" => {
                let (runs, seen) = (Arc::new(AtomicBool::new(true)), AtomicBool::new(true));
                busy.push(Arc::clone(&runs));
                start_thread(move || {
                    while runs.load(Ordering::Relaxed) {
                        seen.store(true, Ordering::Relaxed);
                    }
                })
            }
            "stop" => {
                busy.remove(0).store(false, Ordering::Relaxed);
                0
            }
            // A thread that requests every PU for itself, and then sleeps.
            "rebind" => start_thread(move || {
                let all = affinity::get_mask(Tid(std::os::unix::process::parent_id())).unwrap_or_default();
                let _ = affinity::set_mask(Tid(own_tid()), &all);
                sleep();
            }),
            _ => 0,
        };
        writeln!(stdout(), "{REPLY}{tid}").unwrap();
    }
}

/// The threads with PUs outside of these.
fn outside(pid: u32, cpus: &CpuSet) -> Vec<(u32, String)> {
    let is_outside = |(_, mask): &(u32, String)| !mask.parse::<CpuSet>().unwrap().is_subset(cpus);
    masks(&[pid]).into_iter().filter(is_outside).collect()
}

#[test]
fn the_masks_of_all_threads_stay_right_while_few_run() {
    if !has_two_cores() {
        return;
    }
    for enforcement in Enforcement::available() {
        let daemon = Daemon::start_with(enforcement, "interval = \"50ms\"\n");
        let all = mask(std::process::id());
        let mut process = ManyThreads::start();
        let pid = process.child.id();
        let sleeper = process.order("sleepers");
        for _ in 0..2 {
            process.order("start");
        }
        let cpus = daemon.assign("a", 1, &[pid]).unwrap();
        assert_eq!(outside(pid, &cpus), [], "assign returns when every thread is inside");
        wait_until("the status has two hot threads", || daemon.job("a").is_some_and(|job| job.hot == 2));
        for _ in 0..6 {
            // Another program changes the mask of a thread that sleeps. In a cpuset, the kernel may refuse the mask.
            let _ = affinity::set_mask(Tid(sleeper), &all);
            wait_until_empty("a sleeping thread is put right", || outside(pid, &cpus));
            process.order("rebind");
            wait_until_empty("a thread that left is put right", || outside(pid, &cpus));
            let born = process.order("start");
            process.order("stop");
            let _ = affinity::set_mask(Tid(born), &all);
            wait_until_empty("a new thread is put right", || outside(pid, &cpus));
            wait_until("the status has the threads that run", || {
                daemon.job("a").is_some_and(|job| job.hot == 2 && job.threads as usize == masks(&[pid]).len())
            });
        }
        daemon.release("a").unwrap();
        let is_other = |(_, mask): &(u32, String)| *mask != all.to_string();
        // A release gives each thread its mask back.
        let others = || masks(&[pid]).into_iter().filter(is_other).collect();
        daemon.check_after_reply(&daemon.job_id("a"), &Vec::new(), others);
    }
}
