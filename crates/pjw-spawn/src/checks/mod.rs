//! What is checked before the first process is made. If something is wrong, nothing starts.

mod error;
mod masks;
pub(crate) mod program;
pub(crate) mod room;
mod size;

pub use error::CheckError;

use crate::context::Context;
use crate::instance::Instance;

impl Context {
    /// Checks what can be known beforehand: the number of instances, the room for processes, the masks, the sizes of
    /// arguments and environments, the working directory. A single instance that is too large is left to fail on its own.
    ///
    /// # Errors
    /// What is wrong, why, and the remedy.
    pub fn check(&self, instances: &[Instance]) -> Result<(), CheckError> {
        if instances.is_empty() {
            return Err(CheckError::NoInstances);
        }
        masks::check_masks(instances)?;
        size::check_sizes(&self.setup, instances)?;
        room::check_cgroups(instances)?;
        room::check_room(instances.len())
    }
}
