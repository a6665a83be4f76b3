//! The event loop and the provisions of the configuration: the cores that the configuration promises to services.

use pjw_core::command::{Caller, Command, ProvisionCommand, Reply};
use pjw_core::ids::Uid;
use pjw_core::job::{Job, JobId, PriorityClass, Provision};
use pjw_core::plan::Warning;
use pjw_core::policy::DaemonMode;
use pjw_core::refusal::Refusal;

use super::EventLoop;
use crate::config::ProvisionSettings;

/// The administrator that wrote the configuration.
const ADMINISTRATOR: Caller = Caller { uid: Uid::ROOT, is_admin: true };

/// Returns those provisions in `before` that one of the `commands` makes again without a change. A provision is a
/// number of cores that pjwd keeps for a service. `before` has the provisions of the configuration before a reload.
pub(super) fn unchanged_provisions(
    commands: &[Command],
    before: &[ProvisionSettings],
) -> Vec<ProvisionSettings> {
    let makes = |command: &Command, settings: &ProvisionSettings| match command {
        Command::Provision(made) => {
            made.job == settings.job && made.cores == settings.cores && made.provision.rule == settings.rule
        }
        _ => false,
    };
    let is_made = |settings: &&ProvisionSettings| commands.iter().any(|command| makes(command, settings));
    before.iter().filter(is_made).cloned().collect()
}

/// Returns the ids of the provisions that `commands` make. A provision is a number of cores that pjwd keeps for a
/// service.
pub(super) fn ids_of_made_provisions(commands: &[Command]) -> Vec<JobId> {
    let made = |command: &Command| match command {
        Command::Provision(made) => Some(made.job.clone()),
        _ => None,
    };
    commands.iter().filter_map(made).collect()
}

impl EventLoop {
    /// Makes the provisions of the configuration, at the start of pjwd. The caller must do this before it reads the
    /// first command of a client, which could take the promised cores.
    pub(super) fn make_provisions(&mut self) {
        self.own_commands = self.provision_commands();
        if !self.own_commands.is_empty() {
            self.run_cycle(Vec::new());
        }
    }

    /// Returns the commands that make the existing provisions agree with the configuration: commands that create or
    /// change the provisions of the configuration, and commands that remove provisions of an earlier configuration.
    /// Provisions that users created by commands stay. There are no commands in the mode `observe`, in which pjwd
    /// changes nothing. A provision is a number of cores that pjwd keeps for a service.
    pub(super) fn provision_commands(&self) -> Vec<Command> {
        // pjwd would refuse the commands, and a warning would name tables that have no mistake.
        if self.config.settings().mode == DaemonMode::Observe {
            return Vec::new();
        }
        let wanted = &self.config.settings().provisions;
        let is_wanted = |job: &&Job| wanted.iter().any(|settings| settings.job == job.id);
        let is_from_config =
            |job: &&Job| job.provision.as_ref().is_some_and(|provision| provision.from_config);
        let jobs = self.warden.state().jobs.provisions();
        let removed = jobs.filter(is_from_config).filter(|job| !is_wanted(job));
        let removed = removed.map(|job| Command::Release { job: job.id.clone(), caller: ADMINISTRATOR });
        let provision_of =
            |settings: &ProvisionSettings| Provision { rule: settings.rule.clone(), from_config: true };
        let is_in_force = |settings: &&ProvisionSettings| {
            self.warden.state().jobs.get(&settings.job).is_some_and(|job| {
                job.provision.as_deref() == Some(&provision_of(settings))
                    && job.request.as_ref().is_some_and(|request| {
                        request.cpu_request == settings.cpu_request()
                            && request.class == PriorityClass::Guaranteed
                    })
            })
        };
        let missing = wanted.iter().filter(|settings| !is_in_force(settings)).map(|settings| {
            Command::Provision(ProvisionCommand {
                job: settings.job.clone(),
                cores: settings.cores,
                provision: provision_of(settings),
                caller: ADMINISTRATOR,
            })
        });
        removed.chain(missing).collect()
    }

    /// Returns a sentence about the provision `id`, which a reload of the configuration was to make. A provision is a
    /// number of cores that pjwd keeps for a service. The sentence says one of these:
    ///
    /// - pjwd refused the provision, or the provision waits for cores.
    /// - The provision was made again, although its table did not change. `unchanged` has the provisions whose tables
    ///   did not change.
    ///
    /// `None` if the provision has its cores, and was made from a new or changed table.
    pub(super) fn describe_made_provision(
        &self,
        id: &JobId,
        unchanged: &[ProvisionSettings],
    ) -> Option<String> {
        if let Some(refused) = self.provision_warnings.iter().find(|warning| warning.job.as_ref() == Some(id))
        {
            return Some(refused.text.clone());
        }
        let settings = self.config.settings().provisions.iter().find(|settings| settings.job == *id)?;
        let (text, state) = (settings.describe(), self.warden.state());
        let held = state.grant_of(id).map_or(0, |grant| state.topology.overlapping_core_count(&grant.cpus));
        if held < settings.cores {
            return Some(format!(
                "provision [{text}] waits for cores that other jobs hold, and has {held} now: pjwctl status has a warning meanwhile"
            ));
        }
        let is_unchanged = unchanged.iter().any(|settings| settings.job == *id);
        is_unchanged.then(|| format!("provision [{text}] was missing or changed, and is made again"))
    }

    /// Updates the warnings about refused provisions of the configuration. A provision is a number of cores that pjwd
    /// keeps for a service. `own_results` has the commands that pjwd itself made, with their results. Stores a warning
    /// for each refused provision. Removes the warnings about provisions that are no longer refused or no longer
    /// configured, and all in the mode `observe`.
    pub(super) fn update_provision_warnings<'a>(
        &mut self,
        own_results: impl Iterator<Item = (&'a Command, &'a Result<Reply, Refusal>)>,
    ) {
        for (command, result) in own_results {
            let Command::Provision(ProvisionCommand { job, .. }) = command else { continue };
            self.provision_warnings.retain(|warning| warning.job.as_ref() != Some(job));
            if let Err(refusal) = result {
                let text = format!("{job} does not get the cores that the configuration promises: {refusal}");
                let remedy = "change its table [[provision]], and pjwctl reload";
                let warning = Warning { job: Some(job.clone()), ..Warning::new("provision", text, remedy) };
                self.provision_warnings.push(warning);
            }
        }
        let settings = self.config.settings();
        let is_observed = settings.mode == DaemonMode::Observe;
        let is_configured =
            |job: Option<&JobId>| settings.provisions.iter().any(|provision| Some(&provision.job) == job);
        self.provision_warnings.retain(|warning| !is_observed && is_configured(warning.job.as_ref()));
    }

    /// Returns the warning that the provisions of the configuration have more cores in total than jobs can have on this
    /// machine. A provision is a number of cores that pjwd keeps for a service. `None` if there are enough cores, or if
    /// there are fewer than two provisions.
    pub(super) fn excessive_provisions_warning(&self) -> Option<Warning> {
        let settings = &self.config.settings().provisions;
        // If a single table promises too much, its command is refused, which is a warning already.
        if settings.len() < 2 {
            return None;
        }
        let promised: u64 = settings.iter().map(|settings| u64::from(settings.cores)).sum();
        let state = self.warden.state();
        let usable_cpus = state.topology.cpus().difference(&state.pool.housekeeping_cpus());
        let usable = state.topology.overlapping_core_count(&usable_cpus);
        if promised <= u64::from(usable) {
            return None;
        }
        let text = format!(
            "the tables [[provision]] promise {promised} cores, and jobs can have {usable} of this machine: not all of the services get their cores"
        );
        Some(Warning::new("provision", text, "lower `cores` in the tables [[provision]], and pjwctl reload"))
    }
}
