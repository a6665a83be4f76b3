//! The late fork: the program is the template.

use nix::errno::Errno;
use spawn::proxy::{ForkHereError, InstanceParameters};

use crate::failure::Failure;

/// Makes the program a template. Returns in each instance, with its parameters. `None` in a program that was started without a
/// template.
pub(crate) fn fork_here() -> Result<Option<InstanceParameters>, Failure> {
    match spawn::proxy::fork_here() {
        Ok(own) => Ok(own),
        Err(ForkHereError::Failed { step, errno }) => Err(Failure::of(step, errno)),
        Err(error @ ForkHereError::MultipleThreads(_)) => {
            Err(Failure { errno: Errno::EBUSY, text: error.to_string() })
        }
    }
}
