//! One run: a simulated machine, a daemon, and the conditions that must hold.

mod checks;
mod expected_jobs;
mod lending;
mod lent_cpus;
mod reports;

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::rc::Rc;

use pjw_core::command::{AssignCommand, Caller, Command, Reply};
use pjw_core::cpuset::CpuSet;
use pjw_core::cpuset_group::{
    CpusetChange, CpusetHierarchy, CpusetOutcome, CpusetSupport, EnforcementMethod,
};
use pjw_core::event::{Event, EventKind};
use pjw_core::evidence::MembershipEvidence;
use pjw_core::ids::{Pid, ProcessId, ThreadId, Uid};
use pjw_core::job::JobId;
use pjw_core::policy::{ExhaustionPolicy, OversubscriptionPolicy, Policy};
use pjw_core::record::Record;
use pjw_core::refusal::Refusal;
use pjw_core::scan::ScanRequest;
use pjw_core::state::WardenState;
use pjw_core::testing::regular_topology;
use pjw_core::within_job::NumaNodeRule;
use pjw_core::{time::UnixMillis, topology::Topology};
use pjw_sim::faults::{Faults, KILL_PANIC_PAYLOAD};
use pjw_sim::journal::SimJournal;
use pjw_sim::node::SimMachineInterface;
use pjw_sim::seed::RandomStream;
use pjw_sim::workload::Workload;
use pjw_sim::world::{SimMachine, SimProcess};
use pjwd::run::triggers::DueScans;
use pjwd::warden::{CycleReport, Warden};

use lending::Lending;
pub use lending::Machine;

const STEPS: u32 = 40;
const ROOT: Caller = Caller { uid: Uid(0), is_admin: true };

/// How often each kind of event happened in all runs together.
#[derive(Debug, Default)]
pub struct Totals {
    pub cycles: usize,
    pub actions: usize,
    pub kills: usize,
    pub jobs: usize,
    pub refusals: usize,
    pub moves: usize,
    pub violations: usize,
    pub cpusets: usize,
    /// Affinity attempts that were made in cpusets at rest, and reported.
    pub attempts: usize,
    /// Events about cores that were lent.
    pub loans: usize,
    /// Events about cores that came back.
    pub returns: usize,
    /// PUs that were lent at rest while the owners were idle.
    pub lent_at_rest: usize,
    /// Threads that may run on PUs that are lent to their jobs, once for each such PU, after the cycles with faults
    /// that made all their changes.
    pub lent_threads: usize,
    /// Processes that were frozen at rest.
    pub frozen: usize,
    /// Provisions that were made or changed.
    pub provisions: usize,
    /// The largest number of processes that rules of provisions recognised at a time, in all runs together.
    pub recognised: usize,
}

impl Totals {
    pub fn add(&mut self, other: &Self) {
        self.cycles += other.cycles;
        self.actions += other.actions;
        self.kills += other.kills;
        self.jobs += other.jobs;
        self.refusals += other.refusals;
        self.moves += other.moves;
        self.violations += other.violations;
        self.cpusets += other.cpusets;
        self.attempts += other.attempts;
        self.loans += other.loans;
        self.returns += other.returns;
        self.lent_at_rest += other.lent_at_rest;
        self.lent_threads += other.lent_threads;
        self.frozen += other.frozen;
        self.provisions += other.provisions;
        self.recognised += other.recognised;
    }
}

pub struct Run {
    verbose: bool,
    random: RandomStream,
    topology: Topology,
    policy: Policy,
    world: Rc<RefCell<SimMachine>>,
    workload: Rc<RefCell<Workload>>,
    faults: Faults,
    journal: SimJournal,
    warden: Warden<SimMachineInterface, SimJournal>,
    triggers: DueScans,
    next_name: u32,
    /// The processes that were assigned to jobs by commands, each with its last job.
    assigned: BTreeMap<ProcessId, JobId>,
    /// Threads whose original mask the daemon has known. It must not forget it.
    originals_known: BTreeSet<ThreadId>,
    /// The jobs that were in the state after some cycle, each with the time of its detection.
    known_jobs: BTreeSet<(JobId, UnixMillis)>,
    /// The events of the last regular cycle, and of the cycles before it that samples caused.
    events: Vec<Event>,
    /// Whether the present daemon has completed a cycle.
    has_run_cycle_since_start: bool,
    /// Whether the last cycle decided about loans. It did not if it refused commands because the journal could not be
    /// written.
    has_decided_loans: bool,
    /// `None` in a run without classes of jobs.
    lending: Option<Lending>,
    totals: Totals,
}

impl Run {
    /// Makes the run of the seed `number`. `lending_machine` is the machine of a run with lending, and `None` for a run
    /// without.
    pub fn new(number: u64, lending_machine: Option<Machine>, verbose: bool) -> Self {
        let seed = RandomStream::from_seed(number);
        let mut chance = seed.substream("run");
        let (packages, l3s) = (1 + chance.random_below(2), 1 + chance.random_below(2));
        let (cores, pus) = (1 + chance.random_below(4), 1 + chance.random_below(2));
        let topology = regular_topology(packages, 1, l3s, cores, pus);
        let keeps_core = chance.random_bool(300) && topology.cores().len() > 1;
        let housekeeping_cpus = if keeps_core { topology.cores()[0].pus.clone() } else { CpuSet::new() };
        let on_exhausted = match chance.random_below(4) {
            0 => ExhaustionPolicy::Share,
            1 => ExhaustionPolicy::Wait,
            _ => ExhaustionPolicy::Refuse,
        };
        let oversubscription = if chance.random_bool(500) {
            OversubscriptionPolicy::Spread
        } else {
            OversubscriptionPolicy::Float
        };
        let share_smt = chance.random_bool(200);
        let mut cpuset_support = cpuset_support(&seed);
        if lending_machine == Some(Machine::CgroupV1) {
            cpuset_support.hierarchy = CpusetHierarchy::Legacy;
        }
        let enforcement = if seed.substream("enforcement").random_bool(150) {
            EnforcementMethod::Affinity
        } else {
            EnforcementMethod::Auto
        };
        let world_cpuset_support = cpuset_support.clone();
        let policy = Policy {
            housekeeping_cpus,
            exhaustion_policy: on_exhausted,
            oversubscription,
            share_smt,
            cpuset_support,
            enforcement,
            adopt_unassigned_processes: seed.substream("strays").random_bool(150),
            ..Policy::default()
        };
        let policy = if lending_machine.is_some() { lending::with_lending(policy, &seed) } else { policy };
        let faults = Faults::from_random(&seed);
        let mut world = SimMachine::new(topology.cpus());
        (world.cpuset_support, world.log) = (world_cpuset_support, verbose.then(Vec::new));
        let workload = Workload::new(&seed, faults.has_hotplug);
        let (world, workload) = (Rc::new(RefCell::new(world)), Rc::new(RefCell::new(workload)));
        let journal = SimJournal::new(faults.clone());
        let node = SimMachineInterface::new(Rc::clone(&world), Rc::clone(&workload), faults.clone());
        let warden = start(node, &journal, &topology, &policy);
        Self {
            verbose,
            random: chance,
            topology,
            policy,
            world,
            workload,
            faults,
            journal,
            warden,
            triggers: DueScans::default(),
            next_name: 0,
            assigned: BTreeMap::new(),
            originals_known: BTreeSet::new(),
            known_jobs: BTreeSet::new(),
            events: Vec::new(),
            has_run_cycle_since_start: false,
            has_decided_loans: false,
            lending: lending_machine.map(|machine| Lending::new(&seed, machine)),
            totals: Totals::default(),
        }
    }

    /// Runs both phases. Returns the numbers of events.
    pub fn run(mut self) -> Totals {
        self.print(|| format!("{:?} {:?}", self.policy.cpuset_support, self.policy.enforcement));
        self.print(|| format!("{:?}", self.policy.lending));
        self.restart_fork_tracking();
        self.attach_monitor();
        for step in 0..STEPS {
            for _ in 0..self.random.random_below(6) {
                self.workload.borrow_mut().step(&mut self.world.borrow_mut());
            }
            let commands = self.commands();
            self.triggers.full_scan_due |= step == 0;
            self.triggers.unassigned_scan_due |= self.random.random_bool(250);
            // A dry run must not change what the next cycle does.
            if self.random.random_bool(100) {
                let _ = self.warden.dry_run();
            }
            self.run_cycle(false, &commands);
            self.check_safety();
        }
        self.faults.disable();
        if let Some(lending) = &mut self.lending {
            lending.stop_demand_changes();
        }
        self.check_rescans();
        self.workload.borrow_mut().stop();
        let online = self.topology.cpus().clone();
        self.world.borrow_mut().set_online_pus(&online);
        self.check_liveness();
        self.check_affinity_attempts();
        self.check_revocation();
        self.check_release();
        self.totals
    }

    /// Runs one cycle as the event loop does. Returns `None` if the daemon was killed in it and started again.
    fn run_cycle(&mut self, full: bool, commands: &[Command]) -> Option<CycleReport> {
        self.events.clear();
        self.advance_one_second();
        self.warden.read_process_events();
        self.triggers.job_processes_scan_due = true;
        self.triggers.full_scan_due |= full;
        let triggers = std::mem::take(&mut self.triggers);
        let request = triggers.take_scan_request(self.warden.state_mut(), commands);
        self.run_cycle_with_request(request, commands)
    }

    /// Runs a cycle with this scan. Returns `None` if the daemon was killed in it and started again.
    fn run_cycle_with_request(&mut self, request: ScanRequest, commands: &[Command]) -> Option<CycleReport> {
        let warden = &mut self.warden;
        let cycle = catch_unwind(AssertUnwindSafe(|| warden.run_cycle(request, commands)));
        let report = match cycle {
            Ok(report) => report,
            Err(why) if why.downcast_ref::<&str>() == Some(&KILL_PANIC_PAYLOAD) => {
                self.print(|| "killed".to_owned());
                self.totals.kills += 1;
                self.restart();
                return None;
            }
            Err(why) => resume_unwind(why),
        };
        self.has_run_cycle_since_start = true;
        let is_unrecorded =
            |reply: &Result<Reply, Refusal>| matches!(reply, Err(Refusal::JournalFailed { .. }));
        self.has_decided_loans = !report.replies.iter().any(is_unrecorded);
        self.watch_lent_cpus();
        self.check_lending_pauses();
        self.print_log();
        self.record_readings();
        self.record_known_originals();
        self.check_reports();
        self.events.extend_from_slice(&report.events);
        self.totals.cycles += 1;
        self.totals.actions += report.mask_outcomes.len();
        let members = self.warden.state().members.values();
        let recognised = members.filter(|member| member.evidence == MembershipEvidence::Provision).count();
        self.totals.recognised = self.totals.recognised.max(recognised);
        for event in &report.events {
            self.totals.violations += usize::from(event.kind == EventKind::Violation);
            self.totals.loans += usize::from(event.kind == EventKind::Lent);
            self.totals.returns += usize::from(event.kind == EventKind::Returned);
            self.print(|| {
                format!("{:?} {:?}: {}", event.kind, event.job.as_ref().map(ToString::to_string), event.text)
            });
        }
        for (action, outcome) in &report.mask_outcomes {
            self.print(|| {
                format!(
                    "{} {} {} -> {}: {outcome:?}",
                    action.kind.name(),
                    action.thread.tid,
                    action.current_mask,
                    action.target_mask
                )
            });
        }
        self.mark_unknown_original_cgroups();
        for (action, outcome) in &report.cpuset_outcomes {
            if let CpusetChange::MoveBack { process, to, .. } = &action.change {
                self.record_move_back(*process, to, outcome);
            }
            self.totals.cpusets += usize::from(matches!(outcome, CpusetOutcome::Done { .. }));
            self.print(|| {
                format!("{} of {} {:?}: {outcome:?}", action.kind_name(), action.job, action.change)
            });
        }
        self.update_expected_jobs(commands, &report);
        self.check_masks();
        self.check_owners_in_kernel(&report);
        assert!(
            self.warden.ongoing_failures().audit_violations.is_empty(),
            "{:?}",
            self.warden.ongoing_failures().audit_violations
        );
        Some(report)
    }

    fn restart(&mut self) {
        self.forget_unrecorded_jobs();
        let node =
            SimMachineInterface::new(Rc::clone(&self.world), Rc::clone(&self.workload), self.faults.clone());
        // A new daemon has read no attributes of processes, and reports the affinity requests from now on.
        self.world.borrow_mut().affinity_requests.clear();
        // The daemon may have been killed after the record of a request and before the request.
        for record in self.journal.records() {
            if let Record::MaskSet { set, .. } | Record::ForkMaskSet { set, .. } = record {
                self.world.borrow_mut().record_mask_requested_by_pjw(&set);
            }
        }
        self.world.borrow_mut().processes.values_mut().for_each(|process| process.attributes_changed = true);
        self.warden = start(node, &self.journal, &self.topology, &self.policy);
        self.restart_fork_tracking();
        self.has_run_cycle_since_start = false;
        self.has_decided_loans = false;
        if let Some(lending) = &mut self.lending {
            lending.restart();
        }
        self.note_lent_pus();
        self.attach_monitor();
        self.triggers = DueScans::default();
        self.triggers.full_scan_due = true;
    }

    fn restart_fork_tracking(&mut self) {
        let now = self.world.borrow().current_time().since_boot;
        self.warden.set_fork_events_complete_since(
            Some(now).filter(|_| self.faults.silent_event_loss_permille == 0),
        );
    }

    /// Prints the log of processes and masks since the last cycle.
    fn print_log(&mut self) {
        if let Some(log) = &mut self.world.borrow_mut().log {
            log.drain(..).for_each(|line| println!("{line}"));
        }
    }

    fn print(&self, what: impl FnOnce() -> String) {
        if self.verbose {
            println!("{}", what());
        }
    }

    /// Random commands: new jobs with or without a process, other sizes, releases, defragmentation.
    fn commands(&mut self) -> Vec<Command> {
        let mut commands = Vec::new();
        for _ in 0..self.random.random_below(3) {
            let names: Vec<JobId> = self.warden.state().jobs.keys().cloned().collect();
            let known = self.random.random_element(&names).cloned();
            let pids: Vec<Pid> = self.world.borrow().processes.keys().copied().collect();
            let pid = self.random.random_element(&pids).copied();
            let cores = self.random.random_below(5);
            let command = match (self.random.random_below(10), known) {
                (0..=5, _) => {
                    self.next_name += 1;
                    assign(&format!("manual:j{}", self.next_name).parse().unwrap(), cores, pid)
                }
                (6..=7, Some(job)) => assign(&job, cores, None),
                (9, Some(_)) if self.random.random_bool(300) => Command::Defrag { caller: ROOT },
                (_, Some(job)) => Command::Release { job, caller: ROOT },
                (_, None) => continue,
            };
            let command = self.with_class(command);
            self.print(|| format!("command {command:?}"));
            commands.push(command);
        }
        commands
    }

    /// Marks the processes whose original cgroup the daemon cannot know: a process that was born in a job cpuset and
    /// whose parent ended before a scan. Its descendants are recorded with the same wrong cgroup, also if it is not
    /// moved back.
    fn mark_unknown_original_cgroups(&self) {
        let cpusets = &self.warden.state().cpusets;
        let is_unknown = |process: &&SimProcess| {
            let managed = cpusets.enclosing_cpuset(&process.cgroup).filter(|_| process.parent == Pid(1));
            let path = managed.map(|managed| managed.job_cpuset.path.as_str());
            path.and_then(|path| cpusets.original_cgroup([process.id], path))
                .is_some_and(|origin| origin != process.original_cgroup)
        };
        let mut world = self.world.borrow_mut();
        let unknown: Vec<Pid> =
            world.processes.values().filter(is_unknown).map(|process| process.id.pid).collect();
        unknown.into_iter().for_each(|pid| world.mark_original_cgroup_unknown(pid));
    }

    /// Marks the moved process if the daemon cannot know its original cgroup: a process that was born in a job cpuset
    /// and whose parent has ended, or a process whose move back was refused once.
    fn record_move_back(&self, id: ProcessId, to: &str, outcome: &CpusetOutcome) {
        let mut world = self.world.borrow_mut();
        let Some(process) = world.processes.get(&id.pid).filter(|process| process.id == id) else { return };
        let is_orphan = process.parent == Pid(1) && process.original_cgroup != to;
        if is_orphan || matches!(outcome, CpusetOutcome::Refused { .. }) {
            world.mark_original_cgroup_unknown(id.pid);
        }
    }
}

/// Random cpuset features of the node of a run.
fn cpuset_support(seed: &RandomStream) -> CpusetSupport {
    let mut chance = seed.substream("ground");
    let cpusets = match chance.random_below(4) {
        0 => CpusetHierarchy::Unavailable { why: "this node has none".to_owned() },
        1 | 2 => CpusetHierarchy::Systemd,
        _ => CpusetHierarchy::Unified,
    };
    CpusetSupport {
        hierarchy: cpusets,
        affinity_persists: chance.random_bool(700),
        ..CpusetSupport::default()
    }
}

fn start(
    node: SimMachineInterface,
    journal: &SimJournal,
    topology: &Topology,
    policy: &Policy,
) -> Warden<SimMachineInterface, SimJournal> {
    let state = WardenState::new(topology.clone(), &policy.housekeeping_cpus);
    let host = pjw_sources::LocalHost { name: "n1".to_owned(), flux_user: None };
    Warden::new(node, journal.clone(), state, journal.records(), policy.clone(), host)
}

fn assign(job: &JobId, cores: u32, pid: Option<Pid>) -> Command {
    let assign = pjw_sim::testing::assign_command(&job.to_string(), cores, pid.as_slice());
    let rules = NumaNodeRule::ALL;
    let within_job = rules.get(usize::try_from(cores).unwrap() % rules.len()).copied();
    Command::Assign(AssignCommand { within_job, ..assign })
}
