//! The configuration: a TOML file, checked whole before any of it counts.
//!
//! Every key is one row of [`keys::KEYS`], with what it allows and how it is read and shown; the file
//! `config/pjwd.toml` and docs/config.md are tested against that table. All problems of a file are reported at
//! once, each with line, column, caret and what would be right.

mod keys;
mod problem;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::time::Duration;

use pjw_core::housekeeping::HousekeepingRule;
use pjw_core::job::Source;
use pjw_core::policy::{Mode, OnExhausted, Oversubscribed, Policy};
use pjw_core::topology::Topology;
use toml::de::{DeTable, DeValue};

use keys::{KEYS, Key};
pub use problem::Problem;
use problem::{Page, nearest};

/// No honest configuration is larger.
const LARGEST_BYTES: u64 = 1 << 20;

/// The configuration in force.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    mode: Mode,
    housekeeping: HousekeepingRule,
    housekeeping_text: String,
    interval: Duration,
    rescan_interval: Duration,
    enforcement: String,
    share_smt: bool,
    on_exhausted: OnExhausted,
    adopt_strays: bool,
    admin_groups: Vec<String>,
    user_max_cores: u32,
    reservation_timeout: Duration,
    log_level: String,
    log_format: String,
    pin: bool,
    hot_permille: u32,
    cold_permille: u32,
    smoothing_permille: u32,
    oversubscribed: Oversubscribed,
    sources: BTreeMap<Source, SourceConfig>,
    /// Where the housekeeping rule stands, for problems that only the machine shows.
    housekeeping_place: Option<(Page, std::ops::Range<usize>)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct SourceConfig {
    enabled: bool,
    cores: u32,
}

impl Default for Config {
    fn default() -> Self {
        let policy = Policy::default();
        let source = |source: Source| (source, SourceConfig { enabled: true, cores: 0 });
        Self {
            mode: policy.mode,
            housekeeping: HousekeepingRule::default(),
            housekeeping_text: String::new(),
            interval: Duration::from_secs(1),
            rescan_interval: Duration::from_secs(10),
            enforcement: "auto".to_owned(),
            share_smt: policy.share_smt,
            on_exhausted: policy.on_exhausted,
            adopt_strays: policy.adopt_strays,
            admin_groups: Vec::new(),
            user_max_cores: policy.user_max_cores,
            reservation_timeout: policy.reservation_timeout,
            log_level: "info".to_owned(),
            log_format: "auto".to_owned(),
            pin: policy.pin,
            hot_permille: policy.hot_permille,
            cold_permille: policy.cold_permille,
            smoothing_permille: policy.smoothing_permille,
            oversubscribed: policy.oversubscribed,
            sources: Source::ALL.into_iter().filter(|source| source.is_scheduler()).map(source).collect(),
            housekeeping_place: None,
        }
    }
}

impl Config {
    /// Reads a file; without one, all defaults.
    ///
    /// # Errors
    /// Everything that is wrong with it.
    pub fn load(path: Option<&Path>) -> Result<Self, Vec<Problem>> {
        let Some(path) = path else { return Ok(Self::default()) };
        let text = read(path).map_err(|why| vec![Problem::of_file(path, why)])?;
        Self::parse(path, &text)
    }

    /// Reads the text of a file.
    ///
    /// # Errors
    /// Everything that is wrong with it.
    pub fn parse(path: &Path, text: &str) -> Result<Self, Vec<Problem>> {
        let page = Page::new(path, text);
        let (table, errors) = DeTable::parse_recoverable(text);
        let mut problems: Vec<Problem> = errors
            .iter()
            .map(|error| page.problem(error.span().unwrap_or(0..0), error.message().to_owned(), ""))
            .collect();
        if !problems.is_empty() {
            return Err(problems);
        }
        let mut config = Self::default();
        config.take_table("", table.get_ref(), &page, &mut problems);
        config.check_together(&page, &mut problems);
        if problems.is_empty() { Ok(config) } else { Err(problems) }
    }

    fn take_table(&mut self, prefix: &str, table: &DeTable<'_>, page: &Page, problems: &mut Vec<Problem>) {
        for (name, value) in table {
            let path = if prefix.is_empty() {
                name.get_ref().to_string()
            } else {
                format!("{prefix}.{}", name.get_ref())
            };
            if let DeValue::Table(inner) = value.get_ref()
                && KEYS
                    .iter()
                    .any(|key| key.path.strip_prefix(&path).is_some_and(|rest| rest.starts_with('.')))
            {
                self.take_table(&path, inner, page, problems);
                continue;
            }
            match KEYS.iter().find(|key| key.path == path) {
                Some(key) => self.take(key, value.get_ref(), value.span(), page, problems),
                None => {
                    let hint = nearest(&path, KEYS.iter().map(|key| key.path));
                    problems.push(page.problem(
                        name.span(),
                        format!("unknown key `{}`", problem::shown(&path)),
                        &hint,
                    ));
                }
            }
        }
    }

    fn take(
        &mut self,
        key: &Key,
        value: &DeValue<'_>,
        span: std::ops::Range<usize>,
        page: &Page,
        problems: &mut Vec<Problem>,
    ) {
        if key.path == "housekeeping" {
            self.housekeeping_place = Some((page.clone(), span.clone()));
        }
        if let Err(why) = (key.set)(self, value) {
            let what = if why.is_empty() {
                format!("`{}` has a wrong value", key.path)
            } else {
                format!("`{}`: {why}", key.path)
            };
            problems.push(page.problem(span, what, &format!("allowed: {}", key.allowed)));
        }
    }

    /// Values that are right alone and wrong together.
    fn check_together(&self, page: &Page, problems: &mut Vec<Problem>) {
        if self.cold_permille >= self.hot_permille {
            let what = format!(
                "`balance.cold_permille` ({}) must be below `balance.hot_permille` ({})",
                self.cold_permille, self.hot_permille
            );
            problems.push(
                page.whole(what, "a thread that is hot and cold at once would be pinned and floated in turn"),
            );
        }
        if self.rescan_interval < self.interval {
            let what = "`rescan_interval` is shorter than `interval`".to_owned();
            problems.push(
                page.whole(what, "a rescan looks at everything that an interval looks at: make it longer"),
            );
        }
    }

    /// The rules that this configuration makes on this machine.
    ///
    /// # Errors
    /// If the machine has no such housekeeping PUs, or would have none left for jobs.
    pub fn policy(&self, topology: &Topology) -> Result<Policy, Vec<Problem>> {
        let housekeeping = self.housekeeping.resolve(topology).map_err(|error| {
            let what = format!("`housekeeping`: {error}");
            vec![match &self.housekeeping_place {
                Some((page, span)) => page.problem(span.clone(), what, ""),
                None => Problem::of_file(Path::new("(defaults)"), what),
            }]
        })?;
        let on = self.sources.iter().filter(|(_, config)| config.enabled).map(|(&source, _)| source);
        let counted = self.sources.iter().filter(|(_, config)| config.cores > 0);
        Ok(Policy {
            mode: self.mode,
            housekeeping,
            share_smt: self.share_smt,
            on_exhausted: self.on_exhausted,
            adopt_strays: self.adopt_strays,
            user_max_cores: self.user_max_cores,
            sources: on.chain([Source::Manual, Source::Session]).collect(),
            source_cores: counted.map(|(&source, config)| (source, config.cores)).collect(),
            hot_permille: self.hot_permille,
            cold_permille: self.cold_permille,
            smoothing_permille: self.smoothing_permille,
            pin: self.pin,
            oversubscribed: self.oversubscribed,
            reservation_timeout: self.reservation_timeout,
            ..Policy::default()
        })
    }

    /// What differs in another configuration, one sentence a key.
    #[must_use]
    pub fn changes(&self, other: &Self) -> Vec<String> {
        let differs = |key: &&Key| (key.show)(self) != (key.show)(other);
        let sentence = |key: &Key| format!("{}: {} -> {}", key.path, (key.show)(self), (key.show)(other));
        KEYS.iter().filter(differs).map(sentence).collect()
    }

    /// How long between two looks at the jobs.
    #[must_use]
    pub fn interval(&self) -> Duration {
        self.interval
    }

    /// How long between two looks at everything.
    #[must_use]
    pub fn rescan_interval(&self) -> Duration {
        self.rescan_interval
    }

    /// The groups whose members are administrators.
    #[must_use]
    pub fn admin_groups(&self) -> &[String] {
        &self.admin_groups
    }

    /// How much is logged.
    #[must_use]
    pub fn log_level(&self) -> &str {
        &self.log_level
    }

    /// Where the log goes: `auto`, `journald` or `text`.
    #[must_use]
    pub fn log_format(&self) -> &str {
        &self.log_format
    }
}

fn read(path: &Path) -> Result<String, String> {
    let mut bytes = Vec::new();
    let file = File::open(path).map_err(|error| format!("can't be opened: {error}"))?;
    file.take(LARGEST_BYTES + 1)
        .read_to_end(&mut bytes)
        .map_err(|error| format!("can't be read: {error}"))?;
    if bytes.len() as u64 > LARGEST_BYTES {
        return Err(format!("is larger than {LARGEST_BYTES} bytes: is it the right file?"));
    }
    String::from_utf8(bytes).map_err(|error| {
        format!("is no text after {} bytes: is it the right file?", error.utf8_error().valid_up_to())
    })
}
