//! The report of a cycle, and the faults that keep the warden from its work.

use std::collections::BTreeMap;
use std::time::Instant;

use pjw_core::command::{Command, Reply};
use pjw_core::cpuset_group::{CpusetAction, CpusetOutcome};
use pjw_core::event::{Event, EventKind};
use pjw_core::ids::{Pid, ThreadId};
use pjw_core::plan::{MaskAction, MaskOutcome, Warning};
use pjw_core::{job::JobId, refusal::Refusal, state::dirty::DirtySet, time::Nanos};

/// The failures that last: of the journal, of the audit of plans, and of refused mask changes. `pjwctl status` shows
/// them as warnings.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Faults {
    /// The error of the last journal write, if it failed. No change is made then.
    pub journal: Option<String>,
    /// Jobs whose plans failed the audit, with the violation. `None` stands for violations of no single job. The
    /// actions of these jobs are dropped.
    pub audit: BTreeMap<Option<JobId>, String>,
    /// Threads whose affinity mask the kernel refuses to change.
    pub refused: BTreeMap<ThreadId, RefusedMask>,
}

/// The job and the reason of an affinity mask change that the kernel refused for a thread.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RefusedMask {
    /// The job of the thread.
    pub job: JobId,
    /// The reason and the remedy.
    pub hint: String,
}

/// The results of a cycle of the daemon: the replies to commands, events, warnings, and the changes with their
/// outcomes.
#[derive(Debug, Default)]
pub struct CycleReport {
    /// The results of the commands, in the order of the commands.
    pub replies: Vec<Result<Reply, Refusal>>,
    /// Events, in order.
    pub events: Vec<Event>,
    /// Warnings of the last round: changes that were not made, with the reason.
    pub warnings: Vec<Warning>,
    /// Mask changes with their outcomes.
    pub outcomes: Vec<(MaskAction, MaskOutcome)>,
    /// Cpuset changes with their outcomes.
    pub cpuset_outcomes: Vec<(CpusetAction, CpusetOutcome)>,
    /// The jobs and processes that were planned again. All others are unchanged.
    pub dirty: DirtySet,
    /// Forked processes that were confined before the scan.
    pub confined_forks: Vec<ConfinedFork>,
    /// Whether the cycle ended with work left to do.
    pub unfinished: bool,
}

/// A new process that was forked outside its job's cores, and got its affinity mask at once instead of in the next
/// scan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConfinedFork {
    /// The process.
    pub pid: Pid,
    /// The time of the fork event of the process, since boot.
    pub forked_at: Nanos,
    /// The time at which the mask of the process was set.
    pub done_at: Instant,
}

/// How many process events were read from the kernel, and whether some were lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct EventCount {
    /// The number of events.
    pub count: usize,
    /// Whether events were lost.
    pub lost: bool,
    /// Whether the kernel goes on losing events until its buffer is empty.
    pub congested: bool,
}

impl CycleReport {
    /// Adds the events of a round. Each process has at most one violation event per cycle.
    pub(super) fn add_events(&mut self, mut events: Vec<Event>) {
        let is_repeated = |event: &Event| {
            let mut violations = self.events.iter().filter(|known| known.kind == EventKind::Violation);
            violations.any(|known| (&known.job, known.pid) == (&event.job, event.pid))
        };
        events.retain(|event| event.kind != EventKind::Violation || !is_repeated(event));
        self.events.append(&mut events);
    }
}

/// The refusals of commands that could not be journaled.
pub(super) fn all_unrecorded(commands: &[Command], fault: &str) -> Vec<Result<Reply, Refusal>> {
    commands.iter().map(|_| Err(Refusal::JournalFailed { fault: fault.to_owned() })).collect()
}
