//! Measures a scan of ten thousand threads, with the task scan and with /proc. Prints the times and checks
//! nothing: times depend on the machine and its load.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::{Duration, Instant};

use pjw_core::ids::Pid;

use super::test_process::{TestProcess, scan};
use crate::bpf::TaskScope;
use crate::proc::procfs::ProcDir;
use crate::sys::affinity;

const THREADS: usize = 10_000;
const ROUNDS: usize = 15;

/// The shortest of several rounds, to exclude the load of other processes.
fn best(mut round: impl FnMut() -> u64) -> (Duration, u64) {
    let rounds = (0..ROUNDS).map(|_| {
        let begin = Instant::now();
        let reported = round();
        (begin.elapsed(), reported)
    });
    rounds.min().unwrap()
}

fn show(what: &str, (time, reported): (Duration, u64), tasks: u64) {
    let per_task = time.as_nanos() / u128::from(tasks);
    println!("{what:<46} {:>8} us {per_task:>6} ns per task, {reported} reported", time.as_micros());
}

fn everything_by_proc(proc: &mut ProcDir, pid: Pid) -> u64 {
    let mut run_ns = 0_u64;
    for tid in proc.tids(pid).unwrap() {
        let (stat, sched) = (proc.thread_stat(pid, tid).unwrap(), proc.schedstat(pid, tid).unwrap());
        let allowed = affinity::get_mask(tid).unwrap();
        run_ns += sched.run_ns + std::hint::black_box(u64::from(stat.last_cpu.0) + allowed.len() as u64);
    }
    std::hint::black_box(run_ns)
}

fn schedstat_by_proc(proc: &mut ProcDir, pid: Pid) -> u64 {
    let tids = proc.tids(pid).unwrap();
    tids.into_iter().map(|tid| std::hint::black_box(proc.schedstat(pid, tid).unwrap().run_ns)).count() as u64
}

#[test]
#[ignore = "a measurement: run it in release, alone, with --nocapture"]
fn ten_thousand_threads() {
    let begin = Instant::now();
    let Some(mut scan) = scan() else { return };
    println!("loading and checking {:?}", begin.elapsed());
    let (test_process, _) = TestProcess::start(THREADS);
    let pid = test_process.pid();
    let tasks = THREADS as u64 + 2;
    let mut proc = ProcDir::open(Path::new("/proc")).unwrap();
    let mut sum = 0_u64;

    let (none, one) = (BTreeSet::new(), BTreeSet::from([pid]));
    show(
        "all processes",
        best(|| {
            scan.for_each_task(TaskScope::AllProcessesAndThreadsOf(&one), &mut |task| sum += task.run_ns)
                .unwrap()
                .reported_tasks
        }),
        tasks,
    );
    show(
        "no process",
        best(|| scan.for_each_task(TaskScope::ThreadsOf(&none), &mut |_| {}).unwrap().reported_tasks),
        tasks,
    );
    show(
        "one process with all threads",
        best(|| {
            scan.for_each_task(TaskScope::ThreadsOf(&one), &mut |task| sum += task.run_ns)
                .unwrap()
                .reported_tasks
        }),
        tasks,
    );
    let many: BTreeSet<Pid> = (1..=50_000).map(|n| Pid(5_000_000 + n)).chain([pid]).collect();
    let begin = Instant::now();
    scan.for_each_task(TaskScope::ThreadsOf(&many), &mut |_| {}).unwrap();
    println!("the first task scan for 50,001 processes {:?}", begin.elapsed());
    show(
        "50,001 processes",
        best(|| scan.for_each_task(TaskScope::ThreadsOf(&many), &mut |_| {}).unwrap().reported_tasks),
        tasks,
    );
    std::hint::black_box(sum);

    show("/proc: stat, schedstat and mask", best(|| everything_by_proc(&mut proc, pid).min(tasks)), tasks);
    show("/proc: schedstat alone", best(|| schedstat_by_proc(&mut proc, pid)), tasks);
}
