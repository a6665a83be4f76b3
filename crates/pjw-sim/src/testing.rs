//! A machine on which only those things happen that a test does: no faults, no random workload.
#![allow(clippy::expect_used, reason = "a test may fail")]

use std::cell::{RefCell, RefMut};
use std::rc::Rc;

use pjw_core::command::{AssignCommand, Caller};
use pjw_core::ids::{Pid, Tid, Uid};
use pjw_core::testing::{cpu_set, job};
use pjw_core::{cpuset::CpuSet, cpuset_group::CpusetSupport, job::CpuRequest};

use crate::world::{SimMachine, SimProcess};
use crate::{faults::Faults, node::SimMachineInterface, workload::Workload};

/// A simulated machine for tests. The machine changes only as the test says: it has no faults and no random workload.
/// Process ids, thread ids and user ids are plain numbers. Affinity masks are CPU lists such as `0-3,8`.
#[derive(Debug, Clone)]
pub struct ScriptedMachine {
    world: Rc<RefCell<SimMachine>>,
}

impl ScriptedMachine {
    /// Makes a machine with the PUs (logical CPUs) `cpus`, on which only process 1 runs. `cpuset_support` says whether
    /// the daemon can use cpusets on this machine, and in which cgroup hierarchy (v1 or v2).
    #[must_use]
    pub fn new(cpus: &CpuSet, cpuset_support: CpusetSupport) -> Self {
        let mut world = SimMachine::new(cpus);
        world.cpuset_support = cpuset_support;
        Self { world: Rc::new(RefCell::new(world)) }
    }

    /// Returns the interface through which the daemon reads and changes this machine: a [`SimMachineInterface`] without
    /// faults and without a random workload. Changes through one of the two values are visible through the other.
    #[must_use]
    pub fn simulated_machine(&self) -> SimMachineInterface {
        SimMachineInterface::new(
            Rc::clone(&self.world),
            Rc::new(RefCell::new(Workload::new_stopped())),
            Faults::none(),
        )
    }

    /// Returns the simulated kernel with its processes, so that a test can read and change them.
    #[must_use]
    pub fn world(&self) -> RefMut<'_, SimMachine> {
        self.world.borrow_mut()
    }

    /// Returns the running process `pid`, so that a test can read and change it. Panics if there is no such
    /// process.
    #[must_use]
    pub fn process(&self, pid: u32) -> RefMut<'_, SimProcess> {
        RefMut::map(self.world(), |world| world.processes.get_mut(&Pid(pid)).expect("the process runs"))
    }

    /// Starts the process `pid` of user `uid` as a child of `parent`, and returns the process, so that the test can
    /// change it. A child of process 1 leads a session of its own, as a service or a login does. Panics if another
    /// process or thread has the id `pid`.
    pub fn spawn(&self, pid: u32, parent: u32, uid: u32) -> RefMut<'_, SimProcess> {
        let mut world = self.world();
        world.set_next_id(pid);
        let child = world.spawn(Pid(parent), Uid(uid));
        assert_eq!(child, Pid(pid), "another process or thread has this id");
        if parent <= 1 {
            world.setsid(child);
        }
        RefMut::map(world, |world| world.processes.get_mut(&child).expect("it was just started"))
    }

    /// Starts the thread `tid` in the process `pid`. The first thread of the process is the creator of the new
    /// thread.
    pub fn clone_thread(&self, pid: u32, tid: u32) {
        let mut world = self.world();
        world.set_next_id(tid);
        world.clone_thread(Pid(pid), Tid(pid));
    }

    /// Ends the process `pid` with all its threads.
    pub fn exit(&self, pid: u32) {
        self.world().exit_process(Pid(pid));
    }

    /// Requests the affinity mask `mask` for the thread `tid` of the process `pid`, as the thread itself would.
    /// Returns whether the simulated kernel accepts the request.
    pub fn request_mask(&self, pid: u32, tid: u32, mask: &str) -> bool {
        self.world().request_mask(Pid(pid), Tid(tid), &cpu_set(mask))
    }

    /// Returns the effective affinity mask of the thread `tid` of the process `pid`, as a CPU list. Panics if there is
    /// no such thread.
    #[must_use]
    pub fn effective_mask(&self, pid: u32, tid: u32) -> String {
        let world = self.world.borrow();
        let process = &world.processes[&Pid(pid)];
        world.effective_mask(process, &process.threads[&Tid(tid)]).to_string()
    }

    /// Advances the simulated time by `ns` nanoseconds. The threads whose ids are in `busy` run for that time.
    /// All other threads sleep.
    pub fn run_for(&self, busy: &[u32], ns: u64) {
        let mut world = self.world();
        for threads in world.processes.values_mut().map(|process| &mut process.threads) {
            threads.iter_mut().for_each(|(tid, thread)| thread.is_busy = busy.contains(&tid.0));
        }
        world.advance(ns);
        let threads = world.processes.values_mut().flat_map(|process| process.threads.values_mut());
        threads.for_each(|thread| thread.is_busy = false);
    }
}

/// Makes the command by which root grants `cores` cores to the job `id` and adds the processes `pids` to the job. All
/// options have their defaults. The caller passes the command to the daemon.
#[must_use]
pub fn assign_command(id: &str, cores: u32, pids: &[Pid]) -> AssignCommand {
    let caller = Caller { uid: Uid::ROOT, is_admin: true };
    AssignCommand {
        cpu_request: Some(CpuRequest::Cores(cores)),
        pids: pids.to_vec(),
        ..AssignCommand::new(job(id), caller)
    }
}
