//! Cpusets in the warden's own cgroups, in v1 or v2, with real processes and threads.

use nix::errno::Errno;
use pjw_core::cpuset_group::CpusetSpec;
use pjw_core::own_cgroups::{CgroupPlace, OwnCgroupNames};
use pjw_core::{cpuset::Pu, ids::StartTime};

use super::fixture::*;
use crate::cgroup::{CgroupMounts, PopulatedCgroupCache};
use crate::cpuset::*;
use crate::sys::affinity;
use crate::tests::until_true;

#[test]
fn no_thread_leaves_its_cpuset_by_setting_a_mask() {
    let Some(mut fixture) = fixture() else { return };
    let (first, last, all) = (fixture.first(), fixture.last(), fixture.all.clone());
    let (threaded, process) = ThreadedProcess::start(&mut fixture);
    let original_cgroup = fixture.cgroup_of(process);
    let job_cpuset = job_cpuset("holds", &first);

    assert_eq!(fixture.create(&job_cpuset), done_outcome(first.clone()));
    assert_eq!(fixture.move_in(process, &job_cpuset), DONE);
    assert_eq!(fixture.masks(process), shown(&first));
    for tid in fixture.proc.tids(process.pid).unwrap() {
        affinity::set_full_mask(tid).unwrap();
        affinity::set_mask(tid, &all).unwrap();
        assert_eq!(affinity::set_mask(tid, &last), Err(Errno::EINVAL));
    }
    assert_eq!(fixture.masks(process), shown(&first));

    let elsewhere = JobCpuset { spec: CpusetSpec::from_cpus(last.clone()), ..job_cpuset.clone() };
    assert_eq!(fixture.create(&elsewhere), done_outcome(last.clone()));
    assert_eq!(fixture.masks(process), shown(&last));
    let wider = JobCpuset { spec: CpusetSpec::from_cpus(all.clone()), ..job_cpuset.clone() };
    assert_eq!(fixture.create(&wider), done_outcome(all.clone()));
    assert_eq!(fixture.masks(process), shown(&all));

    assert_eq!(fixture.create(&job_cpuset), done_outcome(first));
    assert_eq!(fixture.widen(&job_cpuset), done_outcome(all.clone()));
    assert_eq!(fixture.masks(process), shown(&all));
    assert!(reason(fixture.remove(&job_cpuset)).contains("processes are still in it"));
    assert_eq!(fixture.move_back(process, &job_cpuset, &original_cgroup), DONE);
    assert_eq!(fixture.cgroup_of(process), original_cgroup);
    assert_eq!(fixture.remove(&job_cpuset), DONE);
    assert!(!fixture.group(&job_cpuset).exists());
    threaded.end();
}

#[test]
fn every_change_may_be_repeated() {
    let Some(mut fixture) = fixture() else { return };
    let first = fixture.first();
    let (threaded, process) = ThreadedProcess::start(&mut fixture);
    let original_cgroup = fixture.cgroup_of(process);
    let job_cpuset = job_cpuset("twice", &first);
    for _ in 0..2 {
        assert_eq!(fixture.create(&job_cpuset), done_outcome(first.clone()));
    }
    let move_in =
        CpusetChange::MoveIn { process, from: original_cgroup.clone(), to: job_cpuset.path.clone() };
    assert_eq!([fixture.make(&move_in), fixture.make(&move_in)], [DONE, DONE]);
    let all = fixture.all.clone();
    assert_eq!(
        [fixture.widen(&job_cpuset), fixture.widen(&job_cpuset)],
        [done_outcome(all.clone()), done_outcome(all)]
    );
    assert_eq!(
        [
            fixture.move_back(process, &job_cpuset, &original_cgroup),
            fixture.move_back(process, &job_cpuset, &original_cgroup)
        ],
        [DONE, DONE]
    );
    assert_eq!([fixture.remove(&job_cpuset), fixture.remove(&job_cpuset)], [DONE, DONE]);
    assert_eq!(fixture.widen(&job_cpuset), CpusetOutcome::Gone);
    threaded.end();
}

#[test]
fn removing_the_last_cpuset_removes_everything() {
    let Some(mut fixture) = fixture() else { return };
    let base = fixture.hierarchy.cgroup(&OwnCgroupNames::default().default_parent_path()).unwrap();
    if base.exists() {
        skip("another warden has cpusets here");
        return;
    }
    let switches = fixture.hierarchy.root().read_file("cgroup.subtree_control");
    let (one, two) = (job_cpuset("one", &fixture.first()), job_cpuset("two", &fixture.last()));
    assert_eq!(fixture.create(&one), done_outcome(fixture.first()));
    assert_eq!(fixture.create(&two), done_outcome(fixture.last()));
    assert_eq!(fixture.remove(&one), DONE);
    assert!(base.exists());
    assert_eq!(fixture.remove(&two), DONE);
    assert!(!base.exists());
    assert_eq!(fixture.hierarchy.root().read_file("cgroup.subtree_control"), switches);
}

#[test]
fn of_two_wardens_the_last_one_to_remove_its_cpusets_leaves_nothing_behind() {
    let Some(mut fixture) = fixture() else { return };
    let directory = |own: &OwnCgroupNames| fixture.hierarchy.cgroup(&own.default_parent_path()).unwrap();
    let beside = OwnCgroupNames::for_additional_daemon(format!("/of-test/{}", std::process::id()).as_bytes());
    let bases = [directory(&OwnCgroupNames::default()), directory(&beside)];
    if bases[0].exists() {
        skip("another warden has cpusets here");
        return;
    }
    let switches = fixture.hierarchy.root().read_file("cgroup.subtree_control");
    let alone = job_cpuset("alone", &fixture.first());
    let path = beside.job_path(&alone.job, CgroupCreator::Warden, CgroupPlace::Usual);
    let cpusets = [alone.clone(), JobCpuset { path, ..alone }];
    for job_cpuset in &cpusets {
        assert_eq!(fixture.create(job_cpuset), done_outcome(fixture.first()));
    }
    assert_eq!(bases.each_ref().map(CgroupDir::exists), [true; 2]);
    assert_eq!(fixture.remove(&cpusets[0]), DONE);
    assert_eq!(bases.each_ref().map(CgroupDir::exists), [false, true]);
    assert_eq!(
        fixture.group(&cpusets[1]).effective_cpus(),
        Ok(fixture.first()),
        "the other warden's is as it was"
    );
    assert_eq!(fixture.remove(&cpusets[1]), DONE);
    assert_eq!(bases.each_ref().map(CgroupDir::exists), [false; 2]);
    assert_eq!(fixture.hierarchy.root().read_file("cgroup.subtree_control"), switches);
}

#[test]
fn a_controller_that_another_program_enabled_stays_enabled() {
    let Some(mut fixture) = fixture().filter(|fixture| fixture.hierarchy.is_unified) else { return };
    let top = fixture.hierarchy.root();
    if top.read_file("cgroup.subtree_control").unwrap().contains("cpuset") {
        return;
    }
    top.write_file("cgroup.subtree_control", "+cpuset").unwrap();
    let job_cpuset = job_cpuset("guest", &fixture.first());
    assert_eq!(fixture.create(&job_cpuset), done_outcome(fixture.first()));
    assert_eq!(fixture.remove(&job_cpuset), DONE);
    assert!(top.read_file("cgroup.subtree_control").unwrap().contains("cpuset"));
    top.write_file("cgroup.subtree_control", "-cpuset").unwrap();

    // The warden enabled the controller, and another cgroup uses it since. So the controller stays enabled.
    assert_eq!(fixture.create(&job_cpuset), done_outcome(fixture.first()));
    let other = fixture.hierarchy.cgroup(&format!("/test-{}-other", std::process::id())).unwrap();
    other.create().unwrap();
    other.write_file("cpuset.cpus", &fixture.last().to_string()).unwrap();
    assert_eq!(fixture.remove(&job_cpuset), DONE);
    assert_eq!(other.read_number_list("cpuset.cpus").unwrap(), fixture.last());
    other.remove().unwrap();
    top.write_file("cgroup.subtree_control", "-cpuset").unwrap();
}

#[test]
fn a_cpuset_without_a_cpu_of_this_machine_is_refused_and_leaves_nothing() {
    let Some(mut fixture) = fixture() else { return };
    let beyond = CpuSet::from(Pu(8000));
    let impossible = job_cpuset("nowhere", &beyond);
    assert!(reason(fixture.create(&impossible)).contains("8000") || !fixture.group(&impossible).exists());
    assert!(!fixture.group(&impossible).exists());

    let first = fixture.first();
    let known = job_cpuset("known", &first);
    assert_eq!(fixture.create(&known), done_outcome(first.clone()));
    let moved = JobCpuset { spec: CpusetSpec::from_cpus(beyond), ..known.clone() };
    reason(fixture.create(&moved));
    assert_eq!(fixture.group(&known).effective_cpus().unwrap(), first);
    let mems = Some(CpuSet::from(Pu(63)));
    let no_memory =
        JobCpuset { spec: CpusetSpec { mems, ..CpusetSpec::from_cpus(fixture.last()) }, ..known.clone() };
    reason(fixture.create(&no_memory));
    assert_eq!(fixture.group(&known).effective_cpus().unwrap(), first);
    assert_eq!(fixture.remove(&known), DONE);
}

#[test]
fn a_refused_change_of_a_cgroup_whose_controller_was_off_leaves_it_without_limits() {
    let Some(mut fixture) = fixture().filter(|fixture| fixture.hierarchy.is_unified) else { return };
    let base = fixture.hierarchy.cgroup(&OwnCgroupNames::default().default_parent_path()).unwrap();
    if base.exists() {
        skip("another warden has cpusets here");
        return;
    }
    let job_cpuset = job_cpuset("off", &fixture.first());
    let group = fixture.group(&job_cpuset);
    assert_eq!(fixture.create(&job_cpuset), done_outcome(fixture.first()));
    base.write_file("cgroup.subtree_control", "-cpuset").unwrap();
    assert_eq!(group.read_cpuset(), Err(Errno::ENOENT));
    // The memory nodes are written first.
    let mems = Some(fixture.hierarchy.root().effective_mems().unwrap());
    let spec = CpusetSpec { mems, ..CpusetSpec::from_cpus(CpuSet::from(Pu(8000))) };
    reason(fixture.create(&JobCpuset { spec, ..job_cpuset.clone() }));
    let now = group.read_cpuset().unwrap();
    assert!(now.cpus.is_empty() && now.mems.is_empty(), "{now:?}");
    assert_eq!(fixture.remove(&job_cpuset), DONE);
}

#[test]
fn a_cpuset_limits_memory_nodes() {
    let Some(mut fixture) = fixture() else { return };
    let nodes = fixture.hierarchy.root().effective_mems().unwrap();
    let node = CpuSet::from(nodes.last().unwrap());
    let open = job_cpuset("memory", &fixture.first());
    let bound =
        JobCpuset { spec: CpusetSpec { mems: Some(node.clone()), ..open.spec.clone() }, ..open.clone() };
    let group = fixture.group(&open);
    let (threaded, process) = ThreadedProcess::start(&mut fixture);
    let original_cgroup = fixture.cgroup_of(process);

    assert_eq!(fixture.create(&bound), done_outcome(fixture.first()));
    assert_eq!(fixture.move_in(process, &bound), DONE);
    assert_eq!(group.effective_mems().unwrap(), node);
    assert_eq!(fixture.create(&open), done_outcome(fixture.first()));
    assert_eq!(group.effective_mems().unwrap(), nodes, "no longer requested");
    assert_eq!(fixture.create(&bound), done_outcome(fixture.first()));
    fixture.widen(&bound);
    assert_eq!(group.effective_mems().unwrap(), nodes);
    assert_eq!(fixture.move_back(process, &bound, &original_cgroup), DONE);
    assert_eq!(fixture.remove(&bound), DONE);
    threaded.end();
}

#[test]
fn only_the_identified_process_is_moved() {
    let Some(mut fixture) = fixture() else { return };
    let (threaded, process) = ThreadedProcess::start(&mut fixture);
    let original_cgroup = fixture.cgroup_of(process);
    let job_cpuset = job_cpuset("meant", &fixture.first());
    fixture.create(&job_cpuset);
    let to = job_cpuset.path.clone();

    let another = ProcessId { start: StartTime(process.start.0 + 1), ..process };
    let move_in =
        |process, from: &str| CpusetChange::MoveIn { process, from: from.to_owned(), to: to.clone() };
    assert_eq!(
        fixture.make(&move_in(another, &original_cgroup)),
        CpusetOutcome::Gone,
        "another process with the same id"
    );
    assert_eq!(
        fixture.make(&move_in(process, "/elsewhere")),
        CpusetOutcome::Gone,
        "the process was moved meanwhile"
    );
    assert_eq!(fixture.cgroup_of(process), original_cgroup);
    assert_eq!(fixture.make(&move_in(process, &original_cgroup)), DONE);

    let next = super::fixture::job_cpuset("next", &fixture.first());
    fixture.create(&next);
    let from_the_top = CpusetChange::MoveIn { process, from: "/".to_owned(), to: next.path.clone() };
    assert_eq!(
        fixture.make(&from_the_top),
        CpusetOutcome::Gone,
        "the process is no longer in the root cgroup itself"
    );
    assert_eq!((fixture.cgroup_of(process), fixture.remove(&next)), (job_cpuset.path.clone(), DONE));

    assert!(
        reason(fixture.move_back(process, &job_cpuset, "/test-gone"))
            .contains("/test-gone: the cgroup no longer exists")
    );
    assert_eq!(fixture.cgroup_of(process), job_cpuset.path);
    threaded.end();
    assert_eq!(fixture.make(&move_in(process, &original_cgroup)), CpusetOutcome::Gone, "the process ended");
    until_true("the cpuset is empty", || fixture.remove(&job_cpuset) == DONE);
}

#[test]
fn a_process_cannot_move_into_a_removed_cpuset() {
    let Some(mut fixture) = fixture() else { return };
    let (threaded, process) = ThreadedProcess::start(&mut fixture);
    let job_cpuset = job_cpuset("absent", &fixture.first());
    assert!(reason(fixture.move_in(process, &job_cpuset)).contains("no longer exists"));
    threaded.end();
}

#[test]
fn foreign_paths_and_paths_with_dot_dot_are_refused() {
    let Some(mut fixture) = fixture() else { return };
    for path in ["/pjw/../x", "/..", "/", "x", "/pjw/.", "/slice/x", "/pjw", "/pjw/", "/pjw/a/b", "/pjwx"] {
        let foreign = JobCpuset { path: path.to_owned(), ..job_cpuset("path", &fixture.first()) };
        let what = reason(fixture.create(&foreign));
        assert!(!what.is_empty(), "{path}");
        reason(fixture.remove(&foreign));
    }
}

#[test]
fn the_cgroup_of_a_scheduler_is_narrowed_and_restored() {
    let Some(mut fixture) = fixture() else { return };
    let (first, all) = (fixture.first(), fixture.all.clone());
    // In v2 a scheduler enables the controller above its jobs. Here a cpuset of the warden does that.
    let holder = job_cpuset("holder", &all);
    fixture.create(&holder);
    let path = format!("/test-{}-scheduler", std::process::id());
    let job_cpuset = JobCpuset { creator: CgroupCreator::Scheduler, path, ..job_cpuset("job", &first) };
    assert_eq!(
        [fixture.create(&job_cpuset), fixture.widen(&job_cpuset)],
        [CpusetOutcome::Gone, CpusetOutcome::Gone]
    );
    assert_eq!(fixture.remove(&job_cpuset), DONE, "no cgroup of the warden is left there");

    let group = fixture.group(&job_cpuset);
    group.create().unwrap();
    if !fixture.hierarchy.is_unified {
        group
            .write_file("cpuset.mems", &fixture.hierarchy.root().effective_mems().unwrap().to_string())
            .unwrap();
        group.write_file("cpuset.cpus", &all.to_string()).unwrap();
    }
    let found = group.read_cpuset().unwrap();
    // What a daemon without records finds.
    let listed_cpuset = |fixture: &Fixture| {
        let all = list_job_cpusets(&fixture.hierarchy, &OwnCgroupNames::default()).into_iter();
        all.filter(|found| found.path == job_cpuset.path)
            .map(|found| found.scheduler_cpuset)
            .collect::<Vec<_>>()
    };
    assert_eq!(fixture.create(&job_cpuset), done_outcome(first.clone()));
    let listed = listed_cpuset(&fixture);
    if listed.is_empty() {
        skip("cgroups have no attributes here");
    } else {
        assert_eq!(listed, [Some(job_cpuset.clone())]);
        group.write_file("cpuset.cpus", &all.to_string()).unwrap();
        assert_eq!(listed_cpuset(&fixture), [], "the scheduler has written the cpuset since");
    }
    assert_eq!(fixture.widen(&job_cpuset), done_outcome(all.clone()));
    assert_eq!(group.read_cpuset().unwrap(), found);
    group.write_file("cpuset.cpus", &first.to_string()).unwrap();
    assert_eq!(listed_cpuset(&fixture), [], "a widened cpuset that the scheduler narrows is the scheduler's");

    let (threaded, process) = ThreadedProcess::start(&mut fixture);
    let original_cgroup = fixture.cgroup_of(process);
    assert_eq!(fixture.move_in(process, &job_cpuset), DONE);
    assert_eq!(fixture.create(&job_cpuset), done_outcome(first));
    assert_eq!(
        fixture.widen(&job_cpuset),
        done_outcome(all),
        "a cgroup with processes in it gets the list of the one above"
    );
    fixture.move_back(process, &job_cpuset, &original_cgroup);
    assert_eq!(fixture.remove(&job_cpuset), DONE);
    assert!(group.exists(), "the cgroup belongs to the scheduler");
    group.remove().unwrap();
    assert_eq!(fixture.remove(&holder), DONE);
    threaded.end();
}

#[test]
fn in_v1_the_parent_gets_back_what_hotplug_removed() {
    let Some(mut fixture) = fixture().filter(|fixture| !fixture.hierarchy.is_unified) else { return };
    let base = fixture.hierarchy.cgroup(&OwnCgroupNames::default().default_parent_path()).unwrap();
    let (first, last) = (fixture.first(), fixture.last());
    let one = job_cpuset("before", &first);
    assert_eq!(fixture.create(&one), done_outcome(first.clone()));
    // The kernel does this when the other CPUs go offline.
    if base.write_file("cpuset.cpus", &first.to_string()).is_err() {
        skip("another warden has cpusets here");
        assert_eq!(fixture.remove(&one), DONE);
        return;
    }
    let two = job_cpuset("after", &last);
    assert_eq!(fixture.create(&two), done_outcome(last));
    assert_eq!(base.read_number_list("cpuset.cpus").unwrap(), fixture.all);
    assert_eq!([fixture.remove(&one), fixture.remove(&two)], [DONE, DONE]);
}

#[test]
fn an_isolated_cpuset_is_exclusive_or_refused_with_a_reason() {
    let Some(mut fixture) = fixture() else { return };
    let (last, all) = (fixture.last(), fixture.all.clone());
    let (job_cpuset, below) =
        (job_cpuset_of(CgroupCreator::Warden, "alone", isolated(&last)), job_cpuset("below", &last));
    let group = fixture.group(&job_cpuset);
    let top = fixture.hierarchy.root();
    if !fixture.hierarchy.is_unified {
        assert!(reason(fixture.create(&job_cpuset)).contains("can't be isolated"));
        assert!(!group.exists());
        return;
    }
    for _ in 0..2 {
        assert_eq!(fixture.create(&job_cpuset), done_outcome(last.clone()));
    }
    assert_eq!(group.read_file("cpuset.cpus.partition").unwrap(), "isolated");
    assert_eq!(top.effective_cpus().unwrap(), all.difference(&last));
    let seen =
        CgroupMounts::read().read_cgroup(&job_cpuset.path, &mut PopulatedCgroupCache::default()).unwrap();
    assert!(seen.present().unwrap().cpuset.as_ref().unwrap().isolated);

    // A partition can't have all CPUs of the machine. The earlier state is restored.
    let greedy =
        JobCpuset { spec: CpusetSpec { cpus: all.clone(), ..job_cpuset.spec.clone() }, ..job_cpuset.clone() };
    let said = reason(fixture.create(&greedy));
    assert!(said.contains("can't be isolated") || said.contains("can't get"), "{said}");
    assert_eq!(group.effective_cpus().unwrap(), last);
    assert_eq!(group.read_file("cpuset.cpus.partition").unwrap(), "isolated");

    assert_eq!(fixture.widen(&job_cpuset), done_outcome(all.clone()));
    assert_eq!(fixture.remove(&job_cpuset), DONE);
    assert_eq!(top.effective_cpus().unwrap(), all);

    // A partition needs a parent that is a partition.
    let below = JobCpuset { spec: job_cpuset.spec.clone(), ..below };
    assert!(reason(fixture.create(&below)).contains("can't be isolated"));
    assert!(!fixture.group(&below).exists());
}

#[test]
fn a_cgroup_tells_its_owner_and_the_cgroup_of_its_processes_until_it_is_widened() {
    let Some(mut fixture) = fixture() else { return };
    let (first, own) = (fixture.first(), OwnCgroupNames::default());
    let (threaded, process) = ThreadedProcess::start(&mut fixture);
    let (other, second) = ThreadedProcess::start(&mut fixture);
    let original_cgroup = fixture.cgroup_of(process);
    let (one, two) = (job_cpuset("told", &first), job_cpuset("mixed", &first));
    let found = |fixture: &Fixture, job_cpuset: &JobCpuset| {
        let found = list_job_cpusets(&fixture.hierarchy, &own).into_iter();
        found
            .filter(|found| found.path == job_cpuset.path)
            .map(|found| (found.owner, found.origin_cgroup))
            .next()
    };
    assert_eq!(found(&fixture, &one), None);
    assert_eq!(fixture.create(&one), done_outcome(first.clone()));
    if found(&fixture, &one) == Some((None, None)) {
        skip("cgroups have no attributes here");
    } else {
        assert_eq!(found(&fixture, &one), Some((Some(OWNER), None)));
        assert_eq!(fixture.move_in(process, &one), DONE);
        assert_eq!(found(&fixture, &one), Some((Some(OWNER), Some(original_cgroup.clone()))));
        // From one job to another: the origin is the same.
        assert_eq!(fixture.create(&two), done_outcome(first));
        assert_eq!(fixture.move_in(process, &two), DONE);
        assert_eq!(found(&fixture, &two), Some((Some(OWNER), Some(original_cgroup.clone()))));
        let elsewhere = fixture.hierarchy.cgroup("/made-by-test-elsewhere").unwrap();
        elsewhere.create().unwrap();
        let top = fixture.hierarchy.root();
        for file in ["cpuset.cpus", "cpuset.mems"] {
            if !fixture.hierarchy.is_unified {
                elsewhere.write_file(file, &top.read_file(file).unwrap()).unwrap();
            }
        }
        elsewhere.write_file("cgroup.procs", &second.pid.to_string()).unwrap();
        assert_eq!(fixture.move_in(second, &two), DONE);
        assert_eq!(found(&fixture, &two), Some((Some(OWNER), None)), "the processes come from two cgroups");
        assert_eq!(fixture.move_back(second, &two, &original_cgroup), DONE);
        assert_eq!(fixture.move_back(process, &two, &original_cgroup), DONE);
        elsewhere.remove().unwrap();
        let all = fixture.all.clone();
        assert_eq!(fixture.widen(&two), done_outcome(all));
        assert_eq!(found(&fixture, &two), Some((None, None)));
        assert_eq!(fixture.remove(&two), DONE);
    }
    assert_eq!(fixture.remove(&one), DONE);
    threaded.end();
    other.end();
}
