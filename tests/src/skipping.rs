//! Reports why a test was skipped.

use std::fmt::Display;
use std::io::Write;

/// Writes to stderr which test was skipped and why. The test harness captures only output by macros such as
/// `println!`, so this line is shown also if the test passes.
pub fn skip(why: impl Display) {
    let thread = std::thread::current();
    let test = thread.name().unwrap_or("a test");
    let _ = writeln!(std::io::stderr(), "skipped: {test}: {why}");
}
