//! The requests to the thread that changes cpusets: which the thread has not answered, since when it has given no
//! answer, and whether it has ended. The caller does the I/O and passes the time.
//!
//! ```text
//! Idle     --request-->         Working, since the request
//! Working  --answer-->          Working, since the answer; or Idle, if no request is open
//! any      --thread has ended-> Ended: each open change is refused, and so is each later one
//! ```
//!
//! Only the thread knows whether the kernel will complete a change. So a wait for the thread is counted from its last
//! answer: while the thread gives none, waits of the same length end once and then at once.

use std::collections::{BTreeSet, VecDeque};
use std::time::{Duration, Instant};

use pjw_core::cpuset_group::{CpusetAction, CpusetOutcome};
use pjw_core::ids::Tid;

use super::problem::CpusetThreadProblem;

/// How long the thread gives no answer before it is reported. A change waits for systemd and for locked processes for
/// some seconds at most.
const REPORT_DELAY: Duration = Duration::from_secs(20);

/// An answer of the thread: it has carried out the oldest open request.
#[derive(Debug)]
pub(super) enum Answer {
    /// The change of a cpuset has this outcome.
    Changed(CpusetOutcome),
    /// The affinity masks were restored.
    Restored,
}

/// A request that the thread has not answered.
#[derive(Debug)]
enum OpenRequest {
    /// Make this change of a cpuset.
    Change(Box<CpusetAction>),
    /// Restore affinity masks after the cgroups at these paths were removed.
    Restore(Vec<String>),
}

/// What is known of the thread.
#[derive(Debug, Default)]
enum ThreadState {
    /// The thread has answered each request.
    #[default]
    Idle,
    /// A request is open. The thread has given no answer since this time.
    Working(Instant),
    /// The thread has ended by a panic with this message.
    Ended(String),
}

/// The requests to the thread that changes cpusets, from the request until the outcome is taken.
#[derive(Debug, Default)]
pub(super) struct ThreadRequests {
    state: ThreadState,
    /// The requests without an answer, oldest first. The thread answers them in this order.
    open: VecDeque<OpenRequest>,
    /// The number of changes in `open`.
    open_changes: usize,
    /// The outcomes of changes that were not taken yet, in the order of the requests.
    finished: VecDeque<(CpusetAction, CpusetOutcome)>,
    /// The cgroups that were removed since the last request to restore masks. They wait because that one is open.
    removed: BTreeSet<String>,
}

impl ThreadRequests {
    /// Returns whether the thread has ended.
    pub(super) fn has_ended(&self) -> bool {
        matches!(self.state, ThreadState::Ended(_))
    }

    /// Returns whether the thread has answers to give.
    pub(super) fn has_open_requests(&self) -> bool {
        !self.open.is_empty()
    }

    /// Returns the number of changes without an outcome.
    pub(super) fn open_changes(&self) -> usize {
        self.open_changes
    }

    /// Adds a request to make the changes `actions` one after another. `now` is the present time.
    pub(super) fn add_changes(&mut self, actions: &[CpusetAction], now: Instant) {
        self.open_changes += actions.len();
        for action in actions {
            self.add(OpenRequest::Change(Box::new(action.clone())), now);
        }
    }

    /// Adds a request to restore affinity masks, unless one is open, or there is nothing to restore. Returns the paths
    /// of the request to send. `removed` has the paths of the cgroups that were removed since the last call. They wait
    /// for the next request if none is sent. `is_partition_ending` says whether masks are still to be restored after an
    /// earlier removal. `now` is the present time.
    pub(super) fn add_restore(
        &mut self,
        removed: Vec<String>,
        is_partition_ending: bool,
        now: Instant,
    ) -> Option<Vec<String>> {
        if self.has_ended() {
            return None;
        }
        self.removed.extend(removed);
        let is_open = self.open.iter().any(|request| matches!(request, OpenRequest::Restore(_)));
        if is_open || (self.removed.is_empty() && !is_partition_ending) {
            return None;
        }
        Some(self.add_restore_of_removed(now))
    }

    /// Adds a request to restore affinity masks if removed cgroups wait for it, even if an earlier such request is
    /// open. Returns the paths of the request to send. Must be called before [`ThreadRequests::add_changes`]: a change
    /// may make one of these cgroups again, and the thread must know of the removal first.
    pub(super) fn add_waiting_restore(&mut self, now: Instant) -> Option<Vec<String>> {
        (!self.removed.is_empty()).then(|| self.add_restore_of_removed(now))
    }

    fn add_restore_of_removed(&mut self, now: Instant) -> Vec<String> {
        let paths = Vec::from_iter(std::mem::take(&mut self.removed));
        self.add(OpenRequest::Restore(paths.clone()), now);
        paths
    }

    fn add(&mut self, request: OpenRequest, now: Instant) {
        if matches!(self.state, ThreadState::Idle) {
            self.state = ThreadState::Working(now);
        }
        self.open.push_back(request);
    }

    /// Returns the time until which the caller may wait for the thread. `max_wait` is the longest time for which the
    /// thread may give no answer. `None` if the caller may wait without a limit. `now` is the present time.
    pub(super) fn wait_deadline(&self, max_wait: Duration, now: Instant) -> Option<Instant> {
        let since = match self.state {
            ThreadState::Working(since) => since,
            ThreadState::Idle | ThreadState::Ended(_) => now,
        };
        since.checked_add(max_wait)
    }

    /// Records the answer of the thread to the oldest open request. `now` is the present time.
    pub(super) fn note_answer(&mut self, answer: Answer, now: Instant) {
        if let (Some(OpenRequest::Change(action)), Answer::Changed(outcome)) = (self.open.pop_front(), answer)
        {
            self.open_changes -= 1;
            self.finished.push_back((*action, outcome));
        }
        self.state = if self.open.is_empty() { ThreadState::Idle } else { ThreadState::Working(now) };
    }

    /// Records that the thread has ended by a panic with the message `cause`. No open change was completed. Must be
    /// called after all answers of the thread were recorded.
    pub(super) fn note_end(&mut self, cause: String) {
        for request in std::mem::take(&mut self.open) {
            if let OpenRequest::Change(action) = request {
                let outcome = outcome_without_thread(&action);
                self.finished.push_back((*action, outcome));
            }
        }
        self.open_changes = 0;
        self.removed.clear();
        self.state = ThreadState::Ended(cause);
    }

    /// Returns whether outcomes of changes can be taken.
    pub(super) fn has_finished(&self) -> bool {
        !self.finished.is_empty()
    }

    /// Removes and returns the changes with an outcome, in the order of the requests.
    pub(super) fn take_finished(&mut self) -> Vec<(CpusetAction, CpusetOutcome)> {
        std::mem::take(&mut self.finished).into()
    }

    /// Removes and returns the outcomes of those of the last `requested` changes that have one.
    pub(super) fn take_last_outcomes(&mut self, requested: usize) -> Vec<CpusetOutcome> {
        // The thread makes the changes in order, so the last outcomes are those of the last request.
        let count = requested.saturating_sub(self.open_changes);
        let last = self.finished.split_off(self.finished.len().saturating_sub(count));
        last.into_iter().map(|(_, outcome)| outcome).collect()
    }

    /// Returns what keeps the thread from its work. `None` if the thread has given an answer in the last 20 s, or has
    /// none to give. `thread` is the id of the thread. `now` is the present time.
    pub(super) fn problem(&self, thread: Tid, now: Instant) -> Option<CpusetThreadProblem> {
        match &self.state {
            ThreadState::Idle => None,
            ThreadState::Working(since) => {
                let duration = now.saturating_duration_since(*since);
                let cgroup = match self.open.front() {
                    Some(OpenRequest::Change(action)) => Some(action.cgroup_path().to_owned()),
                    Some(OpenRequest::Restore(paths)) => paths.first().cloned(),
                    None => None,
                };
                let problem = CpusetThreadProblem::Blocked { cgroup, duration, thread };
                (duration >= REPORT_DELAY).then_some(problem)
            }
            ThreadState::Ended(cause) => Some(CpusetThreadProblem::Ended { cause: cause.clone() }),
        }
    }
}

/// Returns the outcome of the change `action` after the thread has ended. Another attempt would end in the same way, so
/// it follows only after a scan of all processes, and masks keep the job meanwhile. A process stays in its cgroup, and
/// keeps the record of its original cgroup, to which the next pjwd moves it back.
pub(super) fn outcome_without_thread(action: &CpusetAction) -> CpusetOutcome {
    let reason = "the thread that changes cpusets has ended: restart pjwd".to_owned();
    match action.moved_process() {
        Some(_) => CpusetOutcome::NotMoved { reason },
        None => CpusetOutcome::Refused { reason },
    }
}

#[cfg(test)]
mod tests {
    use pjw_core::cpuset::CpuSet;
    use pjw_core::cpuset_group::{CgroupCreator, CpusetChange, CpusetSpec, JobCpuset};
    use pjw_core::ids::{Pid, ProcessId, StartTime};

    use super::*;

    const MAX_WAIT: Duration = Duration::from_millis(100);
    const THREAD: Tid = Tid(7);

    fn action(change: CpusetChange) -> CpusetAction {
        CpusetAction { job: "manual:a".parse().unwrap(), change, is_repair: false, reason: String::new() }
    }

    fn removal(path: &str) -> CpusetAction {
        let (creator, spec) = (CgroupCreator::Warden, CpusetSpec::from_cpus(CpuSet::new()));
        let job = "manual:a".parse().unwrap();
        action(CpusetChange::Remove { job_cpuset: JobCpuset { job, creator, path: path.to_owned(), spec } })
    }

    fn done() -> Answer {
        Answer::Changed(CpusetOutcome::Done { effective: None })
    }

    fn paths(paths: &[&str]) -> Vec<String> {
        paths.iter().map(|path| (*path).to_owned()).collect()
    }

    #[test]
    fn a_thread_without_an_answer_is_waited_for_once_until_it_answers() {
        let start = Instant::now();
        let at = |millis| start + Duration::from_millis(millis);
        let mut requests = ThreadRequests::default();
        requests.add_changes(&[removal("/a"), removal("/b")], start);
        assert_eq!(requests.wait_deadline(MAX_WAIT, start), Some(at(100)));
        requests.add_changes(&[removal("/c")], at(5000));
        assert_eq!(requests.wait_deadline(MAX_WAIT, at(5000)), Some(at(100)), "the wait has ended already");
        assert!(requests.take_last_outcomes(1).is_empty() && requests.open_changes() == 3);

        requests.note_answer(done(), at(6000));
        assert_eq!(requests.wait_deadline(MAX_WAIT, at(6050)), Some(at(6100)));
        requests.note_answer(done(), at(6060));
        requests.note_answer(done(), at(6070));
        assert!(!requests.has_open_requests());
        assert_eq!(requests.wait_deadline(MAX_WAIT, at(9000)), Some(at(9100)));
        assert_eq!(requests.wait_deadline(Duration::MAX, start), None);
        let cgroups: Vec<CpusetAction> =
            requests.take_finished().into_iter().map(|(action, _)| action).collect();
        assert_eq!(cgroups, [removal("/a"), removal("/b"), removal("/c")]);
    }

    #[test]
    fn a_blocked_thread_is_a_problem_with_its_cgroup_until_it_answers() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut requests = ThreadRequests::default();
        assert_eq!(requests.problem(THREAD, at(60)), None);
        requests.add_changes(&[removal("/a"), removal("/b")], start);
        assert_eq!(requests.problem(THREAD, at(19)), None);
        // Later requests do not hide the one that is blocked.
        requests.add_changes(&[removal("/c")], at(19));
        for seconds in [20, 21, 300] {
            let (cgroup, duration) = (Some("/a".to_owned()), Duration::from_secs(seconds));
            let expected = CpusetThreadProblem::Blocked { cgroup, duration, thread: THREAD };
            assert_eq!(requests.problem(THREAD, at(seconds)), Some(expected));
        }
        requests.note_answer(done(), at(301));
        assert_eq!(requests.problem(THREAD, at(302)), None);
        requests.note_answer(done(), at(303));
        let problem = requests.problem(THREAD, at(400));
        assert!(
            matches!(&problem, Some(CpusetThreadProblem::Blocked { cgroup: Some(path), .. }) if path == "/c"),
            "{problem:?}"
        );
    }

    #[test]
    fn a_request_to_restore_masks_is_not_repeated_while_one_is_open() {
        let now = Instant::now();
        let mut requests = ThreadRequests::default();
        assert_eq!(requests.add_restore(Vec::new(), false, now), None, "there is nothing to restore");
        assert_eq!(requests.add_restore(paths(&["/a"]), false, now), Some(paths(&["/a"])));
        for _ in 0..1000 {
            assert_eq!(requests.add_restore(Vec::new(), true, now), None);
            assert_eq!(requests.add_restore(paths(&["/b"]), true, now), None);
        }
        requests.note_answer(Answer::Restored, now);
        assert_eq!(requests.add_restore(Vec::new(), false, now), Some(paths(&["/b"])));

        // The thread must know that the cgroup was removed before it makes the cgroup again.
        assert_eq!(requests.add_waiting_restore(now), None);
        assert_eq!(requests.add_restore(paths(&["/c"]), true, now), None);
        assert_eq!(requests.add_waiting_restore(now), Some(paths(&["/c"])));
        requests.add_changes(&[removal("/c")], now);
        requests.note_answer(Answer::Restored, now);
        requests.note_answer(Answer::Restored, now);
        requests.note_answer(done(), now);
        assert!(!requests.has_open_requests() && requests.take_finished().len() == 1);
    }

    #[test]
    fn each_open_change_is_refused_when_the_thread_has_ended() {
        let now = Instant::now();
        let process = ProcessId { pid: Pid(7), start: StartTime(7) };
        let (from, to) = ("/a".to_owned(), "/session-1".to_owned());
        let move_back = action(CpusetChange::MoveBack { process, from, to });
        let mut requests = ThreadRequests::default();
        requests.add_changes(&[removal("/b"), move_back.clone(), removal("/a")], now);
        requests.note_answer(done(), now);
        assert_eq!(requests.add_restore(paths(&["/c"]), true, now), Some(paths(&["/c"])));
        requests.note_end("a bug".to_owned());
        let reason = "the thread that changes cpusets has ended: restart pjwd".to_owned();
        let expected = [
            (removal("/b"), CpusetOutcome::Done { effective: None }),
            // The record of the original cgroup stays.
            (move_back, CpusetOutcome::NotMoved { reason: reason.clone() }),
            (removal("/a"), CpusetOutcome::Refused { reason }),
        ];
        assert_eq!(requests.take_finished(), expected);
        assert!(requests.has_ended() && !requests.has_open_requests() && requests.open_changes() == 0);
        let problem = CpusetThreadProblem::Ended { cause: "a bug".to_owned() };
        assert_eq!(requests.problem(THREAD, now), Some(problem));
        assert_eq!(requests.add_restore(paths(&["/d"]), true, now), None);
        assert_eq!(requests.add_waiting_restore(now), None);
    }
}
