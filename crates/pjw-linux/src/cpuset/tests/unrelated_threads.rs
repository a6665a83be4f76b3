//! Masks of threads that a cpuset change does not concern.

use std::time::{Duration, Instant};

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

/// A cpuset of an isolated job, in a v2 hierarchy where each change of it is refused: its files are damaged. `state` is
/// what the kernel says of the partition.
fn unchangeable(partition: &JobCpuset, state: &str) -> (tempfile::TempDir, CpusetMount) {
    let top = tempfile::tempdir().unwrap();
    let dir = top.path().join(partition.path.trim_start_matches('/'));
    std::fs::create_dir(&dir).unwrap();
    std::fs::write(dir.join("cpuset.cpus"), "?").unwrap();
    std::fs::write(dir.join("cpuset.cpus.partition"), state).unwrap();
    let hierarchy = CpusetMount::from_v2_mount_point(top.path().to_owned());
    (top, hierarchy)
}

/// Tries this change in another hierarchy than that of the machine. It must be refused.
fn refused_in(fixture: &mut Fixture, hierarchy: &CpusetMount, change: &CpusetChange) {
    let real = std::mem::replace(&mut fixture.hierarchy, hierarchy.clone());
    let outcome = fixture.make(change);
    fixture.hierarchy = real;
    assert!(matches!(outcome, CpusetOutcome::Refused { .. }), "{change:?}: {outcome:?}");
}

/// The kernel may complete the end of a partition at any time after it.
fn restore_after_end(fixture: &mut Fixture) {
    let (mut context, unrelated_threads) = fixture.context();
    unrelated_threads.restore_after_end(&mut context, Instant::now());
}

fn creation(partition: &JobCpuset, spec: CpusetSpec) -> CpusetChange {
    CpusetChange::Create {
        job_cpuset: JobCpuset { spec, ..partition.clone() },
        owner: OWNER,
        initial_processes: Vec::new(),
    }
}

/// systemd removes the scope of a job that ended, and with it a partition.
#[test]
fn masks_are_restored_when_another_program_ends_a_partition_also_after_a_refused_change_of_it() {
    let Some(mut fixture) = fixture() else { return };
    let (first, last) = (fixture.first(), fixture.last());
    let partition = job_cpuset_of(CgroupCreator::Warden, "alone", isolated(&last));
    let (_top, hierarchy) = unchangeable(&partition, "isolated");
    let rest = job_cpuset("rest", &first);
    for refused in [
        creation(&partition, isolated(&first)),
        creation(&partition, CpusetSpec::from_cpus(last.clone())),
        CpusetChange::RemoveLimits { job_cpuset: partition.clone() },
        CpusetChange::Remove { job_cpuset: partition.clone() },
    ] {
        fixture.unrelated_threads = UnrelatedThreads::new(false);
        let made = creation(&partition, partition.spec.clone());
        fixture.unrelated_threads.record_outcome(&made, &done_outcome(last.clone()));
        refused_in(&mut fixture, &hierarchy, &refused);

        // The partition has taken the CPU to which the threads are bound.
        let (threaded, process) = ThreadedProcess::start(&mut fixture);
        let original_cgroup = fixture.cgroup_of(process);
        assert_eq!(fixture.create(&rest), done_outcome(first.clone()));
        assert_eq!(fixture.move_in(process, &rest), DONE);
        let were = bound(&mut fixture, process, &last);
        put_back(&mut fixture, were);
        let all = fixture.all.clone();
        assert_eq!(fixture.widen(&rest), done_outcome(all));

        restore_after_end(&mut fixture);
        assert_ne!(fixture.masks(process), shown(&last), "the partition has not ended: {refused:?}");
        fixture.unrelated_threads.record_partition_end(&partition.path);
        restore_after_end(&mut fixture);
        assert_eq!(fixture.masks(process), shown(&last), "{refused:?}");
        assert_eq!(fixture.move_back(process, &rest, &original_cgroup), DONE);
        assert_eq!(fixture.remove(&rest), DONE);
        threaded.end();
    }
}

#[test]
fn a_cpuset_that_is_no_partition_any_more_is_none_after_its_removal_was_refused() {
    let Some(mut fixture) = fixture() else { return };
    let (threaded, process) = ThreadedProcess::start(&mut fixture);
    let partition = job_cpuset_of(CgroupCreator::Warden, "alone", isolated(&fixture.last()));
    let (_top, hierarchy) = unchangeable(&partition, "member");
    refused_in(&mut fixture, &hierarchy, &CpusetChange::Remove { job_cpuset: partition.clone() });

    let rest = fixture.all.difference(&fixture.last());
    for tid in fixture.proc.tids(process.pid).unwrap() {
        affinity::set_mask(tid, &rest).unwrap();
    }
    fixture.hierarchy = hierarchy;
    let seen = before(&mut fixture, &creation(&partition, partition.spec.clone()));
    assert!(seen.iter().any(|bound| bound.pid == process.pid), "the program has bound its threads itself");
    threaded.end();
}

#[test]
fn masks_are_restored_until_some_time_after_the_kernel_has_given_back_the_cpus_of_an_ended_partition() {
    let Some(mut fixture) = fixture() else { return };
    let (first, last, all) = (fixture.first(), fixture.last(), fixture.all.clone());
    let partition = job_cpuset_of(CgroupCreator::Warden, "alone", isolated(&last));
    let top = tempfile::tempdir().unwrap();
    let parent = top.path().join(partition.path.trim_start_matches('/')).parent().unwrap().to_owned();
    std::fs::create_dir_all(&parent).unwrap();
    let set_effective =
        |cpus: &CpuSet| std::fs::write(parent.join("cpuset.cpus.effective"), cpus.to_string()).unwrap();
    fixture.hierarchy = CpusetMount::from_v2_mount_point(top.path().to_owned());
    fixture.unrelated_threads = UnrelatedThreads::new(false);
    fixture
        .unrelated_threads
        .record_outcome(&creation(&partition, partition.spec.clone()), &done_outcome(last));
    fixture.unrelated_threads.record_partition_end(&partition.path);

    let end = Instant::now();
    let mut is_ending_after = |seconds| {
        let (mut context, unrelated_threads) = fixture.context();
        unrelated_threads.restore_after_end(&mut context, end + Duration::from_secs(seconds));
        unrelated_threads.is_partition_ending()
    };
    set_effective(&first);
    assert!(is_ending_after(60), "the partition still has its CPUs");
    set_effective(&all);
    assert!(is_ending_after(61), "the kernel may reset the masks after it has given back the CPUs");
    assert!(!is_ending_after(120));
}
