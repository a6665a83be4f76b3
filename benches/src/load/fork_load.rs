//! A load of forks: many processes each second that belong to no job and end at once.

use std::fs;
use std::io::Write;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::Context;

/// The time between two batches of forks.
const BATCH_INTERVAL: Duration = Duration::from_millis(5);

/// A load of forks on the machine: a shell that forks at a constant rate. Dropping this value kills the shell.
#[derive(Debug)]
pub struct ForkLoad {
    shell: Child,
    writer: Option<JoinHandle<()>>,
    stop: Arc<AtomicBool>,
    started_at: Instant,
    forks_before: u64,
}

impl ForkLoad {
    /// Starts a shell that forks `per_second` times each second. Each new process ends at once. A thread of this
    /// process makes the shell fork, by writing a line to its input for each fork.
    ///
    /// # Errors
    /// If the shell can't be started, or if /proc/stat can't be read.
    pub fn start(per_second: u32) -> anyhow::Result<Self> {
        let mut shell = Command::new("sh")
            .args(["-c", "while read -r line; do ( : ); done"])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .context("can't start a shell for the load of forks")?;
        let lines = shell.stdin.take();
        let stop = Arc::new(AtomicBool::new(false));
        let must_stop = Arc::clone(&stop);
        let writer = thread::spawn(move || write_lines(lines, per_second, &must_stop));
        Ok(Self {
            shell,
            writer: Some(writer),
            stop,
            started_at: Instant::now(),
            forks_before: forks_since_boot()?,
        })
    }

    /// Returns how many processes and threads were created each second on the whole machine, on average since this load
    /// was started.
    ///
    /// # Errors
    /// If /proc/stat can't be read.
    pub fn forks_per_second(&self) -> anyhow::Result<f64> {
        let forks = u32::try_from(forks_since_boot()?.saturating_sub(self.forks_before)).unwrap_or(u32::MAX);
        Ok(f64::from(forks) / self.started_at.elapsed().as_secs_f64())
    }
}

impl Drop for ForkLoad {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        let _ = self.shell.kill();
        let _ = self.shell.wait();
        let _ = self.writer.take().map(JoinHandle::join);
    }
}

/// Writes empty lines to the pipe `lines`, at a rate of `per_second` lines per second, until `must_stop` is set or the
/// pipe is closed. If the shell at the other end is slower, the writes block.
fn write_lines(lines: Option<ChildStdin>, per_second: u32, must_stop: &AtomicBool) {
    let Some(mut lines) = lines else { return };
    let started_at = Instant::now();
    let mut written: u128 = 0;
    while !must_stop.load(Ordering::Relaxed) {
        let due = started_at.elapsed().as_millis() * u128::from(per_second) / 1000;
        let batch = usize::try_from(due.saturating_sub(written)).unwrap_or_default().min(1000);
        if lines.write_all(&vec![b'\n'; batch]).is_err() {
            return;
        }
        written = due;
        thread::sleep(BATCH_INTERVAL);
    }
}

/// Returns how many processes and threads were created since boot (`processes` in proc_stat(5)).
fn forks_since_boot() -> anyhow::Result<u64> {
    let text = fs::read_to_string("/proc/stat").context("can't read /proc/stat")?;
    let count = text.lines().find_map(|line| line.strip_prefix("processes "));
    count.and_then(|count| count.trim().parse().ok()).context("/proc/stat has no count of forks")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processes_are_forked_until_the_load_is_dropped() {
        let load = ForkLoad::start(1000).unwrap();
        let pid = load.shell.id();
        let deadline = Instant::now() + Duration::from_secs(60);
        while forks_since_boot().unwrap() < load.forks_before + 50 {
            assert!(Instant::now() < deadline, "the shell does not fork");
            thread::sleep(BATCH_INTERVAL);
        }
        assert!(load.forks_per_second().unwrap() > 0.0);
        drop(load);
        assert!(!std::path::Path::new(&format!("/proc/{pid}")).exists());
    }
}
