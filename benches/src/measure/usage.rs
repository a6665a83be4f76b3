//! The CPU time and the memory of another process. The CPU time has a resolution of 1 ns, and includes that of threads
//! that have ended.

use std::fs;
use std::time::Duration;

use anyhow::Context;
use nix::time::{ClockId, clock_getcpuclockid, clock_gettime};
use nix::unistd::Pid;

/// A process whose CPU time and memory a bench measures.
#[derive(Debug)]
pub struct ProcessUsage {
    pid: u32,
    clock: ClockId,
}

impl ProcessUsage {
    /// Prepares to measure the CPU time and the memory of the process `pid`.
    ///
    /// # Errors
    /// If the process has ended.
    pub fn new(pid: u32) -> anyhow::Result<Self> {
        let clock = clock_getcpuclockid(Pid::from_raw(pid.cast_signed()));
        Ok(Self { pid, clock: clock.with_context(|| format!("process {pid} has no CPU clock"))? })
    }

    /// Returns the CPU time that the process has used since its start, with that of its ended threads.
    ///
    /// # Errors
    /// If the process has ended.
    pub fn cpu_time(&self) -> anyhow::Result<Duration> {
        let time = clock_gettime(self.clock).with_context(|| format!("process {} has ended", self.pid))?;
        Ok(Duration::from(time))
    }

    /// Returns the resident set size (RSS) of the process, in MiB.
    ///
    /// # Errors
    /// If the process has ended, or has no memory of its own, as a kernel thread.
    pub fn rss_mib(&self) -> anyhow::Result<f64> {
        let path = format!("/proc/{}/status", self.pid);
        let text = fs::read_to_string(&path).with_context(|| format!("can't read {path}"))?;
        let line = text
            .lines()
            .find_map(|line| line.strip_prefix("VmRSS:"))
            .context("the process has no memory of its own")?;
        let kib: f64 = line.trim().trim_end_matches(" kB").parse().context("VmRSS is not a number")?;
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
