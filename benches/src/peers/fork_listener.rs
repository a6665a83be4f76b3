//! The lower limit of the reaction time: a process that receives fork events as pjwd does, and sets the mask of each
//! child of one process at once, by one system call. It decides, stores and checks nothing. It has the real-time
//! priority of pjwd, where the system allows it.
//!
//! A bench starts its own executable again for the listener. The main function of the bench calls
//! [`run_as_fork_listener`] first.

use std::env;
use std::io::{Write, stdout};
use std::os::fd::AsFd;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, anyhow};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::prctl::set_pdeathsig;
use nix::sys::signal::Signal;
use nix::unistd::gettid;
use pjw_core::ids::{Pid, Tid};
use pjw_core::{cpuset::CpuSet, snapshot::ProcessEvent};
use pjw_linux::proc::events::ProcEventSocket;
use pjw_linux::sys::{affinity, clock::now, realtime::set_realtime_policy};

use crate::{programs::interrupt::StopSignal, programs::program::Program};

const ARGUMENT: &str = "--listener";
const READY_TIMEOUT: Duration = Duration::from_secs(10);

/// A running fork listener: a process that receives fork events and sets the affinity mask of each new child of one
/// parent process. The listener is killed when this value is dropped.
#[derive(Debug)]
pub struct ForkListener(Program);

impl ForkListener {
    /// Starts a fork listener. The listener sets the affinity mask of the process `parent` to `parent_mask`. It then
    /// sets the mask of each new child of `parent` to `child_mask`, as soon as it receives the fork event of the child.
    ///
    /// # Errors
    /// If the listener can't be started, or if the kernel sends no process events.
    pub fn start(
        parent: u32,
        parent_mask: &CpuSet,
        child_mask: &CpuSet,
        interrupt: &StopSignal,
    ) -> anyhow::Result<Self> {
        let mut command = Command::new(env::current_exe().context("can't read the path of this program")?);
        command.args([ARGUMENT, &parent.to_string(), &parent_mask.to_string(), &child_mask.to_string()]);
        Ok(Self(Program::start_until_ready("the fork listener", &mut command, READY_TIMEOUT, interrupt)?))
    }

    /// Returns the reaction times of the fork listener for `children` children, in milliseconds. A reaction time begins
    /// at the fork of a child, and ends with the system call that sets the mask of the child. Both are measured by the
    /// kernel's clock.
    ///
    /// # Errors
    /// If the listener has set the mask of fewer children.
    pub fn reaction_times_ms(mut self, children: usize, interrupt: &StopSignal) -> anyhow::Result<Vec<f64>> {
        (0..children).map(|_| Ok(self.0.read_line(READY_TIMEOUT, interrupt)?.parse()?)).collect()
    }
}

/// Runs this process as a fork listener (a process that sets the mask of each new child of another process) and does
/// not return, if the arguments of this program request this. Otherwise returns at once.
///
/// # Errors
/// If an argument is wrong, or if the kernel sends no process events.
pub fn run_as_fork_listener() -> anyhow::Result<()> {
    let mut arguments = env::args().skip(1);
    if arguments.next().as_deref() != Some(ARGUMENT) {
        return Ok(());
    }
    set_pdeathsig(Signal::SIGKILL).context("can't set the parent death signal")?;
    let parent = Pid(arguments.next().context("the process id is missing")?.parse()?);
    let mut mask = || -> anyhow::Result<CpuSet> {
        arguments.next().context("a mask is missing")?.parse().map_err(|error| anyhow!("{error}"))
    };
    let (parent_mask, child_mask) = (mask()?, mask()?);
    let mut proc_events = ProcEventSocket::open()?;
    affinity::set_mask(Tid(parent.0), &parent_mask).context("can't set the mask of the parent")?;
    // The same as for pjwd, which runs without the priority where the system refuses it.
    let _ = set_realtime_policy(Tid(gettid().as_raw().cast_unsigned()));
    let mut out = stdout().lock();
    writeln!(out, "ready").and_then(|()| out.flush()).context("can't write to stdout")?;
    let mut events = Vec::new();
    loop {
        poll(&mut [PollFd::new(proc_events.as_fd(), PollFlags::POLLIN)], PollTimeout::NONE)?;
        proc_events.drain_events(&mut events);
        let mut times_ms = Vec::new();
        for event in events.drain(..) {
            let ProcessEvent::Fork { parent: forking, child, at, .. } = event else { continue };
            if forking == parent && affinity::set_mask(Tid(child.0), &child_mask).is_ok() {
                let took = Duration::from_nanos(now().since_boot.0.saturating_sub(at.0));
                times_ms.push(took.as_secs_f64() * 1000.0);
            }
        }
        for ms in times_ms {
            writeln!(out, "{ms}").and_then(|()| out.flush()).context("can't write to stdout")?;
        }
    }
}
