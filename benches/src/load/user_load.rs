//! A load of many processes of a plain user that fork or spin without a pause.
//!
//! A bench starts its own executable again for the leader of the processes. The leader begins a session of its own, as
//! a login does, and so has an autogroup of its own (sched(7)). The main function of the bench calls [`run_as_leader`]
//! first.

use std::env;
use std::io::{Write, pipe, stdout};
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use anyhow::{Context, bail};
use nix::sys::prctl::set_pdeathsig;
use nix::sys::signal::{Signal, killpg};
use nix::unistd::{Gid, Pid, Uid, setgid, setgroups, setsid, setuid};

use crate::{programs::interrupt::StopSignal, programs::program::Program};

const ARGUMENT: &str = "--user-load";
const READY_TIMEOUT: Duration = Duration::from_secs(60);
/// The longest life of a load.
const MAX_LIFE: Duration = Duration::from_secs(15 * 60);
/// The id of the user `nobody`, and of its group.
const NOBODY: u32 = 65_534;

/// What each process of a [`UserLoad`] does. Such a load is a group of processes of an unprivileged user that use the
/// CPUs without a pause.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum UserActivity {
    /// The process forks a child that ends at once, waits for the child, and repeats this without a pause.
    Forking,
    /// The process computes without a pause.
    Spinning,
}

impl UserActivity {
    /// The script of a process. It begins when the leader closes the standard input, and ends when the leader has
    /// ended.
    fn script(self) -> &'static str {
        match self {
            Self::Forking => "read -r line; while kill -0 $PPID 2>/dev/null; do ( : ); done",
            Self::Spinning => {
                "read -r line; while kill -0 $PPID 2>/dev/null; do i=0; while [ $i -lt 10000 ]; do i=$((i+1)); done; done"
            }
        }
    }

    fn argument(self) -> &'static str {
        match self {
            Self::Forking => "forking",
            Self::Spinning => "spinning",
        }
    }
}

/// A group of processes of an unprivileged user that fork or compute without a pause. Dropping this value kills the
/// processes. If the bench is killed, they end by themselves.
#[derive(Debug)]
pub struct UserLoad(Program);

impl UserLoad {
    /// Starts `processes` processes that do `activity` without a pause. They run as the user of the bench, or as the
    /// user `nobody` if the bench runs as root.
    ///
    /// # Errors
    /// If a process can't be started, or if the bench was interrupted.
    pub fn start(activity: UserActivity, processes: usize, interrupt: &StopSignal) -> anyhow::Result<Self> {
        let mut command = Command::new(env::current_exe().context("can't read the path of this program")?);
        command.args([ARGUMENT, activity.argument(), &processes.to_string()]);
        Ok(Self(Program::start_until_ready("the user's load", &mut command, READY_TIMEOUT, interrupt)?))
    }
}

impl Drop for UserLoad {
    fn drop(&mut self) {
        // The leader is not waited for yet, so its process group is still the one that it made.
        let _ = killpg(Pid::from_raw(self.0.pid().cast_signed()), Signal::SIGKILL);
    }
}

/// Runs this process as the leader of a group of processes that fork or compute without a pause, and does not return,
/// if the arguments of this program request this. Otherwise returns at once.
///
/// # Errors
/// If an argument is wrong, or if a process can't be started.
pub fn run_as_leader() -> anyhow::Result<()> {
    let mut arguments = env::args().skip(1);
    if arguments.next().as_deref() != Some(ARGUMENT) {
        return Ok(());
    }
    let activity = match arguments.next().as_deref() {
        Some("forking") => UserActivity::Forking,
        Some("spinning") => UserActivity::Spinning,
        other => bail!("there is no activity {other:?}"),
    };
    let processes: usize = arguments.next().context("the number of processes is missing")?.parse()?;
    setsid().context("can't begin a session")?;
    if Uid::effective().is_root() {
        setgroups(&[]).and_then(|()| setgid(Gid::from_raw(NOBODY))).context("can't change the group")?;
        setuid(Uid::from_raw(NOBODY)).context("can't change the user")?;
    }
    // The kernel clears the parent death signal when a process changes its user.
    set_pdeathsig(Signal::SIGKILL).context("can't set the parent death signal")?;
    let (reader, writer) = pipe().context("can't make a pipe")?;
    for _ in 0..processes {
        let mut command = Command::new("sh");
        command.args(["-c", activity.script()]).current_dir("/").stdin(reader.try_clone()?);
        command.stdout(Stdio::null()).spawn().context("can't start a shell: ulimit -u may be too low")?;
    }
    writeln!(stdout(), "ready").context("can't write to stdout")?;
    // All processes begin at the same time. Otherwise the first ones would delay the start of the last ones.
    drop(writer);
    thread::sleep(MAX_LIFE);
    std::process::exit(0);
}
