//! The provisions of a run: jobs that keep their cores without a process, and rules that recognise their processes.

use pjw_core::command::{AssignCommand, Command, ProvisionCommand};
use pjw_core::job::{JobId, Provision, ProvisionRule};
use pjw_sim::seed::RandomStream;
use pjw_sim::workload::USERS;

use crate::run::{ROOT, Run};

impl Run {
    /// In a run with provisions, some new jobs become provisions, and some processes join a provision that exists.
    pub(super) fn with_provision(&mut self, assign: AssignCommand) -> Command {
        let jobs = &self.warden.state().jobs;
        let is_new = jobs.get(&assign.job).is_none();
        let known: Vec<JobId> = jobs.provisions().map(|job| job.id.clone()).collect();
        let random = self.lending.as_mut().and_then(|lending| lending.provisions.as_mut());
        let Some(random) = random.filter(|_| is_new) else { return Command::Assign(assign) };
        match (random.random_below(4), random.random_element(&known)) {
            (0, _) => Command::Provision(ProvisionCommand {
                job: assign.job,
                cores: random.random_below(4),
                provision: Provision { rule: random_rule(random), from_config: false },
                caller: ROOT,
            }),
            (1..=2, Some(job)) => {
                Command::Assign(AssignCommand { pids: assign.pids, ..AssignCommand::new(job.clone(), ROOT) })
            }
            _ => Command::Assign(assign),
        }
    }
}

/// A rule that recognises the processes of a user, or none.
fn random_rule(random: &mut RandomStream) -> Option<ProvisionRule> {
    let user = random.random_element(&USERS).copied();
    random.random_bool(500).then(|| ProvisionRule { user, ..ProvisionRule::default() })
}
