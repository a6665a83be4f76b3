//! The keys below `[lending]`: valid values, and the error messages for all others.

use std::time::Duration;

use nix::sys::signal::Signal;
use pjw_core::policy::{LendingPolicy, StarvedPolicy};

use super::{Config, ConfigError, Settings};

fn read(text: &str) -> Result<Settings, String> {
    match Config::parse_in_test("pjwd.toml", &format!("[lending]\n{text}\n")) {
        Ok(config) => Ok(config.settings().clone()),
        Err(errors) => Err(errors.iter().map(ConfigError::log_line).collect::<Vec<_>>().join("\n")),
    }
}

#[test]
fn every_key_is_read() {
    let text = r#"
        enabled = true
        buffer = 2
        lend_after = "500ms"
        at_once = 3
        revocation_grace = "1s"
        revocation_signal = "SIGURG"
        starved = "freeze"
        "#;
    let expected = LendingPolicy {
        enabled: true,
        buffer_cores: 2,
        lend_after: Duration::from_millis(500),
        cores_at_once: 3,
        revocation_grace: Duration::from_secs(1),
        starved: StarvedPolicy::Freeze,
        lends_to_empty_jobs: false,
    };
    let settings = read(text).unwrap();
    assert_eq!((settings.lending, settings.revocation_signal), (expected, Some(Signal::SIGURG)));
    assert_eq!(read("revocation_signal = \"\"").unwrap().revocation_signal, None);
}

#[test]
fn a_value_that_is_not_allowed_is_reported_with_its_key_and_the_allowed_values() {
    let signals = "write \"\", \"SIGUSR1\", \"SIGUSR2\", \"SIGURG\" or \"SIGWINCH\"";
    let lend_after = "write a time from 10ms to 1h with its unit";
    for (key, value, expected) in [
        ("revocation_signal", "\"SIGKILL\"", signals),
        ("revocation_signal", "\"SIGSTOP\"", signals),
        ("revocation_signal", "9", signals),
        ("lend_after", "\"1ms\"", lend_after),
        ("lend_after", "\"2h\"", lend_after),
        ("lend_after", "100", lend_after),
        ("revocation_grace", "\"61s\"", "write a time from 0s to "),
        ("buffer", "-1", "write a whole number from 0 to 65536"),
        ("at_once", "0", "write a whole number from 1 to 65536"),
        ("starved", "\"kill\"", "write \"squeeze\" or \"freeze\""),
        ("enabled", "\"yes\"", "write true or false"),
    ] {
        let column = key.len() + 4;
        let message = read(&format!("{key} = {value}")).unwrap_err();
        let start = format!("pjwd.toml:2:{column}: lending.{key}: {value} is not allowed here: {expected}");
        assert!(message.starts_with(&start), "{message}");
    }
}
