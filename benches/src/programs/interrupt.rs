//! The end on Ctrl-C: the signal must not leave jobs, a daemon or files behind.
//!
//! The signals are caught, not blocked: a child would inherit a blocked signal, and then could not be asked to end. A
//! caught one is the child's own again once it runs its program. What the demo waits for, it waits for in small
//! steps, and looks here in between.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use tokio::runtime::Builder;
use tokio::signal::unix::{SignalKind, signal};

/// So long nobody notices that a program goes on.
const CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// Whether the program was asked to end.
#[derive(Debug, Clone)]
pub struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    /// Watches for SIGINT, SIGTERM and SIGHUP from now on.
    ///
    /// # Errors
    /// If the signals can't be caught or the thread that waits for them can't be started.
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

    /// Goes on, or not.
    ///
    /// # Errors
    /// If the program was asked to end.
    pub fn check(&self) -> anyhow::Result<()> {
        if self.0.load(Ordering::Relaxed) {
            bail!("interrupted: what was started is ended, nothing is left behind");
        }
        Ok(())
    }

    /// Waits until then.
    ///
    /// # Errors
    /// If the program was asked to end meanwhile.
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
