//! Errors in the description of a job that a scheduler gives to a hook.

use pjw_core::job::Source;
use thiserror::Error;

/// Error: the description of a job that a batch system gave to a hook is incomplete or wrong. It names the
/// wrong variable or argument.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum HookInputError {
    /// A variable that the scheduler always sets is missing: this one.
    #[error("{0} is not set: check that the scheduler calls this hook as the right kind of hook")]
    Missing(&'static str),
    /// The value of a variable is malformed.
    #[error("{variable} {problem}: {value:?}")]
    Malformed {
        /// The name of the variable.
        variable: &'static str,
        /// The problem, after the name of the variable.
        problem: &'static str,
        /// The value, cut to 40 characters.
        value: String,
    },
    /// A list of counts or of nodes can't be parsed.
    #[error("{variable}: {why}")]
    List {
        /// The name of the variable.
        variable: &'static str,
        /// The error in the list.
        why: String,
    },
    /// The list does not contain this host.
    #[error("{variable} does not name this node, {host}: the scheduler may know it by another name")]
    HostNotListed {
        /// The name of the variable.
        variable: &'static str,
        /// The name of the host.
        host: String,
    },
    /// This count is 0, or larger than on any machine.
    #[error("a job cannot have {0} cores: expected 1 to 65536")]
    CountOutOfRange(u32),
    /// This scheduler does not give the number of cores to this hook.
    #[error(
        "{0} does not give its hook the number of cores of the job on this node: call the hook with --cores N"
    )]
    CountNotProvided(Source),
}

impl HookInputError {
    pub(crate) fn not_an_id(variable: &'static str, text: &str) -> Self {
        Self::malformed(variable, "names no job of this scheduler", text)
    }

    pub(crate) fn not_a_user(variable: &'static str, text: &str) -> Self {
        Self::malformed(variable, "names no user", text)
    }

    pub(crate) fn not_a_number(variable: &'static str, text: &str) -> Self {
        Self::malformed(variable, "is not a whole number above 0", text)
    }

    fn malformed(variable: &'static str, problem: &'static str, text: &str) -> Self {
        HookInputError::Malformed { variable, problem, value: shortened(text) }
    }

    pub(crate) fn list(variable: &'static str, why: &impl ToString) -> Self {
        HookInputError::List { variable, why: why.to_string() }
    }

    pub(crate) fn host_not_listed(variable: &'static str, host: &str) -> Self {
        HookInputError::HostNotListed { variable, host: shortened(host) }
    }
}

/// A text for a message, cut to 40 characters.
fn shortened(text: &str) -> String {
    const MAX_LENGTH: usize = 40;
    match text.char_indices().nth(MAX_LENGTH) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}
