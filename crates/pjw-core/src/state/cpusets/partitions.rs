//! Which jobs have an isolated partition, in which the kernel does not balance threads between PUs (logical CPUs).

use super::CpusetRegistry;
use crate::terms::JobId;

impl CpusetRegistry {
    /// Whether the cpuset of the job `id` is an isolated partition of the kernel (`cpuset.cpus.partition`), or is to
    /// become one. False if pjw manages no cpuset for the job.
    #[must_use]
    pub fn has_isolated_partition(&self, id: &JobId) -> bool {
        self.cpuset_of(id).is_some_and(|managed| managed.job_cpuset.spec.isolated)
    }

    /// Whether a change of the isolated partition of the job `id` is delayed. Until it is complete, processes outside
    /// the partition may run on any other PU.
    pub(crate) fn is_partition_delayed(&self, id: &JobId) -> bool {
        self.delayed_changes.has_change_for(id) && self.has_isolated_partition(id)
    }
}
