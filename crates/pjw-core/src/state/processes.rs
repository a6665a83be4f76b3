//! Every process of the node, by process id, by parent, by user and by the jobs that its attributes name.
//!
//! Reading goes to the map from process id to process. Writing goes through the methods of [`Processes`]: they update
//! the indexes. So a job that begins or ends need not visit all processes.

use alloc::sync::Arc;
use core::ops::{Bound, Deref};

use crate::basics::{Nanos, Pid, Uid, is_cgroup_within, prelude::*};
use crate::terms::{BatchIdentity, JobId, JobProcessGrouping, Process};

/// The most generations that are followed from a process to its ancestors. Parents that were read at different times
/// can form a cycle, because process ids are used again. Ancestors that are further away are ignored.
pub(crate) const MAX_GENERATIONS: usize = 4096;

/// The latest known facts about a process, without its threads.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KnownProcess {
    /// The facts that the last scan of this process read. The fields `attributes`, `batch_identity` and `threads` are
    /// always `None` here. The field `parent` is the parent that the scan read, with one exception. If this parent
    /// belongs to no job, but pjw has recorded that the process descends from a process of a job, `parent` is this
    /// ancestor ([`Descendant::ancestor`](crate::state::lineage::Descendant::ancestor)). For example, process 1 may
    /// have adopted the process after its true parent ended.
    pub process: Process,
    /// The role of the process in a batch system, and the jobs that its cgroup, its supplementary groups and
    /// its environment name.
    pub batch_identity: BatchIdentity,
    /// The time at which the first scan that read the process began, in ns since boot. The process may have
    /// been forked during that scan.
    pub first_seen: Nanos,
    /// Whether the process has been read by one scan only. False as soon as a second scan has read the
    /// process.
    pub was_read_once: bool,
    /// The last change of the process's cgroup: the path of the previous cgroup, and the time of the first scan that
    /// read the process in its present cgroup. `None` if no scan has found a change of the cgroup, or if the previous
    /// cgroup was unknown.
    pub last_cgroup_change: Option<(Arc<str>, Nanos)>,
}

/// All processes of the machine. The facts about each process are from the last scan that read it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Processes {
    processes: BTreeMap<Pid, KnownProcess>,
    children: BTreeMap<Pid, BTreeSet<Pid>>,
    by_user: BTreeMap<Uid, BTreeSet<Pid>>,
    by_cgroup: BTreeMap<Arc<str>, BTreeSet<Pid>>,
    /// Per job: the pids of the processes whose cgroup, supplementary groups or environment name the job.
    by_referenced_job: BTreeMap<JobId, BTreeSet<Pid>>,
    /// The pids of the processes in a session or process group that a batch system made for one job, by the
    /// id of this session or group.
    by_own_session_or_group: BTreeMap<(JobProcessGrouping, Pid), BTreeSet<Pid>>,
}

impl Deref for Processes {
    type Target = BTreeMap<Pid, KnownProcess>;

    fn deref(&self) -> &Self::Target {
        &self.processes
    }
}

impl Processes {
    /// Adds the process `known`. Replaces an earlier process with the same pid.
    pub fn insert(&mut self, known: KnownProcess) {
        let pid = known.process.id.pid;
        self.remove(pid);
        self.children.entry(known.process.parent).or_default().insert(pid);
        self.by_user.entry(known.process.uid).or_default().insert(pid);
        if let Some(cgroup) = &known.process.cgroup {
            self.by_cgroup.entry(Arc::clone(cgroup)).or_default().insert(pid);
        }
        for reference in &known.batch_identity.job_references {
            self.by_referenced_job.entry(reference.job.clone()).or_default().insert(pid);
        }
        for (_, grouping) in known.batch_identity.jobs_with_own_grouping() {
            let key = session_or_group_of(&known.process, grouping);
            self.by_own_session_or_group.entry(key).or_default().insert(pid);
        }
        self.processes.insert(pid, known);
    }

    /// Removes the process with the pid `pid`, and returns the process as the last scan found it. Returns
    /// `None` if the collection has no process with this pid.
    pub fn remove(&mut self, pid: Pid) -> Option<KnownProcess> {
        let known = self.processes.remove(&pid)?;
        remove_from(&mut self.children, &known.process.parent, pid);
        remove_from(&mut self.by_user, &known.process.uid, pid);
        if let Some(cgroup) = &known.process.cgroup {
            remove_from(&mut self.by_cgroup, cgroup, pid);
        }
        for reference in &known.batch_identity.job_references {
            remove_from(&mut self.by_referenced_job, &reference.job, pid);
        }
        for (_, grouping) in known.batch_identity.jobs_with_own_grouping() {
            let key = session_or_group_of(&known.process, grouping);
            remove_from(&mut self.by_own_session_or_group, &key, pid);
        }
        Some(known)
    }

    /// Iterates over the processes whose real user id is `user`.
    pub fn processes_of_user(&self, user: Uid) -> impl Iterator<Item = &KnownProcess> {
        self.by_user.get(&user).into_iter().flatten().filter_map(|pid| self.processes.get(pid))
    }

    /// Iterates over the processes in the cgroup at the path `path` and in the cgroups below this cgroup.
    pub(crate) fn processes_in_cgroup(&self, path: &str) -> impl Iterator<Item = &KnownProcess> {
        let from = (Bound::Included(path), Bound::Unbounded);
        let named_alike =
            self.by_cgroup.range::<str, _>(from).take_while(move |(cgroup, _)| cgroup.starts_with(path));
        let within = named_alike.filter(move |(cgroup, _)| is_cgroup_within(cgroup, path));
        within.flat_map(|(_, pids)| pids).filter_map(|pid| self.processes.get(pid))
    }

    /// Iterates over the pids of the processes that have an attribute with the id of the job `job`, such as a cgroup
    /// path or an environment variable.
    pub(crate) fn pids_naming_job(&self, job: &JobId) -> impl Iterator<Item = Pid> {
        self.by_referenced_job.get(job).into_iter().flatten().copied()
    }

    /// Iterates over the pids of the processes in the session or process group with the leader `leader`, if a batch
    /// system made this session or process group for one job. `grouping` says which of the two it is.
    pub(crate) fn pids_in_session_or_group(
        &self,
        grouping: JobProcessGrouping,
        leader: Pid,
    ) -> impl Iterator<Item = Pid> {
        self.by_own_session_or_group.get(&(grouping, leader)).into_iter().flatten().copied()
    }

    /// Iterates over the pids of the children of the process `pid`.
    pub(crate) fn children_of(&self, pid: Pid) -> impl Iterator<Item = Pid> {
        self.children.get(&pid).into_iter().flatten().copied()
    }

    /// Returns the pids in `pids`, and the pids of all descendants of these processes. A process whose parent
    /// has ended counts as a child of the process that adopted it (process 1 or a subreaper).
    #[must_use]
    pub fn pids_with_descendants(&self, pids: impl IntoIterator<Item = Pid>) -> BTreeSet<Pid> {
        let mut found = BTreeSet::new();
        let mut unvisited: Vec<Pid> = pids.into_iter().collect();
        while let Some(pid) = unvisited.pop() {
            if found.insert(pid) {
                unvisited.extend(self.children.get(&pid).into_iter().flatten());
            }
        }
        found
    }
}

/// Returns the key in `by_own_session_or_group` for the process group or the session of `process`.
fn session_or_group_of(process: &Process, grouping: JobProcessGrouping) -> (JobProcessGrouping, Pid) {
    let is_group = grouping == JobProcessGrouping::ProcessGroup;
    (grouping, if is_group { process.process_group } else { process.session })
}

/// Removes a process from an index, and the key if it was the last process.
fn remove_from<K: Ord>(index: &mut BTreeMap<K, BTreeSet<Pid>>, key: &K, pid: Pid) {
    if let Some(pids) = index.get_mut(key) {
        pids.remove(&pid);
        if pids.is_empty() {
            index.remove(key);
        }
    }
}
