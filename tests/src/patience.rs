//! Waiting for a condition, never for a time.

use std::fmt::Debug;
use std::time::{Duration, Instant};

/// Long enough for a loaded machine; a test that holds never waits so long.
const DEADLINE: Duration = Duration::from_secs(30);

/// Waits until `look` finds something.
///
/// # Panics
/// If it does not within the deadline; `what` is what was waited for.
pub fn until<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + DEADLINE;
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < deadline, "waited in vain until {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Waits until a condition holds.
///
/// # Panics
/// As [`until`].
pub fn until_true(what: &str, mut holds: impl FnMut() -> bool) {
    until(what, || holds().then_some(()));
}

/// Waits until nothing is left of what `look` lists.
///
/// # Panics
/// As [`until`], with what was left.
pub fn until_none<T: Debug>(what: &str, mut look: impl FnMut() -> Vec<T>) {
    let deadline = Instant::now() + DEADLINE;
    loop {
        let left = look();
        if left.is_empty() {
            return;
        }
        assert!(Instant::now() < deadline, "waited in vain until {what}: {left:#?}");
        std::thread::sleep(Duration::from_millis(5));
    }
}
