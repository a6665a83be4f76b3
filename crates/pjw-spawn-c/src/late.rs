//! The late fork: the program is the template.

use std::ffi::CStr;

use crate::failure::Failure;

/// Makes the program a template. Returns in each instance, with its arguments. `None` in a program that was started without a
/// template.
#[cfg(target_arch = "x86_64")]
pub(crate) fn fork_here() -> Result<Option<Vec<&'static CStr>>, Failure> {
    use nix::errno::Errno;
    use spawn::proxy::ForkHereError;

    match spawn::proxy::fork_here() {
        Ok(own) => Ok(own.map(|own| own.arguments)),
        Err(ForkHereError::Failed { step, errno }) => Err(Failure::of(step, errno)),
        Err(error @ ForkHereError::MultipleThreads(_)) => {
            Err(Failure { errno: Errno::EBUSY, text: error.to_string() })
        }
    }
}

/// Other processors have no templates, so every program was started without one.
#[cfg(not(target_arch = "x86_64"))]
#[expect(clippy::unnecessary_wraps, reason = "it fails on another processor")]
pub(crate) fn fork_here() -> Result<Option<Vec<&'static CStr>>, Failure> {
    Ok(None)
}
