//! A process leaves a provision, and forks a child before it is moved out of the cpuset. The child does not stay there.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use pjw_core::ports::MachineInterface;
use pjw_core::scan::{ScanRequest, ScanScope};

use super::*;

const SESSION: &str = "/user.slice/session-2.scope";

/// Makes the scan `first`, if there is one, and the scans that the decisions request.
fn run_scans(m: &mut Machine, first: Option<ScanRequest>) {
    let mut next = first;
    for _ in 0..20 {
        let Some(scan) = next.take() else { return };
        next = m.cycle(&scan, &[]).next_scan;
    }
    panic!("20 scans were not enough");
}

/// The scan because of process events: it reads nothing but the processes that had an event.
fn event_scan(m: &mut Machine) -> ScanRequest {
    let pids = m.state.lineage.scan_queue.take_urgent_pids();
    ScanRequest {
        scope: ScanScope::Partial(pids.clone()),
        pids_to_read_threads_of: pids,
        active_threads: BTreeMap::new(),
        cgroups: BTreeSet::new(),
        idle_watch: Arc::default(),
    }
}

#[test]
fn a_child_that_a_leaving_process_forks_before_its_move_is_moved_after_its_fork_event() {
    for (affinity_persists, uid) in [(false, 0), (true, 0), (false, 33), (true, 33)] {
        let mut m = machine_with_cpusets(affinity_persists);
        m.state.fork_events_complete_since = Some(Nanos(0));
        {
            let mut process = m.spawn(11, 1, uid);
            process.cgroup = SESSION.to_owned();
            process.comm = Comm::from("batch");
        }
        provision(&mut m, "web", 2, rule("comm=batch")).unwrap();
        let inside = m.process(11).cgroup.clone();
        assert_ne!(inside, SESSION);
        m.advance(SECOND);
        let snapshot = m.scan();
        let narrowed = Provision { rule: rule("comm=nginx"), from_config: false };
        let narrow = ProvisionCommand { job: job("web"), cores: 2, provision: narrowed, caller: ROOT };
        let decision = m.decide(&snapshot, &[Command::Provision(narrow)]);
        // After the scan that found its parent, and before the move of its parent.
        let at = Nanos(m.now());
        m.spawn(12, 11, uid);
        let actions = &decision.plan.cpuset_actions;
        let outcomes = m.node.change_cpusets(actions, Duration::MAX);
        let outcomes = actions.iter().zip(&outcomes);
        outcomes.for_each(|(action, outcome)| m.state.cpusets.record_outcome(action, outcome));
        decision.plan.mask_actions.iter().for_each(|action| m.carry_out(action));
        run_scans(&mut m, decision.next_scan.clone());
        let cgroups = [11, 12].map(|pid| m.process(pid).cgroup.clone());
        assert_eq!(cgroups, [SESSION, inside.as_str()], "no scan has read the child");
        let fork = ProcessEvent::Fork { parent: Pid(11), creator: Tid(11), child: Pid(12), at };
        m.state.apply_process_events(&[fork]);
        let scan = event_scan(&mut m);
        assert_eq!(scan.scope, ScanScope::Partial(BTreeSet::from([Pid(12)])));
        run_scans(&mut m, Some(scan));
        for _ in 0..2 {
            let cgroups = [11, 12].map(|pid| m.process(pid).cgroup.clone());
            assert_eq!(cgroups, [SESSION, SESSION], "{affinity_persists} {uid}");
            assert_eq!([11, 12].map(|pid| m.member(pid)), ["-", "-"]);
            m.advance(SECOND);
            m.settle();
        }
        assert_eq!([11, 12].map(|pid| m.effective_mask(pid, pid)), ["0-7", "0-7"]);
        assert_eq!(m.grant("web"), "0-1");
    }
}
