//! What the event loop reads again while it runs: the configuration at a reload, and the topology when PUs come online.

use pjw_core::event::{Event, EventKind};
use pjw_core::plan::Warning;
use pjw_core::policy::DaemonMode;
use pjw_core::text::cpus_text;
use pjw_linux::topology::{TopologySource, load_topology};
use tracing::warn;

use super::EventLoop;
use super::provisions::{ids_of_made_provisions, unchanged_provisions};
use crate::config::{Config, ConfigError};
use crate::control::inbox::WarningOrigin;
use crate::control::settings::ControlSettings;
use crate::host::task_scan;

impl EventLoop {
    /// Reads the configuration file again and applies the new configuration. Returns one sentence for each change.
    ///
    /// # Errors
    /// If the file can't be read or has mistakes. The old configuration then stays in force, and the error is a message
    /// for the client that asked for the reload. The status has a warning until a reload succeeds.
    pub(super) fn reload(&mut self) -> Result<Vec<String>, String> {
        let topology = self.warden.state().topology.clone();
        let (config, policy) = match Config::load(self.config_path.as_deref(), &topology) {
            Ok(loaded) => loaded,
            Err(problems) => {
                for problem in &problems {
                    warn!("{}", problem.log_line());
                }
                warn!("the new configuration is invalid; the old one stays in force");
                let warnings = refused_reload_warning(&problems).into_iter().collect();
                self.sent_warnings.insert(WarningOrigin::Reload, warnings);
                // The client that requested the reload expects the warning in the next status.
                self.triggers.job_processes_scan_due = true;
                self.run_cycle(Vec::new());
                return Err(rejection(&problems));
            }
        };
        self.sent_warnings.remove(&WarningOrigin::Reload);
        let mut changes = self.config.describe_changes(&config);
        let was_enforced = self.config.settings().mode == DaemonMode::Enforce;
        let provisions_before = self.config.settings().provisions.clone();
        let is_enforced = policy.mode == DaemonMode::Enforce;
        self.warden.set_policy(policy);
        if is_enforced && !was_enforced {
            // The frozen jobs were thawed in the mode observe.
            self.warden.state_mut().cpusets.forget_unread_settings();
        }
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
        // A provision that is missing after the mode observe is no news, because this mode makes none.
        let unchanged =
            if was_enforced { unchanged_provisions(&commands, &provisions_before) } else { Vec::new() };
        let made = ids_of_made_provisions(&commands);
        self.own_commands.extend(commands);
        self.run_cycle(Vec::new());
        changes.extend(made.iter().filter_map(|id| self.describe_made_provision(id, &unchanged)));
        let text = if changes.is_empty() { "nothing changed".to_owned() } else { changes.join("; ") };
        self.publisher.publish_events(vec![Event::new(EventKind::Reloaded, text)]);
        Ok(changes)
    }

    /// Makes PUs (logical CPUs) usable that came online and that the known topology does not have. For this, reads
    /// the topology of the machine again. Does so only once for the same PUs: some may stay unknown, for example
    /// because they are outside the cpuset of pjwd.
    pub(super) fn add_new_pus(&mut self) {
        let unknown = self.warden.pus_missing_in_topology();
        if unknown.is_subset(&self.unresolved_pus) {
            return;
        }
        self.unresolved_pus = unknown.clone();
        let read =
            load_topology(TopologySource::Live).map_err(|fault| fault.to_string()).and_then(|topology| {
                let config = self.config.for_topology(&topology).map_err(|problem| problem.log_line())?;
                Ok((topology, config))
            });
        let (topology, config) = match read {
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
        self.config = config;
        self.warden.replace_topology(topology, self.config.policy());
        let text = format!("{} came online and had been unknown: free now", cpus_text(&new));
        self.publisher.publish_events(vec![Event::new(EventKind::Hotplug, text).with_cpus(&new)]);
        self.triggers.job_processes_scan_due = true;
    }
}

/// The most mistakes of a rejected configuration in the answer to a reload. pjwd's log has all.
const MAX_MISTAKES: usize = 5;

/// The error message for a rejected configuration: its mistakes, in one line. Only an administrator gets this
/// message. It names wrong values, and does not quote lines of the file, which can be readable for root only.
fn rejection(problems: &[ConfigError]) -> String {
    let shown: Vec<String> = problems.iter().take(MAX_MISTAKES).map(ConfigError::log_line).collect();
    let more = match problems.len().saturating_sub(MAX_MISTAKES) {
        0 => String::new(),
        1 => "; one more mistake is in pjwd's log".to_owned(),
        more => format!("; {more} more mistakes are in pjwd's log"),
    };
    format!("the old configuration stays in force: {}{more}", shown.join("; "))
}

/// Returns the warning that the last reload refused the configuration file because of `problems`. Each user can read
/// the warning, and the file may be readable for root only. So the warning names the position and the key of the first
/// mistake, and no wrong value. `None` if there are no problems.
fn refused_reload_warning(problems: &[ConfigError]) -> Option<Warning> {
    let first = problems.first()?;
    // Without a position, the file can't be read: the text has no value of the file.
    let mistake = match first.line() {
        Some(_) => format!("mistake at {}", first.location()),
        None => first.log_line(),
    };
    let more = match problems.len() {
        1 => String::new(),
        count => format!(" (and {} more)", count - 1),
    };
    let text = format!(
        "the last reload refused the configuration: {mistake}{more}; the old one stays in force, and pjwd can't start \
         with this file"
    );
    let remedy = format!(
        "correct the file, check it with pjwctl check-config {}, and pjwctl reload; pjwd's log has the mistakes",
        first.file()
    );
    Some(Warning::new("configuration", text, remedy))
}

#[cfg(test)]
mod tests {
    use super::{refused_reload_warning, rejection};
    use crate::config::Config;

    #[test]
    fn the_answer_to_a_reload_has_the_mistakes_and_their_reasons() {
        let refused = |text: &str| rejection(&Config::parse_in_test("/etc/pjw/pjwd.toml", text).unwrap_err());
        assert_eq!(
            refused("user_max_cores = -1\nshare_smt = 1\n"),
            "the old configuration stays in force: \
             /etc/pjw/pjwd.toml:1:18: user_max_cores: -1 is not allowed here: write a whole number from 0 to 65536; \
             /etc/pjw/pjwd.toml:2:13: share_smt: 1 is not allowed here: write true or false, without quotation marks"
        );
        let many: String = (0..15).map(|number| format!("key{number} = 1\n")).collect();
        let many = refused(&many);
        assert!(many.ends_with("key4: there is no such key; 10 more mistakes are in pjwd's log"), "{many}");
    }

    #[test]
    fn the_warning_of_a_refused_reload_has_the_position_and_no_value() {
        let warning = |text: &str| {
            let problems = Config::parse_in_test("/etc/pjw/pjwd.toml", text).unwrap_err();
            refused_reload_warning(&problems).unwrap()
        };
        let one = warning("\nuser_max_cores = -17\n");
        assert_eq!(
            one.text,
            "the last reload refused the configuration: mistake at /etc/pjw/pjwd.toml:2:18: user_max_cores; the old \
             one stays in force, and pjwd can't start with this file"
        );
        assert!(one.remedy.contains("pjwctl check-config /etc/pjw/pjwd.toml"), "{}", one.remedy);
        let two = warning("user_max_cores = -17\nshare_smt = 1\n").text;
        assert!(two.contains("pjwd.toml:1:18: user_max_cores (and 1 more); the old one"), "{two}");
        assert!(refused_reload_warning(&[]).is_none());
    }

    #[test]
    fn the_warning_of_a_reload_that_could_not_read_the_file_has_the_reason() {
        let topology = pjw_core::testing::regular_topology(1, 1, 1, 2, 1);
        let problems = Config::load(Some("/nonexistent/pjwd.toml".as_ref()), &topology).unwrap_err();
        let text = refused_reload_warning(&problems).unwrap().text;
        assert!(text.contains(&format!("configuration: {}; the old one", problems[0].log_line())), "{text}");
    }
}
