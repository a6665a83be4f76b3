//! The configuration: from a TOML file to the [`Policy`] that decisions use.
//!
//! A file is read as a whole. Every problem is reported at once, each with its position, what is allowed there, and
//! the nearest known key ([`ConfigError`]). A missing key has its default; `config/pjwd.toml` lists all defaults. There
//! is no global configuration: a reload makes a second [`Config`], and the daemon replaces the first between two
//! cycles or keeps the first.
//!
//! Whether a file is valid depends on the topology of the machine: the key `housekeeping` selects the PUs that are
//! reserved for the system, and these PUs must exist. Sockets and directories are command-line options, so every key
//! may change while the daemon runs.

mod keys;
mod metrics_targets;
mod problem;
mod provisions;
mod read;
mod settings;
mod values;

#[cfg(test)]
mod lending_tests;
#[cfg(test)]
mod metrics_tests;
#[cfg(test)]
mod run_tests;
#[cfg(test)]
mod shipped_tests;
#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::unistd::Uid;
use pjw_core::cpuset_group::CpusetSupport;
use pjw_core::job::JobSource;
use pjw_core::own_cgroups::OwnCgroupNames;
use pjw_core::policy::Policy;
use pjw_core::topology::Topology;

use self::keys::{ConfigKey, HOUSEKEEPING_KEY};
pub use self::problem::ConfigError;
pub use self::provisions::ProvisionSettings;
use self::read::Housekeeping;
pub use self::settings::{LogFormat, LogLevel, MetricsSettings, ScanInterface, Settings};

/// A valid configuration of pjwd: the values of all keys, and the path of the file from which the values were read.
#[derive(Debug, Clone, Default)]
pub struct Config {
    /// The values of all keys.
    settings: Settings,
    /// What the key `housekeeping` means on the machine.
    housekeeping: Housekeeping,
    /// The path of the file. `None` if no file was read.
    path: Option<PathBuf>,
}

impl Config {
    /// Reads the configuration file at `path`, and returns two values: the configuration, and the policy that follows
    /// from it ([`Config::policy`]). The policy is the settings on which pjwd's decisions about jobs depend. `topology`
    /// is the topology of the machine. If `path` is `None`, reads the [default file](Config::default_path). If the
    /// default file does not exist, all keys have their defaults.
    ///
    /// # Errors
    /// - If the file has mistakes: the errors that [`Config::parse`] describes.
    /// - If the file can't be read, or if there is no file at `path`: a single error.
    pub fn load(path: Option<&Path>, topology: &Topology) -> Result<(Self, Policy), Vec<ConfigError>> {
        let config = match (path, Self::default_path()) {
            (Some(path), _) => Self::parse(path, &read::read_config_file(path)?, topology)?,
            (None, Some(path)) if read::path_exists(&path) => return Self::load(Some(&path), topology),
            (None, _) => Self::default(),
        };
        let policy = config.policy();
        Ok((config, policy))
    }

    /// Returns the path of the default configuration file of the user who runs this process. For root this is
    /// `/etc/pjw/pjwd.toml`. For another user it is `$XDG_CONFIG_HOME/pjw/pjwd.toml`. If `$XDG_CONFIG_HOME` is not an
    /// absolute path, `$HOME/.config` replaces it. Returns `None` if neither variable is an absolute path.
    #[must_use]
    pub fn default_path() -> Option<PathBuf> {
        if Uid::effective().is_root() {
            return Some(PathBuf::from("/etc/pjw/pjwd.toml"));
        }
        let absolute = |name| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
        let base = absolute("XDG_CONFIG_HOME").or_else(|| absolute("HOME").map(|home| home.join(".config")));
        base.map(|base| base.join("pjw/pjwd.toml"))
    }

    /// Parses `text`, the content of a configuration file. `path` is the path of this file, for error messages. The
    /// file is not read. `topology` is the topology of the machine.
    ///
    /// # Errors
    /// The first 50 mistakes in the text, in the order of the text. If there are more, the last error has their number.
    /// PUs (logical CPUs) in the key `housekeeping` that the machine does not have are a mistake, too. Mistakes that an
    /// earlier syntax error possibly caused are left out.
    pub fn parse(path: &Path, text: &str, topology: &Topology) -> Result<Self, Vec<ConfigError>> {
        let (settings, housekeeping) = read::parse_settings(path, text, topology)?;
        Ok(Self { settings, housekeeping, path: Some(path.to_owned()) })
    }

    /// Returns this configuration for the machine with the topology `topology`, which has changed since the file was
    /// parsed, for example because PUs (logical CPUs) came online. The file is not read again.
    ///
    /// # Errors
    /// If the value of the key `housekeeping` is not possible on the changed machine, for example because the machine
    /// lacks a listed PU, or because no core would remain for jobs.
    pub fn for_topology(&self, topology: &Topology) -> Result<Self, ConfigError> {
        let mut config = self.clone();
        let selected = self.settings.housekeeping.select_housekeeping_cpus(topology);
        config.housekeeping.cpus = selected.map_err(|error| {
            let path = self.path.as_deref().unwrap_or(Path::new("the configuration"));
            let text = crate::error_text::error_chain_text(&error);
            match self.housekeeping.position.clone() {
                Some(position) => ConfigError::at_position(path, position, Some(HOUSEKEEPING_KEY), text),
                None => ConfigError::for_whole_file(path, text),
            }
        })?;
        Ok(config)
    }

    /// Parses `text` as [`Config::parse`] does, for a made-up machine with two cores of one PU each.
    #[cfg(test)]
    pub(crate) fn parse_in_test(path: &str, text: &str) -> Result<Self, Vec<ConfigError>> {
        Self::parse(Path::new(path), text, &pjw_core::testing::regular_topology(1, 1, 1, 2, 1))
    }

    /// Returns the values of all configuration keys.
    #[must_use]
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Returns the path of the file from which the configuration was read. `None` if no file was read. All
    /// keys then have their defaults.
    #[must_use]
    pub fn path(&self) -> Option<&Path> {
        self.path.as_deref()
    }

    /// Returns the time between two scans of the processes of jobs: the value of the configuration key `interval`.
    /// Each of these scans reads those processes of jobs that have run since the previous scan, with their threads.
    #[must_use]
    pub fn scan_interval(&self) -> Duration {
        self.settings.scan_interval
    }

    /// Returns the time between two rescans: the value of the configuration key `rescan_interval`. A rescan is a
    /// scan that reads the processes of jobs, and also processes that belong to no job. Most rescans read a process of
    /// no job only if this process is new, or has used CPU time since pjwd last checked this process. At least one
    /// rescan in eight reads every process. The returned time is at least [`Config::scan_interval`], because pjwd
    /// refuses a configuration with a shorter `rescan_interval`.
    #[must_use]
    pub fn rescan_interval(&self) -> Duration {
        self.settings.rescan_interval
    }

    /// Returns the policy: the settings on which pjwd's decisions about jobs depend. The housekeeping PUs in the policy
    /// (the logical CPUs that are reserved for the system) belong to the topology that was last passed to
    /// [`Config::for_topology`], or with which the file was parsed.
    ///
    /// Six fields of the policy depend on the running daemon and not on the configuration, so this function gives
    /// them default values: `own_pid`, `thaw_watcher_pid`, `only_managed_user`, `may_grant`, `cpuset_support` and
    /// `own_cgroups`. The caller must set these fields. [`Policy`] describes them.
    #[must_use]
    pub fn policy(&self) -> Policy {
        let settings = &self.settings;
        // Jobs that users assign by hand need no batch system and can't be switched off.
        let by_hand = JobSource::ALL.iter().copied().filter(|source| !source.is_batch_system());
        Policy {
            mode: settings.mode,
            housekeeping_cpus: self.housekeeping.cpus.clone(),
            share_smt: settings.share_smt,
            exhaustion_policy: settings.exhaustion_policy,
            adopt_unassigned_processes: settings.adopt_unassigned_processes,
            user_max_cores: settings.user_max_cores,
            first_person_uid: settings.first_person_uid,
            scan_interval: settings.scan_interval,
            sources: settings.enabled_sources.iter().copied().chain(by_hand).collect(),
            source_cores: settings.source_cores.clone(),
            enforcement: settings.enforcement,
            bindings: settings.binding_policy,
            cpuset_support: CpusetSupport::default(),
            own_cgroups: OwnCgroupNames::default(),
            sources_with_narrowable_cpusets: pjw_sources::batch_systems_with_narrowable_cpusets(),
            own_pid: None,
            thaw_watcher_pid: None,
            only_managed_user: None,
            hot_threshold_permille: settings.hot_threshold_permille,
            cold_threshold_permille: settings.cold_threshold_permille,
            smoothing_weight_permille: settings.smoothing_weight_permille,
            pin_hot_threads: settings.pin_hot_threads,
            oversubscription: settings.oversubscription_policy,
            reservation_timeout: settings.reservation_timeout,
            lending: settings.lending.clone(),
            may_grant: true,
        }
    }

    /// Describes the differences between this configuration and the configuration `new`: one sentence for each
    /// key whose value differs. The sentences are in the order in which `docs/config.md` lists the keys. Empty if
    /// there are no differences.
    #[must_use]
    pub fn describe_changes(&self, new: &Self) -> Vec<String> {
        let sentence = |key: ConfigKey| {
            let (old, new) = (key.format_value(&self.settings), key.format_value(&new.settings));
            (old != new).then(|| format!("{} is now {new} (was {old})", key.name()))
        };
        let descriptions = |config: &Self| {
            config.settings.provisions.iter().map(ProvisionSettings::describe).collect::<Vec<_>>().join(", ")
        };
        let provisions = (self.settings.provisions != new.settings.provisions)
            .then(|| format!("provision is now [{}] (was [{}])", descriptions(new), descriptions(self)));
        ConfigKey::all().filter_map(sentence).chain(provisions).collect()
    }
}
