//! Readings of this process, of its children, and of processes that are gone.

use std::process::{Child, Command};

use pjw_core::ids::StartTime;

use super::*;

struct Sleeper(Child);

impl Sleeper {
    fn start() -> Self {
        Self(Command::new("sleep").arg("1000").spawn().unwrap())
    }

    fn id(&self) -> ProcessId {
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
    let reading =
        read_job(&[one.id(), other.id(), process_id(std::process::id())], ReadingKind::Pages).unwrap();
    assert_eq!((reading.processes.len(), reading.gone, reading.denied.len()), (3, 0, 0));
    assert_eq!(reading.sum.address_spaces, 3);
    assert!(reading.cost > Duration::ZERO && reading.available > 0);
    let sum: u64 = reading.processes.iter().map(|process| process.rss).sum();
    assert_eq!(reading.sum.rss, sum);
    assert!(reading.processes.iter().all(|process| process.uss <= process.pss && process.pss <= process.rss));
}

#[test]
fn a_process_that_ended_or_whose_pid_has_another_process_is_gone() {
    let sleeper = Sleeper::start();
    let id = sleeper.id();
    let reused = ProcessId { start: StartTime(id.start.0 + 1), ..id };
    let reading = read_job(&[reused], ReadingKind::Pages).unwrap();
    assert_eq!((reading.gone, reading.processes.len()), (1, 0));
    drop(sleeper);
    let reading = read_job(&[id], ReadingKind::PagesByNode).unwrap();
    assert_eq!((reading.gone, reading.sum.rss, reading.denied.len()), (1, 0, 0));
    assert_eq!(read_job(&[], ReadingKind::Pages).unwrap().sum, JobMemory::default());
}

#[test]
fn a_process_of_another_user_is_denied_with_the_reason() {
    if Uid::effective().is_root() {
        println!("skipped: root may read all processes; tests/host/memory.rs has a daemon that may not");
        return;
    }
    let reading = read_job(&[process_id(1)], ReadingKind::Pages).unwrap();
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
    let estimate = read_job(&[sleeper.id()], ReadingKind::Estimate);
    assert_eq!(estimate.err(), Some(ReadingError::NoOwnCgroup));
}

#[test]
fn the_thread_reads_one_job_after_the_other_and_skips_requests_that_nobody_waits_for() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let reader = crate::memory::reader::MemoryReader::default();
        let sleeper = Sleeper::start();
        drop(reader.read(vec![sleeper.id()], ReadingKind::Pages));
        let (one, other) = tokio::join!(
            reader.read(vec![sleeper.id()], ReadingKind::Pages),
            reader.read(vec![process_id(std::process::id())], ReadingKind::Pages)
        );
        assert_eq!(one.unwrap().processes[0].pid, sleeper.id().pid);
        assert_eq!(other.unwrap().processes[0].pid, Pid(std::process::id()));
    });
}
