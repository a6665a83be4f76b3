//! A random workload: the actions of users, programs and schedulers, as far as the kernel allows them.

use pjw_core::cpuset::{CpuSet, Pu};
use pjw_core::ids::{Pid, Tid, Uid};

use crate::seed::Seed;
use crate::world::{SimProcess, World};

/// The users of the machine.
const USERS: [Uid; 3] = [Uid(1001), Uid(1002), Uid(1003)];
/// The largest number of processes. More processes make a run slow without testing more.
const CROWD: usize = 60;

/// A random workload.
#[derive(Debug, Clone)]
pub struct Workload {
    chance: Seed,
    next_job: u32,
    hotplug: bool,
    quiet: bool,
}

impl Workload {
    /// The workload of the run with this seed. With `hotplug`, PUs go offline and online.
    #[must_use]
    pub fn new(seed: &Seed, hotplug: bool) -> Self {
        Self { chance: seed.stream("workload"), next_job: 1, hotplug, quiet: false }
    }

    /// Stops the workload: later steps do nothing.
    pub fn stop(&mut self) {
        self.quiet = true;
    }

    /// Makes one random change.
    pub fn step(&mut self, world: &mut World) {
        if self.quiet {
            return;
        }
        let crowded = world.processes.len() > CROWD;
        let Some(pid) = self.somebody(world) else { return };
        match self.chance.below(20) {
            0..=2 if !crowded => {
                let user = self.chance.pick(&USERS).copied().unwrap_or(Uid::ROOT);
                world.spawn(Pid(1), user);
            }
            3..=6 if !crowded => {
                let uid = world.processes[&pid].uid;
                let creator = self.some_thread(world, pid);
                world.fork(pid, creator, uid);
            }
            7 => self.daemonise(world, pid),
            8 => {
                let creator = self.some_thread(world, pid);
                world.clone_thread(pid, creator);
            }
            9 => world.setsid(pid),
            10 => world.exec(pid, "other"),
            11..=12 => self.flip_heat(world, pid),
            13 => self.tamper(world, pid),
            14 if !crowded => self.scheduler_job(world),
            15 => self.boast(world, pid),
            16 => world.enter(pid, "/user.slice/user-1001.slice/session-1.scope"),
            17 if self.hotplug => {
                let pu = self.chance.below(u32::try_from(world.cpus.len()).unwrap_or(1));
                world.flip(Pu(pu));
            }
            _ => world.exit(pid),
        }
        world.advance(u64::from(self.chance.below(50)) * 1_000_000);
    }

    fn somebody(&mut self, world: &World) -> Option<Pid> {
        let people: Vec<Pid> = world.processes.keys().copied().filter(|&pid| pid != Pid(1)).collect();
        self.chance.pick(&people).copied().or(Some(Pid(1)))
    }

    /// A random thread of a process, which then forks or clones.
    fn some_thread(&mut self, world: &World, pid: Pid) -> Tid {
        let tids: Vec<Tid> = world.processes[&pid].threads.keys().copied().collect();
        self.chance.pick(&tids).copied().unwrap_or(Tid(pid.0))
    }

    /// A process becomes a daemon by a double fork and setsid(2). Its parent has exited before the next scan.
    fn daemonise(&mut self, world: &mut World, pid: Pid) {
        let uid = world.processes[&pid].uid;
        let middle = world.spawn(pid, uid);
        world.setsid(middle);
        world.spawn(middle, uid);
        world.exit(middle);
    }

    fn flip_heat(&mut self, world: &mut World, pid: Pid) {
        for thread in
            world.processes.get_mut(&pid).into_iter().flat_map(|process| process.threads.values_mut())
        {
            thread.hot ^= self.chance.chance(500);
        }
    }

    /// A program requests a mask: every PU, one PU, or a random set.
    fn tamper(&mut self, world: &mut World, pid: Pid) {
        let tids: Vec<Tid> = world.processes[&pid].threads.keys().copied().collect();
        let Some(&tid) = self.chance.pick(&tids) else { return };
        let count = u32::try_from(world.cpus.len()).unwrap_or(1);
        let mask = match self.chance.below(3) {
            0 => world.cpus.clone(),
            1 => Pu(self.chance.below(count)).into(),
            _ => (0..count).filter(|_| self.chance.chance(500)).map(Pu).collect::<CpuSet>(),
        };
        world.choose(pid, tid, &mask);
    }

    /// A process sets the environment variable of a job that belongs to another user or does not exist.
    fn boast(&mut self, world: &mut World, pid: Pid) {
        let id = self.chance.below(self.next_job + 3).to_string();
        if let Some(process) = world.processes.get_mut(&pid).filter(|process| process.truth.is_none()) {
            process.environ.insert("SLURM_JOB_ID".to_owned(), id);
            process.environ.insert("SLURM_CPUS_ON_NODE".to_owned(), "4".to_owned());
            process.fresh_attributes = true;
        }
    }

    /// Slurm starts a job: its daemon, a cgroup, a task, and sometimes a cpuset.
    fn scheduler_job(&mut self, world: &mut World) {
        let id = self.next_job;
        self.next_job += 1;
        let directory = format!("/system.slice/slurmstepd.scope/job_{id}");
        let stepd = world.spawn(Pid(1), Uid::ROOT);
        world.exec(stepd, "slurmstepd");
        world.enter(stepd, &format!("{directory}/step_0/slurm"));
        let user = self.chance.pick(&USERS).copied().unwrap_or(Uid::ROOT);
        let count = u32::try_from(world.cpus.len()).unwrap_or(1);
        if self.chance.chance(300) {
            let first = self.chance.below(count);
            let last = (first + self.chance.below(3)).min(count - 1);
            world.cpusets.insert(directory.clone(), CpuSet::range(Pu(first), Pu(last)));
        }
        let task = world.spawn(stepd, user);
        world.enter(task, &format!("{directory}/step_0/user/task_0"));
        let cores = self.chance.below(4).to_string();
        if let Some(task) = world.processes.get_mut(&task) {
            name_job(task, id, &cores);
        }
        world.exec(task, "task");
    }
}

fn name_job(task: &mut SimProcess, id: u32, cores: &str) {
    task.truth = Some(format!("slurm:{id}"));
    task.environ.insert("SLURM_JOB_ID".to_owned(), id.to_string());
    task.environ.insert("SLURM_CPUS_ON_NODE".to_owned(), cores.to_owned());
}
