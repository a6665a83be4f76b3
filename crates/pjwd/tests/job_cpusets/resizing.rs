//! Cpusets that grow, shrink and move around threads that had set their own affinity mask before.

use super::*;

/// A process of alice's login that has bound itself to PU 5, in a job of one core. `affinity_persists` selects the
/// kernel.
fn bound_before(affinity_persists: bool) -> (Node, Pid) {
    let mut node = Node::with(
        CpusetSupport { hierarchy: CpusetHierarchy::Unified, affinity_persists, ..CpusetSupport::default() },
        EnforcementMethod::Auto,
    );
    let pid = node.spawn(Pid(1), LOGIN);
    assert!(node.bind(pid, "5"));
    node.assign("a", 1, &[pid]);
    node.cycle(&[]);
    assert_eq!(node.mask(pid).0, "0", "all that its job has");
    (node, pid)
}

#[test]
fn a_binding_from_before_lasts_while_the_job_grows() {
    for affinity_persists in [true, false] {
        let (mut node, pid) = bound_before(affinity_persists);
        for (cores, where_it_runs) in [(2, "1"), (8, "5"), (1, "0"), (8, "5")] {
            node.assign("a", cores, &[]);
            node.cycle(&[]);
            assert_eq!(node.mask(pid).0, where_it_runs, "on {cores} cores");
        }
        node.assign("a", 1, &[]);
        node.assign("a", 3, &[]);
        node.release("a");
        assert_eq!(node.mask(pid), ("5".into(), "5".into()));
    }
}

#[test]
fn a_binding_from_before_lasts_while_the_job_moves() {
    for affinity_persists in [true, false] {
        let (mut node, pid) = bound_before(affinity_persists);
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
fn a_binding_from_before_lasts_while_a_core_of_the_job_is_off() {
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
        assert_eq!(node.mask(pid).0, "1", "as before");
        node.release("a");
        assert_eq!(
            node.mask(pid),
            ("5".into(), "5".into()),
            "on a kernel that remembers masks: {affinity_persists}"
        );
    }
}

#[test]
fn a_binding_from_before_lasts_when_a_login_sweeps_its_process_out() {
    for affinity_persists in [true, false] {
        let (mut node, pid) = bound_before(affinity_persists);
        node.world().move_process(pid, LOGIN);
        let shown = if affinity_persists { "5" } else { "0-7" };
        assert_eq!(node.mask(pid).0, shown, "a kernel that remembers masks: {affinity_persists}");
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
