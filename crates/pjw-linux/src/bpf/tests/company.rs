//! A process with as many threads as a test wants, which do what they are told: this test program, started again.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};
use nix::unistd::{gettid, setsid};
use pjw_core::cpuset::CpuSet;
use pjw_core::process::{Pid, Tid};

use crate::affinity;
use crate::bpf::{ScanUnavailable, TaskScan};
use crate::cgroup::Mounts;

const ROLE: &str = "PJW_COMPANY";
/// More than two ticks of any kernel's clock, so that every kernel has noticed.
const WORK: Duration = Duration::from_millis(30);

/// A scan; `None`, with the reason told, where the machine or the user lacks something. Whatever else is wrong is a
/// fault.
pub(crate) fn scan() -> Option<TaskScan> {
    match TaskScan::load() {
        Ok(scan) => Some(scan),
        Err(error @ (ScanUnavailable::Refused { .. } | ScanUnavailable::SelfCheck { .. })) => {
            panic!("{error}")
        }
        Err(error) => {
            println!("skipped: {error}");
            None
        }
    }
}

/// Tries until it gives something.
pub(crate) fn until<T>(what: &str, mut attempt: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        if let Some(done) = attempt() {
            return done;
        }
        assert!(Instant::now() < deadline, "in vain: {what}");
        thread::yield_now();
    }
}

/// The process as a test has it.
pub(crate) struct Company {
    child: Child,
    orders: ChildStdin,
    replies: BufReader<ChildStdout>,
}

impl Company {
    /// Starts a process with `threads` sleeping threads beside its own two; gives their numbers.
    pub(crate) fn start(threads: usize) -> (Self, Vec<Tid>) {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "bpf::tests::company::the_company_plays", "--ignored", "--nocapture"]);
        command.env(ROLE, "yes").stdin(Stdio::piped()).stdout(Stdio::piped()).process_group(0);
        let mut child = command.spawn().unwrap();
        let (orders, replies) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
        let mut company = Self { child, orders, replies };
        let tids = company.order(&format!("threads {threads}"));
        let tids: Vec<Tid> = tids.split_whitespace().map(|tid| Tid(tid.parse().unwrap())).collect();
        assert_eq!(tids.len(), threads);
        (company, tids)
    }

    /// Puts all of it there.
    pub(crate) fn move_to(&self, yard: &Yard) {
        std::fs::write(yard.path().join("cgroup.procs"), self.pid().to_string()).unwrap();
    }

    pub(crate) fn pid(&self) -> Pid {
        Pid(self.child.id())
    }

    /// Gives an order, waits until it is done, and gives the answer.
    pub(crate) fn order(&mut self, order: &str) -> String {
        writeln!(self.orders, "{order}").unwrap();
        loop {
            let mut line = String::new();
            assert_ne!(
                self.replies.read_line(&mut line).unwrap(),
                0,
                "the company left before the end: {order}"
            );
            // The test harness speaks on the same line.
            if let Some((_, answer)) = line.split_once("done:") {
                return answer.trim().to_owned();
            }
        }
    }

    /// Ends the process; nobody has waited for it yet.
    pub(crate) fn kill(&mut self) {
        self.child.kill().unwrap();
    }

    /// Ends it and waits for it.
    pub(crate) fn end(mut self) {
        self.kill();
        self.child.wait().unwrap();
    }
}

/// A cgroup of a test, in one hierarchy, which takes processes.
pub(crate) struct Yard(PathBuf);

impl Yard {
    /// One in the v2 hierarchy.
    pub(crate) fn unified() -> Option<Self> {
        let yard = Mounts::find().unified.and_then(|mount| Self::below(&mount));
        if yard.is_none() {
            println!("skipped: the v2 hierarchy is not mounted, or not for us to write to");
        }
        yard
    }

    /// One in each hierarchy where that may be; in that of the cpusets nobody may be put before it has PUs.
    pub(crate) fn all() -> Vec<Self> {
        let Mounts { unified, legacy } = Mounts::find();
        let legacy =
            legacy.into_iter().filter(|(options, _)| !options.split(',').any(|option| option == "cpuset"));
        let yards: Vec<Self> = unified
            .into_iter()
            .chain(legacy.map(|(_, mount)| mount))
            .filter_map(|mount| Self::below(&mount))
            .collect();
        if yards.is_empty() {
            println!("skipped: no hierarchy is for us to write to");
        }
        yards
    }

    fn below(mount: &Path) -> Option<Self> {
        static YARDS: AtomicU32 = AtomicU32::new(0);
        let number = YARDS.fetch_add(1, Ordering::Relaxed);
        let path = mount.join(format!("pjw-task-scan-{}-{number}", std::process::id()));
        std::fs::create_dir(&path).is_ok().then_some(Self(path))
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Yard {
    fn drop(&mut self) {
        let empty = || std::fs::remove_dir(&self.0).is_ok().then_some(());
        until("the test's cgroup is empty", empty);
    }
}

impl Drop for Company {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

enum Part {
    /// Take this name.
    Name(String),
    /// Keep a PU busy for a moment.
    Work,
    /// Keep a PU busy.
    WorkOn,
    /// Ask for every PU, or for these, so often, for yourself or for another.
    Ask { whom: Option<Tid>, cpus: Option<CpuSet>, times: u32 },
    /// End.
    Leave,
}

/// The process itself. Its orders come line by line: `threads N`, and `name K TEXT`, `work K`, `work-on K`, `leave K`
/// for thread K, `asks K all`, `asks K LIST`, `asks-for K TID` and `asks-on K TIMES` for what it asks of the kernel,
/// `session`, and `first-leaves` for its first thread.
#[test]
#[ignore = "this is the process that other tests start"]
fn the_company_plays() {
    if std::env::var_os(ROLE).is_none() {
        return;
    }
    let mut players: BTreeMap<usize, (Sender<Part>, Receiver<String>)> = BTreeMap::new();
    for line in std::io::stdin().lines() {
        let line = line.unwrap();
        let mut words = line.splitn(3, ' ');
        let (order, number, text) = (words.next().unwrap(), words.next(), words.next());
        let number = number.map_or(0, |number| number.parse().unwrap());
        let answer = match order {
            "threads" => {
                players = (0..number).map(|k| (k, player())).collect();
                players.values().map(|(_, answers)| answers.recv().unwrap() + " ").collect()
            }
            "session" => setsid().map_or_else(|errno| errno.to_string(), |_| String::new()),
            "first-leaves" => first_leaves(),
            _ => {
                let part = match order {
                    "name" => Part::Name(text.unwrap().to_owned()),
                    "work" => Part::Work,
                    "work-on" => Part::WorkOn,
                    "leave" => Part::Leave,
                    "asks" => Part::Ask { whom: None, cpus: text.unwrap().parse().ok(), times: 1 },
                    "asks-for" => {
                        Part::Ask { whom: Some(Tid(text.unwrap().parse().unwrap())), cpus: None, times: 1 }
                    }
                    "asks-on" => Part::Ask { whom: None, cpus: None, times: text.unwrap().parse().unwrap() },
                    _ => panic!("unknown order {order}"),
                };
                let (parts, answers) = &players[&number];
                parts.send(part).unwrap();
                answers.recv().unwrap()
            }
        };
        let mut out = std::io::stdout();
        writeln!(out, "done: {answer}").unwrap();
        out.flush().unwrap();
    }
}

fn player() -> (Sender<Part>, Receiver<String>) {
    let (parts, inbox) = channel();
    let (outbox, answers) = channel();
    let play = move || {
        outbox.send(gettid().to_string()).unwrap();
        for part in inbox {
            match part {
                Part::Name(name) => std::fs::write("/proc/thread-self/comm", name).unwrap(),
                Part::Work => {
                    let begin = Instant::now();
                    while begin.elapsed() < WORK {}
                }
                Part::WorkOn => {
                    outbox.send(String::new()).unwrap();
                    loop {
                        std::hint::spin_loop();
                    }
                }
                Part::Ask { whom, cpus, times } => {
                    let whom = whom.unwrap_or(Tid(gettid().as_raw().cast_unsigned()));
                    let ask = |_| {
                        cpus.as_ref()
                            .map_or_else(|| affinity::set_all(whom), |cpus| affinity::set(whom, cpus))
                    };
                    let done = (0..times).try_for_each(ask);
                    let answer = done.map_or_else(|errno| format!("{errno:?}"), |()| "asked".to_owned());
                    outbox.send(answer).unwrap();
                    continue;
                }
                Part::Leave => break,
            }
            outbox.send(String::new()).unwrap();
        }
        // Whoever asked it to leave need not hear more; the others never get here.
        let _ = outbox.send(String::new());
    };
    thread::Builder::new().stack_size(32 * 1024).spawn(play).unwrap();
    (parts, answers)
}

/// The first thread ends, and the others live on: the process shows as a zombie.
fn first_leaves() -> String {
    extern "C" fn leave(_: libc::c_int) {
        // SAFETY: exit(2), unlike exit(3), ends the calling thread alone and touches no memory of this process. That
        // thread is the harness's, which waits for this test and holds nothing that others wait for.
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
