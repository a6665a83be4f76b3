//! Errors in the description of a job that a scheduler gives to a hook.

use pjw_core::job::Source;
use thiserror::Error;

use crate::counts::CountsError;
use crate::hostlist::HostlistError;

/// Error: the description of a job is incomplete or wrong.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum Flaw {
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
        /// The value, or its beginning.
        value: String,
    },
    /// The value is not a user.
    #[error("{variable} names no user: {value:?}")]
    NotAUser {
        /// The name of the variable.
        variable: &'static str,
        /// The value, or its beginning.
        value: String,
    },
    /// The value is not a number.
    #[error("{variable} is not a whole number above 0: {value:?}")]
    NotANumber {
        /// The name of the variable.
        variable: &'static str,
        /// The value, or its beginning.
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
    NotHere {
        /// The name of the variable.
        variable: &'static str,
        /// The name of the host.
        host: String,
    },
    /// The count is 0, or larger than on any machine.
    #[error("a job cannot have {count} cores: expected 1 to 65536")]
    Implausible {
        /// The count.
        count: u32,
    },
    /// The scheduler does not give the number of cores to this hook.
    #[error(
        "{scheduler} does not give its hook the number of cores of the job on this node: call the hook with --cores N"
    )]
    Untold {
        /// The scheduler.
        scheduler: Source,
    },
}

/// The beginning of a text, for a message.
pub(crate) fn beginning(text: &str) -> String {
    const MAX_LENGTH: usize = 40;
    match text.char_indices().nth(MAX_LENGTH) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}
