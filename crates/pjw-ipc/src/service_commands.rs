//! The commands that start, restart and check pjwd on this machine, as text for messages to the user.

use std::path::Path;

/// Returns whether this machine was booted with systemd as its service manager. Makes the same check as sd_booted(3).
#[must_use]
pub fn has_systemd() -> bool {
    Path::new("/run/systemd/system").is_dir()
}

/// Returns the commands that start pjwd on this machine, as text for messages to users. With systemd, the text is
/// `systemctl start pjwd, or as yourself: pjwd`. Without systemd, the text is `pjwd, as root or as yourself`.
#[must_use]
pub fn pjwd_start_commands() -> &'static str {
    start_text_of(has_systemd())
}

/// Returns the commands that restart pjwd on this machine, as text for messages to users. With systemd, the text is
/// `systemctl restart pjwd`. Without systemd, the text says that the user must kill pjwd and start it again. The
/// commands also work if pjwd hangs. The text does not contain the pid of pjwd. For a text with the pid, see
/// [`DaemonProcess::restart_commands`](crate::daemon_process::DaemonProcess::restart_commands).
#[must_use]
pub fn pjwd_restart_commands() -> &'static str {
    restart_text_of(has_systemd())
}

/// Returns the command that shows whether pjwd runs on this machine: `systemctl status pjwd` if the machine has
/// systemd, `ps -C pjwd` otherwise.
#[must_use]
pub fn pjwd_check_command() -> &'static str {
    if has_systemd() { "systemctl status pjwd" } else { "ps -C pjwd" }
}

const fn start_text_of(has_systemd: bool) -> &'static str {
    if has_systemd { "systemctl start pjwd, or as yourself: pjwd" } else { "pjwd, as root or as yourself" }
}

const fn restart_text_of(has_systemd: bool) -> &'static str {
    if has_systemd {
        "systemctl restart pjwd"
    } else {
        "kill -9 PID (ps -C pjwd shows it), and then pjwd again"
    }
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
        assert_eq!(pjwd_start_commands().contains("systemctl"), has_systemd());
        assert_eq!(pjwd_restart_commands().contains("systemctl"), has_systemd());
        assert_eq!(pjwd_check_command().contains("systemctl"), has_systemd());
    }
}
