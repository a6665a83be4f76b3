//! Error chains as text. All error chains are printed with this module.
//!
//! No error type of this project repeats its source in its own message, so a chain reads `what failed: cause: cause
//! of the cause`.

use std::error::Error;

/// Returns the message of an error and the messages of its causes as one line, separated by `: `. Example:
/// `can't read the file: permission denied`.
#[must_use]
pub fn error_chain_text(error: &dyn Error) -> String {
    let causes = std::iter::successors(error.source(), |cause| (*cause).source());
    let mut text = error.to_string();
    for cause in causes {
        text.push_str(": ");
        text.push_str(&cause.to_string());
    }
    text
}

#[cfg(test)]
mod tests {
    use thiserror::Error;

    use super::error_chain_text;

    #[derive(Debug, Error)]
    #[error("the state can't be written")]
    struct Outer(#[source] Middle);

    #[derive(Debug, Error)]
    #[error("/run/pjwd/state.json")]
    struct Middle(#[source] std::io::Error);

    #[test]
    fn an_error_chain_is_one_line() {
        let error = Outer(Middle(std::io::Error::other("no space left")));
        assert_eq!(
            error_chain_text(&error),
            "the state can't be written: /run/pjwd/state.json: no space left"
        );
    }

    #[test]
    fn an_error_without_a_cause_is_its_own_message() {
        assert_eq!(error_chain_text(&std::io::Error::other("gone")), "gone");
    }
}
