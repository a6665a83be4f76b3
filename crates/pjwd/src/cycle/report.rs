//! What a cycle tells: what it did, and what keeps the warden from its work.

use std::collections::BTreeMap;
use std::time::Instant;

use pjw_core::command::{Refusal, Reply};
use pjw_core::event::{Event, EventKind};
use pjw_core::job::JobId;
use pjw_core::newborn::Birth;
use pjw_core::plan::{Abstained, Action, Outcome};
use pjw_core::process::{Pid, ThreadId};
use pjw_core::stirred::Stirred;
use pjw_core::wall::{WallAction, WallOutcome};

/// What keeps the warden from doing its work: shown in `status` until it is over.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Troubles {
    /// The journal's last words, if it can't be written: nothing is changed then.
    pub journal: Option<String>,
    /// Jobs whose plans failed the audit, with the violation: their actions are dropped.
    pub audit: BTreeMap<Option<JobId>, String>,
    /// Threads whose mask the kernel refuses to change, with its reason.
    pub refused: BTreeMap<ThreadId, Refused>,
}

/// A change that the kernel refuses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refused {
    /// For which job.
    pub job: JobId,
    /// Why, and what to do.
    pub hint: String,
}

/// What one cycle did.
#[derive(Debug, Default)]
pub struct Report {
    /// The answers to the commands, in their order.
    pub replies: Vec<Result<Reply, Refusal>>,
    /// What happened, in order.
    pub events: Vec<Event>,
    /// What was not done, and why, as of the last round.
    pub abstained: Vec<Abstained>,
    /// What was carried out, or tried.
    pub outcomes: Vec<(Action, Outcome)>,
    /// What was built or taken down, or tried.
    pub walls: Vec<(WallAction, WallOutcome)>,
    /// What was planned anew: all else is as it was.
    pub stirred: Stirred,
    /// The births that the cycle was told of.
    pub births: BTreeMap<Pid, Birth>,
    /// Newborns that were put right before anything else was read, and when that was done.
    pub welcomed: Vec<(ThreadId, Instant)>,
    /// Whether there was more to do than one cycle may.
    pub unfinished: bool,
}

impl Report {
    /// Adds what happened in a round. A process that tries to leave all the time is told of once in a cycle.
    pub(super) fn tell(&mut self, mut events: Vec<Event>) {
        let is_told = |told: &Event, event: &Event| {
            (told.kind, &told.job, told.pid) == (EventKind::Violation, &event.job, event.pid)
        };
        events.retain(|event| {
            event.kind != EventKind::Violation || !self.events.iter().any(|told| is_told(told, event))
        });
        self.events.append(&mut events);
    }
}
