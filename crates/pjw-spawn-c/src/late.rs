//! The late fork: the program is the template.

use nix::errno::Errno;
use spawn::proxy::{ForkHereError, InstanceParameters};

use crate::failure::Failure;

/// Makes the calling process a template: other processes of the program are then forked from the calling process at
/// this call. The function returns in each forked process, with the parameters of this process. Returns `None` if the
/// program was started without a template.
pub(crate) fn fork_here() -> Result<Option<InstanceParameters>, Failure> {
    match spawn::proxy::fork_here() {
        Ok(own) => Ok(own),
        Err(ForkHereError::Failed { step, errno }) => Err(Failure::of(step, errno)),
        Err(error @ ForkHereError::MultipleThreads(_)) => {
            Err(Failure { errno: Errno::EBUSY, text: error.to_string() })
        }
    }
}
