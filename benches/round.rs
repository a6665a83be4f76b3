//! Measures the CPU time of one decision that confines a newly forked process, with the audit of the decision. The
//! machine is made up: 768 cores with 600 jobs. The peer is the same decision beside 20 jobs.
#![forbid(unsafe_code)]

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, ensure};
use pjw_benches::measure::results::{Figure, median, print_line, publish};
use pjw_core::audit::{GrantAudit, audit_actions};
use pjw_core::command::{AssignCommand, Caller, Command};
use pjw_core::cpuset::{CpuSet, Pu};
use pjw_core::ids::{Comm, Pid, ProcessId, StartTime, Tid, Uid};
use pjw_core::job::CpuRequest;
use pjw_core::policy::Policy;
use pjw_core::reconcile::{Decision, reconcile};
use pjw_core::scan::ScanScope;
use pjw_core::snapshot::{BatchIdentity, Observed, Process, ProcessEvent, Snapshot, Thread};
use pjw_core::state::WardenState;
use pjw_core::time::{Moment, Nanos, UnixMillis};
use pjw_core::topology::{RegularShape, Topology};
use pjw_linux::sys::clock::own_thread_cpu_time;

/// The number of processes that are forked and confined.
const BIRTHS: u32 = 200;
/// The jobs on the smaller machine. Only their processes fork.
const FEW_JOBS: u32 = 20;
/// The number of processes that belong to no job.
const OUTSIDERS: u32 = 300;
/// The largest number of rounds until no further scan is needed.
const MAX_ROUNDS: usize = 8;

fn main() -> anyhow::Result<()> {
    let shape = RegularShape {
        packages: 2,
        numa_nodes_per_package: 4,
        l3s_per_numa_node: 12,
        cores_per_l3: 8,
        pus_per_core: 1,
    };
    let [few, many] =
        [FEW_JOBS, 600].map(|jobs| MadeUpMachine::new(shape, jobs).and_then(MadeUpMachine::measure_births));
    let (few, many) = (few?, many?);
    let name = "a birth beside 600 jobs on 768 cores, with the audit";
    print_line(&format!("{name}: {many:.3} ms of CPU; beside 20 jobs {few:.3} ms"))?;
    publish("round", &[Figure::new(name, many, "ms", "the same beside 20 jobs", few)])
}

/// A machine that exists as numbers only: what the plan changes is what the next scan finds.
struct MadeUpMachine {
    state: WardenState,
    policy: Policy,
    audit: GrantAudit,
    processes: BTreeMap<Pid, Process>,
    /// The time since boot, in ns.
    now: u64,
}

impl MadeUpMachine {
    /// Makes a machine with `jobs` jobs. Each job has one core, and one process of five threads. There are also
    /// [`OUTSIDERS`] processes without a job.
    fn new(shape: RegularShape, jobs: u32) -> anyhow::Result<Self> {
        let (state, policy) =
            (WardenState::new(Topology::from_shape(shape), &CpuSet::new()), Policy::default());
        let audit = GrantAudit::new(&state, &policy);
        let mut machine = Self { state, policy, audit, processes: BTreeMap::new(), now: 1_000_000_000 };
        for number in 0..jobs + OUTSIDERS {
            let all_pus = machine.state.topology.cpus().clone();
            let process = machine.new_process(pid_of(number), Pid(1), 5, all_pus);
            machine.processes.insert(process.id.pid, process);
        }
        machine.run(&ScanScope::Full, &(0..jobs).map(assign).collect::<anyhow::Result<Vec<_>>>()?)?;
        ensure!(machine.state.jobs.len() == jobs as usize, "not every job was made");
        machine.state.fork_events_complete_since = Some(Nanos(0));
        Ok(machine)
    }

    /// Makes a process that started at the present time of the machine. All its threads sleep and have the affinity
    /// mask `mask`.
    fn new_process(&self, pid: Pid, parent: Pid, threads: u32, mask: CpuSet) -> Process {
        let start = StartTime(self.now / 10_000_000);
        let thread = |number| Thread {
            tid: Tid(pid.0 + number),
            start,
            comm: Comm::from("work"),
            state: 'S',
            last_cpu: Pu(0),
            run_ns: 0,
            wait_ns: 0,
            effective_mask: mask.clone(),
        };
        Process {
            id: ProcessId { pid, start },
            parent,
            process_group: pid,
            session: pid,
            uid: Uid(1001),
            comm: Comm::from("work"),
            is_kernel_thread: false,
            threads: Some((0..threads).map(thread).collect()),
            first_thread_mask: Some(mask),
            cgroup: None,
            unit_cgroup: None,
            attributes: None,
            has_unread_environment: false,
            batch_identity: Some(BatchIdentity::default()),
            has_all_threads: true,
            idle_until: None,
        }
    }

    /// Returns a snapshot of the processes in `scope`, and advances the time of the machine by 1 ms.
    fn snapshot(&mut self, scope: &ScanScope) -> Snapshot {
        self.now += 1_000_000;
        let observed = |(&pid, process): (&Pid, &Process)| (pid, Observed::Present(process.clone()));
        let processes = match scope {
            ScanScope::Full => self.processes.iter().map(observed).collect(),
            ScanScope::Partial(pids) => {
                pids.iter().filter_map(|pid| self.processes.get_key_value(pid)).map(observed).collect()
            }
        };
        let (taken_at, online) = (
            Moment { since_boot: Nanos(self.now), wall_clock: UnixMillis(0) },
            self.state.topology.cpus().clone(),
        );
        Snapshot::of_processes(scope.clone(), taken_at, online, processes)
    }

    /// Decides once, without carrying the decision out. Returns the decision and its CPU time in ms, which includes the
    /// audit.
    ///
    /// # Errors
    /// If the audit finds a violation.
    fn decide(&mut self, snapshot: &Snapshot, commands: &[Command]) -> anyhow::Result<(Decision, f64)> {
        let before = own_thread_cpu_time();
        let decision = reconcile(&mut self.state, snapshot, commands, &self.policy);
        let changed = self.state.jobs.take_changed_ids();
        if !changed.is_empty() {
            self.audit.update(&self.state, &changed, &self.policy);
        }
        let violations =
            self.audit.violations().count() + audit_actions(&self.state, &decision.plan, &self.policy).len();
        let cpu_time = own_thread_cpu_time().saturating_sub(before);
        ensure!(violations == 0, "the plan fails its audit");
        Ok((decision, cpu_time.as_secs_f64() * 1000.0))
    }

    /// Sets the affinity masks of the planned mask actions in the processes of the machine, and records them in the
    /// state.
    fn carry_out(&mut self, decision: &Decision) {
        for action in &decision.plan.mask_actions {
            let Some(process) = self.processes.get_mut(&action.thread.process.pid) else { continue };
            for thread in
                process.threads.iter_mut().flatten().filter(|thread| thread.tid == action.thread.tid)
            {
                thread.effective_mask = action.target_mask.clone();
            }
            process.first_thread_mask = Some(action.target_mask.clone());
            self.state.record_mask_applied(action, &action.requested_mask, &action.target_mask);
        }
    }

    /// Decides and carries the decisions out until no further scan is needed, at most [`MAX_ROUNDS`] times. The first
    /// round has the scope `scope` and the commands `commands`. Returns the CPU time of the longest round, in ms.
    fn run(&mut self, scope: &ScanScope, commands: &[Command]) -> anyhow::Result<f64> {
        let (mut scope, mut commands, mut longest) = (scope.clone(), commands, 0.0_f64);
        for _ in 0..MAX_ROUNDS {
            let snapshot = self.snapshot(&scope);
            let (decision, ms) = self.decide(&snapshot, std::mem::take(&mut commands))?;
            longest = longest.max(ms);
            self.carry_out(&decision);
            match decision.next_scan {
                Some(next) => scope = next.scope,
                None => break,
            }
        }
        Ok(longest)
    }

    /// Returns the median CPU time of a round that confines a newly forked process to the cores of its job, in ms. The
    /// process begins with a mask of all PUs.
    fn measure_births(mut self) -> anyhow::Result<f64> {
        let mut costs = Vec::new();
        for number in 0..BIRTHS {
            let (parent, pid) = (pid_of(number % FEW_JOBS), pid_of(10_000 + number));
            let child = self.new_process(pid, parent, 1, self.state.topology.cpus().clone());
            self.processes.insert(pid, child);
            let (creator, at) = (Tid(parent.0), Nanos(self.now));
            self.state.apply_process_events(&[ProcessEvent::Fork { parent, creator, child: pid, at }]);
            costs.push(self.run(&ScanScope::Partial(BTreeSet::from([pid])), &[])?);
            ensure!(
                self.state.members.get(&pid).is_some_and(|member| member.threads.len() == 1),
                "the newborn process was not found"
            );
        }
        median(&costs).context("nothing was measured")
    }
}

fn pid_of(number: u32) -> Pid {
    Pid(1000 + 10 * number)
}

fn assign(number: u32) -> anyhow::Result<Command> {
    let caller = Caller { uid: Uid(0), is_admin: true };
    let assign = AssignCommand::new(format!("job-{number}").parse()?, caller);
    Ok(Command::Assign(AssignCommand {
        cpu_request: Some(CpuRequest::Cores(1)),
        pids: vec![pid_of(number)],
        ..assign
    }))
}
