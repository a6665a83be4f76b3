//! The error type for the description of a job that a batch system gives to a hook.

use pjw_core::job::JobSource;
use thiserror::Error;

/// Error: the description of a job that a batch system gave to a hook is incomplete or wrong. A hook is a
/// program that the batch system runs when a job starts or ends. The description consists of environment
/// variables, arguments of the hook, or fields in a file.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum HookInputError {
    /// A variable or an argument that the batch system always sets is missing. The text names this variable
    /// or argument.
    #[error("{0} is not set: check that the scheduler calls this hook as the right kind of hook")]
    Missing(&'static str),
    /// The value of a variable or of an argument is malformed.
    #[error("{variable} {problem}: {value:?}")]
    Malformed {
        /// The name of the variable, or a text such as `the first argument`.
        variable: &'static str,
        /// What is wrong with the value, as the rest of a sentence that begins with the name of the variable.
        problem: &'static str,
        /// The malformed value, cut to 40 characters.
        value: String,
    },
    /// The value of a variable should be a list of counts or of machines, and can't be parsed as one.
    #[error("{variable}: {why}")]
    MalformedList {
        /// The name of the variable, or a text such as `exec_vnode`.
        variable: &'static str,
        /// The message of the parser, which says what is wrong with the list.
        why: String,
    },
    /// The list of hosts or nodes in a variable does not contain this machine.
    #[error("{variable} does not name this node, {host}: the scheduler may know it by another name")]
    HostNotListed {
        /// The name of the variable that contains the list.
        variable: &'static str,
        /// The name of this machine that was searched in the list, cut to 40 characters.
        host: String,
    },
    /// The number of cores or PUs (logical CPUs) in the description is 0 or above 65536. The variant contains
    /// this number.
    #[error("a job cannot have {0} cores: expected 1 to 65536")]
    CountOutOfRange(u32),
    /// This batch system does not pass the number of cores to its hook. The number has to be given in the
    /// hook's configuration, with the option `--cores`.
    #[error(
        "{0} does not give its hook the number of cores of the job on this node: call the hook with --cores N"
    )]
    CountNotProvided(JobSource),
}

impl HookInputError {
    /// Makes the error for a value that is no job id of the batch system. `variable` names the environment variable or
    /// the argument that has the value `text`.
    pub(crate) fn invalid_job_id(variable: &'static str, text: &str) -> Self {
        Self::malformed(variable, "names no job of this scheduler", text)
    }

    /// Makes the error for a value that is no user name and no user id. `variable` names the environment variable or
    /// the argument that has the value `text`.
    pub(crate) fn invalid_user(variable: &'static str, text: &str) -> Self {
        Self::malformed(variable, "names no user", text)
    }

    /// Makes the error for a value that is not a whole number above 0. `variable` names the environment variable or the
    /// attribute that has the value `text`.
    pub(crate) fn invalid_number(variable: &'static str, text: &str) -> Self {
        Self::malformed(variable, "is not a whole number above 0", text)
    }

    fn malformed(variable: &'static str, problem: &'static str, text: &str) -> Self {
        HookInputError::Malformed { variable, problem, value: shortened(text) }
    }

    /// Makes the error for an invalid list of machines or counts. `variable` names the environment variable or the
    /// argument that contains the list. `why` says what is wrong with the list.
    pub(crate) fn invalid_list(variable: &'static str, why: &impl ToString) -> Self {
        HookInputError::MalformedList { variable, why: why.to_string() }
    }

    /// Makes the error for a list that does not contain this machine. `variable` names the environment variable or the
    /// argument that contains the list. `host` is the name of this machine.
    pub(crate) fn host_not_listed(variable: &'static str, host: &str) -> Self {
        HookInputError::HostNotListed { variable, host: shortened(host) }
    }
}

/// Returns `text` for a message, cut to 40 characters.
fn shortened(text: &str) -> String {
    const MAX_LENGTH: usize = 40;
    match text.char_indices().nth(MAX_LENGTH) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}
