//! Changes of simulated cpusets, as the kernel and systemd make them.

use pjw_core::cpuset_group::{CgroupCreator, CpusetChange, CpusetOutcome, JobCpuset};
use pjw_core::ids::{Pid, ProcessId, Uid, is_cgroup_within};

use crate::world::SimMachine;

/// Creates or changes the cpuset `job_cpuset`, and returns the outcome. If systemd is to make its cgroup, first moves
/// the processes `initial_processes` there. Fails if all of these processes have ended, if the cgroup of a batch system
/// is gone, or if the cgroup has no cpuset controller. `owner` is the owner of the job.
fn create_cpuset(
    world: &mut SimMachine,
    job_cpuset: &JobCpuset,
    owner: Uid,
    initial_processes: &[ProcessId],
) -> CpusetOutcome {
    let path = &job_cpuset.path;
    let is_empty = !world.is_cgroup_populated(path);
    if job_cpuset.creator == CgroupCreator::Scheduler && is_empty {
        return CpusetOutcome::Gone;
    }
    if world.without_cpuset_controller.contains(path) {
        return CpusetOutcome::Refused { reason: "its controller is switched off".to_owned() };
    }
    if job_cpuset.creator == CgroupCreator::Systemd && is_empty {
        let is_alive = |id: &&ProcessId| world.processes.get(&id.pid).is_some_and(|found| found.id == **id);
        let alive: Vec<Pid> = initial_processes.iter().filter(is_alive).map(|id| id.pid).collect();
        if alive.is_empty() {
            return CpusetOutcome::Gone;
        }
        for pid in alive {
            // systemd moves the process from any cgroup. If another program moved the process after the scan, pjw can't
            // know from which cgroup systemd moves it.
            if world.processes[&pid].attributes_changed {
                world.mark_original_cgroup_unknown(pid);
            }
            let from = world.processes[&pid].cgroup.clone();
            world.record_origin_cgroup(path, &from);
            world.move_process_for_pjw(pid, path);
        }
    }
    world.write_cpuset_attribute(job_cpuset, owner);
    world.write_cpuset(path, Some(&job_cpuset.spec.cpus));
    world.set_frozen_and_idle(path, &job_cpuset.spec);
    if job_cpuset.spec.isolated {
        world.isolated_partitions.insert(path.clone());
    } else {
        world.isolated_partitions.remove(path);
    }
    CpusetOutcome::Done { effective: Some(world.effective_cpus(path)) }
}

/// Marks the processes whose masks the delayed `change` may affect: until the change is complete, the daemon can't
/// know who set a mask that it reads. The program may have requested the mask. The mask may also be what the cpuset
/// leaves of an earlier request, or before Linux 6.2 the whole cpuset.
pub(super) fn mark_affected_processes(world: &mut SimMachine, change: &CpusetChange) {
    let (written, moved) = match change {
        CpusetChange::Create { job_cpuset, initial_processes, .. } => {
            (Some(&job_cpuset.path), initial_processes.as_slice())
        }
        CpusetChange::MoveIn { process, .. } | CpusetChange::MoveBack { process, .. } => {
            (None, std::slice::from_ref(process))
        }
        CpusetChange::RemoveLimits { job_cpuset } => (Some(&job_cpuset.path), [].as_slice()),
        CpusetChange::Remove { .. } => (None, [].as_slice()),
    };
    for process in world.processes.values_mut() {
        let is_inside = written.is_some_and(|path| is_cgroup_within(&process.cgroup, path));
        process.was_in_cpuset |= is_inside || moved.contains(&process.id);
    }
}

/// Changes a cpuset or moves a process as the kernel and systemd would do, and returns the outcome.
pub(super) fn change_cpuset(world: &mut SimMachine, change: &CpusetChange) -> CpusetOutcome {
    match change {
        CpusetChange::Create { job_cpuset, owner, initial_processes } => {
            return create_cpuset(world, job_cpuset, *owner, initial_processes);
        }
        CpusetChange::MoveIn { process, from, to } | CpusetChange::MoveBack { process, from, to } => {
            let found = world.processes.get(&process.pid);
            if found.is_none_or(|found| found.id != *process || found.cgroup != *from) {
                return CpusetOutcome::Gone;
            }
            if world.removed_cgroups.contains(to) {
                return CpusetOutcome::Refused { reason: "it is gone".to_owned() };
            }
            if matches!(change, CpusetChange::MoveIn { .. }) {
                world.record_origin_cgroup(to, from);
            }
            world.move_process_for_pjw(process.pid, to);
        }
        CpusetChange::RemoveLimits { job_cpuset } if job_cpuset.creator == CgroupCreator::Scheduler => {
            world.write_cpuset(&job_cpuset.path, None);
        }
        CpusetChange::RemoveLimits { job_cpuset } => {
            let all = world.cpus.clone();
            world.thaw(&job_cpuset.path);
            world.isolated_partitions.remove(&job_cpuset.path);
            world.cgroup_owners.remove(&job_cpuset.path);
            world.write_cpuset(&job_cpuset.path, Some(&all));
        }
        CpusetChange::Remove { job_cpuset } if job_cpuset.creator == CgroupCreator::Scheduler => {}
        CpusetChange::Remove { job_cpuset } if world.is_cgroup_populated(&job_cpuset.path) => {
            return CpusetOutcome::Refused { reason: "processes are still in it".to_owned() };
        }
        CpusetChange::Remove { job_cpuset } => world.write_cpuset(&job_cpuset.path, None),
    }
    CpusetOutcome::Done { effective: None }
}
