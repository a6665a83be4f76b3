//! Spares: processes that are forked from a template in advance and stopped before `main`. A spare gets its arguments
//! when it is needed.

use std::os::fd::AsRawFd;

use super::channel::Channel;
use super::load::tracee::bytes_of;
use super::memory::write;
use super::message::block::MemoryMap;
use super::message::strings::PlacedStrings;
use super::message::{InstanceSetup, TemplateMessage};
use super::template::Template;
use crate::child::Child;
use crate::failure::{SpawnError, SpawnStep};
use crate::instance::Instance;
use crate::proxy::refusal::ForkError;

/// A spare: a process that was made in advance, so that it can later run a program without delay. The spare has loaded
/// the program, is stopped before `main`, and uses no CPU. It was forked from a [`Template`]. [`Template::start_spare`]
/// gives the spare its arguments, and lets it run `main`. The spare ends when this value is dropped, or when the
/// process that made the spare ends.
#[derive(Debug)]
pub struct SpareProcess {
    /// The process of the spare. `None` after [`Template::start_spare`] has taken the process.
    child: Option<Child>,
    /// The socket by which the launcher sends the spare the message to run `main`.
    pub(super) channel: Channel,
    /// The arguments and environment variables that are in the memory of the spare until it gets its own: those that
    /// the template had when the spare was forked. Empty if they are unknown.
    written_strings: PlacedStrings,
    /// The memory map that the spare inherited from the template. `None` if the template still had its first map.
    inherited_map: Option<MemoryMap>,
    /// The address and the size of the memory of the spare for arguments and environment variables.
    string_memory: (u64, u64),
}

impl Template {
    /// Makes a spare: a process that has loaded the program and is stopped before `main`. Later,
    /// [`Template::start_spare`] gives the process its arguments, environment variables and standard streams, and
    /// lets it run `main`.
    ///
    /// # Errors
    /// The errors of [`Template::fork`].
    pub fn make_spare(&mut self) -> Result<SpareProcess, ForkError> {
        let failed = |errno| ForkError::from(SpawnError { step: SpawnStep::Clone, errno });
        let (channel, spare_end) = Channel::pair().map_err(failed)?;
        self.wait_until_idle()?;
        self.message.add_spare(self.loaded.block, &self.common, spare_end.as_raw_fd());
        self.send()?;
        let child = self.next_child()?;
        Ok(SpareProcess {
            child: Some(child),
            channel,
            written_strings: self.written_strings.clone(),
            inherited_map: self.inherited_map,
            string_memory: self.string_memory,
        })
    }

    /// Turns a spare (a process that is stopped before `main`) into a running process of the program. The process
    /// gets the arguments, the environment variables and the standard streams in `instance`. The call does not wait
    /// for the program. If the arguments and variables do not fit into the memory of the spare, the result is a new
    /// fork of the template, and the spare ends.
    ///
    /// # Errors
    /// The errors of [`Template::fork`]. [`ForkError::Ended`] if the spare has ended. After any error, the process of
    /// the spare has ended.
    pub fn start_spare(&mut self, mut spare: SpareProcess, instance: &Instance) -> Result<Child, ForkError> {
        let own = self.instance_setup(instance)?;
        let strings = self.instance_strings(instance);
        self.check_fit(instance, &strings)?;
        if strings.size() > spare.string_memory.1 {
            // The memory of the spare can't be enlarged. The template can map larger memory for itself.
            return self.fork(instance);
        }
        let placed = strings.place_at(spare.string_memory.0);
        let map = self.memory_map_for(&placed).filter(|map| spare.inherited_map.as_ref() != Some(map));
        let random = self.new_random_bytes();
        let own = InstanceSetup { memory_map: map.map(|map| bytes_of(&map).to_vec()), random, ..own };
        let changes = placed.changes(&spare.written_strings, self.pointers_at());
        let mut message = TemplateMessage::default();
        let child = spare.child.take().ok_or(ForkError::Ended)?;
        // The message can be sent to a spare that has ended: a process that another thread forked while the spare was
        // made may have the spare's end of the channel open.
        if child.try_wait() != Ok(None) {
            return Err(ForkError::Ended);
        }
        if TemplateMessage::can_copy(&changes) {
            changes.into_iter().for_each(|(address, bytes)| message.add_copy(address, bytes));
        } else if let Err(error) = write(&child, &changes) {
            child.kill_and_wait();
            return Err(error);
        }
        message.make_message_to_spare(self.loaded.block, &self.common, own);
        let descriptors = message.descriptors.clone();
        let sent =
            message.into_bytes(self.loaded.block).map(|bytes| spare.channel.send(&bytes, &descriptors));
        match sent {
            Some(Ok(())) => Ok(child),
            _ => {
                child.kill_and_wait();
                Err(ForkError::Ended)
            }
        }
    }
}

impl Drop for SpareProcess {
    fn drop(&mut self) {
        if let Some(child) = &self.child {
            child.kill_and_wait();
        }
    }
}
