//! Job cpusets that grow, shrink and move, around a thread that had set its affinity mask before the job began.

use super::*;

/// A node with a job of one core, whose process had bound itself to PU 5 before. `affinity_persists` is whether the
/// kernel remembers requested masks, as Linux does since 6.2.
fn node_with_bound_process(affinity_persists: bool) -> (Node, Pid) {
    let mut node = Node::with(
        CpusetSupport { hierarchy: CpusetHierarchy::Unified, affinity_persists, ..CpusetSupport::default() },
        EnforcementMethod::Auto,
    );
    let pid = node.spawn(Pid(1), LOGIN);
    assert!(node.bind(pid, "5"));
    node.assign("a", 1, &[pid]);
    node.cycle(&[]);
    assert_eq!(node.mask(pid).0, "0", "the only PU of the job");
    (node, pid)
}

#[test]
fn a_binding_from_before_the_job_is_kept_while_the_job_is_resized() {
    for affinity_persists in [true, false] {
        let (mut node, pid) = node_with_bound_process(affinity_persists);
        for (cores, expected_mask) in [(2, "1"), (8, "5"), (1, "0"), (8, "5")] {
            node.assign("a", cores, &[]);
            node.cycle(&[]);
            assert_eq!(node.mask(pid).0, expected_mask, "on {cores} cores");
        }
        node.assign("a", 1, &[]);
        node.assign("a", 3, &[]);
        node.release("a");
        assert_eq!(node.mask(pid), ("5".into(), "5".into()));
    }
}

#[test]
fn a_binding_from_before_the_job_is_kept_while_the_job_moves_to_other_cores() {
    for affinity_persists in [true, false] {
        let (mut node, pid) = node_with_bound_process(affinity_persists);
        for cpus in ["1", "1-2", "2", "0-3", "7"] {
            let cpu_request = Some(CpuRequest::Exactly(cpu_set(cpus)));
            let report =
                node.cycle(&[Command::Assign(AssignCommand { cpu_request, ..assign_command("a", 1, &[]) })]);
            assert!(report.replies.iter().all(Result::is_ok), "{:?}", report.replies);
            node.cycle(&[]);
            assert!(cpu_set(&node.mask(pid).0).is_subset(&cpu_set(cpus)), "{:?} on {cpus}", node.mask(pid));
        }
        node.release("a");
        assert_eq!(node.mask(pid), ("5".into(), "5".into()));
    }
}

#[test]
fn a_binding_from_before_the_job_is_kept_while_a_core_of_the_job_is_offline() {
    for affinity_persists in [true, false] {
        let mut node = Node::with(
            CpusetSupport {
                hierarchy: CpusetHierarchy::Unified,
                affinity_persists,
                ..CpusetSupport::default()
            },
            EnforcementMethod::Auto,
        );
        let pid = node.spawn(Pid(1), LOGIN);
        assert!(node.bind(pid, "5"));
        node.assign("a", 2, &[pid]);
        node.assign("rest", 6, &[]);
        node.cycle(&[]);
        for online in ["0,2-7", "0-7", "1-7", "0-7"] {
            node.world().set_online_pus(&cpu_set(online));
            node.cycle(&[]);
            node.world().advance(60_000_000_000);
            node.cycle(&[]);
        }
        assert_eq!(node.mask(pid).0, "1", "the same PU as before hotplug");
        node.release("a");
        assert_eq!(
            node.mask(pid),
            ("5".into(), "5".into()),
            "on a kernel that remembers masks: {affinity_persists}"
        );
    }
}

#[test]
fn a_binding_from_before_the_job_is_kept_when_a_login_moves_the_process_out_of_the_cpuset() {
    for affinity_persists in [true, false] {
        let (mut node, pid) = node_with_bound_process(affinity_persists);
        node.world().move_process(pid, LOGIN);
        let mask_after_move = if affinity_persists { "5" } else { "0-7" };
        assert_eq!(node.mask(pid).0, mask_after_move, "a kernel that remembers masks: {affinity_persists}");
        for _ in 0..3 {
            node.cycle(&[]);
        }
        assert_eq!(node.mask(pid).0, "0");
        node.release("a");
        assert_eq!(
            node.mask(pid),
            ("5".into(), "5".into()),
            "on a kernel that remembers masks: {affinity_persists}"
        );
    }
}
