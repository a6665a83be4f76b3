//! What the service manager is told, and what it passes in: sd_notify(3), sd_watchdog_enabled(3),
//! sd_listen_fds(3).
//!
//! Without a service manager every function does nothing. A message that can't be sent is logged and
//! otherwise ignored: the warden goes on, and if the manager really lost it, the watchdog is the manager's
//! own remedy.
//!
//! A reload is told twice, [`reloading`] before and [`ready`] after, as `Type=notify-reload` (systemd 253)
//! wants it; older managers, reloading by `ExecReload=`, accept the same.

use std::io;
use std::os::fd::RawFd;
use std::time::{Duration, Instant};

use sd_notify::NotifyState;
use tracing::warn;

/// How far away the next pat is where nobody waits for one.
const UNWATCHED: Duration = Duration::from_secs(60 * 60);
/// The longest status that is sent, in bytes. The manager's buffer for one message is 4096.
const STATUS_MAX: usize = 1024;

/// The daemon serves, after a start or a reload; `status` is what `systemctl status` shows.
pub fn ready(status: &str) {
    send(&[NotifyState::Ready, NotifyState::Status(&one_line(status))]);
}

/// What the daemon is about, for `systemctl status`.
pub fn status(text: &str) {
    send(&[NotifyState::Status(&one_line(text))]);
}

/// The configuration is about to be read again. Must be followed by [`ready`], whatever comes of it.
pub fn reloading() {
    match NotifyState::monotonic_usec_now() {
        Ok(now) => send(&[NotifyState::Reloading, now]),
        Err(error) => warn!(%error, "the service manager can't be told of the reload: no monotonic clock"),
    }
}

/// The daemon is going to end.
pub fn stopping() {
    send(&[NotifyState::Stopping]);
}

/// The number of the listening socket that the service manager holds for the daemon (`pjwd.socket`), if it
/// passed one to this process. It is open and closes on exec. Asked twice, it answers twice.
///
/// # Errors
/// If what was passed isn't exactly one socket's number, as sd_listen_fds(3) writes it.
pub fn passed_socket() -> io::Result<Option<RawFd>> {
    let mut passed = sd_notify::listen_fds()?;
    if passed.len() > 1 {
        let text = format!("{} sockets were passed and one is served: look at pjwd.socket", passed.len());
        return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
    }
    Ok(passed.next())
}

/// The manager's patience, and when it has to be told again that the daemon lives.
#[derive(Debug, Clone)]
pub struct Watchdog {
    /// Half of what the manager waits; `None` if it doesn't watch.
    period: Option<Duration>,
    next: Instant,
}

impl Watchdog {
    /// As the manager asked for in `WATCHDOG_USEC`. The first pat is due at once.
    #[must_use]
    pub fn from_environment() -> Self {
        Self::new(sd_notify::watchdog_enabled(), Instant::now())
    }

    fn new(patience: Option<Duration>, now: Instant) -> Self {
        let period = patience.filter(|patience| !patience.is_zero()).map(|patience| patience / 2);
        Self { period, next: if period.is_some() { now } else { now + UNWATCHED } }
    }

    /// When the next pat is due; some time far away if nobody watches.
    #[must_use]
    pub fn next(&self) -> Instant {
        self.next
    }

    /// Tells the manager that the daemon lives, if it is time to.
    pub fn pat(&mut self) {
        if self.is_due(Instant::now()) && self.period.is_some() {
            send(&[NotifyState::Watchdog]);
        }
    }

    /// Whether a pat is due; if so, the next one is a period away.
    fn is_due(&mut self, now: Instant) -> bool {
        let due = now >= self.next;
        if due {
            self.next = now + self.period.unwrap_or(UNWATCHED);
        }
        due
    }
}

fn send(states: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(states) {
        warn!(%error, "the service manager can't be told anything");
    }
}

/// A line break would begin another message.
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

    use super::{Watchdog, one_line, passed_socket, ready, reloading, status, stopping};

    const DEADLINE: Duration = Duration::from_secs(30);

    /// What a manager hears from a child of ours that runs the (ignored) test `role`.
    fn heard_from(role: &str, environment: &[(&str, &str)]) -> Vec<String> {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("notify");
        let manager = UnixDatagram::bind(&path).unwrap();
        manager.set_read_timeout(Some(DEADLINE)).unwrap();
        let child = Command::new(std::env::current_exe().unwrap())
            .args([&format!("notify::tests::{role}"), "--exact", "--ignored", "--nocapture"])
            .env("NOTIFY_SOCKET", &path)
            .envs(environment.iter().copied())
            .stdout(Stdio::piped())
            .output()
            .unwrap();
        let output = String::from_utf8_lossy(&child.stdout);
        assert!(child.status.success() && output.contains("1 passed"), "{output}");
        manager.set_nonblocking(true).unwrap();
        let mut heard = Vec::new();
        let mut buffer = [0; 4096];
        while let Ok(length) = manager.recv(&mut buffer) {
            heard.push(String::from_utf8_lossy(&buffer[..length]).into_owned());
        }
        heard
    }

    #[test]
    #[ignore = "run in a child by the_manager_hears_of_start_reload_and_stop"]
    fn child_that_starts_reloads_and_stops() {
        ready("3 jobs");
        reloading();
        status("one\nREADY=1");
        stopping();
    }

    #[test]
    fn the_manager_hears_of_start_reload_and_stop() {
        let heard = heard_from("child_that_starts_reloads_and_stops", &[]);
        assert_eq!(heard.len(), 4, "{heard:?}");
        assert_eq!(heard[0], "READY=1\nSTATUS=3 jobs\n");
        let microseconds = heard[1].strip_prefix("RELOADING=1\nMONOTONIC_USEC=").expect(&heard[1]);
        assert!(microseconds.trim_end().parse::<u64>().unwrap() > 0);
        assert_eq!(heard[2], "STATUS=one READY=1\n", "a status is one line, whatever it holds");
        assert_eq!(heard[3], "STOPPING=1\n");
    }

    #[test]
    #[ignore = "run in a child by the_watchdog_is_patted_twice_in_its_time"]
    fn child_that_pats() {
        let mut watchdog = Watchdog::from_environment();
        watchdog.pat();
        watchdog.pat();
    }

    #[test]
    fn the_watchdog_is_patted_twice_in_its_time() {
        assert_eq!(heard_from("child_that_pats", &[("WATCHDOG_USEC", "30000000")]), ["WATCHDOG=1\n"]);
    }

    #[test]
    fn nobody_is_patted_who_does_not_watch() {
        assert!(heard_from("child_that_pats", &[]).is_empty());
        assert!(heard_from("child_that_pats", &[("WATCHDOG_USEC", "0")]).is_empty());
        let other_process = [("WATCHDOG_USEC", "30000000"), ("WATCHDOG_PID", "1")];
        assert!(heard_from("child_that_pats", &other_process).is_empty());
    }

    #[test]
    fn a_pat_is_due_after_each_half_of_the_patience() {
        let start = Instant::now();
        let mut watchdog = Watchdog::new(Some(Duration::from_secs(30)), start);
        assert!(watchdog.is_due(start));
        assert_eq!(watchdog.next(), start + Duration::from_secs(15));
        assert!(!watchdog.is_due(start + Duration::from_secs(14)));
        assert!(watchdog.is_due(start + Duration::from_secs(40)), "late is due");
        assert_eq!(watchdog.next(), start + Duration::from_secs(55), "and nothing is made up for");
    }

    #[test]
    fn sockets_passed_to_another_process_are_not_ours() {
        // The test's own process was not started by a socket unit.
        assert_eq!(passed_socket().unwrap(), None);
    }

    #[test]
    fn a_status_is_cut_between_characters() {
        assert_eq!(one_line(&"ä".repeat(2000)), "ä".repeat(512));
    }
}
