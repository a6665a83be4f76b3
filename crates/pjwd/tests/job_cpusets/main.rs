//! Job cpusets in whole cycles of the daemon on the simulated kernel: the processes that are moved, the cpusets and
//! masks that are written, and what a release undoes.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs, unreachable_pub)] // a test may fail

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Deref;
use std::sync::Arc;

use pjw_core::command::{AssignCommand, Caller, Command};
use pjw_core::cpuset::Pu;
use pjw_core::cpuset_group::{CpusetHierarchy, CpusetSupport, EnforcementMethod};
use pjw_core::cpusets::{EffectiveEnforcement, effective_enforcement};
use pjw_core::event::EventKind;
use pjw_core::ids::{Pid, Tid, Uid};
use pjw_core::job::{CpuRequest, GrantedBy};
use pjw_core::policy::Policy;
use pjw_core::scan::{ScanRequest, ScanScope};
use pjw_core::state::WardenState;
use pjw_core::testing::{cpu_set, job, regular_topology};
use pjw_sim::faults::Faults;
use pjw_sim::journal::SimJournal;
use pjw_sim::node::SimMachineInterface;
use pjw_sim::testing::{ScriptedMachine, assign_command};
use pjwd::warden::{CycleReport, Warden};

mod between_scans;
mod delayed;
mod full_disk;
mod older_kernels;
mod resizing;
mod unenforceable;

const ALICE: Uid = Uid(1001);
const LOGIN: &str = "/user.slice/user-1001.slice/session-1.scope";
const JOB_7: &str = "/system.slice/slurmstepd.scope/job_7";

/// A node with two packages of four cores, and its daemon. The methods of [`ScriptedMachine`] change the node.
struct Node {
    kernel: ScriptedMachine,
    journal: SimJournal,
    policy: Policy,
    warden: Warden<SimMachineInterface, SimJournal>,
}

impl Deref for Node {
    type Target = ScriptedMachine;

    fn deref(&self) -> &ScriptedMachine {
        &self.kernel
    }
}

impl Node {
    fn new(cpusets: CpusetHierarchy) -> Self {
        Self::with(
            CpusetSupport { hierarchy: cpusets, affinity_persists: true, ..CpusetSupport::default() },
            EnforcementMethod::Auto,
        )
    }

    /// A node with cgroup v2 and a kernel before 6.2, which forgets the requested masks of a cpuset that changes.
    fn on_older_kernel(enforcement: EnforcementMethod) -> Self {
        let hierarchy = CpusetHierarchy::Unified;
        Self::with(
            CpusetSupport { hierarchy, affinity_persists: false, ..CpusetSupport::default() },
            enforcement,
        )
    }

    fn with(cpuset_support: CpusetSupport, enforcement: EnforcementMethod) -> Self {
        let kernel = ScriptedMachine::new(regular_topology(2, 1, 1, 4, 1).cpus(), cpuset_support.clone());
        let journal = SimJournal::new(Faults::none());
        let policy = Policy { cpuset_support, enforcement, ..Policy::default() };
        let warden = warden(&kernel, &journal, &policy);
        Self { kernel, journal, policy, warden }
    }

    /// Replaces the daemon by a new one with `enforcement`, as after a kill.
    fn restart_daemon_with(&mut self, enforcement: EnforcementMethod) {
        self.policy.enforcement = enforcement;
        self.world().processes.values_mut().for_each(|process| process.attributes_changed = true);
        self.warden = warden(&self.kernel, &self.journal, &self.policy);
    }

    fn spawn(&self, parent: Pid, cgroup: &str) -> Pid {
        let mut world = self.world();
        let pid = world.spawn(parent, ALICE);
        world.move_process(pid, cgroup);
        pid
    }

    /// Starts a process of the Slurm job 7.
    fn task_of_job_7(&self) -> Pid {
        let mut world = self.world();
        let stepd = world.spawn(Pid(1), Uid::ROOT);
        world.exec(stepd, "slurmstepd");
        world.move_process(stepd, &format!("{JOB_7}/step_0/slurm"));
        let task = world.spawn(stepd, ALICE);
        world.move_process(task, &format!("{JOB_7}/step_0/user/task_0"));
        let environ = &mut world.processes.get_mut(&task).unwrap().environ;
        environ.insert("SLURM_JOB_ID".to_owned(), "7".to_owned());
        environ.insert("SLURM_CPUS_ON_NODE".to_owned(), "2".to_owned());
        task
    }

    fn cycle(&mut self, commands: &[Command]) -> CycleReport {
        self.world().advance(1_000_000_000);
        let scan = self.warden.state().scan_request(true);
        self.warden.run_cycle(scan, commands)
    }

    fn assign(&mut self, job: &str, cores: u32, pids: &[Pid]) -> CycleReport {
        let report = self.cycle(&[Command::Assign(assign_command(job, cores, pids))]);
        assert!(report.replies.iter().all(Result::is_ok), "{:?}", report.replies);
        report
    }

    fn release(&mut self, id: &str) {
        let caller = Caller { uid: Uid::ROOT, is_admin: true };
        self.cycle(&[Command::Release { job: job(id), caller }]);
        self.cycle(&[]);
    }

    fn cgroup(&self, pid: Pid) -> String {
        self.process(pid.0).cgroup.clone()
    }

    fn cpuset(&self, path: &str) -> String {
        self.world().cpusets.get(path).map_or_else(|| "-".to_owned(), ToString::to_string)
    }

    /// The affinity mask of the first thread, and the mask that was requested for it.
    fn mask(&self, pid: Pid) -> (String, String) {
        let requested = self.process(pid.0).threads[&Tid(pid.0)].requested_mask.to_string();
        (self.kernel.effective_mask(pid.0, pid.0), requested)
    }

    /// The first thread of a process requests a mask. Returns whether the kernel accepts the request.
    fn bind(&self, pid: Pid, mask: &str) -> bool {
        self.request_mask(pid.0, pid.0, mask)
    }

    /// The sentences that `pjwctl explain` prints about a job.
    fn explain(&self, id: &str) -> Vec<String> {
        let state = self.warden.state();
        pjw_core::explain::explain_job(state, self.warden.policy(), &state.jobs[&job(id)])
    }

    fn effective_enforcement(&self, id: &str) -> EffectiveEnforcement {
        let state = self.warden.state();
        effective_enforcement(state, self.warden.policy(), &state.jobs[&job(id)])
    }
}

fn warden(
    kernel: &ScriptedMachine,
    journal: &SimJournal,
    policy: &Policy,
) -> Warden<SimMachineInterface, SimJournal> {
    let state = WardenState::new(regular_topology(2, 1, 1, 4, 1), &policy.housekeeping_cpus);
    let host = pjw_sources::LocalHost { name: "n1".to_owned(), flux_user: None };
    Warden::new(kernel.simulated_machine(), journal.clone(), state, journal.records(), policy.clone(), host)
}

fn events(report: &CycleReport) -> Vec<EventKind> {
    report.events.iter().map(|event| event.kind).collect()
}

#[test]
fn a_job_without_scheduler_is_moved_into_a_scope_and_no_mask_is_written() {
    let mut node = Node::new(CpusetHierarchy::Systemd);
    let pid = node.spawn(Pid(1), LOGIN);
    let child = node.spawn(pid, LOGIN);
    let report = node.assign("a", 2, &[pid]);
    let job_cpuset = "/pjw.slice/pjw-a.scope";
    assert_eq!([node.cgroup(pid), node.cgroup(child)], [job_cpuset, job_cpuset]);
    assert_eq!((node.cpuset(job_cpuset), node.mask(child)), ("0-1".into(), ("0-1".into(), "0-7".into())));
    assert!(report.mask_outcomes.is_empty(), "{:?}", report.mask_outcomes);
    assert_eq!(
        node.effective_enforcement("a"),
        EffectiveEnforcement::Cpuset { path: Some(job_cpuset.to_owned()) }
    );
    let rest = node.cycle(&[]);
    assert!(
        rest.cpuset_outcomes.is_empty() && rest.mask_outcomes.is_empty() && rest.events.is_empty(),
        "{rest:?}"
    );
}

#[test]
fn a_release_moves_processes_back_and_removes_the_cpuset() {
    for cpusets in [CpusetHierarchy::Systemd, CpusetHierarchy::Unified] {
        let mut node = Node::new(cpusets);
        let (one, two) = (node.spawn(Pid(1), LOGIN), node.spawn(Pid(1), "/"));
        assert!(node.bind(one, "5-6"));
        node.assign("a", 2, &[one, two]);
        let born_inside = node.world().spawn(one, ALICE);
        node.cycle(&[]);
        assert_eq!(node.cgroup(born_inside), node.cgroup(one));
        node.release("a");
        assert_eq!([node.cgroup(one), node.cgroup(born_inside), node.cgroup(two)], [LOGIN, LOGIN, "/"]);
        assert_eq!([node.mask(one).0, node.mask(two).0], ["5-6", "0-7"]);
        assert!(node.world().cpusets.is_empty());
        let state = node.warden.state();
        assert!(state.cpusets.paths().next().is_none() && state.processes_to_restore.is_empty());
        assert_eq!(state.journaled_masks().count(), 0);
    }
}

#[test]
fn a_process_born_in_a_cpuset_and_assigned_to_another_job_returns_to_the_original_cgroup_of_its_parent() {
    let mut node = Node::new(CpusetHierarchy::Systemd);
    let (one, two) = (node.spawn(Pid(1), LOGIN), node.spawn(Pid(1), "/"));
    node.assign("a", 2, &[one, two]);
    let parent = node.world().spawn(two, ALICE);
    let child = node.world().spawn(parent, ALICE);
    node.assign("b", 1, &[child]);
    node.cycle(&[]);
    assert_eq!(node.cgroup(child), "/pjw.slice/pjw-b.scope");
    node.release("a");
    node.release("b");
    assert_eq!(node.cgroup(child), "/");
}

#[test]
fn a_slurm_job_gets_its_cpuset_in_slurms_cgroup() {
    let mut node = Node::new(CpusetHierarchy::Systemd);
    let task = node.task_of_job_7();
    node.cycle(&[]);
    assert_eq!((node.cpuset(JOB_7), node.mask(task).0), ("0-1".into(), "0-1".into()));
    assert!(node.cgroup(task).starts_with(JOB_7));
    assert_eq!(
        node.warden.state().jobs[&job("slurm:7")].grant.as_ref().unwrap().granted_by,
        GrantedBy::Warden
    );
    node.release("slurm:7");
    assert_eq!((node.cpuset(JOB_7), node.mask(task).0), ("-".into(), "0-7".into()));
}

#[test]
fn a_cpuset_that_slurm_writes_becomes_the_grant_of_the_job() {
    let mut node = Node::new(CpusetHierarchy::Systemd);
    node.task_of_job_7();
    node.cycle(&[]);
    node.world().write_cpuset(JOB_7, Some(&cpu_set("4-5")));
    node.cycle(&[]);
    let rest = node.cycle(&[]);
    assert!(rest.cpuset_outcomes.is_empty(), "{:?}", rest.cpuset_outcomes);
    assert_eq!(node.cpuset(JOB_7), "4-5");
    let grant = node.warden.state().jobs[&job("slurm:7")].grant.clone().unwrap();
    assert_eq!((grant.cpus, grant.granted_by), (cpu_set("4-5"), GrantedBy::Scheduler));
    node.release("slurm:7");
    assert_eq!(node.cpuset(JOB_7), "4-5");
}

#[test]
fn a_job_cpuset_that_another_program_widens_is_narrowed_again() {
    let mut node = Node::new(CpusetHierarchy::Systemd);
    let pid = node.spawn(Pid(1), LOGIN);
    node.assign("a", 2, &[pid]);
    node.world().write_cpuset("/pjw.slice/pjw-a.scope", Some(&cpu_set("0-7")));
    let report = node.cycle(&[]);
    assert_eq!(
        (node.cpuset("/pjw.slice/pjw-a.scope"), events(&report)),
        ("0-1".into(), vec![EventKind::Repaired])
    );
}

#[test]
fn the_widened_cpuset_of_an_idle_job_is_narrowed_again_by_the_first_cycle_that_reads_it() {
    let mut node = Node::new(CpusetHierarchy::Systemd);
    let pid = node.spawn(Pid(1), LOGIN);
    node.assign("a", 2, &[pid]);
    node.cycle(&[]);
    node.world().write_cpuset("/pjw.slice/pjw-a.scope", Some(&cpu_set("0-7")));
    let scope = ScanScope::Partial(BTreeSet::new());
    let (threads_of, cgroups) = (BTreeSet::new(), BTreeSet::new());
    let (active_threads, idle_watch) = (BTreeMap::new(), Arc::default());
    let request =
        ScanRequest { scope, pids_to_read_threads_of: threads_of, active_threads, cgroups, idle_watch };
    let report = node.warden.run_cycle(request, &[]);
    assert_eq!(
        (node.cpuset("/pjw.slice/pjw-a.scope"), events(&report)),
        ("0-1".into(), vec![EventKind::Repaired])
    );
}

#[test]
fn a_process_that_a_login_moves_out_of_its_cpuset_is_reported_and_moved_back() {
    let mut node = Node::new(CpusetHierarchy::Systemd);
    let (pid, other) = (node.spawn(Pid(1), LOGIN), node.spawn(Pid(1), LOGIN));
    node.assign("a", 2, &[pid, other]);
    node.world().move_process(pid, "/user.slice/user-1001.slice/session-2.scope");
    let report = node.cycle(&[]);
    assert_eq!(events(&report), [EventKind::Stray, EventKind::Repaired]);
    assert_eq!(node.cgroup(pid), "/pjw.slice/pjw-a.scope");
    node.release("a");
    assert_eq!(
        node.cgroup(pid),
        "/user.slice/user-1001.slice/session-2.scope",
        "the cgroup to which the login had moved it"
    );
}

#[test]
fn a_process_in_a_service_stays_there_and_is_kept_by_masks_unless_pjwctl_run_started_it() {
    let service = "/system.slice/work.service";
    let mut node = Node::new(CpusetHierarchy::Systemd);
    let (in_service, started_by_run) = (node.spawn(Pid(1), service), node.spawn(Pid(1), service));
    node.assign("a", 2, &[in_service]);
    let run_command = AssignCommand { must_be_new: true, ..assign_command("b", 2, &[started_by_run]) };
    node.cycle(&[Command::Assign(run_command)]);
    assert_eq!([node.cgroup(in_service), node.cgroup(started_by_run)], [service, "/pjw.slice/pjw-b.scope"]);
    assert_eq!(node.mask(in_service), ("0-1".into(), "0-1".into()));
    let EffectiveEnforcement::Affinity { why } = node.effective_enforcement("a") else {
        panic!("{:?}", node.effective_enforcement("a"))
    };
    assert!(why.contains(service), "{why}");
}

#[test]
fn with_enforcement_affinity_the_next_daemon_removes_the_cpusets_and_keeps_the_cores() {
    let mut node = Node::new(CpusetHierarchy::Systemd);
    let pid = node.spawn(Pid(1), LOGIN);
    node.assign("a", 2, &[pid]);
    node.restart_daemon_with(EnforcementMethod::Affinity);
    node.cycle(&[]);
    assert_eq!((node.cgroup(pid), node.mask(pid)), (LOGIN.to_owned(), ("0-1".into(), "0-1".into())));
    node.restart_daemon_with(EnforcementMethod::Auto);
    node.cycle(&[]);
    assert_eq!((node.cgroup(pid), node.mask(pid).0), ("/pjw.slice/pjw-a.scope".to_owned(), "0-1".into()));
}

#[test]
fn without_cpusets_masks_keep_jobs_and_there_is_a_warning_if_cpusets_are_required() {
    let cpuset_support = CpusetSupport {
        hierarchy: CpusetHierarchy::Unavailable { why: "no controller here".to_owned() },
        affinity_persists: true,
        ..CpusetSupport::default()
    };
    for (enforcement, warns) in [(EnforcementMethod::Auto, false), (EnforcementMethod::Cpuset, true)] {
        let mut node = Node::with(cpuset_support.clone(), enforcement);
        let pid = node.spawn(Pid(1), LOGIN);
        let report = node.assign("a", 2, &[pid]);
        assert_eq!((node.mask(pid).0, node.cgroup(pid)), ("0-1".into(), LOGIN.to_owned()));
        assert_eq!(report.plan_warnings.iter().any(|plan_warnings| plan_warnings.code == "no-wall"), warns);
    }
}

#[test]
fn every_thread_of_an_isolated_job_is_pinned_because_the_kernel_does_not_balance_there() {
    let mut node = Node::new(CpusetHierarchy::Unified);
    let pid = node.spawn(Pid(1), "/");
    let others: Vec<Pid> = (0..3).map(|_| node.spawn(pid, "/")).collect();
    let isolated = AssignCommand { isolated: Some(true), ..assign_command("a", 2, &[pid]) };
    node.cycle(&[Command::Assign(isolated)]);
    node.cycle(&[]);
    let mut masks: Vec<String> = others.iter().chain([&pid]).map(|&pid| node.mask(pid).0).collect();
    masks.sort_unstable();
    assert_eq!(masks, ["0", "0", "1", "1"]);
    assert_eq!(node.cgroup(pid), "/pjw-a", "the parent of an isolated partition is the root cgroup");
    node.release("a");
    assert_eq!((node.mask(pid).0, node.cgroup(pid)), ("0-7".into(), "/".into()));
}

#[test]
fn a_pinned_thread_that_requests_all_cpus_stays_inside_and_is_reported() {
    let mut node = Node::new(CpusetHierarchy::Systemd);
    let pid = node.spawn(Pid(1), LOGIN);
    let child = node.spawn(pid, LOGIN);
    node.assign("a", 2, &[pid, child]);
    for pid in [pid, child] {
        node.world().processes.get_mut(&pid).unwrap().threads.get_mut(&Tid(pid.0)).unwrap().is_busy = true;
    }
    for _ in 0..4 {
        node.cycle(&[]);
    }
    assert_eq!(node.mask(pid).0, "0");
    assert!(node.bind(pid, "0-7"));
    assert_eq!(node.mask(pid).0, "0-1", "the cpuset limits the mask");
    let report = node.cycle(&[]);
    assert!(events(&report).contains(&EventKind::Violation), "{:?}", report.events);
    assert_eq!(node.mask(pid).0, "0");
}

#[test]
fn a_cpuset_of_slurm_with_every_pu_is_no_grant_for_a_released_job_while_a_core_is_offline() {
    let mut node = Node::new(CpusetHierarchy::Systemd);
    node.task_of_job_7();
    let pid = node.spawn(Pid(1), LOGIN);
    node.assign("a", 2, &[pid]);
    node.release("slurm:7");
    // The kernel fills the cpuset of a cgroup with processes like this, where it cannot be made empty.
    node.world().write_cpuset(JOB_7, Some(&cpu_set("0-7")));
    node.world().toggle_pu(Pu(7));
    node.cycle(&[]);
    let grant = node.warden.state().jobs[&job("a")].grant.clone();
    assert_eq!(grant.unwrap().granted_by, GrantedBy::Warden);
}

#[test]
fn an_adopted_service_manager_of_a_user_is_kept_by_masks_and_not_moved() {
    let mut node = Node::new(CpusetHierarchy::Systemd);
    node.policy.adopt_unassigned_processes = true;
    node.restart_daemon_with(EnforcementMethod::Auto);
    let place = "/user.slice/user-1001.slice/user@1001.service/init.scope";
    let (run, manager) = (node.spawn(Pid(1), LOGIN), node.spawn(Pid(1), place));
    let run_command = AssignCommand { must_be_new: true, ..assign_command("a", 2, &[run]) };
    node.cycle(&[Command::Assign(run_command)]);
    assert_eq!(node.cgroup(run), "/pjw.slice/pjw-a.scope");
    assert_eq!((node.cgroup(manager), node.mask(manager).0), (place.to_owned(), "0-1".into()));
}

#[test]
fn masks_keep_a_job_whose_scope_has_no_cpuset_controller_and_a_release_undoes_everything() {
    let path = "/pjw.slice/pjw-a.scope";
    for final_cgroup in [LOGIN, path] {
        let mut node = Node::new(CpusetHierarchy::Systemd);
        let pid = node.spawn(Pid(1), LOGIN);
        node.assign("a", 2, &[pid]);
        if final_cgroup == path {
            node.world().removed_cgroups.insert(LOGIN.to_owned());
        }
        node.world().without_cpuset_controller.insert(path.to_owned());
        assert_eq!(node.mask(pid).0, "0-7", "neither a cpuset nor a mask keeps it on the cores");
        node.cycle(&[]);
        let EffectiveEnforcement::Affinity { why } = node.effective_enforcement("a") else {
            panic!("{:?}", node.effective_enforcement("a"))
        };
        assert!(why.contains("switched off"), "{why}");
        node.cycle(&[]);
        assert_eq!(node.mask(pid), ("0-1".into(), "0-1".into()), "its mask keeps it on the cores");
        node.release("a");
        node.cycle(&[]);
        assert_eq!((node.mask(pid).0, node.cgroup(pid)), ("0-7".into(), final_cgroup.to_owned()));
        assert_eq!(node.warden.state().cpusets.paths().count(), 0);
    }
}

#[test]
fn a_cpuset_is_kept_while_systemd_does_not_answer_the_next_daemon() {
    let mut node = Node::new(CpusetHierarchy::Systemd);
    let pid = node.spawn(Pid(1), LOGIN);
    node.assign("a", 2, &[pid]);
    node.policy.cpuset_support.hierarchy =
        CpusetHierarchy::Unavailable { why: "systemd does not answer".to_owned() };
    node.restart_daemon_with(EnforcementMethod::Auto);
    let report = node.cycle(&[]);
    assert!(report.cpuset_outcomes.is_empty(), "{:?}", report.cpuset_outcomes);
    assert_eq!((node.cgroup(pid), node.mask(pid).0), ("/pjw.slice/pjw-a.scope".to_owned(), "0-1".into()));
    node.policy.cpuset_support.hierarchy = CpusetHierarchy::Systemd;
    node.restart_daemon_with(EnforcementMethod::Auto);
    node.release("a");
    assert_eq!((node.cgroup(pid), node.mask(pid).0), (LOGIN.to_owned(), "0-7".into()));
}

#[test]
fn unassigned_processes_of_a_user_with_several_jobs_are_excluded_from_all_granted_cores() {
    let mut node = Node::new(CpusetHierarchy::Systemd);
    node.policy.adopt_unassigned_processes = true;
    node.restart_daemon_with(EnforcementMethod::Auto);
    let (one, two) = (node.spawn(Pid(1), LOGIN), node.spawn(Pid(1), LOGIN));
    let unassigned = node.spawn(Pid(1), LOGIN);
    assert!(node.bind(unassigned, "0-5"));
    node.assign("a", 2, &[one]);
    assert_eq!(
        (node.cgroup(unassigned), node.mask(unassigned).0),
        ("/pjw.slice/pjw-a.scope".to_owned(), "0-1".into()),
        "the only job of the user adopts the process"
    );
    node.release("a");
    node.cycle(&[
        Command::Assign(assign_command("a", 2, &[one])),
        Command::Assign(assign_command("b", 2, &[two])),
    ]);
    let rest = node.cycle(&[]);
    assert!(rest.mask_outcomes.is_empty(), "{:?}", rest.mask_outcomes);
    assert_eq!((node.cgroup(unassigned), node.mask(unassigned).0), (LOGIN.to_owned(), "4-5".into()));
    node.release("a");
    node.release("b");
    assert_eq!(node.mask(unassigned).0, "0-5");
}
