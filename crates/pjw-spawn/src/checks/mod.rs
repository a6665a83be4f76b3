//! The checks before the first process of a group is made. If a check fails, no process is started.

mod error;
mod masks;
pub(crate) mod nodes;
mod pids_cgroup;
pub(crate) mod program;
pub(crate) mod room;
mod size;

pub use error::CheckError;

use crate::instance::Instance;
use crate::replicate::{ReplicaError, Replicas};
use crate::setup::Setup;
use crate::tasks::room::check_room;

/// Makes all checks of `instances` that are possible before a process is started.
/// [`crate::SpawnContext::check_instances`] lists the checks. `setup` contains the parameters that all instances have
/// in common. `starters` is the number of threads and processes that will start the instances. Returns the first error.
pub(crate) fn check_all(setup: &Setup, instances: &[Instance], starters: usize) -> Result<(), CheckError> {
    if instances.is_empty() {
        return Err(CheckError::NoInstances);
    }
    masks::check_masks(instances)?;
    nodes::check_nodes(instances)?;
    size::check_sizes(setup, instances)?;
    if let Some(task_program) = &setup.task_program {
        check_room(task_program, instances.len())?;
    }
    let has_node = |instance: &Instance| instance.placement.preferred_numa_node.is_some();
    if setup.replicas.is_some() && instances.iter().any(has_node) && !room::is_system_administrator() {
        return Err(ReplicaError::NotPermitted.into());
    }
    Replicas::check_free_memory(setup.replicas.as_deref())?;
    if instances.len() == 1 {
        // For a single process, the check of the kernel at the start is enough. Reading the limits takes longer than
        // the start.
        return Ok(());
    }
    // Each spawner thread has one template.
    let templates = if setup.template_stop_point.is_some() { starters / 2 } else { 0 };
    room::check_cgroups(instances, starters, templates)?;
    let Some(credentials) = &setup.credentials else {
        return room::check_limits_of_user(instances.len(), starters);
    };
    room::check_limits_of_users(credentials.uid, instances.len(), starters, templates)
}
