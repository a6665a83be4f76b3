//! Measures the CPU time that other programs use on the CPUs of the demo: the time that the kernel counts as busy,
//! less the time of the demo and its children.
//!
//! The workers of the demo's jobs spin, so a program on the same CPUs changes the measured times. A figure that was
//! measured on a busy machine says nothing about pjwd. So the demo measures the CPU use of other programs during each
//! run and marks the runs on a busy machine.

use std::fs;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context;
use pjw_core::cpuset::{CpuSet, Pu};

use crate::programs::interrupt::StopSignal;

/// A number of CPUs. If other programs than the bench or the demo use at least this many CPUs, the machine counts as
/// busy, and measured times are unreliable. Other programs on an idle system use less.
pub const BUSY_CPUS: f64 = 0.2;
/// How long [`measure_cpu_use`] takes. The kernel counts CPU time in steps of 10 ms.
const SAMPLE_TIME: Duration = Duration::from_millis(500);
const CHECK_INTERVAL: Duration = Duration::from_millis(20);

/// Measures how many CPUs other programs use, beside this program and its children, from [`CpuUseMeter::start`] on.
#[derive(Debug)]
pub struct CpuUseMeter<'a> {
    cpus: &'a CpuSet,
    before: Ticks,
}

impl<'a> CpuUseMeter<'a> {
    /// Starts to measure how much other programs use the CPUs `cpus`.
    ///
    /// # Errors
    /// If /proc/stat or /proc/self/stat can't be read.
    pub fn start(cpus: &'a CpuSet) -> anyhow::Result<Self> {
        Ok(Self { cpus, before: read_ticks(cpus)? })
    }

    /// Returns how many CPUs other programs have used on average since [`CpuUseMeter::start`], for example 1.7. A child
    /// of this program counts as another program until it has ended and this program has waited for it.
    ///
    /// # Errors
    /// If /proc/stat or /proc/self/stat can't be read.
    pub fn used_by_others(&self) -> anyhow::Result<f64> {
        Ok(cpus_of_others(self.before, read_ticks(self.cpus)?, self.cpus.len()))
    }
}

/// Measures the CPU use of other programs on `cpus` for 500 ms. Returns the mean number of CPUs that other programs
/// used.
///
/// # Errors
/// If /proc/stat or /proc/self/stat can't be read, or the bench was interrupted.
pub fn measure_cpu_use(cpus: &CpuSet, interrupt: &StopSignal) -> anyhow::Result<f64> {
    let meter = CpuUseMeter::start(cpus)?;
    let deadline = Instant::now() + SAMPLE_TIME;
    while Instant::now() < deadline {
        interrupt.check()?;
        thread::sleep(CHECK_INTERVAL);
    }
    meter.used_by_others()
}

/// CPU times, in ticks of the kernel (10 ms).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Ticks {
    /// The time that the CPUs were busy.
    busy: u64,
    /// The time that the CPUs were idle.
    idle: u64,
    /// The CPU time of this program and of the children that it waited for.
    own: u64,
}

fn read_ticks(cpus: &CpuSet) -> anyhow::Result<Ticks> {
    let read = |path: &str| fs::read_to_string(path).with_context(|| format!("can't read {path}"));
    Ok(parse_ticks(&read("/proc/stat")?, &read("/proc/self/stat")?, cpus))
}

/// Adds up the busy and the idle time of the PUs in `cpus`, from the text of `/proc/stat` (proc_stat(5)). Also reads
/// the CPU time of this process and its ended children from `own`, the text of `/proc/self/stat` (proc_pid_stat(5)).
/// All times are in clock ticks. The time that a CPU waits for a disk counts as idle. The time that a hypervisor took
/// (steal) counts as busy.
fn parse_ticks(stat: &str, own: &str, cpus: &CpuSet) -> Ticks {
    let mut sum = Ticks::default();
    for line in stat.lines() {
        let mut fields = line.split_ascii_whitespace();
        let cpu = fields.next().and_then(|name| name.strip_prefix("cpu")?.parse().ok()).map(Pu);
        if !cpu.is_some_and(|cpu| cpus.contains(cpu)) {
            continue;
        }
        // The fields are user, nice, system, idle, iowait, irq, softirq and steal. The guest times follow. They are
        // part of user and nice.
        for (index, ticks) in fields.map_while(|field| field.parse::<u64>().ok()).enumerate().take(8) {
            match index {
                3 | 4 => sum.idle += ticks,
                _ => sum.busy += ticks,
            }
        }
    }
    // After the name in parentheses, utime, stime, cutime and cstime are the 12th to the 15th field.
    let fields = own.rsplit(')').next().unwrap_or_default().split_ascii_whitespace();
    sum.own = fields.skip(11).take(4).filter_map(|field| field.parse::<u64>().ok()).sum();
    sum
}

/// Returns how many of the `cpus` CPUs other programs used on average between two readings.
#[expect(clippy::cast_precision_loss, reason = "ticks of some minutes, and CPUs of a machine")]
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
        let ticks_of = |cpus: &str| parse_ticks(STAT, OWN, &cpus.parse().unwrap());
        assert_eq!(ticks_of("0"), Ticks { busy: 21, idle: 110, own: 4321 });
        assert_eq!(ticks_of("0-1"), Ticks { busy: 31, idle: 160, own: 4321 });
        assert_eq!(parse_ticks("", "", &"0".parse().unwrap()), Ticks::default());
    }

    #[test]
    fn the_use_by_other_programs_is_in_cpus() {
        let before = Ticks { busy: 100, idle: 1000, own: 7 };
        let used = |busy, idle, own| cpus_of_others(before, Ticks { busy, idle, own }, 2);
        let close = |used: f64, expected: f64| (used - expected).abs() < 1e-9;
        assert!(close(used(151, 1009, 7), 1.7));
        assert!(close(used(200, 1000, 107), 0.0), "the CPU time of the demo's own jobs does not count");
        assert!(close(used(200, 1000, 62), 0.9));
        assert!(close(used(100, 1000, 7), 0.0), "no time has passed");
    }

    #[test]
    fn a_running_child_counts_as_another_program() {
        let all: CpuSet = "0-8191".parse().unwrap();
        let interrupt = StopSignal::install().unwrap();
        let mut spinner =
            Command::new("sh").args(["-c", "while :; do :; done"]).stdin(Stdio::null()).spawn().unwrap();
        // A busy machine may not run the child at once.
        let is_counted = (0..100).any(|_| measure_cpu_use(&all, &interrupt).unwrap() > 0.0);
        spinner.kill().unwrap();
        spinner.wait().unwrap();
        assert!(is_counted);
    }
}
