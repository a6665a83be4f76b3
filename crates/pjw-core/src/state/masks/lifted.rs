//! A binding of a program that pjw lifted, and whether that helped.

use core::time::Duration;

use crate::basics::{CpuSet, Nanos};
use crate::state::demand::ThreadDemand;

/// The time after a lift at which pjw judges whether the lift helped. By then, the smoothed demand of the thread no
/// longer contains readings from before the lift.
const TRIAL: Duration = Duration::from_secs(10);
/// The smallest share of waiting time before the lift, in permille, for which a lift is judged. A thread that waited
/// less may have been moved to a core of its own, which the waiting time does not show.
const LEAST_WAITING_PERMILLE: u32 = 100;

/// The reason why pjw lifted the binding of a thread. A binding is an affinity mask by which a program restricts a
/// thread to some PUs (logical CPUs) of its job (sched_setaffinity(2)). pjw lifts a binding: pjw sets another mask that
/// has all PUs of the job, or one PU that pjw chooses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LiftReason {
    /// Too many hot threads were bound to the same PUs, while other PUs of the job were idle.
    Overload,
    /// The policy lifts every binding ([`BindingPolicy::Override`](crate::terms::policy::BindingPolicy::Override)).
    Policy,
}

/// The record of a binding that pjw lifted. A binding is an affinity mask by which a program restricts a thread to some
/// PUs (logical CPUs) of its job (sched_setaffinity(2)). pjw lifts a binding: pjw sets another mask that has all PUs of
/// the job, or one PU that pjw chooses. After a lift for [`LiftReason::Overload`], pjw compares the waiting time of the
/// thread with the time in the record. pjw restores the binding if the thread waits nearly as much as before.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LiftedBinding {
    /// The PUs of the job to which the program had bound the thread.
    pub mask: CpuSet,
    /// The reason why pjw lifted the binding.
    pub reason: LiftReason,
    /// The share of time in which the thread waited for a PU before the lift, in permille.
    pub waiting_permille_before: u32,
    /// The time at which pjw lifted the binding, in ns since boot.
    pub lifted_at: Nanos,
    /// Whether pjw has restored the binding, because the thread waited for a PU nearly as much as before. pjw does not
    /// lift a restored binding again.
    pub is_restored: bool,
}

impl LiftedBinding {
    /// Whether pjw must restore the binding: the affinity mask by which the program restricted the thread to some PUs
    /// (logical CPUs) of its job. pjw has lifted the binding: another mask replaced it. pjw must restore the binding if
    /// too many threads were bound to these PUs, and the lift did not help.
    ///
    /// - `demand` is the present demand of the thread for CPU time.
    /// - `waiting_of_others` has the present shares of waiting time, in permille, of the other hot threads of the job
    ///   that are still bound to PUs of this binding. A thread is hot if it runs or waits for a PU most of the time.
    /// - `now` is the present time, in ns since boot.
    ///
    /// The result is true if all of these conditions hold:
    ///
    /// - pjw lifted the binding because of too many threads ([`LiftReason::Overload`]) and has not restored it.
    /// - The lift was at least 10 s and less than 20 s ago.
    /// - Before the lift, the thread waited for a PU for at least a tenth of the time.
    /// - Now, the thread is hot, and its share of waiting time is at least three quarters of its share before the lift.
    /// - The mean of `waiting_of_others` is at least three quarters of the same share, or `waiting_of_others` is empty.
    ///   If the other threads wait less, the lift helped them.
    #[must_use]
    pub fn must_restore_binding(
        &self,
        demand: &ThreadDemand,
        waiting_of_others: impl IntoIterator<Item = u32>,
        now: Nanos,
    ) -> bool {
        let is_judged = self.reason == LiftReason::Overload
            && !self.is_restored
            && self.waiting_permille_before >= LEAST_WAITING_PERMILLE
            && (TRIAL..TRIAL * 2).contains(&Duration::from_nanos(now.0.saturating_sub(self.lifted_at.0)));
        if !is_judged || !demand.is_hot || !self.wait_nearly_as_before(1, demand.waiting_permille.into()) {
            return false;
        }
        let (mut threads, mut waiting) = (0, 0);
        for waiting_permille in waiting_of_others {
            threads += 1;
            waiting += u64::from(waiting_permille);
        }
        self.wait_nearly_as_before(threads, waiting)
    }

    /// Returns whether `threads` threads wait, on average, nearly as much as the thread of this binding did before the
    /// lift. `waiting` is the sum of their shares of waiting time, in permille.
    fn wait_nearly_as_before(&self, threads: u64, waiting: u64) -> bool {
        waiting * 4 >= threads * u64::from(self.waiting_permille_before) * 3
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    fn lifted(waiting_permille_before: u32, reason: LiftReason) -> LiftedBinding {
        let (mask, lifted_at) = (CpuSet::new(), Nanos(SECOND));
        LiftedBinding { mask, reason, waiting_permille_before, lifted_at, is_restored: false }
    }

    fn demand(waiting_permille: u32, is_hot: bool) -> ThreadDemand {
        let mut demand = ThreadDemand::default();
        (demand.permille, demand.waiting_permille, demand.is_hot) = (1000, waiting_permille, is_hot);
        demand
    }

    #[test]
    fn a_lift_has_not_helped_if_a_hot_thread_waits_as_long_as_before() {
        let (late, lift) = (Nanos(11 * SECOND), lifted(500, LiftReason::Overload));
        assert!(lift.must_restore_binding(&demand(500, true), [], late));
        assert!(lift.must_restore_binding(&demand(375, true), [], late));
        assert!(
            !lift.must_restore_binding(&demand(374, true), [], late),
            "the thread waits less than before"
        );
        assert!(!lift.must_restore_binding(&demand(500, false), [], late), "the thread is not hot");
        assert!(
            !lift.must_restore_binding(&demand(500, true), [], Nanos(10 * SECOND)),
            "the trial is not over"
        );
        assert!(
            !lift.must_restore_binding(&demand(500, true), [], Nanos(21 * SECOND)),
            "it was judged before"
        );
    }

    #[test]
    fn a_lift_has_helped_if_the_threads_that_stayed_wait_less_although_the_moved_thread_does_not() {
        let (late, lift) = (Nanos(11 * SECOND), lifted(500, LiftReason::Overload));
        let restored =
            |others: &[u32]| lift.must_restore_binding(&demand(500, true), others.iter().copied(), late);
        assert!(!restored(&[0]), "the moved thread waits for other programs, and the other one for nothing");
        assert!(!restored(&[374]));
        assert!(restored(&[375]), "both wait: the job has no more CPU time than before");
        assert!(restored(&[500, 250]), "on average they wait as long");
        assert!(!restored(&[500, 249]));
        let earlier = Nanos(10 * SECOND);
        assert!(!lift.must_restore_binding(&demand(500, true), [500], earlier), "the trial is not over");
    }

    #[test]
    fn a_lift_without_waiting_before_and_a_lift_by_the_policy_are_not_judged() {
        let late = Nanos(11 * SECOND);
        assert!(!lifted(99, LiftReason::Overload).must_restore_binding(&demand(99, true), [], late));
        assert!(!lifted(500, LiftReason::Policy).must_restore_binding(&demand(500, true), [], late));
    }

    #[test]
    fn a_binding_that_is_in_force_again_is_not_judged_again() {
        let restored = LiftedBinding { is_restored: true, ..lifted(500, LiftReason::Overload) };
        assert!(!restored.must_restore_binding(&demand(500, true), [], Nanos(11 * SECOND)));
    }
}
