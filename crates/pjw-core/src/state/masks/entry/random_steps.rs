//! A mask entry against a model of the kernel: whatever happens between two readings, the true request is among the
//! candidates.

use crate::state::masks::request::effective_mask;
use proptest::prelude::*;

use super::tests::{first, limits_of, machine, masks};
use super::*;

/// What can happen to a mask between two readings.
#[derive(Debug, Clone)]
enum Step {
    /// The program requests a mask.
    Program(CpuSet),
    /// pjw requests a mask.
    Warden(CpuSet),
    /// pjw was about to request a mask, and whether the write is known not to be tried.
    Planned(CpuSet, bool),
    /// The cpuset changes.
    Cpuset(CpuSet),
    /// The online PUs change.
    Online(CpuSet),
    Read,
}

/// A kernel since Linux 6.2 with one thread, and the entry that pjw keeps of the thread.
struct Kernel {
    requested: CpuSet,
    cpuset: CpuSet,
    online: CpuSet,
    /// Each set that was possible since the last reading, the oldest first.
    possible: Vec<CpuSet>,
    entry: MaskEntry,
    /// Whether the program requested a mask since the last reading.
    has_program_written: bool,
    /// Whether the readings say which mask is requested. They do not if the program requested a mask that looks like
    /// another.
    is_known: bool,
    now: u64,
}

impl Kernel {
    fn new() -> Self {
        Self {
            requested: machine(),
            cpuset: machine(),
            online: machine(),
            possible: vec![machine()],
            entry: first("0-7"),
            has_program_written: false,
            is_known: true,
            now: 1,
        }
    }

    /// Returns the PUs that a mask can have now: those of the cpuset that are online, or all online PUs.
    fn possible(&self) -> CpuSet {
        let left = self.cpuset.intersection(&self.online);
        if left.is_empty() { self.online.clone() } else { left }
    }

    /// Applies `step` to the simulated kernel. If pjw makes the step, also records the step in the mask entry. A
    /// request that the kernel refuses changes nothing. In the step [`Step::Read`], a scan reads the mask of the
    /// thread. This step fails if the entry does not predict the mask, or if the request that was really made is not
    /// among its candidates. All other steps succeed.
    fn apply_step(&mut self, step: Step) -> Result<(), TestCaseError> {
        self.now += 1;
        let now = Nanos(self.now);
        let original = self.entry.original_mask().clone();
        match step {
            // The kernel refuses a mask of which nothing is possible.
            Step::Program(mask) if mask.intersects(&self.possible()) => {
                self.requested = mask;
                self.has_program_written = true;
            }
            Step::Warden(mask) if mask.intersects(&self.possible()) => {
                self.entry.add_intended_request(mask.clone(), original, now);
                self.requested = mask.clone();
                let limits = limits_of([self.possible()]);
                self.entry.record_request_done(&mask, &effective_mask(&mask, &self.possible()), &limits);
                (self.has_program_written, self.is_known) = (false, true);
            }
            Step::Planned(mask, is_cancelled) => {
                self.entry.add_intended_request(mask.clone(), original, now);
                if is_cancelled {
                    self.entry.cancel_intended_request(&mask);
                }
            }
            Step::Cpuset(cpus) => self.cpuset = cpus,
            Step::Online(cpus) => self.online = cpus,
            Step::Read => return self.read(now),
            Step::Program(_) | Step::Warden(_) => {}
        }
        let possible = self.possible();
        if self.possible.last() != Some(&possible) {
            self.possible.push(possible);
        }
        Ok(())
    }

    /// Reads the mask of the thread as a scan does. Fails if the entry does not predict it, or does not have the true
    /// request among its candidates.
    fn read(&mut self, now: Nanos) -> Result<(), TestCaseError> {
        let seen = effective_mask(&self.requested, &self.possible());
        let limits = limits_of(self.possible.drain(..).rev());
        self.possible.push(limits.possible_cpus[0].clone());
        let looks_like = |mask: &CpuSet| {
            limits.possible_cpus.iter().any(|possible| effective_mask(mask, possible) == seen)
        };
        if self.has_program_written {
            let is_new = !masks(&self.entry).iter().any(looks_like);
            let is_whole = limits.possible_cpus.contains(&seen);
            self.is_known =
                is_new && if is_whole { self.requested == machine() } else { self.requested == seen };
        }
        let reading = self.entry.record_reading(&seen, &limits, now);
        let candidates = masks(&self.entry);
        let context = format!("{} shown as {seen}, {reading:?}: {candidates:?}", self.requested);
        prop_assert!(candidates.iter().any(looks_like), "no candidate predicts {context}");
        if self.is_known {
            prop_assert!(candidates.contains(&self.requested), "not a candidate: {context}");
            let expected = if self.has_program_written {
                MaskComparison::ChangedByProgram
            } else {
                MaskComparison::Predicted
            };
            prop_assert_eq!(reading, expected, "{}", context);
        }
        self.has_program_written = false;
        Ok(())
    }
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let pus = || proptest::collection::btree_set(0_u32..8, 1..9);
    let mask = || pus().prop_map(|pus| pus.into_iter().map(Pu).collect::<CpuSet>());
    let program = prop_oneof![2 => mask(), 1 => Just(machine())];
    let step = prop_oneof![
        2 => program.prop_map(Step::Program),
        2 => mask().prop_map(Step::Warden),
        1 => (mask(), any::<bool>()).prop_map(|(mask, is_cancelled)| Step::Planned(mask, is_cancelled)),
        2 => mask().prop_map(Step::Cpuset),
        1 => mask().prop_map(Step::Online),
        5 => Just(Step::Read),
    ];
    proptest::collection::vec(step, 1..60)
}

proptest! {
    #[test]
    fn the_true_request_is_among_the_candidates_after_each_reading(steps in steps()) {
        let mut kernel = Kernel::new();
        for step in steps {
            kernel.apply_step(step)?;
        }
    }
}
