//! The audit of each plan: the actions of jobs that fail it are dropped.

use pjw_core::audit::{GrantAudit, audit_actions};
use pjw_core::cpuset_group::CpusetAction;
use pjw_core::job::JobId;
use pjw_core::plan::{MaskAction, Plan};
use pjw_core::ports::{Journal, MachineInterface};

use super::cycle::Warden;

impl<N: MachineInterface, J: Journal> Warden<N, J> {
    /// Checks the changes that are planned in `plan`, and the PUs (logical CPUs) that each job holds, for errors of pjw
    /// itself. Returns the plan without the changes for the jobs with an error. The affinity masks and cpusets of these
    /// jobs stay as they are.
    pub(super) fn without_unsound_actions(&mut self, plan: Plan) -> Plan {
        self.ongoing_failures.audit_violations.clear();
        self.audit_grants();
        let of_actions = audit_actions(&self.state, &plan, &self.policy);
        let of_grants = self.audited_grants.iter().flat_map(|(_, audit)| audit.violations());
        for violation in of_grants.chain(&of_actions) {
            self.ongoing_failures
                .audit_violations
                .insert(violation.concerned_job().cloned(), violation.to_string());
        }
        let broken = &self.ongoing_failures.audit_violations;
        if broken.is_empty() {
            return plan;
        }
        let is_valid = |job: &JobId| !broken.contains_key(&None) && !broken.contains_key(&Some(job.clone()));
        let (kept, dropped): (Vec<MaskAction>, Vec<MaskAction>) =
            plan.mask_actions.into_iter().partition(|action| is_valid(&action.job));
        dropped.iter().for_each(|action| self.state.record_mask_not_attempted(action));
        let (cpuset_actions, unsound): (Vec<CpusetAction>, Vec<CpusetAction>) =
            plan.cpuset_actions.into_iter().partition(|action| is_valid(&action.job));
        // A job without a valid cpuset plan is kept by masks.
        unsound
            .iter()
            .for_each(|action| self.state.cpusets.record_refusal(action, "its plan failed the audit"));
        Plan { cpuset_actions, mask_actions: kept }
    }

    /// Checks the grants of the jobs that changed, and those that a change of the pool concerns.
    fn audit_grants(&mut self) {
        let changed = self.state.jobs.take_changed_ids();
        let version = self.state.pool.change_count();
        match &mut self.audited_grants {
            Some((audited, _)) if *audited == version && changed.is_empty() => {}
            Some((audited, audit)) => {
                audit.update(&self.state, &changed, &self.policy);
                *audited = version;
            }
            None => self.audited_grants = Some((version, GrantAudit::new(&self.state, &self.policy))),
        }
    }
}
