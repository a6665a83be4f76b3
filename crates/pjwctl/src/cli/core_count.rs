//! The number of cores in the option `--cores` of `pjwctl assign`, `run` and `spawn`.

use super::number::is_too_large;

/// The value of the command line option `--cores`: a number of cores, or the word `all` for the free cores and the
/// cores that the job holds already.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CoreCountArg {
    /// This number of cores.
    Count(u32),
    /// Everything that the job can have now: the free cores, and the cores that the job holds already.
    All,
}

impl CoreCountArg {
    /// Returns the number of cores in the option `--cores`. `None` if the option is the word `all`.
    #[must_use]
    pub fn core_count(self) -> Option<u32> {
        match self {
            Self::Count(count) => Some(count),
            Self::All => None,
        }
    }
}

/// Parses `text`, the value of the command line option `--cores`: a number of cores, or the word `all`. If `text` is
/// neither, returns an error message.
pub(super) fn core_count(text: &str) -> Result<CoreCountArg, String> {
    if text == "all" {
        return Ok(CoreCountArg::All);
    }
    text.parse().map(CoreCountArg::Count).map_err(|_| {
        if is_too_large(text) {
            format!("give a number of cores up to {}, or all", u32::MAX)
        } else {
            "give a number of cores, or all".to_owned()
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_or_the_word_all_is_accepted_and_nothing_else() {
        assert_eq!(core_count("4"), Ok(CoreCountArg::Count(4)));
        assert_eq!(core_count("all"), Ok(CoreCountArg::All));
        assert_eq!((CoreCountArg::Count(4).core_count(), CoreCountArg::All.core_count()), (Some(4), None));
        for text in ["", "-1", "ALL", "every", "1.5", "99999999999"] {
            assert!(core_count(text).is_err(), "{text:?}");
        }
        assert_eq!(core_count("x"), Err("give a number of cores, or all".to_owned()));
        let refusal = "give a number of cores up to 4294967295, or all";
        assert_eq!(core_count("4294967296"), Err(refusal.to_owned()));
    }
}
