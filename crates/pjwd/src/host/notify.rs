//! The interface to the service manager: sd_notify(3), sd_watchdog_enabled(3), sd_listen_fds(3).
//!
//! Without a service manager, every function does nothing. A message that can't be sent is logged and otherwise
//! ignored.
//!
//! A reload sends two messages, [`notify_reloading`] before and [`notify_ready`] after, as `Type=notify-reload`
//! (systemd 253) requires. Older service managers, which reload with `ExecReload=`, accept the same messages.

use std::io;
use std::os::fd::RawFd;
use std::time::{Duration, Instant};

use sd_notify::NotifyState;
use tracing::warn;

/// The time to the next ping if there is no watchdog.
const NO_WATCHDOG: Duration = Duration::from_secs(60 * 60);
/// The longest status in bytes. The service manager's buffer for one message has 4096 bytes.
const STATUS_MAX: usize = 1024;

/// Tells the service manager (sd_notify(3)) that the daemon is ready, after a start or a reload of the configuration.
/// `systemctl status` shows the text `status`.
pub fn notify_ready(status: &str) {
    send(&[NotifyState::Ready, NotifyState::Status(&one_line(status))]);
}

/// Tells the service manager (sd_notify(3)) the status of the daemon: the text `status`, which `systemctl status`
/// shows.
pub fn notify_status(status: &str) {
    send(&[NotifyState::Status(&one_line(status))]);
}

/// Tells the service manager (sd_notify(3)) that the configuration is being reloaded. Must be followed by
/// [`notify_ready`], even if the reload fails.
pub fn notify_reloading() {
    match NotifyState::monotonic_usec_now() {
        Ok(now) => send(&[NotifyState::Reloading, now]),
        Err(error) => warn!(%error, "can't notify the service manager of the reload: no monotonic clock"),
    }
}

/// Tells the service manager (sd_notify(3)) that the daemon is stopping.
pub fn notify_stopping() {
    send(&[NotifyState::Stopping]);
}

/// Returns the file descriptor of the listening socket that the service manager (systemd) opened and passed to pjwd
/// at its start. `None` if no socket was passed. Every call returns the same file descriptor. So the caller must not
/// close the descriptor, and should use a duplicate.
///
/// # Errors
/// If more than one socket was passed, or the environment variables of sd_listen_fds(3) are malformed.
pub fn socket_from_service_manager() -> io::Result<Option<RawFd>> {
    let mut passed = sd_notify::listen_fds()?;
    if passed.len() > 1 {
        let text =
            format!("{} sockets were passed and only one is allowed: correct pjwd.socket", passed.len());
        return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
    }
    Ok(passed.next())
}

/// Sends regular pings (signs of life) to the watchdog of the service manager (sd_notify(3), `WATCHDOG=1`).
/// If the pings stop, the service manager restarts pjwd. Sends nothing if the service manager set no
/// watchdog.
#[derive(Debug, Clone)]
pub struct WatchdogPinger {
    /// Half of the watchdog timeout. `None` if there is no watchdog.
    period: Option<Duration>,
    next: Instant,
}

impl WatchdogPinger {
    /// Makes the sender of pings, with the watchdog timeout in the environment variable `WATCHDOG_USEC`,
    /// which the service manager sets. The first ping is due at once. If the variable is not set, no pings
    /// are sent.
    #[must_use]
    pub fn from_environment() -> Self {
        Self::new(sd_notify::watchdog_enabled(), Instant::now())
    }

    fn new(timeout: Option<Duration>, now: Instant) -> Self {
        let period = timeout.filter(|timeout| !timeout.is_zero()).map(|timeout| timeout / 2);
        Self { period, next: if period.is_some() { now } else { now + NO_WATCHDOG } }
    }

    /// Returns the time at which [`WatchdogPinger::ping_if_due`] must be called next. If the service manager set no
    /// watchdog, no ping is ever due. The returned time is then an arbitrary time within the next hour.
    #[must_use]
    pub fn next_ping_at(&self) -> Instant {
        self.next
    }

    /// Sends a ping to the service manager if half of the watchdog timeout has passed since the last ping.
    /// Sends nothing if the service manager set no watchdog.
    pub fn ping_if_due(&mut self) {
        if self.advance_if_due(Instant::now()) && self.period.is_some() {
            send(&[NotifyState::Watchdog]);
        }
    }

    /// If a ping is due, makes the next ping due one period later, and returns true.
    fn advance_if_due(&mut self, now: Instant) -> bool {
        let due = now >= self.next;
        if due {
            self.next = now + self.period.unwrap_or(NO_WATCHDOG);
        }
        due
    }
}

fn send(states: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(states) {
        warn!(%error, "can't notify the service manager");
    }
}

/// Returns at most [`STATUS_MAX`] bytes of `text`, with spaces in the place of control characters: a line break would
/// begin another message.
fn one_line(text: &str) -> String {
    let mut end = text.len().min(STATUS_MAX);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text[..end].replace(|character: char| character.is_control(), " ")
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixDatagram;
    use std::process::{Command, Stdio};
    use std::time::{Duration, Instant};

    use super::{
        WatchdogPinger, notify_ready, notify_reloading, notify_status, notify_stopping, one_line,
        socket_from_service_manager,
    };

    const DEADLINE: Duration = Duration::from_secs(30);

    /// The messages that a child sends to its service manager. The child runs the (ignored) test `role`.
    fn messages_of_child(role: &str, environment: &[(&str, &str)]) -> Vec<String> {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("notify");
        let manager = UnixDatagram::bind(&path).unwrap();
        manager.set_read_timeout(Some(DEADLINE)).unwrap();
        let child = Command::new(std::env::current_exe().unwrap())
            .args([&format!("host::notify::tests::{role}"), "--exact", "--ignored", "--nocapture"])
            .env("NOTIFY_SOCKET", &path)
            .envs(environment.iter().copied())
            .stdout(Stdio::piped())
            .output()
            .unwrap();
        let output = String::from_utf8_lossy(&child.stdout);
        assert!(child.status.success() && output.contains("1 passed"), "{output}");
        manager.set_nonblocking(true).unwrap();
        let mut messages = Vec::new();
        let mut buffer = [0; 4096];
        while let Ok(length) = manager.recv(&mut buffer) {
            messages.push(String::from_utf8_lossy(&buffer[..length]).into_owned());
        }
        messages
    }

    #[test]
    #[ignore = "run in a child by the_service_manager_is_notified_of_start_reload_and_stop"]
    fn child_that_starts_reloads_and_stops() {
        notify_ready("3 jobs");
        notify_reloading();
        notify_status("one\nREADY=1");
        notify_stopping();
    }

    #[test]
    fn the_service_manager_is_notified_of_start_reload_and_stop() {
        let messages = messages_of_child("child_that_starts_reloads_and_stops", &[]);
        assert_eq!(messages.len(), 4, "{messages:?}");
        assert_eq!(messages[0], "READY=1\nSTATUS=3 jobs\n");
        let microseconds = messages[1].strip_prefix("RELOADING=1\nMONOTONIC_USEC=").expect(&messages[1]);
        assert!(microseconds.trim_end().parse::<u64>().unwrap() > 0);
        assert_eq!(messages[2], "STATUS=one READY=1\n", "a status is one line, whatever it holds");
        assert_eq!(messages[3], "STOPPING=1\n");
    }

    #[test]
    #[ignore = "run in a child by the_watchdog_is_pinged_twice_per_timeout"]
    fn child_that_pings() {
        let mut watchdog = WatchdogPinger::from_environment();
        watchdog.ping_if_due();
        watchdog.ping_if_due();
    }

    #[test]
    fn the_watchdog_is_pinged_twice_per_timeout() {
        assert_eq!(messages_of_child("child_that_pings", &[("WATCHDOG_USEC", "30000000")]), ["WATCHDOG=1\n"]);
    }

    #[test]
    fn without_a_watchdog_no_ping_is_sent() {
        assert!(messages_of_child("child_that_pings", &[]).is_empty());
        assert!(messages_of_child("child_that_pings", &[("WATCHDOG_USEC", "0")]).is_empty());
        let other_process = [("WATCHDOG_USEC", "30000000"), ("WATCHDOG_PID", "1")];
        assert!(messages_of_child("child_that_pings", &other_process).is_empty());
    }

    #[test]
    fn a_ping_is_due_after_each_half_of_the_timeout() {
        let start = Instant::now();
        let mut watchdog = WatchdogPinger::new(Some(Duration::from_secs(30)), start);
        assert!(watchdog.advance_if_due(start));
        assert_eq!(watchdog.next_ping_at(), start + Duration::from_secs(15));
        assert!(!watchdog.advance_if_due(start + Duration::from_secs(14)));
        assert!(watchdog.advance_if_due(start + Duration::from_secs(40)), "late is due");
        assert_eq!(watchdog.next_ping_at(), start + Duration::from_secs(55), "and nothing is made up for");
    }

    #[test]
    fn sockets_passed_to_another_process_are_ignored() {
        // No socket unit started the process of this test.
        assert_eq!(socket_from_service_manager().unwrap(), None);
    }

    #[test]
    fn a_status_is_truncated_between_characters() {
        assert_eq!(one_line(&"ä".repeat(2000)), "ä".repeat(512));
    }
}
