//! CPU time of other processes, by the CPU clock of each process (clock_getcpuclockid(3)). Needs no permission and no
//! file.

use std::collections::BTreeMap;
use std::time::Duration;

use pjw_core::ids::{Pid, ProcessId};

use super::clock::process_cpu_time_ns;

/// Returns the CPU time that all threads of the process `pid` have used since its start, including ended
/// threads. `None` if there is no such process in the pid namespace of the calling process.
#[must_use]
pub fn process_cpu_time(pid: Pid) -> Option<Duration> {
    // For pid 0, the kernel returns the CPU time of the calling process.
    if pid.0 == 0 {
        return None;
    }
    process_cpu_time_ns(pid).ok().map(Duration::from_nanos)
}

/// Measures repeatedly how much CPU time a set of processes has used, such as the processes of a job. Each
/// sample makes one system call for each process. Memory is allocated only for processes that were not in the
/// previous sample.
#[derive(Debug, Default)]
pub struct CpuTimeSampler {
    /// The CPU time of each process at its last sample.
    last: BTreeMap<ProcessId, Sample>,
    /// The number of samples so far.
    round: u64,
}

#[derive(Debug)]
struct Sample {
    cpu_time: Duration,
    /// The call in which the process was sampled.
    round: u64,
}

impl CpuTimeSampler {
    /// Returns the CPU time that `processes` have used since the previous call of this function. Only processes that
    /// were also passed to the previous call count, so the first call returns 0. A process that has ended since the
    /// previous call adds no time.
    ///
    /// `cpu_time_of` must return the CPU time of a process since its start, or `None` if the process has ended. Callers
    /// pass [`process_cpu_time`], or another function for simulated processes.
    pub fn sample(
        &mut self,
        processes: impl IntoIterator<Item = ProcessId>,
        cpu_time_of: impl Fn(Pid) -> Option<Duration>,
    ) -> Duration {
        self.round += 1;
        let round = self.round;
        let (mut used, mut count) = (Duration::ZERO, 0);
        for process in processes {
            let Some(cpu_time) = cpu_time_of(process.pid) else { continue };
            let sample = self.last.entry(process).or_insert(Sample { cpu_time, round: 0 });
            // The pid may belong to another process by now, whose time may be less.
            used += cpu_time.saturating_sub(sample.cpu_time);
            count += usize::from(sample.round != round);
            *sample = Sample { cpu_time, round };
        }
        if count < self.last.len() {
            self.last.retain(|_, sample| sample.round == round);
        }
        used
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::process::Child;

    use pjw_core::ids::StartTime;

    use super::*;
    use crate::tests::{shell_that_ends_with_its_thread, until_true};

    struct Spinner(Child);

    impl Spinner {
        fn start() -> (Self, ProcessId) {
            let child = shell_that_ends_with_its_thread("while :; do :; done").spawn().unwrap();
            let process = ProcessId { pid: Pid(child.id()), start: StartTime(1) };
            (Self(child), process)
        }
    }

    impl Drop for Spinner {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    /// The run time of a process with one thread, from its `schedstat` file.
    fn run_time(process: ProcessId) -> Duration {
        let text = fs::read_to_string(format!("/proc/{}/schedstat", process.pid)).unwrap();
        Duration::from_nanos(text.split_ascii_whitespace().next().unwrap().parse().unwrap())
    }

    #[test]
    fn the_cpu_time_of_another_process_is_that_of_its_schedstat() {
        let (_spinner, process) = Spinner::start();
        let mut sampler = CpuTimeSampler::default();
        let least = run_time(process);
        assert_eq!(
            sampler.sample([process], process_cpu_time),
            Duration::ZERO,
            "it counts from the first sample"
        );
        let most = process_cpu_time(process.pid).unwrap();
        until_true("it has run", || run_time(process) > most + Duration::from_millis(50));
        // The file may be behind the clock by a tick, and is never ahead of it.
        let before = run_time(process);
        let used = sampler.sample([process], process_cpu_time);
        let after = process_cpu_time(process.pid).unwrap();
        assert!(
            before - most <= used && used <= after - least,
            "{before:?} {most:?} {used:?} {after:?} {least:?}"
        );
    }

    #[test]
    fn the_samples_of_several_processes_add_up_and_one_that_has_ended_is_forgotten() {
        let ((one, first), (_two, second)) = (Spinner::start(), Spinner::start());
        let mut sampler = CpuTimeSampler::default();
        sampler.sample([first, second], process_cpu_time);
        let [start, other] = [first, second].map(|process| process_cpu_time(process.pid).unwrap());
        until_true("both have run", || {
            let time = |process: ProcessId| process_cpu_time(process.pid).unwrap();
            time(first) > start + Duration::from_millis(20)
                && time(second) > other + Duration::from_millis(20)
        });
        assert!(sampler.sample([first, second, first], process_cpu_time) >= Duration::from_millis(40));
        assert_eq!(sampler.last.len(), 2);
        drop(one);
        let used = sampler.sample([first, second], process_cpu_time);
        assert!(used < Duration::from_secs(60), "{used:?}");
        assert_eq!(sampler.last.len(), 1);
        let later = ProcessId { start: StartTime(2), ..second };
        assert_eq!(
            sampler.sample([later], process_cpu_time),
            Duration::ZERO,
            "another process with this pid"
        );
        assert_eq!(sampler.sample([], process_cpu_time), Duration::ZERO);
        assert_eq!(sampler.last.len(), 0);
    }

    #[test]
    fn a_process_of_another_user_has_a_cpu_time_and_a_missing_one_has_none() {
        assert!(process_cpu_time(Pid(1)).is_some_and(|time| !time.is_zero()));
        assert_eq!([0, u32::MAX, 4_194_305].map(|pid| process_cpu_time(Pid(pid))), [None; 3]);
    }
}
