//! A configuration is right as a whole or not at all, and says what is wrong with it.

use std::collections::BTreeSet;

use pjw_core::topology::Regular;

use super::*;

const SHIPPED: &str = include_str!("../../../../config/pjwd.toml");
const DOCUMENTED: &str = include_str!("../../../../docs/config.md");

fn parse(text: &str) -> Result<Config, Vec<Problem>> {
    Config::parse(Path::new("pjwd.toml"), text)
}

fn machine() -> Topology {
    Topology::regular(Regular {
        packages: 1,
        numa_per_package: 1,
        l3_per_numa: 1,
        cores_per_l3: 4,
        pus_per_core: 2,
    })
}

fn problems(text: &str) -> String {
    let checked = parse(text).and_then(|config| config.policy(&machine()));
    let problems: Vec<String> = checked.unwrap_err().iter().map(ToString::to_string).collect();
    problems.join("\n")
}

/// The shipped file with every key taken out of its comment.
fn uncommented() -> String {
    let lines = SHIPPED.lines().map(|line| match line.strip_prefix("# ") {
        Some(rest)
            if rest.contains(" = ")
                && KEYS.iter().any(|key| key.path.ends_with(rest.split(' ').next().unwrap())) =>
        {
            rest
        }
        _ => line,
    });
    lines.collect::<Vec<_>>().join("\n")
}

#[test]
fn the_shipped_file_changes_nothing_and_names_every_key_with_its_default() {
    let nothing: [String; 0] = [];
    assert_eq!(Config::default().changes(&parse(SHIPPED).unwrap()), nothing);
    let text = uncommented();
    assert_eq!(Config::default().changes(&parse(&text).unwrap()), nothing);
    let set: usize = text.lines().filter(|line| line.contains(" = ") && !line.starts_with('#')).count();
    assert_eq!(set, KEYS.len(), "a key is missing in config/pjwd.toml, or stands twice");
}

#[test]
fn every_key_is_documented_and_nothing_else() {
    let rows: BTreeSet<&str> = DOCUMENTED
        .lines()
        .filter_map(|line| line.strip_prefix("| `")?.split_once('`').map(|(key, _)| key))
        .collect();
    let keys: BTreeSet<&str> = KEYS.iter().map(|key| key.path).collect();
    assert_eq!(rows, keys);
}

#[test]
fn a_mistyped_key_is_refused_with_the_nearest_one() {
    assert_eq!(
        problems("mode = \"observe\"\nintervall = \"1s\"\n"),
        "pjwd.toml:2:1: unknown key `intervall`\n  2 | intervall = \"1s\"\n    | ^^^^^^^^^\n    = did you mean `interval`?"
    );
    assert!(problems("[sources.slrum]\nenabled = true\n").contains("unknown key `sources.slrum`"));
    assert!(problems("[balance]\nhot = 1\n").contains("unknown key `balance.hot`"));
}

#[test]
fn a_wrong_value_is_shown_with_what_is_allowed() {
    assert_eq!(
        problems("mode = \"enfroce\"\n"),
        "pjwd.toml:1:8: `mode` has a wrong value\n  1 | mode = \"enfroce\"\n    |        ^^^^^^^^^\n    = allowed: \"enforce\" or \"observe\""
    );
    for (text, expected) in [
        ("interval = 1", "a time from \"10ms\" to \"1h\""),
        ("interval = \"1\"", "write it with its unit"),
        ("interval = \"-1s\"", "can't be negative"),
        ("interval = \"2h\"", "a time from"),
        ("share_smt = \"no\"", "true or false"),
        ("user_max_cores = -1", "a number of cores from 0"),
        ("user_max_cores = 1.5", "a number of cores from 0"),
        ("admin_groups = \"pjw\"", "a list of group names"),
        ("admin_groups = [1]", "a list of group names"),
        ("enforcement = \"cpuset\"", "by affinity masks only"),
        ("sources = 3", "unknown key `sources`"),
        ("[sources.slurm]\ncores = 99999999999999999999", "a number of cores"),
        ("[balance]\nhot_permille = 1001", "from 1 to 1000"),
    ] {
        let told = problems(text);
        assert!(told.contains(expected), "{text}: {told}");
    }
}

#[test]
fn housekeeping_is_checked_against_the_machine() {
    for (text, expected) in [
        ("housekeeping = \"0,0\"", "PU 0 stands twice"),
        ("housekeeping = \"0,,1\"", "empty place"),
        ("housekeeping = \"0-1,1-2\"", "PU 1 stands twice"),
        ("housekeeping = \"0,99\"", "99"),
        ("housekeeping = \"0-7\"", "pjwd.toml:1:16"),
        ("housekeeping = \"x/l3\"", "not a number of cores"),
        ("housekeeping = \"0/l3\"", "no housekeeping"),
        ("housekeeping = \"1/core\"", "not a part of a machine"),
        ("housekeeping = 0", "allowed: \"\", a CPU list"),
    ] {
        let told = problems(text);
        assert!(told.contains(expected), "{text}: {told}");
    }
    let config = parse("housekeeping = \"1/l3\"").unwrap();
    assert_eq!(config.policy(&machine()).unwrap().housekeeping.to_string(), "0,4");
    assert!(parse("housekeeping = \"\"").unwrap().policy(&machine()).unwrap().housekeeping.is_empty());
}

#[test]
fn all_problems_are_told_at_once() {
    let told = parse("mode = 1\nintervall = 2\nshare_smt = 3\n[balance]\ncold_permille = 700\n").unwrap_err();
    assert_eq!(told.len(), 4, "{told:#?}");
}

#[test]
fn a_syntax_error_has_its_place() {
    let told = problems("mode = \"observe\"\n[balance\npin = true\n");
    assert!(told.starts_with("pjwd.toml:2:"), "{told}");
    assert!(problems("mode = \"a\"\nmode = \"b\"\n").contains("duplicate key"));
}

#[test]
fn files_that_are_no_configuration_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("pjwd.toml");
    let told = |path: &Path| Config::load(Some(path)).unwrap_err()[0].to_string();
    assert!(told(&path).contains("can't be opened: No such file"));
    assert!(told(dir.path()).contains("can't be read: Is a directory"));
    std::fs::write(&path, [0x80, 0xff, 0x00]).unwrap();
    assert!(told(&path).contains("is no text"));
    std::fs::write(&path, "#".repeat(2 << 20)).unwrap();
    assert!(told(&path).contains("is larger than"));
}

#[test]
fn hostile_content_is_quoted_harmlessly() {
    let told = problems(&format!("x = \"{}\"\n", "y".repeat(100_000)));
    assert!(told.len() < 500, "{}", told.len());
    assert!(!problems("\"\\u001b[2J\" = 1").contains('\u{1b}'));
}

#[test]
fn changes_are_named_one_by_one() {
    let other = parse("interval = \"500ms\"\n[sources.pbs]\nenabled = false\n").unwrap();
    let expected = ["interval: \"1s\" -> \"500ms\"", "sources.pbs.enabled: true -> false"];
    assert_eq!(Config::default().changes(&other), expected);
}
