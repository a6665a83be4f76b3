//! Everything that can wake the warden, and how wake-ups that come close together become one cycle.
//!
//! An event only makes the next cycle come sooner and tells where to look. Losing every event costs latency,
//! never correctness: the timer looks anyway.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

use nix::sys::eventfd::{EfdFlags, EventFd};
use pjw_core::command::{Command, Refusal, Reply};
use pjw_core::newborn::Birth;
use pjw_core::process::Pid;
use pjw_core::snapshot::{Look, Scope};
use pjw_core::state::WardenState;
use pjw_linux::proc_events::ProcEvent;
use tokio::sync::oneshot;

use crate::question::{Answer, Question};

/// What the control server, or a signal, wants of the loop.
#[derive(Debug)]
pub enum Message {
    /// Change something.
    Command {
        /// What.
        command: Command,
        /// Where the answer goes, once it holds.
        reply: oneshot::Sender<Result<Reply, Refusal>>,
    },
    /// Tell something that the published view doesn't hold.
    Question {
        /// What.
        question: Question,
        /// Where the answer goes.
        answer: oneshot::Sender<Answer>,
    },
    /// Read the configuration again; the answer is what changed, or why the old one stays.
    Reload {
        /// Where the answer goes.
        reply: oneshot::Sender<Result<Vec<String>, String>>,
    },
    /// End, leaving every job as it is.
    Stop,
}

/// The loop's letter box: messages, and a bell that wakes it from `poll`.
#[derive(Debug)]
pub struct Inbox {
    messages: Receiver<Message>,
    bell: Arc<EventFd>,
}

/// Where others put letters in.
#[derive(Debug, Clone)]
pub struct Outbox {
    messages: Sender<Message>,
    bell: Arc<EventFd>,
}

/// Makes a letter box.
///
/// # Errors
/// If the kernel has no descriptor left for the bell.
pub fn letter_box() -> nix::Result<(Outbox, Inbox)> {
    let bell = Arc::new(EventFd::from_flags(EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_CLOEXEC)?);
    let (sender, receiver) = channel();
    Ok((Outbox { messages: sender, bell: Arc::clone(&bell) }, Inbox { messages: receiver, bell }))
}

impl Outbox {
    /// Sends a message; says whether the loop is still there to read it.
    #[must_use]
    pub fn send(&self, message: Message) -> bool {
        let sent = self.messages.send(message).is_ok();
        // The bell can only fail to ring if it is ringing already.
        let _ = self.bell.write(1);
        sent
    }
}

impl Inbox {
    /// The descriptor that is readable when there is mail.
    #[must_use]
    pub fn bell(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }

    /// Everything that has come in.
    pub fn take(&self) -> Vec<Message> {
        // Silence the bell first: a letter that comes in between rings it again.
        let _ = self.bell.read();
        self.messages.try_iter().collect()
    }
}

/// Why the next cycle comes, and where it must look: the sum of the events since the last one.
#[derive(Debug, Default)]
pub struct Causes {
    /// The interval is over.
    pub timer: bool,
    /// The time between two rescans is over.
    pub rescan: bool,
    /// Everything must be looked at: events were lost, or are not heard.
    pub full: bool,
    /// Somebody waits for an answer: what it is made of is read anew, sleepers included.
    pub wishes: bool,
    /// Processes of nobody's job that run another program: a scheduler's job may begin. Their look can wait a moment.
    strangers: BTreeSet<Pid>,
    /// Processes that did something worth a look.
    processes: BTreeSet<Pid>,
    /// Processes born to members, with the member they descend from. A middle link may come and go before
    /// anyone looks; the events still tell.
    births: BTreeMap<Pid, Birth>,
    /// Processes of nobody's job that were born since the last rescan and have not ended, and whether they had more than
    /// one thread: then the first may end before them.
    unmet: BTreeMap<Pid, bool>,
    /// The births of the cycle before: a process may be seen to be gone before its last child is heard of.
    older_births: BTreeMap<Pid, Birth>,
    /// Of everybody who was born to a member and whose end was not heard of yet, that member: a look may find somebody gone
    /// some cycles after its birth, and before its last child is heard of.
    lines: BTreeMap<Pid, Pid>,
}

/// Whom events concern.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Urgency {
    /// Processes of jobs: at once.
    Jobs,
    /// Others: soon.
    Strangers,
}

/// Births are remembered for so many processes of jobs at most, and of others; a storm beyond that is left to a full look.
const MOST_BIRTHS: usize = 65_536;

/// Longer lines of processes that all ended unheard of are nobody's work.
const LONGEST_LINE: usize = 64;

impl Causes {
    /// Takes in what the kernel told, as far as it concerns anybody. Says whether more were born to members than can be
    /// remembered.
    pub fn note(&mut self, events: &[ProcEvent], state: &WardenState) -> bool {
        let watched = |pid: &Pid| state.members.contains_key(pid) || state.leaving.contains_key(pid);
        let mut births_lost = false;
        for event in events {
            match event {
                ProcEvent::Fork { parent, child, at } => {
                    let line = || self.birth_of(*parent).or_else(|| self.line_of(*parent, watched));
                    let ancestor = if watched(parent) { Some(*parent) } else { line() };
                    self.draw_line(*child, ancestor);
                    match ancestor {
                        Some(_) if self.births.len() >= MOST_BIRTHS => births_lost = true,
                        Some(ancestor) => {
                            self.births.insert(*child, Birth { ancestor, at: *at });
                            self.processes.insert(*child);
                        }
                        // A look at everything meets those who are still there.
                        None if self.unmet.len() >= MOST_BIRTHS => self.full = true,
                        None => {
                            self.unmet.insert(*child, false);
                        }
                    }
                }
                ProcEvent::Exec { pid } if watched(pid) || self.birth_of(*pid).is_some() => {
                    self.processes.insert(*pid);
                }
                ProcEvent::Exec { pid } => {
                    self.strangers.insert(*pid);
                }
                ProcEvent::Exit { pid } => {
                    if watched(pid) || self.birth_of(*pid).is_some() {
                        self.processes.insert(*pid);
                    }
                    // Nobody is born to it any more, and its number may be another's soon.
                    self.births.remove(pid);
                    self.older_births.remove(pid);
                    self.lines.remove(pid);
                    if self.unmet.get(pid) == Some(&false) {
                        self.unmet.remove(pid);
                    }
                }
                ProcEvent::ThreadBorn { pid, .. } => {
                    if let Some(has_threads) = self.unmet.get_mut(pid) {
                        *has_threads = true;
                    }
                }
                ProcEvent::Session { .. } | ProcEvent::ThreadExit { .. } => {}
            }
        }
        births_lost
    }

    /// Whether the timer or a rescan is a reason for a cycle.
    #[must_use]
    pub fn are_due(&self) -> bool {
        self.timer || self.is_rescan()
    }

    /// Whether not only jobs are looked at.
    #[must_use]
    pub fn is_rescan(&self) -> bool {
        self.rescan || self.full
    }

    /// Whether events are one, of jobs or of strangers.
    #[must_use]
    pub fn events(&self) -> Option<Urgency> {
        match (self.processes.is_empty(), self.strangers.is_empty()) {
            (false, _) => Some(Urgency::Jobs),
            (true, false) => Some(Urgency::Strangers),
            (true, true) => None,
        }
    }

    /// Who was born lately to which member.
    #[must_use]
    pub fn births(&self) -> BTreeMap<Pid, Birth> {
        self.older_births.iter().chain(&self.births).map(|(&child, &birth)| (child, birth)).collect()
    }

    /// The member a process descends from, if it was born lately.
    fn birth_of(&self, pid: Pid) -> Option<Pid> {
        self.births.get(&pid).or_else(|| self.older_births.get(&pid)).map(|birth| birth.ancestor)
    }

    /// The nearest ancestor that is a member still.
    fn line_of(&self, pid: Pid, watched: impl Fn(&Pid) -> bool) -> Option<Pid> {
        let up = |pid: &Pid| self.lines.get(pid).copied();
        std::iter::successors(up(&pid), up).take(LONGEST_LINE).find(watched)
    }

    /// Remembers whom a child descends from, or that it is nobody's: its number may have been another's, whose end was not
    /// heard of.
    fn draw_line(&mut self, child: Pid, ancestor: Option<Pid>) {
        self.lines.remove(&child);
        if let Some(ancestor) = ancestor.filter(|_| self.lines.len() < MOST_BIRTHS) {
            self.lines.insert(child, ancestor);
        }
    }

    /// Events were lost: ends may be among them, and numbers be given again.
    pub fn forget_lines(&mut self) {
        self.lines.clear();
    }

    /// Starts the sum anew after a cycle.
    pub fn clear(&mut self) {
        let older_births = std::mem::take(&mut self.births);
        let unmet = if self.is_rescan() { BTreeMap::new() } else { std::mem::take(&mut self.unmet) };
        let lines = std::mem::take(&mut self.lines);
        *self = Self { older_births, unmet, lines, ..Self::default() };
    }

    /// Where to look.
    pub fn look(&self, state: &mut WardenState) -> Look {
        let who_told = self.processes.union(&self.strangers);
        if !self.are_due() {
            let threads_of: BTreeSet<Pid> = who_told.copied().collect();
            let scope = Scope::Partial(threads_of.clone());
            return Look { scope, threads_of, cgroups: BTreeSet::new(), watch: Arc::default() };
        }
        let mut look = match (self.full, self.rescan) {
            (true, _) if self.wishes => state.regular_look(true),
            (true, _) => state.full_rescan(),
            (false, true) => state.rescan(),
            (false, false) => state.regular_look(false),
        };
        if let Scope::Partial(pids) = &mut look.scope {
            pids.extend(who_told);
            if self.rescan {
                pids.extend(self.unmet.keys());
            }
        }
        look
    }
}

#[cfg(test)]
mod tests {
    use pjw_core::cpuset::CpuSet;
    use pjw_core::membership::Evidence;
    use pjw_core::process::{ProcessId, StartTime, Tid};
    use pjw_core::snapshot::Nanos;
    use pjw_core::state::Member;
    use pjw_core::topology::{Regular, Topology};

    use super::*;

    fn state() -> WardenState {
        let shape =
            Regular { packages: 1, numa_per_package: 1, l3_per_numa: 1, cores_per_l3: 4, pus_per_core: 1 };
        let mut state = WardenState::new(Topology::regular(shape), &CpuSet::new());
        (state.births_heard_since, state.rescans_left, state.full_look_due) = (Some(Nanos(0)), 7, false);
        state
    }

    /// A member of a job.
    fn enrolled(state: &mut WardenState, pid: u32) -> u32 {
        let member = Member {
            id: ProcessId { pid: Pid(pid), start: StartTime(1) },
            job: "a".parse().unwrap(),
            evidence: Evidence::Registered,
            inherited: None,
            met: None,
            threads: BTreeMap::new(),
        };
        state.members.insert(member);
        pid
    }

    fn birth(child: u32) -> ProcEvent {
        ProcEvent::Fork { parent: Pid(1), child: Pid(child), at: Nanos(1) }
    }

    #[test]
    fn a_rescan_meets_who_was_born_to_nobodys_process_since_the_last_one() {
        let (mut state, mut causes) = (state(), Causes::default());
        let thread = ProcEvent::ThreadBorn { pid: Pid(22), tid: Tid(23) };
        let ends = [21, 22].map(|pid| ProcEvent::Exit { pid: Pid(pid) });
        causes.note(&[birth(20), birth(21), birth(22), thread], &state);
        causes.note(&ends, &state);
        assert_eq!(causes.events(), None, "nobody is in a hurry");
        causes.timer = true;
        assert_eq!(causes.look(&mut state).scope, Scope::Partial(BTreeSet::new()));
        causes.clear();
        causes.rescan = true;
        let there = Scope::Partial(BTreeSet::from([Pid(20), Pid(22)]));
        assert_eq!(causes.look(&mut state).scope, there, "the threads of 22 may go on");
        causes.clear();
        causes.rescan = true;
        assert_eq!(causes.look(&mut state).scope, Scope::Partial(BTreeSet::new()), "it was met");
    }

    #[test]
    fn a_child_of_who_was_found_gone_before_its_end_was_heard_of_descends_from_its_parent() {
        let (mut state, mut causes) = (state(), Causes::default());
        let fork = |parent, child| ProcEvent::Fork { parent: Pid(parent), child: Pid(child), at: Nanos(1) };
        let member = enrolled(&mut state, 10);
        causes.note(&[fork(member, 20)], &state);
        // 20 was looked at, ran for some cycles, and was found gone before what it did last is heard.
        for _ in 0..3 {
            causes.clear();
        }
        causes.note(&[fork(20, 21), ProcEvent::Exit { pid: Pid(20) }, fork(20, 22)], &state);
        assert_eq!(causes.births().get(&Pid(21)).map(|birth| birth.ancestor), Some(Pid(member)));
        assert_eq!(causes.births().get(&Pid(22)), None, "that is another of the same number");
        causes.forget_lines();
        causes.clear();
        causes.clear();
        causes.note(&[fork(21, 23)], &state);
        assert_eq!(causes.births().get(&Pid(23)), None, "its end may be among what was lost");
    }

    #[test]
    fn who_asks_for_a_look_at_everything_gets_it_though_a_rescan_is_due_too() {
        let (mut state, mut causes) = (state(), Causes::default());
        (causes.rescan, causes.full) = (true, true);
        assert_eq!(causes.look(&mut state).scope, Scope::Full);
    }

    #[test]
    fn more_births_than_can_be_remembered_are_a_reason_to_look_at_everything() {
        let (state, mut causes) = (state(), Causes::default());
        let most = u32::try_from(MOST_BIRTHS).unwrap();
        let births = |first: u32| -> Vec<ProcEvent> { (first..=first + most).map(birth).collect() };
        assert!(!causes.note(&births(10), &state), "a full look meets those of nobody's job");
        assert!(causes.full);
        causes.births.insert(Pid(1), Birth { ancestor: Pid(2), at: Nanos(1) });
        assert!(!causes.note(&[birth(9)], &state), "and they take no room from members' children");
        assert_eq!(causes.birth_of(Pid(9)), Some(Pid(2)));
        assert!(causes.note(&births(10), &state), "whose line is lost when they are too many");
    }
}
