//! The jobs, by id, by owner and by cgroup, and those that need a visit in every cycle or wait for cores.
//!
//! All reading and writing goes through the methods of [`Jobs`]: they use and update the indexes. So a cycle in which
//! few jobs changed need not visit all jobs. Tests count the visits.

use core::cell::Cell;
use core::ops::Index;

pub mod grant_counts;
pub(crate) mod waiting;

use crate::basics::{CpuSet, Pid, Uid, UnixMillis, prelude::*};
use crate::state::jobs::grant_counts::GrantCounts;
use crate::terms::{Job, JobId, Ownership, PriorityClass};

/// All jobs on this machine that pjw knows, with indexes by id, owner, cgroup and session. Jobs without PUs (logical
/// CPUs) are included. A job that a command has released ([`Job::was_released`]) is included as long as its batch
/// system still runs the job.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Jobs {
    jobs: BTreeMap<JobId, Job>,
    by_owner: BTreeMap<Uid, BTreeSet<JobId>>,
    by_cgroup: BTreeMap<String, BTreeSet<JobId>>,
    by_session: BTreeMap<Pid, BTreeSet<JobId>>,
    /// The jobs that wait for cores, each with the time at which it was detected: the oldest job is served first.
    waiting: BTreeSet<(UnixMillis, JobId)>,
    /// The other jobs that hold no cores: jobs that a command has released, and borrowers without a grant.
    not_waiting_without_cores: BTreeSet<JobId>,
    /// The jobs that have no process.
    jobs_without_processes: BTreeSet<JobId>,
    /// The jobs of the class besteffort, which borrow cores.
    borrowers: BTreeSet<JobId>,
    /// The jobs of the class guaranteed, whose idle cores may be lent.
    guaranteed_jobs: BTreeSet<JobId>,
    /// The provisions: jobs whose cores are promised to a service.
    provisions: BTreeSet<JobId>,
    /// For each PU, the number of jobs that own the PU.
    granted: GrantCounts,
    /// For each PU, the number of jobs that own the PU by a grant that may overlap with others
    /// ([`Grant::is_shared`](crate::terms::Grant::is_shared)).
    shared: GrantCounts,
    /// The number of changes so far.
    change_count: u64,
    /// The number of changes of `granted` so far.
    owned_grants_version: u64,
    /// Which jobs were changed, and which users lost their last job, since these lists were last taken. Also how often
    /// jobs were read, for tests.
    access_log: AccessLog,
}

/// A record of the changes and reads of the collection of jobs. It is not part of the content of the collection: two
/// collections with the same jobs are equal, and so all values of this type are equal.
#[derive(Debug, Clone, Default)]
struct AccessLog {
    /// How many jobs were read since the last call of [`Jobs::take_read_count`].
    visits: Cell<usize>,
    /// The jobs that were added, changed or removed since the last call of [`Jobs::take_changed_ids`].
    changed: BTreeSet<JobId>,
    /// The users whose last job was removed since the last call of [`Jobs::take_former_owners`].
    former_owners: BTreeSet<Uid>,
}

impl PartialEq for AccessLog {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl Eq for AccessLog {}

impl Index<&JobId> for Jobs {
    type Output = Job;

    fn index(&self, id: &JobId) -> &Job {
        &self.jobs[id]
    }
}

impl Jobs {
    /// Returns the job with this id. `None` if there is no job with this id.
    #[must_use]
    pub fn get(&self, id: &JobId) -> Option<&Job> {
        self.jobs.get(id).inspect(|_| self.count_visit())
    }

    /// Whether there is a job with this id.
    #[must_use]
    pub fn contains_key(&self, id: &JobId) -> bool {
        self.get(id).is_some()
    }

    /// Iterates over all jobs, in ascending order of their ids.
    pub fn values(&self) -> impl Iterator<Item = &Job> {
        self.jobs.values().inspect(|_| self.count_visit())
    }

    /// Iterates over the ids of all jobs, in ascending order.
    pub fn keys(&self) -> impl Iterator<Item = &JobId> {
        self.values().map(|job| &job.id)
    }

    /// Returns the number of jobs.
    #[must_use]
    pub fn len(&self) -> usize {
        self.jobs.len()
    }

    /// Whether there are no jobs.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.jobs.is_empty()
    }

    /// Returns a counter that grows each time a job is added, changed or removed. One such change may
    /// increase the counter by more than 1.
    #[must_use]
    pub fn change_count(&self) -> u64 {
        self.change_count
    }

    /// Returns a counter that grows each time [`Jobs::owned_grants_per_pu`] changes.
    pub(crate) fn owned_grants_version(&self) -> u64 {
        self.owned_grants_version
    }

    /// Returns the number of times that a job was read from this collection since the last call of this method,
    /// and sets the number to 0. Only tests call this method. They check that each decision of the daemon reads
    /// few jobs.
    pub fn take_read_count(&self) -> usize {
        self.access_log.visits.take()
    }

    /// Returns the ids of the jobs that were added, changed or removed since the last call of this method, and clears
    /// the list of these ids. The daemon checks these jobs again when it audits the grants (the PUs that jobs hold).
    pub fn take_changed_ids(&mut self) -> BTreeSet<JobId> {
        core::mem::take(&mut self.access_log.changed)
    }

    /// Returns the users who own no job now and whose last job was removed since the last call of this method.
    pub(crate) fn take_former_owners(&mut self) -> BTreeSet<Uid> {
        core::mem::take(&mut self.access_log.former_owners)
    }

    fn count_visit(&self) {
        self.access_log.visits.update(|count| count + 1);
    }

    /// Adds a job, or replaces the job with the same id.
    pub fn insert(&mut self, job: Job) {
        let before = self.remove_without_version_change(&job.id);
        self.insert_new(job, before.as_ref().and_then(owned_cpus));
    }

    /// Adds `job`, which must not be in the collection, to the jobs and to all indexes. `owned_before` has the PUs
    /// that the job owned until now. If the job now owns other PUs, increases `owned_grants_version`: the number of
    /// changes of the PUs that jobs own.
    fn insert_new(&mut self, job: Job, owned_before: Option<&CpuSet>) {
        let id = job.id.clone();
        if owned_cpus(&job) != owned_before {
            self.owned_grants_version += 1;
        }
        self.by_owner.entry(job.owner).or_default().insert(id.clone());
        self.access_log.former_owners.remove(&job.owner);
        if let Some(path) = &job.cgroup {
            self.by_cgroup.entry(path.clone()).or_default().insert(id.clone());
        }
        for &session in &job.sessions {
            self.by_session.entry(session).or_default().insert(id.clone());
        }
        let waits = waits_for_cores(&job);
        if waits {
            self.waiting.insert((job.detected_at, id.clone()));
        }
        for (index, is_in) in [
            (&mut self.not_waiting_without_cores, job.active_grant().is_none() && !waits),
            (&mut self.jobs_without_processes, job.empty_since.is_some()),
            (&mut self.borrowers, job.is_borrower()),
            (&mut self.guaranteed_jobs, job.has_priority_class(PriorityClass::Guaranteed)),
            (&mut self.provisions, job.provision.is_some()),
        ] {
            if is_in {
                index.insert(id.clone());
            }
        }
        if let Some(grant) = job.grant.as_ref().filter(|grant| grant.ownership == Ownership::Owned) {
            self.granted.add(&grant.cpus);
            if grant.is_shared {
                self.shared.add(&grant.cpus);
            }
        }
        self.access_log.changed.insert(id.clone());
        self.jobs.insert(id, job);
        self.change_count += 1;
    }

    /// Removes the job with this id and returns it. `None` if there is no job with this id.
    pub fn remove(&mut self, id: &JobId) -> Option<Job> {
        let job = self.remove_without_version_change(id)?;
        self.owned_grants_version += u64::from(owned_cpus(&job).is_some());
        Some(job)
    }

    /// Removes the job with this id from the jobs and from all indexes, and returns it. `None` if there is no job with
    /// this id. Unlike [`Jobs::remove`], does not increase `owned_grants_version`: the number of changes of the PUs
    /// that jobs own. The caller must increase this number, unless the caller inserts a job that owns the same PUs.
    fn remove_without_version_change(&mut self, id: &JobId) -> Option<Job> {
        let job = self.jobs.remove(id)?;
        self.access_log.changed.insert(id.clone());
        self.change_count += 1;
        remove_from(&mut self.by_owner, &job.owner, id);
        if !self.by_owner.contains_key(&job.owner) {
            self.access_log.former_owners.insert(job.owner);
        }
        if let Some(path) = &job.cgroup {
            remove_from(&mut self.by_cgroup, path, id);
        }
        for session in &job.sessions {
            remove_from(&mut self.by_session, session, id);
        }
        self.waiting.remove(&(job.detected_at, id.clone()));
        for index in [
            &mut self.not_waiting_without_cores,
            &mut self.jobs_without_processes,
            &mut self.borrowers,
            &mut self.guaranteed_jobs,
            &mut self.provisions,
        ] {
            index.remove(id);
        }
        if let Some(grant) = job.grant.as_ref().filter(|grant| grant.ownership == Ownership::Owned) {
            self.granted.remove(&grant.cpus);
            if grant.is_shared {
                self.shared.remove(&grant.cpus);
            }
        }
        Some(job)
    }

    /// Calls `change` with the job, so that `change` can modify it. Does nothing if there is no job with this
    /// id.
    pub fn update(&mut self, id: &JobId, change: impl FnOnce(&mut Job)) {
        if let Some(mut job) = self.remove_without_version_change(id) {
            let before = owned_cpus(&job).cloned();
            change(&mut job);
            self.insert_new(job, before.as_ref());
        }
    }

    /// Iterates over the jobs that belong to the user `user`.
    pub fn jobs_of_owner(&self, user: Uid) -> impl Iterator<Item = &Job> {
        self.by_owner.get(&user).into_iter().flatten().filter_map(|id| self.get(id))
    }

    /// Iterates over the users who own jobs.
    pub(crate) fn owners(&self) -> impl Iterator<Item = Uid> {
        self.by_owner.keys().copied()
    }

    /// Iterates over the jobs for which a batch system made the cgroup at the path `path`.
    pub(crate) fn jobs_of_cgroup(&self, path: &str) -> impl Iterator<Item = &Job> {
        self.by_cgroup.get(path).into_iter().flatten().filter_map(|id| self.get(id))
    }

    /// Iterates over the jobs to which all processes of the session `session` (setsid(2)) belong.
    pub(crate) fn jobs_of_session(&self, session: Pid) -> impl Iterator<Item = &Job> {
        self.by_session.get(&session).into_iter().flatten().filter_map(|id| self.get(id))
    }

    /// Iterates over the paths of the cgroups that batch systems made for jobs.
    pub(crate) fn cgroup_paths(&self) -> impl Iterator<Item = &str> {
        self.by_cgroup.keys().map(String::as_str)
    }

    /// Iterates over the jobs that hold no cores: jobs that wait for cores, jobs that a command has released, and
    /// borrowers (jobs of the class besteffort, which have no cores of their own).
    pub(crate) fn jobs_without_cores(&self) -> impl Iterator<Item = &Job> {
        let waiting = self.waiting.iter().filter_map(|(_, id)| self.get(id));
        waiting.chain(self.jobs_without_cores_that_do_not_wait())
    }

    /// Iterates over the jobs that hold no cores and do not wait for any: jobs that a command has released, and
    /// borrowers (jobs of the class besteffort, which have no cores of their own).
    pub(crate) fn jobs_without_cores_that_do_not_wait(&self) -> impl Iterator<Item = &Job> {
        self.not_waiting_without_cores.iter().filter_map(|id| self.get(id))
    }

    /// Iterates over the jobs that wait for cores ([`waits_for_cores`]), in the order in which they are served: the
    /// oldest job first. Each item is the time at which the job was detected, and its id. Reads no job.
    pub(crate) fn waiting_jobs(&self) -> impl Iterator<Item = &(UnixMillis, JobId)> {
        self.waiting.iter()
    }

    /// Iterates over the jobs that have no known processes.
    pub(crate) fn jobs_without_processes(&self) -> impl Iterator<Item = &Job> {
        self.jobs_without_processes.iter().filter_map(|id| self.get(id))
    }

    /// Iterates over the jobs of the class besteffort, in ascending order of their ids. Such a job has no cores
    /// of its own. It borrows free cores, and cores that other jobs leave idle.
    pub fn borrowers(&self) -> impl Iterator<Item = &Job> {
        self.borrowers.iter().filter_map(|id| self.get(id))
    }

    /// Iterates over the jobs of the class guaranteed, in ascending order of their ids. Such a job has cores of
    /// its own. pjw may lend cores that the job leaves idle.
    pub fn guaranteed_jobs(&self) -> impl Iterator<Item = &Job> {
        self.guaranteed_jobs.iter().filter_map(|id| self.get(id))
    }

    /// Iterates over the provisions, in ascending order of their ids. A provision is a job whose cores are
    /// promised to a service, even while the service does not run.
    pub fn provisions(&self) -> impl Iterator<Item = &Job> {
        self.provisions.iter().filter_map(|id| self.get(id))
    }

    /// Whether there is a job of the class besteffort. Such a job has no cores of its own. It borrows free
    /// cores, and cores that other jobs leave idle.
    #[must_use]
    pub fn has_borrowers(&self) -> bool {
        !self.borrowers.is_empty()
    }

    /// Returns, for each PU (logical CPU), the number of jobs that own the PU. A job owns a PU if the PU is granted to
    /// the job until the job ends or a command releases it ([`Ownership::Owned`]). A job of the class besteffort only
    /// borrows PUs, and is not counted.
    #[must_use]
    pub fn owned_grants_per_pu(&self) -> &GrantCounts {
        &self.granted
    }

    /// Returns the PUs (logical CPUs) of all shared grants. A grant is the set of PUs that a job holds. A grant is
    /// shared ([`Grant::is_shared`](crate::terms::Grant::is_shared)) if other jobs or the system may hold some of its
    /// PUs too, for example because of the setting `on_exhausted = "share"`.
    #[must_use]
    pub fn shared_cpus(&self) -> CpuSet {
        self.shared.cpus()
    }
}

/// The PUs that the job owns, as [`Jobs::owned_grants_per_pu`] counts them.
fn owned_cpus(job: &Job) -> Option<&CpuSet> {
    let grant = job.grant.as_ref().filter(|grant| grant.ownership == Ownership::Owned)?;
    Some(&grant.cpus)
}

/// Whether `job` waits for cores of its own: it holds none, is no borrower, and no command has released it.
pub(crate) fn waits_for_cores(job: &Job) -> bool {
    job.grant.is_none() && !job.was_released && !job.is_borrower()
}

/// Removes a job from an index, and the key if it was the last job.
fn remove_from<K: Ord>(index: &mut BTreeMap<K, BTreeSet<JobId>>, key: &K, id: &JobId) {
    if let Some(jobs) = index.get_mut(key) {
        jobs.remove(id);
        if jobs.is_empty() {
            index.remove(key);
        }
    }
}
