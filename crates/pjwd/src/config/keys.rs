//! All configuration keys: name, parser and text form of each.
//!
//! This is the only definition, for the reader, for the suggestions ("did you mean"), for the list of changes after a
//! reload, and for the tests that compare `config/pjwd.toml` and `docs/config.md` with it.

use std::time::Duration;

use pjw_core::cpuset_group::Enforcement;
use pjw_core::housekeeping::HousekeepingRule;
use pjw_core::job::Source;
use pjw_core::policy::{Mode, OnExhausted, Oversubscribed};
use toml::de::DeValue;

use super::metrics_targets;
use super::settings::{LogFormat, LogLevel, Scan, Settings};
use super::values::{self, Choices, ValueError};

/// A configuration key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Key {
    Mode,
    Housekeeping,
    Interval,
    RescanInterval,
    Scan,
    CpuBudget,
    Enforcement,
    ShareSmt,
    OnExhausted,
    AdoptStrays,
    FirstPersonUid,
    AdminGroups,
    UserMaxCores,
    ReservationTimeout,
    LogLevel,
    LogFormat,
    Pin,
    HotPermille,
    ColdPermille,
    SmoothingPermille,
    Oversubscribed,
    MetricsTextfile,
    MetricsInterval,
    MetricsListen,
    MetricsMaxJobs,
    SourceEnabled(Source),
    SourceCores(Source),
}

/// All keys except those of the sources.
const PLAIN: [Key; 25] = [
    Key::Mode,
    Key::Housekeeping,
    Key::Interval,
    Key::RescanInterval,
    Key::Scan,
    Key::CpuBudget,
    Key::Enforcement,
    Key::ShareSmt,
    Key::OnExhausted,
    Key::AdoptStrays,
    Key::FirstPersonUid,
    Key::AdminGroups,
    Key::UserMaxCores,
    Key::ReservationTimeout,
    Key::LogLevel,
    Key::LogFormat,
    Key::Pin,
    Key::HotPermille,
    Key::ColdPermille,
    Key::SmoothingPermille,
    Key::Oversubscribed,
    Key::MetricsTextfile,
    Key::MetricsInterval,
    Key::MetricsListen,
    Key::MetricsMaxJobs,
];

const MODES: Choices<Mode> = &[("enforce", Mode::Enforce), ("observe", Mode::Observe)];
const SCANS: Choices<Scan> = &[("auto", Scan::Auto), ("proc", Scan::Proc)];
const ENFORCEMENTS: Choices<Enforcement> =
    &[("auto", Enforcement::Auto), ("cpuset", Enforcement::Cpuset), ("affinity", Enforcement::Affinity)];
const EXHAUSTED: Choices<OnExhausted> =
    &[("refuse", OnExhausted::Refuse), ("share", OnExhausted::Share), ("wait", OnExhausted::Wait)];
const OVERSUBSCRIBED: Choices<Oversubscribed> =
    &[("float", Oversubscribed::Float), ("spread", Oversubscribed::Spread)];
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
/// The largest number of PUs that a CPU list can name.
const MAX_CORES: u32 = pjw_core::cpuset::Pu::MAX.0 + 1;
/// The largest number of jobs with samples of their own. Each scrape then has about one megabyte of text.
const MAX_JOBS: u32 = 2_000;

impl Key {
    /// All keys, in the order of the documentation.
    pub(super) fn all() -> impl Iterator<Item = Key> {
        let sources = Source::ALL.into_iter().filter(|source| source.is_scheduler());
        let of_source = |source| [Key::SourceEnabled(source), Key::SourceCores(source)];
        PLAIN.into_iter().chain(sources.flat_map(of_source))
    }

    /// The full name, with the names of the tables: `balance.pin`.
    pub(super) fn name(self) -> String {
        let name = match self {
            Key::Mode => "mode",
            Key::Housekeeping => "housekeeping",
            Key::Interval => "interval",
            Key::RescanInterval => "rescan_interval",
            Key::Scan => "scan",
            Key::CpuBudget => "cpu_budget_permille",
            Key::Enforcement => "enforcement",
            Key::ShareSmt => "share_smt",
            Key::OnExhausted => "on_exhausted",
            Key::AdoptStrays => "adopt_strays",
            Key::FirstPersonUid => "first_person_uid",
            Key::AdminGroups => "admin_groups",
            Key::UserMaxCores => "user_max_cores",
            Key::ReservationTimeout => "reservation_timeout",
            Key::LogLevel => "log_level",
            Key::LogFormat => "log_format",
            Key::Pin => "balance.pin",
            Key::HotPermille => "balance.hot_permille",
            Key::ColdPermille => "balance.cold_permille",
            Key::SmoothingPermille => "balance.smoothing_permille",
            Key::Oversubscribed => "balance.oversubscribed",
            Key::MetricsTextfile => "metrics.textfile",
            Key::MetricsInterval => "metrics.interval",
            Key::MetricsListen => "metrics.listen",
            Key::MetricsMaxJobs => "metrics.max_jobs",
            Key::SourceEnabled(source) => return format!("sources.{source}.enabled"),
            Key::SourceCores(source) => return format!("sources.{source}.cores"),
        };
        name.to_owned()
    }

    /// Parses a value and stores it in `settings`.
    ///
    /// # Errors
    /// A description of the allowed values, if the value is not one of them.
    pub(super) fn read(self, value: &DeValue<'_>, settings: &mut Settings) -> Result<(), ValueError> {
        match self {
            Key::Mode => settings.mode = values::choice(value, MODES)?,
            Key::Housekeeping => settings.housekeeping = housekeeping(value)?,
            Key::Interval => settings.interval = values::duration(value, Duration::from_millis(10)..=HOUR)?,
            Key::RescanInterval => {
                settings.rescan_interval = values::duration(value, Duration::from_millis(10)..=24 * HOUR)?;
            }
            Key::Scan => settings.scan = values::choice(value, SCANS)?,
            Key::CpuBudget => settings.cpu_budget_permille = values::number(value, 10..=1000)?,
            Key::Enforcement => settings.enforcement = values::choice(value, ENFORCEMENTS)?,
            Key::ShareSmt => settings.share_smt = values::boolean(value)?,
            Key::OnExhausted => settings.on_exhausted = values::choice(value, EXHAUSTED)?,
            Key::AdoptStrays => settings.adopt_strays = values::boolean(value)?,
            Key::FirstPersonUid => settings.first_person_uid = values::number(value, 1..=u32::MAX - 1)?,
            Key::AdminGroups => settings.admin_groups = values::groups(value)?,
            Key::UserMaxCores => settings.user_max_cores = values::number(value, 0..=MAX_CORES)?,
            Key::ReservationTimeout => {
                let range = Duration::from_secs(1)..=365 * 24 * HOUR;
                settings.reservation_timeout = values::duration(value, range)?;
            }
            Key::LogLevel => settings.log_level = values::choice(value, LEVELS)?,
            Key::LogFormat => settings.log_format = values::choice(value, FORMATS)?,
            Key::Pin => settings.pin = values::boolean(value)?,
            Key::HotPermille => settings.hot_permille = values::number(value, 1..=1000)?,
            Key::ColdPermille => settings.cold_permille = values::number(value, 0..=999)?,
            Key::SmoothingPermille => settings.smoothing_permille = values::number(value, 1..=1000)?,
            Key::Oversubscribed => settings.oversubscribed = values::choice(value, OVERSUBSCRIBED)?,
            Key::MetricsTextfile => settings.metrics.textfile = metrics_targets::textfile(value)?,
            Key::MetricsInterval => {
                settings.metrics.interval = values::duration(value, Duration::from_secs(1)..=HOUR)?;
            }
            Key::MetricsListen => settings.metrics.listen = metrics_targets::addresses(value)?,
            Key::MetricsMaxJobs => settings.metrics.max_jobs = values::number(value, 0..=MAX_JOBS)?,
            Key::SourceEnabled(source) => {
                if values::boolean(value)? {
                    settings.sources.insert(source);
                } else {
                    settings.sources.remove(&source);
                }
            }
            Key::SourceCores(source) => {
                match values::number(value, 0..=MAX_CORES)? {
                    0 => settings.source_cores.remove(&source),
                    cores => settings.source_cores.insert(source, cores),
                };
            }
        }
        Ok(())
    }

    /// The value of the key, as written in a file.
    pub(super) fn show(self, settings: &Settings) -> String {
        match self {
            Key::Mode => values::show_choice(settings.mode, MODES),
            Key::Housekeeping => format!("\"{}\"", settings.housekeeping),
            Key::Interval => values::show_duration(settings.interval),
            Key::RescanInterval => values::show_duration(settings.rescan_interval),
            Key::Scan => values::show_choice(settings.scan, SCANS),
            Key::CpuBudget => settings.cpu_budget_permille.to_string(),
            Key::Enforcement => values::show_choice(settings.enforcement, ENFORCEMENTS),
            Key::ShareSmt => settings.share_smt.to_string(),
            Key::OnExhausted => values::show_choice(settings.on_exhausted, EXHAUSTED),
            Key::AdoptStrays => settings.adopt_strays.to_string(),
            Key::FirstPersonUid => settings.first_person_uid.to_string(),
            Key::AdminGroups => format!("{:?}", settings.admin_groups),
            Key::UserMaxCores => settings.user_max_cores.to_string(),
            Key::ReservationTimeout => values::show_duration(settings.reservation_timeout),
            Key::LogLevel => values::show_choice(settings.log_level, LEVELS),
            Key::LogFormat => values::show_choice(settings.log_format, FORMATS),
            Key::Pin => settings.pin.to_string(),
            Key::HotPermille => settings.hot_permille.to_string(),
            Key::ColdPermille => settings.cold_permille.to_string(),
            Key::SmoothingPermille => settings.smoothing_permille.to_string(),
            Key::Oversubscribed => values::show_choice(settings.oversubscribed, OVERSUBSCRIBED),
            Key::MetricsTextfile => metrics_targets::show_textfile(settings.metrics.textfile.as_deref()),
            Key::MetricsInterval => values::show_duration(settings.metrics.interval),
            Key::MetricsListen => metrics_targets::show_addresses(&settings.metrics.listen),
            Key::MetricsMaxJobs => settings.metrics.max_jobs.to_string(),
            Key::SourceEnabled(source) => settings.sources.contains(&source).to_string(),
            Key::SourceCores(source) => settings.source_cores.get(&source).unwrap_or(&0).to_string(),
        }
    }
}

fn housekeeping(value: &DeValue<'_>) -> Result<HousekeepingRule, ValueError> {
    let what = "a CPU list such as \"0-1\", a share such as \"1/l3\", or \"\" for none";
    let rule = values::text(value, what)?;
    rule.parse().map_err(|error| ValueError::because(crate::error_text::chain(&error)))
}
