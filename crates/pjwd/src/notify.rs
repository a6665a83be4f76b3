//! The service manager: told when the daemon is ready, reloads, stops, and that it is alive (sd_notify(3)).

use std::os::unix::net::UnixListener;
use std::time::{Duration, Instant};

use sd_notify::NotifyState;

/// The loop's sign of life: twice in the time that the service manager allows.
#[derive(Debug)]
pub struct Watchdog {
    every: Option<Duration>,
    next: Instant,
}

impl Watchdog {
    /// What the service manager asked for in the environment.
    #[must_use]
    pub fn from_environment() -> Self {
        Self { every: sd_notify::watchdog_enabled().map(|limit| limit / 2), next: Instant::now() }
    }

    /// When the next sign of life is due; far away if nobody waits for one.
    #[must_use]
    pub fn next(&self) -> Instant {
        self.every.map_or_else(|| Instant::now() + Duration::from_secs(3600), |_| self.next)
    }

    /// Gives a sign of life if one is due.
    pub fn pat(&mut self) {
        let Some(every) = self.every else { return };
        let now = Instant::now();
        if now >= self.next {
            tell(&[NotifyState::Watchdog]);
            self.next = now + every;
        }
    }
}

/// The daemon answers now.
pub fn ready() {
    tell(&[NotifyState::Ready]);
}

/// The configuration is being read again.
pub fn reloading() {
    match NotifyState::monotonic_usec_now() {
        Ok(now) => tell(&[NotifyState::Reloading, now]),
        Err(_) => tell(&[NotifyState::Reloading]),
    }
}

/// The daemon ends.
pub fn stopping() {
    tell(&[NotifyState::Stopping]);
}

/// Without a service manager nobody listens, which is fine.
fn tell(state: &[NotifyState<'_>]) {
    let _ = sd_notify::notify(state);
}

/// The socket that systemd listens on for us, if it does (sd_listen_fds(3)).
///
/// # Errors
/// If it passed something else than one socket.
pub fn listener() -> std::io::Result<Option<UnixListener>> {
    let mut passed = sd_notify::listen_fds()?;
    let Some(first) = passed.next() else { return Ok(None) };
    if passed.next().is_some() {
        return Err(std::io::Error::other("systemd passed more than one socket"));
    }
    pjw_linux::activation::listener(first).map(Some)
}
