//! The audit of each plan and of the grants. The planned actions of a job that fails the audit are dropped.

use pjw_core::audit::{GrantAudit, audit_actions};
use pjw_core::cpuset_group::CpusetAction;
use pjw_core::job::JobId;
use pjw_core::plan::{MaskAction, Plan};
use pjw_core::ports::{Journal, MachineInterface};

use super::cycle::Warden;

impl<N: MachineInterface, J: Journal> Warden<N, J> {
    /// Returns `plan` without the changes for jobs in which pjw itself has made an error. Checks the planned changes,
    /// and the PUs (logical CPUs) that each job holds. The affinity masks and cpusets of a job with an error stay as
    /// they are. If an error concerns no single job, all changes are left out.
    pub(super) fn without_unsound_actions(&mut self, plan: Plan) -> Plan {
        self.ongoing_failures.audit_violations.clear();
        self.audit_grants();
        let action_violations = audit_actions(&self.state, &plan, &self.policy);
        let grant_violations = self.audited_grants.iter().flat_map(|(_, audit)| audit.violations());
        for violation in grant_violations.chain(&action_violations) {
            self.ongoing_failures
                .audit_violations
                .insert(violation.concerned_job().cloned(), violation.to_string());
        }
        let violations = &self.ongoing_failures.audit_violations;
        if violations.is_empty() {
            return plan;
        }
        let is_valid =
            |job: &JobId| !violations.contains_key(&None) && !violations.contains_key(&Some(job.clone()));
        let (mask_actions, dropped): (Vec<MaskAction>, Vec<MaskAction>) =
            plan.mask_actions.into_iter().partition(|action| is_valid(&action.job));
        dropped.iter().for_each(|action| self.state.record_mask_not_attempted(action));
        let (cpuset_actions, dropped): (Vec<CpusetAction>, Vec<CpusetAction>) =
            plan.cpuset_actions.into_iter().partition(|action| is_valid(&action.job));
        // A job without a valid cpuset plan is kept by masks.
        dropped
            .iter()
            .for_each(|action| self.state.cpusets.record_refusal(action, "its plan failed the audit"));
        Plan { cpuset_actions, mask_actions }
    }

    /// Checks the grants (the PUs that a job holds) of the jobs that changed, and those that a change of the pool
    /// concerns. The pool has the holder of each PU. Stores the result in `audited_grants`. If there is no earlier
    /// result, checks all grants.
    fn audit_grants(&mut self) {
        let changed = self.state.jobs.take_changed_ids();
        let version = self.state.pool.change_count();
        match &mut self.audited_grants {
            Some((audited_version, _)) if *audited_version == version && changed.is_empty() => {}
            Some((audited_version, audit)) => {
                audit.update(&self.state, &changed, &self.policy);
                *audited_version = version;
            }
            None => self.audited_grants = Some((version, GrantAudit::new(&self.state, &self.policy))),
        }
    }
}

#[cfg(test)]
mod tests {
    use pjw_core::command::Command;
    use pjw_core::cpuset::CpuSet;
    use pjw_core::cpuset_group::CpusetSupport;
    use pjw_core::ids::{Pid, ThreadId, Tid, Uid};
    use pjw_core::plan::MaskActionKind;
    use pjw_core::policy::Policy;
    use pjw_core::state::WardenState;
    use pjw_core::testing::{cpu_set, job, regular_topology};
    use pjw_sim::faults::Faults;
    use pjw_sim::journal::SimJournal;
    use pjw_sim::testing::{ScriptedMachine, assign_command};

    use super::*;

    #[test]
    fn the_changes_of_a_job_whose_plan_is_unsound_are_dropped_and_those_of_others_are_kept() {
        let topology = regular_topology(2, 1, 1, 4, 1);
        let kernel = ScriptedMachine::new(topology.cpus(), CpusetSupport::default());
        let host = pjw_sources::LocalHost { name: "n1".to_owned(), flux_user: None };
        let mut warden = Warden::new(
            kernel.simulated_machine(),
            SimJournal::new(Faults::none()),
            WardenState::new(topology, &cpu_set("")),
            Vec::new(),
            Policy::default(),
            host,
        );
        let jobs = [("a", 10), ("b", 20)];
        let commands = jobs.map(|(id, pid)| {
            drop(kernel.spawn(pid, 1, Uid(1001).0));
            Command::Assign(assign_command(id, 2, &[Pid(pid)]))
        });
        let scan = warden.state().scan_request(true);
        let replies = warden.run_cycle(scan, &commands).replies;
        assert!(replies.iter().all(Result::is_ok), "{replies:?}");
        let grants = jobs.map(|(id, _)| warden.state().grant_of(&job(id)).unwrap().cpus.clone());
        let action = |(id, pid): (&str, u32), target: &CpuSet| {
            let process = warden.state().process(Pid(pid)).unwrap().id;
            let thread = ThreadId { process, tid: Tid(pid), start: process.start };
            let (kind, current) = (MaskActionKind::Confine, cpu_set("0-7"));
            MaskAction::with_exact_mask(kind, &job(id), thread, &current, target.clone(), String::new())
        };
        // Job a gets a mask on the cores of job b.
        let actions = [action(jobs[0], &grants[1]), action(jobs[1], &grants[1])];
        let plan = Plan { mask_actions: actions.to_vec(), cpuset_actions: Vec::new() };
        let plan = warden.without_unsound_actions(plan);
        assert_eq!(plan.mask_actions, [actions[1].clone()]);
        let violations = &warden.ongoing_failures().audit_violations;
        assert_eq!(violations.keys().collect::<Vec<_>>(), [&Some(job("a"))], "{violations:?}");
    }
}
