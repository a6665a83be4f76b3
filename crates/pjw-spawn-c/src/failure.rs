//! The failures of this library, and how a failure reaches the C program: as `errno`, and as a message that the library
//! keeps for the calling thread.

use std::cell::RefCell;
use std::ffi::{CString, c_char, c_int};
use std::panic::{AssertUnwindSafe, catch_unwind};

use nix::errno::Errno;
use spawn::CheckError;

/// Why a function of the library failed: the value for `errno`, and the message that the C program can read.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) errno: Errno,
    pub(crate) text: String,
}

impl Failure {
    /// Returns the failure of a function that got an invalid argument: `errno` is `EINVAL`, and `text` is the message.
    pub(crate) fn invalid(text: impl Into<String>) -> Self {
        Self { errno: Errno::EINVAL, text: text.into() }
    }

    /// Returns the failure of a system call or another step. `step` is the name of the step, and `errno` is the error
    /// number. The message contains both.
    pub(crate) fn from_errno(step: &str, errno: Errno) -> Self {
        Self { errno, text: format!("{step}: {}", errno.desc()) }
    }
}

impl From<CheckError> for Failure {
    fn from(error: CheckError) -> Self {
        let errno = match &error {
            CheckError::NoInstances
            | CheckError::InvalidArgument(_)
            | CheckError::InvalidMask { .. }
            | CheckError::InvalidNumaNode { .. } => Errno::EINVAL,
            CheckError::NoProgram { .. } => Errno::ENOENT,
            CheckError::NotExecutable { .. } => Errno::EACCES,
            CheckError::ProcessLimit { .. } => Errno::EAGAIN,
            CheckError::DescriptorLimit { .. } => Errno::EMFILE,
            CheckError::TooLarge { .. } => Errno::E2BIG,
            CheckError::Replicas(_) => Errno::ENOMEM,
            CheckError::SystemCall { errno, .. } => *errno,
            CheckError::AddressSpace(_) => Errno::ENOTSUP,
        };
        Self { errno, text: error.to_string() }
    }
}

thread_local! {
    /// The message about the last failure in this thread, which [`last_failure_message`] returns.
    static LAST_MESSAGE: RefCell<CString> = RefCell::default();
}

/// Stores `text` as the message that [`last_failure_message`] returns in the calling thread.
pub(crate) fn store_failure_message(text: &str) {
    LAST_MESSAGE.set(CString::new(text.replace('\0', "?")).unwrap_or_default());
}

/// Returns a pointer to the message about the last failure in the calling thread, as a C string. The message is empty
/// if no function has failed. The pointer is valid until the next failure in this thread.
pub(crate) fn last_failure_message() -> *const c_char {
    LAST_MESSAGE.with_borrow(|text| text.as_ptr())
}

/// Calls `call`, and returns its result to the C program. If `call` fails, sets `errno`, stores the message for the
/// calling thread and returns -1. A panic in `call` counts as a failure with `EIO`, because a panic that left the
/// library would abort the C program.
pub(crate) fn to_c_result(call: impl FnOnce() -> Result<c_int, Failure>) -> c_int {
    let result = catch_unwind(AssertUnwindSafe(call));
    let result = result.unwrap_or_else(|_| Err(Failure::from_errno("a fault in libpjw_spawn", Errno::EIO)));
    result.unwrap_or_else(|failure| {
        store_failure_message(&failure.text);
        failure.errno.set();
        -1
    })
}
