//! The table of keys: what each allows, how it is read, how it is shown.

use std::time::Duration;

use jiff::{SignedDuration, Span};
use pjw_core::housekeeping::HousekeepingError;
use pjw_core::job::Source;
use pjw_core::policy::{Mode, OnExhausted, Oversubscribed};
use toml::de::DeValue;

use super::Config;

/// One key.
pub(super) struct Key {
    /// Its name, with its tables before it.
    pub(super) path: &'static str,
    /// What it allows, for people.
    pub(super) allowed: &'static str,
    /// Reads it; the error says what is wrong, or nothing if `allowed` says enough.
    pub(super) set: fn(&mut Config, &DeValue<'_>) -> Result<(), String>,
    /// Shows it as TOML.
    pub(super) show: fn(&Config) -> String,
}

macro_rules! source_enabled {
    ($path:literal, $source:expr) => {
        Key {
            path: $path,
            allowed: "true or false",
            set: |config, value| {
                let enabled = boolean(value)?;
                config.sources.entry($source).and_modify(|source| source.enabled = enabled);
                Ok(())
            },
            show: |config| config.sources.get(&$source).is_some_and(|source| source.enabled).to_string(),
        }
    };
}

macro_rules! source_cores {
    ($path:literal, $source:expr) => {
        Key {
            path: $path,
            allowed: "a number of cores from 0 (not guessed) to 65536",
            set: |config, value| {
                let cores = number(value, 0, 65_536)?;
                config.sources.entry($source).and_modify(|source| source.cores = cores);
                Ok(())
            },
            show: |config| config.sources.get(&$source).map_or(0, |source| source.cores).to_string(),
        }
    };
}

macro_rules! flag {
    ($path:literal, $field:ident) => {
        Key {
            path: $path,
            allowed: "true or false",
            set: |config, value| put(&mut config.$field, boolean(value)),
            show: |config| config.$field.to_string(),
        }
    };
}

macro_rules! permille {
    ($path:literal, $field:ident) => {
        Key {
            path: $path,
            allowed: "a whole number from 1 to 1000",
            set: |config, value| put(&mut config.$field, number(value, 1, 1000)),
            show: |config| config.$field.to_string(),
        }
    };
}

macro_rules! word {
    ($path:literal, $field:ident, $allowed:literal, $words:expr) => {
        Key {
            path: $path,
            allowed: $allowed,
            set: |config, value| put(&mut config.$field, choice(value, &$words)),
            show: |config| {
                let word = $words.iter().find(|(_, meaning)| *meaning == config.$field);
                quoted(word.map_or("", |(word, _)| word))
            },
        }
    };
}

macro_rules! duration {
    ($path:literal, $field:ident, $allowed:literal, $least:expr, $most:expr) => {
        Key {
            path: $path,
            allowed: $allowed,
            set: |config, value| put(&mut config.$field, span(value, $least, $most)),
            show: |config| quoted(&friendly(config.$field)),
        }
    };
}

const MODES: [(&str, Mode); 2] = [("enforce", Mode::Enforce), ("observe", Mode::Observe)];
const ON_EXHAUSTED: [(&str, OnExhausted); 3] =
    [("refuse", OnExhausted::Refuse), ("share", OnExhausted::Share), ("wait", OnExhausted::Wait)];
const OVERSUBSCRIBED: [(&str, Oversubscribed); 2] =
    [("spread", Oversubscribed::Spread), ("float", Oversubscribed::Float)];
const LEVELS: [(&str, &str); 4] =
    [("error", "error"), ("warn", "warn"), ("info", "info"), ("debug", "debug")];
const FORMATS: [(&str, &str); 3] = [("auto", "auto"), ("journald", "journald"), ("text", "text")];

/// Every key.
pub(super) static KEYS: [Key; 32] = [
    word!("mode", mode, "\"enforce\" or \"observe\"", MODES),
    Key {
        path: "housekeeping",
        allowed: "\"\", a CPU list such as \"0-1\", or a share such as \"1/l3\", \"1/numa\", \"2/package\"",
        set: |config, value| {
            let text = text(value)?;
            config.housekeeping =
                text.parse().map_err(|error: HousekeepingError| crate::report::chain_of(&error))?;
            config.housekeeping_text = text.to_owned();
            Ok(())
        },
        show: |config| quoted(&config.housekeeping_text),
    },
    duration!("interval", interval, "a time from \"10ms\" to \"1h\"", Duration::from_millis(10), HOUR),
    duration!(
        "rescan_interval",
        rescan_interval,
        "a time from \"100ms\" to \"24h\"",
        Duration::from_millis(100),
        DAY
    ),
    Key {
        path: "enforcement",
        allowed: "\"auto\" or \"affinity\" (\"cpuset\" comes with a later version)",
        set: |config, value| match text(value)? {
            word @ ("auto" | "affinity") => put(&mut config.enforcement, Ok(word.to_owned())),
            "cpuset" => Err("this version keeps jobs on their cores by affinity masks only".to_owned()),
            _ => Err(String::new()),
        },
        show: |config| quoted(&config.enforcement),
    },
    flag!("share_smt", share_smt),
    word!("on_exhausted", on_exhausted, "\"refuse\", \"share\" or \"wait\"", ON_EXHAUSTED),
    flag!("adopt_strays", adopt_strays),
    Key {
        path: "admin_groups",
        allowed: "a list of group names, as in [\"pjw\"]",
        set: |config, value| {
            let DeValue::Array(items) = value else { return Err(String::new()) };
            let names: Result<Vec<String>, String> =
                items.iter().map(|item| text(item.get_ref()).map(str::to_owned)).collect();
            put(&mut config.admin_groups, names)
        },
        show: |config| {
            let names: Vec<String> = config.admin_groups.iter().map(|name| quoted(name)).collect();
            format!("[{}]", names.join(", "))
        },
    },
    Key {
        path: "user_max_cores",
        allowed: "a number of cores from 0 (users only look) to 65536",
        set: |config, value| put(&mut config.user_max_cores, number(value, 0, 65_536)),
        show: |config| config.user_max_cores.to_string(),
    },
    duration!(
        "reservation_timeout",
        reservation_timeout,
        "a time from \"1m\" to \"8760h\"",
        Duration::from_secs(60),
        YEAR
    ),
    Key {
        path: "log.level",
        allowed: "\"error\", \"warn\", \"info\" or \"debug\"",
        set: |config, value| put(&mut config.log_level, choice(value, &LEVELS).map(str::to_owned)),
        show: |config| quoted(&config.log_level),
    },
    Key {
        path: "log.format",
        allowed: "\"auto\", \"journald\" or \"text\"",
        set: |config, value| put(&mut config.log_format, choice(value, &FORMATS).map(str::to_owned)),
        show: |config| quoted(&config.log_format),
    },
    flag!("balance.pin", pin),
    permille!("balance.hot_permille", hot_permille),
    permille!("balance.cold_permille", cold_permille),
    permille!("balance.smoothing_permille", smoothing_permille),
    word!("balance.oversubscribed", oversubscribed, "\"spread\" or \"float\"", OVERSUBSCRIBED),
    source_enabled!("sources.slurm.enabled", Source::Slurm),
    source_cores!("sources.slurm.cores", Source::Slurm),
    source_enabled!("sources.lsf.enabled", Source::Lsf),
    source_cores!("sources.lsf.cores", Source::Lsf),
    source_enabled!("sources.pbs.enabled", Source::Pbs),
    source_cores!("sources.pbs.cores", Source::Pbs),
    source_enabled!("sources.sge.enabled", Source::Sge),
    source_cores!("sources.sge.cores", Source::Sge),
    source_enabled!("sources.condor.enabled", Source::Condor),
    source_cores!("sources.condor.cores", Source::Condor),
    source_enabled!("sources.flux.enabled", Source::Flux),
    source_cores!("sources.flux.cores", Source::Flux),
    source_enabled!("sources.oar.enabled", Source::Oar),
    source_cores!("sources.oar.cores", Source::Oar),
];

const HOUR: Duration = Duration::from_secs(3600);
const DAY: Duration = Duration::from_secs(24 * 3600);
const YEAR: Duration = Duration::from_secs(365 * 24 * 3600);

fn put<T>(field: &mut T, value: Result<T, String>) -> Result<(), String> {
    *field = value?;
    Ok(())
}

fn boolean(value: &DeValue<'_>) -> Result<bool, String> {
    match value {
        DeValue::Boolean(value) => Ok(*value),
        _ => Err(String::new()),
    }
}

fn number(value: &DeValue<'_>, least: u32, most: u32) -> Result<u32, String> {
    let DeValue::Integer(integer) = value else { return Err(String::new()) };
    let number = u32::from_str_radix(integer.as_str(), integer.radix()).ok();
    number.filter(|number| (least..=most).contains(number)).ok_or_else(String::new)
}

fn text<'v>(value: &'v DeValue<'_>) -> Result<&'v str, String> {
    match value {
        DeValue::String(text) => Ok(text),
        _ => Err(String::new()),
    }
}

fn choice<T: Copy>(value: &DeValue<'_>, words: &[(&str, T)]) -> Result<T, String> {
    let chosen = text(value)?;
    words.iter().find(|(word, _)| *word == chosen).map(|(_, meaning)| *meaning).ok_or_else(String::new)
}

/// A time with its unit, such as `500ms`, `1s`, `24h`.
fn span(value: &DeValue<'_>, least: Duration, most: Duration) -> Result<Duration, String> {
    let text = text(value)?;
    let span: Span = text
        .parse()
        .map_err(|_| "not a time: write it with its unit, as in \"1s\" or \"500ms\"".to_owned())?;
    let signed =
        SignedDuration::try_from(span).map_err(|_| "months and years have no fixed length".to_owned())?;
    let duration = Duration::try_from(signed).map_err(|_| "a time can't be negative".to_owned())?;
    if duration < least || duration > most { Err(String::new()) } else { Ok(duration) }
}

fn friendly(duration: Duration) -> String {
    let milliseconds = duration.as_millis();
    match (milliseconds % 3_600_000, milliseconds % 1000) {
        (0, _) => format!("{}h", milliseconds / 3_600_000),
        (_, 0) => format!("{}s", milliseconds / 1000),
        _ => format!("{milliseconds}ms"),
    }
}

fn quoted(text: &str) -> String {
    format!("\"{text}\"")
}
