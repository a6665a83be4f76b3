//! Ends the program on SIGINT (Ctrl-C), SIGTERM and SIGHUP without leaving jobs, a daemon or files behind.
//!
//! The signals are caught, not blocked. A child inherits a blocked signal, so SIGTERM could not end it. A caught
//! signal has its default effect again after execve(2). The benches and the demo wait in short steps and call
//! [`StopSignal::check`] in between.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use tokio::runtime::Builder;
use tokio::signal::unix::{SignalKind, signal};

/// The time between two checks while [`StopSignal::sleep_until`] waits.
const CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// A flag that is set when the program receives SIGINT (Ctrl-C), SIGTERM or SIGHUP. Clones share the flag.
#[derive(Debug, Clone)]
pub struct StopSignal(Arc<AtomicBool>);

impl StopSignal {
    /// Installs the handlers of SIGINT, SIGTERM and SIGHUP, and starts a thread that waits for these signals.
    ///
    /// # Errors
    /// If the handlers can't be installed, or the thread can't be started.
    pub fn install() -> anyhow::Result<Self> {
        let runtime = Builder::new_current_thread().enable_io().build().context("can't wait for signals")?;
        let catch = |kind| {
            let _inside = runtime.enter();
            signal(kind).context("can't catch signals")
        };
        let mut interrupt = catch(SignalKind::interrupt())?;
        let mut terminate = catch(SignalKind::terminate())?;
        let mut hang_up = catch(SignalKind::hangup())?;
        let requested = Arc::new(AtomicBool::new(false));
        let flag = Arc::clone(&requested);
        let wait_for_signal = move || {
            runtime.block_on(async {
                tokio::select! {
                    _ = interrupt.recv() => {}
                    _ = terminate.recv() => {}
                    _ = hang_up.recv() => {}
                }
            });
            flag.store(true, Ordering::Relaxed);
        };
        thread::Builder::new()
            .name("interrupt".into())
            .spawn(wait_for_signal)
            .context("can't start a thread")?;
        Ok(Self(requested))
    }

    /// Checks whether the program has received SIGINT (Ctrl-C), SIGTERM or SIGHUP.
    ///
    /// # Errors
    /// If it has received one of these signals.
    pub fn check(&self) -> anyhow::Result<()> {
        if self.0.load(Ordering::Relaxed) {
            bail!("interrupted: every process that was started is ended, and no file is left");
        }
        Ok(())
    }

    /// Waits until `deadline`. Ends the wait with an error, within 100 ms, if the program receives SIGINT (Ctrl-C),
    /// SIGTERM or SIGHUP.
    ///
    /// # Errors
    /// If the program has received one of these signals, before or during the wait.
    pub fn sleep_until(&self, deadline: Instant) -> anyhow::Result<()> {
        loop {
            self.check()?;
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(());
            }
            thread::sleep(left.min(CHECK_INTERVAL));
        }
    }
}
