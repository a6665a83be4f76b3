//! The decisions of pjw on a simulated machine, without the daemon: scans, decisions, and the actions of the kernel.

use std::cell::RefMut;
use std::collections::BTreeSet;
use std::ops::Deref;
use std::slice::from_ref;
use std::sync::Arc;
use std::time::Duration;

use pjw_core::audit::audit;
use pjw_core::command::{AssignCommand, Caller, Command, Reply};
use pjw_core::cpuset::CpuSet;
use pjw_core::cpuset_group::{CpusetChange, CpusetHierarchy, CpusetOutcome, CpusetSupport};
use pjw_core::event::Event;
use pjw_core::ids::{Comm, Pid, ThreadId, Tid, Uid};
use pjw_core::job::{CpuRequest, Job, JobId};
use pjw_core::plan::{MaskAction, MaskActionKind, MaskOutcome};
use pjw_core::policy::Policy;
use pjw_core::ports::MachineInterface;
use pjw_core::reconcile::{Decision, reconcile, reconcile_forks};
use pjw_core::record::Record;
use pjw_core::refusal::Refusal;
use pjw_core::report::{cpuset_events, mask_events};
use pjw_core::scan::{ScanRequest, ScanScope};
use pjw_core::snapshot::{
    AddressSpaceCheck, AddressSpaceList, AddressSpaceUser, AffinityRequest, BatchIdentity, JobIdAttribute,
    JobProcessGrouping, JobReference, SharedAddressSpace, Snapshot,
};
use pjw_core::state::WardenState;
use pjw_core::state::masks::{entry::MaskEntry, request::MaskLimits};
use pjw_core::state::members::MemberThread;
pub use pjw_core::testing::{cpu_set, job, regular_topology};
use pjw_core::time::Nanos;
use pjw_core::topology::Topology;
use pjw_core::usage::JobReport;
use pjw_core::usage_times::read_cpu_times;
use pjw_sim::node::SimMachineInterface;
use pjw_sim::testing::ScriptedMachine;
use pjw_sim::world::SimProcess;

pub const SECOND: u64 = 1_000_000_000;
pub const ROOT: Caller = Caller { uid: Uid(0), is_admin: true };
pub const ALICE: Caller = Caller { uid: Uid(1001), is_admin: false };

/// The state, the policy and the last decision of pjw, and the simulated machine. The methods of [`ScriptedMachine`]
/// change the machine.
pub struct Machine {
    pub state: WardenState,
    pub policy: Policy,
    pub node: SimMachineInterface,
    kernel: ScriptedMachine,
    pub last: Option<Decision>,
    /// Whether each plan is audited. The audit visits all jobs.
    pub audits_plans: bool,
    /// The events and records since the last command was given.
    pub events: Vec<Event>,
    pub records: Vec<Record>,
    /// The events about the changes of cpusets that the kernel made since the last command was given.
    pub cpuset_events: Vec<Event>,
    /// The reports of the jobs that have ended.
    pub reports: Vec<JobReport>,
    /// What each scan finds of processes that share an address space.
    pub address_spaces: Option<Arc<AddressSpaceList>>,
    /// The jobs of which the node refuses to make or change the cpuset.
    pub refused_jobs: BTreeSet<JobId>,
}

impl Deref for Machine {
    type Target = ScriptedMachine;

    fn deref(&self) -> &ScriptedMachine {
        &self.kernel
    }
}

/// A machine of two packages of four cores of one PU.
pub fn machine() -> Machine {
    machine_with(regular_topology(2, 1, 1, 4, 1), Policy::default())
}

/// A machine of two packages of four cores of one PU, with v1 cpusets. `affinity_persists` is whether the kernel
/// remembers requested masks.
pub fn machine_with_cpusets(affinity_persists: bool) -> Machine {
    let policy = policy_with_cpusets(CpusetHierarchy::Legacy, affinity_persists);
    machine_with(regular_topology(2, 1, 1, 4, 1), policy)
}

/// The default policy on a machine with cpusets in this hierarchy. `affinity_persists` is whether the kernel remembers
/// requested masks.
pub fn policy_with_cpusets(hierarchy: CpusetHierarchy, affinity_persists: bool) -> Policy {
    let cpuset_support = CpusetSupport { hierarchy, affinity_persists, ..CpusetSupport::default() };
    Policy { cpuset_support, ..Policy::default() }
}

/// A machine with this topology and the cpuset features that the policy names.
pub fn machine_with(topology: Topology, policy: Policy) -> Machine {
    let kernel = ScriptedMachine::new(topology.cpus(), policy.cpuset_support.clone());
    kernel.world().reports_affinity_requests = false;
    kernel.process(1).batch_identity = Some(BatchIdentity::default());
    Machine {
        state: WardenState::new(topology, &CpuSet::new()),
        policy,
        node: kernel.simulated_machine(),
        kernel,
        last: None,
        audits_plans: true,
        events: Vec::new(),
        records: Vec::new(),
        cpuset_events: Vec::new(),
        reports: Vec::new(),
        address_spaces: None,
        refused_jobs: BTreeSet::new(),
    }
}

impl Machine {
    /// Starts a process of one thread that no batch system marks. It has its parent's mask, session and group.
    pub fn spawn(&self, pid: u32, parent: u32, uid: u32) -> RefMut<'_, SimProcess> {
        let mut process = self.kernel.spawn(pid, parent, uid);
        process.batch_identity = Some(BatchIdentity::default());
        process
    }

    /// Lets a thread request a mask for itself. Panics if the kernel refuses it.
    #[track_caller]
    pub fn bind(&self, pid: u32, tid: u32, mask: &str) {
        assert!(self.request_mask(pid, tid, mask), "the kernel refuses {mask}");
    }

    /// Adds the report that a thread requested PUs for itself and that the kernel accepted the request. The mask is not
    /// changed. Returns the report, which the caller can change.
    pub fn add_affinity_request(&self, pid: u32, tid: u32, cpus: &str) -> RefMut<'_, AffinityRequest> {
        let mut world = self.world();
        let caller_parent = world.processes.get(&Pid(pid)).map_or(Pid(1), |process| process.parent);
        let called_at = world.current_time().since_boot;
        world.affinity_requests.push(AffinityRequest {
            caller: Tid(tid),
            caller_pid: Pid(pid),
            caller_parent,
            comm: Comm::from("mpirun"),
            called_at,
            target: None,
            requested_mask: cpu_set(cpus),
            refused: false,
        });
        RefMut::map(world, |world| world.affinity_requests.last_mut().unwrap())
    }

    /// Switches PUs off, and all others on.
    pub fn switch_off(&self, offline: &str) {
        let online = self.state.topology.cpus().difference(&cpu_set(offline));
        self.world().set_online_pus(&online);
    }

    /// Lets the processes of each group share an address space from now on.
    pub fn share_memory(&mut self, groups: &[&[u32]]) {
        let user =
            |&pid: &u32| AddressSpaceUser { id: self.process(pid).id, check: AddressSpaceCheck::Sharing };
        let space = |(number, pids): (u64, &&[u32])| SharedAddressSpace {
            number,
            users: pids.iter().map(user).collect(),
        };
        let shared = (1..).zip(groups).map(space).collect();
        self.address_spaces = Some(Arc::new(AddressSpaceList { shared, unread_reason: None }));
    }

    /// The present time, in ns since boot.
    pub fn now(&self) -> u64 {
        self.world().current_time().since_boot.0
    }

    /// Lets this number of ns pass.
    pub fn advance(&self, ns: u64) {
        self.world().advance(ns);
    }

    /// Lets a second pass in which these threads run all the time and all others sleep.
    pub fn run(&self, busy: &[u32]) {
        self.run_for(busy, SECOND);
    }

    /// Lets a second pass in which the threads `busy` run. Of these, the threads in `waiting` run for half of the
    /// second, and wait for a PU for the other half.
    pub fn run_waiting(&self, busy: &[u32], waiting: &[u32]) {
        self.run(busy);
        let mut world = self.world();
        let threads = world.processes.values_mut().flat_map(|process| process.threads.iter_mut());
        for (_, thread) in threads.filter(|(tid, _)| waiting.contains(&tid.0)) {
            thread.run_ns -= SECOND / 2;
            thread.wait_ns += SECOND / 2;
        }
    }

    /// The limits of a mask where every PU is online and no cpuset changed.
    pub fn limits(&self) -> MaskLimits {
        let machine = self.state.topology.cpus().clone();
        let possible_cpus = [machine.clone()].into_iter().collect();
        MaskLimits {
            possible_cpus,
            machine_cpus: machine,
            may_have_changed: false,
            kernel_may_have_reset_mask: false,
        }
    }

    /// The threads whose masks are in the journal.
    pub fn journaled_threads(&self) -> Vec<ThreadId> {
        self.state.journaled_masks().map(|(thread, _)| thread).collect()
    }

    /// Changes the data of a thread of a member in the state.
    pub fn change_thread(&mut self, id: ThreadId, change: impl FnOnce(&mut MemberThread)) {
        let pid = id.process.pid;
        let mut threads = self.state.members[&pid].threads.clone();
        change(threads.get_mut(&id.tid).unwrap());
        self.state.members.replace_threads(pid, threads);
    }

    /// Replaces the daemon by a new one that has no state directory and no records.
    pub fn lose_state(&mut self) {
        self.state = WardenState::new(self.state.topology.clone(), &CpuSet::new());
        self.node = self.kernel.simulated_machine();
        self.world().processes.values_mut().for_each(|process| process.attributes_changed = true);
        self.find_cpusets();
    }

    /// Lists the cgroups of an earlier daemon, as a daemon does when it starts.
    pub fn find_cpusets(&mut self) {
        let leftover = self.node.list_job_cpusets(&self.policy.own_cgroups);
        leftover.into_iter().for_each(|leftover| self.state.add_leftover_cpuset(leftover));
    }

    /// Forgets that pjw wrote any mask.
    pub fn forget_writes(&mut self) {
        let limits = self.limits();
        let now = Nanos(self.now());
        for id in self.journaled_threads() {
            self.change_thread(id, |thread| {
                thread.mask_entry = Some(MaskEntry::from_first_reading(&thread.effective_mask, &limits, now));
            });
        }
    }

    /// Makes a full scan that reads every thread.
    pub fn scan(&mut self) -> Snapshot {
        let every_pid = self.world().processes.keys().copied().collect();
        self.node.scan(&ScanRequest { pids_to_read_threads_of: every_pid, ..self.state.scan_request(true) })
    }

    /// Makes a partial scan of these processes.
    pub fn scan_only(&mut self, pids: &[u32]) -> Snapshot {
        let scope = ScanScope::Partial(pids.iter().copied().map(Pid).collect());
        self.node.scan(&ScanRequest {
            scope,
            pids_to_read_threads_of: [].into(),
            ..self.state.scan_request(true)
        })
    }

    /// Decides on a snapshot. The actions are not carried out.
    pub fn decide(&mut self, snapshot: &Snapshot, commands: &[Command]) -> Decision {
        reconcile(&mut self.state, snapshot, commands, &self.policy)
    }

    /// Decides about newly forked processes, before the scan.
    pub fn decide_about_forks(&mut self, snapshot: &Snapshot) -> Decision {
        reconcile_forks(&mut self.state, snapshot, &self.policy)
    }

    /// Scans, decides, and lets the kernel carry out the actions.
    pub fn cycle(&mut self, scan: &ScanRequest, commands: &[Command]) -> Decision {
        let mut snapshot = self.node.scan(scan);
        snapshot.address_spaces.clone_from(&self.address_spaces);
        read_cpu_times(&self.state, &mut snapshot, |pids| self.node.read_cpu_times(pids));
        let read_until = snapshot.taken_at.since_boot;
        snapshot.cpu_times_read_until = scan.covers_all_job_processes().then_some(read_until);
        let decision = self.decide(&snapshot, commands);
        self.reports.extend(decision.reports.iter().cloned());
        if self.audits_plans {
            let violations = audit(&self.state, &decision.plan, &self.policy);
            assert_eq!(violations, [], "{:#?}", decision.plan);
        }
        let mut outcomes = Vec::new();
        for action in &decision.plan.cpuset_actions {
            let is_write = matches!(action.change, CpusetChange::Create { .. });
            let outcome = if is_write && self.refused_jobs.contains(&action.job) {
                CpusetOutcome::Refused { reason: "refused by the test".to_owned() }
            } else {
                self.node.change_cpusets(from_ref(action), Duration::MAX).remove(0)
            };
            self.state.cpusets.record_outcome(action, &outcome);
            outcomes.push((action.clone(), outcome));
        }
        self.cpuset_events.extend(cpuset_events(&outcomes));
        decision.plan.mask_actions.iter().for_each(|action| self.carry_out(action));
        decision
    }

    /// Lets the kernel carry out an action, and records the outcome in the state.
    pub fn carry_out(&mut self, action: &MaskAction) {
        match self.node.change_mask(action) {
            MaskOutcome::Done { effective } => {
                self.state.record_mask_applied(action, &action.requested_mask, &effective);
            }
            MaskOutcome::Refused { .. } if action.kind == MaskActionKind::Restore => {
                self.state.record_restore_refused(action);
            }
            MaskOutcome::Refused { .. } => self.state.record_mask_refused(action),
            MaskOutcome::Gone => {}
        }
    }

    /// Runs cycles until a full scan finds nothing left to do. The scans are those of the daemon: a full one, then
    /// those that the decisions request. Returns the replies and all actions on masks.
    pub fn settle_with(&mut self, commands: &[Command]) -> (Vec<Result<Reply, Refusal>>, Vec<MaskAction>) {
        (self.events, self.records, self.cpuset_events) = (Vec::new(), Vec::new(), Vec::new());
        let (mut replies, mut done) = (Vec::new(), Vec::new());
        let mut commands = commands;
        let mut scan = None;
        for _ in 0..20 {
            let is_full = scan.is_none();
            let scanned = scan.take().unwrap_or_else(|| self.state.scan_request(true));
            let decision = self.cycle(&scanned, std::mem::take(&mut commands));
            replies.extend(decision.replies.iter().cloned());
            self.events.extend(decision.events.iter().cloned());
            self.records.extend(decision.records.iter().cloned());
            done.extend(decision.plan.mask_actions.iter().cloned());
            scan.clone_from(&decision.next_scan);
            let is_settled = is_full && decision.plan.mask_actions.is_empty() && decision.next_scan.is_none();
            self.last = Some(decision);
            if is_settled {
                return (replies, done);
            }
        }
        panic!("20 cycles were not enough: {done:#?}");
    }

    pub fn settle(&mut self) -> Vec<MaskAction> {
        self.settle_with(&[]).1
    }

    /// The events about these changes of masks, which the kernel made in one cycle.
    pub fn mask_events(&self, actions: Vec<MaskAction>) -> Vec<Event> {
        let done = |action: MaskAction| {
            let effective = action.target_mask.clone();
            (action, MaskOutcome::Done { effective })
        };
        let outcomes: Vec<_> = actions.into_iter().map(done).collect();
        mask_events(&self.state, &outcomes)
    }

    pub fn command(&mut self, command: Command) -> Result<Reply, Refusal> {
        self.settle_with(&[command]).0.remove(0)
    }

    pub fn assign(&mut self, id: &str, cores: u32, pids: &[u32]) -> Result<Job, Refusal> {
        self.assign_as(ROOT, id, cores, pids)
    }

    pub fn assign_as(&mut self, caller: Caller, id: &str, cores: u32, pids: &[u32]) -> Result<Job, Refusal> {
        let pids = pids.iter().copied().map(Pid).collect();
        let assign = AssignCommand { pids, caller, ..assign_of(id, Some(CpuRequest::Cores(cores))) };
        match self.command(Command::Assign(assign))? {
            Reply::Assigned(job) => Ok(*job),
            Reply::Released(_) | Reply::Moved(_) | Reply::Wanted(_) => unreachable!(),
        }
    }

    pub fn release(&mut self, id: &str) -> Result<Reply, Refusal> {
        self.command(Command::Release { job: job(id), caller: ROOT })
    }

    /// The job and evidence of a process, or a dash.
    pub fn member(&self, pid: u32) -> String {
        match self.state.members.get(&Pid(pid)) {
            Some(member) => format!("{} by {:?}", member.job, member.evidence),
            None => "-".to_owned(),
        }
    }

    pub fn grant(&self, id: &str) -> String {
        let grant = self.state.jobs.get(&job(id)).and_then(|job| job.grant.as_ref());
        grant.map_or_else(|| "-".to_owned(), |grant| grant.cpus.to_string())
    }

    pub fn warnings(&self) -> Vec<&'static str> {
        self.last.as_ref().unwrap().warnings.iter().map(|warnings| warnings.code).collect()
    }
}

/// A command of root that assigns cores to a job, without other options.
pub fn assign_of(id: &str, cpu_request: Option<CpuRequest>) -> AssignCommand {
    AssignCommand { cpu_request, ..pjw_sim::testing::assign_command(id, 0, &[]) }
}

/// Puts a process into the cgroup of a job of a batch system.
pub fn in_cgroup(mut process: RefMut<'_, SimProcess>, id: &str, path: &str, cpu_request: Option<CpuRequest>) {
    path.clone_into(&mut process.cgroup);
    path.clone_into(&mut process.original_cgroup);
    let claim = JobReference {
        job: job(id),
        kind: JobIdAttribute::Cgroup(path.to_owned()),
        cpu_request,
        tasks: None,
    };
    process.batch_identity = Some(BatchIdentity { job_references: vec![claim], ..BatchIdentity::default() });
}

/// Gives a process an environment that names a job.
pub fn in_environment(
    mut process: RefMut<'_, SimProcess>,
    id: &str,
    own: JobProcessGrouping,
    cpu_request: Option<CpuRequest>,
) {
    let kind = JobIdAttribute::Environment { process_scope: own };
    let claim = JobReference { job: job(id), kind, cpu_request, tasks: None };
    process.batch_identity = Some(BatchIdentity { job_references: vec![claim], ..BatchIdentity::default() });
}
