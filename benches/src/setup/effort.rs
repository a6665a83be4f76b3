//! How much a bench measures: enough for the figures, or, with `--quick` or `PJW_BENCH_QUICK=1`, just enough to test
//! that the bench works.

use std::env;

/// How much a bench measures: only enough to test the bench itself, or enough for reliable results.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effort {
    /// The bench runs for some seconds. Its results are not reliable, and only show that the bench works.
    Quick,
    /// The bench runs for some minutes, and its results are reliable.
    Full,
}

impl Effort {
    /// Returns [`Effort::Quick`] if the arguments of this program contain `--quick`. Otherwise returns the effort that
    /// the environment variable `PJW_BENCH_QUICK` selects ([`Effort::from_environment`]).
    #[must_use]
    pub fn from_arguments() -> Self {
        if env::args().any(|argument| argument == "--quick") { Self::Quick } else { Self::from_environment() }
    }

    /// Returns [`Effort::Quick`] if the environment variable `PJW_BENCH_QUICK` is set, is not empty and is not `0`.
    /// Otherwise returns [`Effort::Full`].
    #[must_use]
    pub fn from_environment() -> Self {
        let is_quick = env::var("PJW_BENCH_QUICK").is_ok_and(|value| !value.is_empty() && value != "0");
        if is_quick { Self::Quick } else { Self::Full }
    }

    /// Returns the argument that belongs to this effort: `quick` for [`Effort::Quick`], or `full` for [`Effort::Full`].
    #[must_use]
    pub fn pick<T>(self, quick: T, full: T) -> T {
        match self {
            Self::Quick => quick,
            Self::Full => full,
        }
    }
}
