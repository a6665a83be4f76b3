//! Masks of threads that a cpuset change does not concern.

use super::fixture::*;
use crate::cgroup::CpusetMount;
use crate::cpuset::{unrelated_threads::RecordedThreadMask, *};
use crate::sys::affinity;

/// The threads of a process, recorded as if all had this mask before a change.
fn bound(fixture: &mut Fixture, process: ProcessId, mask: &CpuSet) -> Vec<RecordedThreadMask> {
    let tids = fixture.proc.tids(process.pid).unwrap();
    let bound = |tid| {
        let start = fixture.proc.thread_stat(process.pid, tid).unwrap().start;
        RecordedThreadMask {
            pid: process.pid,
            tid,
            start,
            mask: mask.clone(),
            effective: mask.clone(),
            is_displaced: false,
        }
    };
    tids.into_iter().map(bound).collect()
}

fn before(fixture: &mut Fixture, change: &CpusetChange) -> Vec<RecordedThreadMask> {
    let (mut context, unrelated_threads) = fixture.context();
    unrelated_threads.find_affected_threads(&mut context, change)
}

fn put_back(fixture: &mut Fixture, bound: Vec<RecordedThreadMask>) {
    let (mut context, unrelated_threads) = fixture.context();
    unrelated_threads.restore_reset_masks(&mut context, bound, &["/pjw/other".to_owned()]);
}

#[test]
fn only_a_mask_that_the_kernel_reset_is_restored() {
    let Some(mut fixture) = fixture() else { return };
    let (first, last) = (fixture.first(), fixture.last());
    let (threaded, process) = ThreadedProcess::start(&mut fixture);
    let were = bound(&mut fixture, process, &first);
    let changed = were.last().unwrap().tid;
    affinity::set_mask(changed, &last).unwrap();

    put_back(&mut fixture, were);
    for tid in fixture.proc.tids(process.pid).unwrap() {
        let expected = if tid == changed { &last } else { &first };
        assert_eq!(affinity::get_mask(tid).unwrap(), *expected, "thread {tid}");
    }
    threaded.end();
}

#[test]
fn no_mask_is_recorded_if_the_kernel_stores_masks() {
    let Some(mut fixture) = fixture() else { return };
    let (threaded, process) = ThreadedProcess::start(&mut fixture);
    affinity::set_mask(pjw_core::ids::Tid(process.pid.0), &fixture.last()).unwrap();
    // A v2 hierarchy without enabled controllers: the first cpuset affects every cgroup.
    let top = tempfile::tempdir().unwrap();
    fixture.hierarchy = CpusetMount::from_v2_mount_point(top.path().to_owned());
    let raise = CpusetChange::Create {
        job_cpuset: job_cpuset("reaches", &fixture.first()),
        owner: OWNER,
        initial_processes: Vec::new(),
    };
    for (affinity_persists, recorded) in [(false, true), (true, false)] {
        fixture.unrelated_threads = UnrelatedThreads::new(affinity_persists);
        let seen = before(&mut fixture, &raise);
        assert_eq!(seen.iter().any(|bound| bound.pid == process.pid), recorded, "{affinity_persists}");
    }
    threaded.end();
}

#[test]
fn a_mask_is_restored_when_its_cpus_are_available_again() {
    let Some(mut fixture) = fixture() else { return };
    let (first, last) = (fixture.first(), fixture.last());
    let (threaded, process) = ThreadedProcess::start(&mut fixture);
    let original_cgroup = fixture.cgroup_of(process);
    // The effect of a partition on the threads outside it.
    let rest = job_cpuset("rest", &first);
    assert_eq!(fixture.create(&rest), done_outcome(first.clone()));
    assert_eq!(fixture.move_in(process, &rest), DONE);
    let were = bound(&mut fixture, process, &last);
    put_back(&mut fixture, were);
    assert_eq!(fixture.masks(process), shown(&first));

    let all = fixture.all.clone();
    assert_eq!(fixture.widen(&rest), done_outcome(all));
    let raise = CpusetChange::Create {
        job_cpuset: job_cpuset("next", &first),
        owner: OWNER,
        initial_processes: Vec::new(),
    };
    let real = fixture.hierarchy.clone();
    let top = tempfile::tempdir().unwrap();
    fixture.hierarchy = CpusetMount::from_v2_mount_point(top.path().to_owned());
    let seen = before(&mut fixture, &raise);
    fixture.hierarchy = real;
    put_back(&mut fixture, seen);
    assert_eq!(fixture.masks(process), shown(&last));
    assert_eq!(fixture.move_back(process, &rest, &original_cgroup), DONE);
    assert_eq!(fixture.remove(&rest), DONE);
    threaded.end();
}

/// The kernel ends the partition of a removed cgroup some time after the removal. The masks of all threads may be read
/// before that end, and the CPUs of their cgroups after it.
#[test]
fn a_mask_without_the_cpus_of_an_ending_partition_is_the_kernels() {
    let Some(mut fixture) = fixture() else { return };
    let (threaded, process) = ThreadedProcess::start(&mut fixture);
    let taken = fixture.last();
    let rest = fixture.all.difference(&taken);
    let mut isolated = job_cpuset("alone", &taken);
    isolated.spec.isolated = true;
    let top = tempfile::tempdir().unwrap();
    fixture.hierarchy = CpusetMount::from_v2_mount_point(top.path().to_owned());
    let is_recorded =
        |fixture: &mut Fixture, change| before(fixture, &change).iter().any(|bound| bound.pid == process.pid);
    let create =
        CpusetChange::Create { job_cpuset: isolated.clone(), owner: OWNER, initial_processes: Vec::new() };
    assert!(!is_recorded(&mut fixture, create));

    for tid in fixture.proc.tids(process.pid).unwrap() {
        affinity::set_mask(tid, &rest).unwrap();
    }
    let remove = CpusetChange::Remove { job_cpuset: isolated };
    assert!(!is_recorded(&mut fixture, remove), "the partition is still there for the masks alone");
    threaded.end();
}
