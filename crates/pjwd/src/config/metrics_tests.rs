//! The keys below `[metrics]`: valid values, and the error messages for all others.

use std::path::PathBuf;
use std::time::Duration;

use super::{Config, MetricsSettings};

fn read(text: &str) -> Result<MetricsSettings, String> {
    let text = format!("[metrics]\n{text}\n");
    match Config::parse_in_test("pjwd.toml", &text) {
        Ok(config) => Ok(config.settings().metrics.clone()),
        Err(errors) => Err(errors.iter().map(super::ConfigError::log_line).collect::<Vec<_>>().join("\n")),
    }
}

#[test]
fn metrics_are_off_without_an_output() {
    let silent = read("").unwrap();
    assert_eq!(silent, MetricsSettings::default());
    assert!(!silent.is_enabled());
    assert!(!read("textfile = ''\nlisten = []\ninterval = '1s'\nmax_jobs = 5").unwrap().is_enabled());
}

#[test]
fn every_key_is_read() {
    let all = read("textfile = '/x/pjw.prom'\ninterval = '30s'\nlisten = ['9844', '[::1]:1']\nmax_jobs = 0")
        .unwrap();
    assert_eq!(all.textfile_path, Some(PathBuf::from("/x/pjw.prom")));
    assert_eq!((all.write_interval, all.max_jobs), (Duration::from_secs(30), 0));
    let listen: Vec<String> = all.listen_addresses.iter().map(ToString::to_string).collect();
    assert_eq!(listen, ["127.0.0.1:9844", "[::1]:1"], "a port alone is the loopback's");
    assert!(all.is_enabled());
}

#[test]
fn a_text_file_path_that_node_exporter_would_ignore_is_refused() {
    let long = format!("/{}.prom", "x".repeat(5000));
    for path in [
        "pjw.prom",
        "/x/pjw.txt",
        "/x/",
        "/x/pjw.prom/",
        "/.prom",
        "/x/../pjw.prom",
        "/x\\u0007/a.prom",
        &long,
    ] {
        let refused = read(&format!("textfile = \"{path}\"")).unwrap_err();
        assert!(refused.starts_with("pjwd.toml:2:12: metrics.textfile: "), "{refused}");
        assert!(refused.contains("write an absolute path that ends in .prom"), "{refused}");
    }
    let refused = read("textfile = true").unwrap_err();
    assert!(refused.contains("true is not allowed here: write an absolute path"), "{refused}");
}

#[test]
fn an_invalid_address_is_reported_with_a_valid_example() {
    for address in
        ["", "localhost:9844", "127.0.0.1", "0", "127.0.0.1:0", "65536", "::1:9844", "1.2.3.4:x", " 80", "-1"]
    {
        let refused = read(&format!("listen = ['{address}']")).unwrap_err();
        assert!(refused.starts_with("pjwd.toml:2:11: metrics.listen: "), "{refused}");
        assert!(refused.contains("such as [\"127.0.0.1:9844\"]"), "{address}: {refused}");
    }
    for (text, expected) in [
        ("'9844'", "write a list of addresses"),
        ("9844", "write a list of addresses"),
        ("[9844]", "9844 is not allowed here"),
        ("['9844', '127.0.0.1:9844']", "the address 127.0.0.1:9844 is listed twice"),
        ("['1','2','3','4','5','6','7','8','9']", "9 addresses are too many: list at most 8"),
    ] {
        let refused = read(&format!("listen = {text}")).unwrap_err();
        assert!(refused.contains(expected), "{text}: {refused}");
    }
}

#[test]
fn each_wrong_address_is_reported_with_its_column() {
    let refused = read("listen = ['foo', '1.2.3.4:5', '99999', '1.2.3.4']").unwrap_err();
    let columns: Vec<&str> = refused.lines().map(|line| line.split(": ").next().unwrap()).collect();
    assert_eq!(columns, ["pjwd.toml:2:11", "pjwd.toml:2:31", "pjwd.toml:2:40"], "{refused}");
}

#[test]
fn numbers_out_of_range_and_misspelled_keys_are_reported() {
    for (text, expected) in [
        ("interval = '500ms'", "a time from 1s to 1h"),
        ("interval = 15", "a time from 1s to 1h"),
        ("max_jobs = 2001", "a whole number from 0 to 2000"),
        ("max_jobs = -1", "a whole number from 0 to 2000"),
        ("text_file = ''", "did you mean \"metrics.textfile\"?"),
        ("port = 1", "metrics has textfile, interval, listen, max_jobs"),
    ] {
        let refused = read(text).unwrap_err();
        assert!(refused.contains(expected), "{text}: {refused}");
    }
}

#[test]
fn a_reload_lists_the_changes() {
    let parse = |text: &str| Config::parse_in_test("pjwd.toml", text).unwrap();
    let changes =
        parse("").describe_changes(&parse("[metrics]\nlisten = ['9844']\ntextfile = '/x/pjw.prom'\n"));
    assert_eq!(
        changes,
        [
            "metrics.textfile is now \"/x/pjw.prom\" (was \"\")",
            "metrics.listen is now [\"127.0.0.1:9844\"] (was [])"
        ]
    );
}
