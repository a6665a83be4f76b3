//! The scope of the next scan: which processes are scanned, and which are only checked for activity.
//!
//! A scan ([`crate::ports::MachineInterface::scan`]) reads the cgroups that changed even if the request does not name
//! them. So the request of a normal cycle names only the cgroups of jobs of which something is pending. A full rescan
//! names all cgroups, and each other rescan names an eighth of them in turn: a change of a cgroup above them is not
//! reported.
//!
//! The scan of a normal cycle reads the processes that are active, that are to be restored, or that were not scanned
//! yet. The request also names the idle processes, by cgroup: the scan reads an idle process only if the process ran,
//! or if its masks changed. Each scan checks the masks of a part of the idle processes. The next full scan finds every
//! other change that another program made to the masks or the cgroup of an idle process.
//!
//! A rescan (the periodic scan, config key `rescan_interval`) also reads every other process that may have changed.
//! Without an event and without running, no process changes, except that another program may change its mask: a rescan
//! checks the masks of all processes that masks alone keep on their cores. One rescan in eight is full. So is each
//! rescan while events are not monitored, and while a decision is pending that needs a full scan.

use alloc::sync::Arc;
use core::cell::OnceCell;

use crate::basics::{Pid, cgroup_and_ancestor_paths, prelude::*};
use crate::state::{members::Member, warden::WardenState};
use crate::terms::{IdleProcessGroup, JobId, ScanRequest, ScanScope, WatchedProcesses};

/// The number of partial periodic scans (config key `rescan_interval`) between two full ones. Together with a full one,
/// they read every cgroup of a job.
pub(crate) const PARTIAL_RESCANS_PER_FULL_RESCAN: u32 = 7;

impl WardenState {
    /// Returns the request for a scan: which processes, threads and cgroups the scan reads.
    ///
    /// If `is_full` is true, the scan reads every process of the machine, and the cgroups of all jobs. It reads the
    /// threads only of these processes:
    ///
    /// - The processes whose affinity masks pjw sets or restores ([`WardenState::tracked_pids`]).
    /// - Some processes whose affinity masks an earlier run of the daemon may have set
    ///   ([`WardenState::unknown_masks`]).
    ///
    /// If `is_full` is false, the scan reads only these processes, with their threads:
    ///
    /// - The processes whose original affinity masks pjw is restoring ([`WardenState::processes_to_restore`]).
    /// - The active processes of jobs. A process is active if one of its threads recently ran or waited for a PU
    ///   (logical CPU), or if no scan has read its threads. Of an active process with many threads, the scan may read
    ///   only the active threads ([`ScanRequest::active_threads`]).
    /// - The other processes of jobs for which a check finds a change, such as used CPU time ([`WatchedProcesses`]).
    ///
    /// If `is_full` is false, the scan also reads the cgroups of jobs without processes, the cgroups of jobs that hold
    /// no PUs and do not wait for any, the cgroups that pjw has to remove, and the cgroups that have changed since an
    /// earlier scan.
    #[must_use]
    pub fn scan_request(&self, is_full: bool) -> ScanRequest {
        if is_full {
            let mut pids_to_read_threads_of = self.tracked_pids();
            pids_to_read_threads_of.extend(self.unknown_masks.pids_with_other_threads());
            pids_to_read_threads_of.extend(self.unknown_masks.unread_pids());
            let mut cgroups = self.job_cgroup_paths();
            cgroups.extend(self.cgroups_with_ancestors(self.unknown_masks.unread_pids()));
            return ScanRequest {
                scope: ScanScope::Full,
                pids_to_read_threads_of,
                active_threads: BTreeMap::new(),
                cgroups,
                idle_watch: Arc::default(),
            };
        }
        let pids: BTreeSet<Pid> =
            self.members.active_pids().chain(self.processes_to_restore.keys().copied()).collect();
        ScanRequest {
            scope: ScanScope::Partial(pids.clone()),
            pids_to_read_threads_of: pids,
            active_threads: self.members.active_threads_to_read(&self.dirty),
            cgroups: self.pending_cgroups(),
            idle_watch: self.idle_watch(),
        }
    }

    /// The cgroups of jobs that may end soon, and the cgroups that are to be removed. The v1 hierarchies do not report
    /// the end of the last process in a cgroup.
    fn pending_cgroups(&self) -> BTreeSet<String> {
        let without_cores = self.jobs.jobs_without_cores_that_do_not_wait();
        let pending = self.jobs.jobs_without_processes().chain(without_cores);
        let of_jobs = pending.flat_map(|job| self.cgroups_of(&job.id));
        of_jobs.chain(self.cpusets.paths_to_remove().map(str::to_owned)).collect()
    }

    /// Returns the request for a scan that reads every process of the machine and the cgroups of all jobs. To save
    /// time, the scan does not read the threads of most idle processes of jobs. A process is idle if scans have read
    /// its threads, and none of them recently ran or waited for a PU (logical CPU).
    ///
    /// Except for idle processes, the request is the same as the result of [`WardenState::scan_request`] with `true`.
    /// The scan reads the threads of an idle process only if a check finds a change ([`WatchedProcesses`]), such as
    /// used CPU time.
    #[must_use]
    pub fn full_scan_request(&self) -> ScanRequest {
        ScanRequest { idle_watch: self.idle_watch(), ..self.scan_request(true) }
    }

    /// Returns the request for the periodic scan (config key `rescan_interval`), which also reads processes that belong
    /// to no job. At least one periodic scan in eight reads every process ([`ScanScope::Full`]). The other periodic
    /// scans read only the processes that may have changed ([`ScanScope::Partial`]). If the scope is partial, the
    /// caller must add the processes that were forked since the last periodic scan.
    ///
    /// The caller must call this function exactly once per periodic scan, because the function counts its calls.
    pub fn periodic_scan_request(&mut self) -> ScanRequest {
        if self.periodic_scans_until_full == 0 || self.full_scan_due || !self.is_settled() {
            return self.full_scan_request();
        }
        self.periodic_scans_until_full -= 1;
        let processes = self.processes.values().map(|known| &known.process);
        let user_pids = processes.filter(|process| !process.is_kernel_thread).map(|process| process.id.pid);
        let unassigned_pids = user_pids.filter(|&pid| self.tracked_process(pid).is_none()).collect();
        let groups = self.idle_watch().groups.clone();
        let turn = self.periodic_scans_until_full as usize;
        // One of the turns is the full rescan, which reads all cgroups.
        let turns = PARTIAL_RESCANS_PER_FULL_RESCAN as usize + 1;
        let in_turn = self.job_cgroup_paths().into_iter().skip(turn).step_by(turns);
        let mut request = self.scan_request(false);
        request.cgroups.extend(in_turn);
        // The memory of an active job may have a new peak.
        let active = self.members.active_pids().filter_map(|pid| Some(&self.members.get(&pid)?.job));
        let active: BTreeSet<&JobId> = active.collect();
        request.cgroups.extend(active.into_iter().flat_map(|job| self.cgroups_of(job)));
        ScanRequest {
            idle_watch: Arc::new(WatchedProcesses {
                groups,
                has_all_groups: true,
                unassigned_pids,
                check_all_masks: true,
            }),
            ..request
        }
    }

    /// Whether a partial rescan is enough: fork events are monitored, every job has its grant, no mask or cpuset is to
    /// be restored or tried again, and every release is settled.
    fn is_settled(&self) -> bool {
        let are_served = self.jobs.jobs_without_cores().next().is_none();
        let has_pending_changes = !self.processes_to_restore.is_empty()
            || !self.released_masks.is_empty()
            || !self.cpusets.are_all_changes_complete()
            || self.unknown_masks.is_search_pending();
        self.fork_events_complete_since.is_some() && are_served && !has_pending_changes
    }

    /// Returns the idle processes of all jobs, in groups. The list is made again only after a group has changed.
    fn idle_watch(&self) -> Arc<WatchedProcesses> {
        let watch = || {
            let groups = self.idle_groups.values().flatten().cloned().collect();
            Arc::new(WatchedProcesses { groups, has_all_groups: true, ..WatchedProcesses::default() })
        };
        Arc::clone(self.idle_watch.get_or_init(watch))
    }

    /// Determines again which processes of the jobs `jobs` are idle: none of their threads recently ran or waited for a
    /// PU (logical CPU). To save time, most scans do not read the threads of idle processes.
    pub(crate) fn update_idle_groups<'a>(&mut self, jobs: impl IntoIterator<Item = &'a JobId>) {
        for job in jobs {
            let groups = self.group_idle_members(job);
            if groups.is_empty() {
                self.idle_groups.remove(job);
            } else {
                self.idle_groups.insert(job.clone(), groups);
            }
            self.idle_watch = OnceCell::new();
        }
    }

    /// Returns the pids of all processes whose affinity masks pjw sets: the processes that belong to a job, and
    /// the processes in [`WardenState::processes_to_restore`]. A process of the second kind has left its job,
    /// and pjw is restoring the masks that the process had before pjw changed them.
    #[must_use]
    pub fn tracked_pids(&self) -> BTreeSet<Pid> {
        self.members.keys().chain(self.processes_to_restore.keys()).copied().collect()
    }

    /// Returns the paths of all cgroups of jobs, relative to the mount point of the cgroup hierarchy:
    ///
    /// - The cgroups that batch systems made for jobs.
    /// - The cgroups of the cpusets that pjw manages for jobs.
    /// - The cgroups of leftover cpusets. A leftover cpuset is a job's cpuset that a daemon of pjw wrote before this
    ///   daemon started ([`CpusetRegistry::leftover_paths`](crate::state::cpusets::CpusetRegistry::leftover_paths)).
    #[must_use]
    pub fn job_cgroup_paths(&self) -> BTreeSet<String> {
        let own = self.cpusets.paths().chain(self.cpusets.leftover_paths());
        self.jobs.cgroup_paths().chain(own).map(str::to_owned).collect()
    }

    /// Returns the paths of the cgroups of the processes `pids`, and of all cgroups above them except the root cgroup.
    pub(crate) fn cgroups_with_ancestors(&self, pids: impl Iterator<Item = Pid>) -> BTreeSet<String> {
        let cgroups: BTreeSet<&str> = pids.filter_map(|pid| self.process(pid)?.cgroup.as_deref()).collect();
        cgroups
            .into_iter()
            .flat_map(cgroup_and_ancestor_paths)
            .filter(|path| *path != "/")
            .map(str::to_owned)
            .collect()
    }

    /// Iterates over the paths of the cgroups of the job `job`: the cgroup that the batch system made for the job, and
    /// the cgroup of the cpuset that pjw made for the job.
    pub(crate) fn cgroups_of(&self, job: &JobId) -> impl Iterator<Item = String> + use<> {
        let schedulers = self.jobs.get(job).and_then(|job| job.cgroup.clone());
        let cpuset = self.cpusets.cpuset_of(job).map(|managed| managed.job_cpuset.path.clone());
        schedulers.into_iter().chain(cpuset)
    }

    /// Returns the paths of cgroups that no scan has read: the cgroups of the jobs for which the next decision of the
    /// daemon plans masks and cpusets, and the cgroups that pjw must remove.
    pub(crate) fn unread_cgroups(&self) -> BTreeSet<String> {
        let is_unread = |path: &&str| !self.cgroups.contains_key(*path);
        if self.dirty.contains_everything() {
            let paths = self.jobs.cgroup_paths().chain(self.cpusets.paths());
            return paths.filter(is_unread).map(str::to_owned).collect();
        }
        let of_dirty = self.dirty.listed_jobs().flat_map(|(id, _)| self.cgroups_of(id));
        let to_remove = self.cpusets.paths_to_remove().map(str::to_owned);
        of_dirty.chain(to_remove).filter(|path| is_unread(&path.as_str())).collect()
    }

    /// Returns the idle processes of `job`, in groups. A process is idle if none of its threads recently ran or
    /// waited for a PU. All processes of a group are in the cgroup of the job, or none is. All are kept on the grant
    /// (the PUs that the job holds) by affinity masks alone, or none is.
    fn group_idle_members(&self, job: &JobId) -> Vec<Arc<IdleProcessGroup>> {
        let mut groups: BTreeMap<(bool, bool), Vec<Pid>> = BTreeMap::new();
        let cgroup = self.job_cgroup(job);
        for member in self.members.idle_members_of(job) {
            let pid = member.id.pid;
            let process = cgroup.zip(self.process(pid));
            let is_inside = process.is_some_and(|(cgroup, process)| process.is_in_cgroup(cgroup));
            groups.entry((is_inside, self.is_kept_by_masks(member))).or_default().push(pid);
        }
        let groups = groups.into_iter().map(|((is_inside, has_only_masks), pids)| {
            let cgroup = cgroup.filter(|_| is_inside).map(str::to_owned);
            let expected_cpus = self.grant_of(job).filter(|_| has_only_masks).map(|grant| grant.cpus.clone());
            Arc::new(IdleProcessGroup { cgroup, expected_cpus, pids })
        });
        groups.collect()
    }

    /// Whether all threads of a member are kept on the grant by their masks alone, without a cpuset.
    fn is_kept_by_masks(&self, member: &Member) -> bool {
        let are_inside = self.grant_of(&member.job).is_some_and(|grant| {
            member.threads.values().all(|thread| thread.effective_mask.is_subset(&grant.cpus))
        });
        are_inside && !self.is_in_job_cpuset(member)
    }

    /// The cgroup that contains only processes of the job.
    fn job_cgroup(&self, job: &JobId) -> Option<&str> {
        let job_cpuset = self.cpusets.cpuset_of(job).map(|managed| managed.job_cpuset.path.as_str());
        job_cpuset.or_else(|| self.jobs.get(job)?.cgroup.as_deref())
    }
}
