//! A random workload: the actions of users, programs and schedulers, as far as the kernel allows them.

use pjw_core::cpuset::{CpuSet, Pu};
use pjw_core::ids::{Pid, Tid, Uid};

use crate::seed::RandomStream;
use crate::world::{SimMachine, SimProcess};

/// The ids of the users of the simulated machine, except root.
pub const USERS: [Uid; 3] = [Uid(1001), Uid(1002), Uid(1003)];
/// The largest number of processes. More processes make a run slow without testing more.
const MAX_PROCESSES: usize = 60;

/// A random workload of a simulated machine: users, programs and a batch system that start, change and end
/// processes.
#[derive(Debug, Clone)]
pub struct Workload {
    random: RandomStream,
    /// The number of the next job of the simulated batch system.
    next_job: u32,
    /// Whether the workload switches PUs off and on.
    has_hotplug: bool,
    is_stopped: bool,
}

impl Workload {
    /// Makes the random workload of a simulation run. `random` is the random number generator of the run. If
    /// `has_hotplug` is true, the workload also switches PUs (logical CPUs) off and on.
    #[must_use]
    pub fn new(random: &RandomStream, has_hotplug: bool) -> Self {
        Self { random: random.substream("workload"), next_job: 1, has_hotplug, is_stopped: false }
    }

    /// Makes a workload that changes nothing, for simulation runs without a random workload. [`Workload::step`]
    /// has no effect on such a workload.
    #[must_use]
    pub fn new_stopped() -> Self {
        Self { is_stopped: true, ..Self::new(&RandomStream::from_seed(0), false) }
    }

    /// Stops this workload for the rest of the simulation run: from now on, [`Workload::step`] has no effect.
    pub fn stop(&mut self) {
        self.is_stopped = true;
    }

    /// Makes one random change in the simulated machine `world`, such as a fork, a new thread, a request for an
    /// affinity mask, or an exit. Then advances the simulated time by at most 49 ms. Has no effect if the
    /// workload is stopped.
    pub fn step(&mut self, world: &mut SimMachine) {
        if self.is_stopped {
            return;
        }
        let is_full = world.processes.len() > MAX_PROCESSES;
        let pid = self.random_process(world);
        match self.random.random_below(20) {
            0..=2 if !is_full => {
                let user = self.random.random_element(&USERS).copied().unwrap_or(Uid::ROOT);
                world.spawn(Pid(1), user);
            }
            3..=6 if !is_full => {
                let uid = world.processes[&pid].uid;
                let creator = self.random_thread(world, pid);
                world.fork(pid, creator, uid);
            }
            7 => self.daemonise(world, pid),
            8 => {
                let creator = self.random_thread(world, pid);
                world.clone_thread(pid, creator);
            }
            9 => world.setsid(pid),
            10 => world.exec(pid, "other"),
            11..=12 => self.toggle_load(world, pid),
            13 => self.request_random_mask(world, pid),
            14 if !is_full => self.start_slurm_job(world),
            15 => self.claim_other_job(world, pid),
            16 => world.move_process(pid, "/user.slice/user-1001.slice/session-1.scope"),
            17 if self.has_hotplug => {
                let pu = self.random.random_below(pu_count(world));
                world.toggle_pu(Pu(pu));
            }
            _ => world.exit_process(pid),
        }
        world.advance(u64::from(self.random.random_below(50)) * 1_000_000);
    }

    /// Returns a random process other than process 1. Returns process 1 if there is no other.
    fn random_process(&mut self, world: &SimMachine) -> Pid {
        let pids: Vec<Pid> = world.processes.keys().copied().filter(|&pid| pid != Pid(1)).collect();
        self.random.random_element(&pids).copied().unwrap_or(Pid(1))
    }

    /// Returns a random thread of the process `pid`.
    fn random_thread(&mut self, world: &SimMachine, pid: Pid) -> Tid {
        let tids: Vec<Tid> = world.processes[&pid].threads.keys().copied().collect();
        self.random.random_element(&tids).copied().unwrap_or(Tid(pid.0))
    }

    /// Makes the process `pid` start a daemon by a double fork and setsid(2). The parent of the daemon exits before the
    /// next scan.
    fn daemonise(&mut self, world: &mut SimMachine, pid: Pid) {
        let uid = world.processes[&pid].uid;
        let middle = world.spawn(pid, uid);
        world.setsid(middle);
        world.spawn(middle, uid);
        world.exit_process(middle);
    }

    /// Makes each thread of the process `pid` switch between running and sleeping, with a probability of one half.
    fn toggle_load(&mut self, world: &mut SimMachine, pid: Pid) {
        let Some(process) = world.processes.get_mut(&pid) else { return };
        for thread in process.threads.values_mut() {
            thread.is_busy ^= self.random.random_bool(500);
        }
    }

    /// Makes a thread of the process `pid` request a mask: every PU, one PU, or a random set of PUs.
    fn request_random_mask(&mut self, world: &mut SimMachine, pid: Pid) {
        let tid = self.random_thread(world, pid);
        let count = pu_count(world);
        let mask = match self.random.random_below(3) {
            0 => world.cpus.clone(),
            1 => Pu(self.random.random_below(count)).into(),
            _ => (0..count).filter(|_| self.random.random_bool(500)).map(Pu).collect::<CpuSet>(),
        };
        world.request_mask(pid, tid, &mask);
    }

    /// Makes the process `pid` set the environment variables of a job to which it does not belong, or which does not
    /// exist. Has no effect on a process of a job.
    fn claim_other_job(&mut self, world: &mut SimMachine, pid: Pid) {
        let id = self.random.random_below(self.next_job + 3);
        if let Some(process) = world.processes.get_mut(&pid).filter(|process| process.expected_job.is_none())
        {
            set_environ(process, id, 4);
            process.attributes_changed = true;
        }
    }

    /// Starts a job of the batch system Slurm: its process `slurmstepd`, and one task (a process of the job), each in
    /// a cgroup. At random, the cgroup of the job has a cpuset.
    fn start_slurm_job(&mut self, world: &mut SimMachine) {
        let id = self.next_job;
        self.next_job += 1;
        let directory = format!("/system.slice/slurmstepd.scope/job_{id}");
        let stepd = world.spawn(Pid(1), Uid::ROOT);
        world.exec(stepd, "slurmstepd");
        world.move_process(stepd, &format!("{directory}/step_0/slurm"));
        let user = self.random.random_element(&USERS).copied().unwrap_or(Uid::ROOT);
        if self.random.random_bool(300) {
            let count = pu_count(world);
            let first = self.random.random_below(count);
            let last = (first + self.random.random_below(3)).min(count - 1);
            world.cpusets.insert(directory.clone(), CpuSet::from_range(Pu(first), Pu(last)));
        }
        let task = world.spawn(stepd, user);
        world.move_process(task, &format!("{directory}/step_0/user/task_0"));
        let cores = self.random.random_below(4);
        if let Some(task) = world.processes.get_mut(&task) {
            task.expected_job = Some(format!("slurm:{id}"));
            set_environ(task, id, cores);
        }
        world.exec(task, "task");
    }
}

/// Sets the environment variables that Slurm gives to the tasks of a job.
fn set_environ(process: &mut SimProcess, id: u32, cores: u32) {
    process.environ.insert("SLURM_JOB_ID".to_owned(), id.to_string());
    process.environ.insert("SLURM_CPUS_ON_NODE".to_owned(), cores.to_string());
}

fn pu_count(world: &SimMachine) -> u32 {
    u32::try_from(world.cpus.len()).unwrap_or(1)
}
