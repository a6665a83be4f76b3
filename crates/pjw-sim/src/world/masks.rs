//! Cgroups, cpusets, online PUs, and the masks that follow from them.

use pjw_core::cpuset::{CpuSet, Pu};
use pjw_core::cpuset_group::{CgroupCreator, CpusetHierarchy, JobCpuset};
use pjw_core::ids::{Pid, Tid, Uid, is_cgroup_within};
use pjw_core::{snapshot::AffinityRequest, time::Nanos};

use super::{ProgramMaskRequest, SimMachine, SimProcess, SimThread};

impl SimMachine {
    /// Records that pjw can't know the original cgroups of the process `pid` and of its descendants. The original
    /// cgroup of a process is the cgroup to which pjw must return the process when pjw releases its job. The simulation
    /// run then no longer checks that pjw returns these processes. An example: a program moves a process to another
    /// cgroup, and pjw moves the process into the cgroup of a job before the next scan. Has no effect if there is no
    /// process `pid`.
    pub fn mark_original_cgroup_unknown(&mut self, pid: Pid) {
        let Some(process) = self.processes.get_mut(&pid) else { return };
        process.has_unknown_original_cgroup = true;
        let children =
            self.processes.values().filter(|child| child.parent == pid && !child.has_unknown_original_cgroup);
        let children: Vec<Pid> = children.map(|child| child.id.pid).collect();
        children.into_iter().for_each(|child| self.mark_original_cgroup_unknown(child));
    }

    /// Moves the process `pid` to the cgroup at the path `cgroup`, as a program other than pjw would, and updates the
    /// affinity masks of the process ([`SimMachine::rewrite_cgroup_masks`]). The new cgroup becomes the original cgroup
    /// of the process ([`SimProcess::original_cgroup`]): the cgroup to which pjw must return the process when pjw
    /// releases the job of the process.
    pub fn move_process(&mut self, pid: Pid, cgroup: &str) {
        let (forgets_masks, now) = (!self.cpuset_support.affinity_persists, self.now);
        if let Some(process) = self.processes.get_mut(&pid) {
            process.original_cgroup = cgroup.to_owned();
            if forgets_masks {
                for thread in process.threads.values_mut() {
                    thread.program_mask_request = ProgramMaskRequest::Hidden;
                    thread.mask_requested_at = now;
                }
            }
        }
        self.move_process_for_pjw(pid, cgroup);
    }

    /// Moves the process `pid` to the cgroup at the path `cgroup`, as pjw would, and updates the affinity masks of the
    /// process ([`SimMachine::rewrite_cgroup_masks`]). Does not change [`SimProcess::original_cgroup`]: the cgroup in
    /// which the process would be if pjw had not moved it. pjw must return the process to that cgroup when pjw releases
    /// the job of the process.
    pub fn move_process_for_pjw(&mut self, pid: Pid, cgroup: &str) {
        if let Some(process) = self.processes.get_mut(&pid) {
            process.cgroup = cgroup.to_owned();
            process.attributes_changed = true;
        }
        self.log(|| format!("  process {pid} enters {cgroup}"));
        self.rewrite_cgroup_masks(cgroup, Some(pid));
    }

    /// Simulates that pjw writes an extended attribute of a cgroup. pjw does this whenever it sets the cpuset of the
    /// cgroup. `job_cpuset` contains the cgroup and the cpuset. In a cgroup of a batch system, the attribute contains
    /// the cpuset. In a cgroup that pjw created for a job, the attribute contains `owner`, the user id of the job's
    /// owner.
    pub fn write_cpuset_attribute(&mut self, job_cpuset: &JobCpuset, owner: Uid) {
        let path = job_cpuset.path.clone();
        if job_cpuset.creator == CgroupCreator::Scheduler {
            self.scheduler_cpusets.insert(path, job_cpuset.clone());
        } else {
            self.cgroup_owners.insert(path, owner);
        }
    }

    /// Iterates over the cpusets that pjw wrote in cgroups of batch systems. Leaves out each cpuset that was removed,
    /// or whose PUs (logical CPUs) were changed, after pjw wrote it.
    pub fn scheduler_cpusets_in_effect(&self) -> impl Iterator<Item = &JobCpuset> {
        self.scheduler_cpusets
            .values()
            .filter(|written| self.cpusets.get(&written.path) == Some(&written.spec.cpus))
    }

    /// Sets the cpuset of the cgroup at `path` to the PUs (logical CPUs) `cpus`, and updates the affinity masks in the
    /// cgroup ([`SimMachine::rewrite_cgroup_masks`]) if the cpuset changes. If `cpus` is `None`, removes the cpuset.
    /// pjw then no longer manages the cgroup, so the entries of the cgroup in [`SimMachine::cgroup_owners`],
    /// [`SimMachine::scheduler_cpusets`], [`SimMachine::cgroup_origins`], [`SimMachine::frozen_cgroups`] and
    /// [`SimMachine::idle_cgroups`] are deleted too.
    pub fn write_cpuset(&mut self, path: &str, cpus: Option<&CpuSet>) {
        let before = match cpus {
            Some(cpus) => self.cpusets.insert(path.to_owned(), cpus.clone()),
            None => {
                self.cgroup_owners.remove(path);
                self.scheduler_cpusets.remove(path);
                self.cgroup_origins.remove(path);
                self.frozen_cgroups.remove(path);
                self.idle_cgroups.remove(path);
                self.cpusets.remove(path)
            }
        };
        self.log(|| format!("  cpuset {path} is {cpus:?}"));
        if before.as_ref() != cpus {
            self.rewrite_cgroup_masks(path, None);
        }
    }

    /// Updates the affinity masks of all threads in the cgroup at `path` and in the cgroups below it, as the
    /// kernel does after a change of the cpuset of this cgroup. With a pid in `only_process`, updates only the
    /// threads of this process. With `None`, updates the threads of all processes.
    ///
    /// The new mask of a thread is the intersection of its requested mask with the cpuset, or the whole cpuset
    /// if the intersection is empty. On a simulated kernel before Linux 6.2, the new mask is always the whole
    /// cpuset.
    pub fn rewrite_cgroup_masks(&mut self, path: &str, only_process: Option<Pid>) {
        let forgets_masks = !self.cpuset_support.affinity_persists;
        let is_concerned = |process: &&mut SimProcess| {
            only_process.is_none_or(|pid| pid == process.id.pid) && is_cgroup_within(&process.cgroup, path)
        };
        let has_cpuset = only_process.is_none() || self.cpuset_of(path).is_some();
        let now = self.now;
        for process in self.processes.values_mut().filter(is_concerned) {
            process.was_in_cpuset |= has_cpuset;
            for thread in process.threads.values_mut() {
                thread.fallback_mask = None;
                if forgets_masks {
                    (thread.requested_mask, thread.mask_requested_at) = (self.cpus.clone(), now);
                }
                if has_cpuset {
                    thread.record_replacement();
                }
            }
        }
    }

    /// Returns the cpuset that restricts the processes of a cgroup: that of the cgroup itself, or of the nearest cgroup
    /// above that has one. `None` if there is none.
    fn cpuset_of(&self, cgroup: &str) -> Option<&CpuSet> {
        let enclosing = self.cpusets.iter().filter(|(path, _)| is_cgroup_within(cgroup, path));
        let enclosing = enclosing.filter(|(path, _)| !self.without_cpuset_controller.contains(*path));
        enclosing.max_by_key(|(path, _)| path.len()).map(|(_, cpus)| cpus)
    }

    /// Returns the PUs (logical CPUs) on which the simulated kernel allows processes of the cgroup at the path
    /// `cgroup` to run (`cpuset.cpus.effective`). A PU is active if threads can run on it
    /// ([`SimMachine::set_active_pus`]). The result depends on the cpuset of the cgroup, or of the nearest cgroup above
    /// that has a cpuset:
    ///
    /// - If there is no such cpuset, the result is all PUs that are active now.
    /// - Otherwise, the result is the PUs of this cpuset that were active at the last call of
    ///   [`SimMachine::rewrite_masks_after_hotplug`]. If this is no PU at all, the result is all PUs that were active
    ///   at that call.
    #[must_use]
    pub fn effective_cpus(&self, cgroup: &str) -> CpuSet {
        let Some(cpuset) = self.cpuset_of(cgroup) else { return self.active.clone() };
        let effective = cpuset.intersection(&self.active_at_rewrite);
        if effective.is_empty() { self.active_at_rewrite.clone() } else { effective }
    }

    /// Returns the effective affinity mask of `thread`, as sched_getaffinity(2) would return it. `thread` is a
    /// thread of `process`.
    #[must_use]
    pub fn effective_mask(&self, process: &SimProcess, thread: &SimThread) -> CpuSet {
        match &thread.fallback_mask {
            Some(mask) => mask.intersection(&self.active),
            None => self.effective_mask_in(&process.cgroup, &thread.requested_mask),
        }
    }

    /// Returns the effective affinity mask that a thread would have in the cgroup at the path `cgroup`, if the
    /// mask `requested` was requested for the thread. No such thread needs to exist.
    #[must_use]
    pub fn effective_mask_in(&self, cgroup: &str, requested: &CpuSet) -> CpuSet {
        let mask = self.stored_mask(cgroup, requested).intersection(&self.active);
        if mask.is_empty() { self.effective_cpus(cgroup).intersection(&self.active) } else { mask }
    }

    /// Returns the mask that the kernel stores in a cgroup for a request, without regard to PUs that became inactive
    /// since the last rewrite.
    fn stored_mask(&self, cgroup: &str, requested: &CpuSet) -> CpuSet {
        if self.cpuset_of(cgroup).is_none() {
            return requested.clone();
        }
        let effective = self.effective_cpus(cgroup);
        let mask = requested.intersection(&effective);
        if mask.is_empty() { effective } else { mask }
    }

    /// Sets the requested mask of the thread `tid` of the process `pid`, and returns the thread. Returns `None` and
    /// changes nothing if the kernel would refuse the mask: it contains no PU that the thread may use. Also returns
    /// `None` if there is no such thread.
    fn set_requested(&mut self, pid: Pid, tid: Tid, mask: &CpuSet) -> Option<&mut SimThread> {
        let possible = self.effective_cpus(&self.processes.get(&pid)?.cgroup);
        let possible = possible.intersection(&self.active);
        let thread = self.processes.get_mut(&pid)?.threads.get_mut(&tid)?;
        if !mask.intersects(&possible) {
            return None;
        }
        (thread.requested_mask, thread.fallback_mask) = (mask.clone(), None);
        Some(thread)
    }

    /// Records that the daemon has read the mask of the thread `tid` of the process `pid`. If a program
    /// requested this mask, the simulation run checks from now on that the daemon knows the mask. For this
    /// purpose, [`SimThread::program_mask_request`] changes from [`ProgramMaskRequest::Unread`] to
    /// [`ProgramMaskRequest::Read`]. If the field has another value, the function has no effect.
    pub fn record_mask_read(&mut self, pid: Pid, tid: Tid) {
        let thread = self.processes.get_mut(&pid).and_then(|process| process.threads.get_mut(&tid));
        let unread = thread.filter(|thread| thread.program_mask_request == ProgramMaskRequest::Unread);
        if let Some(thread) = unread {
            thread.program_mask_request = ProgramMaskRequest::Read;
        }
    }

    /// Simulates that pjw sets the affinity mask of the thread `tid` of the process `pid` to `mask`. Returns whether
    /// the simulated kernel accepts the mask. Returns false if there is no such thread.
    ///
    /// The original mask of the thread, which pjw must restore later, does not change. A mask that the program set
    /// shortly before, and that the daemon has not read yet, is lost: [`SimThread::program_mask_request`] changes from
    /// [`ProgramMaskRequest::Unread`] to [`ProgramMaskRequest::Hidden`].
    pub fn request_mask_as_pjw(&mut self, pid: Pid, tid: Tid, mask: &CpuSet) -> bool {
        let thread = self.set_requested(pid, tid, mask);
        let is_accepted = thread.is_some();
        if let Some(thread) = thread {
            thread.record_replacement();
        }
        is_accepted
    }

    /// Records that pjw is about to set the affinity mask of a thread to `mask`. Call this before each
    /// [`SimMachine::request_mask_as_pjw`].
    ///
    /// If a program later sets the same mask for any thread, the daemon can't know whether pjw or the program set it.
    /// [`SimMachine::request_mask`] then marks the request of the program as [`ProgramMaskRequest::Hidden`].
    pub fn record_mask_requested_by_pjw(&mut self, mask: &CpuSet) {
        self.requested_by_pjw.insert(mask.clone());
    }

    /// Requests the affinity mask `mask` for the thread `tid` of the process `pid`, as a program would. If the
    /// simulated kernel accepts the request, `mask` becomes the original mask of the thread: the mask that pjw must
    /// restore when pjw releases the job. If [`SimMachine::reports_affinity_requests`] is true, also adds a report of
    /// the request to [`SimMachine::affinity_requests`]. Returns whether the kernel accepts the request. Returns false
    /// also if there is no such thread.
    pub fn request_mask(&mut self, pid: Pid, tid: Tid, mask: &CpuSet) -> bool {
        let now = self.now;
        let was_in_cpuset = self.processes.get(&pid).is_none_or(|process| process.was_in_cpuset);
        // On a kernel before Linux 6.2, a move to another cgroup sets the requested mask of a thread to all PUs.
        let was_set_by_other =
            |thread: &SimThread| thread.requested_mask == *mask && thread.original_mask != *mask;
        let thread = self.processes.get(&pid).and_then(|process| process.threads.get(&tid));
        let is_hidden =
            was_in_cpuset || self.requested_by_pjw.contains(mask) || thread.is_some_and(was_set_by_other);
        let thread = self.set_requested(pid, tid, mask);
        let is_accepted = thread.is_some();
        if let Some(thread) = thread {
            let request = if is_hidden { ProgramMaskRequest::Hidden } else { ProgramMaskRequest::Unread };
            (thread.original_mask, thread.program_mask_request) = (mask.clone(), request);
            thread.mask_requested_at = now;
            thread.run_ns += 1;
        }
        if let Some(process) = self.processes.get(&pid).filter(|_| self.reports_affinity_requests) {
            self.affinity_requests.push(AffinityRequest {
                caller: tid,
                caller_pid: pid,
                caller_parent: process.parent,
                comm: process.comm,
                called_at: Nanos(now),
                target: None,
                requested_mask: mask.clone(),
                refused: !is_accepted,
            });
        }
        self.log(|| format!("  thread {tid} of {pid} requests {mask}: accepted: {is_accepted}"));
        is_accepted
    }

    /// Simulates a program that calls sched_setaffinity(2) twice for the thread `tid` of the process `pid`: first
    /// with all PUs (logical CPUs), then with the mask that the thread had before. A scan finds the same mask as
    /// before the calls. So the daemon can learn of the calls only from the reports of the simulated kernel in
    /// [`SimMachine::affinity_requests`]. This function adds a report of the first call to this list if
    /// [`SimMachine::reports_affinity_requests`] is true. It never adds a report of the second call.
    ///
    /// If the mask before the calls came from pjw, the daemon can't know that now the program has requested the same
    /// mask. In this case, [`SimThread::program_mask_request`] becomes [`ProgramMaskRequest::Hidden`].
    pub fn request_and_restore_mask(&mut self, pid: Pid, tid: Tid) {
        let before = self.processes.get(&pid).and_then(|process| process.threads.get(&tid)).cloned();
        self.request_mask(pid, tid, &self.cpus.clone());
        if let (Some(mut before), Some(process)) = (before, self.processes.get_mut(&pid)) {
            if before.requested_mask != before.original_mask {
                before.program_mask_request = ProgramMaskRequest::Hidden;
            }
            process.threads.insert(tid, before);
        }
    }

    /// Switches the PU (logical CPU) `pu` off if it is online, and on if it is offline (hotplug). The last
    /// online PU stays online. The simulated kernel updates the affinity masks of the threads in cpusets
    /// immediately.
    pub fn toggle_pu(&mut self, pu: Pu) {
        let mut online = self.online.clone();
        if !online.remove(pu) || online.is_empty() {
            online.insert(pu);
        }
        self.set_online_pus(&online);
    }

    /// Switches the PUs (logical CPUs) in `online` on, and all other PUs off (hotplug). The simulated kernel
    /// updates the affinity masks of the threads in cpusets immediately.
    pub fn set_online_pus(&mut self, online: &CpuSet) {
        self.online = online.clone();
        self.active = online.clone();
        self.rewrite_masks_after_hotplug();
    }

    /// Makes the simulated kernel run threads only on the PUs (logical CPUs) in `active`, as at the start of a
    /// hotplug operation. If the mask of a thread has no active PU, the thread gets a fallback mask
    /// ([`SimThread::fallback_mask`]): all PUs of its cpuset. If the thread has no cpuset, or its cpuset has no
    /// active PU, the fallback mask is all PUs of the machine. [`SimMachine::rewrite_masks_after_hotplug`] completes
    /// the operation.
    pub fn set_active_pus(&mut self, active: &CpuSet) {
        self.active = active.clone();
        let mut processes = std::mem::take(&mut self.processes);
        for process in processes.values_mut() {
            let cpuset = self.cpuset_of(&process.cgroup).filter(|cpus| cpus.intersects(active));
            for thread in process.threads.values_mut() {
                let stored = self.stored_mask(&process.cgroup, &thread.requested_mask);
                if !thread.fallback_mask.as_ref().unwrap_or(&stored).intersects(active) {
                    thread.fallback_mask = Some(cpuset.unwrap_or(&self.cpus).clone());
                }
            }
        }
        self.processes = processes;
    }

    /// Completes a hotplug operation, as the kernel does some time after PUs (logical CPUs) were switched off or
    /// on. Updates the affinity masks of the threads in each cpuset that contains a switched PU. A PU counts as
    /// switched if it was switched off or on since the last call of this function. In cgroup v1, also
    /// removes the inactive PUs from the cpusets.
    pub fn rewrite_masks_after_hotplug(&mut self) {
        let before = std::mem::replace(&mut self.active_at_rewrite, self.active.clone());
        let changed = before.difference(&self.active).union(&self.active.difference(&before));
        let concerned = self.cpusets.iter().filter(|(_, cpus)| cpus.intersects(&changed));
        let concerned: Vec<String> = concerned.map(|(path, _)| path.clone()).collect();
        if self.cpuset_support.hierarchy == CpusetHierarchy::Legacy {
            concerned.iter().for_each(|path| self.remove_inactive_pus(path));
        }
        concerned.iter().for_each(|path| self.rewrite_cgroup_masks(path, None));
    }

    /// Removes the inactive PUs from the cpuset of the cgroup at `path`, as cgroup v1 does. The PUs do not come back
    /// when they are online again (kernel/cgroup/cpuset-v1.c, `cpuset1_hotplug_update_tasks`). The kernel moves the
    /// processes of a cpuset that is left without PUs to the cgroup above. This is not simulated: such a cpuset keeps
    /// its PUs.
    fn remove_inactive_pus(&mut self, path: &str) {
        let Some(cpus) = self.cpusets.get_mut(path) else { return };
        let left = cpus.intersection(&self.active);
        if !left.is_empty() {
            *cpus = left;
        }
    }

    /// Returns whether a process is in the cgroup at `path`, or in a cgroup below it.
    #[must_use]
    pub fn is_cgroup_populated(&self, path: &str) -> bool {
        self.processes.values().any(|process| is_cgroup_within(&process.cgroup, path))
    }
}
