//! Invalid files, one per kind of mistake, and their error messages.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::time::Duration;

use pjw_core::cpuset_group::EnforcementMethod;
use pjw_core::housekeeping::HousekeepingRule;
use pjw_core::job::JobSource;
use pjw_core::policy::{BindingPolicy, DaemonMode, ExhaustionPolicy, OversubscriptionPolicy, Policy};
use pjw_core::testing::regular_topology;
use pjw_core::topology::Topology;

use super::{Config, LogFormat, LogLevel, MetricsSettings, ProvisionSettings, ScanInterface, Settings};

fn parse(text: &str) -> Result<Config, String> {
    Config::parse(Path::new("pjwd.toml"), text, &machine())
        .map_err(|problems| problems.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n"))
}

fn wrong(text: &str) -> String {
    parse(text).expect_err(text)
}

/// Two packages of four cores of two PUs: PU n and n + 8 are siblings.
fn machine() -> Topology {
    regular_topology(2, 1, 2, 2, 2)
}

fn resolved(housekeeping: &str) -> Result<String, String> {
    let config = parse(&format!("share_smt = true\nhousekeeping = \"{housekeeping}\"\n"))?;
    Ok(config.policy().housekeeping_cpus.to_string())
}

#[test]
fn an_empty_file_gives_the_defaults_of_the_policy() {
    let config = parse("").unwrap();
    assert_eq!(config.settings(), &Settings::default());
    assert_eq!(config.policy(), Policy::default());
    assert_eq!(Config::default().policy(), Policy::default());
}

#[test]
fn every_key_is_read() {
    let config = parse(
        r#"
        mode = "observe"
        housekeeping = "1/l3"
        interval = "500ms"
        rescan_interval = "1m 30s"
        scan = "proc"
        cpu_budget_permille = 50
        realtime = false
        enforcement = "affinity"
        affinity = "override"
        share_smt = true
        on_exhausted = "wait"
        adopt_strays = true
        first_person_uid = 500
        admin_groups = ["pjw", "1001"]
        user_max_cores = 0x10
        reservation_timeout = "2h"
        report_keep = 20
        log_level = "debug"
        log_format = "text"
        balance = { pin = false, hot_permille = 700, cold_permille = 100, smoothing_permille = 1_000 }
        metrics = { max_jobs = 7 }
        sources.lsf.enabled = false
        sources.slurm.cores = 4
        [sources.oar]
        cores = 0
        "#,
    )
    .unwrap();
    let mut enabled_sources = Settings::default().enabled_sources;
    enabled_sources.remove(&JobSource::Lsf);
    let expected = Settings {
        mode: DaemonMode::Observe,
        housekeeping: "1/l3".parse().unwrap(),
        scan_interval: Duration::from_millis(500),
        rescan_interval: Duration::from_secs(90),
        scan_interface: ScanInterface::Proc,
        cpu_budget_permille: 50,
        use_realtime_priority: false,
        enforcement: EnforcementMethod::Affinity,
        binding_policy: BindingPolicy::Override,
        share_smt: true,
        exhaustion_policy: ExhaustionPolicy::Wait,
        adopt_unassigned_processes: true,
        first_person_uid: 500,
        admin_groups: vec!["pjw".to_owned(), "1001".to_owned()],
        user_max_cores: 16,
        reservation_timeout: Duration::from_secs(7200),
        report_keep: 20,
        log_level: LogLevel::Debug,
        log_format: LogFormat::Text,
        pin_hot_threads: false,
        hot_threshold_permille: 700,
        cold_threshold_permille: 100,
        smoothing_weight_permille: 1000,
        oversubscription_policy: OversubscriptionPolicy::Float,
        metrics: MetricsSettings { max_jobs: 7, ..MetricsSettings::default() },
        enabled_sources,
        source_cores: [(JobSource::Slurm, 4)].into(),
        ..Settings::default()
    };
    assert_eq!(config.settings(), &expected);
    let policy = config.policy();
    assert_eq!(policy.housekeeping_cpus.to_string(), "0,2,4,6,8,10,12,14");
    assert!(!policy.sources.contains(&JobSource::Lsf) && policy.sources.contains(&JobSource::Manual));
}

#[test]
fn provisions_are_read() {
    let text = "[[provision]]\nname = \"web\"\ncores = 4\nmatch = \"user=33,comm=nginx\"\n\n[[provision]]\nname = \"db\"\ncores = 1\n";
    let config = parse(text).unwrap();
    let described: Vec<String> =
        config.settings().provisions.iter().map(ProvisionSettings::describe).collect();
    assert_eq!(described, ["web: 4 cores, user=33,comm=nginx", "db: 1 core"]);
    let changes = Config::default().describe_changes(&config);
    assert_eq!(changes, ["provision is now [web: 4 cores, user=33,comm=nginx, db: 1 core] (was [])"]);
}

#[test]
fn a_wrong_provision_is_reported_with_its_mistake() {
    let table = |keys: &str| format!("[[provision]]\n{keys}\n");
    let web = "name = \"web\"\ncores = 4\n";
    for (text, expected) in [
        ("provision = 4".to_owned(), "write [[provision]] above its keys"),
        (table("cores = 4"), "has no name"),
        (table("name = \"web\""), "has no number of cores"),
        (table("name = \"web\"\ncores = 0"), "a whole number from 1"),
        (table("name = \"a b\"\ncores = 1"), "name: the job id holds ' '"),
        (table(&format!("{web}match = \"nginx\"")), "match: \"nginx\" is not a condition"),
        (table(&format!("{web}rule = \"unit=a\"")), "\"rule\" is no key of a provision"),
        (table(web) + &table(web), "\"web\" stands twice"),
        (
            table(&format!("{web}match = \"unit=a\""))
                + &table("name = \"b\"\ncores = 1\nmatch = \"unit=a\""),
            "\"web\" and \"b\" have the same match",
        ),
    ] {
        let problem = wrong(&text);
        assert!(problem.contains(expected), "{text}: {problem}");
    }
}

#[test]
fn an_unknown_key_is_reported_with_its_position_and_the_nearest_known_key() {
    assert_eq!(
        wrong("# a comment\nintervall = \"1s\"\n"),
        "pjwd.toml:2:1: intervall: there is no such key; did you mean \"interval\"?\n  \
         2 | intervall = \"1s\"\n    \
         | ^^^^^^^^^"
    );
    for (text, expected) in [
        ("Mode = 'observe'", "did you mean \"mode\"?"),
        ("share-smt = true", "did you mean \"share_smt\"?"),
        ("[balanc]\npin = true", "did you mean \"balance\"?"),
        (
            "[balance]\nhot_permile = 1",
            "balance.hot_permile: there is no such key; did you mean \"balance.hot_permille\"?",
        ),
        ("pin = true", "did you mean \"balance.pin\"?"),
        ("[sources.slrum]\nenabled = true", "did you mean \"sources.slurm\"?"),
        ("[sources.slurm]\nenable = true", "did you mean \"sources.slurm.enabled\"?"),
        ("[sources.kubernetes]\nenabled = true", "sources has slurm, lsf, pbs, sge, condor, flux, oar"),
        ("socket = '/run/x'", "socket: there is no such key"),
    ] {
        let message = wrong(text);
        assert!(message.contains(expected), "{text}: {message}");
    }
    assert!(!wrong("wurstbrot = 1").contains("did you mean"), "nothing is near that");
}

#[test]
fn a_value_of_another_type_is_reported_with_the_allowed_type() {
    assert_eq!(
        wrong("share_smt = \"yes\"\n"),
        "pjwd.toml:1:13: share_smt: \"yes\" is not allowed here: \
         write true or false, without quotation marks\n  \
         1 | share_smt = \"yes\"\n    \
         |             ^^^^^"
    );
    for (text, expected) in [
        ("mode = true", "true is not allowed here: write \"enforce\" or \"observe\""),
        ("interval = 1", "1 is not allowed here: write a time from 10ms to 1h with its unit (ms, s, m, h)"),
        ("interval = 1.5", "1.5 is not allowed"),
        ("housekeeping = 0", "0 is not allowed here: write a CPU list such as \"0-1\""),
        ("housekeeping = [0, 1]", "a list is not allowed here"),
        ("user_max_cores = \"4\"", "\"4\" is not allowed here: write a whole number from 0 to 65536"),
        ("user_max_cores = 2026-01-01", "a date or time of day is not allowed"),
        (
            "admin_groups = \"pjw\"",
            "\"pjw\" is not allowed here: write a list of group names, such as [\"pjw\"]",
        ),
        ("admin_groups = [1000]", "1000 is not allowed here"),
        ("balance = 3", "balance: this is a table: write [balance] above its keys"),
        ("[[sources]]\nslurm = 1", "sources: this is a table: write [sources] above its keys"),
        ("[mode]\nx = 1", "a table is not allowed here: write \"enforce\" or \"observe\""),
    ] {
        let message = wrong(text);
        assert!(message.contains(expected), "{text}: {message}");
    }
}

#[test]
fn an_unknown_word_is_reported_with_the_allowed_words() {
    assert_eq!(
        wrong("on_exhausted = \"shere\"\n"),
        "pjwd.toml:1:16: on_exhausted: \"shere\" is not allowed here: \
         write \"refuse\", \"share\" or \"wait\"; \
         did you mean \"share\"?\n  \
         1 | on_exhausted = \"shere\"\n    \
         |                ^^^^^^^"
    );
}

#[test]
fn a_number_or_duration_out_of_range_is_reported_with_the_range() {
    for (text, expected) in [
        ("interval = \"1\"", "\"1\" is not allowed here: write a time from 10ms to 1h"),
        ("interval = \"soon\"", "\"soon\" is not allowed"),
        ("interval = \"\"", "\"\" is not allowed"),
        ("interval = \"-1s\"", "\"-1s\" is not allowed"),
        ("interval = \"9ms\"", "\"9ms\" is not allowed"),
        ("interval = \"61m\"", "\"61m\" is not allowed"),
        ("rescan_interval = \"99999999999999999999h\"", "a time from 10ms to 24h"),
        ("reservation_timeout = \"7d\"", "(ms, s, m, h)"),
        ("reservation_timeout = \"0s\"", "a time from 1s to 8760h"),
        ("user_max_cores = -1", "-1 is not allowed here: write a whole number from 0 to 65536"),
        ("user_max_cores = 65537", "65537 is not allowed"),
        ("user_max_cores = 99999999999999999999999", "99999999999999999999999 is not allowed"),
        ("balance.hot_permille = 0", "a whole number from 1 to 1000"),
        ("sources.slurm.cores = 65537", "a whole number from 0 to 65536"),
        ("admin_groups = [\" \"]", "\" \" is not the name of a group"),
        ("admin_groups = [\"a:b\"]", "\"a:b\" is not the name of a group"),
        ("admin_groups = [\"a\", \"a\"]", "the group \"a\" is listed twice"),
    ] {
        let message = wrong(text);
        assert!(message.contains(expected), "{text}: {message}");
    }
    let many: Vec<String> = (0..65).map(|number| format!("\"g{number}\"")).collect();
    assert!(wrong(&format!("admin_groups = [{}]", many.join(","))).contains("65 groups are too many"));
}

#[test]
fn contradicting_keys_are_reported_at_one_of_them() {
    assert_eq!(
        wrong("interval = \"30s\"\n"),
        "pjwd.toml:1:12: interval: rescan_interval (\"10s\") must not be shorter than interval (\"30s\")\n  \
         1 | interval = \"30s\"\n    \
         |            ^^^^^"
    );
    let cold = wrong("[balance]\ncold_permille = 700\nhot_permille = 700\n");
    assert!(
        cold.starts_with("pjwd.toml:2:17: balance.cold_permille: balance.cold_permille (700) must be below"),
        "{cold}"
    );
    let once = wrong("balance.cold_permille = 9999");
    assert!(!once.contains("must be below"), "a value that was not understood contradicts nothing: {once}");
}

#[test]
fn an_invalid_housekeeping_rule_is_reported_with_its_position() {
    for (rule, expected) in [
        (",", "an empty place in the CPU list"),
        ("0,,1", "an empty place in the CPU list"),
        ("0-3,2-5", "PU 2 stands twice in the CPU list"),
        ("1,1", "PU 1 stands twice in the CPU list"),
        ("3-1", "runs backwards"),
        ("0-99999999", "is beyond the largest PU number"),
        ("cpu0", "neither a number nor a range"),
        ("1/socket", "not a part of a machine"),
    ] {
        let message = resolved(rule).unwrap_err();
        assert!(message.starts_with("pjwd.toml:2:16: housekeeping: "), "{message}");
        assert!(message.contains(expected), "{rule}: {message}");
    }
}

#[test]
fn a_housekeeping_rule_that_the_machine_cannot_satisfy_is_reported_with_its_position() {
    assert_eq!(resolved("0,8").as_deref(), Ok("0,8"));
    assert_eq!(resolved("").as_deref(), Ok(""));
    for (rule, expected) in [
        ("0,8,16", "PUs 16 are not on this machine, which has 0-15"),
        ("0", "shares its core with 8"),
        ("0-15", "takes every core"),
        ("2/l3", "takes every core"),
    ] {
        let message = resolved(rule).unwrap_err();
        assert!(message.starts_with("pjwd.toml:2:16: housekeeping: "), "{message}");
        assert!(message.contains(expected) && message.ends_with('^'), "{rule}: {message}");
    }
}

#[test]
fn a_syntax_error_is_reported_like_other_problems() {
    let message = wrong("mode = observe\n");
    assert_eq!(
        message,
        "pjwd.toml:1:8: syntax: string values must be quoted, expected literal string\n  \
         1 | mode = observe\n    \
         |        ^^^^^^^"
    );
    for text in [
        "mode",
        "mode =",
        "= 3",
        "[balance\npin = true",
        "mode = \"obs",
        "interval = '1s'\ninterval = '1s'",
        "a = '''",
    ] {
        let message = wrong(text);
        assert!(message.contains("syntax: "), "{text}: {message}");
        assert!(!message.contains("no such key"), "what a misread table holds is not blamed: {message}");
    }
}

#[test]
fn all_problems_are_reported_in_the_order_of_the_file() {
    let text =
        "intervall = '1s'\nmode = 'enforced'\nlog_level = info\nuser_max_cores = -1\n[balance]\npin = 1\n";
    let problems = Config::parse(Path::new("pjwd.toml"), text, &machine()).unwrap_err();
    let places: Vec<_> = problems.iter().map(|problem| (problem.line(), problem.key())).collect();
    assert_eq!(
        places,
        [
            (Some(1), Some("intervall")),
            (Some(2), Some("mode")),
            (Some(3), None),
            (Some(4), Some("user_max_cores")),
            (Some(6), Some("balance.pin")),
        ]
    );
    assert!(problems.iter().all(|problem| !problem.log_line().contains('\n')));
}

#[test]
fn thousands_of_problems_are_counted_not_listed() {
    let text: String = (0..5000).map(|number| format!("key{number} = 1\n")).collect();
    let problems = Config::parse(Path::new("pjwd.toml"), &text, &machine()).unwrap_err();
    assert_eq!(problems.len(), 51);
    assert_eq!(problems[50].log_line(), "pjwd.toml: 4950 more problems are not shown");
}

#[test]
fn quoted_text_is_short_and_escaped() {
    let long = wrong(&format!("mode = \"{}\"", "x".repeat(100_000)));
    assert!(long.len() < 600, "{}", long.len());
    let deep = wrong(&format!("mode = [{}1]", "1, ".repeat(1000)));
    assert!(deep.lines().all(|line| line.chars().count() < 250), "{deep}");
    let hostile = wrong("\tmode\t=\t\"\\u001b[2J\\u202e\\n\"\r\n");
    assert_eq!(
        hostile,
        "pjwd.toml:1:9: mode: \"\\u{1b}[2J\\u{202e}\\n\" is not allowed here: \
         write \"enforce\" or \"observe\"\n  \
         1 |  mode = \"\\u001b[2J\\u202e\\n\"\n    \
         |         ^^^^^^^^^^^^^^^^^^^"
    );
    let raw = wrong("'\u{202e}\u{200b}' = 1\nmode = '\u{1b}[2J'\n");
    assert!(!raw.contains(['\u{1b}', '\u{202e}', '\u{200b}']), "{raw:?}");
    let name = Config::parse(Path::new("a\n\u{1b}b"), "x = 1", &machine()).unwrap_err();
    assert!(name[0].log_line().starts_with("a\\n\\u{1b}b:1:1: "), "{}", name[0].log_line());
}

#[test]
fn the_caret_is_aligned_in_a_long_line() {
    let names = |letter: &str| (10..40).map(|n| format!("\"{letter}{n}\"")).collect::<Vec<_>>().join(", ");
    let text = format!("admin_groups = [{}, true, {}] # end\nmode = 1", names("ä"), names("b"));
    let message = wrong(&text);
    let lines: Vec<&str> = message.lines().collect();
    let caret = lines[2].chars().position(|character| character == '^').unwrap();
    assert_eq!(lines[1].chars().nth(caret), Some('t'), "{message}");
}

fn written(bytes: &[u8]) -> (tempfile::TempDir, PathBuf) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("pjwd.toml");
    fs::write(&path, bytes).unwrap();
    (directory, path)
}

fn refused(path: &Path) -> String {
    let problems = Config::load(Some(path), &machine()).unwrap_err();
    assert_eq!(problems.len(), 1);
    let summary = problems[0].log_line();
    assert!(summary.starts_with(&path.display().to_string()), "{summary}");
    summary
}

#[test]
fn a_valid_file_is_loaded() {
    let (_directory, path) = written(b"\xef\xbb\xbfmode = \"observe\"\r\n");
    let (config, _) = Config::load(Some(&path), &machine()).unwrap();
    assert_eq!(config.settings().mode, DaemonMode::Observe);
    assert_eq!(config.path(), Some(path.as_path()));
}

#[test]
fn a_missing_file_is_an_error_if_its_path_was_given() {
    let (directory, _) = written(b"");
    let message = refused(&directory.path().join("other.toml"));
    assert!(message.contains("No such file or directory (os error 2): restore the file"), "{message}");
}

#[test]
fn a_dangling_link_is_not_a_missing_file() {
    let (directory, _) = written(b"");
    let link = directory.path().join("link.toml");
    symlink("gone.toml", &link).unwrap();
    assert!(super::read::path_exists(&link));
    assert!(!super::read::path_exists(&directory.path().join("absent.toml")));
}

#[test]
fn a_directory_a_pipe_and_a_device_are_refused() {
    let (directory, _) = written(b"");
    assert!(refused(directory.path()).contains("this is a directory"));
    let pipe = directory.path().join("pipe");
    nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).unwrap();
    assert!(refused(&pipe).contains("not a regular file"), "and nobody waits for a writer");
    assert!(refused(Path::new("/dev/zero")).contains("not a regular file"));
}

#[test]
fn an_unreadable_file_is_reported() {
    let (_directory, path) = written(b"");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o000)).unwrap();
    if fs::read(&path).is_ok() {
        eprintln!("skipped: this user reads everything");
        return;
    }
    assert!(refused(&path).contains("Permission denied"));
}

#[test]
fn a_file_of_two_mebibytes_is_refused() {
    let (_directory, path) = written(&vec![b'#'; 2 << 20]);
    assert!(refused(&path).contains("larger than 1024 KiB"));
    fs::write(&path, vec![b'#'; 1 << 20]).unwrap();
    assert!(Config::load(Some(&path), &machine()).is_ok(), "the limit itself is allowed");
}

#[test]
fn binary_data_is_refused() {
    let (_directory, path) = written(b"mode = 'observe'\n\xff\xfe\x00\x01");
    let message = refused(&path);
    assert!(message.contains("not text in UTF-8, from byte 17 (line 2) on"), "{message}");
    assert!(wrong("\u{0}\u{1}\u{7f}ELF").contains("syntax: "));
}

#[test]
fn only_differences_are_listed_one_sentence_each() {
    let old = parse("interval = \"1000ms\"\n").unwrap();
    assert!(old.describe_changes(&parse("").unwrap()).is_empty(), "the same, written otherwise");
    let new = parse(
        "mode = 'observe'\nhousekeeping = '0,8'\nadmin_groups = ['a']\n\
         [sources.pbs]\nenabled = false\ncores = 2\n",
    );
    assert_eq!(
        old.describe_changes(&new.unwrap()),
        [
            "mode is now \"observe\" (was \"enforce\")",
            "housekeeping is now \"0,8\" (was \"\")",
            "admin_groups is now [\"a\"] (was [])",
            "sources.pbs.enabled is now false (was true)",
            "sources.pbs.cores is now 2 (was 0)",
        ]
    );
    assert_eq!(Settings::default().housekeeping, HousekeepingRule::None);
}
