//! What happened lately, and telling it: a bounded memory of events, each kept once and shared by all who ask.
//!
//! Nobody can make the warden forget what happened to others. Refusals have a place of their own, because anybody can
//! have a wish refused; and each job has its own history.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use pjw_core::event::EventKind;
use pjw_ipc::call::Reply;
use pjw_ipc::wire::Event;
use tokio::sync::{broadcast, mpsc};

use crate::publish::rfc3339;

/// So many events are kept for `events`, refusals not counted.
const MOST_EVENTS: usize = 2000;
/// So many refusals.
const MOST_REFUSALS: usize = 200;
/// So many events of one job, for `show`.
const MOST_OF_A_JOB: usize = 100;
/// With the histories of so many jobs in memory, those of jobs that have ended are forgotten.
const MOST_HISTORIES: usize = 500;
/// A listener that is so far behind loses the oldest of what it has not read.
const BACKLOG: usize = 1024;

/// The memory.
#[derive(Debug)]
pub struct Past {
    /// How many events there have been.
    count: u64,
    events: VecDeque<(u64, Arc<Event>)>,
    refusals: VecDeque<(u64, Arc<Event>)>,
    histories: BTreeMap<String, VecDeque<Arc<Event>>>,
    live: broadcast::Sender<Arc<Event>>,
}

impl Default for Past {
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

impl Past {
    /// Remembers an event, and tells whoever listens. `jobs` are those that there are.
    pub fn note<'a>(&mut self, event: Arc<Event>, jobs: impl Iterator<Item = &'a str>) {
        self.count += 1;
        let is_refusal = event.event == EventKind::Refused.name();
        let (memory, most) =
            if is_refusal { (&mut self.refusals, MOST_REFUSALS) } else { (&mut self.events, MOST_EVENTS) };
        push((self.count, Arc::clone(&event)), memory, most);
        // A refusal makes no job.
        if !event.job.is_empty() && (!is_refusal || self.histories.contains_key(&event.job)) {
            if self.histories.len() >= MOST_HISTORIES && !self.histories.contains_key(&event.job) {
                let there: BTreeSet<&str> = jobs.collect();
                self.histories.retain(|job, _| there.contains(job.as_str()));
            }
            let history = self.histories.entry(event.job.clone()).or_default();
            push(Arc::clone(&event), history, MOST_OF_A_JOB);
        }
        // Nobody needs to listen.
        let _ = self.live.send(event);
    }

    /// What happened to a job lately.
    #[must_use]
    pub fn of_job(&self, job: &str) -> Vec<Arc<Event>> {
        self.histories.get(job).into_iter().flatten().cloned().collect()
    }

    /// Everything, in the order in which it happened.
    fn all(&self) -> Vec<Arc<Event>> {
        let mut all: Vec<&(u64, Arc<Event>)> = self.events.iter().chain(&self.refusals).collect();
        all.sort_unstable_by_key(|(number, _)| *number);
        all.into_iter().map(|(_, event)| Arc::clone(event)).collect()
    }

    /// The past, and, for who follows, what happens from now on: each event once and in order. Who reads too slowly is
    /// told how many were left out. Must be called inside a [`tokio::task::LocalSet`].
    #[must_use]
    pub fn tell(&self, follow: bool) -> mpsc::Receiver<Reply> {
        let (tell, told) = mpsc::channel(64);
        let mut live = self.live.subscribe();
        let past = self.all();
        tokio::task::spawn_local(async move {
            for event in past {
                if tell.send(Reply::Event { event }).await.is_err() {
                    return;
                }
            }
            if !follow {
                return;
            }
            loop {
                let event = tokio::select! {
                    event = live.recv() => event,
                    () = tell.closed() => return,
                };
                let event = match event {
                    Ok(event) => event,
                    Err(broadcast::error::RecvError::Lagged(missed)) => Arc::new(overrun(missed)),
                    Err(broadcast::error::RecvError::Closed) => return,
                };
                if tell.send(Reply::Event { event }).await.is_err() {
                    return;
                }
            }
        });
        told
    }
}

fn push<T>(item: T, memory: &mut VecDeque<T>, most: usize) {
    if memory.len() == most {
        memory.pop_front();
    }
    memory.push_back(item);
}

/// Of a listener, not of the machine: only this listener hears it.
fn overrun(missed: u64) -> Event {
    let text = format!(
        "{missed} events are missing here, because this listener reads too slowly: those still remembered are told \
         by pjwctl events"
    );
    let time = rfc3339(pjw_linux::clock::now().wall);
    Event { time, event: EventKind::Overrun.name().to_owned(), text, ..Event::default() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(kind: EventKind, job: &str, text: &str) -> Arc<Event> {
        let (event, job, text) = (kind.name().to_owned(), job.to_owned(), text.to_owned());
        Arc::new(Event { event, job, text, ..Event::default() })
    }

    fn note(past: &mut Past, kind: EventKind, job: &str, text: &str) {
        past.note(event(kind, job, text), ["manual:a"].into_iter());
    }

    fn texts(events: &[Arc<Event>]) -> Vec<&str> {
        events.iter().map(|event| event.text.as_str()).collect()
    }

    #[test]
    fn refusals_without_end_make_nobody_forget_anything_else() {
        let mut past = Past::default();
        note(&mut past, EventKind::Assigned, "manual:a", "first");
        for _ in 0..10_000 {
            note(&mut past, EventKind::Refused, "manual:b", "no");
        }
        note(&mut past, EventKind::Released, "manual:a", "last");
        let all = past.all();
        let all = texts(&all);
        assert_eq!((all[0], all[1], all[all.len() - 1]), ("first", "no", "last"), "in order");
        assert_eq!(all.len(), MOST_REFUSALS + 2);
        assert_eq!(texts(&past.of_job("manual:a")), ["first", "last"]);
        assert!(past.of_job("manual:b").is_empty(), "a refusal makes no job");
    }

    #[test]
    fn a_busy_job_takes_no_other_jobs_history() {
        let mut past = Past::default();
        note(&mut past, EventKind::Assigned, "manual:a", "assigned");
        note(&mut past, EventKind::Refused, "manual:a", "refused");
        for n in 0..10_000 {
            note(&mut past, EventKind::Confined, &format!("manual:b{}", n % 3000), "confined");
        }
        assert_eq!(texts(&past.of_job("manual:a")), ["assigned", "refused"]);
        assert_eq!(past.all().len(), MOST_EVENTS + 1);
        assert!(past.histories.len() <= MOST_HISTORIES, "jobs that have ended are forgotten");
        for _ in 0..MOST_OF_A_JOB + 50 {
            note(&mut past, EventKind::Confined, "manual:a", "confined");
        }
        assert_eq!(past.of_job("manual:a").len(), MOST_OF_A_JOB);
    }

    /// The text of the next event that a listener hears.
    async fn hear(told: &mut mpsc::Receiver<Reply>) -> Option<Arc<Event>> {
        match told.recv().await {
            Some(Reply::Event { event }) => Some(event),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_listener_that_lags_is_told_how_many_events_it_missed() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        tokio::task::LocalSet::new().block_on(&runtime, async {
            let mut past = Past::default();
            note(&mut past, EventKind::Assigned, "manual:a", "before");
            let mut told = past.tell(true);
            assert_eq!(hear(&mut told).await.unwrap().text, "before");
            let more = BACKLOG + 500;
            for n in 0..more {
                note(&mut past, EventKind::Confined, "manual:a", &n.to_string());
            }
            let gap = hear(&mut told).await.unwrap();
            assert_eq!(gap.event, "overrun");
            let missed: usize = gap.text.split(' ').next().unwrap().parse().unwrap();
            assert!(missed >= 500 && !gap.time.is_empty(), "{gap:?}");
            for n in missed..more {
                assert_eq!(hear(&mut told).await.unwrap().text, n.to_string(), "and then goes on");
            }
        });
    }
}
