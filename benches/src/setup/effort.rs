//! How much a bench does: all that a figure needs, or, with `--quick` or `PJW_BENCH_QUICK=1`, just enough to see that
//! it works.

use std::env;

/// The choice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effort {
    /// Some seconds; its figures say nothing.
    Quick,
    /// Minutes.
    Full,
}

impl Effort {
    /// As this program was asked to.
    #[must_use]
    pub fn from_arguments() -> Self {
        let variable = env::var("PJW_BENCH_QUICK").is_ok_and(|value| !value.is_empty() && value != "0");
        if variable || env::args().any(|argument| argument == "--quick") { Self::Quick } else { Self::Full }
    }

    /// One of two.
    #[must_use]
    pub fn pick<T>(self, quick: T, full: T) -> T {
        match self {
            Self::Quick => quick,
            Self::Full => full,
        }
    }
}
