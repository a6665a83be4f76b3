//! What an administrator should know about the rules of provisions, in sentences, for the warnings in the status.

use crate::basics::{cpus_text, prelude::*};
use crate::phases::membership::matches_rule;
use crate::state::WardenState;
use crate::terms::{Job, JobId, MembershipEvidence, Policy, ProvisionRule};

/// Returns a warning for users if a process of the provision `job` also matches the rule of another provision. A
/// provision is a job whose cores are promised to a service. The rule of a provision ([`ProvisionRule`]) recognises the
/// processes of the service. Only processes that were recognised by the rule of `job` are checked. Returns `None` if no
/// such process matches another rule, or if `job` is not a provision.
#[must_use]
pub fn ambiguous_rule_warning(state: &WardenState, policy: &Policy, job: &Job) -> Option<String> {
    job.provision.as_ref()?;
    let others = state.jobs.provisions().filter(|other| other.id != job.id);
    let rules: Vec<(&JobId, &ProvisionRule)> =
        others.filter_map(|other| Some((&other.id, other.provision.as_ref()?.rule.as_ref()?))).collect();
    if rules.is_empty() {
        return None;
    }
    let recognised =
        state.members_of(&job.id).filter(|member| member.evidence == MembershipEvidence::Provision);
    let (pid, (other, rule)) =
        recognised.filter_map(|member| state.process(member.id.pid)).find_map(|process| {
            let matches = |(_, rule): &&(&JobId, &ProvisionRule)| matches_rule(state, policy, rule, process);
            Some((process.id.pid, *rules.iter().find(matches)?))
        })?;
    Some(format!("process {pid} of {} also matches {rule}, the rule of {other}", job.id))
}

/// Returns a warning for users if the provision `job` holds cores, but no process of its service was found. A provision
/// is a job whose cores are promised to a service. The rule of a provision ([`ProvisionRule`]) recognises the processes
/// of the service. Returns `None` in each of these cases:
///
/// - At least one process belongs to `job`.
/// - `job` holds no cores.
/// - `job` has no rule, or is not a provision.
#[must_use]
pub fn unmatched_rule_warning(state: &WardenState, job: &Job) -> Option<String> {
    let rule = job.provision.as_ref()?.rule.as_ref()?;
    let grant = job.grant.as_ref()?;
    let is_unmatched = state.members_of(&job.id).next().is_none();
    is_unmatched.then(|| {
        format!("{} keeps {} for {rule}, and no process matches that", job.id, cpus_text(&grant.cpus))
    })
}
