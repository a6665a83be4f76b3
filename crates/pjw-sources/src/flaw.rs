//! Errors in the description of a job that a scheduler gives to a hook.

use pjw_core::job::Source;
use thiserror::Error;

use crate::counts::CountsError;
use crate::hostlist::HostlistError;

/// Error: the description of a job is incomplete or wrong.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum InputError {
    /// A variable that the scheduler always sets is missing.
    #[error("{variable} is not set: check that the scheduler calls this hook as the right kind of hook")]
    Missing {
        /// The name of the variable.
        variable: &'static str,
    },
    /// The value is not a job id.
    #[error("{variable} names no job of this scheduler: {value:?}")]
    NotAnId {
        /// The name of the variable.
        variable: &'static str,
        /// The value, cut to 40 characters.
        value: String,
    },
    /// The value is not a user.
    #[error("{variable} names no user: {value:?}")]
    NotAUser {
        /// The name of the variable.
        variable: &'static str,
        /// The value, cut to 40 characters.
        value: String,
    },
    /// The value is not a number.
    #[error("{variable} is not a whole number above 0: {value:?}")]
    NotANumber {
        /// The name of the variable.
        variable: &'static str,
        /// The value, cut to 40 characters.
        value: String,
    },
    /// The list of counts cannot be parsed.
    #[error("{variable}: {why}")]
    Counts {
        /// The name of the variable.
        variable: &'static str,
        /// The error in the list.
        why: CountsError,
    },
    /// The list of nodes cannot be parsed.
    #[error("{variable}: {why}")]
    Nodes {
        /// The name of the variable.
        variable: &'static str,
        /// The error in the list.
        why: HostlistError,
    },
    /// The list does not contain this host.
    #[error("{variable} does not name this node, {host}: the scheduler may know it by another name")]
    HostNotListed {
        /// The name of the variable.
        variable: &'static str,
        /// The name of the host.
        host: String,
    },
    /// The count is 0, or larger than on any machine.
    #[error("a job cannot have {count} cores: expected 1 to 65536")]
    CountOutOfRange {
        /// The count.
        count: u32,
    },
    /// The scheduler does not give the number of cores to this hook.
    #[error(
        "{scheduler} does not give its hook the number of cores of the job on this node: call the hook with --cores N"
    )]
    CountNotProvided {
        /// The scheduler.
        scheduler: Source,
    },
}

impl InputError {
    pub(crate) fn not_an_id(variable: &'static str, text: &str) -> Self {
        InputError::NotAnId { variable, value: shortened(text) }
    }

    pub(crate) fn not_a_user(variable: &'static str, text: &str) -> Self {
        InputError::NotAUser { variable, value: shortened(text) }
    }

    pub(crate) fn not_a_number(variable: &'static str, text: &str) -> Self {
        InputError::NotANumber { variable, value: shortened(text) }
    }

    pub(crate) fn host_not_listed(variable: &'static str, host: &str) -> Self {
        InputError::HostNotListed { variable, host: shortened(host) }
    }
}

/// A text for a message, cut to 40 characters.
pub(crate) fn shortened(text: &str) -> String {
    const MAX_LENGTH: usize = 40;
    match text.char_indices().nth(MAX_LENGTH) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}
