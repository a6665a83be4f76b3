//! Ending early: Ctrl-C must not leave jobs, a daemon or files behind.
//!
//! The signals are blocked and one thread waits for them, so nothing is done inside a signal handler. The standard
//! library starts children with nothing blocked: they end by the same Ctrl-C.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use anyhow::{Context, bail};
use nix::sys::signal::{SigSet, Signal};

/// Whether the demo was asked to end.
#[derive(Debug, Clone)]
pub struct Ending(Arc<AtomicBool>);

impl Ending {
    /// Watches for SIGINT, SIGTERM and SIGHUP. Must be called before any other thread is started.
    ///
    /// # Errors
    /// If the signals can't be blocked or the thread can't be started.
    pub fn watch() -> anyhow::Result<Self> {
        let signals: SigSet = [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP].into_iter().collect();
        signals.thread_block().context("can't block signals")?;
        let asked = Arc::new(AtomicBool::new(false));
        let tell = Arc::clone(&asked);
        thread::Builder::new()
            .name("ending".into())
            .spawn(move || {
                if signals.wait().is_ok() {
                    tell.store(true, Ordering::Relaxed);
                }
            })
            .context("can't start a thread")?;
        Ok(Self(asked))
    }

    /// Goes on, or not.
    ///
    /// # Errors
    /// If the demo was asked to end.
    pub fn check(&self) -> anyhow::Result<()> {
        if self.0.load(Ordering::Relaxed) {
            bail!("interrupted: the demo's jobs and its daemon are ended, nothing is left behind");
        }
        Ok(())
    }
}
