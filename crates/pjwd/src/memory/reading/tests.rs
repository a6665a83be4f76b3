//! Readings of this process, of its children, and of processes that are gone.

use std::process::{Child, Command};
use std::sync::{Arc, Weak};

use nix::unistd::Uid;
use pjw_core::ids::StartTime;
use pjw_linux::proc::page_nodes::page_nodes;

use super::*;

/// A reading that its caller waits for.
fn read(processes: &[ProcessId], kind: ReadingKind) -> Result<JobMemoryReading, ReadingError> {
    measure_job_memory(&all(processes), kind, false, &|| true)
}

fn all(processes: &[ProcessId]) -> Vec<JobProcess> {
    processes.iter().copied().map(JobProcess::from).collect()
}

/// A child process that sleeps until the value is dropped.
pub(in crate::memory) struct Sleeper(Child);

impl Sleeper {
    pub(in crate::memory) fn start() -> Self {
        let sleeper = Self(Command::new("sleep").arg("1000").spawn().unwrap());
        // `spawn` may wait as the parent of vfork(2) does, which goes on before the child has memory of its own. The
        // kernel sets the name of the program after that (begin_new_exec in fs/exec.c). Until the child sleeps, it may
        // wait for a page of its program in the state `D`.
        let mut proc = ProcDir::open(Path::new("/proc")).unwrap();
        let (pid, name) = (Pid(sleeper.0.id()), format!("/proc/{}/comm", sleeper.0.id()));
        let begin = std::time::Instant::now();
        while std::fs::read_to_string(&name).unwrap() != "sleep\n" || proc.stat(pid).unwrap().state != 'S' {
            assert!(begin.elapsed() < Duration::from_secs(60), "the child does not execute sleep");
            std::thread::yield_now();
        }
        sleeper
    }

    pub(in crate::memory) fn id(&self) -> ProcessId {
        process_id(self.0.id())
    }
}

impl Drop for Sleeper {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn process_id(pid: u32) -> ProcessId {
    let mut proc = ProcDir::open(Path::new("/proc")).unwrap();
    ProcessId { pid: Pid(pid), start: proc.stat(Pid(pid)).unwrap().start }
}

#[test]
fn a_reading_has_the_memory_of_each_process_and_its_cost() {
    let (one, other) = (Sleeper::start(), Sleeper::start());
    let reading = read(&[one.id(), other.id(), process_id(std::process::id())], ReadingKind::Pages).unwrap();
    assert_eq!((reading.processes.len(), reading.ended_processes, reading.denied.len()), (3, 0, 0));
    assert_eq!(reading.sum.address_spaces, 3);
    assert!(reading.cost > Duration::ZERO && reading.available > 0);
    let sum: u64 = reading.processes.iter().map(|process| process.rss).sum();
    assert_eq!(reading.sum.rss, sum);
    assert!(reading.processes.iter().all(|process| process.uss <= process.pss && process.pss <= process.rss));
}

#[test]
fn a_reading_without_a_request_has_the_kind_that_the_job_allows() {
    let sleeper = Sleeper::start();
    let reading = read(&[sleeper.id()], ReadingKind::Counters).unwrap();
    // In a session with a memory cgroup, which has other processes too, the small process is read by its pages.
    assert!([ReadingKind::Estimate, ReadingKind::Pages].contains(&reading.kind), "{:?}", reading.kind);
    assert_eq!((reading.processes.len(), reading.ended_processes, reading.denied.len()), (1, 0, 0));
    assert!(reading.sum.rss > 0 && reading.workers.is_some() && reading.cost > Duration::ZERO);
    let large = vec![7_u8; 300 << 20];
    let reading = read(&[process_id(std::process::id())], ReadingKind::Counters).unwrap();
    assert!(reading.sum.rss >= large.len() as u64);
    match reading.kind {
        ReadingKind::Estimate => assert!(reading.peak.is_some()),
        kind => assert_eq!((kind, reading.sum.pss, reading.workers), (ReadingKind::Counters, 0, None)),
    }
    assert!(large.iter().all(|byte| *byte == 7));
}

#[test]
fn a_sample_estimates_the_memory_on_each_node_and_leaves_out_processes_with_little_memory() {
    let (sleeper, own) = (Sleeper::start(), process_id(std::process::id()));
    if let Err(Errno::ENOSYS | Errno::EPERM) = page_nodes(own.pid, &[0]) {
        println!("skipped: this kernel has no move_pages, or it is forbidden here, as in a container");
        return;
    }
    let large = vec![7_u8; 100 << 20];
    // While another test fills a larger vector, most pages of this process are not in memory.
    let begin = std::time::Instant::now();
    let reading = loop {
        let reading = read(&[own, sleeper.id()], ReadingKind::NodeSample).unwrap();
        if !reading.processes.is_empty() || begin.elapsed() > Duration::from_secs(60) {
            break reading;
        }
    };
    let [sampled] = &reading.processes[..] else { panic!("{:?}", reading.processes) };
    let estimated: u64 = sampled.bytes_by_node.values().sum();
    assert!(sampled.pid == own.pid && estimated > 50 << 20, "{sampled:?}");
    assert_eq!((reading.sum.rss, reading.denied.len(), reading.ended_processes), (0, 0, 0));
    let reused = ProcessId { start: StartTime(own.start.0 + 1), ..own };
    assert_eq!(read(&[reused], ReadingKind::NodeSample).unwrap().processes, []);
    assert!(large.iter().all(|byte| *byte == 7));
}

#[test]
fn a_process_that_ended_or_whose_pid_has_another_process_is_gone() {
    let sleeper = Sleeper::start();
    let id = sleeper.id();
    let reused = ProcessId { start: StartTime(id.start.0 + 1), ..id };
    let reading = read(&[reused], ReadingKind::Pages).unwrap();
    assert_eq!((reading.ended_processes, reading.processes.len()), (1, 0));
    drop(sleeper);
    let reading = read(&[id], ReadingKind::PagesByNode).unwrap();
    assert_eq!((reading.ended_processes, reading.sum.rss, reading.denied.len()), (1, 0, 0));
    assert_eq!(read(&[], ReadingKind::Pages).unwrap().sum, JobMemory::default());
}

#[test]
fn a_process_of_another_user_is_denied_with_the_reason() {
    if Uid::effective().is_root() {
        println!("skipped: root may read all processes; tests/host/memory.rs has a daemon that may not");
        return;
    }
    let reading = read(&[process_id(1)], ReadingKind::Pages).unwrap();
    let [denied] = &reading.denied[..] else { panic!("{:?}", reading.denied) };
    assert_eq!((denied.pid, denied.uid), (Pid(1), 0));
    assert!(
        denied.reason.contains("belongs to user 0") && denied.reason.contains("CAP_SYS_PTRACE"),
        "{denied:?}"
    );
}

#[test]
fn processes_beside_others_in_a_cgroup_have_no_estimate() {
    // The test itself is in the same cgroup, and is not in the job.
    let sleeper = Sleeper::start();
    let estimate = read(&[sleeper.id()], ReadingKind::Estimate);
    assert_eq!(estimate.err(), Some(ReadingError::NoOwnCgroup));
}

#[test]
fn a_process_that_got_the_pid_during_the_reading_is_not_counted() {
    let sleeper = Sleeper::start();
    let reused = ProcessId { start: StartTime(sleeper.id().start.0 + 1), ..sleeper.id() };
    let mut proc = ProcDir::open(Path::new("/proc")).unwrap();
    let mut reading = read(&[], ReadingKind::Pages).unwrap();
    let live =
        |id: ProcessId| LiveProcess { id, group: None, threads: 1, thread: Some(id.pid), stack_start: None };
    read_pages(&mut proc, &[live(reused), live(sleeper.id())], &mut reading, false, &|| true).unwrap();
    let pids: Vec<Pid> = reading.processes.iter().map(|process| process.pid).collect();
    assert_eq!((reading.ended_processes, pids), (1, vec![sleeper.id().pid]));
    count_failure(&mut proc, reused, Errno::EACCES, &mut reading);
    assert_eq!(
        (reading.ended_processes, reading.denied.len()),
        (2, 0),
        "another process is not named as denied"
    );
}

#[test]
fn a_reading_that_nobody_wants_any_more_ends_before_the_next_process() {
    let (one, other) = (Sleeper::start(), Sleeper::start());
    let left = std::cell::Cell::new(1);
    let wanted_once = || left.replace(0) > 0;
    let reading = measure_job_memory(&all(&[one.id(), other.id()]), ReadingKind::Pages, false, &wanted_once);
    assert_eq!(reading.err(), Some(ReadingError::Abandoned));
}

#[test]
fn the_thread_reads_one_job_after_the_other_and_skips_requests_that_nobody_waits_for() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let reader = crate::memory::reader::MemoryReader::default();
        let sleeper = Sleeper::start();
        let caller = Arc::new(());
        let read = |process, wanted: Weak<()>| {
            let processes = vec![JobProcess::from(process)];
            let job = ProcessesToRead { processes, ..ProcessesToRead::default() };
            reader.request_reading(0, job, ReadingKind::Pages, false, wanted)
        };
        let (nobody, one, other) = tokio::join!(
            read(sleeper.id(), Weak::new()),
            read(sleeper.id(), Arc::downgrade(&caller)),
            read(process_id(std::process::id()), Arc::downgrade(&caller))
        );
        assert_eq!(nobody.err(), Some(ReadingError::Abandoned));
        assert_eq!(one.unwrap().processes[0].pid, sleeper.id().pid);
        assert_eq!(other.unwrap().processes[0].pid, Pid(std::process::id()));
    });
}
