//! What can be set, and what holds where nothing is set. Names and texts of the keys are in `keys.rs`.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use pjw_core::housekeeping::HousekeepingRule;
use pjw_core::job::Source;
use pjw_core::policy::{Mode, OnExhausted, Oversubscribed, Policy};
use pjw_core::wall::Enforcement;

/// How much is logged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum LogLevel {
    /// What went wrong.
    Error,
    /// And what may go wrong.
    Warn,
    /// And what changed.
    #[default]
    Info,
    /// And why.
    Debug,
    /// And every step.
    Trace,
}

/// How many threads are looked at in one go.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Scan {
    /// By a program in the kernel, where it may be loaded.
    #[default]
    Auto,
    /// By the files in /proc.
    Proc,
}

/// Where the log goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum LogFormat {
    /// To the journal when systemd connected standard error to it, as text otherwise.
    #[default]
    Auto,
    /// To the journal, with every field as a journal field.
    Journald,
    /// As text on standard error, one line an event.
    Text,
}

/// `[metrics]`: what is told to Prometheus, and where.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MetricsSettings {
    /// `metrics.textfile`: the file for node_exporter, if one is written.
    pub textfile: Option<PathBuf>,
    /// `metrics.interval`: the time between two writes of the file.
    pub interval: Duration,
    /// `metrics.listen`: where HTTP is answered, if anywhere.
    pub listen: Vec<SocketAddr>,
    /// `metrics.max_jobs`: how many jobs have samples of their own.
    pub max_jobs: u32,
}

impl MetricsSettings {
    /// Whether anybody may want them.
    #[must_use]
    pub fn is_on(&self) -> bool {
        self.textfile.is_some() || !self.listen.is_empty()
    }
}

impl Default for MetricsSettings {
    fn default() -> Self {
        Self { textfile: None, interval: Duration::from_secs(15), listen: Vec::new(), max_jobs: 200 }
    }
}

/// A configuration without its file: one field per key, or per group of alike keys.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    /// `mode`: whether decisions are carried out.
    pub mode: Mode,
    /// `housekeeping`: what is kept for the system, not yet resolved against a machine.
    pub housekeeping: HousekeepingRule,
    /// `interval`: the time between two looks at what ran.
    pub interval: Duration,
    /// `rescan_interval`: the time between two rescans. Never below `interval`.
    pub rescan_interval: Duration,
    /// `scan`: how many threads are looked at in one go.
    pub scan: Scan,
    /// `cpu_budget_permille`: the share of one PU that cycles caused by events may use.
    pub cpu_budget_permille: u32,
    /// `enforcement`: how jobs are kept on their cores.
    pub enforcement: Enforcement,
    /// `share_smt`: whether the PUs of one core may serve two jobs.
    pub share_smt: bool,
    /// `on_exhausted`: what happens to a request that no free cores can serve.
    pub on_exhausted: OnExhausted,
    /// `adopt_strays`: whether unclaimed processes of a user join that user's only job.
    pub adopt_strays: bool,
    /// `first_person_uid`: the lowest user id that belongs to a person.
    pub first_person_uid: u32,
    /// `admin_groups`: whose members may do what root may; names or numbers of groups.
    pub admin_groups: Vec<String>,
    /// `user_max_cores`: how many cores a plain user may hold.
    pub user_max_cores: u32,
    /// `reservation_timeout`: how long a registered job keeps its cores without a process.
    pub reservation_timeout: Duration,
    /// `log_level`: how much is logged.
    pub log_level: LogLevel,
    /// `log_format`: where the log goes.
    pub log_format: LogFormat,
    /// `balance.pin`: whether hot threads are pinned.
    pub pin: bool,
    /// `balance.hot_permille`: a thread becomes hot at this demand, in permille of one PU.
    pub hot_permille: u32,
    /// `balance.cold_permille`: a hot thread becomes cold at this demand. Always below `hot_permille`.
    pub cold_permille: u32,
    /// `balance.smoothing_permille`: how much the newest reading counts, in permille.
    pub smoothing_permille: u32,
    /// `balance.oversubscribed`: what happens with more hot threads than PUs.
    pub oversubscribed: Oversubscribed,
    /// `metrics.…`: what is told to Prometheus, and where.
    pub metrics: MetricsSettings,
    /// `sources.NAME.enabled`: the batch systems whose jobs are looked for.
    pub sources: BTreeSet<Source>,
    /// `sources.NAME.cores`: the cores of a job of theirs that doesn't say how many it has; none if absent.
    pub source_cores: BTreeMap<Source, u32>,
}

/// The decisions' own defaults, and those of what lies around them.
impl Default for Settings {
    fn default() -> Self {
        let policy = Policy::default();
        Self {
            mode: policy.mode,
            housekeeping: HousekeepingRule::default(),
            interval: Duration::from_secs(1),
            rescan_interval: Duration::from_secs(10),
            scan: Scan::default(),
            cpu_budget_permille: 200,
            enforcement: Enforcement::default(),
            share_smt: policy.share_smt,
            on_exhausted: policy.on_exhausted,
            adopt_strays: policy.adopt_strays,
            first_person_uid: policy.first_person_uid,
            admin_groups: Vec::new(),
            user_max_cores: policy.user_max_cores,
            reservation_timeout: policy.reservation_timeout,
            log_level: LogLevel::default(),
            log_format: LogFormat::default(),
            pin: policy.pin,
            hot_permille: policy.hot_permille,
            cold_permille: policy.cold_permille,
            smoothing_permille: policy.smoothing_permille,
            oversubscribed: policy.oversubscribed,
            metrics: MetricsSettings::default(),
            sources: policy.sources.into_iter().filter(|source| source.is_scheduler()).collect(),
            source_cores: policy.source_cores,
        }
    }
}
