//! The faults of a run, drawn once from its seed. Some runs never have a given fault, so each fault also occurs
//! alone.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use crate::seed::RandomStream;

/// The faults that a simulation run injects, each with its probability in permille.
#[derive(Debug, Clone)]
pub struct Faults {
    /// The probability, in permille, that the kernel loses a process event or an affinity request without
    /// reporting the loss.
    pub silent_event_loss_permille: u32,
    /// The probability, in permille per attempt, that the kernel refuses to set an affinity mask.
    pub refused_mask_permille: u32,
    /// The probability, in permille per attempt, that the journal can't write its records.
    pub refused_record_permille: u32,
    /// The probability, in permille per step of the daemon, that processes change between this step and the
    /// one before, such as between a scan and the changes that follow from the scan.
    pub interleaved_step_permille: u32,
    /// Whether PUs go offline and come back during the run.
    pub hotplug: bool,
    /// The probability, in permille per process and scan, that an existing process can't be scanned.
    pub unreadable_process_permille: u32,
    /// The probability, in permille, that the daemon is killed. It applies before and after each record that
    /// the daemon writes and each change that it makes.
    pub kill_permille: u32,
    enabled: Rc<Cell<bool>>,
    random: Rc<RefCell<RandomStream>>,
}

/// The payload of the panic that simulates a kill of the daemon. The simulation catches this panic and starts a new
/// daemon.
pub const KILL_PANIC: &str = "pjw-sim: killed";

impl Faults {
    /// Draws the probability of each fault of a simulation run at random from the seed of the run.
    #[must_use]
    pub fn from_seed(seed: &RandomStream) -> Self {
        let mut swarm = seed.substream("swarm");
        let mut sometimes = |permille: u32| if swarm.chance(500) { swarm.random_below(permille) } else { 0 };
        Self {
            silent_event_loss_permille: sometimes(300),
            refused_mask_permille: sometimes(100),
            refused_record_permille: sometimes(80),
            interleaved_step_permille: sometimes(500),
            kill_permille: sometimes(20),
            hotplug: sometimes(2) > 0,
            unreadable_process_permille: sometimes(60),
            enabled: Rc::new(Cell::new(true)),
            random: Rc::new(RefCell::new(seed.substream("faults"))),
        }
    }

    /// Returns faults that never occur, for a run without faults.
    #[must_use]
    pub fn none() -> Self {
        let faults = Self::from_seed(&RandomStream::new(0));
        faults.disable();
        faults
    }

    /// Disables all faults for the rest of the run. From then on, the daemon must repair the effects of
    /// earlier faults.
    pub fn disable(&self) {
        self.enabled.set(false);
    }

    /// Decides at random whether a fault occurs now: returns true with a probability of `permille` in 1000.
    /// Always false after [`Faults::disable`].
    #[must_use]
    pub fn occurs(&self, permille: u32) -> bool {
        self.enabled.get() && self.random.borrow_mut().chance(permille)
    }

    /// Decides at random, with the probability [`Faults::kill_permille`], whether the daemon is killed now. If
    /// so, simulates `kill -9`: panics with [`KILL_PANIC`].
    pub fn maybe_kill_daemon(&self) {
        if self.occurs(self.kill_permille) {
            std::panic::resume_unwind(Box::new(KILL_PANIC));
        }
    }
}
