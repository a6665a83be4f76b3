//! How a failure reaches the caller: as `errno`, and as a text of the calling thread.

use std::cell::RefCell;
use std::ffi::{CString, c_char, c_int};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Why a call failed.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) errno: c_int,
    pub(crate) text: String,
}

impl Failure {
    /// An argument is invalid: `EINVAL`.
    pub(crate) fn invalid(text: impl Into<String>) -> Self {
        Self { errno: libc::EINVAL, text: text.into() }
    }
}

thread_local! {
    static LAST: RefCell<CString> = RefCell::default();
}

/// The text of the last failure of this thread. It is valid until the next failure.
pub(crate) fn last_text() -> *const c_char {
    LAST.with_borrow(|text| text.as_ptr())
}

/// Calls a function of the library. A failure becomes -1, with `errno` and a text. No panic leaves the library: it would
/// end a C program without a word.
pub(crate) fn returned(call: impl FnOnce() -> Result<c_int, Failure>) -> c_int {
    let result = catch_unwind(AssertUnwindSafe(call));
    let fault = || Failure { errno: libc::EIO, text: "a fault in libpjw_job".to_owned() };
    let result = result.unwrap_or_else(|_| Err(fault()));
    result.unwrap_or_else(|failure| {
        LAST.set(CString::new(failure.text.replace('\0', "?")).unwrap_or_default());
        // SAFETY: the location of errno is valid for the calling thread.
        unsafe { *libc::__errno_location() = failure.errno };
        -1
    })
}
