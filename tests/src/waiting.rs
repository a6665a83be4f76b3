//! Waits for conditions. A test never waits for a fixed time.

use std::fmt::Debug;
use std::time::{Duration, Instant};

/// The longest wait. It is long enough for a busy machine. A test that passes does not wait so long.
const TIMEOUT: Duration = Duration::from_secs(90);

/// Calls `poll` every 5 ms until it returns a value, and returns the value.
///
/// # Panics
/// If `poll` returns no value within 90 s. The message contains `what`, a sentence with the condition, such as "the
/// job has ended".
pub fn wait_for<T>(what: &str, mut poll: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + TIMEOUT;
    loop {
        if let Some(found) = poll() {
            return found;
        }
        assert!(Instant::now() < deadline, "not within {} s: {what}", TIMEOUT.as_secs());
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Waits until `holds` returns true.
///
/// # Panics
/// As [`wait_for`].
pub fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    wait_for(what, || holds().then_some(()));
}

/// Waits until `poll` returns an empty list.
///
/// # Panics
/// As [`wait_for`]. The message contains the last list.
pub fn wait_until_empty<T: Debug>(what: &str, mut poll: impl FnMut() -> Vec<T>) {
    let deadline = Instant::now() + TIMEOUT;
    loop {
        let left = poll();
        if left.is_empty() {
            return;
        }
        assert!(Instant::now() < deadline, "not within {} s: {what}: {left:#?}", TIMEOUT.as_secs());
        std::thread::sleep(Duration::from_millis(5));
    }
}
