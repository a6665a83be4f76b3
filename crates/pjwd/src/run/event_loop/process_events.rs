//! The process events (fork, exec, exit) that the loop reads: which scans they make due, and what makes up for lost
//! events.

use std::time::{Duration, Instant};

use pjw_core::command::Command;
use pjw_core::event::{Event, EventKind};
use pjw_core::scan::ScanRequest;
use pjw_core::state::lineage::scan_queue::ScanUrgency;
use pjw_linux::sys::clock;

use super::EventLoop;
use crate::run::triggers::DueScans;
use crate::warden::EventCount;

/// After this many intervals without a lost event, the next lost event is reported again.
const OVERRUN_EPISODE_INTERVALS: u32 = 10;

impl EventLoop {
    /// Reads all pending process events (fork, exec, exit) of the kernel. Then checks the affinity masks of the new
    /// processes that processes of jobs have forked, and corrects them unless the CPU budget is overdrawn.
    pub(super) fn drain_events(&mut self) {
        if !self.has_process_events {
            return;
        }
        self.warden.read_process_events();
        let may_confine = self.budget.wait_time(Instant::now()).is_zero();
        self.warden.check_masks_of_new_forks(may_confine);
        let waited_since = self.netlink_paused_since.take();
        if waited_since.is_some() {
            self.lateness.record_events_put_off();
        }
        self.record_events_read(waited_since);
    }

    /// Records the process events (fork, exec, exit) that were read since the last call: their number, and the time
    /// since which they have waited for a scan. If events were lost, schedules a scan of all processes.
    /// `waited_since` is the time since which pjwd had put off the reading of events, `None` if it was not put off.
    pub(super) fn record_events_read(&mut self, waited_since: Option<Instant>) {
        let EventCount { count, events_lost, still_dropping } = self.warden.take_event_count();
        self.meter.count_process_events(count, events_lost);
        let urgency = self.warden.state().lineage.scan_queue.urgency();
        if urgency.is_some() {
            let since = waited_since.unwrap_or_else(Instant::now);
            self.pending_since.get_or_insert(since);
            if urgency != Some(ScanUrgency::Deferred) {
                self.job_pending_since.get_or_insert(since);
            }
        }
        if still_dropping {
            self.warden.set_fork_events_complete_since(None);
        } else if events_lost {
            self.restart_fork_tracking();
        }
        if events_lost {
            self.schedule_scan_after_overrun();
        }
    }

    /// Returns the time at which a process must be scanned again because its environment could not be read. `None` if
    /// there is no such process. `now` is the present time.
    pub(super) fn environment_retry_due(&self, now: Instant) -> Option<Instant> {
        let due = self.warden.state().lineage.scan_queue.next_environment_retry()?;
        Some(now + Duration::from_nanos(due.0.saturating_sub(clock::now().since_boot.0)))
    }

    /// Returns the request for the scan of the next cycle, which makes the scans `triggers` and executes `commands`.
    /// The scan also reads the processes whose environment could not be read and must be read again by now.
    pub(super) fn take_scan_request(&mut self, triggers: DueScans, commands: &[Command]) -> ScanRequest {
        let state = self.warden.state_mut();
        state.lineage.scan_queue.queue_environment_retries(clock::now().since_boot);
        triggers.take_scan_request(state, commands)
    }

    /// Records that pjwd receives every fork event from now on. Must be called after events were lost. If the kernel
    /// reports no process events to pjwd, records instead that fork events are not received.
    pub(super) fn restart_fork_tracking(&mut self) {
        let now = self.has_process_events.then(|| clock::now().since_boot);
        self.warden.set_fork_events_complete_since(now);
    }

    /// Schedules a full scan after process events were lost. If events were already lost less than one scan interval
    /// ago, the scan follows only after the interval, because more scans would lose even more events. Publishes an
    /// event if no events were lost for [`OVERRUN_EPISODE_INTERVALS`] intervals before.
    fn schedule_scan_after_overrun(&mut self) {
        let now = Instant::now();
        let interval = self.config.scan_interval();
        let elapsed = self.last_overrun.replace(now).map(|last| now.saturating_duration_since(last));
        if elapsed.is_none_or(|elapsed| elapsed > interval * OVERRUN_EPISODE_INTERVALS) {
            let text = "process events were lost; all processes are scanned again";
            self.publisher.publish_events(vec![Event::new(EventKind::Overrun, text)]);
        }
        if elapsed.is_none_or(|elapsed| elapsed > interval) {
            self.triggers.full_scan_due = true;
        } else {
            self.next_rescan = self.next_rescan.min(now + interval);
        }
    }
}
