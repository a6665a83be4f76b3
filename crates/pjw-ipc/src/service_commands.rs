//! How pjwd is started and restarted on this machine, for messages.

use std::path::Path;

/// Returns whether systemd is the service manager of this machine: sd_booted(3).
#[must_use]
pub fn has_systemd() -> bool {
    Path::new("/run/systemd/system").is_dir()
}

/// Returns how a user starts pjwd on this machine, as the end of a sentence such as "start it with: …".
#[must_use]
pub fn start_text() -> &'static str {
    start_text_of(has_systemd())
}

/// Returns how a user restarts pjwd on this machine, as the end of a sentence such as "restart it with: …".
#[must_use]
pub fn restart_text() -> &'static str {
    restart_text_of(has_systemd())
}

/// Returns how a user sees whether pjwd runs on this machine, as a command.
#[must_use]
pub fn check_text() -> &'static str {
    if has_systemd() { "systemctl status pjwd" } else { "ps -C pjwd" }
}

const fn start_text_of(has_systemd: bool) -> &'static str {
    if has_systemd { "systemctl start pjwd, or as yourself: pjwd" } else { "pjwd, as root or as yourself" }
}

const fn restart_text_of(has_systemd: bool) -> &'static str {
    if has_systemd { "systemctl restart pjwd" } else { "kill PID (ps -C pjwd shows it), and then pjwd again" }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_machine_with_systemd_is_told_of_systemctl() {
        for text in [start_text_of, restart_text_of] {
            assert!(text(true).contains("systemctl"), "{}", text(true));
            assert!(!text(false).contains("systemctl") && text(false).contains("pjwd"), "{}", text(false));
        }
        assert_eq!(start_text().contains("systemctl"), has_systemd());
        assert_eq!(restart_text().contains("systemctl"), has_systemd());
        assert_eq!(check_text().contains("systemctl"), has_systemd());
    }
}
