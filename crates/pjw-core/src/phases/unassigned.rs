//! Unassigned processes: processes that belong to no job, of users who have jobs here.
//!
//! They are always counted. They are reported, except for the processes that belong to a login and not to any work.
//! With `adopt_strays`, an unassigned process of a user with a single job joins that job (`membership/mod.rs`). The
//! processes of a user with several jobs are kept off every grant, because their job can't be known. Their original
//! masks are restored when the user has fewer jobs.

use alloc::sync::Arc;

use crate::basics::{CpuSet, Pid, Uid, cpus_text, prelude::*};
use crate::phases::draft::{CycleDraft, CycleOutput};
use crate::state::{Member, WardenState};
use crate::terms::{JobId, MaskAction, MaskActionKind, MembershipEvidence, Policy, Process, Record, Warning};

/// The most processes that a warning about the unassigned processes of a user names.
const MAX_NAMED_PIDS: usize = 5;

/// Returns the job that adopts an unassigned process (a process in no job, although its user has a job): the only job
/// of the user. `None` if the process is not unassigned, if its user has several jobs, or if the configuration forbids
/// adoption.
pub(crate) fn adopting_job(draft: &CycleDraft<'_>, process: &Process) -> Option<JobId> {
    if !draft.policy.adopt_unassigned_processes || !is_unassigned(draft, process) {
        return None;
    }
    let mut jobs = jobs_of(draft.state, process.uid);
    let only = jobs.next().cloned();
    only.filter(|_| jobs.next().is_none())
}

/// Iterates over the jobs of the user `user` that may adopt a process: those that were not released.
pub(crate) fn jobs_of(state: &WardenState, user: Uid) -> impl Iterator<Item = &JobId> {
    state.jobs.jobs_of_owner(user).filter(|job| !job.was_released).map(|job| &job.id)
}

/// Finds the processes that belong to no job although their user owns a job on this machine. Returns the pids of these
/// processes by user. A user is included only if the user id belongs to a person: it is at least
/// [`Policy::first_person_uid`]. The set of a user is empty if all processes of the user belong to jobs. Kernel threads
/// and the processes of pjw's own programs are not included.
#[must_use]
pub fn unassigned_pids_by_user(state: &WardenState, policy: &Policy) -> BTreeMap<Uid, BTreeSet<Pid>> {
    let people = state.jobs.owners().filter(|&owner| policy.is_person(owner));
    let unassigned = |owner| {
        let processes = state.processes.processes_of_user(owner).map(|known| &known.process);
        processes
            .filter(|process| is_user_process_without_job(state, policy, process))
            .map(|process| process.id.pid)
            .collect()
    };
    people.map(|owner| (owner, unassigned(owner))).collect()
}

/// Returns the oldest process of the user `user` that belongs to no job and is not part of a login. A younger process
/// may be a short command, which ends before a person can look at it. So a message to a person names the oldest
/// process. `None` if the user has no such process, or owns no job on this machine.
#[must_use]
pub fn oldest_unassigned_process(state: &WardenState, user: Uid) -> Option<Pid> {
    let pids = state.unassigned_pids_by_user.get(&user)?.iter();
    let of_login = state.login_pids_by_user.get(&user);
    let outside_login = pids.filter(|pid| of_login.is_none_or(|of_login| !of_login.contains(*pid)));
    let oldest = outside_login.filter_map(|&pid| Some((state.process(pid)?.id.start, pid))).min();
    oldest.map(|(_, pid)| pid)
}

/// Returns whether the process is one of a user, not of the kernel or of pjw, and belongs to no job.
fn is_user_process_without_job(state: &WardenState, policy: &Policy, process: &Process) -> bool {
    let pid = process.id.pid;
    !process.is_kernel_thread
        && !policy.is_daemon_process(pid)
        && !state.members.contains_key(&pid)
        && !process.has_pjw_program_name()
}

/// Updates in the state the unassigned processes of each user (processes in no job, of users with jobs). Also updates
/// which of them are part of a login. Returns the users whose unassigned processes may have changed. Checks these
/// processes:
///
/// - Those that the scan of this cycle read.
/// - Those that may belong to another job, because a job changed.
/// - All processes, if each may belong to another job than before.
fn update_unassigned_processes(draft: &mut CycleDraft<'_>) -> BTreeSet<Uid> {
    let former_owners = draft.state.jobs.take_former_owners();
    let mut changed = core::mem::take(&mut draft.state.users_with_changed_strays);
    if draft.recheck_all {
        changed.extend(draft.state.stray_warnings.keys());
        find_all_unassigned_processes(draft.state, draft.policy);
        changed.extend(draft.state.unassigned_pids_by_user.keys());
        return changed;
    }
    let mut unassigned = core::mem::take(&mut draft.state.unassigned_pids_by_user);
    let mut login_processes = core::mem::take(&mut draft.state.login_pids_by_user);
    for user in former_owners {
        unassigned.remove(&user);
        login_processes.remove(&user);
        changed.insert(user);
    }
    for pid in draft.scanned_pids().chain(draft.recheck.iter().copied()) {
        let Some(process) = draft.state.process(pid) else { continue };
        if !is_unassigned(draft, process) {
            // The process may have joined a job, or may have executed a program of pjw.
            for pids_by_user in [&mut unassigned, &mut login_processes] {
                if pids_by_user.get_mut(&process.uid).is_some_and(|pids| pids.remove(&pid)) {
                    changed.insert(process.uid);
                }
            }
            continue;
        }
        let of_login = login_processes.entry(process.uid).or_default();
        let is_changed =
            if is_of_login(draft.state, process) { of_login.insert(pid) } else { of_login.remove(&pid) };
        if unassigned.entry(process.uid).or_default().insert(pid) || is_changed {
            changed.insert(process.uid);
        }
    }
    (draft.state.unassigned_pids_by_user, draft.state.login_pids_by_user) = (unassigned, login_processes);
    changed
}

/// Stores in the state the unassigned processes of each user, and which of them are part of a login. Checks all
/// processes.
fn find_all_unassigned_processes(state: &mut WardenState, policy: &Policy) {
    let unassigned = unassigned_pids_by_user(state, policy);
    let of_login = |pid: &&Pid| state.process(**pid).is_some_and(|process| is_of_login(state, process));
    let users = unassigned.iter();
    let login_processes =
        users.map(|(&user, pids)| (user, pids.iter().filter(of_login).copied().collect())).collect();
    state.login_pids_by_user = login_processes;
    state.unassigned_pids_by_user = unassigned;
}

/// Whether the process is part of a login, such as a login shell.
fn is_of_login(state: &WardenState, process: &Process) -> bool {
    process.belongs_to_login(state.process(process.parent))
}

/// Whether a process is unassigned: in no job, of a user who has jobs here.
fn is_unassigned(draft: &CycleDraft<'_>, process: &Process) -> bool {
    let (state, policy) = (&*draft.state, draft.policy);
    is_user_process_without_job(state, policy, process)
        && policy.is_person(process.uid)
        && state.jobs.jobs_of_owner(process.uid).next().is_some()
}

/// Finds the unassigned processes (processes in no job, of users with jobs), and adds warnings about them.
///
/// Also decides which unassigned processes are kept off the cores of jobs: those of users with several jobs, if the
/// setting `adopt_strays` is on. If jobs hold every online core, no process is kept off, and a warning is added. pjw
/// keeps track of the processes that it keeps off, as it does of released processes, in order to restore their original
/// affinity masks later.
pub(crate) fn report_unassigned_processes(draft: &mut CycleDraft<'_>) {
    let changed = update_unassigned_processes(draft);
    update_unassigned_warnings(draft.state, &changed);
    let mut excluded = processes_of_users_with_several_jobs(draft.state, draft.policy);
    if !excluded.is_empty() && cpus_outside_jobs(draft.state).is_empty() {
        report_no_free_pus(&mut draft.out, &excluded);
        // Without a PU outside of all grants, the processes keep their masks.
        excluded.clear();
    }
    let state = &*draft.state;
    let to_member = |(pid, job): (&Pid, &JobId)| {
        let known = state.processes.get(pid).filter(|_| !state.processes_to_restore.contains_key(pid))?;
        let (id, job, evidence) = (known.process.id, job.clone(), MembershipEvidence::Adopted);
        let (first_seen, threads) = (Some(known.first_seen), BTreeMap::new());
        Some(Member {
            id,
            job,
            evidence,
            inherited_mask: None,
            first_seen,
            was_new_at_join: known.was_read_once,
            numa_node: None,
            threads,
        })
    };
    let newly_excluded: Vec<Member> = excluded.iter().filter_map(to_member).collect();
    for member in newly_excluded {
        draft.out.records.push(Record::Left(member.membership()));
        draft.state.processes_to_restore.insert(member.id.pid, member);
    }
    draft.state.pids_kept_off_job_cpus = excluded.into_keys().collect();
}

/// Returns the unassigned processes of users with several jobs, each with the first of these jobs. Empty if the setting
/// `adopt_strays` is off.
fn processes_of_users_with_several_jobs(state: &WardenState, policy: &Policy) -> BTreeMap<Pid, JobId> {
    let mut excluded: BTreeMap<Pid, JobId> = BTreeMap::new();
    if !policy.adopt_unassigned_processes {
        return excluded;
    }
    for (&user, pids) in &state.unassigned_pids_by_user {
        let mut jobs = jobs_of(state, user);
        if let (Some(first), Some(_)) = (jobs.next(), jobs.next()) {
            excluded.extend(pids.iter().map(|&pid| (pid, first.clone())));
        }
    }
    excluded
}

/// The online PUs that no job holds.
fn cpus_outside_jobs(state: &WardenState) -> CpuSet {
    state.pool.online_cpus().difference(&state.jobs.owned_grants_per_pu().cpus())
}

/// Returns the changes of affinity masks that keep unassigned processes (processes in no job) off the cores of all
/// jobs. Only those processes are concerned for which [`report_unassigned_processes`] has decided so. Writes the
/// changes to the journal (the file with which a restarted daemon restores its state).
pub(crate) fn restrict_unassigned(draft: &mut CycleDraft<'_>) -> Vec<MaskAction> {
    let state = &*draft.state;
    if state.pids_kept_off_job_cpus.is_empty() {
        return Vec::new();
    }
    let outside = cpus_outside_jobs(state);
    let excluded = state.pids_kept_off_job_cpus.iter().filter_map(|pid| state.processes_to_restore.get(pid));
    let actions: Vec<MaskAction> = excluded.flat_map(|member| keep_off_actions(member, &outside)).collect();
    draft.journal_mask_requests(&actions);
    actions
}

/// Returns the changes of affinity masks that restrict the threads of `member` to `outside`, the online PUs that no job
/// holds. A thread gets the part of its original mask in `outside`, or all of `outside` if there is no such part.
/// Threads that have or requested this mask already are left out.
fn keep_off_actions<'a>(member: &'a Member, outside: &'a CpuSet) -> impl Iterator<Item = MaskAction> + 'a {
    member.living_threads().filter_map(move |(id, thread)| {
        let entry = thread.mask_entry.as_ref()?;
        let own = entry.original_mask().intersection(outside);
        let target_mask = if own.is_empty() { outside.clone() } else { own };
        // If the cpuset leaves less of the mask, a second request changes nothing.
        let is_requested = !entry.is_mask_from_program() && entry.requested_mask() == Some(&target_mask);
        if target_mask == thread.effective_mask || is_requested {
            return None;
        }
        let why = format!(
            "a stray of a user with several jobs: it may use what no job holds, {}",
            cpus_text(outside)
        );
        let kind = MaskActionKind::KeepOff;
        Some(MaskAction::with_exact_mask(kind, &member.job, id, &thread.effective_mask, target_mask, why))
    })
}

fn report_no_free_pus(out: &mut CycleOutput, excluded: &BTreeMap<Pid, JobId>) {
    let pid = excluded.keys().next().copied();
    let why = format!("{} strays run on cores of jobs: jobs hold every core", excluded.len());
    let remedy = "housekeeping = \"1\" keeps a core for what belongs to no job";
    out.warnings.push(Arc::new(Warning { pid, ..Warning::new("stray-on-jobs", why, remedy) }));
}

/// Updates the warnings about these users, which say that a user has processes outside of the user's jobs.
fn update_unassigned_warnings(state: &mut WardenState, users: &BTreeSet<Uid>) {
    for &user in users {
        let warning = unassigned_warning(state, user);
        state.set_stray_warning(user, warning);
    }
}

/// Returns the warning that `user` has processes outside of the user's jobs. `None` if there are no such processes, or
/// if all of them belong to a login.
fn unassigned_warning(state: &WardenState, user: Uid) -> Option<Warning> {
    let pids = state.unassigned_pids_by_user.get(&user)?;
    let of_login = state.login_pids_by_user.get(&user);
    let is_reported = |pid: &&Pid| of_login.is_none_or(|of_login| !of_login.contains(*pid));
    let &first = pids.iter().find(is_reported)?;
    let number = pids.len() - of_login.map_or(0, BTreeSet::len);
    let (count, belong, noun) = match number {
        1 => ("1 process".to_owned(), "belongs", "pid"),
        several => (format!("{several} processes"), "belong", "pids"),
    };
    let named = pids.iter().filter(is_reported).take(MAX_NAMED_PIDS).map(Pid::to_string);
    let named = named.collect::<Vec<String>>().join(", ");
    let more = match number.saturating_sub(MAX_NAMED_PIDS) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    let why = format!(
        "{count} of user {user} {belong} to no job, though the user has jobs here: {noun} {named}{more}"
    );
    let remedy = "pjwctl assign JOB --pid PID makes one a member; adopt_strays = true does so by itself (on nodes \
                  for jobs only)";
    Some(Warning { pid: Some(first), ..Warning::new("stray", why, remedy) })
}
