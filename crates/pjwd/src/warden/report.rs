//! The report of a cycle, and the failures that last beyond a cycle.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use pjw_core::command::{Command, Reply};
use pjw_core::cpuset_group::{CpusetAction, CpusetOutcome};
use pjw_core::event::{Event, EventKind};
use pjw_core::ids::{Pid, ThreadId};
use pjw_core::plan::{MaskAction, MaskOutcome, Warning};
use pjw_core::state::{WardenState, dirty::DirtySet};
use pjw_core::{cpuset::CpuSet, job::JobId, refusal::Refusal, time::Nanos, usage::JobReport};

/// The failures that still exist at the end of a cycle (scan, decision and changes) of the daemon, such as a failed
/// write of its records. `pjwctl status` shows these failures as warnings.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct OngoingFailures {
    /// The error of the last write of the journal. `None` if this write succeeded. While there is an error, jobs are
    /// only released: pjwd only puts affinity masks and cpusets back, and changes the loans of borrowers.
    pub journal_error: Option<String>,
    /// The jobs that failed the audit, each with the violated rule as text. The audit checks the granted
    /// cores and the planned changes of each job before the changes are made. No changes of affinity masks or
    /// cpusets are made for a job in this list. The key `None` stands for a violation that concerns no single
    /// job. While there is such a violation, no changes are made for any job.
    pub audit_violations: BTreeMap<Option<JobId>, String>,
    /// The threads whose affinity masks the kernel refused to change, each with the reason.
    pub refused_masks: BTreeMap<ThreadId, RefusedMask>,
}

/// A change of a thread's affinity mask that the kernel refused: the job for which pjwd tried the change, and the
/// kernel's reason.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RefusedMask {
    /// The job for which the mask was to change.
    pub job: JobId,
    /// Why the kernel refused the change, and what the user can do.
    pub reason: String,
}

/// The mask of a forked process that was set before the decision about the process. The decision does not set it again.
#[derive(Debug)]
pub(super) struct FirstMaskWrite {
    pub(super) requested: CpuSet,
    /// The effective mask right after the write.
    pub(super) effective: CpuSet,
    pub(super) made_at: Instant,
}

/// The results of a cycle of the daemon. A cycle has one or more rounds. A round is a scan of processes, a
/// decision, and the changes of affinity masks and cpusets that were decided.
#[derive(Debug, Default)]
pub struct CycleReport {
    /// The reply or the refusal for each command, in the order of the commands.
    pub replies: Vec<Result<Reply, Refusal>>,
    /// The events of the cycle, in the order in which they happened.
    pub events: Vec<Event>,
    /// The reports of the jobs that ended or were released in the cycle.
    pub ended_jobs: Vec<JobReport>,
    /// The warnings for users from the last decision of the cycle. Each warning describes a change that pjw
    /// does not make, or a state that needs attention. It contains the reason and a remedy.
    pub plan_warnings: Arc<[Arc<Warning>]>,
    /// The attempts to change affinity masks, each with its outcome.
    pub mask_outcomes: Vec<(MaskAction, MaskOutcome)>,
    /// The attempts to change cpusets, each with its outcome.
    pub cpuset_outcomes: Vec<(CpusetAction, CpusetOutcome)>,
    /// The jobs and processes for which this cycle decided again which affinity masks and cpusets they must have. For
    /// all other jobs and processes, the earlier decision is still valid.
    pub newly_planned: DirtySet,
    /// The new processes that belong to jobs, and whose affinity masks pjwd changed before the first scan of
    /// the cycle. pjwd does this only for a process whose mask differs from the set of online PUs that the
    /// job of the process holds.
    pub confined_new_processes: Vec<ConfinedNewProcess>,
    /// Whether work is left because the cycle reached its maximum number of rounds. The next cycle then
    /// continues.
    pub has_unfinished_work: bool,
    /// For each thread, the number of times that pjwd wrote its affinity mask in this cycle.
    pub mask_writes: BTreeMap<ThreadId, u32>,
}

/// Once the mask of a thread was written this many times in a cycle, the thread alone causes no further round, because
/// the program changes the mask as fast as pjw. The next cycle writes the mask again if it is still wrong.
const MAX_MASK_WRITES: u32 = 3;

/// A new process of a job whose affinity mask pjwd changed even before any scan had read the process. pjwd does this
/// only if the mask differs from the set of online PUs (logical CPUs) that the job holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConfinedNewProcess {
    /// The process id (pid).
    pub pid: Pid,
    /// The time of the fork event of the process, in ns since boot.
    pub forked_at: Nanos,
    /// The time at which pjwd changed the affinity mask of the process.
    pub confined_at: Instant,
}

/// The process events (fork, exec, exit) that were read from the kernel in a period: how many, and whether
/// events were lost. The period is the time between two calls of
/// [`Warden::take_event_count`](crate::warden::Warden::take_event_count).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct EventCount {
    /// The number of events that were read in the period.
    pub count: usize,
    /// Whether events were lost in the period, because the kernel dropped them or because pjwd had no room for
    /// them. `count` does not include lost events.
    pub events_lost: bool,
    /// Whether the kernel was still dropping events when pjwd last read events. The kernel starts to drop
    /// events when its buffer overflows, and stops when pjwd has read the whole buffer.
    pub still_dropping: bool,
}

impl CycleReport {
    /// Adds `events`, the events of one round (scan, decision and changes), to this report. A process gets at most one
    /// event of the kind violation in each report: further ones are dropped.
    pub(super) fn add_events(&mut self, mut events: Vec<Event>) {
        let is_repeated = |event: &Event| {
            let mut violations = self.events.iter().filter(|earlier| earlier.kind == EventKind::Violation);
            violations.any(|earlier| earlier.job == event.job && earlier.pid == event.pid)
        };
        events.retain(|event| event.kind != EventKind::Violation || !is_repeated(event));
        self.events.append(&mut events);
    }

    /// Adds `release` to this report: the results of further rounds (scan, decision and changes), which released a new
    /// job because the kernel refused its affinity masks. The replies in this report do not change.
    pub(super) fn add_release(&mut self, release: CycleReport) {
        self.add_events(release.events);
        self.ended_jobs.extend(release.ended_jobs);
        self.mask_outcomes.extend(release.mask_outcomes);
        self.cpuset_outcomes.extend(release.cpuset_outcomes);
        self.newly_planned.extend(&release.newly_planned);
        self.plan_warnings = release.plan_warnings;
    }

    /// Counts for each thread how often its affinity mask was changed in this cycle. `outcomes` are the mask changes
    /// of the last round (scan, decision and changes) with their results. Returns true if another round is useful:
    /// the last round changed the mask of a thread that has had fewer than [`MAX_MASK_WRITES`] changes.
    pub(super) fn count_mask_changes(&mut self, outcomes: &[(MaskAction, MaskOutcome)]) -> bool {
        let mut is_round_useful = false;
        for (action, outcome) in outcomes {
            if matches!(outcome, MaskOutcome::Done { .. }) {
                let writes = self.mask_writes.entry(action.thread).or_default();
                *writes += 1;
                is_round_useful |= *writes < MAX_MASK_WRITES;
            }
        }
        is_round_useful
    }

    /// Replaces the replies to some of the `commands` by refusals: to each command that made a new job for processes
    /// that have all ended. The job has then ended too. `state` has the present jobs and processes.
    pub(super) fn refuse_ended_jobs(&mut self, commands: &[Command], state: &WardenState) {
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

/// Returns one refusal for each of the `commands`, because the journal could not be written. `fault` is the reason of
/// the failed write.
pub(super) fn refuse_unrecorded_commands(commands: &[Command], fault: &str) -> Vec<Result<Reply, Refusal>> {
    commands.iter().map(|_| Err(Refusal::JournalFailed { fault: fault.to_owned() })).collect()
}

/// Returns whether `command` releases jobs. A release is carried out also if it can't be recorded: it changes only what
/// is in the journal already. A daemon that is killed before the next record takes the jobs up again, and still has
/// their original masks.
pub(super) fn is_release(command: &Command) -> bool {
    matches!(command, Command::Release { .. } | Command::ReleaseAll { .. } | Command::Undo { .. })
}

/// Returns whether all `commands` release jobs. False if there are no commands.
pub(super) fn only_releases(commands: &[Command]) -> bool {
    !commands.is_empty() && commands.iter().all(is_release)
}
