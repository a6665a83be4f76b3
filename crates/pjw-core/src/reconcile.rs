//! The heart: one cycle's decision, as a pure function.
//!
//! Facts, wishes, state and policy go in; a plan that leaves nothing to choose comes out, with the records to
//! write before it is carried out, and what was not done and why. The state becomes the next state; nothing
//! else changes. Time is part of the facts. The same input gives the same decision on any machine.
//!
//! ```text
//! Snapshot ─> facts ─> membership ─> asks ─> jobs ─> serve (commands) ─> membership ─> jobs ─> confine, balance ─> Plan
//! ```

use std::collections::BTreeSet;
use std::sync::{Arc, OnceLock};

use crate::command::{Command, Refusal, Reply};
use crate::cpuset::CpuSet;
use crate::event::Event;
use crate::facts::Origin;
use crate::job::Job;
use crate::plan::{Abstained, Plan};
use crate::policy::Policy;
use crate::process::{Pid, ThreadId};
use crate::record::Record;
use crate::snapshot::{Look, Moment, Scope, Snapshot};
use crate::state::WardenState;
use crate::stirred::Stirred;
use crate::touch::Touch;
use crate::wall::WallAction;
use crate::{asks, bindings, confine, facts, hotplug, jobs, membership, serve, strays};

/// After so many rescans the next one plans everything anew.
const RESCANS_PER_REVISION: u32 = 7;

/// What a cycle decided.
#[derive(Debug)]
#[must_use = "a decision that is not carried out is lost"]
pub struct Decision {
    /// To be written before anything of the plan is done.
    pub records: Vec<Record>,
    /// What to change.
    pub plan: Plan,
    /// What was not done, and why.
    pub abstained: Vec<Abstained>,
    /// What happened.
    pub events: Vec<Event>,
    /// The answers to the commands, in their order. They hold once the plan is carried out.
    pub replies: Vec<Result<Reply, Refusal>>,
    /// Where to look next, at once: at what the decision could not see yet, and at what the plan changes.
    pub look: Option<Look>,
    /// What was planned anew: all else is as it was.
    pub stirred: Stirred,
}

/// A decision in the making: what the phases hand on to each other.
pub(crate) struct Draft<'a> {
    pub(crate) state: &'a mut WardenState,
    pub(crate) policy: &'a Policy,
    pub(crate) now: Moment,
    /// Whether every process of the node was looked at.
    pub(crate) full: bool,
    /// Who was looked at.
    pub(crate) met: BTreeSet<Pid>,
    /// What was seen of them.
    pub(crate) seen: &'a Snapshot,
    /// Which attempts to leave were told without a look at masks.
    pub(crate) told: asks::Told,
    /// Whether PUs went off or came back since the last look.
    pub(crate) replugged: bool,
    /// Whether a process may belong to another job than before though nobody looked at it: a job came or went.
    pub(crate) jobs_changed: bool,
    /// Who became a member, or leaves, in this cycle.
    pub(crate) newcomers: BTreeSet<Pid>,
    /// Whose new mask may be of the kernel's writing.
    pub(crate) fresh: bindings::Fresh,
    /// What is not done with in this cycle.
    pub(crate) unsettled: Stirred,
    pub(crate) records: Vec<Record>,
    pub(crate) events: Vec<Event>,
    pub(crate) abstained: Vec<Abstained>,
}

/// Decides one cycle.
pub fn reconcile(
    state: &mut WardenState,
    snapshot: &Snapshot,
    commands: &[Command],
    policy: &Policy,
) -> Decision {
    let now = snapshot.taken;
    let full = snapshot.scope == Scope::Full;
    state.full_look_due &= !full;
    if !commands.is_empty() {
        state.stirred = Stirred::everything();
    } else if full {
        stir_by_rescan(state);
    }
    let mut draft = Draft {
        jobs_changed: full || state.stirred.is_everything(),
        state,
        policy,
        now,
        full,
        met: BTreeSet::new(),
        seen: snapshot,
        told: asks::Told::default(),
        replugged: false,
        newcomers: BTreeSet::new(),
        fresh: bindings::Fresh::new(),
        unsettled: Stirred::default(),
        records: Vec::new(),
        events: Vec::new(),
        abstained: Vec::new(),
    };

    facts::meet_all(&mut draft, snapshot);
    membership::map(&mut draft);
    asks::tell(&mut draft);
    facts::forget_gone(&mut draft, snapshot);
    jobs::end(&mut draft, snapshot);
    hotplug::replace_lost(&mut draft);
    let replies = serve::all(&mut draft, commands);
    membership::map(&mut draft);
    jobs::heed_schedulers(&mut draft, snapshot);
    jobs::serve_waiting(&mut draft);
    strays::settle(&mut draft);
    hotplug::report_short(&mut draft);
    let plan = confine::plan(&mut draft);

    tell_blindness(&mut draft, snapshot);

    let Draft { state, records, events, abstained, newcomers, mut unsettled, .. } = draft;
    let look = next_look(state, &plan, full, &newcomers);
    note_unsettled(&mut unsettled, &plan);
    let stirred = std::mem::replace(&mut state.stirred, unsettled);
    if state.members.take_changed() || records.iter().any(|record| matches!(record, Record::Wall(_))) {
        state.sleepers = OnceLock::new();
    }
    Decision { records, plan, abstained, events, replies, look, stirred }
}

/// A full rescan meets everybody, and whoever ran stirs itself. Jobs that hold no cores are planned as a whole, for what is
/// put back there is forgotten only by a rescan; and now and then so is everything, whatever was overlooked.
fn stir_by_rescan(state: &mut WardenState) {
    let Some(left) = state.rescans_left.checked_sub(1) else {
        state.rescans_left = RESCANS_PER_REVISION;
        state.stirred = Stirred::everything();
        return;
    };
    state.rescans_left = left;
    let unserved: Vec<_> = state.jobs.values().filter(|job| job.grant.is_none() || job.let_go).collect();
    unserved.iter().for_each(|job| state.stirred.add_job(&job.id));
}

/// What is changed is planned again, until nothing is left to change.
fn note_unsettled(stirred: &mut Stirred, plan: &Plan) {
    for wall in &plan.walls {
        stirred.add_job(&wall.job);
    }
    for action in &plan.actions {
        stirred.add(&action.job, action.thread.process.pid);
    }
}

/// What can't be looked at is neither there nor gone, and a person should know.
fn tell_blindness(draft: &mut Draft<'_>, snapshot: &Snapshot) {
    let Some(cause) = &snapshot.blind else { return };
    draft.state.full_look_due = true;
    draft.abstained.push(Abstained {
        job: None,
        pid: None,
        tid: None,
        code: "unseen",
        why: format!(
            "some processes could not be looked at ({cause}): what is known of them is kept as it is"
        ),
        remedy: "give pjwd more open files and memory (LimitNOFILE=, MemoryMax= of its unit)".to_owned(),
    });
}

/// What must be looked at before this cycle is over: watched processes whose threads are not known, threads
/// that the plan changes (to see that it worked, and who was born meanwhile), job directories not read yet.
fn next_look(state: &WardenState, plan: &Plan, full: bool, newcomers: &BTreeSet<Pid>) -> Option<Look> {
    let (members, leaving) = (state.members.values(), state.leaving.values());
    let everybody = members.chain(leaving).filter(|_| full);
    let newcomers = newcomers.iter().filter_map(|pid| state.watched(*pid));
    let watched = everybody.chain(newcomers);
    let unseen = watched.filter(|member| member.threads.is_empty()).map(|member| member.id.pid);
    let changed = plan.actions.iter().map(|action| action.thread.process.pid);
    // Who lives behind a wall that changes may have other masks then, and be elsewhere.
    let enclosed = plan.walls.iter().flat_map(|action| {
        state.members_of(&action.job).chain(state.leaving.values().filter(|member| member.job == action.job))
    });
    let moved = plan.walls.iter().filter_map(WallAction::process);
    let enclosed = enclosed.map(|member| member.id.pid).chain(moved.map(|process| process.pid));
    let pids: BTreeSet<_> = unseen.chain(changed).chain(enclosed).collect();
    let mut cgroups = state.unseen_places();
    cgroups.extend(plan.walls.iter().map(|action| action.path().to_owned()));
    (!pids.is_empty() || !cgroups.is_empty()).then(|| Look {
        scope: Scope::Partial(pids.clone()),
        threads_of: pids,
        cgroups,
        watch: Arc::default(),
    })
}

impl Draft<'_> {
    /// Remembers a job if it is new or changed.
    pub(crate) fn put_job(&mut self, job: Job) {
        if self.state.jobs.get(&job.id) != Some(&job) {
            self.state.stirred.add_job(&job.id);
            self.jobs_changed |= !self.state.jobs.contains_key(&job.id);
            self.records.push(Record::Job(job.clone()));
            self.state.jobs.insert(job.id.clone(), job);
        }
    }

    /// Remembers what a thread's mask was and what the warden makes of it.
    pub(crate) fn touch(&mut self, thread: ThreadId, before: CpuSet, set: CpuSet) {
        let known = self.state.touched.get(&thread);
        if known.is_some_and(|known| known.before == before && known.set == set) {
            return;
        }
        let touch = Touch::after(known, before, set, self.now.since_boot);
        self.carry_on(thread, touch);
    }

    /// Remembers that a thread was born with a mask of the warden's.
    pub(crate) fn inherit(&mut self, thread: ThreadId, origin: Origin, set: CpuSet) {
        let Origin { before, since } = origin;
        self.carry_on(thread, Touch::after(None, before, set, since));
    }

    /// Remembers what was done to a thread, by whatever name it was known so far.
    pub(crate) fn carry_on(&mut self, thread: ThreadId, touch: Touch) {
        let Touch { before, set, since, .. } = touch.clone();
        self.state.touched.insert(thread, touch);
        self.records.push(Record::Touched { thread, before, set, since });
    }

    /// Remembers that a thread has a mask of its own choice again.
    pub(crate) fn untouch(&mut self, thread: ThreadId) {
        if self.state.touched.remove(&thread).is_some() {
            self.records.push(Record::Untouched(thread));
        }
    }
}
