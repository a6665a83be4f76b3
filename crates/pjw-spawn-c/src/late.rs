//! Late fork for C programs: a program that has done its start-up makes itself a template.

use nix::errno::Errno;
use spawn::proxy::{ForkHereError, InstanceParameters};

use crate::failure::Failure;

/// Makes the calling process a template: a process that stops in this call, and from which other processes of the
/// program are forked. The call never returns in the template. It returns in each forked process, with the arguments
/// and environment variables of the forked process. If the program was not started as a template, the call returns
/// `None` at once.
pub(crate) fn fork_here() -> Result<Option<InstanceParameters>, Failure> {
    match spawn::proxy::fork_here() {
        Ok(parameters) => Ok(parameters),
        Err(ForkHereError::Failed { step, errno }) => Err(Failure::from_errno(step, errno)),
        Err(error @ ForkHereError::MultipleThreads(_)) => {
            Err(Failure { errno: Errno::EBUSY, text: error.to_string() })
        }
    }
}
