//! One run: a world, a warden, and what must hold.

mod checks;

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::rc::Rc;

use pjw_core::command::{Assign, Caller, Command, Reply};
use pjw_core::cpuset::CpuSet;
use pjw_core::cpuset_group::{CpusetChange, CpusetHierarchy, CpusetOutcome, CpusetSupport, Enforcement};
use pjw_core::event::EventKind;
use pjw_core::ids::{Pid, ProcessId, ThreadId, Uid};
use pjw_core::job::{Amount, JobId};
use pjw_core::policy::{OnExhausted, Oversubscribed, Policy};
use pjw_core::state::WardenState;
use pjw_core::topology::{Regular, Topology};
use pjw_sim::faults::{Faults, KILLED};
use pjw_sim::journal::SimJournal;
use pjw_sim::node::SimNode;
use pjw_sim::seed::Seed;
use pjw_sim::workload::Workload;
use pjw_sim::world::World;
use pjwd::run::triggers::Triggers;
use pjwd::warden::{Report, Warden};

const STEPS: u32 = 40;
const ROOT: Caller = Caller { uid: Uid(0), admin: true };

/// What happened in all runs together.
#[derive(Debug, Default)]
pub struct Totals {
    pub cycles: usize,
    pub actions: usize,
    pub deaths: usize,
    pub jobs: usize,
    pub refusals: usize,
    pub moves: usize,
    pub violations: usize,
    pub cpusets: usize,
    /// Threads behind walls that asked for every PU when all was at rest, and were told of.
    pub asks: usize,
}

impl Totals {
    pub fn add(&mut self, other: &Self) {
        self.cycles += other.cycles;
        self.actions += other.actions;
        self.deaths += other.deaths;
        self.jobs += other.jobs;
        self.refusals += other.refusals;
        self.moves += other.moves;
        self.violations += other.violations;
        self.cpusets += other.cpusets;
        self.asks += other.asks;
    }
}

pub struct Run {
    story: bool,
    chance: Seed,
    topology: Topology,
    policy: Policy,
    world: Rc<RefCell<World>>,
    workload: Rc<RefCell<Workload>>,
    faults: Faults,
    journal: SimJournal,
    warden: Warden<SimNode, SimJournal>,
    triggers: Triggers,
    next_name: u32,
    /// Threads whose true wish the warden knew once: what it knew it must not forget.
    understood: BTreeSet<ThreadId>,
    /// Whom the kernel would not have where they came from.
    homeless: BTreeSet<ProcessId>,
    totals: Totals,
}

impl Run {
    pub fn new(number: u64, story: bool) -> Self {
        let seed = Seed::new(number);
        let mut chance = seed.stream("run");
        let shape = Regular {
            packages: 1 + chance.below(2),
            numa_per_package: 1,
            l3_per_numa: 1 + chance.below(2),
            cores_per_l3: 1 + chance.below(4),
            pus_per_core: 1 + chance.below(2),
        };
        let topology = Topology::regular(shape);
        let keep = chance.chance(300) && topology.cores().len() > 1;
        let housekeeping = if keep { topology.cores()[0].pus.clone() } else { CpuSet::new() };
        let on_exhausted = match chance.below(4) {
            0 => OnExhausted::Share,
            1 => OnExhausted::Wait,
            _ => OnExhausted::Refuse,
        };
        let oversubscribed = if chance.chance(500) { Oversubscribed::Spread } else { Oversubscribed::Float };
        let share_smt = chance.chance(200);
        let cpuset_support = cpuset_support(&seed);
        let enforcement =
            if seed.stream("enforcement").chance(150) { Enforcement::Affinity } else { Enforcement::Auto };
        let ground_of_world = cpuset_support.clone();
        let policy = Policy {
            housekeeping,
            on_exhausted,
            oversubscribed,
            share_smt,
            cpuset_support,
            enforcement,
            adopt_strays: seed.stream("strays").chance(150),
            ..Policy::default()
        };
        let faults = Faults::draw(&seed);
        let mut world = World::new(topology.cpus());
        world.cpuset_support = ground_of_world;
        world.story = story.then(Vec::new);
        let world = Rc::new(RefCell::new(world));
        let workload = Rc::new(RefCell::new(Workload::new(&seed, faults.hotplug)));
        let journal = SimJournal::new(faults.clone());
        let node = SimNode::new(Rc::clone(&world), Rc::clone(&workload), faults.clone());
        let warden = start(node, &journal, &topology, &policy);
        let triggers = Triggers::default();
        let totals = Totals::default();
        Self {
            story,
            chance,
            topology,
            policy,
            world,
            workload,
            faults,
            journal,
            warden,
            triggers,
            next_name: 0,
            understood: BTreeSet::new(),
            homeless: BTreeSet::new(),
            totals,
        }
    }

    /// Both phases; returns what happened.
    pub fn whole(mut self) -> Totals {
        self.say(|| format!("{:?} {:?}", self.policy.cpuset_support, self.policy.enforcement));
        self.restart_fork_tracking();
        for step in 0..STEPS {
            for _ in 0..self.chance.below(6) {
                self.workload.borrow_mut().step(&mut self.world.borrow_mut());
            }
            let commands = self.commands();
            self.triggers.full |= step == 0;
            self.triggers.rescan |= self.chance.chance(250);
            // Whoever asks what the next cycle would do must not change what it does.
            if self.chance.chance(100) {
                let _ = self.warden.dry_run();
            }
            self.attend(false, &commands);
            self.check_safety();
        }
        self.faults.stop();
        self.check_rescans();
        self.workload.borrow_mut().stop();
        let online = self.topology.cpus().clone();
        self.world.borrow_mut().online = online;
        self.check_liveness();
        self.check_asks();
        self.check_release();
        self.totals
    }

    /// One cycle as the loop would run it, or the daemon's death and its successor.
    fn attend(&mut self, full: bool, commands: &[Command]) -> Option<Report> {
        self.world.borrow_mut().advance(1_000_000_000);
        self.warden.read_process_events();
        self.triggers.timer = true;
        self.triggers.command = !commands.is_empty();
        self.triggers.full |= full || !commands.is_empty();
        let triggers = std::mem::take(&mut self.triggers);
        let request = triggers.scan_request(self.warden.state_mut());
        let warden = &mut self.warden;
        let cycle = catch_unwind(AssertUnwindSafe(|| warden.cycle(request, commands)));
        let report = match cycle {
            Ok(report) => report,
            Err(why) if why.downcast_ref::<&str>() == Some(&KILLED) => {
                self.say(|| "killed".to_owned());
                self.totals.deaths += 1;
                self.restart();
                return None;
            }
            Err(why) => resume_unwind(why),
        };
        self.tell_story();
        self.note_understood();
        self.totals.cycles += 1;
        self.totals.actions += report.outcomes.len();
        for event in &report.events {
            self.totals.violations += usize::from(event.kind == EventKind::Violation);
            self.say(|| {
                format!("{:?} {:?}: {}", event.kind, event.job.as_ref().map(ToString::to_string), event.text)
            });
        }
        for (action, outcome) in &report.outcomes {
            self.say(|| {
                format!(
                    "{} {} {} -> {}: {outcome:?}",
                    action.kind.name(),
                    action.thread.tid,
                    action.current,
                    action.target
                )
            });
        }
        for (action, outcome) in &report.cpuset_outcomes {
            if let (CpusetChange::MoveBack { process, .. }, CpusetOutcome::Refused { .. }) =
                (&action.change, outcome)
            {
                self.homeless.insert(*process);
            }
            self.totals.cpusets += usize::from(matches!(outcome, CpusetOutcome::Done { .. }));
            self.say(|| format!("{} of {} {:?}: {outcome:?}", action.name(), action.job, action.change));
        }
        for (command, reply) in commands.iter().zip(&report.replies) {
            self.believe(command, reply.as_ref().ok());
        }
        self.check_masks();
        assert!(self.warden.faults().audit.is_empty(), "{:?}", self.warden.faults().audit);
        Some(report)
    }

    fn restart(&mut self) {
        let node = SimNode::new(Rc::clone(&self.world), Rc::clone(&self.workload), self.faults.clone());
        // A new daemon has read nobody's marks, and hears what is asked from now on.
        self.world.borrow_mut().asked.clear();
        self.world.borrow_mut().processes.values_mut().for_each(|process| process.fresh_attributes = true);
        self.warden = start(node, &self.journal, &self.topology, &self.policy);
        self.restart_fork_tracking();
        self.triggers = Triggers::default();
        self.triggers.full = true;
    }

    fn restart_fork_tracking(&mut self) {
        let now = self.world.borrow().moment().since_boot;
        self.warden.track_forks(Some(now).filter(|_| self.faults.lost_events == 0));
    }

    /// Prints what happened to processes and masks since the last cycle.
    fn tell_story(&mut self) {
        if let Some(story) = &mut self.world.borrow_mut().story {
            story.drain(..).for_each(|line| println!("{line}"));
        }
    }

    fn say(&self, what: impl FnOnce() -> String) {
        if self.story {
            println!("{}", what());
        }
    }

    /// What people ask for: new jobs of processes, reservations, other sizes, releases.
    fn commands(&mut self) -> Vec<Command> {
        let mut commands = Vec::new();
        for _ in 0..self.chance.below(3) {
            let names: Vec<JobId> = self.warden.state().jobs.keys().cloned().collect();
            let known = self.chance.pick(&names).cloned();
            let people: Vec<Pid> = self.world.borrow().processes.keys().copied().collect();
            let pid = self.chance.pick(&people).copied();
            let cores = self.chance.below(5);
            let command = match (self.chance.below(10), known) {
                (0..=5, _) => {
                    self.next_name += 1;
                    assign(&format!("manual:j{}", self.next_name).parse().unwrap(), cores, pid)
                }
                (6..=7, Some(job)) => assign(&job, cores, None),
                (9, Some(_)) if self.chance.chance(300) => Command::Defrag { caller: ROOT },
                (_, Some(job)) => Command::Release { job, caller: ROOT },
                (_, None) => continue,
            };
            self.say(|| format!("command {command:?}"));
            commands.push(command);
        }
        commands
    }

    /// After a wish was granted, its processes and their descendants are the job's in truth.
    fn believe(&mut self, command: &Command, reply: Option<&Reply>) {
        let Some(reply) = reply else {
            self.totals.refusals += 1;
            return;
        };
        if let Reply::Moved(healing) = reply {
            self.totals.moves += healing.moves.len();
        }
        if let Reply::Released(jobs) = reply {
            // A scheduler's job keeps its processes.
            let lives_on = |job: &JobId| self.warden.state().jobs.get(job).is_some_and(|job| job.released);
            let over = jobs.iter().filter(|job| !lives_on(job));
            let names: Vec<String> = over.map(ToString::to_string).collect();
            let mut world = self.world.borrow_mut();
            for process in world.processes.values_mut() {
                process.truth.take_if(|truth| names.contains(truth));
            }
        }
        if let (Command::Assign(wish), Reply::Assigned(job)) = (command, reply) {
            self.totals.jobs += 1;
            let mut world = self.world.borrow_mut();
            let mut mine: BTreeSet<Pid> = wish.pids.iter().copied().collect();
            loop {
                let members = self.warden.state();
                let more: Vec<Pid> = world
                    .processes
                    .values()
                    .filter(|process| mine.contains(&process.parent) && !mine.contains(&process.id.pid))
                    .filter(|process| {
                        members.members.get(&process.id.pid).is_some_and(|member| member.job == job.id)
                    })
                    .map(|process| process.id.pid)
                    .collect();
                if more.is_empty() {
                    break;
                }
                mine.extend(more);
            }
            for pid in mine {
                if let Some(process) = world.processes.get_mut(&pid) {
                    process.truth = Some(job.id.to_string());
                }
            }
        }
    }
}

/// What the node of a run offers for walls.
fn cpuset_support(seed: &Seed) -> CpusetSupport {
    let mut chance = seed.stream("ground");
    let cpusets = match chance.below(4) {
        0 => CpusetHierarchy::Unavailable { why: "this node has none".to_owned() },
        1 | 2 => CpusetHierarchy::Systemd,
        _ => CpusetHierarchy::Unified,
    };
    CpusetSupport { hierarchy: cpusets, affinity_persists: chance.chance(700) }
}

fn start(
    node: SimNode,
    journal: &SimJournal,
    topology: &Topology,
    policy: &Policy,
) -> Warden<SimNode, SimJournal> {
    let state = WardenState::new(topology.clone(), &policy.housekeeping);
    let host = pjw_sources::Host { name: "n1".to_owned(), flux_user: None };
    Warden::new(node, journal.clone(), state, journal.records(), policy.clone(), host)
}

fn assign(job: &JobId, cores: u32, pid: Option<Pid>) -> Command {
    Command::Assign(Assign {
        job: job.clone(),
        amount: Some(Amount::Cores(cores)),
        placement: None,
        class: None,
        near: None,
        bind_memory: None,
        isolated: None,
        pids: pid.into_iter().collect(),
        session: None,
        must_be_new: false,
        owner: None,
        caller: ROOT,
    })
}
