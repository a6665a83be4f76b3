//! What another program costs: its processor time to the nanosecond, with that of its threads that ended, and its memory.

use std::fs;
use std::time::Duration;

use anyhow::Context;
use nix::time::{ClockId, clock_getcpuclockid, clock_gettime};
use nix::unistd::Pid;

/// A process whose costs are watched.
#[derive(Debug)]
pub struct ProcessUsage {
    pid: u32,
    clock: ClockId,
}

impl ProcessUsage {
    /// Of a process.
    ///
    /// # Errors
    /// If it is gone.
    pub fn new(pid: u32) -> anyhow::Result<Self> {
        let clock = clock_getcpuclockid(Pid::from_raw(pid.cast_signed()));
        Ok(Self { pid, clock: clock.with_context(|| format!("process {pid} has no clock"))? })
    }

    /// The processor time that it used so far.
    ///
    /// # Errors
    /// If it is gone.
    pub fn cpu_time(&self) -> anyhow::Result<Duration> {
        let time = clock_gettime(self.clock).with_context(|| format!("process {} is gone", self.pid))?;
        Ok(Duration::from(time))
    }

    /// Its resident memory, in MiB.
    ///
    /// # Errors
    /// If it is gone.
    pub fn rss_mib(&self) -> anyhow::Result<f64> {
        let path = format!("/proc/{}/status", self.pid);
        let text = fs::read_to_string(&path).with_context(|| format!("can't read {path}"))?;
        let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:")).context("no VmRSS")?;
        let kib: f64 = line.trim().trim_end_matches(" kB").parse().context("VmRSS is no number")?;
        Ok(kib / 1024.0)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    #[test]
    fn a_process_that_works_has_cpu_time_and_memory() {
        let own = ProcessUsage::new(std::process::id()).unwrap();
        let before = own.cpu_time().unwrap();
        let deadline = Instant::now() + Duration::from_secs(60);
        while own.cpu_time().unwrap() < before + Duration::from_millis(5) {
            assert!(Instant::now() < deadline);
        }
        assert!(own.rss_mib().unwrap() > 0.1);
    }

    #[test]
    fn a_process_that_ended_has_no_cpu_time() {
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let pid = child.id();
        child.wait().unwrap();
        assert!(ProcessUsage::new(pid).and_then(|usage| usage.cpu_time()).is_err());
    }
}
