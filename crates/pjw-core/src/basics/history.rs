//! A value together with the values that it had before.

use smallvec::SmallVec;

use crate::basics::time::Nanos;

/// The number of earlier values that are kept. Older values are dropped.
const EARLIER_VALUES: usize = 8;

/// A present value, and up to eight earlier values. Each earlier value has the time at which it was replaced.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct History<T> {
    now: T,
    /// Oldest first, each with the time at which it was replaced.
    earlier: SmallVec<[(T, Nanos); 1]>,
}

impl<T: PartialEq> History<T> {
    /// Makes a history with the present value `now` and without earlier values.
    pub(crate) fn new(now: T) -> Self {
        Self { now, earlier: SmallVec::new() }
    }

    /// Replaces the present value by `value` at the time `at`, if the values differ. The replaced value becomes an
    /// earlier value. Does nothing if both values are equal.
    pub(crate) fn replace_if_different(&mut self, value: T, at: Nanos) {
        if value != self.now {
            self.replace(value, at);
        }
    }

    /// Replaces the present value by `value` at the time `at`, even if both values are equal. The replaced value
    /// becomes an earlier value.
    pub(crate) fn replace(&mut self, value: T, at: Nanos) {
        let before = core::mem::replace(&mut self.now, value);
        if self.earlier.len() == EARLIER_VALUES {
            self.earlier.remove(0);
        }
        self.earlier.push((before, at));
    }

    /// Undoes the last replacement, because the change of the machine to the new value failed. The value before becomes
    /// the present value again. The new value becomes an earlier value, because the change may have been made in part.
    pub(crate) fn undo_last_replacement(&mut self) {
        if let Some((before, _)) = self.earlier.last_mut() {
            core::mem::swap(&mut self.now, before);
        }
    }

    /// Sets the time of the last replacement to `at`, if `at` is later. Used if the change of the machine to the new
    /// value was made later than expected.
    pub(crate) fn postpone_last_replacement(&mut self, at: Nanos) {
        if let Some((_, until)) = self.earlier.last_mut() {
            *until = at.max(*until);
        }
    }

    /// Iterates over the values that were in force at any moment from `from` until now. The present value comes first.
    pub(crate) fn values_since(&self, from: Nanos) -> impl Iterator<Item = &T> {
        let earlier = self.earlier.iter().rev().filter(move |(_, until)| *until >= from);
        core::iter::once(&self.now).chain(earlier.map(|(value, _)| value))
    }

    /// Returns the time of the last replacement. `None` if the value was never replaced.
    pub(crate) fn changed_at(&self) -> Option<Nanos> {
        self.earlier.last().map(|&(_, until)| until)
    }

    /// Returns whether the value was replaced at the time `from` or later.
    pub(crate) fn has_changed_since(&self, from: Nanos) -> bool {
        self.changed_at().is_some_and(|changed_at| changed_at >= from)
    }
}

#[cfg(test)]
mod tests {
    use alloc::vec::Vec;

    use super::*;

    #[test]
    fn values_that_held_since_a_moment_are_found() {
        let mut history = History::new('a');
        history.replace_if_different('b', Nanos(10));
        history.replace_if_different('b', Nanos(15));
        history.replace_if_different('c', Nanos(20));
        let since = |from| history.values_since(Nanos(from)).copied().collect::<Vec<_>>();
        assert_eq!(since(5), ['c', 'b', 'a']);
        assert_eq!(since(11), ['c', 'b']);
        assert_eq!(since(21), ['c']);
        assert!(history.has_changed_since(Nanos(20)) && !history.has_changed_since(Nanos(21)));
    }

    #[test]
    fn a_replacement_that_failed_is_no_longer_the_present_value() {
        let mut history = History::new('a');
        history.undo_last_replacement();
        history.replace_if_different('b', Nanos(10));
        history.undo_last_replacement();
        assert_eq!(history.values_since(Nanos(5)).copied().collect::<Vec<_>>(), ['a', 'b']);
        assert_eq!(history.values_since(Nanos(11)).copied().collect::<Vec<_>>(), ['a']);
    }

    #[test]
    fn a_replacement_that_took_place_later_than_noted_is_postponed() {
        let mut history = History::new('a');
        history.postpone_last_replacement(Nanos(5));
        history.replace_if_different('b', Nanos(10));
        history.postpone_last_replacement(Nanos(20));
        history.postpone_last_replacement(Nanos(15));
        let since = |from| history.values_since(Nanos(from)).copied().collect::<Vec<_>>();
        assert_eq!(since(20), ['b', 'a']);
        assert_eq!(since(21), ['b']);
    }

    #[test]
    fn the_oldest_values_are_dropped() {
        let mut history = History::new(0);
        (1..20).for_each(|value| history.replace_if_different(value, Nanos(value)));
        assert_eq!(history.values_since(Nanos(0)).count(), EARLIER_VALUES + 1);
        assert_eq!(history.values_since(Nanos(0)).last(), Some(&11));
    }
}
