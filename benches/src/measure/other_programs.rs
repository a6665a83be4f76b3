//! What other programs take of the CPUs that the demo uses: all that the kernel counts as busy, less what the demo and
//! its jobs used themselves.
//!
//! The jobs spin, so whatever else runs on their CPUs is in the figures. A figure that was measured beside it says
//! nothing of the warden, and the demo has to know that itself: nobody should have to ask what it could have seen.

use std::fs;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context;
use pjw_core::cpuset::{CpuSet, Pu};

use crate::programs::interrupt::Interrupt;

/// From so many CPUs on that others use, the machine counts as busy: more than a quiet system's own small change.
pub const BUSY_CPUS: f64 = 0.2;
/// How long a look takes: the kernel counts in hundredths of a second.
const SAMPLE_TIME: Duration = Duration::from_millis(500);
const CHECK_INTERVAL: Duration = Duration::from_millis(20);

/// A time during which others are watched.
#[derive(Debug)]
pub struct CpuUseMeter<'a> {
    cpus: &'a CpuSet,
    before: Ticks,
}

impl<'a> CpuUseMeter<'a> {
    /// Begins.
    ///
    /// # Errors
    /// If the kernel's counts can't be read.
    pub fn start(cpus: &'a CpuSet) -> anyhow::Result<Self> {
        Ok(Self { cpus, before: read_ticks(cpus)? })
    }

    /// How many of the CPUs others used since, as in 1.7. Children of this program that have not ended yet, and been
    /// waited for, count as others.
    ///
    /// # Errors
    /// If the kernel's counts can't be read.
    pub fn used_by_others(&self) -> anyhow::Result<f64> {
        Ok(cpus_of_others(self.before, read_ticks(self.cpus)?, self.cpus.len()))
    }
}

/// How many of these CPUs others use just now.
///
/// # Errors
/// If the kernel's counts can't be read, or the demo was asked to end.
pub fn measure_cpu_use(cpus: &CpuSet, interrupt: &Interrupt) -> anyhow::Result<f64> {
    let meter = CpuUseMeter::start(cpus)?;
    let deadline = Instant::now() + SAMPLE_TIME;
    while Instant::now() < deadline {
        interrupt.check()?;
        thread::sleep(CHECK_INTERVAL);
    }
    meter.used_by_others()
}

/// Time that was spent, in the kernel's ticks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Ticks {
    /// By the CPUs, running.
    busy: u64,
    /// By the CPUs, not running.
    idle: u64,
    /// By this program and its children.
    own: u64,
}

fn read_ticks(cpus: &CpuSet) -> anyhow::Result<Ticks> {
    let read = |path: &str| fs::read_to_string(path).with_context(|| format!("can't read {path}"));
    Ok(parse_ticks(&read("/proc/stat")?, &read("/proc/self/stat")?, cpus))
}

/// From the texts of `/proc/stat` (proc_stat(5)) and `/proc/self/stat` (proc_pid_stat(5)). A CPU that waits for a disk is
/// idle; one that a hypervisor took away is not.
fn parse_ticks(stat: &str, own: &str, cpus: &CpuSet) -> Ticks {
    let mut sum = Ticks::default();
    for line in stat.lines() {
        let mut fields = line.split_ascii_whitespace();
        let cpu = fields.next().and_then(|name| name.strip_prefix("cpu")?.parse().ok()).map(Pu);
        if !cpu.is_some_and(|cpu| cpus.contains(cpu)) {
            continue;
        }
        // user nice system idle iowait irq softirq steal; guest times, which follow, are in user and nice already.
        for (n, ticks) in fields.map_while(|field| field.parse::<u64>().ok()).enumerate().take(8) {
            *if matches!(n, 3 | 4) { &mut sum.idle } else { &mut sum.busy } += ticks;
        }
    }
    // After the name in parentheses: utime, stime, cutime and cstime are the 12th to the 15th.
    let fields = own.rsplit(')').next().unwrap_or_default().split_ascii_whitespace();
    sum.own = fields.skip(11).take(4).filter_map(|field| field.parse::<u64>().ok()).sum();
    sum
}

#[expect(clippy::cast_precision_loss, reason = "ticks of a minute, and CPUs of a machine")]
fn cpus_of_others(before: Ticks, after: Ticks, cpus: usize) -> f64 {
    let busy = after.busy.saturating_sub(before.busy);
    let all = busy + after.idle.saturating_sub(before.idle);
    let of_others = busy.saturating_sub(after.own.saturating_sub(before.own));
    if all == 0 { 0.0 } else { of_others as f64 / all as f64 * cpus as f64 }
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    const STAT: &str = "cpu  99 99 99 99 99 99 99 99 99 99\ncpu0 1 2 3 100 10 4 5 6 1 2\ncpu1 10 0 0 50 0 0 0 0 0 0\n\
                        cpu2 70 0 0 7 0 0 0 0 0 0\nintr 5\n";
    const OWN: &str = "7 (a) b (c)) S 1 2 3 4 5 6 7 8 9 10 1 20 300 4000 20 0 3 0 99";

    #[test]
    fn only_the_given_cpus_count_and_all_children_are_own_time() {
        let of = |cpus: &str| parse_ticks(STAT, OWN, &cpus.parse().unwrap());
        assert_eq!(of("0"), Ticks { busy: 21, idle: 110, own: 4321 });
        assert_eq!(of("0-1"), Ticks { busy: 31, idle: 160, own: 4321 });
        assert_eq!(parse_ticks("", "", &"0".parse().unwrap()), Ticks::default());
    }

    #[test]
    fn the_use_by_other_programs_is_in_cpus() {
        let before = Ticks { busy: 100, idle: 1000, own: 7 };
        let used = |busy, idle, own| cpus_of_others(before, Ticks { busy, idle, own }, 2);
        let close = |used: f64, expected: f64| (used - expected).abs() < 1e-9;
        assert!(close(used(151, 1009, 7), 1.7));
        assert!(close(used(200, 1000, 107), 0.0), "the demo's own jobs are not others");
        assert!(close(used(200, 1000, 62), 0.9));
        assert!(close(used(100, 1000, 7), 0.0), "no time has passed");
    }

    #[test]
    fn a_running_child_counts_as_another_program() {
        let all: CpuSet = "0-8191".parse().unwrap();
        let interrupt = Interrupt::install().unwrap();
        let mut spinner =
            Command::new("sh").args(["-c", "while :; do :; done"]).stdin(Stdio::null()).spawn().unwrap();
        // A machine that has better to do may let it wait.
        let seen = (0..100).any(|_| measure_cpu_use(&all, &interrupt).unwrap() > 0.0);
        spinner.kill().unwrap();
        spinner.wait().unwrap();
        assert!(seen);
    }
}
