//! Waiting for a condition, never for a time.

use std::fmt::Debug;
use std::time::{Duration, Instant};

/// Long enough for a loaded machine; a test that holds never waits so long.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Waits until `poll` finds something.
///
/// # Panics
/// If it does not within the deadline; `what` is what was waited for.
pub fn wait_for<T>(what: &str, mut poll: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + TIMEOUT;
    loop {
        if let Some(found) = poll() {
            return found;
        }
        assert!(Instant::now() < deadline, "waited in vain until {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Waits until a condition holds.
///
/// # Panics
/// As [`wait_for`].
pub fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    wait_for(what, || holds().then_some(()));
}

/// Waits until nothing is left of what `poll` lists.
///
/// # Panics
/// As [`wait_for`], with what was left.
pub fn wait_until_empty<T: Debug>(what: &str, mut poll: impl FnMut() -> Vec<T>) {
    let deadline = Instant::now() + TIMEOUT;
    loop {
        let left = poll();
        if left.is_empty() {
            return;
        }
        assert!(Instant::now() < deadline, "waited in vain until {what}: {left:#?}");
        std::thread::sleep(Duration::from_millis(5));
    }
}
