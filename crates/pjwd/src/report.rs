//! Error chains as text: the only place where they are printed.
//!
//! No error of the house repeats its source in its own message, so a chain reads `what: why: why that`.

use std::error::Error;

/// The whole chain on one line: `a: b: c`.
#[must_use]
pub fn chain(error: &dyn Error) -> String {
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

    use super::chain;

    #[derive(Debug, Error)]
    #[error("the state can't be written")]
    struct Outer(#[source] Middle);

    #[derive(Debug, Error)]
    #[error("/run/pjwd/state.json")]
    struct Middle(#[source] std::io::Error);

    #[test]
    fn a_chain_is_one_line_from_what_to_why() {
        let error = Outer(Middle(std::io::Error::other("no space left")));
        assert_eq!(chain(&error), "the state can't be written: /run/pjwd/state.json: no space left");
    }

    #[test]
    fn an_error_without_a_cause_is_its_own_message() {
        assert_eq!(chain(&std::io::Error::other("gone")), "gone");
    }
}
