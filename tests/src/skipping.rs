//! Saying why a test was skipped, so that somebody reads it.

use std::fmt::Display;
use std::io::Write;

/// Tells on stderr itself which test skips what: a test's own output is shown only if it fails.
pub fn skip(why: impl Display) {
    let thread = std::thread::current();
    let test = thread.name().unwrap_or("a test");
    let _ = writeln!(std::io::stderr(), "skipped: {test}: {why}");
}
