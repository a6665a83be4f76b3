//! The service manager: told when the daemon is ready, reloads, stops, and that it is alive (sd_notify(3)).

use std::os::fd::FromRawFd;
use std::os::unix::net::UnixListener;
use std::time::{Duration, Instant};

use sd_notify::NotifyState;

/// The loop's sign of life: twice in the time that the service manager allows.
#[derive(Debug)]
pub struct Watchdog {
    every: Option<Duration>,
    next: Instant,
}
