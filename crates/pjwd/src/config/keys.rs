//! All configuration keys: name, parser and text form of each.
//!
//! This is the only definition, for the reader, for the suggestions ("did you mean"), for the list of changes after a
//! reload, and for the tests that compare `config/pjwd.toml` and `docs/config.md` with it.

use std::time::Duration;

use nix::sys::signal::Signal;
use pjw_core::policy::{BindingPolicy, DaemonMode, ExhaustionPolicy, OversubscriptionPolicy, StarvedPolicy};
use pjw_core::{cpuset_group::EnforcementMethod, housekeeping::HousekeepingRule, job::JobSource};
use toml::de::DeValue;

use super::metrics_targets;
use super::settings::{LogFormat, LogLevel, ScanInterface, Settings};
use super::values::{self, Choices, ValueError};

const MODES: Choices<DaemonMode> = &[("enforce", DaemonMode::Enforce), ("observe", DaemonMode::Observe)];
const SCANS: Choices<ScanInterface> = &[("auto", ScanInterface::Auto), ("proc", ScanInterface::Proc)];
const ENFORCEMENTS: Choices<EnforcementMethod> = &[
    ("auto", EnforcementMethod::Auto),
    ("cpuset", EnforcementMethod::Cpuset),
    ("affinity", EnforcementMethod::Affinity),
];
const BINDINGS: Choices<BindingPolicy> = &[
    ("respect", BindingPolicy::Respect),
    ("repair", BindingPolicy::Repair),
    ("override", BindingPolicy::Override),
];
const EXHAUSTED: Choices<ExhaustionPolicy> = &[
    ("refuse", ExhaustionPolicy::Refuse),
    ("share", ExhaustionPolicy::Share),
    ("wait", ExhaustionPolicy::Wait),
];
const OVERSUBSCRIBED: Choices<OversubscriptionPolicy> =
    &[("float", OversubscriptionPolicy::Float), ("spread", OversubscriptionPolicy::Spread)];
const STARVED: Choices<StarvedPolicy> =
    &[("squeeze", StarvedPolicy::Squeeze), ("freeze", StarvedPolicy::Freeze)];
/// Signals that do no harm, or little, to a program without a handler.
const REVOCATION_SIGNALS: Choices<Option<Signal>> = &[
    ("", None),
    ("SIGUSR1", Some(Signal::SIGUSR1)),
    ("SIGUSR2", Some(Signal::SIGUSR2)),
    ("SIGURG", Some(Signal::SIGURG)),
    ("SIGWINCH", Some(Signal::SIGWINCH)),
];
const LEVELS: Choices<LogLevel> = &[
    ("error", LogLevel::Error),
    ("warn", LogLevel::Warn),
    ("info", LogLevel::Info),
    ("debug", LogLevel::Debug),
    ("trace", LogLevel::Trace),
];
const FORMATS: Choices<LogFormat> =
    &[("auto", LogFormat::Auto), ("journald", LogFormat::Journald), ("text", LogFormat::Text)];

const HOUR: Duration = Duration::from_secs(60 * 60);
/// The largest number of cores that a configuration key can have as its value. Equal to the number of different PUs
/// (logical CPUs) that a CPU list can name.
pub(super) const MAX_CORES: u32 = pjw_core::cpuset::Pu::MAX.0 + 1;
/// The largest number of jobs with metrics of their own. Each scrape then has about one megabyte of text.
const MAX_JOBS: u32 = 2_000;
/// The largest number of reports that are kept. Their file has its own limit.
const MAX_REPORTS: u32 = 10_000;

/// A configuration key of pjwd, such as `balance.pin`: its name, its parser, and the function that formats its value.
#[derive(Debug, Clone, Copy)]
pub(super) enum ConfigKey {
    /// A key that exists once.
    Plain(&'static KeyDefinition),
    /// `sources.NAME.enabled`
    SourceEnabled(JobSource),
    /// `sources.NAME.cores`
    SourceCores(JobSource),
}

/// A configuration key that does not depend on a job source (a scheduler such as Slurm). Contains the name of the key,
/// the parser of its value, and the function that formats the value.
#[derive(Debug)]
pub(super) struct KeyDefinition {
    name: &'static str,
    read: fn(&DeValue<'_>, &mut Settings) -> Result<(), Vec<ValueError>>,
    show: fn(&Settings) -> String,
}

/// The definition of a key: its name, its field in [`Settings`], the parser of a value, and its text form.
macro_rules! key {
    ($name:expr, $($field:ident).+, $parse:expr, $show:expr) => {
        KeyDefinition {
            name: $name,
            read: |value, settings| {
                settings.$($field).+ = $parse(value)?;
                Ok(())
            },
            show: |settings| $show(&settings.$($field).+),
        }
    };
}

/// A key whose value is one of some words.
macro_rules! choice {
    ($name:expr, $($field:ident).+, $choices:ident) => {
        key!($name, $($field).+, |v| values::parse_choice(v, $choices), |v| values::show_choice(v, $choices))
    };
}

/// A key whose value is a duration in a range.
macro_rules! duration {
    ($name:expr, $($field:ident).+, $range:expr) => {
        key!($name, $($field).+, |v| values::parse_duration(v, $range), values::show_duration)
    };
}

/// A key whose value is a whole number in a range.
macro_rules! number {
    ($name:expr, $($field:ident).+, $range:expr) => {
        key!($name, $($field).+, |v| values::parse_number(v, $range), ToString::to_string)
    };
}

/// A key whose value is `true` or `false`.
macro_rules! boolean {
    ($name:expr, $($field:ident).+) => {
        key!($name, $($field).+, values::parse_boolean, ToString::to_string)
    };
}

/// All keys except those of the sources, in the order of the documentation.
const PLAIN: &[KeyDefinition] = &[
    choice!("mode", mode, MODES),
    key!(HOUSEKEEPING_KEY, housekeeping, parse_housekeeping, |rule| format!("\"{rule}\"")),
    duration!(SCAN_INTERVAL_KEY, scan_interval, Duration::from_millis(10)..=HOUR),
    duration!(RESCAN_INTERVAL_KEY, rescan_interval, Duration::from_millis(10)..=24 * HOUR),
    choice!("scan", scan_interface, SCANS),
    number!("cpu_budget_permille", cpu_budget_permille, 10..=1000),
    boolean!("realtime", use_realtime_priority),
    choice!("enforcement", enforcement, ENFORCEMENTS),
    choice!("affinity", binding_policy, BINDINGS),
    boolean!("share_smt", share_smt),
    choice!("on_exhausted", exhaustion_policy, EXHAUSTED),
    boolean!("adopt_strays", adopt_unassigned_processes),
    number!("first_person_uid", first_person_uid, 1..=u32::MAX - 1),
    key!("admin_groups", admin_groups, values::parse_groups, |groups| format!("{groups:?}")),
    number!("user_max_cores", user_max_cores, 0..=MAX_CORES),
    duration!("reservation_timeout", reservation_timeout, Duration::from_secs(1)..=365 * 24 * HOUR),
    number!("report_keep", report_keep, 0..=MAX_REPORTS),
    choice!("log_level", log_level, LEVELS),
    choice!("log_format", log_format, FORMATS),
    boolean!("balance.pin", pin_hot_threads),
    number!(HOT_PERMILLE_KEY, hot_threshold_permille, 1..=1000),
    number!(COLD_PERMILLE_KEY, cold_threshold_permille, 0..=999),
    number!("balance.smoothing_permille", smoothing_weight_permille, 1..=1000),
    choice!("balance.oversubscribed", oversubscription_policy, OVERSUBSCRIBED),
    boolean!("lending.enabled", lending.enabled),
    number!("lending.buffer", lending.buffer_cores, 0..=MAX_CORES),
    duration!("lending.lend_after", lending.lend_after, Duration::from_millis(10)..=HOUR),
    number!("lending.at_once", lending.cores_at_once, 1..=MAX_CORES),
    duration!("lending.revocation_grace", lending.revocation_grace, Duration::ZERO..=Duration::from_secs(60)),
    choice!("lending.revocation_signal", revocation_signal, REVOCATION_SIGNALS),
    choice!("lending.starved", lending.starved, STARVED),
    key!("memory.sample", memory.sample_interval, parse_sample_interval, show_sample_interval),
    number!("memory.budget_permille", memory.budget_permille, 1..=1000),
    key!(
        "run.variables",
        cpu_count_variables,
        values::parse_cpu_count_variables,
        values::show_cpu_count_variables
    ),
    key!(
        "metrics.textfile",
        metrics.textfile_path,
        metrics_targets::parse_textfile_path,
        metrics_targets::show_textfile
    ),
    duration!("metrics.interval", metrics.write_interval, Duration::from_secs(1)..=HOUR),
    key!(
        "metrics.listen",
        metrics.listen_addresses,
        metrics_targets::parse_listen_addresses,
        metrics_targets::show_addresses
    ),
    number!("metrics.max_jobs", metrics.max_jobs, 0..=MAX_JOBS),
];

/// The name of the configuration key whose value says which PUs (logical CPUs) are reserved for the system and not for
/// jobs.
pub(super) const HOUSEKEEPING_KEY: &str = "housekeeping";
/// The name of the configuration key for the time between two scans of the processes of jobs.
pub(super) const SCAN_INTERVAL_KEY: &str = "interval";
/// The name of the configuration key for the time between two periodic scans, which also read processes that belong to
/// no job.
pub(super) const RESCAN_INTERVAL_KEY: &str = "rescan_interval";
/// The name of the configuration key for the CPU demand at which a thread begins to count as hot, in permille of one
/// PU (logical CPU).
pub(super) const HOT_PERMILLE_KEY: &str = "balance.hot_permille";
/// The name of the configuration key for the CPU demand at or below which a hot thread no longer counts as hot, in
/// permille of one PU (logical CPU).
pub(super) const COLD_PERMILLE_KEY: &str = "balance.cold_permille";

impl ConfigKey {
    /// Returns all configuration keys, in the order in which `docs/config.md` lists them. The tables `[[provision]]`
    /// are not included.
    pub(super) fn all() -> impl Iterator<Item = ConfigKey> {
        let sources = JobSource::ALL.iter().copied().filter(|source| source.is_batch_system());
        let of_source = |source| [ConfigKey::SourceEnabled(source), ConfigKey::SourceCores(source)];
        PLAIN.iter().map(ConfigKey::Plain).chain(sources.flat_map(of_source))
    }

    /// Returns the full name of the configuration key: the name of its table, a dot, and the name of the key in the
    /// table. Example: `balance.pin`.
    pub(super) fn name(self) -> String {
        match self {
            ConfigKey::Plain(key) => key.name.to_owned(),
            ConfigKey::SourceEnabled(source) => format!("sources.{source}.enabled"),
            ConfigKey::SourceCores(source) => format!("sources.{source}.cores"),
        }
    }

    /// Parses `value`, the value of this configuration key in a file, and stores the result in `settings`.
    ///
    /// # Errors
    /// If the value is not allowed for this key: all mistakes in the value. Each error describes the allowed values.
    pub(super) fn parse_value(
        self,
        value: &DeValue<'_>,
        settings: &mut Settings,
    ) -> Result<(), Vec<ValueError>> {
        match self {
            ConfigKey::Plain(key) => return (key.read)(value, settings),
            ConfigKey::SourceEnabled(source) if values::parse_boolean(value)? => {
                settings.enabled_sources.insert(source);
            }
            ConfigKey::SourceEnabled(source) => drop(settings.enabled_sources.remove(&source)),
            ConfigKey::SourceCores(source) => {
                match values::parse_number(value, 0..=MAX_CORES)? {
                    0 => settings.source_cores.remove(&source),
                    cores => settings.source_cores.insert(source, cores),
                };
            }
        }
        Ok(())
    }

    /// Returns the value that this configuration key has in `settings`, in the syntax of the configuration file.
    pub(super) fn format_value(self, settings: &Settings) -> String {
        match self {
            ConfigKey::Plain(key) => (key.show)(settings),
            ConfigKey::SourceEnabled(source) => settings.enabled_sources.contains(&source).to_string(),
            ConfigKey::SourceCores(source) => settings.source_cores.get(&source).unwrap_or(&0).to_string(),
        }
    }
}

fn parse_housekeeping(value: &DeValue<'_>) -> Result<HousekeepingRule, ValueError> {
    let what = "a CPU list such as \"0-1\", a share such as \"1/l3\", or \"\" for none";
    let rule = values::parse_text(value, what)?;
    rule.parse().map_err(|error| ValueError::with_message(crate::error_text::error_chain_text(&error)))
}

/// Parses `off` (`None`), or the time between two readings of the memory of a job.
fn parse_sample_interval(value: &DeValue<'_>) -> Result<Option<Duration>, ValueError> {
    if value.as_str() == Some("off") {
        return Ok(None);
    }
    let read = values::parse_duration(value, Duration::from_secs(1)..=HOUR);
    read.map(Some).map_err(|error| ValueError { text: format!("{}, or \"off\"", error.text), ..error })
}

fn show_sample_interval(interval: &Option<Duration>) -> String {
    interval.as_ref().map_or_else(|| "\"off\"".to_owned(), values::show_duration)
}
