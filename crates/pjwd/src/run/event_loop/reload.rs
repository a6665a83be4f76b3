//! What the event loop reads again while it runs: the configuration at a reload, and the topology when PUs come online.

use pjw_core::event::{Event, EventKind};
use pjw_linux::topology::{TopologySource, load_topology};
use tracing::warn;

use super::EventLoop;
use super::provisions::unchanged_provisions;
use crate::config::{Config, ConfigError};
use crate::control::settings::ControlSettings;
use crate::host::task_scan;

impl EventLoop {
    /// Reads the configuration file again and applies the new configuration. Returns one sentence for each change.
    ///
    /// # Errors
    /// If the file can't be read or has mistakes. The old configuration then stays in force, and the error is a message
    /// for the client that asked for the reload.
    pub(super) fn reload(&mut self) -> Result<Vec<String>, String> {
        let topology = self.warden.state().topology.clone();
        let loaded = Config::load(self.config_path.as_deref())
            .and_then(|config| config.policy(&topology).map(|policy| (config, policy)));
        match loaded {
            Ok((config, policy)) => {
                let mut changes = self.config.describe_changes(&config);
                let known_provisions = self.config.settings().provisions.clone();
                self.warden.set_policy(policy);
                self.control_settings.send_replace(ControlSettings::from(config.settings()));
                self.logging.apply_settings(config.settings());
                if config.settings().scan_interface != self.config.settings().scan_interface {
                    task_scan::load_bpf_programs(
                        config.settings().scan_interface,
                        self.warden.machine_interface_mut(),
                    );
                }
                self.budget.set_share(config.settings().cpu_budget_permille);
                self.realtime.set_enabled(config.settings().use_realtime_priority);
                self.meter.apply_settings(config.settings());
                self.warden.journal_mut().reports.set_max_reports(config.settings().report_keep);
                self.publisher.set_cpu_count_variables(&config.settings().cpu_count_variables);
                self.config = config;
                // The client that requested the reload expects the effect in the next status.
                self.triggers.job_processes_scan_due = true;
                let commands = self.provision_commands();
                let made_again = unchanged_provisions(&commands, &known_provisions);
                self.own_commands.extend(commands);
                self.cycle(Vec::new());
                changes.extend(made_again.iter().map(|settings| self.describe_restored_provision(settings)));
                let text = if changes.is_empty() { "nothing changed".to_owned() } else { changes.join("; ") };
                self.publisher.publish_events(vec![Event::new(EventKind::Reloaded, text)]);
                Ok(changes)
            }
            Err(problems) => {
                for problem in &problems {
                    warn!("{}", problem.log_line());
                }
                warn!("the new configuration is invalid; the old one stays in force");
                Err(rejection(&problems))
            }
        }
    }

    /// Reads the topology of the machine again if PUs (logical CPUs) are online that the known topology does not have.
    /// Jobs can get the PUs that only the new topology has. PUs that the new topology also lacks, for example because
    /// they are outside the cpuset of pjwd, do not cause a second attempt.
    pub(super) fn add_new_pus(&mut self) {
        let unknown = self.warden.pus_missing_in_topology();
        if unknown.is_subset(&self.unresolved_pus) {
            return;
        }
        self.unresolved_pus = unknown.clone();
        let read =
            load_topology(TopologySource::Live).map_err(|fault| fault.to_string()).and_then(|topology| {
                let policy = self.config.policy(&topology);
                let policy =
                    policy.map_err(|problems| problems.iter().map(ToString::to_string).collect::<String>());
                policy.map(|policy| (topology, policy))
            });
        let (topology, policy) = match read {
            Ok(read) => read,
            Err(why) => {
                warn!(cpus = %self.unresolved_pus, "the new CPUs are not used: {why}");
                return;
            }
        };
        let new = topology.cpus().difference(self.warden.state().topology.cpus());
        if new.is_empty() {
            return;
        }
        self.publisher.publish_topology(&topology);
        self.warden.replace_topology(topology, policy);
        let text = format!("CPUs {new} came online and were unknown: they are free now");
        self.publisher.publish_events(vec![Event::new(EventKind::Hotplug, text).with_cpus(&new)]);
        self.triggers.job_processes_scan_due = true;
    }
}

/// The error message for a rejected configuration: the place of the first mistake only. The text of the line goes to
/// the log, because a client on the socket may not be allowed to read the file.
fn rejection(problems: &[ConfigError]) -> String {
    let first = problems.first().map(ConfigError::location).unwrap_or_default();
    let more = match problems.len().saturating_sub(1) {
        0 => String::new(),
        1 => " (and one more mistake)".to_owned(),
        more => format!(" (and {more} more mistakes)"),
    };
    format!(
        "the old configuration stays in force: {first} is wrong{more}; for the reason run pjwctl check-config FILE, or see pjwd's log"
    )
}
