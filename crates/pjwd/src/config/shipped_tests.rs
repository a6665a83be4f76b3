//! The shipped configuration file and the documentation agree with the code.

use std::collections::BTreeSet;

use super::keys::ConfigKey;
use super::{Config, Settings};

const SHIPPED: &str = include_str!("../../../../config/pjwd.toml");
const DOCUMENTED: &str = include_str!("../../../../docs/config.md");

/// The shipped file with every key uncommented.
fn uncommented() -> String {
    let line = |line: &'static str| match line.strip_prefix('#') {
        Some(rest) if !rest.is_empty() && !rest.starts_with(' ') => rest,
        _ => line,
    };
    SHIPPED.lines().map(line).collect::<Vec<_>>().join("\n")
}

/// The rows of the table in the documentation: key and default. The keys of every source appear once, as `NAME`.
fn rows() -> Vec<(String, String)> {
    let cells = DOCUMENTED.lines().filter_map(|line| line.strip_prefix("| `")).filter_map(|row| {
        let (key, rest) = row.split_once('`')?;
        let default = rest.split(" | ").nth(2)?.trim_matches('`');
        Some((key.to_owned(), default.to_owned()))
    });
    let sources = ["slurm", "lsf", "pbs", "sge", "condor", "flux", "oar"];
    let expand = |(key, default): (String, String)| {
        let times = if key.contains("NAME") { &sources[..] } else { &sources[..1] };
        times.iter().map(move |source| (key.replace("NAME", source), default.clone())).collect::<Vec<_>>()
    };
    cells.flat_map(expand).collect()
}

#[test]
fn the_shipped_file_gives_the_defaults() {
    assert_eq!(Config::parse_in_test("pjwd.toml", SHIPPED).unwrap().settings(), &Settings::default());
}

#[test]
fn every_key_is_in_the_shipped_file_with_its_default() {
    let text = uncommented();
    let config = Config::parse_in_test("pjwd.toml", &text).unwrap();
    assert_eq!(config.settings(), &Settings::default());
    let document: toml::Table = text.parse().unwrap();
    for key in ConfigKey::all() {
        let name = key.name();
        let found = name
            .split('.')
            .try_fold(toml::Value::Table(document.clone()), |value, part| value.get(part).cloned());
        let found = found.unwrap_or_else(|| panic!("{name} is not in config/pjwd.toml")).to_string();
        assert_eq!(found, key.format_value(&Settings::default()), "{name}");
    }
}

#[test]
fn exactly_all_keys_are_in_the_documentation_with_their_defaults() {
    let known: BTreeSet<(String, String)> =
        ConfigKey::all().map(|key| (key.name(), key.format_value(&Settings::default()))).collect();
    let rows = rows();
    assert_eq!(rows.len(), known.len(), "a key is listed twice, or one is missing");
    assert_eq!(rows.into_iter().collect::<BTreeSet<_>>(), known);
}

#[test]
fn the_example_in_the_documentation_is_what_is_printed() {
    let text = "\n\nintervall = \"1s\"\n\n\n\nmode = \"enforced\"\n";
    let problems = Config::parse_in_test("/etc/pjw/pjwd.toml", text).unwrap_err();
    let printed: Vec<String> = problems.iter().map(ToString::to_string).collect();
    assert!(DOCUMENTED.contains(&printed.join("\n")), "{}", printed.join("\n"));
}
