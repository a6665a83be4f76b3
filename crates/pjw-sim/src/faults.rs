//! The faults of a run, drawn once from its seed. Some runs never have a given fault, so each fault also occurs
//! alone.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use crate::seed::RandomStream;

/// The faults that a simulation run injects, such as a kill of the daemon, or a refusal of the simulated kernel to
/// change an affinity mask. Each fault has a probability in permille. Hotplug has no probability: `has_hotplug` says
/// whether PUs (logical CPUs) go offline and come back during the run.
#[derive(Debug, Clone)]
pub struct Faults {
    /// The probability, in permille per event, that the simulated kernel loses a process event or a report of
    /// a sched_setaffinity(2) call, without reporting the loss.
    pub silent_event_loss_permille: u32,
    /// The probability, in permille per attempt, that the simulated kernel refuses to change an affinity mask
    /// or a cpuset.
    pub refused_change_permille: u32,
    /// The probability, in permille per attempt, that the simulated journal fails to write records, because
    /// its disk is full.
    pub failed_journal_write_permille: u32,
    /// The probability, in permille per step of the daemon, that the simulated programs change something
    /// immediately before the step. For example, a program starts a process, ends a process or requests a
    /// mask. A step of the daemon is, for example, a scan or one change of a mask.
    pub change_between_steps_permille: u32,
    /// The probability, in permille per attempt, that the change of a cpuset is delayed: the simulated kernel
    /// does not make the change at once, but before a later scan, mask change or cpuset change of the daemon.
    pub delayed_change_permille: u32,
    /// Whether PUs go offline and come back during the run.
    pub has_hotplug: bool,
    /// The probability, in permille, that a scan of the daemon can't read a process that exists. Each scan decides this
    /// anew for each process.
    pub unreadable_process_permille: u32,
    /// The probability, in permille per kill point, that the daemon is killed at this point. There is a kill
    /// point before and after each append to the journal, each change of a mask and each change of a cpuset.
    pub kill_permille: u32,
    /// False after [`Faults::disable`].
    enabled: Rc<Cell<bool>>,
    random: Rc<RefCell<RandomStream>>,
}

/// The payload of the panic that simulates a kill of the daemon. The simulation catches this panic, and starts
/// the daemon again.
pub const KILL_PANIC_PAYLOAD: &str = "pjw-sim: killed";

impl Faults {
    /// Chooses at random the probability of each fault, and whether hotplug occurs. `random` is the random
    /// number generator of the simulation run. Each fault has the probability 0 in about half of all runs.
    #[must_use]
    pub fn from_random(random: &RandomStream) -> Self {
        let mut swarm = random.substream("swarm");
        // A stream of its own, so that this fault does not change the choices of the others.
        let mut delays = random.substream("delays");
        let delayed_change_permille = if delays.random_bool(500) { delays.random_below(500) } else { 0 };
        let mut sometimes =
            |permille: u32| if swarm.random_bool(500) { swarm.random_below(permille) } else { 0 };
        Self {
            silent_event_loss_permille: sometimes(300),
            refused_change_permille: sometimes(100),
            failed_journal_write_permille: sometimes(80),
            change_between_steps_permille: sometimes(500),
            kill_permille: sometimes(20),
            delayed_change_permille,
            has_hotplug: sometimes(2) > 0,
            unreadable_process_permille: sometimes(60),
            enabled: Rc::new(Cell::new(true)),
            random: Rc::new(RefCell::new(random.substream("faults"))),
        }
    }

    /// Returns a value for a simulation run without any fault: all faults with a probability are disabled
    /// ([`Faults::disable`]), and there is no hotplug.
    #[must_use]
    pub fn none() -> Self {
        let faults = Self { has_hotplug: false, ..Self::from_random(&RandomStream::from_seed(0)) };
        faults.disable();
        faults
    }

    /// Disables all faults that have a probability, such as a kill of the daemon, for the rest of the
    /// simulation run. The faults are disabled in all clones of this value too. Does not change
    /// [`Faults::has_hotplug`]. Tests call this function, and then check that the daemon repairs the effects of
    /// earlier faults.
    pub fn disable(&self) {
        self.enabled.set(false);
    }

    /// Decides at random whether a fault occurs now: returns true with a probability of `permille` in 1000.
    /// Always false after [`Faults::disable`] was called.
    #[must_use]
    pub fn occurs(&self, permille: u32) -> bool {
        self.enabled.get() && self.random.borrow_mut().random_bool(permille)
    }

    /// Simulates `kill -9` of the daemon with the probability [`Faults::kill_permille`]: panics with the
    /// payload [`KILL_PANIC_PAYLOAD`]. Otherwise has no effect.
    pub fn maybe_kill_daemon(&self) {
        if self.occurs(self.kill_permille) {
            std::panic::resume_unwind(Box::new(KILL_PANIC_PAYLOAD));
        }
    }
}
