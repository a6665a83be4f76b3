//! Reads a file into settings: first the syntax, then each key, then the combinations of keys.

use std::fs::{self, OpenOptions};
use std::io::{self, Read};
use std::ops::Range;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use nix::fcntl::OFlag;
use pjw_core::cpuset::CpuSet;
use pjw_core::topology::Topology;
use toml::de::{DeTable, DeValue};

use super::keys::{self, ConfigKey};
use super::problem::{ConfigError, FilePosition, closest_word, quote_and_cut};
use super::provisions;
use super::settings::Settings;
use super::values::{ValueError, show_duration};

/// The largest file in bytes, about a thousand times the size of all keys.
const SIZE_MAX: u64 = 1 << 20;
/// The largest number of problems in a report. A file with more problems is probably not a configuration.
const PROBLEMS_MAX: usize = 50;

/// Returns whether there is a file at `path`. True also for a symbolic link whose target does not exist.
pub(super) fn path_exists(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok()
}

/// Returns the content of the configuration file `path`.
///
/// # Errors
/// If the file can't be read, is not a regular file, is larger than 1 MiB, or is not UTF-8.
pub(super) fn read_config_file(path: &Path) -> Result<String, Vec<ConfigError>> {
    let problem = |text: String| vec![ConfigError::for_whole_file(path, text)];
    let unreadable = |error: io::Error| {
        let remedy = match error.kind() {
            io::ErrorKind::NotFound => "restore the file, or start pjwd with another --config",
            io::ErrorKind::PermissionDenied => "check the permissions of the file and of its directories",
            _ => "check the file and its disk",
        };
        problem(format!("the configuration can't be read: {error}: {remedy}"))
    };
    // Opening a pipe without a writer must not block a reload.
    let mut options = OpenOptions::new();
    options.read(true).custom_flags((OFlag::O_NONBLOCK | OFlag::O_NOCTTY).bits());
    let file = options.open(path).map_err(unreadable)?;
    let kind = file.metadata().map_err(unreadable)?;
    if kind.is_dir() {
        return Err(problem("this is a directory: name the file in it, such as pjwd.toml".to_owned()));
    }
    if !kind.is_file() {
        return Err(problem("this is not a regular file: give the path of one".to_owned()));
    }
    let mut bytes = Vec::new();
    file.take(SIZE_MAX + 1).read_to_end(&mut bytes).map_err(unreadable)?;
    if bytes.len() as u64 > SIZE_MAX {
        let limit = SIZE_MAX / 1024;
        return Err(problem(format!("the file is larger than {limit} KiB, the limit for a configuration")));
    }
    String::from_utf8(bytes).map_err(|error| {
        let at = error.utf8_error().valid_up_to();
        let line = error.as_bytes()[..at].iter().filter(|byte| **byte == b'\n').count() + 1;
        problem(format!("this is not text in UTF-8, from byte {at} (line {line}) on: is it the right file?"))
    })
}

/// What the key `housekeeping` means on a machine. The default is that of a file without this key.
#[derive(Debug, Clone, Default)]
pub(super) struct Housekeeping {
    /// The housekeeping PUs (logical CPUs that are reserved for the system) that the key selects on the machine.
    pub(super) cpus: CpuSet,
    /// The position of the value in the file. `None` if the file does not have the key.
    pub(super) position: Option<FilePosition>,
}

/// Parses `text`, the content of the configuration file `path`. Returns the values of all configuration keys, and what
/// the key `housekeeping` means on the machine with the topology `topology`.
///
/// # Errors
/// The mistakes in the file. A value of the key `housekeeping` that does not fit the machine is one of them.
pub(super) fn parse_settings(
    path: &Path,
    text: &str,
    topology: &Topology,
) -> Result<(Settings, Housekeeping), Vec<ConfigError>> {
    let (document, errors) = DeTable::parse_recoverable(text);
    let mut reader = Reader {
        path,
        text,
        settings: Settings::default(),
        keys_in_file: Vec::new(),
        mistakes: Vec::new(),
        has_syntax_errors: !errors.is_empty(),
    };
    for error in &errors {
        let span = error.span().unwrap_or(text.len()..text.len());
        let text = format!("syntax: {}", error.message());
        reader.mistakes.push(Mistake { span, key: None, text, is_certain: true });
    }
    reader.read_table("", document.get_ref());
    reader.check_combinations();
    let housekeeping = reader.apply_housekeeping(topology);
    if reader.mistakes.is_empty() {
        return Ok((reader.settings, housekeeping));
    }
    Err(reader.into_errors(errors.len()))
}

/// A mistake in the configuration file that is not formatted yet.
struct Mistake {
    span: Range<usize>,
    key: Option<String>,
    text: String,
    /// Whether this is certainly a mistake, even if the tables of the file were misread after a syntax error.
    is_certain: bool,
}

/// The settings and mistakes that were found in a configuration file so far.
struct Reader<'t> {
    path: &'t Path,
    text: &'t str,
    settings: Settings,
    /// The name of every known key in the file, valid or not, with the byte range of its value.
    keys_in_file: Vec<(String, Range<usize>)>,
    mistakes: Vec<Mistake>,
    /// Whether a part of the file could not be understood.
    has_syntax_errors: bool,
}

impl Reader<'_> {
    /// Stores the values of the keys in `table`, and in the tables inside it, in the settings. Records a mistake for
    /// each wrong value and each unknown key. `prefix` is the full name of `table` followed by a dot, or empty for the
    /// whole file.
    fn read_table(&mut self, prefix: &str, table: &DeTable<'_>) {
        for (key, value) in table.iter() {
            let name = format!("{prefix}{}", key.get_ref());
            if name == provisions::PROVISION_KEY {
                match provisions::parse_provisions(value.get_ref(), keys::MAX_CORES, self.has_syntax_errors) {
                    Ok(read) => self.settings.provisions = read,
                    Err(mistakes) => self.record_mistakes(mistakes, value.span(), &name),
                }
            } else if let Some(known) = ConfigKey::all().find(|known| known.name() == name) {
                self.keys_in_file.push((name.clone(), value.span()));
                if let Err(mistakes) = known.parse_value(value.get_ref(), &mut self.settings) {
                    self.record_mistakes(mistakes, value.span(), &name);
                }
            } else if is_table(&name) {
                match value.get_ref() {
                    DeValue::Table(inner) => self.read_table(&format!("{name}."), inner),
                    _ => {
                        let text = format!("this is a table: write [{name}] above its keys");
                        self.record(value.span(), &name, text, false);
                    }
                }
            } else {
                self.record(key.span(), &name, unknown_key_message(prefix, &name), false);
            }
        }
    }

    /// Records the mistakes of pairs of keys, whose values are allowed alone, but not together:
    ///
    /// - The rescan interval is shorter than the scan interval.
    /// - The threshold for cold threads is not below the threshold for hot threads.
    ///
    /// Leaves out a pair if one of its keys already has a mistake.
    fn check_combinations(&mut self) {
        let Settings {
            scan_interval,
            rescan_interval,
            hot_threshold_permille: hot_permille,
            cold_threshold_permille: cold_permille,
            ..
        } = self.settings;
        if rescan_interval < scan_interval {
            let (one, other) = (show_duration(&scan_interval), show_duration(&rescan_interval));
            let text = format!("rescan_interval ({other}) must not be shorter than interval ({one})");
            self.record_pair_mistake(keys::RESCAN_INTERVAL_KEY, keys::SCAN_INTERVAL_KEY, text);
        }
        if cold_permille >= hot_permille {
            let text = format!(
                "balance.cold_permille ({cold_permille}) must be below balance.hot_permille ({hot_permille})"
            );
            self.record_pair_mistake(keys::COLD_PERMILLE_KEY, keys::HOT_PERMILLE_KEY, text);
        }
    }

    /// Returns what the key `housekeeping` means on the machine with the topology `topology`. Records the mistake if
    /// the value does not fit the machine. If the value has another mistake, or if the file does not have the key, the
    /// setting has its default, which fits each machine.
    fn apply_housekeeping(&mut self, topology: &Topology) -> Housekeeping {
        let Some(span) = self.span_of(keys::HOUSEKEEPING_KEY) else { return Housekeeping::default() };
        let position = Some(FilePosition::from_span(self.text, span.clone()));
        let selected = self.settings.housekeeping.select_housekeeping_cpus(topology);
        let cpus = selected.unwrap_or_else(|error| {
            self.record(span, keys::HOUSEKEEPING_KEY, crate::error_text::error_chain_text(&error), true);
            CpuSet::new()
        });
        Housekeeping { cpus, position }
    }

    /// Records the mistake `text` of two keys, at the first of the two that is in the file (the other may have its
    /// default). Does nothing if one of the keys already has a mistake.
    fn record_pair_mistake(&mut self, first: &str, second: &str, text: String) {
        let is_wrong = |name| self.mistakes.iter().any(|mistake| mistake.key.as_deref() == Some(name));
        if is_wrong(first) || is_wrong(second) {
            return;
        }
        for name in [first, second] {
            if let Some(span) = self.span_of(name) {
                return self.record(span, name, text, true);
            }
        }
    }

    /// The byte range of a key's value, if the file has the key.
    fn span_of(&self, name: &str) -> Option<Range<usize>> {
        self.keys_in_file.iter().find(|(key, _)| key == name).map(|(_, span)| span.clone())
    }

    /// Records the mistakes in the value of the key `name`. `span` is the byte range of the whole value.
    fn record_mistakes(&mut self, mistakes: Vec<ValueError>, span: Range<usize>, name: &str) {
        for mistake in mistakes {
            let key = mistake.key.as_deref().unwrap_or(name);
            self.record(mistake.span.unwrap_or(span.clone()), key, mistake.text, true);
        }
    }

    fn record(&mut self, span: Range<usize>, key: &str, text: String, is_certain: bool) {
        self.mistakes.push(Mistake { span, key: Some(key.to_owned()), text, is_certain });
    }

    /// Returns the recorded mistakes as errors, in the order of the file. `syntax_error_count` is the number of syntax
    /// errors, which are the first elements of `mistakes`. Returns at most [`PROBLEMS_MAX`] errors, and one more that
    /// says how many are omitted. Mistakes that are probably only consequences of a syntax error are left out:
    ///
    /// - other mistakes on the line of a syntax error,
    /// - mistakes after the first syntax error that depend on the table of the key, such as an unknown key: the table
    ///   may have been misread.
    fn into_errors(mut self, syntax_error_count: usize) -> Vec<ConfigError> {
        let text = self.text;
        let position_of = |mistake: &Mistake| FilePosition::from_span(text, mistake.span.clone());
        let syntax_errors = &self.mistakes[..syntax_error_count];
        let lines_with_syntax_error: Vec<usize> =
            syntax_errors.iter().take(PROBLEMS_MAX).map(|error| position_of(error).line()).collect();
        let first_syntax_error =
            syntax_errors.iter().map(|error| error.span.start).min().unwrap_or(usize::MAX);
        self.mistakes.sort_by_key(|mistake| mistake.span.start);
        let mut problems = Vec::new();
        let mut omitted = 0;
        for mistake in self.mistakes {
            let is_syntax_error = mistake.key.is_none();
            if !is_syntax_error && !mistake.is_certain && mistake.span.start > first_syntax_error {
                continue;
            }
            if problems.len() == PROBLEMS_MAX {
                omitted += 1;
                continue;
            }
            let position = position_of(&mistake);
            if is_syntax_error || !lines_with_syntax_error.contains(&position.line()) {
                let key = mistake.key.as_deref();
                problems.push(ConfigError::at_position(self.path, position, key, mistake.text));
            }
        }
        if omitted > 0 {
            problems.push(ConfigError::for_whole_file(
                self.path,
                format!("{omitted} more problems are not shown"),
            ));
        }
        problems
    }
}

fn is_table(name: &str) -> bool {
    let prefix = format!("{name}.");
    ConfigKey::all().any(|key| key.name().starts_with(&prefix))
}

/// Returns the message that the key `name` is unknown. `prefix` is the name of the key's table and a dot, or empty
/// for the top level. The message suggests a similar key of the same table, or else a key of the same name in another
/// table. If there is none, the message lists the keys of the table, except for the top level.
fn unknown_key_message(prefix: &str, name: &str) -> String {
    let names_in_table: Vec<String> =
        ConfigKey::all().filter_map(|key| key.name().strip_prefix(prefix).map(str::to_owned)).collect();
    let last_part = name.strip_prefix(prefix).unwrap_or(name);
    // For a key in a nested table, suggest the table: `[balanc]` means `[balance]`.
    let mut known: Vec<&str> = names_in_table.iter().filter_map(|name| name.split('.').next()).collect();
    known.dedup();
    let in_table = closest_word(last_part, known.iter().copied()).map(|word| format!("{prefix}{word}"));
    let in_other_table =
        || ConfigKey::all().map(|key| key.name()).find(|name| name.rsplit('.').next() == Some(last_part));
    match in_table.or_else(in_other_table) {
        Some(meant) => format!("there is no such key; did you mean {}?", quote_and_cut(&meant)),
        None if prefix.is_empty() => "there is no such key".to_owned(),
        None => format!("there is no such key; {} has {}", prefix.trim_end_matches('.'), known.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use pjw_core::policy::Policy;
    use pjw_core::testing::regular_topology;

    use crate::config::{Config, ConfigError};

    #[test]
    fn a_housekeeping_rule_that_does_not_fit_is_reported_with_the_other_mistakes() {
        let machine = regular_topology(1, 1, 1, 2, 1);
        let mistakes = |text: &str| {
            let problems = Config::parse(Path::new("pjwd.toml"), text, &machine).unwrap_err();
            problems.iter().map(ConfigError::location).collect::<Vec<_>>()
        };
        let places = mistakes("mode = \"x\"\nhousekeeping = \"9\"\nintervall = \"1s\"\n");
        assert_eq!(
            places,
            ["pjwd.toml:1:8: mode", "pjwd.toml:2:16: housekeeping", "pjwd.toml:3:1: intervall"]
        );
        assert_eq!(mistakes("housekeeping = \"9\"\n"), ["pjwd.toml:1:16: housekeeping"]);
        assert_eq!(mistakes("housekeeping = \"x\"\n").len(), 1, "a rule that is wrong has one mistake");
    }

    #[test]
    fn a_housekeeping_rule_is_applied_to_a_later_topology() {
        let (one_package, two_packages) = (regular_topology(1, 1, 1, 2, 1), regular_topology(2, 1, 1, 2, 1));
        let text = "housekeeping = \"1/package\"\n";
        let config = Config::parse(Path::new("pjwd.toml"), text, &one_package).unwrap();
        assert_eq!(config.policy().housekeeping_cpus.to_string(), "0");
        let later = config.for_topology(&two_packages).unwrap();
        assert_eq!(later.policy().housekeeping_cpus.to_string(), "0,2");
        assert_eq!(Config::default().for_topology(&two_packages).unwrap().policy(), Policy::default());
    }

    #[test]
    fn a_housekeeping_rule_that_does_not_fit_a_later_topology_is_reported_as_at_the_parse() {
        let (one_pu_per_core, two_pus_per_core) =
            (regular_topology(1, 1, 1, 2, 1), regular_topology(1, 1, 1, 2, 2));
        let parse = |topology| Config::parse(Path::new("pjwd.toml"), "\nhousekeeping = \"0\"\n", topology);
        let error = parse(&one_pu_per_core).unwrap().for_topology(&two_pus_per_core).unwrap_err();
        let start = "pjwd.toml:2:16: housekeeping: housekeeping PU 0 shares its core with 2";
        assert!(error.log_line().starts_with(start), "{error}");
        assert_eq!(parse(&two_pus_per_core).unwrap_err(), [error]);
    }
}
