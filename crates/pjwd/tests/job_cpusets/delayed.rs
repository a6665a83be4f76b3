//! Changes of cpusets that take longer than a cycle waits: masks keep the job on its cores until they are complete.

use super::*;

const JOB_CPUSET: &str = "/pjw/a";

/// A node without systemd, with one process. Each change of a cpuset is delayed until [`Node::finish_changes`] is
/// called.
fn node_with_delayed_changes() -> (Node, Pid) {
    let mut node = Node::new(CpusetHierarchy::Unified);
    let pid = node.spawn(Pid(1), "/");
    node.warden.machine_interface_mut().hold_cpuset_changes();
    (node, pid)
}

impl Node {
    /// Completes the delayed changes of cpusets, and runs the two cycles that read their outcomes.
    fn finish_changes(&mut self) {
        self.warden.machine_interface_mut().finish_cpuset_changes();
        for _ in 0..2 {
            // This cycle scans only the processes that the changes concern.
            let scan = self.warden.state().scan_request(false);
            self.warden.run_cycle(scan, &[]);
        }
    }
}

#[test]
fn a_process_whose_move_is_delayed_is_kept_by_its_mask_and_the_status_says_so() {
    let (mut node, pid) = node_with_delayed_changes();
    node.assign("a", 2, &[pid]);
    assert_eq!((node.cgroup(pid), node.mask(pid).0), ("/".to_owned(), "0-1".to_owned()));
    let why = format!("{JOB_CPUSET} is not set up yet");
    assert_eq!(node.effective_enforcement("a"), EffectiveEnforcement::Affinity { why });
    let rest = node.cycle(&[]);
    assert!(
        rest.cpuset_outcomes.is_empty() && rest.mask_outcomes.is_empty(),
        "no action is repeated while the change is delayed: {rest:?}"
    );

    node.finish_changes();
    assert_eq!((node.cgroup(pid), node.cpuset(JOB_CPUSET)), (JOB_CPUSET.to_owned(), "0-1".to_owned()));
    assert_eq!(
        node.effective_enforcement("a"),
        EffectiveEnforcement::Cpuset { path: Some(JOB_CPUSET.to_owned()) }
    );
    node.release("a");
    assert_eq!((node.cgroup(pid), node.mask(pid).1), ("/".to_owned(), "0-7".to_owned()));
    assert!(node.world().cpusets.is_empty() && node.warden.state().processes_to_restore.is_empty());
}

#[test]
fn no_mask_of_a_job_is_changed_before_its_delayed_partition_is_complete() {
    // The kernel would refuse the mask: the PUs of a partition belong to no other cgroup.
    let (mut node, pid) = node_with_delayed_changes();
    let command = AssignCommand { isolated: Some(true), ..assign_command("a", 2, &[pid]) };
    let report = node.cycle(&[Command::Assign(command)]);
    assert!(report.replies[0].is_ok() && report.mask_outcomes.is_empty(), "{report:?}");
    assert_eq!(node.mask(pid).0, "0-7");
    assert!(node.cycle(&[]).mask_outcomes.is_empty());
    let why = "/pjw-a is not set up yet".to_owned();
    assert_eq!(node.effective_enforcement("a"), EffectiveEnforcement::NotYet { why });
    assert_eq!(
        node.explain("a")[2],
        "its processes may run elsewhere until the kernel has completed the isolated partition: /pjw-a is not set up yet"
    );

    node.finish_changes();
    let path = Some("/pjw-a".to_owned());
    assert_eq!(node.effective_enforcement("a"), EffectiveEnforcement::Cpuset { path });
    // The kernel balances no threads in a partition, so that pjwd pins each.
    assert_eq!((node.cgroup(pid), node.mask(pid).0), ("/pjw-a".to_owned(), "0".to_owned()));
    assert_eq!(node.world().isolated_partitions, BTreeSet::from(["/pjw-a".to_owned()]));
}

#[test]
fn a_child_of_a_process_whose_move_is_delayed_is_kept_by_its_mask_and_moved_later() {
    let (mut node, pid) = node_with_delayed_changes();
    node.assign("a", 2, &[pid]);
    let child = node.world().spawn(pid, ALICE);
    node.cycle(&[]);
    assert_eq!((node.cgroup(child), node.mask(child).0), ("/".to_owned(), "0-1".to_owned()));
    node.finish_changes();
    assert_eq!([node.cgroup(pid), node.cgroup(child)], [JOB_CPUSET, JOB_CPUSET]);
}

#[test]
fn a_job_that_is_released_while_its_move_is_delayed_leaves_no_cpuset_and_no_changed_mask() {
    for original in ["0-7", "5-6"] {
        let (mut node, pid) = node_with_delayed_changes();
        assert!(node.bind(pid, original));
        node.assign("a", 2, &[pid]);
        node.release("a");
        assert_eq!(node.mask(pid).0, original, "the mask is restored before the cpuset is changed");
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
fn a_process_is_moved_back_later_if_the_cpuset_changes_of_a_release_are_delayed() {
    let mut node = Node::new(CpusetHierarchy::Unified);
    let pid = node.spawn(Pid(1), "/");
    node.assign("a", 2, &[pid]);
    node.warden.machine_interface_mut().hold_cpuset_changes();
    node.release("a");
    assert_eq!(node.cgroup(pid), JOB_CPUSET);
    node.assign("b", 3, &[]);
    node.finish_changes();
    assert_eq!((node.cgroup(pid), node.mask(pid).0), ("/".to_owned(), "0-7".to_owned()));
    assert_eq!(node.cpuset(JOB_CPUSET), "-");
}

#[test]
fn a_change_that_was_delayed_when_the_daemon_was_killed_is_made_by_the_next_daemon() {
    let (mut node, pid) = node_with_delayed_changes();
    assert!(node.bind(pid, "5-6"));
    node.assign("a", 2, &[pid]);
    node.restart_daemon_with(EnforcementMethod::Auto);
    node.cycle(&[]);
    assert_eq!(node.cgroup(pid), JOB_CPUSET);
    node.release("a");
    assert_eq!((node.cgroup(pid), node.mask(pid).0), ("/".to_owned(), "5-6".to_owned()));
}

#[test]
fn masks_keep_a_job_if_the_kernel_refuses_its_delayed_cpuset_change() {
    let (mut node, pid) = node_with_delayed_changes();
    node.assign("a", 2, &[pid]);
    node.world().without_cpuset_controller.insert(JOB_CPUSET.to_owned());
    node.finish_changes();
    assert_eq!(node.mask(pid).0, "0-1");
    let why = "its controller is switched off".to_owned();
    assert_eq!(node.effective_enforcement("a"), EffectiveEnforcement::Affinity { why });
}

/// A node with a kernel before 6.2, and a process that requested PU 1.
fn node_with_old_kernel() -> (Node, Pid) {
    let node = Node::on_older_kernel(EnforcementMethod::Auto);
    let pid = node.spawn(Pid(1), "/");
    assert!(node.bind(pid, "1"));
    (node, pid)
}

#[test]
fn a_released_process_keeps_its_mask_in_a_delayed_move_on_an_older_kernel() {
    let (mut node, pid) = node_with_old_kernel();
    node.warden.machine_interface_mut().hold_cpuset_changes();
    node.assign("a", 2, &[pid]);
    node.release("a");
    // The first change makes the cpuset. The move of the process follows later.
    node.warden.machine_interface_mut().finish_next_cpuset_change();
    node.cycle(&[]);
    node.cycle(&[]);
    node.finish_changes();
    node.cycle(&[]);
    assert_eq!((node.cgroup(pid), node.mask(pid).0), ("/".to_owned(), "1".to_owned()));
    assert!(node.warden.state().processes_to_restore.is_empty());
}

#[test]
fn a_released_process_keeps_its_mask_in_the_delayed_removal_of_its_cpuset_on_an_older_kernel() {
    let (mut node, pid) = node_with_old_kernel();
    node.assign("a", 2, &[pid]);
    let second = node.spawn(Pid(1), "/");
    node.warden.machine_interface_mut().hold_cpuset_changes();
    node.assign("a", 2, &[second]);
    node.release("a");
    assert_eq!(node.cgroup(pid), JOB_CPUSET, "the removal waits for the move of the other process");
    node.finish_changes();
    node.cycle(&[]);
    node.cycle(&[]);
    assert_eq!((node.cgroup(pid), node.mask(pid).0), ("/".to_owned(), "1".to_owned()));
    assert!(node.warden.state().processes_to_restore.is_empty());
}

#[test]
fn a_process_that_another_program_moves_before_systemd_does_returns_to_the_cgroup_of_that_move() {
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
fn a_process_whose_move_back_is_delayed_joins_the_cpuset_of_its_next_job_after_it() {
    let mut node = Node::new(CpusetHierarchy::Unified);
    let pid = node.spawn(Pid(1), "/");
    node.assign("a", 2, &[pid]);
    node.warden.machine_interface_mut().hold_cpuset_changes();
    node.release("a");
    node.assign("b", 3, &[pid]);
    node.warden.machine_interface_mut().finish_cpuset_changes();
    let mut reported_events = Vec::new();
    for _ in 0..4 {
        reported_events.extend(events(&node.cycle(&[])));
    }
    assert_eq!((node.cgroup(pid), node.cpuset(JOB_CPUSET)), ("/pjw/b".to_owned(), "-".to_owned()));
    assert!(
        !reported_events.contains(&EventKind::Stray),
        "no other program moved the process: {reported_events:?}"
    );
    node.release("b");
    assert_eq!((node.cgroup(pid), node.mask(pid).0), ("/".to_owned(), "0-7".to_owned()));
}
