//! How much a bench measures: enough for the figures, or, with `--quick` or `PJW_BENCH_QUICK=1`, just enough to test
//! that the bench works.

use std::env;

/// How much a bench measures.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effort {
    /// A run of some seconds. Its figures mean nothing.
    Quick,
    /// A run of some minutes.
    Full,
}

impl Effort {
    /// Returns `Quick` if the arguments have `--quick` or `PJW_BENCH_QUICK` is set (not to 0), else `Full`.
    #[must_use]
    pub fn from_arguments() -> Self {
        if env::args().any(|argument| argument == "--quick") { Self::Quick } else { Self::from_environment() }
    }

    /// Returns `Quick` if `PJW_BENCH_QUICK` is set (not to 0), else `Full`.
    #[must_use]
    pub fn from_environment() -> Self {
        let is_quick = env::var("PJW_BENCH_QUICK").is_ok_and(|value| !value.is_empty() && value != "0");
        if is_quick { Self::Quick } else { Self::Full }
    }

    /// Returns `quick` or `full`.
    #[must_use]
    pub fn pick<T>(self, quick: T, full: T) -> T {
        match self {
            Self::Quick => quick,
            Self::Full => full,
        }
    }
}
