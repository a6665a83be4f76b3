//! Error chains as one line: every cause after the error it caused.

use std::error::Error;

/// An error of the program's edge, with its causes.
#[must_use]
pub fn chain(error: &anyhow::Error) -> String {
    chain_of(error.as_ref())
}

/// Any error with its causes. A cause whose words the error repeats is not told twice.
#[must_use]
pub fn chain_of(error: &dyn Error) -> String {
    let mut told = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let words = cause.to_string();
        if !told.contains(&words) {
            told.push_str(": ");
            told.push_str(&words);
        }
        next = cause.source();
    }
    told
}
