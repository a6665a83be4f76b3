//! One cycle: observe, reconcile, audit, journal, apply, and again until nothing is left to do.
//!
//! Generic over the node and the journal: the same code runs on the kernel and on the fake one. A cycle is a
//! few short rounds, because a decision may need a closer look (the threads of a process that just became a
//! member) and because threads are born while others are put inside: the next round sees them.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use pjw_core::audit::audit;
use pjw_core::command::{Command, Refusal, Reply};
use pjw_core::cpuset::CpuSet;
use pjw_core::event::{of_outcomes, of_walls};
use pjw_core::job::JobId;
use pjw_core::newborn::{Birth, as_their_parents, expectations};
use pjw_core::node::{Journal, Node};
use pjw_core::plan::{Abstained, Action, ActionKind, Outcome, Plan};
use pjw_core::policy::{Mode, Policy};
use pjw_core::process::{Pid, ProcessId, ThreadId};
use pjw_core::reconcile::{Decision, reconcile};
use pjw_core::record::Record;
use pjw_core::snapshot::{Asked, Claims, Look, Moment, Nanos, Scope, Seen, Snapshot};
use pjw_core::state::WardenState;
use pjw_core::stirred::Stirred;
use pjw_core::topology::Topology;
use pjw_core::wall::{WallAction, WallOutcome};
use pjw_sources::Host;

use crate::events::Causes;

mod report;

pub use report::{Refused, Report, Troubles};

/// The kernel's answer to a mask that has nothing in common with the thread's cpuset, sched_setaffinity(2).
const EINVAL: i32 = nix::libc::EINVAL;

/// A cycle ends after so many rounds even if there is more to do; the next cycle goes on. A job that forks as
/// fast as it can must not keep the others waiting.
const MOST_ROUNDS: usize = 8;

/// So long a cycle may wait for systemd and the kernel to build walls.
const MOST_WALL_TIME: Duration = Duration::from_secs(5);

/// The warden: all state, the node, the journal.
#[derive(Debug)]
pub struct Warden<N, J> {
    node: N,
    journal: J,
    state: WardenState,
    policy: Policy,
    host: Host,
    troubles: Troubles,
    now: Moment,
    /// Who was born to which member since the last cycle, as far as events tell.
    births: BTreeMap<Pid, Birth>,
    /// What the node told once of its processes' marks and no state has taken in: looks whose decision was only
    /// tried, or taken back.
    heard: BTreeMap<ProcessId, Claims>,
    /// What the node told once of who asked for which PUs, in looks whose decision was only tried.
    asked: Vec<Asked>,
    unknown_pus: CpuSet,
    /// How long this cycle has been building.
    wall_time: Duration,
}

impl<N: Node, J: Journal> Warden<N, J> {
    /// A warden that starts from the records of its predecessor, if any.
    pub fn new(
        node: N,
        journal: J,
        mut state: WardenState,
        records: Vec<Record>,
        policy: Policy,
        host: Host,
    ) -> Self {
        for record in records {
            state.replay(record);
        }
        Self {
            node,
            journal,
            state,
            policy,
            host,
            troubles: Troubles::default(),
            now: Moment::default(),
            births: BTreeMap::new(),
            heard: BTreeMap::new(),
            asked: Vec::new(),
            unknown_pus: CpuSet::new(),
            wall_time: Duration::ZERO,
        }
    }

    /// What is known.
    pub fn state(&self) -> &WardenState {
        &self.state
    }

    /// What keeps the warden from its work.
    pub fn troubles(&self) -> &Troubles {
        &self.troubles
    }

    /// The rules in force.
    pub fn policy(&self) -> &Policy {
        &self.policy
    }

    /// When the last look was taken.
    pub fn now(&self) -> Moment {
        self.now
    }

    /// The node, to be told how to look.
    pub fn node_mut(&mut self) -> &mut N {
        &mut self.node
    }

    /// Where these causes make the next cycle look.
    pub fn look_for(&mut self, causes: &Causes) -> Look {
        causes.look(&mut self.state)
    }

    /// Notes who was born to which member, for the next cycle.
    pub fn note_births(&mut self, births: BTreeMap<Pid, Birth>) {
        self.births = births;
    }

    /// Notes since when every birth is heard of, or that they are not.
    pub fn hears_births_since(&mut self, since: Option<Nanos>) {
        self.state.births_heard_since = since;
        self.state.full_look_due = true;
    }

    /// The journal.
    pub fn journal(&self) -> &J {
        &self.journal
    }

    /// Puts new rules in force from the next cycle on. Who the warden itself is stays as it is.
    pub fn set_policy(&mut self, policy: Policy) {
        let Policy { own_pid, only_user, .. } = self.policy;
        let ground = std::mem::take(&mut self.policy.ground);
        self.state.pool.set_housekeeping(&policy.housekeeping);
        self.policy = Policy { own_pid, only_user, ground, ..policy };
        self.state.stirred = Stirred::everything();
        self.state.full_look_due = true;
    }

    /// PUs that are online and that the known machine doesn't have: they were off when it was first looked at.
    pub fn unknown_pus(&self) -> &CpuSet {
        &self.unknown_pus
    }

    /// Puts another machine in place of the known one, and the rules made for it. Jobs keep what they hold.
    pub fn set_machine(&mut self, topology: Topology, policy: Policy) {
        self.state.set_topology(topology, &policy.housekeeping);
        self.set_policy(policy);
    }

    /// Writes the journal anew, as short as the state is.
    ///
    /// # Errors
    /// If it can't be written; what was there still counts.
    pub fn rewrite_journal(&mut self) -> Result<(), J::Fault> {
        self.journal.rewrite(&self.state.records())
    }

    /// Runs one cycle: looks where it is told, serves the commands, and does what is to be done.
    pub fn cycle(&mut self, look: Look, commands: &[Command]) -> Report {
        if self.troubles.journal.is_some() {
            self.troubles.journal = self.rewrite_journal().err().map(|fault| fault.to_string());
        }
        self.wall_time = Duration::ZERO;
        let mut last_full_due = commands.iter().any(moves_processes);
        let known: BTreeSet<JobId> =
            if commands.is_empty() { BTreeSet::new() } else { self.state.jobs.keys().cloned().collect() };
        let asked = commands;
        let mut report = Report::default();
        if let Some(fault) = self.welcome(&mut report) {
            // What it decided is to be written before anything else is. Whom the look would have met is in no other.
            self.state.full_look_due = true;
            report.replies = all_unrecorded(commands, &fault);
            return report;
        }
        let mut next = Some(look);
        let mut commands = commands;
        for round in 0..=MOST_ROUNDS {
            let Some(look) = next.take() else { break };
            if round == MOST_ROUNDS {
                report.unfinished = true;
                break;
            }
            next = self.round(&look, commands, &mut report);
            commands = &[];
            if next.is_none() && last_full_due {
                // Children born while their parents were being put inside, or let go, are in no list yet.
                last_full_due = false;
                next = Some(self.state.regular_look(true));
            }
        }
        // Who had ended by then was told by no mask.
        report.welcomed.retain(|(newborn, _)| self.state.processes.contains_key(&newborn.process.pid));
        report.welcomed.iter().for_each(|(newborn, _)| self.state.is_born(*newborn));
        self.undo_unenforceable(asked, &known, &mut report);
        self.forget_old_troubles();
        report.births = std::mem::take(&mut self.births);
        report
    }

    /// Puts children that were born outside of where they should be right, before anything is read that takes longer. The
    /// look that follows meets them, whatever is done here. Returns why the journal can't be written, if it can't.
    fn welcome(&mut self, report: &mut Report) -> Option<String> {
        let expected = expectations(&self.state, &self.births);
        if expected.is_empty() || self.troubles.journal.is_some() {
            return None;
        }
        let glance = self.node.glance(&expected);
        let snapshot = as_their_parents(&self.state, &self.births, glance);
        if snapshot.processes.is_empty() {
            return None;
        }
        let _ = self.decide(&snapshot, &[], report);
        let done = Instant::now();
        let is_done = |outcome: &Outcome| matches!(outcome, Outcome::Done { .. });
        for (action, _) in report.outcomes.iter().filter(|(_, outcome)| is_done(outcome)) {
            self.state.set_at_birth(action);
            report.welcomed.push((action.thread, done));
        }
        self.troubles.journal.clone()
    }

    /// A new job none of whose named processes could be put on its cores was promised too early: the kernel said
    /// no to each, so it is let go again and its wish refused.
    fn undo_unenforceable(&mut self, asked: &[Command], known: &BTreeSet<JobId>, report: &mut Report) {
        let mut undone = Vec::new();
        for (command, reply) in asked.iter().zip(&mut report.replies) {
            let (Command::Assign(wish), Ok(Reply::Assigned(job))) = (command, &*reply) else { continue };
            let mine = report.outcomes.iter().filter(|(action, _)| action.job == job.id);
            let refused = mine.clone().find_map(|(_, outcome)| match outcome {
                Outcome::Refused { hint, .. } => Some(hint.clone()),
                Outcome::Done { .. } | Outcome::Gone => None,
            });
            let any_done = mine.clone().any(|(_, outcome)| matches!(outcome, Outcome::Done { .. }));
            let Some(why) =
                refused.filter(|_| !any_done && !wish.pids.is_empty() && !known.contains(&job.id))
            else {
                continue;
            };
            let job = job.id.clone();
            undone.push(Command::Release { job: job.clone(), caller: wish.caller });
            *reply = Err(Refusal::Unenforceable { job, why });
        }
        if !undone.is_empty() {
            let mut aside = Report::default();
            let look = self.state.regular_look(true);
            self.round(&look, &undone, &mut aside);
            report.events.extend(aside.events);
        }
    }

    /// What the next cycle would do, without doing it.
    pub fn dry_run(&mut self) -> (Plan, Vec<Abstained>) {
        let mut snapshot = self.observe(&self.state.regular_look(true));
        self.asked.extend(std::mem::take(&mut snapshot.asked));
        let mut state = self.state.clone();
        let mut decision = reconcile(&mut state, &snapshot, &[], &self.policy);
        let Plan { walls, mut actions } = std::mem::take(&mut decision.plan);
        // Only what the decision could not see is looked at more closely; what it would change stays unchanged.
        let planned: BTreeSet<_> = actions.iter().map(|action| action.thread.process.pid).collect();
        if let Some(mut look) = decision.look.take() {
            look.threads_of.retain(|pid| !planned.contains(pid));
            look.scope = Scope::Partial(look.threads_of.clone());
            snapshot = self.observe(&look);
            self.asked.extend(std::mem::take(&mut snapshot.asked));
            decision = reconcile(&mut state, &snapshot, &[], &self.policy);
            actions.extend(
                decision
                    .plan
                    .actions
                    .into_iter()
                    .filter(|action| !planned.contains(&action.thread.process.pid)),
            );
        }
        (Plan { walls, actions }, decision.abstained)
    }

    /// One round; returns where to look next, if there is more to do.
    fn round(&mut self, look: &Look, commands: &[Command], report: &mut Report) -> Option<Look> {
        let mut snapshot = self.observe(look);
        snapshot.asked.splice(..0, std::mem::take(&mut self.asked));
        self.decide(&snapshot, commands, report)
    }

    /// Decides by what was seen, and does it; returns where to look next, if there is more to do.
    fn decide(&mut self, snapshot: &Snapshot, commands: &[Command], report: &mut Report) -> Option<Look> {
        self.now = snapshot.taken;
        self.unknown_pus = snapshot.online.difference(self.state.topology.cpus());
        let before = (!commands.is_empty()).then(|| self.state.clone());
        let Decision { mut records, plan, abstained, events, replies, look, stirred } =
            reconcile(&mut self.state, snapshot, commands, &self.policy);
        report.abstained = abstained;
        report.stirred.extend(&stirred);

        let plan = self.audited(plan);
        if self.policy.mode == Mode::Observe {
            records.retain(|record| {
                !matches!(record, Record::Touched { .. } | Record::Untouched(_) | Record::Wall(_))
            });
            plan.actions.iter().for_each(|action| self.state.not_applied(action));
        }
        if let Err(fault) = self.journal.append(&records) {
            if before.is_none() {
                self.taken_in(snapshot);
            }
            return self.unrecorded(&fault, before, commands, &plan, report);
        }
        self.taken_in(snapshot);
        report.tell(events);
        report.replies.extend(replies);
        if self.policy.mode == Mode::Observe {
            return look.filter(|_| plan.actions.is_empty() && plan.walls.is_empty());
        }
        let Plan { walls, actions } = plan;
        let walls = self.build(walls);
        report.events.extend(of_walls(&walls));
        let outcomes = self.apply(actions);
        report.events.extend(of_outcomes(&self.state, &outcomes));
        let moved = outcomes.is_empty()
            || outcomes.iter().any(|(_, outcome)| matches!(outcome, Outcome::Done { .. }));
        // A wall that was refused leaves its job to masks: that is to be decided at once.
        let moved = moved || !walls.is_empty();
        report.outcomes.extend(outcomes);
        report.walls.extend(walls);
        look.filter(|_| moved)
    }

    fn observe(&mut self, look: &Look) -> Snapshot {
        let mut snapshot = self.node.observe(look);
        for seen in snapshot.processes.values_mut() {
            let Seen::Here(process) = seen else { continue };
            if let Some(marks) = &process.marks {
                let claims = pjw_sources::recognise(&process.comm, marks, &self.host, &self.policy.sources);
                self.heard.insert(process.id, claims);
            }
            process.claims = self.heard.get(&process.id).cloned();
            // An orphan's father is init, but events remember whom it descends from.
            if let Some(&Birth { ancestor, .. }) = self.births.get(&process.id.pid)
                && !self.state.members.contains_key(&process.parent)
                && !self.births.contains_key(&process.parent)
            {
                process.parent = ancestor;
            }
        }
        for asked in &mut snapshot.asked {
            let orphan = !self.state.members.contains_key(&asked.parent);
            if let Some(&Birth { ancestor, .. }) = self.births.get(&asked.process).filter(|_| orphan) {
                asked.parent = ancestor;
            }
        }
        snapshot
    }

    /// The plan without the actions of jobs that break an invariant. Fail open: what can't be right is not
    /// done, and said loudly; what is there stays as it is.
    fn audited(&mut self, plan: Plan) -> Plan {
        self.troubles.audit.clear();
        for violation in audit(&self.state, &plan, &self.policy) {
            self.troubles.audit.insert(violation.job().cloned(), violation.to_string());
        }
        let broken = &self.troubles.audit;
        if broken.is_empty() {
            return plan;
        }
        let sound = |job: &JobId| !broken.contains_key(&None) && !broken.contains_key(&Some(job.clone()));
        let (kept, dropped): (Vec<Action>, Vec<Action>) =
            plan.actions.into_iter().partition(|action| sound(&action.job));
        dropped.iter().for_each(|action| self.state.not_applied(action));
        let (walls, unsound): (Vec<WallAction>, Vec<WallAction>) =
            plan.walls.into_iter().partition(|action| sound(&action.job));
        // Masks keep a job whose wall can't be right.
        unsound.iter().for_each(|action| self.state.walls.not_done(action, "its plan failed the audit"));
        Plan { walls, actions: kept }
    }

    fn build(&mut self, actions: Vec<WallAction>) -> Vec<(WallAction, WallOutcome)> {
        let mut outcomes = Vec::with_capacity(actions.len());
        for action in actions {
            // The next cycle goes on: other jobs wait, and so does the watchdog.
            if self.wall_time >= MOST_WALL_TIME {
                break;
            }
            let begun = Instant::now();
            let outcome = self.node.build(&action);
            self.wall_time += begun.elapsed();
            if let WallOutcome::Refused { hint } = &outcome {
                self.state.walls.not_done(&action, hint);
            }
            outcomes.push((action, outcome));
        }
        outcomes
    }

    fn apply(&mut self, actions: Vec<Action>) -> Vec<(Action, Outcome)> {
        let mut outcomes = Vec::with_capacity(actions.len());
        for action in actions {
            let outcome = self.node.apply(&action);
            match &outcome {
                Outcome::Done { effective } => {
                    self.state.applied(&action, effective);
                    self.troubles.refused.remove(&action.thread);
                }
                Outcome::Gone => {}
                Outcome::Refused { errno: EINVAL, .. } if action.kind == ActionKind::Restore => {
                    self.state.out_of_reach(&action);
                }
                Outcome::Refused { hint, .. } => {
                    self.state.not_applied(&action);
                    let refused = Refused { job: action.job.clone(), hint: hint.clone() };
                    self.troubles.refused.insert(action.thread, refused);
                }
            }
            outcomes.push((action, outcome));
        }
        outcomes
    }

    /// What can't be remembered isn't done. Wishes are refused and leave no trace; facts that were seen stay
    /// known, and the next cycle tries to write everything anew.
    fn unrecorded(
        &mut self,
        fault: &J::Fault,
        before: Option<WardenState>,
        commands: &[Command],
        plan: &Plan,
        report: &mut Report,
    ) -> Option<Look> {
        let fault = fault.to_string();
        if let Some(before) = before {
            self.state = before;
            self.state.full_look_due = true;
            report.replies.extend(all_unrecorded(commands, &fault));
        } else {
            plan.actions.iter().for_each(|action| self.state.not_applied(action));
        }
        self.troubles.journal = Some(fault);
        None
    }

    /// What this look told is in the state now. What an earlier one told of others still waits for a look at them.
    fn taken_in(&mut self, snapshot: &Snapshot) {
        match &snapshot.scope {
            Scope::Full => self.heard.clear(),
            Scope::Partial(_) => self.heard.retain(|id, _| !snapshot.processes.contains_key(&id.pid)),
        }
    }

    fn forget_old_troubles(&mut self) {
        let alive = |thread: &ThreadId| {
            let member = self.state.members.get(&thread.process.pid);
            let known = member.and_then(|member| member.threads.get(&thread.tid));
            known.is_some_and(|known| known.start == thread.start)
        };
        self.troubles.refused.retain(|thread, _| alive(thread));
    }
}

/// Whether a command changes the masks of processes that have children all the time.
fn moves_processes(command: &Command) -> bool {
    match command {
        Command::Assign(wish) => !wish.pids.is_empty() || wish.session.is_some(),
        Command::Release { .. } | Command::ReleaseAll { .. } | Command::Defrag { .. } => true,
    }
}

/// The answers to wishes that can't be written down.
fn all_unrecorded(commands: &[Command], fault: &str) -> Vec<Result<Reply, Refusal>> {
    commands.iter().map(|_| Err(Refusal::Unrecorded { fault: fault.to_owned() })).collect()
}
