//! The report of a cycle, and the faults that keep the warden from its work.

use std::collections::BTreeMap;
use std::time::Instant;

use pjw_core::command::{Command, Reply};
use pjw_core::cpuset_group::{CpusetAction, CpusetOutcome};
use pjw_core::event::{Event, EventKind};
use pjw_core::ids::{Pid, ThreadId};
use pjw_core::plan::{MaskAction, MaskOutcome, Warning};
use pjw_core::state::{WardenState, dirty::DirtySet};
use pjw_core::{job::JobId, refusal::Refusal, time::Nanos};

/// The failures that still exist: of the journal, of the audit of plans, and of mask changes that the kernel
/// refused. `pjwctl status` shows them as warnings.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Faults {
    /// The error of the last write of the journal. `None` if the write succeeded. While there is an error, pjwd
    /// changes nothing on the machine.
    pub journal: Option<String>,
    /// The violation that the audit found in the plan for each job; the changes for these jobs are not made. The
    /// key `None` is for violations that concern no single job.
    pub audit: BTreeMap<Option<JobId>, String>,
    /// The threads whose affinity masks the kernel refuses to change.
    pub refused: BTreeMap<ThreadId, RefusedMask>,
}

/// A change of a thread's affinity mask that the kernel refused: the job for which it was made, and the reason.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RefusedMask {
    /// The job for which the mask was to change.
    pub job: JobId,
    /// Why the kernel refused the change, and what the user can do.
    pub reason: String,
}

/// The results of a cycle of the daemon: the replies to commands, events, warnings, and the changes with their
/// outcomes.
#[derive(Debug, Default)]
pub struct CycleReport {
    /// The reply or the refusal for each command, in the order of the commands.
    pub replies: Vec<Result<Reply, Refusal>>,
    /// What happened in the cycle, in the order in which it happened.
    pub events: Vec<Event>,
    /// The changes that were considered and not planned in the last round of the cycle, each with its reason.
    pub warnings: Vec<Warning>,
    /// The changes of affinity masks that were tried, each with its outcome.
    pub outcomes: Vec<(MaskAction, MaskOutcome)>,
    /// The changes of cpusets that were tried, each with its outcome.
    pub cpuset_outcomes: Vec<(CpusetAction, CpusetOutcome)>,
    /// The jobs and processes that were planned in this cycle. For all others, the previous plan is unchanged.
    pub dirty: DirtySet,
    /// Forked processes that were found outside their job's cores before the scan, and got their affinity masks at
    /// once.
    pub confined_forks: Vec<ConfinedFork>,
    /// Whether work is left for the next cycle, because the cycle has a limited number of rounds.
    pub unfinished: bool,
    /// How often the mask of a thread was written in this cycle.
    pub mask_writes: BTreeMap<ThreadId, u32>,
}

/// If the mask of a thread has to be written more often in one cycle, the program changes it as fast as pjw. The next
/// cycle goes on, after the interval.
const MAX_MASK_WRITES: u32 = 3;

/// A new process that was forked outside its job's cores, and got its affinity mask at once instead of in the next
/// scan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConfinedFork {
    /// The process id (pid).
    pub pid: Pid,
    /// The time of the fork event of the process, in ns since boot.
    pub forked_at: Nanos,
    /// The time at which the affinity mask of the process was set.
    pub confined_at: Instant,
}

/// How many process events were read from the kernel, and whether some were lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct EventCount {
    /// The number of events that were read.
    pub count: usize,
    /// Whether the kernel lost events.
    pub lost: bool,
    /// Whether the kernel still drops events. It does so from the moment its buffer overflows until the buffer has
    /// been read empty.
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

    /// Counts the mask writes of a round. Returns whether one of them was a step forward, so that another round is worth
    /// its scan.
    pub(super) fn count_progress(&mut self, outcomes: &[(MaskAction, MaskOutcome)]) -> bool {
        let mut progress = false;
        for (action, _) in outcomes.iter().filter(|(_, outcome)| matches!(outcome, MaskOutcome::Done { .. }))
        {
            let writes = self.mask_writes.entry(action.thread).or_default();
            *writes += 1;
            progress |= *writes < MAX_MASK_WRITES;
        }
        progress
    }

    /// Refuses the commands whose new job is over already, because all its named processes ended in the meantime.
    pub(super) fn refuse_ended(&mut self, commands: &[Command], state: &WardenState) {
        for (command, reply) in commands.iter().zip(&mut self.replies) {
            let (Command::Assign(assign), Ok(Reply::Assigned(job))) = (command, &*reply) else { continue };
            let Some(&pid) = assign.pids.first() else { continue };
            let has_ended = |pid: &Pid| !state.processes.contains_key(pid);
            if !state.jobs.contains_key(&job.id) && assign.pids.iter().all(has_ended) {
                *reply = Err(Refusal::ProcessEnded { pid, job: job.id.clone() });
            }
        }
    }
}

/// The refusals of commands that could not be journaled.
pub(super) fn all_unrecorded(commands: &[Command], fault: &str) -> Vec<Result<Reply, Refusal>> {
    commands.iter().map(|_| Err(Refusal::JournalFailed { fault: fault.to_owned() })).collect()
}
