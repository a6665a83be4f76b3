//! The rules of the simulated kernel.

use pjw_core::{cpuset::Pu, cpuset_group::CpusetSpec, testing::cpu_set};

use super::*;

#[test]
fn a_child_inherits_mask_session_cgroup_and_an_orphan_is_process_ones() {
    let mut world = SimMachine::new(&cpu_set("0-7"));
    let father = world.spawn(Pid(1), Uid(1001));
    world.move_process(father, "/a/b");
    world.request_mask_as_pjw(father, Tid(father.0), &cpu_set("2-3"));
    let child = world.spawn(father, Uid(1001));
    world.exit_process(father);
    let child = &world.processes[&child];
    assert_eq!((child.parent, child.session, child.cgroup.as_str()), (Pid(1), Pid(1), "/a/b"));
    let thread = child.threads.values().next().unwrap();
    assert_eq!(
        (thread.requested_mask.to_string(), thread.original_mask.to_string()),
        ("2-3".into(), "0-7".into())
    );
}

#[test]
fn the_lineage_of_an_orphan_has_its_ended_ancestors() {
    let mut world = SimMachine::new(&cpu_set("0"));
    let init = world.processes[&Pid(1)].id;
    let first = world.spawn(Pid(1), Uid(1));
    let middle = world.spawn(first, Uid(1));
    let orphan = world.spawn(middle, Uid(1));
    let [first_id, middle_id, orphan_id] = [first, middle, orphan].map(|pid| world.processes[&pid].id);
    world.exit_process(middle);
    world.exit_process(first);
    assert_eq!(world.processes[&orphan].parent, Pid(1));
    assert_eq!(world.lineage(orphan_id).collect::<Vec<_>>(), [orphan_id, middle_id, first_id, init]);
    // A later process with the number of the ended one is no ancestor of the orphan.
    world.set_next_id(first.0);
    let reused = world.spawn(Pid(1), Uid(1));
    let reused_id = world.processes[&reused].id;
    assert_eq!(reused, first);
    assert!(world.lineage(orphan_id).all(|ancestor| ancestor != reused_id));
}

#[test]
fn numbers_are_reused_and_start_times_are_not() {
    let mut world = SimMachine::new(&cpu_set("0"));
    let mut seen = BTreeMap::new();
    let mut reused = 0;
    for _ in 0..1000 {
        let pid = world.spawn(Pid(1), Uid(1));
        let start = world.processes[&pid].id.start;
        reused += usize::from(seen.insert(pid, start).is_some_and(|before| before != start));
        world.exit_process(pid);
    }
    assert!(reused > 500, "{reused}");
}

#[test]
fn a_mask_is_cut_to_the_cpuset_and_to_what_is_on_and_comes_back() {
    let mut world = SimMachine::new(&cpu_set("0-7"));
    let pid = world.spawn(Pid(1), Uid(1));
    world.cpusets.insert("/job".to_owned(), cpu_set("2-5"));
    world.move_process(pid, "/job/step");
    assert_eq!(world.effective_mask_in("/job/step", &cpu_set("4-7")).to_string(), "4-5");
    assert!(!world.request_mask_as_pjw(pid, Tid(pid.0), &cpu_set("6-7")), "EINVAL");
    world.toggle_pu(Pu(4));
    assert_eq!(world.effective_mask_in("/job/step", &cpu_set("4-7")).to_string(), "5");
    world.toggle_pu(Pu(5));
    assert_eq!(world.effective_mask_in("/job/step", &cpu_set("4-7")).to_string(), "2-3");
    world.toggle_pu(Pu(4));
    assert_eq!(world.effective_mask_in("/job/step", &cpu_set("4-7")).to_string(), "4");
}

#[test]
fn a_busy_thread_in_a_frozen_cgroup_does_not_run_until_it_is_thawed() {
    let mut world = SimMachine::new(&cpu_set("0-7"));
    let pid = world.spawn(Pid(1), Uid(1));
    world.move_process(pid, "/job/step");
    world.processes.get_mut(&pid).unwrap().threads.values_mut().for_each(|thread| thread.is_busy = true);
    let run_ns = |world: &SimMachine| world.processes[&pid].run_ns();
    world.advance(5);
    let spec = CpusetSpec { frozen: true, idle: true, ..CpusetSpec::from_cpus(cpu_set("0")) };
    world.set_frozen_and_idle("/job", &spec);
    world.advance(7);
    assert_eq!(run_ns(&world), 5);
    assert!(world.is_frozen(&world.processes[&pid]) && world.has_idle_priority(&world.processes[&pid]));
    world.thaw("/job");
    world.advance(11);
    assert_eq!(run_ns(&world), 16);
}

/// For how long a thread has run on a machine.
#[derive(Debug, Default)]
struct BusyTime(Duration);

impl TimeObserver for BusyTime {
    fn record_period(&mut self, world: &SimMachine, period: Duration) {
        let mut threads = world.processes.values().flat_map(|process| process.threads.values());
        self.0 += if threads.any(|thread| thread.is_busy) { period } else { Duration::ZERO };
    }
}

#[test]
fn an_observer_sees_what_runs_whenever_time_passes() {
    let mut world = SimMachine::new(&cpu_set("0-7"));
    let observer = Arc::new(Mutex::new(BusyTime::default()));
    world.observer = Some(observer.clone());
    let set_busy = |world: &mut SimMachine, is_busy: bool| {
        let init = world.processes.get_mut(&Pid(1)).unwrap();
        init.threads.values_mut().for_each(|thread| thread.is_busy = is_busy);
    };
    world.advance(5);
    set_busy(&mut world, true);
    world.advance(7);
    set_busy(&mut world, false);
    world.advance(11);
    assert_eq!(observer.lock().unwrap().0, Duration::from_nanos(7));
}
