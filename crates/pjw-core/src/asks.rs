//! Who asks for PUs outside its job's, behind a cpuset: the kernel keeps it inside, and leaves no trace in its mask.
//!
//! Where nothing but masks keeps a job, whoever asks for more gets it, is seen outside, and is told of and put back by
//! `confine.rs`.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use crate::confine::usable_grant;
use crate::cpuset::CpuSet;
use crate::event::{Event, EventKind};
use crate::job::JobId;
use crate::process::{Pid, ProcessId, Tid};
use crate::reconcile::Draft;
use crate::snapshot::{Asked, Nanos};
use crate::state::{Member, WardenState};

/// So many attempts of one job are told in a minute: a loop of short programs must not drown everybody else's events.
const MOST_IN_A_MINUTE: u32 = 32;
const MINUTE: Duration = Duration::from_secs(60);

/// Threads of members whose masks may change by what they, or others for them, asked for, which is told already.
pub(crate) type Askers = BTreeSet<(ProcessId, Tid)>;

/// Attempts to leave that were told, before the masks are looked at that came of them.
#[derive(Debug, Default)]
pub(crate) struct Told {
    /// The processes that were told of in this cycle.
    pub(crate) processes: BTreeSet<Pid>,
    /// The threads whose masks may be others by what is told.
    pub(crate) threads: Askers,
}

/// How many attempts of a job were told since a moment, a minute ago at most.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Lately {
    since: Nanos,
    told: u32,
}

/// An attempt: who, of which job, and what it holds.
struct Attempt<'a> {
    asked: &'a Asked,
    job: JobId,
    grant: CpuSet,
    wanted: CpuSet,
    /// Whose mask it was for, if that is a member's.
    thread: Option<(ProcessId, Tid)>,
}

/// Tells who asked for PUs that its job doesn't hold, once for each process. Grants and members are still those of the
/// time before this cycle, and who has just exited is still known.
pub(crate) fn tell(draft: &mut Draft<'_>) {
    let asked = &draft.seen.asked;
    if asked.is_empty() && draft.state.askers.is_empty() {
        return;
    }
    let mut attempts: BTreeMap<Pid, Vec<Attempt<'_>>> = BTreeMap::new();
    for attempt in asked.iter().filter_map(|asked| attempt(draft.state, asked)) {
        attempts.entry(attempt.asked.process).or_default().push(attempt);
    }
    for (&pid, attempts) in &attempts {
        let Some(first) = attempts.first() else { continue };
        let Some(and_more) = admit(draft, &first.job) else { continue };
        let text = sentence(first, attempts.len() - 1) + and_more;
        let mut event = Event::new(EventKind::Violation, text);
        event.tid = Some(first.asked.caller);
        draft.events.push(event.of(&first.job).at(pid).with_cpus(&first.wanted));
    }
    let now: Askers = attempts.values().flatten().filter_map(|attempt| attempt.thread).collect();
    draft.told.threads = draft.state.askers.union(&now).copied().collect();
    draft.told.processes = attempts.into_keys().collect();
    // Whoever was looked at has the mask that came of what it asked for before.
    let (seen, members) = (&draft.seen.processes, &draft.state.members);
    let waits = |process: &ProcessId| members.get(&process.pid).is_some_and(|member| member.id == *process);
    draft.state.askers.retain(|(process, _)| waits(process) && !seen.contains_key(&process.pid));
    draft.state.askers.extend(now);
}

/// Whether an attempt of this job is told, and what is added to the last one in a minute.
fn admit(draft: &mut Draft<'_>, job: &JobId) -> Option<&'static str> {
    let now = draft.now.since_boot;
    let jobs = &draft.state.jobs;
    draft.state.attempts.retain(|job, _| jobs.contains_key(job));
    let lately = draft.state.attempts.entry(job.clone()).or_default();
    if lately.told == 0 || Duration::from_nanos(now.0.saturating_sub(lately.since.0)) >= MINUTE {
        *lately = Lately { since: now, told: 0 };
    }
    lately.told += 1;
    match lately.told {
        1..MOST_IN_A_MINUTE => Some(""),
        MOST_IN_A_MINUTE => Some("; what else its job asks for in this minute is not told"),
        _ => {
            lately.told = MOST_IN_A_MINUTE;
            None
        }
    }
}

fn attempt<'a>(state: &WardenState, asked: &'a Asked) -> Option<Attempt<'a>> {
    let member = whose(state, asked)?;
    let job = state.jobs.get(&member.job).filter(|job| !job.let_go)?;
    let online = state.pool.online();
    let grant = usable_grant(job, &online)?;
    // What was asked before the job had these cores is no attempt to leave them.
    let since = job.grant.as_ref().map_or(Nanos::default(), |grant| grant.since);
    let wanted = asked.cpus.intersection(&online);
    let outside = !wanted.is_subset(&grant) && asked.at >= since && state.is_walled(member);
    let of_others = asked.target.is_some_and(|target| is_anothers(state, target, &member.job));
    let thread = whose_mask(state, asked, member);
    (outside && !of_others).then(|| Attempt { asked, job: member.job.clone(), grant, wanted, thread })
}

/// The member that asked. Whose process came and went between two looks belongs to its parent's job.
fn whose<'a>(state: &'a WardenState, asked: &Asked) -> Option<&'a Member> {
    let member =
        |pid: Pid| state.members.get(&pid).filter(|member| member.id.start.at_the_earliest() <= asked.at);
    if state.processes.contains_key(&asked.process) || state.leaving.contains_key(&asked.process) {
        return member(asked.process);
    }
    member(asked.process).or_else(|| member(asked.parent))
}

/// Whether a thread is known to be in another process than one of the job: a user may bind what else is its own.
fn is_anothers(state: &WardenState, target: Tid, job: &JobId) -> bool {
    let pid = Pid(target.0);
    state.processes.contains_key(&pid) && state.members.get(&pid).is_none_or(|member| member.job != *job)
}

/// The thread whose mask it was for, if it is one of the job's.
fn whose_mask(state: &WardenState, asked: &Asked, member: &Member) -> Option<(ProcessId, Tid)> {
    let tid = asked.target.unwrap_or(asked.caller);
    let has_it = |member: &&Member| member.threads.contains_key(&tid);
    let owner = Some(member).filter(has_it).or_else(|| state.members.of(&member.job).find(has_it))?;
    Some((owner.id, tid))
}

fn sentence(attempt: &Attempt<'_>, others: usize) -> String {
    let Attempt { asked, job, grant, wanted, .. } = attempt;
    let Asked { caller, process, comm, .. } = asked;
    let whom = asked.target.map(|target| format!(" for {target}")).unwrap_or_default();
    let kept = wanted.intersection(grant);
    let became = if asked.refused {
        format!("the kernel refused, for none of them is in {grant} of {job}")
    } else if kept.is_empty() {
        format!("the cpuset of {job} keeps it on {grant}")
    } else {
        format!("the cpuset of {job} kept it on {kept}")
    };
    let again = match others {
        0 => String::new(),
        1 => " (and once more)".to_owned(),
        others => format!(" (and {others} times more)"),
    };
    format!("thread {caller} of process {process} ({comm}) asked for {wanted}{whom}: {became}{again}")
}
