//! How a failure reaches the C program: as `errno`, and as a message that is kept for the calling thread.

use std::cell::RefCell;
use std::ffi::{CString, c_char, c_int};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Why a function of the library failed: the value for `errno`, and the message that `pjw_job_error` returns.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) errno: c_int,
    pub(crate) text: String,
}

impl Failure {
    /// Returns the failure of a function that got an invalid argument: `errno` is `EINVAL`, and `text` is the message.
    pub(crate) fn invalid(text: impl Into<String>) -> Self {
        Self { errno: libc::EINVAL, text: text.into() }
    }
}

thread_local! {
    /// The message about the last failure in this thread, which [`last_failure_message`] returns.
    static LAST_MESSAGE: RefCell<CString> = RefCell::default();
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
    let result = result
        .unwrap_or_else(|_panic| Err(Failure { errno: libc::EIO, text: "a fault in libpjw_job".to_owned() }));
    result.unwrap_or_else(|failure| {
        LAST_MESSAGE.set(CString::new(failure.text.replace('\0', "?")).unwrap_or_default());
        // SAFETY: the location of errno is valid for the calling thread.
        unsafe { *libc::__errno_location() = failure.errno };
        -1
    })
}
