//! The physical limit: a process that hears of each fork as pjwd does and gives every child of one process the right mask
//! at once, by one system call. It decides, stores and checks nothing.
//!
//! The bench program starts itself again for it; its main function calls [`attend`] first.

use std::env;
use std::io::{Write, stdout};
use std::os::fd::AsFd;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, anyhow};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::prctl::set_pdeathsig;
use nix::sys::signal::Signal;
use pjw_core::ids::{Pid, Tid};
use pjw_core::{cpuset::CpuSet, snapshot::ProcessEvent};
use pjw_linux::{proc::events::ProcEvents, sys::affinity, sys::clock::now};

use crate::{programs::interrupt::Interrupt, programs::program::Program};

const ARGUMENT: &str = "--listener";
const READY_TIMEOUT: Duration = Duration::from_secs(10);

/// The running listener.
#[derive(Debug)]
pub struct ForkListener(Program);

impl ForkListener {
    /// Starts it: the process itself gets the first mask, and then all its children the second.
    ///
    /// # Errors
    /// If the kernel tells it no events.
    pub fn start(
        parent: u32,
        parent_mask: &CpuSet,
        child_mask: &CpuSet,
        interrupt: &Interrupt,
    ) -> anyhow::Result<Self> {
        let mut command = Command::new(env::current_exe().context("where is this program?")?);
        command.args([ARGUMENT, &parent.to_string(), &parent_mask.to_string(), &child_mask.to_string()]);
        Ok(Self(Program::start_until_ready("the listener", &mut command, READY_TIMEOUT, interrupt)?))
    }

    /// How long after their birth, by the kernel's clock, so many children had their masks, in milliseconds.
    ///
    /// # Errors
    /// If it had fewer.
    pub fn reaction_times_ms(mut self, children: usize, interrupt: &Interrupt) -> anyhow::Result<Vec<f64>> {
        (0..children).map(|_| Ok(self.0.read_line(READY_TIMEOUT, interrupt)?.parse()?)).collect()
    }
}

/// If this program was started to be a listener, is one until it is ended.
///
/// # Errors
/// If it hears nothing.
pub fn run_as_fork_listener() -> anyhow::Result<()> {
    let mut arguments = env::args().skip(1);
    if arguments.next().as_deref() != Some(ARGUMENT) {
        return Ok(());
    }
    set_pdeathsig(Signal::SIGKILL).context("can't ask to end with the bench")?;
    let parent = Pid(arguments.next().context("whose children?")?.parse()?);
    let mut mask = || -> anyhow::Result<CpuSet> {
        arguments.next().context("which mask?")?.parse().map_err(|error| anyhow!("{error}"))
    };
    let (parent_mask, child_mask) = (mask()?, mask()?);
    let mut proc_events = ProcEvents::open()?;
    affinity::set_mask(Tid(parent.0), &parent_mask).context("its parent is gone")?;
    let mut out = stdout().lock();
    writeln!(out, "ready").and_then(|()| out.flush()).context("nobody listens")?;
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
            writeln!(out, "{ms}").and_then(|()| out.flush()).context("nobody listens")?;
        }
    }
}
