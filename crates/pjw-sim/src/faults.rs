//! What goes wrong in a run, drawn once from its seed: some runs never see a given fault, so that each fault is
//! also met alone.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use crate::seed::Seed;

/// The faults of a run, in permille of their occasions.
#[derive(Debug, Clone)]
pub struct Faults {
    /// Events that get lost without a word.
    pub lost_events: u32,
    /// Masks that the kernel refuses to set.
    pub refused: u32,
    /// Records that can't be written.
    pub unwritten: u32,
    /// Things that happen between a look and what it leads to.
    pub meanwhile: u32,
    /// Whether PUs go off and on.
    pub hotplug: bool,
    /// Processes that are there and can't be looked at.
    pub unseen: u32,
    /// The daemon's death before or after a record or an action.
    pub crash: u32,
    switch: Rc<Cell<bool>>,
    chance: Rc<RefCell<Seed>>,
}

/// What a simulated kill leaves of the daemon: the message of its unwinding.
pub const KILLED: &str = "pjw-sim: killed";

impl Faults {
    /// Draws the faults of a run.
    #[must_use]
    pub fn draw(seed: &Seed) -> Self {
        let mut swarm = seed.stream("swarm");
        let mut sometimes = |permille: u32| if swarm.chance(500) { swarm.below(permille) } else { 0 };
        Self {
            lost_events: sometimes(300),
            refused: sometimes(100),
            unwritten: sometimes(80),
            meanwhile: sometimes(500),
            crash: sometimes(20),
            hotplug: sometimes(2) > 0,
            unseen: sometimes(60),
            switch: Rc::new(Cell::new(true)),
            chance: Rc::new(RefCell::new(seed.stream("faults"))),
        }
    }

    /// Stops all faults, for the phase in which everything must come right.
    pub fn stop(&self) {
        self.switch.set(false);
    }

    /// Whether a fault of this frequency strikes now.
    #[must_use]
    pub fn strikes(&self, permille: u32) -> bool {
        self.switch.get() && self.chance.borrow_mut().chance(permille)
    }

    /// Dies here, if it is time to: as `kill -9` would, between two steps.
    pub fn maybe_die(&self) {
        if self.strikes(self.crash) {
            std::panic::resume_unwind(Box::new(KILLED));
        }
    }
}
