//! Changes of cpusets that take long: masks keep the job meanwhile, and nothing is lost.

use super::*;

const WALL: &str = "/pjw/a";

/// A node without systemd, with a process. Each change of a cpuset is delayed until [`Node::finish_changes`].
fn slow_node() -> (Node, Pid) {
    let mut node = Node::new(CpusetHierarchy::Unified);
    let pid = node.spawn(Pid(1), "/");
    node.warden.machine_interface_mut().hold_cpuset_changes();
    (node, pid)
}

impl Node {
    /// The kernel completes the delayed changes. The next cycles see what became of them.
    fn finish_changes(&mut self) {
        self.warden.machine_interface_mut().finish_cpuset_changes();
        for _ in 0..2 {
            // A cycle that scans only what the changes concern.
            let scan = self.warden.state().scan_request(false);
            self.warden.run_cycle(scan, &[]);
        }
    }
}

#[test]
fn a_process_that_is_not_moved_yet_is_kept_by_its_mask_and_the_status_says_so() {
    let (mut node, pid) = slow_node();
    node.assign("a", 2, &[pid]);
    assert_eq!((node.cgroup(pid), node.mask(pid).0), ("/".to_owned(), "0-1".to_owned()));
    let why = format!("{WALL} is not set up yet");
    assert_eq!(node.effective_enforcement("a"), EffectiveEnforcement::Affinity { why });
    let rest = node.cycle(&[]);
    assert!(
        rest.cpuset_outcomes.is_empty() && rest.mask_outcomes.is_empty(),
        "nothing is done twice: {rest:?}"
    );

    node.finish_changes();
    assert_eq!((node.cgroup(pid), node.cpuset(WALL)), (WALL.to_owned(), "0-1".to_owned()));
    assert_eq!(node.effective_enforcement("a"), EffectiveEnforcement::Cpuset { path: Some(WALL.to_owned()) });
    node.release("a");
    assert_eq!((node.cgroup(pid), node.mask(pid).1), ("/".to_owned(), "0-7".to_owned()));
    assert!(node.world().cpusets.is_empty() && node.warden.state().processes_to_restore.is_empty());
}

#[test]
fn a_child_of_a_process_that_is_not_moved_yet_is_moved_later() {
    let (mut node, pid) = slow_node();
    node.assign("a", 2, &[pid]);
    let child = node.world().spawn(pid, ALICE);
    node.cycle(&[]);
    assert_eq!((node.cgroup(child), node.mask(child).0), ("/".to_owned(), "0-1".to_owned()));
    node.finish_changes();
    assert_eq!([node.cgroup(pid), node.cgroup(child)], [WALL, WALL]);
}

#[test]
fn a_job_that_is_released_before_its_process_was_moved_leaves_nothing() {
    for original in ["0-7", "5-6"] {
        let (mut node, pid) = slow_node();
        assert!(node.bind(pid, original));
        node.assign("a", 2, &[pid]);
        node.release("a");
        assert_eq!(node.mask(pid).0, original, "the mask does not wait for the cpuset");
        // The delayed changes put the process into the cpuset of the released job.
        node.finish_changes();
        node.cycle(&[]);
        assert_eq!((node.cgroup(pid), node.mask(pid).0), ("/".to_owned(), original.to_owned()));
        assert!(node.world().cpusets.is_empty());
        let state = node.warden.state();
        assert!(state.cpusets.paths().next().is_none() && state.processes_to_restore.is_empty());
        assert_eq!(state.journaled_masks().count(), 0);
    }
}

#[test]
fn a_process_is_moved_back_later_if_that_takes_long() {
    let mut node = Node::new(CpusetHierarchy::Unified);
    let pid = node.spawn(Pid(1), "/");
    node.assign("a", 2, &[pid]);
    node.warden.machine_interface_mut().hold_cpuset_changes();
    node.release("a");
    assert_eq!(node.cgroup(pid), WALL);
    node.assign("b", 3, &[]);
    node.finish_changes();
    assert_eq!((node.cgroup(pid), node.mask(pid).0), ("/".to_owned(), "0-7".to_owned()));
    assert_eq!(node.cpuset(WALL), "-");
}

#[test]
fn a_daemon_that_is_killed_while_a_change_is_delayed_has_a_successor_that_makes_it() {
    let (mut node, pid) = slow_node();
    assert!(node.bind(pid, "5-6"));
    node.assign("a", 2, &[pid]);
    node.succeeded_by(EnforcementMethod::Auto);
    node.cycle(&[]);
    assert_eq!(node.cgroup(pid), WALL);
    node.release("a");
    assert_eq!((node.cgroup(pid), node.mask(pid).0), ("/".to_owned(), "5-6".to_owned()));
}

#[test]
fn a_delayed_change_that_is_refused_leaves_the_job_to_masks() {
    let (mut node, pid) = slow_node();
    node.assign("a", 2, &[pid]);
    node.world().without_cpuset_controller.insert(WALL.to_owned());
    node.finish_changes();
    assert_eq!(node.mask(pid).0, "0-1");
    let why = "its controller is switched off".to_owned();
    assert_eq!(node.effective_enforcement("a"), EffectiveEnforcement::Affinity { why });
}

/// A node with a kernel before 6.2, and a process that requested PU 1.
fn old_node() -> (Node, Pid) {
    let cpuset_support = CpusetSupport {
        hierarchy: CpusetHierarchy::Unified,
        affinity_persists: false,
        ..CpusetSupport::default()
    };
    let node = Node::with(cpuset_support, EnforcementMethod::Auto);
    let pid = node.spawn(Pid(1), "/");
    assert!(node.bind(pid, "1"));
    (node, pid)
}

#[test]
fn a_released_process_gets_the_mask_again_that_an_older_kernel_forgets_in_a_later_move() {
    let (mut node, pid) = old_node();
    node.warden.machine_interface_mut().hold_cpuset_changes();
    node.assign("a", 2, &[pid]);
    node.release("a");
    // The cpuset is made first. The move of the process is still to come.
    node.warden.machine_interface_mut().finish_next_cpuset_change();
    node.cycle(&[]);
    node.cycle(&[]);
    node.finish_changes();
    node.cycle(&[]);
    assert_eq!((node.cgroup(pid), node.mask(pid).0), ("/".to_owned(), "1".to_owned()));
    assert!(node.warden.state().processes_to_restore.is_empty());
}

#[test]
fn a_released_process_in_a_cpuset_that_is_removed_later_gets_the_mask_again_that_an_older_kernel_forgets() {
    let (mut node, pid) = old_node();
    node.assign("a", 2, &[pid]);
    let second = node.spawn(Pid(1), "/");
    node.warden.machine_interface_mut().hold_cpuset_changes();
    node.assign("a", 2, &[second]);
    node.release("a");
    assert_eq!(node.cgroup(pid), WALL, "the removal waits for the move of the other process");
    node.finish_changes();
    node.cycle(&[]);
    node.cycle(&[]);
    assert_eq!((node.cgroup(pid), node.mask(pid).0), ("/".to_owned(), "1".to_owned()));
    assert!(node.warden.state().processes_to_restore.is_empty());
}

#[test]
fn a_process_that_another_program_moves_before_systemd_does_returns_to_that_cgroup() {
    let mut node = Node::new(CpusetHierarchy::Systemd);
    let pid = node.spawn(Pid(1), "/");
    node.warden.machine_interface_mut().hold_cpuset_changes();
    node.assign("a", 2, &[pid]);
    node.world().move_process(pid, LOGIN);
    node.cycle(&[]);
    node.finish_changes();
    assert_eq!(node.cgroup(pid), "/pjw.slice/pjw-a.scope");
    node.release("a");
    assert_eq!(node.cgroup(pid), LOGIN);
}

#[test]
fn a_process_that_is_still_being_moved_back_joins_the_cpuset_of_its_next_job_after_that() {
    let mut node = Node::new(CpusetHierarchy::Unified);
    let pid = node.spawn(Pid(1), "/");
    node.assign("a", 2, &[pid]);
    node.warden.machine_interface_mut().hold_cpuset_changes();
    node.release("a");
    node.assign("b", 3, &[pid]);
    node.warden.machine_interface_mut().finish_cpuset_changes();
    let mut reported = Vec::new();
    for _ in 0..4 {
        reported.extend(events(&node.cycle(&[])));
    }
    assert_eq!((node.cgroup(pid), node.cpuset(WALL)), ("/pjw/b".to_owned(), "-".to_owned()));
    assert!(!reported.contains(&EventKind::Stray), "no other program moved it: {reported:?}");
    node.release("b");
    assert_eq!((node.cgroup(pid), node.mask(pid).0), ("/".to_owned(), "0-7".to_owned()));
}
