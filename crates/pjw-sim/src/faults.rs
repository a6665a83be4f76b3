//! The faults of a run, drawn once from its seed. Some runs never have a given fault, so each fault also occurs
//! alone.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use crate::seed::RandomStream;

/// The faults that a simulation run injects, each with its frequency: the faults per 1000 occasions on which the fault
/// could occur.
#[derive(Debug, Clone)]
pub struct Faults {
    /// How often the kernel loses process events without reporting the loss, in 1000 occasions.
    pub lost_events: u32,
    /// How often the kernel refuses to set an affinity mask, in 1000 attempts.
    pub refused_masks: u32,
    /// How often the journal can't write its records, in 1000 attempts.
    pub refused_records: u32,
    /// How often processes change between a scan and the changes that the daemon makes because of it, in 1000
    /// occasions.
    pub interleaved_steps: u32,
    /// Whether PUs go offline and come back during the run.
    pub hotplug: bool,
    /// How often a process that exists can't be scanned, in 1000 occasions.
    pub unreadable_processes: u32,
    /// How often the daemon is killed before or after it writes a record or makes a change, in 1000 occasions.
    pub kills: u32,
    enabled: Rc<Cell<bool>>,
    random: Rc<RefCell<RandomStream>>,
}

/// The payload of the panic that simulates a kill of the daemon. The simulation catches this panic and starts a new
/// daemon.
pub const KILL_PANIC: &str = "pjw-sim: killed";

impl Faults {
    /// Draws the frequency of each fault of a simulation run at random from the seed of the run.
    #[must_use]
    pub fn from_seed(seed: &RandomStream) -> Self {
        let mut swarm = seed.substream("swarm");
        let mut sometimes = |permille: u32| if swarm.chance(500) { swarm.random_below(permille) } else { 0 };
        Self {
            lost_events: sometimes(300),
            refused_masks: sometimes(100),
            refused_records: sometimes(80),
            interleaved_steps: sometimes(500),
            kills: sometimes(20),
            hotplug: sometimes(2) > 0,
            unreadable_processes: sometimes(60),
            enabled: Rc::new(Cell::new(true)),
            random: Rc::new(RefCell::new(seed.substream("faults"))),
        }
    }

    /// Faults that never occur, for a run without faults.
    #[must_use]
    pub fn none() -> Self {
        let faults = Self::from_seed(&RandomStream::new(0));
        faults.disable();
        faults
    }

    /// Disables all faults for the rest of the run. After that, the daemon must repair what the faults left wrong.
    pub fn disable(&self) {
        self.enabled.set(false);
    }

    /// Decides at random whether a fault occurs now that occurs on `permille` of 1000 occasions. Always false after
    /// [`Faults::disable`].
    #[must_use]
    pub fn occurs(&self, permille: u32) -> bool {
        self.enabled.get() && self.random.borrow_mut().chance(permille)
    }

    /// Decides at random, with the frequency `kills`, whether the daemon is killed now. If so, simulates `kill -9`:
    /// panics with [`KILL_PANIC`].
    pub fn maybe_kill_daemon(&self) {
        if self.occurs(self.kills) {
            std::panic::resume_unwind(Box::new(KILL_PANIC));
        }
    }
}
