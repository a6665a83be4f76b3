//! Cpusets in scopes of systemd, on a machine with systemd as the first process.

use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::process::Command;

use pjw_core::cpuset::Pu;
use pjw_core::cpuset_group::CpusetSpec;
use pjw_core::own_cgroups::OwnCgroupNames;

use super::fixture::*;
use crate::cgroup::{CgroupMounts, PopulatedCgroupCache};
use crate::cpuset::*;
use crate::sys::affinity;
use crate::systemd::{Address, SystemdClient};
use crate::tests::until_true;

fn scope(name: &str, cpus: &CpuSet) -> JobCpuset {
    job_cpuset_of(CgroupCreator::Systemd, name, CpusetSpec::from_cpus(cpus.clone()))
}

fn own_slice() -> String {
    OwnCgroupNames::default().slice_name()
}

fn systemctl(words: &[&str]) -> String {
    let output = Command::new("systemctl").args(words).output().unwrap();
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

fn unit(job_cpuset: &JobCpuset) -> String {
    job_cpuset.path.rsplit('/').next().unwrap().to_owned()
}

/// Waits until systemd has dropped a scope, which ends after its last process has left.
fn gone(fixture: &mut Fixture, job_cpuset: &JobCpuset) {
    until_true("the scope can be removed", || fixture.remove(job_cpuset) == DONE);
    until_true("the scope's directory is gone", || !fixture.group(job_cpuset).exists());
    let unit = unit(job_cpuset);
    until_true("the scope's name is free", || systemctl(&["show", "-P", "LoadState", &unit]) == "not-found");
}

#[test]
fn no_thread_leaves_a_scope_and_none_is_killed_at_its_end() {
    let Some(mut fixture) = fixture_of(CgroupCreator::Systemd) else { return };
    let (first, last, all) = (fixture.first(), fixture.last(), fixture.all.clone());
    let (mut threaded, process) = ThreadedProcess::start(&mut fixture);
    let original_cgroup = fixture.cgroup_of(process);
    let job_cpuset = scope("holds", &first);

    assert_eq!(fixture.create_with(&job_cpuset, &[process]), done_outcome(first.clone()));
    assert_eq!(fixture.cgroup_of(process), job_cpuset.path);
    assert_eq!(fixture.masks(process), shown(&first));
    for tid in fixture.proc.tids(process.pid).unwrap() {
        affinity::set_full_mask(tid).unwrap();
        assert!(affinity::set_mask(tid, &last).is_err());
    }
    assert_eq!(fixture.masks(process), shown(&first));
    assert_eq!(fixture.create_with(&job_cpuset, &[process]), done_outcome(first), "again");

    let elsewhere = JobCpuset { spec: CpusetSpec::from_cpus(last.clone()), ..job_cpuset.clone() };
    assert_eq!(fixture.create(&elsewhere), done_outcome(last.clone()));
    assert_eq!(fixture.masks(process), shown(&last));
    systemctl(&["daemon-reload"]);
    assert_eq!(fixture.group(&job_cpuset).effective_cpus().unwrap(), last);

    assert_eq!(
        [fixture.widen(&job_cpuset), fixture.widen(&job_cpuset)],
        [done_outcome(all.clone()), done_outcome(all.clone())]
    );
    assert_eq!(fixture.masks(process), shown(&all));
    assert!(reason(fixture.remove(&job_cpuset)).contains("processes are still in it"));
    assert_eq!(fixture.move_back(process, &job_cpuset, &original_cgroup), DONE);
    gone(&mut fixture, &job_cpuset);
    assert_eq!(threaded.0.try_wait().unwrap(), None, "the process keeps running");
    assert_eq!(fixture.cgroup_of(process), original_cgroup);
    assert_eq!(fixture.widen(&job_cpuset), CpusetOutcome::Gone);
    threaded.end();
}

#[test]
fn the_slice_ends_with_its_last_scope() {
    let Some(mut fixture) = fixture_of(CgroupCreator::Systemd) else { return };
    let slice = fixture.hierarchy.cgroup(&format!("/{}", own_slice())).unwrap();
    if slice.exists() {
        skip("another warden has cpusets here");
        return;
    }
    let (one, two) = (ThreadedProcess::start(&mut fixture), ThreadedProcess::start(&mut fixture));
    let cpusets = [scope("one", &fixture.first()), scope("two", &fixture.last())];
    assert_eq!(fixture.create_with(&cpusets[0], &[one.1]), done_outcome(fixture.first()));
    assert_eq!(fixture.create_with(&cpusets[1], &[two.1]), done_outcome(fixture.last()));
    one.0.end();
    gone(&mut fixture, &cpusets[0]);
    assert!(slice.exists());
    two.0.end();
    gone(&mut fixture, &cpusets[1]);
    until_true("the slice is gone", || !slice.exists());
}

#[test]
fn a_scope_is_delegated_without_limits_and_survives_an_oom_kill() {
    let Some(mut fixture) = fixture_of(CgroupCreator::Systemd) else { return };
    let (threaded, process) = ThreadedProcess::start(&mut fixture);
    let job_cpuset = scope("shape", &fixture.first());
    assert_eq!(fixture.create_with(&job_cpuset, &[process]), done_outcome(fixture.first()));
    let unit = unit(&job_cpuset);
    let show = |property: &str| systemctl(&["show", "-P", property, &unit]);
    assert_eq!(
        [show("Slice"), show("Transient"), show("Delegate")],
        [own_slice(), "yes".to_owned(), "yes".to_owned()]
    );
    assert_eq!(show("DelegateControllers"), "cpuset");
    assert_eq!([show("TasksMax"), show("CollectMode")], ["infinity", "inactive-or-failed"]);
    assert_eq!(show("AllowedCPUs").parse::<CpuSet>().unwrap(), fixture.first());
    let at_want = show("OOMPolicy");
    assert!(at_want.is_empty() || at_want == "continue", "{at_want}");
    threaded.end();
    gone(&mut fixture, &job_cpuset);
}

#[test]
fn a_scope_takes_more_processes_and_is_not_created_for_ended_ones() {
    let Some(mut fixture) = fixture_of(CgroupCreator::Systemd) else { return };
    let (initial_process, first) = ThreadedProcess::start(&mut fixture);
    let (guest, second) = ThreadedProcess::start(&mut fixture);
    let (dead, late) = ThreadedProcess::start(&mut fixture);
    dead.end();
    let job_cpuset = scope("guests", &fixture.first());
    assert_eq!(fixture.create_with(&job_cpuset, &[late]), CpusetOutcome::Gone);
    assert_eq!(fixture.create_with(&job_cpuset, &[]), CpusetOutcome::Gone);
    assert!(!fixture.group(&job_cpuset).exists());

    assert_eq!(fixture.create_with(&job_cpuset, &[late, first]), done_outcome(fixture.first()));
    assert_eq!(fixture.move_in(second, &job_cpuset), DONE);
    assert_eq!(fixture.masks(second), shown(&fixture.first()));
    initial_process.end();
    assert_eq!(fixture.create(&job_cpuset), done_outcome(fixture.first()), "without its first process");
    guest.end();
    gone(&mut fixture, &job_cpuset);
}

#[test]
fn a_refused_scope_leaves_its_process_in_the_original_cgroup() {
    let Some(mut fixture) = fixture_of(CgroupCreator::Systemd) else { return };
    let (threaded, process) = ThreadedProcess::start(&mut fixture);
    let original_cgroup = fixture.cgroup_of(process);
    let job_cpuset = scope("beyond", &CpuSet::from(Pu(8000)));
    reason(fixture.create_with(&job_cpuset, &[process]));
    assert_eq!(fixture.cgroup_of(process), original_cgroup);
    gone(&mut fixture, &job_cpuset);

    // An existing scope keeps its cpuset.
    let known = scope("known", &fixture.first());
    assert_eq!(fixture.create_with(&known, &[process]), done_outcome(fixture.first()));
    reason(
        fixture.create(&JobCpuset { spec: CpusetSpec::from_cpus(CpuSet::from(Pu(8000))), ..known.clone() }),
    );
    assert_eq!(fixture.group(&known).effective_cpus().unwrap(), fixture.first());
    assert_eq!(fixture.cgroup_of(process), known.path);
    threaded.end();
    gone(&mut fixture, &known);
}

#[test]
fn a_scope_without_its_controller_is_repaired_or_removed() {
    let Some(mut fixture) = fixture_of(CgroupCreator::Systemd) else { return };
    let (threaded, process) = ThreadedProcess::start(&mut fixture);
    let (job_cpuset, first, all) = (scope("off", &fixture.first()), fixture.first(), fixture.all.clone());
    let slice = fixture.hierarchy.cgroup(&format!("/{}", own_slice())).unwrap();
    assert_eq!(fixture.create_with(&job_cpuset, &[process]), done_outcome(first.clone()));

    slice.write_file("cgroup.subtree_control", "-cpuset").unwrap();
    assert!(fixture.group(&job_cpuset).read_cpuset().is_err());
    assert_eq!(
        fixture.create(&job_cpuset),
        done_outcome(first.clone()),
        "systemd has not noticed the change"
    );
    assert_eq!(fixture.masks(process), shown(&first));

    let withhold = |words: &str| {
        systemctl(&["set-property", "--runtime", &own_slice(), &format!("DisableControllers={words}")])
    };
    withhold("cpuset");
    until_true("systemd takes the controller away", || fixture.group(&job_cpuset).read_cpuset().is_err());
    assert!(reason(fixture.create(&job_cpuset)).contains("DisableControllers"));
    assert_eq!([fixture.widen(&job_cpuset), fixture.remove(&job_cpuset)], [done_outcome(all.clone()), DONE]);
    assert_eq!(
        (fixture.cgroup_of(process), fixture.masks(process)),
        (job_cpuset.path.clone(), shown(&all)),
        "where it was"
    );
    let (other, second) = ThreadedProcess::start(&mut fixture);
    let original_cgroup = fixture.cgroup_of(second);
    assert!(reason(fixture.create_with(&scope("none", &first), &[second])).contains("DisableControllers"));
    assert_eq!(fixture.cgroup_of(second), original_cgroup);

    withhold("");
    assert_eq!(fixture.masks(process), shown(&all), "systemd restores no outdated cpuset");
    assert_eq!(fixture.create(&job_cpuset), done_outcome(first));
    systemctl(&["revert", &own_slice()]);
    other.end();
    threaded.end();
    gone(&mut fixture, &job_cpuset);
}

#[test]
fn a_scope_limits_memory_nodes() {
    let Some(mut fixture) = fixture_of(CgroupCreator::Systemd) else { return };
    let (threaded, process) = ThreadedProcess::start(&mut fixture);
    let nodes = fixture.hierarchy.root().effective_mems().unwrap();
    let node = CpuSet::from(nodes.last().unwrap());
    let free = scope("memory", &fixture.first());
    let spec = CpusetSpec { mems: Some(node.clone()), ..free.spec.clone() };
    let bound = JobCpuset { spec, ..free.clone() };
    let group = fixture.group(&free);
    assert_eq!(fixture.create_with(&bound, &[process]), done_outcome(fixture.first()));
    assert_eq!(group.effective_mems().unwrap(), node);
    assert_eq!(fixture.create(&free), done_outcome(fixture.first()));
    assert_eq!(group.effective_mems().unwrap(), nodes);
    assert_eq!(fixture.create(&bound), done_outcome(fixture.first()));
    assert_eq!(fixture.widen(&bound), done_outcome(fixture.all.clone()));
    assert_eq!(group.effective_mems().unwrap(), nodes);
    threaded.end();
    gone(&mut fixture, &bound);
}

#[test]
fn an_isolated_scope_has_exclusive_cpus() {
    let Some(mut fixture) = fixture_of(CgroupCreator::Systemd) else { return };
    let (threaded, process) = ThreadedProcess::start(&mut fixture);
    let (first, last, all) = (fixture.first(), fixture.last(), fixture.all.clone());
    let job_cpuset = job_cpuset_of(CgroupCreator::Systemd, "alone", isolated(&last));
    let group = fixture.group(&job_cpuset);
    for _ in 0..2 {
        assert_eq!(fixture.create_with(&job_cpuset, &[process]), done_outcome(last.clone()));
    }
    assert_eq!(group.read_file("cpuset.cpus.partition").unwrap(), "isolated");
    assert_eq!(fixture.hierarchy.root().effective_cpus().unwrap(), all.difference(&last));
    assert!(
        CgroupMounts::read()
            .read_cgroup(&job_cpuset.path, &mut PopulatedCgroupCache::default())
            .unwrap()
            .present()
            .unwrap()
            .cpuset
            .as_ref()
            .unwrap()
            .isolated
    );
    systemctl(&["daemon-reload"]);
    assert_eq!(group.read_file("cpuset.cpus.partition").unwrap(), "isolated");
    let moved = JobCpuset { spec: isolated(&first), ..job_cpuset.clone() };
    assert_eq!(fixture.create(&moved), done_outcome(first));
    assert_eq!(fixture.widen(&moved), done_outcome(all.clone()));
    assert_eq!(group.read_file("cpuset.cpus.partition").unwrap(), "member");
    threaded.end();
    gone(&mut fixture, &job_cpuset);
    assert_eq!(fixture.hierarchy.root().effective_cpus().unwrap(), all);
}

#[test]
fn systemd_is_reached_without_a_bus() {
    let Some(mut fixture) = fixture_of(CgroupCreator::Systemd) else { return };
    fixture.systemd = SystemdClient::with_addresses(vec![
        Address::Bus(PathBuf::from("/nonexistent/bus")),
        Address::Direct(PathBuf::from("/run/systemd/private")),
    ]);
    let (threaded, process) = ThreadedProcess::start(&mut fixture);
    let job_cpuset = scope("direct", &fixture.first());
    assert_eq!(fixture.create_with(&job_cpuset, &[process]), done_outcome(fixture.first()));
    // Often enough for systemd to receive several messages in one read.
    for cpus in std::iter::repeat_n([fixture.last(), fixture.first()], 10).flatten() {
        let moved = JobCpuset { spec: CpusetSpec::from_cpus(cpus.clone()), ..job_cpuset.clone() };
        assert_eq!(fixture.create(&moved), done_outcome(cpus));
    }
    threaded.end();
    gone(&mut fixture, &job_cpuset);
}

#[test]
fn a_scope_has_its_new_cpus_before_systemd_is_told_and_the_earlier_ones_if_systemd_does_not_respond() {
    let Some(mut fixture) = fixture_of(CgroupCreator::Systemd) else { return };
    let (threaded, process) = ThreadedProcess::start(&mut fixture);
    let (first, last) = (fixture.first(), fixture.last());
    let job_cpuset = scope("early", &first);
    assert_eq!(fixture.create_with(&job_cpuset, &[process]), done_outcome(first.clone()));
    let moved = JobCpuset { spec: CpusetSpec::from_cpus(last.clone()), ..job_cpuset.clone() };

    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("socket");
    let listener = UnixListener::bind(&path).unwrap();
    let group = fixture.group(&job_cpuset);
    let seen = std::thread::spawn(move || {
        let _connection = listener.accept().unwrap();
        group.effective_cpus().unwrap()
    });
    let mute = SystemdClient::with_addresses(vec![Address::Direct(path)]);
    let systemd = std::mem::replace(&mut fixture.systemd, mute);
    reason(fixture.create(&moved));
    assert_eq!(seen.join().unwrap(), last, "when systemd received the change");
    assert_eq!(fixture.masks(process), shown(&first));

    fixture.systemd = systemd;
    assert_eq!(fixture.create(&moved), done_outcome(last.clone()));
    systemctl(&["daemon-reload"]);
    assert_eq!(fixture.masks(process), shown(&last), "systemd knows the new ones");
    threaded.end();
    gone(&mut fixture, &moved);
}

#[test]
fn a_scope_that_can_not_be_narrowed_by_systemd_has_left_its_cpus_and_systemd_is_told_later() {
    let Some(mut fixture) = fixture_of(CgroupCreator::Systemd) else { return };
    let (threaded, process) = ThreadedProcess::start(&mut fixture);
    let (first, both) = (fixture.first(), fixture.first().union(&fixture.last()));
    let wide = scope("narrowed", &both);
    let narrow = JobCpuset { spec: CpusetSpec::from_cpus(first.clone()), ..wide.clone() };
    let known = |job_cpuset: &JobCpuset| {
        let shown = systemctl(&["show", "-P", "AllowedCPUs", &unit(job_cpuset)]);
        shown.replace(' ', ",").parse::<CpuSet>().unwrap()
    };
    assert_eq!(fixture.create_with(&wide, &[process]), done_outcome(both.clone()));

    let unreachable =
        || SystemdClient::with_addresses(vec![Address::Direct(PathBuf::from("/nonexistent/systemd"))]);
    let systemd = std::mem::replace(&mut fixture.systemd, unreachable());
    reason(fixture.create(&narrow));
    assert_eq!(fixture.masks(process), shown(&first));
    assert_eq!(known(&wide), both);

    fixture.systemd = systemd;
    assert_eq!(fixture.create(&narrow), done_outcome(first.clone()));
    assert_eq!(known(&wide), first);
    systemctl(&["daemon-reload"]);
    assert_eq!(fixture.masks(process), shown(&first));

    // A scope that can't be widened keeps its CPUs.
    fixture.systemd = unreachable();
    reason(fixture.create(&wide));
    assert_eq!(fixture.masks(process), shown(&first));
    fixture.systemd = SystemdClient::default();
    assert_eq!(fixture.create(&wide), done_outcome(both));
    threaded.end();
    gone(&mut fixture, &wide);
}

#[test]
fn a_scope_of_a_best_effort_job_is_in_a_slice_at_idle_priority_and_can_be_frozen() {
    let Some(mut fixture) = fixture_of(CgroupCreator::Systemd) else { return };
    let (threaded, process) = ThreadedProcess::start(&mut fixture);
    let original_cgroup = fixture.cgroup_of(process);
    let idle = CpusetSpec { idle: true, ..CpusetSpec::from_cpus(fixture.first()) };
    let job_cpuset = job_cpuset_of(CgroupCreator::Systemd, "idle", idle.clone());
    let slice = OwnCgroupNames::default().besteffort_slice_name();
    let group_of_slice = fixture.hierarchy.cgroup(&format!("/{slice}")).unwrap();
    for _ in 0..2 {
        assert_eq!(fixture.create_with(&job_cpuset, &[process]), done_outcome(fixture.first()));
    }
    assert_eq!(fixture.cgroup_of(process), job_cpuset.path);
    assert_eq!(group_of_slice.read_file("cpu.idle").unwrap(), "1");
    systemctl(&["daemon-reload"]);
    assert_eq!(group_of_slice.read_file("cpu.idle").unwrap(), "1", "after a reload");

    // Another program makes the slice a usual one.
    systemctl(&["set-property", "--runtime", &slice, "CPUWeight=100"]);
    until_true("the slice is a usual one", || group_of_slice.read_file("cpu.idle").unwrap() == "0");
    assert_eq!(fixture.create_with(&job_cpuset, &[process]), done_outcome(fixture.first()));
    assert_eq!(group_of_slice.read_file("cpu.idle").unwrap(), "1");

    let frozen = JobCpuset { spec: CpusetSpec { frozen: true, ..idle }, ..job_cpuset.clone() };
    let events = |fixture: &Fixture| fixture.group(&job_cpuset).read_file("cgroup.events").unwrap();
    for undo in [Fixture::create, Fixture::widen] {
        assert_eq!(fixture.create(&frozen), done_outcome(fixture.first()));
        until_true("the job is frozen", || events(&fixture).contains("frozen 1"));
        assert!(matches!(undo(&mut fixture, &job_cpuset), CpusetOutcome::Done { .. }));
        until_true("the job is thawed", || events(&fixture).contains("frozen 0"));
    }
    assert_eq!(fixture.create(&frozen), done_outcome(fixture.first()));
    assert_eq!(fixture.move_back(process, &job_cpuset, &original_cgroup), DONE);
    assert_eq!(fixture.cgroup_of(process), original_cgroup);
    gone(&mut fixture, &job_cpuset);
    until_true("the slice is gone", || !group_of_slice.exists());
    until_true("its name is free", || systemctl(&["show", "-P", "ActiveState", &slice]) == "inactive");
    threaded.end();
}
