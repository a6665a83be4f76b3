//! Idle priority and freezing of the warden's own cgroups, with processes that use CPU time.

use std::fs;
use std::io::Write;
use std::process::{Child, Stdio};

use nix::sys::signal::{Signal, kill};
use pjw_core::cpuset_group::CpusetSpec;
use pjw_core::ids::{Pid, Tid};
use pjw_core::own_cgroups::OwnCgroupNames;

use super::fixture::*;
use crate::cgroup::CpusetMount;
use crate::cpuset::*;
use crate::sys::affinity;
use crate::tests::{shell_that_ends_with_its_thread, until, until_true};

/// The CPU time in ns after which shares are compared.
const ENOUGH: u64 = 500_000_000;

fn besteffort(name: &str, cpus: &CpuSet) -> JobCpuset {
    job_cpuset_of(
        CgroupCreator::Warden,
        name,
        CpusetSpec { idle: true, ..CpusetSpec::from_cpus(cpus.clone()) },
    )
}

fn frozen(job_cpuset: &JobCpuset, frozen: bool) -> JobCpuset {
    JobCpuset { spec: CpusetSpec { frozen, ..job_cpuset.spec.clone() }, ..job_cpuset.clone() }
}

/// A fixture on a machine where the warden can give idle priority.
fn fixture_with_idle() -> Option<Fixture> {
    let fixture = fixture()?;
    if let Some(why) = crate::probe::idle_obstacle(&fixture.hierarchy) {
        skip(&why);
        return None;
    }
    Some(fixture)
}

/// A fixture on a machine with v1 hierarchies of the cpu controller and of the freezer.
fn fixture_with_twins() -> Option<Fixture> {
    let fixture = fixture_with_idle()?;
    let CpusetMount { v1_cpu_mount_point, v1_freezer_mount_point, .. } = &fixture.hierarchy;
    if v1_cpu_mount_point.is_none() || v1_freezer_mount_point.is_none() {
        skip("there are no v1 hierarchies of the cpu controller and of the freezer");
        return None;
    }
    Some(fixture)
}

/// A shell that runs a script, until it is dropped.
struct Shell(Child);

impl Shell {
    fn start(fixture: &mut Fixture, script: &str) -> (Self, ProcessId) {
        let child = shell_that_ends_with_its_thread(script).stdin(Stdio::piped()).spawn().unwrap();
        let process = fixture.id(Pid(child.id()));
        (Self(child), process)
    }

    fn spin(fixture: &mut Fixture) -> (Self, ProcessId) {
        Self::start(fixture, "while :; do :; done")
    }

    /// A shell that starts a child when it is told to.
    fn parent(fixture: &mut Fixture) -> (Self, ProcessId) {
        Self::start(fixture, "read go; sleep 120 & wait")
    }

    fn give_birth(&mut self) -> Pid {
        self.0.stdin.as_mut().unwrap().write_all(b"go\n").unwrap();
        let pid = self.0.id();
        let child = until("the child is there", || {
            let text = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).ok()?;
            text.split_ascii_whitespace().next()?.parse().ok()
        });
        Pid(child)
    }
}

impl Drop for Shell {
    fn drop(&mut self) {
        let pid = self.0.id();
        let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
        for child in children.split_ascii_whitespace() {
            let child = nix::unistd::Pid::from_raw(child.parse().unwrap());
            let _ = kill(child, Signal::SIGKILL);
        }
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A cgroup of the cpu controller or the freezer, made by a test, and removed with this value.
struct MadeByTest(CgroupDir);

impl MadeByTest {
    fn new(group: Option<CgroupDir>) -> Self {
        let group = group.unwrap();
        group.create().unwrap();
        Self(group)
    }

    fn take(&self, process: ProcessId) {
        self.0.write_file("cgroup.procs", &process.pid.to_string()).unwrap();
    }
}

impl Drop for MadeByTest {
    fn drop(&mut self) {
        let above = self.0.parent();
        for pid in self.0.processes() {
            let _ = above.write_file("cgroup.procs", &pid.to_string());
        }
        let _ = self.0.remove();
    }
}

/// The CPU time of a process so far, in ns.
fn cpu_time(process: ProcessId) -> u64 {
    let text = fs::read_to_string(format!("/proc/{}/schedstat", process.pid)).unwrap();
    text.split_ascii_whitespace().next().unwrap().parse().unwrap()
}

/// The share of the first process in the CPU time that both use from now on: the median of three, as other programs of
/// the machine may run on the same CPU.
fn share(one: ProcessId, other: ProcessId) -> f64 {
    let mut shares = [(); 3].map(|()| share_once(one, other));
    shares.sort_by(f64::total_cmp);
    shares[1]
}

fn share_once(one: ProcessId, other: ProcessId) -> f64 {
    let [start_of_one, start_of_other] = [cpu_time(one), cpu_time(other)];
    until("the processes use CPU time", || {
        let used = [cpu_time(one) - start_of_one, cpu_time(other) - start_of_other];
        let both: u64 = used.iter().sum();
        #[expect(clippy::cast_precision_loss, reason = "a share")]
        (both >= ENOUGH / 2).then(|| used[0] as f64 / both as f64)
    })
}

fn place(fixture: &mut Fixture, process: ProcessId, controller: &str) -> String {
    moving::process_cgroup_path(&mut fixture.proc, process, controller).unwrap()
}

/// The cgroup of the cpu controller in which this process is. Its children begin there.
fn own_place(fixture: &mut Fixture) -> String {
    let own = fixture.id(Pid(std::process::id()));
    place(fixture, own, "cpu")
}

/// No directory of the cpuset and its twins is left.
fn is_undone(fixture: &Fixture, job_cpuset: &JobCpuset) -> bool {
    let path = &job_cpuset.path;
    let twins = [fixture.hierarchy.v1_cpu_cgroup(path), fixture.hierarchy.v1_freezer_cgroup(path)];
    !twins.iter().flatten().chain([&fixture.group(job_cpuset)]).any(CgroupDir::exists)
}

fn is_nothing_left(fixture: &Fixture) -> bool {
    let path = OwnCgroupNames::default().besteffort_parent_path();
    let hierarchy = &fixture.hierarchy;
    let all = [hierarchy.cgroup(&path), hierarchy.v1_cpu_cgroup(&path), hierarchy.v1_freezer_cgroup(&path)];
    !all.iter().flatten().any(CgroupDir::exists)
}

/// Whether a process uses no CPU time while another one does.
fn stands_still(process: ProcessId, runner: ProcessId) -> bool {
    let (before, start) = (cpu_time(process), cpu_time(runner));
    until_true("the other process runs", || cpu_time(runner) - start >= ENOUGH / 5);
    cpu_time(process) == before
}

fn until_running(process: ProcessId) {
    let before = cpu_time(process);
    until_true("the process runs", || cpu_time(process) > before);
}

#[test]
fn a_job_at_idle_priority_leaves_the_cpu_to_an_owner_in_another_cgroup() {
    let Some(mut fixture) = fixture_with_idle() else { return };
    let last = fixture.last();
    let (_owner, owner) = Shell::spin(&mut fixture);
    let (_borrower, borrower) = Shell::spin(&mut fixture);
    affinity::set_mask(Tid(owner.pid.0), &last).unwrap();
    let hierarchy = fixture.hierarchy.clone();
    let place_of_owner = |path| hierarchy.v1_cpu_cgroup(path).or_else(|| hierarchy.cgroup(path));
    let group_of_owner = MadeByTest::new(place_of_owner("/made-by-test-owner"));
    group_of_owner.take(owner);
    let original_cgroup = fixture.cgroup_of(borrower);

    let usual = job_cpuset("equal", &last);
    assert_eq!(fixture.create(&usual), done_outcome(last.clone()));
    assert_eq!(fixture.move_in(borrower, &usual), DONE);
    let equal = share(borrower, owner);

    let idle = besteffort("idle", &last);
    assert_eq!(fixture.create(&idle), done_outcome(last));
    assert_eq!(fixture.move_in(borrower, &idle), DONE);
    assert_eq!(fixture.remove(&usual), DONE);
    let low = share(borrower, owner);

    assert_eq!(fixture.move_back(borrower, &idle, &original_cgroup), DONE);
    assert_eq!(fixture.cgroup_of(borrower), original_cgroup);
    affinity::set_mask(Tid(borrower.pid.0), &fixture.last()).unwrap();
    let again = share(borrower, owner);
    assert_eq!(fixture.remove(&idle), DONE);
    assert!(is_undone(&fixture, &idle));
    assert!(low < 0.05 && equal > 0.25 && again > 0.25, "idle {low}, usual {equal}, then {again}");
}

#[test]
fn the_cpu_controller_of_v2_is_disabled_again_with_the_last_job_at_idle_priority() {
    let Some(mut fixture) = fixture_with_idle().filter(|fixture| fixture.hierarchy.is_unified) else {
        return;
    };
    let own = OwnCgroupNames::default();
    let (top, besteffort_group) =
        (fixture.hierarchy.root(), fixture.hierarchy.cgroup(&own.besteffort_parent_path()).unwrap());
    if besteffort_group.exists() {
        skip("another warden has jobs at idle priority here");
        return;
    }
    let before = top.read_file("cgroup.subtree_control").unwrap();
    let usual = job_cpuset("usual", &fixture.last());
    let jobs = [besteffort("one", &fixture.first()), besteffort("two", &fixture.first())];
    assert_eq!(fixture.create(&usual), done_outcome(fixture.last()));
    for job_cpuset in &jobs {
        assert_eq!(fixture.create(job_cpuset), done_outcome(fixture.first()));
        assert!(top.enables_controller("cpu"));
        assert_eq!(besteffort_group.read_file("cpu.idle").unwrap(), "1");
    }
    assert_eq!(fixture.remove(&jobs[0]), DONE);
    assert!(top.enables_controller("cpu"));
    assert_eq!(fixture.remove(&jobs[1]), DONE);
    assert!(!besteffort_group.exists());
    assert_eq!(top.enables_controller("cpu"), before.split(' ').any(|controller| controller == "cpu"));
    assert!(top.enables_controller("cpuset"), "the usual job has its cpuset");
    assert_eq!(fixture.remove(&usual), DONE);
    assert_eq!(top.read_file("cgroup.subtree_control").unwrap(), before);
}

#[test]
fn each_process_returns_to_its_cgroup_of_the_cpu_controller() {
    let Some(mut fixture) = fixture_with_twins() else { return };
    let hierarchy = fixture.hierarchy.clone();
    let groups =
        ["/made-by-test-one", "/made-by-test-two"].map(|path| MadeByTest::new(hierarchy.v1_cpu_cgroup(path)));
    let below = MadeByTest::new(hierarchy.v1_cpu_cgroup("/made-by-test-two/below"));
    let mut shells = [(); 4].map(|()| Shell::parent(&mut fixture));
    let [one, two, three, other] = shells.each_ref().map(|(_, process)| *process);
    groups[0].take(one);
    groups[1].take(two);
    below.take(three);
    let (begin, before) = (
        own_place(&mut fixture),
        [one, two, three, other].map(|process| place(&mut fixture, process, "cpu")),
    );
    assert_eq!(before, ["/made-by-test-one", "/made-by-test-two", "/made-by-test-two/below", &begin]);
    let original_cgroup = fixture.cgroup_of(one);

    let job_cpuset = besteffort("origins", &fixture.first());
    for _ in 0..2 {
        assert_eq!(fixture.create(&job_cpuset), done_outcome(fixture.first()));
    }
    for process in [one, two, three, other, one] {
        assert_eq!(fixture.move_in(process, &job_cpuset), DONE);
        let here = [fixture.cgroup_of(process), place(&mut fixture, process, "cpu")];
        assert_eq!(here, [job_cpuset.path.clone(), job_cpuset.path.clone()]);
    }
    let child = shells[1].0.give_birth();
    let child = fixture.id(child);
    assert_eq!(
        [fixture.cgroup_of(child), place(&mut fixture, child, "cpu")],
        [(); 2].map(|()| job_cpuset.path.clone())
    );

    // From one such job to another: the origins are the same.
    let second = besteffort("second", &fixture.first());
    assert_eq!(fixture.create(&second), done_outcome(fixture.first()));
    assert_eq!(fixture.move_in(two, &second), DONE);
    assert_eq!(place(&mut fixture, two, "cpu"), second.path);
    assert_eq!(fixture.move_back(two, &second, &original_cgroup), DONE);
    assert_eq!(fixture.remove(&second), DONE);

    // The cgroup of the third one is gone, and only that of its parent is left.
    below.0.remove().unwrap();
    for process in [one, three, other, child] {
        assert_eq!(fixture.move_back(process, &job_cpuset, &original_cgroup), DONE);
        assert_eq!(fixture.cgroup_of(process), original_cgroup);
    }
    let after = [one, two, three, other, child].map(|process| place(&mut fixture, process, "cpu"));
    let expected =
        ["/made-by-test-one", "/made-by-test-two", "/made-by-test-two", &begin, "/made-by-test-one"];
    assert_eq!(after, expected, "a process that was born in the job goes where the first one came from");
    assert_eq!(fixture.remove(&job_cpuset), DONE);
    assert!(is_undone(&fixture, &job_cpuset));
    drop(shells);
}

#[test]
fn a_job_that_is_no_longer_best_effort_loses_its_idle_priority_when_it_moves() {
    let Some(mut fixture) = fixture_with_twins() else { return };
    let (_shell, process) = Shell::parent(&mut fixture);
    let (idle, usual) = (besteffort("class", &fixture.first()), job_cpuset("class", &fixture.first()));
    assert_eq!(fixture.create(&idle), done_outcome(fixture.first()));
    assert_eq!(fixture.move_in(process, &idle), DONE);
    assert_eq!(fixture.create(&usual), done_outcome(fixture.first()));
    assert_eq!(fixture.move_in(process, &usual), DONE);
    let expected = [usual.path.clone(), own_place(&mut fixture)];
    assert_eq!([fixture.cgroup_of(process), place(&mut fixture, process, "cpu")], expected);
    assert_eq!([fixture.remove(&idle), fixture.widen(&usual)], [DONE, done_outcome(fixture.all.clone())]);
    assert_eq!(fixture.move_back(process, &usual, "/"), DONE);
    assert_eq!(fixture.remove(&usual), DONE);
    assert!(is_undone(&fixture, &idle));
}

#[test]
fn a_twin_that_a_killed_warden_left_behind_is_found_and_undone() {
    let Some(mut fixture) = fixture_with_twins() else { return };
    let own = OwnCgroupNames::default();
    let hierarchy = fixture.hierarchy.clone();
    let origin = MadeByTest::new(hierarchy.v1_cpu_cgroup("/made-by-test-orphan"));
    let (_shell, process) = Shell::parent(&mut fixture);
    origin.take(process);
    let job_cpuset = besteffort("orphan", &fixture.first());
    assert_eq!(fixture.create(&frozen(&job_cpuset, true)), done_outcome(fixture.first()));
    assert_eq!(fixture.move_in(process, &job_cpuset), DONE);
    assert_eq!(place(&mut fixture, process, "freezer"), job_cpuset.path);
    let is_listed = |fixture: &Fixture| {
        list_job_cpusets(&fixture.hierarchy, &own).iter().any(|found| found.path == job_cpuset.path)
    };
    assert!(is_listed(&fixture));

    // The cpuset is removed as another program would do that.
    hierarchy.root().write_file("cgroup.procs", &process.pid.to_string()).unwrap();
    fixture.group(&job_cpuset).remove().unwrap();
    assert!(is_listed(&fixture) && !is_undone(&fixture, &job_cpuset));
    let (mut context, _) = fixture.context();
    remove_orphaned_twins(&mut context);
    assert!(!is_listed(&fixture) && is_undone(&fixture, &job_cpuset));
    assert_eq!(place(&mut fixture, process, "cpu"), "/made-by-test-orphan");
    assert_eq!(place(&mut fixture, process, "freezer"), "/");
    assert!(is_nothing_left(&fixture));
}

#[test]
fn removing_a_cpuset_moves_back_what_is_left_in_its_twin() {
    let Some(mut fixture) = fixture_with_twins() else { return };
    let hierarchy = fixture.hierarchy.clone();
    let origin = MadeByTest::new(hierarchy.v1_cpu_cgroup("/made-by-test-left"));
    let (_shell, process) = Shell::parent(&mut fixture);
    origin.take(process);
    let job_cpuset = besteffort("left", &fixture.first());
    assert_eq!(fixture.create(&job_cpuset), done_outcome(fixture.first()));
    assert_eq!(fixture.move_in(process, &job_cpuset), DONE);
    let below = hierarchy.v1_cpu_cgroup(&format!("{}/made by the job", job_cpuset.path)).unwrap();
    below.create().unwrap();
    below.write_file("cgroup.procs", &process.pid.to_string()).unwrap();
    hierarchy.root().write_file("cgroup.procs", &process.pid.to_string()).unwrap();
    assert_eq!([fixture.remove(&job_cpuset), fixture.remove(&job_cpuset)], [DONE, DONE]);
    assert_eq!(place(&mut fixture, process, "cpu"), "/made-by-test-left");
    assert!(is_undone(&fixture, &job_cpuset));
}

#[test]
fn a_frozen_job_uses_no_cpu_time_until_it_is_thawed() {
    let Some(mut fixture) = fixture().filter(|fixture| crate::probe::has_freezer(&fixture.hierarchy)) else {
        return;
    };
    let (_runner, runner) = Shell::spin(&mut fixture);
    let (_spinner, process) = Shell::spin(&mut fixture);
    let original_cgroup = fixture.cgroup_of(process);
    let last = fixture.last();
    let job_cpuset = JobCpuset { spec: CpusetSpec::from_cpus(last.clone()), ..besteffort("frozen", &last) };
    let freeze = |fixture: &mut Fixture| {
        for _ in 0..2 {
            assert_eq!(fixture.create(&frozen(&job_cpuset, true)), done_outcome(last.clone()));
        }
        assert_eq!(fixture.move_in(process, &job_cpuset), DONE);
        until_true("the process stands still", || stands_still(process, runner));
    };
    freeze(&mut fixture);
    for _ in 0..2 {
        assert_eq!(fixture.create(&job_cpuset), done_outcome(last.clone()));
    }
    until_running(process);

    freeze(&mut fixture);
    assert_eq!(fixture.widen(&job_cpuset), done_outcome(fixture.all.clone()));
    until_running(process);

    freeze(&mut fixture);
    assert_eq!(fixture.move_back(process, &job_cpuset, &original_cgroup), DONE);
    until_running(process);

    freeze(&mut fixture);
    assert!(reason(fixture.remove(&job_cpuset)).contains("processes are still in it"));
    until_running(process);
    assert_eq!(fixture.move_back(process, &job_cpuset, &original_cgroup), DONE);
    assert_eq!(fixture.remove(&job_cpuset), DONE);
    assert_eq!(fixture.cgroup_of(process), original_cgroup);
    assert!(is_undone(&fixture, &job_cpuset));
}

#[test]
fn a_process_that_another_program_put_into_the_freezer_stays_there() {
    let Some(mut fixture) = fixture_with_twins() else { return };
    let hierarchy = fixture.hierarchy.clone();
    let theirs = MadeByTest::new(hierarchy.v1_freezer_cgroup("/made-by-test-slurm"));
    let (_shell, process) = Shell::parent(&mut fixture);
    theirs.take(process);
    let job_cpuset = besteffort("theirs", &fixture.first());
    assert_eq!(fixture.create(&job_cpuset), done_outcome(fixture.first()));
    assert_eq!(fixture.move_in(process, &job_cpuset), DONE);
    let why = reason(fixture.create(&frozen(&job_cpuset, true)));
    assert!(why.contains("another program has put it into /made-by-test-slurm"), "{why}");
    assert_eq!(place(&mut fixture, process, "freezer"), "/made-by-test-slurm");
    assert_eq!(fixture.move_back(process, &job_cpuset, "/"), DONE);
    assert_eq!(place(&mut fixture, process, "freezer"), "/made-by-test-slurm");
    assert_eq!(fixture.remove(&job_cpuset), DONE);
    assert!(is_undone(&fixture, &job_cpuset));
}

#[test]
fn the_cgroup_of_a_batch_system_gets_no_idle_priority_and_is_not_frozen() {
    let Some(mut fixture) = fixture() else { return };
    let first = fixture.first();
    let usual = CpusetSpec::from_cpus(first.clone());
    for spec in [CpusetSpec { idle: true, ..usual.clone() }, CpusetSpec { frozen: true, ..usual.clone() }] {
        let theirs = JobCpuset {
            path: "/slurm/job_1".to_owned(),
            ..job_cpuset_of(CgroupCreator::Scheduler, "batch", spec)
        };
        assert!(reason(fixture.create(&theirs)).contains("belongs to the batch system"));
    }
    let elsewhere = JobCpuset { spec: CpusetSpec { idle: true, ..usual }, ..job_cpuset("elsewhere", &first) };
    let why = reason(fixture.create(&elsewhere));
    assert!(why.contains("not in a place for idle priority"), "{why}");
    assert!(is_undone(&fixture, &elsewhere));
}
