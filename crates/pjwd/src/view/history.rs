//! The event history: a bounded list of events, shared by all clients that read them.
//!
//! No user can push out the events of other users: refusals have a list of their own, and each job has its own
//! history.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use pjw_core::event::EventKind;
use pjw_ipc::{
    call::Reply,
    wire::{Event, Job},
};
use tokio::sync::{broadcast, mpsc};

use super::to_wire::format_rfc3339;

/// The largest number of events for `events`, without refusals.
const MAX_EVENTS: usize = 2000;
/// The largest number of refusals.
const MAX_REFUSALS: usize = 200;
/// The largest number of events per job, for `show`.
const MAX_EVENTS_OF_A_JOB: usize = 100;
/// With this many job histories, the histories of ended jobs are removed.
const MAX_HISTORIES: usize = 500;
/// The largest number of events that a subscriber may be behind. Beyond that, the subscriber loses the oldest events.
const BACKLOG: usize = 1024;

/// The latest events of the daemon and of each job. `pjwctl events` and `pjwctl show` print these events. New events
/// are also sent to the clients that subscribed.
#[derive(Debug)]
pub struct EventHistory {
    /// The number of events since the start of the daemon.
    count: u64,
    /// The latest events except refusals, oldest first. Each has its number, counted from 1 since the start of the
    /// daemon.
    events: VecDeque<(u64, Arc<Event>)>,
    /// The latest refusals of commands, each with its number as in `events`. Refusals are separate, so that no user
    /// can push out other events.
    refusals: VecDeque<(u64, Arc<Event>)>,
    /// The latest events of each job, by job id.
    histories: BTreeMap<String, JobHistory>,
    /// Sends each new event to the subscribers.
    live: broadcast::Sender<Arc<Event>>,
}

/// The latest events of one job. A later job may have the same id: `since` tells the two apart.
#[derive(Debug, Default)]
struct JobHistory {
    /// The time at which the job was made, as the status shows it. Empty if the job had ended before its first event
    /// was stored.
    since: String,
    events: VecDeque<Arc<Event>>,
}

impl Default for EventHistory {
    fn default() -> Self {
        Self {
            count: 0,
            events: VecDeque::new(),
            refusals: VecDeque::new(),
            histories: BTreeMap::new(),
            live: broadcast::Sender::new(BACKLOG),
        }
    }
}

impl EventHistory {
    /// Stores `event` in the list of all events and in the list of its job, and sends the event to the subscribers.
    /// `jobs` are the jobs that exist. The daemon keeps the last 2000 events, the last 200 refusals of commands, and
    /// the last 100 events of each job. Older events are dropped. A refusal is added to the list of its job only if the
    /// job already has a list.
    ///
    /// The whole list of a job is dropped in two cases:
    ///
    /// - At least 500 jobs have a list, and an event of a job without a list arrives. The lists of all ended jobs are
    ///   then dropped.
    /// - A new job with the same id gets cores or begins to wait for them. The list then starts again for the new job.
    pub fn record(&mut self, event: Arc<Event>, jobs: &[Arc<Job>]) {
        self.count += 1;
        let is_refusal = event.event == EventKind::Refused.name();
        let (list, limit) =
            if is_refusal { (&mut self.refusals, MAX_REFUSALS) } else { (&mut self.events, MAX_EVENTS) };
        push_bounded(list, (self.count, Arc::clone(&event)), limit);
        let starts_history = !is_refusal && !event.job.is_empty();
        if starts_history || self.histories.contains_key(&event.job) {
            self.record_for_job(&event, jobs);
        }
        // There may be no subscriber.
        let _ = self.live.send(event);
    }

    /// Stores `event` in the history of its job, as [`EventHistory::record`] describes. `jobs` are the jobs that exist.
    fn record_for_job(&mut self, event: &Arc<Event>, jobs: &[Arc<Job>]) {
        let is_new = !self.histories.contains_key(&event.job);
        if is_new && self.histories.len() >= MAX_HISTORIES {
            let present_jobs: BTreeSet<&str> = jobs.iter().map(|job| job.id.as_str()).collect();
            self.histories.retain(|job, _| present_jobs.contains(job.as_str()));
        }
        let history = self.histories.entry(event.job.clone()).or_default();
        let first_events = [EventKind::Assigned, EventKind::Queued].map(EventKind::name);
        if is_new || first_events.contains(&event.event.as_str()) {
            let job = jobs.iter().find(|job| job.id == event.job);
            let since = job.map(|job| job.since.as_str()).unwrap_or_default();
            if history.since != since {
                *history = JobHistory { since: since.to_owned(), events: VecDeque::new() };
            }
        }
        push_bounded(&mut history.events, Arc::clone(event), MAX_EVENTS_OF_A_JOB);
    }

    /// Returns the stored events of the current job `job`, oldest first. Events of an earlier job with the
    /// same id are not returned.
    #[must_use]
    pub fn events_of_job(&self, job: &Job) -> Vec<Arc<Event>> {
        let history = self.histories.get(&job.id).filter(|history| history.since == job.since);
        history.into_iter().flat_map(|history| &history.events).cloned().collect()
    }

    /// All events in the list, oldest first.
    fn all(&self) -> Vec<Arc<Event>> {
        let mut all: Vec<&(u64, Arc<Event>)> = self.events.iter().chain(&self.refusals).collect();
        all.sort_unstable_by_key(|(number, _)| *number);
        all.into_iter().map(|(_, event)| Arc::clone(event)).collect()
    }

    /// Returns a channel that receives all stored events, oldest first. After the stored events, the channel receives
    /// new events as they happen if `follow` is true. If false, the channel is closed after the stored events.
    /// If the receiver reads too slowly, it misses events and receives one event with the number of missed events.
    /// Must be called inside a [`tokio::task::LocalSet`].
    #[must_use]
    pub fn subscribe(&self, follow: bool) -> mpsc::Receiver<Reply> {
        let (sender, receiver) = mpsc::channel(64);
        let mut live = self.live.subscribe();
        let past_events = self.all();
        tokio::task::spawn_local(async move {
            for event in past_events {
                if sender.send(Reply::Event { event }).await.is_err() {
                    return;
                }
            }
            if !follow {
                return;
            }
            loop {
                let event = tokio::select! {
                    event = live.recv() => event,
                    () = sender.closed() => return,
                };
                let event = match event {
                    Ok(event) => event,
                    Err(broadcast::error::RecvError::Lagged(missed)) => Arc::new(overrun_event(missed)),
                    Err(broadcast::error::RecvError::Closed) => return,
                };
                if sender.send(Reply::Event { event }).await.is_err() {
                    return;
                }
            }
        });
        receiver
    }
}

/// Adds `item` at the end of `list`, and removes the oldest item if there are more than `limit`.
fn push_bounded<T>(list: &mut VecDeque<T>, item: T, limit: usize) {
    if list.len() == limit {
        list.pop_front();
    }
    list.push_back(item);
}

/// The event that tells one subscriber the number of events that it lost.
fn overrun_event(missed: u64) -> Event {
    let text = format!(
        "{missed} events are missing here, because this client reads too slowly: pjwctl events lists those still in memory"
    );
    let time = format_rfc3339(pjw_linux::sys::clock::now().wall_clock);
    Event { time, event: EventKind::Overrun.name().to_owned(), text, ..Event::default() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(kind: EventKind, job: &str, text: &str) -> Arc<Event> {
        let (event, job, text) = (kind.name().to_owned(), job.to_owned(), text.to_owned());
        Arc::new(Event { event, job, text, ..Event::default() })
    }

    /// The job `a`, which was made at the time `since`.
    fn job_a(since: &str) -> Arc<Job> {
        Arc::new(Job { id: "manual:a".to_owned(), since: since.to_owned(), ..Job::default() })
    }

    fn record(past_events: &mut EventHistory, kind: EventKind, job: &str, text: &str) {
        past_events.record(event(kind, job, text), &[job_a("12:00")]);
    }

    fn texts(events: &[Arc<Event>]) -> Vec<&str> {
        events.iter().map(|event| event.text.as_str()).collect()
    }

    #[test]
    fn refusals_push_out_no_other_events() {
        let mut past_events = EventHistory::default();
        record(&mut past_events, EventKind::Assigned, "manual:a", "first");
        for _ in 0..10_000 {
            record(&mut past_events, EventKind::Refused, "manual:b", "no");
        }
        record(&mut past_events, EventKind::Released, "manual:a", "last");
        let all = past_events.all();
        let all = texts(&all);
        assert_eq!((all[0], all[1], all[all.len() - 1]), ("first", "no", "last"), "in order");
        assert_eq!(all.len(), MAX_REFUSALS + 2);
        assert_eq!(texts(&past_events.events_of_job(&job_a("12:00"))), ["first", "last"]);
        assert!(!past_events.histories.contains_key("manual:b"), "a refusal makes no job");
    }

    #[test]
    fn the_history_of_a_job_begins_with_the_job_and_not_with_an_earlier_one_of_its_name() {
        let mut past_events = EventHistory::default();
        let mut record = |kind, text: &str, jobs: &[Arc<Job>]| {
            past_events.record(event(kind, "manual:a", text), jobs);
            past_events.histories["manual:a"]
                .events
                .iter()
                .map(|event| event.text.clone())
                .collect::<Vec<_>>()
        };
        let (old, new) = ([job_a("12:00")], [job_a("13:00")]);
        record(EventKind::Assigned, "old", &old);
        record(EventKind::Revoked, "taken back", &old);
        assert_eq!(record(EventKind::Assigned, "again", &old), ["old", "taken back", "again"], "one job");
        record(EventKind::Released, "over", &[]);
        assert_eq!(record(EventKind::Assigned, "new", &new), ["new"]);
        assert_eq!(record(EventKind::Resized, "larger", &new), ["new", "larger"]);
        // The job ends and begins again before the status is published again.
        record(EventKind::Released, "over", &old);
        assert_eq!(record(EventKind::Queued, "waits", &old), ["waits"]);
        assert_eq!(record(EventKind::Assigned, "third", &old), ["waits", "third"]);
        assert_eq!(texts(&past_events.events_of_job(&old[0])), ["waits", "third"]);
        assert!(past_events.events_of_job(&new[0]).is_empty(), "a job that had no event yet");
        assert_eq!(past_events.all().len(), 9, "events lists them all");
    }

    #[test]
    fn events_of_one_job_push_out_no_history_of_another() {
        let mut past_events = EventHistory::default();
        record(&mut past_events, EventKind::Assigned, "manual:a", "assigned");
        record(&mut past_events, EventKind::Refused, "manual:a", "refused");
        for n in 0..10_000 {
            record(&mut past_events, EventKind::Confined, &format!("manual:b{}", n % 3000), "confined");
        }
        assert_eq!(texts(&past_events.events_of_job(&job_a("12:00"))), ["assigned", "refused"]);
        assert_eq!(past_events.all().len(), MAX_EVENTS + 1);
        assert!(past_events.histories.len() <= MAX_HISTORIES, "jobs that have ended are forgotten");
        for _ in 0..MAX_EVENTS_OF_A_JOB + 50 {
            record(&mut past_events, EventKind::Confined, "manual:a", "confined");
        }
        assert_eq!(past_events.events_of_job(&job_a("12:00")).len(), MAX_EVENTS_OF_A_JOB);
    }

    /// The next event that a subscriber receives.
    async fn hear(receiver: &mut mpsc::Receiver<Reply>) -> Option<Arc<Event>> {
        match receiver.recv().await {
            Some(Reply::Event { event }) => Some(event),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_slow_subscriber_gets_the_number_of_lost_events() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        tokio::task::LocalSet::new().block_on(&runtime, async {
            let mut past_events = EventHistory::default();
            record(&mut past_events, EventKind::Assigned, "manual:a", "before");
            let mut receiver = past_events.subscribe(true);
            assert_eq!(hear(&mut receiver).await.unwrap().text, "before");
            let more = BACKLOG + 500;
            for n in 0..more {
                record(&mut past_events, EventKind::Confined, "manual:a", &n.to_string());
            }
            let gap = hear(&mut receiver).await.unwrap();
            assert_eq!(gap.event, "overrun");
            let missed: usize = gap.text.split(' ').next().unwrap().parse().unwrap();
            assert!(missed >= 500 && !gap.time.is_empty(), "{gap:?}");
            for n in missed..more {
                assert_eq!(hear(&mut receiver).await.unwrap().text, n.to_string(), "and then goes on");
            }
        });
    }
}
