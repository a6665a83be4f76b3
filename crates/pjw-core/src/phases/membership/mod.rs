//! Membership: which process belongs to which job, by evidence in the order of trust (DESIGN section 5).
//!
//! Weaker evidence never replaces stronger evidence. The membership of a process (pid, start time) lasts until its
//! end, even if the process moves to another cgroup, session or parent. Any user can set the environment. So a
//! variable counts only for the owner of the job, and only if the job is known otherwise or an ancestor is the
//! scheduler's launcher. Otherwise a user could join the job of another user, or invent jobs to get more cores.

use crate::basics::{Comm, CpuSet, Pid, StartTime, Uid, prelude::*};
use crate::phases::{draft::CycleDraft, observe::update_threads, unassigned::adopting_job};
use crate::state::{KnownProcess, Member, WardenState, processes::MAX_GENERATIONS};
use crate::terms::{
    BatchRole, CgroupCreator, EndCondition, GrantedBy, Job, JobId, JobIdAttribute, JobProcessGrouping,
    JobReference, JobSource, MembershipEvidence, Observed, Policy, Process, ProvisionRule, Record,
};

pub(crate) mod released;
pub(crate) mod rule_change;

/// Makes processes members of the jobs to which they belong. These are processes without a job, and processes for which
/// a scan found stronger evidence for another job.
pub(crate) fn update_members(draft: &mut CycleDraft<'_>) {
    // A process without other evidence is adopted by the only job of its user, so all other jobs must be known.
    let adopts = draft.policy.adopt_unassigned_processes;
    while update_by_evidence(draft, false) || (adopts && update_by_evidence(draft, true)) {}
}

/// Makes processes members of the jobs to which they belong, parents before their children. Checks each process that
/// may belong to another job than before, and the children of each new member. Returns whether a process became a
/// member. `may_adopt` says whether a process without evidence may be adopted by a job of its user.
fn update_by_evidence(draft: &mut CycleDraft<'_>, may_adopt: bool) -> bool {
    // A child can only be mapped after its parent, so the processes are checked in the order of their starts. A session
    // can only be mapped after its first member, which may have started last: the caller repeats this.
    let mut has_new_member = false;
    let mut lookups = Lookups::default();
    let mut pending: BTreeSet<(StartTime, Pid)> =
        processes_to_check(draft).map(|known| in_start_order(&known.process)).collect();
    while let Some((_, pid)) = pending.pop_first() {
        let Some(known) = draft.state.processes.get(&pid) else { continue };
        let Some(found) = job_with_evidence(draft, known, &mut lookups, may_adopt) else { continue };
        lookups.owners.forget_changed(known);
        join_job(draft, pid, &found);
        let processes = &draft.state.processes;
        let children = processes.children_of(pid).filter_map(|child| processes.get(&child));
        pending.extend(children.map(|child| in_start_order(&child.process)));
        has_new_member = true;
    }
    has_new_member
}

/// Returns the key by which processes are sorted: older ones first, so that parents come before their children.
fn in_start_order(process: &Process) -> (StartTime, Pid) {
    (process.id.start, process.id.pid)
}

/// The processes that may belong to another job than before: the scanned processes, and those that a changed job
/// concerns.
fn processes_to_check<'a>(draft: &'a CycleDraft<'_>) -> Box<dyn Iterator<Item = &'a KnownProcess> + 'a> {
    let processes = &draft.state.processes;
    if draft.recheck_all {
        return Box::new(processes.values());
    }
    let pids: BTreeSet<Pid> = draft.scanned_pids().chain(draft.recheck.iter().copied()).collect();
    Box::new(pids.into_iter().filter_map(|pid| processes.get(&pid)))
}

/// The results of look-ups in one call of [`update_by_evidence`]. They are kept because many processes need the same
/// results.
#[derive(Default)]
struct Lookups {
    owners: GroupingOwners,
    launchers: Launchers,
}

/// The launchers of batch systems among a process and its ancestors, each with its user, by the pid of the process. A
/// launcher is a daemon whose children are processes of jobs, such as slurmstepd. The entries are kept, so that a chain
/// of thousands of nested processes is walked only once.
#[derive(Default)]
struct Launchers(BTreeMap<Pid, Vec<(JobSource, Uid)>>);

impl Launchers {
    /// Returns the launchers of batch systems (daemons such as slurmstepd) among the ancestors of `process`, each with
    /// its user. Stores the result for each ancestor, so that no ancestor is visited twice.
    fn of_ancestors(&mut self, state: &WardenState, process: &Process) -> Vec<(JobSource, Uid)> {
        let mut unknown: Vec<&KnownProcess> = Vec::new();
        let mut found = Vec::new();
        for ancestor in ancestors(state, process) {
            if let Some(known) = self.0.get(&ancestor.process.id.pid) {
                found.clone_from(known);
                break;
            }
            unknown.push(ancestor);
        }
        for ancestor in unknown.into_iter().rev() {
            if let BatchRole::Launcher(source) = ancestor.batch_identity.role {
                let launcher = (source, ancestor.process.uid);
                // A user can give the name of a launcher to each process of a chain.
                if !found.contains(&launcher) {
                    found.push(launcher);
                }
            }
            self.0.insert(ancestor.process.id.pid, found.clone());
        }
        found
    }

    /// Whether an ancestor is the launcher of the source. A process of the same user does not count: a user can give
    /// any name to a process.
    fn have_launched(&mut self, state: &WardenState, process: &Process, source: JobSource) -> bool {
        let counts = |uid: Uid| uid == Uid::ROOT || uid != process.uid;
        self.of_ancestors(state, process).into_iter().any(|(launched, uid)| launched == source && counts(uid))
    }
}

/// The jobs to which all processes of a session or process group belong. A session may have thousands of processes. So
/// each job is looked up once, and again only after a process has joined a job that may change the result.
#[derive(Default)]
struct GroupingOwners {
    /// By the kind and the id of the session or process group: the job, as the batch system says. `None` for no job.
    by_source: BTreeMap<(JobProcessGrouping, Pid), Option<JobId>>,
    /// By the id of the session: the job for which it was registered by `assign --session`.
    by_registration: BTreeMap<Pid, Option<JobId>>,
}

impl GroupingOwners {
    /// Removes the stored results that may change because the process `known` becomes a member of a job: those for its
    /// session, and for its process group.
    fn forget_changed(&mut self, known: &KnownProcess) {
        let Process { session, process_group: group, .. } = known.process;
        if known.batch_identity.jobs_with_own_grouping().next().is_some() {
            self.by_source.remove(&(JobProcessGrouping::Session, session));
            self.by_source.remove(&(JobProcessGrouping::ProcessGroup, group));
        }
        self.by_registration.remove(&session);
    }
}

/// The job to which a process belongs, with the evidence.
struct FoundJob {
    job: JobId,
    evidence: MembershipEvidence,
    /// The attribute of the process that names the job, such as its cgroup. `None` if other evidence decided.
    reference: Option<JobReference>,
}

/// Returns the job to which a process is to belong now, with the strongest evidence. A process without a job may join
/// any job. A member of a job changes only if the batch system's cgroup of the process names a job, and if its present
/// evidence is weaker.
///
/// - `lookups` keeps the results of look-ups for other processes.
/// - `may_adopt` says whether a process without other evidence can join the only job of its user.
///
/// `None` if the membership of the process stays as it is. Always `None` for kernel threads, process 1, processes of
/// pjwd, and the helpers of the job's batch system.
fn job_with_evidence(
    draft: &CycleDraft<'_>,
    known: &KnownProcess,
    lookups: &mut Lookups,
    may_adopt: bool,
) -> Option<FoundJob> {
    let (state, policy) = (&*draft.state, draft.policy);
    let process = &known.process;
    if process.is_kernel_thread || process.id.pid == Pid(1) || policy.is_daemon_process(process.id.pid) {
        return None;
    }
    let held = state.members.get(&process.id.pid);
    let is_stronger = |evidence: MembershipEvidence| held.is_none_or(|member| evidence > member.evidence);
    let is_enabled = |source: JobSource| policy.sources.contains(&source);

    // A process that is not scanned yet may still name a cgroup that this scan found removed.
    let is_gone = |path: &String| matches!(draft.seen.cgroups.get(path), Some(Observed::Gone));
    let references = &known.batch_identity.job_references;
    let by_cgroup = references.iter().find(|reference| {
        matches!(&reference.kind, JobIdAttribute::Cgroup(path) if !is_gone(path))
            && is_enabled(reference.job.source())
    });
    let has_lost_cgroup = |job: &JobId| {
        let names_gone = |reference: &JobReference| matches!(&reference.kind, JobIdAttribute::Cgroup(path) if is_gone(path));
        references.iter().any(|reference| reference.job == *job && names_gone(reference))
    };
    let found_job = |job: &JobId, evidence, reference: Option<&JobReference>| FoundJob {
        job: job.clone(),
        evidence,
        reference: reference.cloned(),
    };
    let found = if let Some(reference) = by_cgroup.filter(|_| is_stronger(MembershipEvidence::Cgroup)) {
        found_job(&reference.job, MembershipEvidence::Cgroup, Some(reference))
    } else if held.is_some() {
        return None;
    } else if let Some((job, evidence)) = job_by_relation(state, known, &mut lookups.owners) {
        found_job(&job, evidence, None)
    } else if let Some(job) = job_by_provision(state, policy, process) {
        found_job(job, MembershipEvidence::Provision, None)
    } else if let Some(reference) = job_by_environment(state, known, &is_enabled, &mut lookups.launchers)
        && !has_lost_cgroup(&reference.job)
    {
        found_job(&reference.job, MembershipEvidence::Environment, Some(reference))
    } else {
        let job = may_adopt.then(|| adopting_job(draft, process)).flatten()?;
        found_job(&job, MembershipEvidence::Adopted, None)
    };
    (!is_helper(state, known, &found.job)).then_some(found)
}

/// Returns the job to which a process belongs because of its relation to other processes, with this evidence. The first
/// of these that names a job decides:
///
/// 1. The ancestor that the fork event of the process named.
/// 2. The cpuset of pjw in which the process is.
/// 3. The parent.
/// 4. The inherited affinity mask.
/// 5. The session or process group.
///
/// `None` if none of them names a job. `owners` keeps the results of look-ups for other processes.
fn job_by_relation(
    state: &WardenState,
    known: &KnownProcess,
    owners: &mut GroupingOwners,
) -> Option<(JobId, MembershipEvidence)> {
    let process = &known.process;
    job_by_descent(state, process)
        .or_else(|| Some((job_by_cpuset(state, process)?, MembershipEvidence::JobCpuset)))
        .or_else(|| parent_member(state, process).map(|parent| (&parent.job, parent.evidence.of_child())))
        .or_else(|| Some((job_by_inherited_mask(state, known)?, MembershipEvidence::Parent)))
        .map(|(job, evidence)| (job.clone(), evidence))
        .or_else(|| Some((job_by_session(state, process, owners)?, MembershipEvidence::Session)))
}

/// The parent of a process, if the parent is a member. The process id is not enough: the member must have started
/// before the child. Then it is the parent, and not a later process with the same process id.
fn parent_member<'a>(state: &'a WardenState, process: &Process) -> Option<&'a Member> {
    state.members.get(&process.parent).filter(|parent| parent.id.start <= process.id.start)
}

/// Returns the job of the ancestor that the fork event of the process named, with the evidence of a child of this
/// ancestor. This is the job to which the ancestor belongs now. If the ancestor is no member any more, it is the former
/// job of the ancestor. `None` in each of these cases:
///
/// - There is no such event, or the ancestor was no member.
/// - The ancestor is no member any more, and its job has ended.
fn job_by_descent<'a>(state: &'a WardenState, process: &Process) -> Option<(&'a JobId, MembershipEvidence)> {
    let descendant =
        state.lineage.descendant(process.id.pid).filter(|descendant| descendant.was_ancestor_member)?;
    // A process can be registered for another job after its child was born: the child follows it.
    match state.members.get(&descendant.ancestor).filter(|ancestor| ancestor.id.start <= process.id.start) {
        Some(ancestor) => Some((&ancestor.job, ancestor.evidence.of_child())),
        None => state.jobs.contains_key(&descendant.job).then_some((&descendant.job, descendant.evidence)),
    }
}

/// Returns the job for which pjw made the cpuset cgroup in which the process is. pjw moved the process or one of its
/// ancestors there. `None` if there is no such job. Also `None` in each of these cases:
///
/// - The parent is a member of a job and is in the same cgroup. Then the parent is the evidence.
/// - The parent belongs to another job now, but pjw had moved it into this cgroup. Then the parent is the evidence too.
/// - The process has left a provision (a job whose cores are promised to a service).
/// - The cpuset is about to be removed.
fn job_by_cpuset<'a>(state: &'a WardenState, process: &Process) -> Option<&'a JobId> {
    let managed = state.cpusets.enclosing_cpuset(process.cgroup.as_deref()?)?;
    let cpuset = &managed.job_cpuset;
    let is_own = cpuset.creator != CgroupCreator::Scheduler && !managed.must_be_removed;
    let has_left = state.has_left_provision(process, &cpuset.job);
    let is_by_parent = parent_member(state, process).is_some_and(|parent| {
        let is_inside = state.process(parent.id.pid).is_some_and(|known| known.is_in_cgroup(&cpuset.path));
        // The process was born before pjw moved the parent out of the cpuset.
        let was_inside = || state.cpusets.was_moved_into_cpuset_at(parent.id, &cpuset.path);
        is_inside || (parent.job != cpuset.job && was_inside())
    });
    (is_own && !is_by_parent && !has_left && state.jobs.contains_key(&cpuset.job)).then_some(&cpuset.job)
}

/// Returns the job of an orphan by its affinity mask, if no fork event names the ancestors of the orphan. The mask must
/// lie in the grant (the cores) of a job of the same user. The orphan then inherited the mask from the job, or
/// requested it. A grant counts only if pjw chose it, if it is not shared, and if it lacks an online PU. This finds a
/// daemonised grandchild whose parent was forked and exited between two scans. Always `None` for these processes:
///
/// - Processes of root, because daemons of root request masks themselves.
/// - Processes that started before the first process of the job.
/// - Processes that an earlier scan has read.
/// - Processes that have left a provision (a job whose cores are promised to a service).
fn job_by_inherited_mask<'a>(state: &'a WardenState, known: &KnownProcess) -> Option<&'a JobId> {
    let process = &known.process;
    let may_inherit =
        known.was_read_once && process.uid != Uid::ROOT && is_orphan_of_unknown_descent(state, known);
    let mask = process.first_thread_mask.as_ref().filter(|mask| may_inherit && !mask.is_empty())?;
    let born_inside = |job: &&Job| {
        let grant = job.grant_chosen_by(GrantedBy::Warden).filter(|grant| !grant.is_shared);
        let is_older = |member: &Member| member.id.start <= process.id.start;
        grant.is_some_and(|grant| {
            mask.is_subset(&grant.cpus) && !state.pool.online_cpus().is_subset(&grant.cpus)
        }) && state.members_of(&job.id).any(is_older)
    };
    let mut born_in = state.jobs.jobs_of_owner(process.uid).filter(born_inside).map(|job| &job.id);
    born_in.find(|job| !state.has_left_provision(process, job))
}

/// The name of the service manager. The service manager of a user is a subreaper (prctl(2), `PR_SET_CHILD_SUBREAPER`):
/// it becomes the parent of the orphans of this user.
const SERVICE_MANAGER: &str = "systemd";

/// Returns whether pjw does not know which process forked the process `known`. In this case, the present parent may
/// have adopted the process as an orphan (init does so), and no fork event names the true parent.
pub(crate) fn is_orphan_of_unknown_descent(state: &WardenState, known: &KnownProcess) -> bool {
    let process = &known.process;
    let adopts = |parent: &Process| parent.uid != process.uid || parent.comm == Comm::from(SERVICE_MANAGER);
    let is_orphan = process.parent == Pid(1) || state.process(process.parent).is_some_and(adopts);
    is_orphan && !state.has_known_descent(process.id.pid, process.id.start.earliest_time())
}

/// Returns the first job with a provision (a promise of cores to a service) whose rule matches the process. `None` if
/// there is none.
fn job_by_provision<'a>(state: &'a WardenState, policy: &Policy, process: &Process) -> Option<&'a JobId> {
    let is_recognised = |job: &&Job| {
        let rule = job.provision.as_ref().and_then(|provision| provision.rule.as_ref());
        rule.is_some_and(|rule| matches_rule(state, policy, rule, process))
    };
    state.jobs.provisions().find(is_recognised).map(|job| &job.id)
}

/// Returns whether `rule` matches a process. The rule belongs to a provision (a promise of cores to a service), and
/// recognises the processes of the service. A rule that names only a program matches no process of an ordinary user,
/// because any user can give a program any name. The only exception is a pjwd that manages the processes of a single
/// user. For a process that pjw moved into a cpuset, its original cgroup counts.
pub(crate) fn matches_rule(
    state: &WardenState,
    policy: &Policy,
    rule: &ProvisionRule,
    process: &Process,
) -> bool {
    let is_of_other_person = policy.only_managed_user.is_none() && policy.is_person(process.uid);
    let is_trusted = !is_of_other_person || !rule.has_only_comm();
    let cgroup = process.cgroup.as_deref().map(|path| state.cpusets.cgroup_without_pjw(process.id, path));
    let unit_cgroup = process.unit_cgroup.as_deref().or(cgroup);
    is_trusted && rule.matches(process.uid, process.comm, cgroup, unit_cgroup, policy.only_managed_user)
}

/// Returns the reference to the job that the environment of the process `known` names, if the name can be relied on.
/// `None` if there is no such job.
///
/// - If pjw knows the job, the process must belong to the job's user.
/// - If pjw does not know the job, the process must descend from the job launcher of the batch system, and must not be
///   a process of root.
///
/// `is_enabled` says whether jobs of a source are detected. `launchers` keeps the results of look-ups for other
/// processes.
fn job_by_environment<'a>(
    state: &WardenState,
    known: &'a KnownProcess,
    is_enabled: &impl Fn(JobSource) -> bool,
    launchers: &mut Launchers,
) -> Option<&'a JobReference> {
    known.batch_identity.job_references.iter().find(|reference| {
        let by_environment = matches!(reference.kind, JobIdAttribute::Environment { .. });
        let mut is_confirmed = || match state.jobs.get(&reference.job) {
            Some(job) => job.owner == known.process.uid,
            // A prolog runs as root below the launcher, with the job's variables: it must not become the owner.
            None => {
                let source = reference.job.source();
                known.process.uid != Uid::ROOT && launchers.have_launched(state, &known.process, source)
            }
        };
        by_environment && is_enabled(reference.job.source()) && is_confirmed()
    })
}

/// Returns the parent of `process`. `None` if the state does not contain the parent, or if the pid of the parent now
/// belongs to a process that started later than `process`.
pub(crate) fn parent_of<'a>(state: &'a WardenState, process: &Process) -> Option<&'a KnownProcess> {
    state.processes.get(&process.parent).filter(|known| known.process.id.start <= process.id.start)
}

/// Iterates over the known ancestors of a process. The parent comes first. Ends where [`parent_of`] returns `None`.
pub(crate) fn ancestors<'a>(
    state: &'a WardenState,
    process: &'a Process,
) -> impl Iterator<Item = &'a KnownProcess> {
    let parent = parent_of(state, process);
    core::iter::successors(parent, move |known| parent_of(state, &known.process)).take(MAX_GENERATIONS)
}

/// Whether the process is a helper of a batch system, and so does not belong to the job `job`. A process of the job's
/// user, if this is not root, only has the name of a helper.
fn is_helper(state: &WardenState, known: &KnownProcess, job: &JobId) -> bool {
    let helper = matches!(known.batch_identity.role, BatchRole::Helper(_) | BatchRole::Launcher(_));
    let owner = state.jobs.get(job).map_or(known.process.uid, |job| job.owner);
    helper && (known.process.uid == Uid::ROOT || known.process.uid != owner)
}

/// Returns the job to which all processes of the session or process group of a process belong. Such a job is known from
/// the batch system, or was registered by `assign --session`. `None` if there is no such job, or if none of its members
/// is in this session or group now. Without such a member, the kernel may have used the number of the session or group
/// again. `owners` keeps the results of look-ups for other processes.
fn job_by_session(state: &WardenState, process: &Process, owners: &mut GroupingOwners) -> Option<JobId> {
    let Process { session, process_group: group, .. } = *process;
    let GroupingOwners { by_source, by_registration } = owners;
    let mut job_by_source = |unit: JobProcessGrouping, leader: Pid| {
        let job = || job_of_grouping(state, unit, leader).cloned();
        by_source.entry((unit, leader)).or_insert_with(job).clone()
    };
    let is_inside =
        |member: &Member| state.process(member.id.pid).is_some_and(|known| known.session == session);
    let is_registered = |job: &&Job| state.members_of(&job.id).any(is_inside);
    let registered = || state.jobs.jobs_of_session(session).find(is_registered).map(|job| job.id.clone());
    job_by_source(JobProcessGrouping::Session, session)
        .or_else(|| by_registration.entry(session).or_insert_with(registered).clone())
        .or_else(|| job_by_source(JobProcessGrouping::ProcessGroup, group))
}

/// Returns the job to which all processes of the session or process group with the leader `leader` belong. The batch
/// system's environment variables of a member say so. `unit` says whether it is a session or a process group. `None` if
/// no member has such variables of its own job.
fn job_of_grouping(state: &WardenState, unit: JobProcessGrouping, leader: Pid) -> Option<&JobId> {
    let marked = state.processes.pids_in_session_or_group(unit, leader);
    let mut members = marked.filter_map(|pid| Some((state.processes.get(&pid)?, state.members.get(&pid)?)));
    let names_its_job = |(known, member): &(&KnownProcess, &Member)| {
        known.batch_identity.jobs_with_own_grouping().any(|own| own == (&member.job, unit))
    };
    members.find(names_its_job).map(|(_, member)| &member.job)
}

/// Makes the process `pid` a member of the job `found`. Creates the job if it is not known. Also completes the job:
///
/// - If the batch system's cgroup of the process names the job, and the job has no cgroup yet, this cgroup becomes its
///   cgroup.
/// - If an attribute of the process names the job, and the job belongs to root, the user of the process becomes its
///   owner.
fn join_job(draft: &mut CycleDraft<'_>, pid: Pid, found: &FoundJob) {
    let Some(known) = draft.state.processes.get(&pid) else { return };
    let owner = known.process.uid;
    let new_job = || Job::new(found.job.clone(), owner, EndCondition::LastProcessExit, draft.now.wall_clock);
    let mut job = draft.state.jobs.get(&found.job).cloned().unwrap_or_else(new_job);
    // A hook that runs as root may announce a job before the owner of the job is known.
    if job.owner == Uid::ROOT && found.reference.is_some() {
        job.owner = owner;
    }
    if let Some(JobIdAttribute::Cgroup(path)) = found.reference.as_ref().map(|reference| &reference.kind) {
        job.cgroup.get_or_insert_with(|| path.clone());
    }
    draft.store_job(job);
    add_member(draft, pid, &found.job, found.evidence);
}

/// Makes the process `pid` a member of `job`, instead of its former job, and writes the membership to the journal.
/// `evidence` says why the process belongs to the job. The jobs of its children are determined again in this cycle. If
/// this scan did not read the threads of the process, the next scan reads them. Does nothing if the process is unknown.
pub(crate) fn add_member(draft: &mut CycleDraft<'_>, pid: Pid, job: &JobId, evidence: MembershipEvidence) {
    let Some(known) = draft.state.processes.get(&pid) else { return };
    let id = known.process.id;
    let first_seen = Some(known.first_seen);
    let inherited_mask = inherited_mask(draft.state, &known.process);
    let before = draft.state.members.remove(pid).or_else(|| draft.state.processes_to_restore.remove(&pid));
    if let Some(before) = &before {
        draft.state.dirty.add_process(&before.job, pid);
    }
    let was_new = before.as_ref().map_or(known.was_read_once, |before| before.was_new_at_join);
    let numa_node = before.as_ref().filter(|before| before.job == *job).and_then(|before| before.numa_node);
    // The threads do not depend on the job: those that were read in another job stay.
    let threads = before.map(|member| member.threads).unwrap_or_default();
    let member = Member {
        id,
        job: job.clone(),
        evidence,
        inherited_mask,
        first_seen,
        was_new_at_join: was_new,
        numa_node,
        threads,
    };
    draft.out.records.push(Record::Joined(member.membership()));
    draft.state.members.insert(member);
    draft.state.dirty.add_process(job, pid);
    // The children of the process, and the other processes of its session, may belong to the job because of it.
    draft.recheck.extend(draft.state.processes.children_of(pid));
    let known = draft.state.processes.get(&pid);
    draft.recheck_all |=
        known.is_some_and(|known| known.batch_identity.jobs_with_own_grouping().next().is_some());
    draft.state.remove_unassigned(pid);
    update_threads_of(draft, pid);
}

/// Updates the threads of a process that has just become tracked, if this scan read them.
fn update_threads_of(draft: &mut CycleDraft<'_>, pid: Pid) {
    let is_unread = draft.state.tracked_process(pid).is_some_and(|member| member.threads.is_empty());
    if let Some(process) = draft.seen.processes.get(&pid).and_then(Observed::present).filter(|_| is_unread) {
        update_threads(draft, process);
    }
}

/// Returns the affinity mask with which the job of `process` began. This is the mask of the nearest ancestor that
/// belongs to no job, as a scan read it. `None` if it is unknown.
fn inherited_mask(state: &WardenState, process: &Process) -> Option<CpuSet> {
    match parent_member(state, process) {
        Some(parent) => parent.inherited_mask.clone(),
        None => state.process(process.parent).and_then(|parent| parent.first_thread_mask.clone()),
    }
}
