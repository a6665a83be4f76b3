//! A farm: a master process that initialises itself, and workers forked from it that compute items.
//!
//! [`Farm::start`] forks the workers from the calling process, at the moment that the program chooses. The workers
//! share the memory of the master until they write to it (copy-on-write), so what the master loads before the fork
//! exists once. Items are numbered from 0. Workers take them from a queue in shared memory, first come first served.
//! Results come back to the master through shared memory, each exactly once. A worker that dies is replaced by a new
//! fork of the master, and the items that the worker had taken and not finished are computed again.
//!
//! A reader and a writer, both optional, are processes of their own that do all input and all output: the event source
//! and the event sink of AthenaMP (Binet et al., "Multicore in production", J. Phys.: Conf. Ser. 368 (2012) 012018).
//!
//! The queue is in `window.rs`, the way of the results in `ring.rs`. Neither has a lock: a process can be killed at any
//! instruction, and no other process waits for it.

pub mod advise;
mod cpus;
mod delivery;
mod error;
mod functions;
mod io_failure;
mod master;
mod member;
mod memory;
mod options;
mod process;
mod reader;
mod result;
mod ring;
mod settings;
mod wake;
mod window;
mod worker;
mod writer;

pub use cpus::WorkerCpus;
pub use error::{FarmError, IoProcess};
pub use master::{NextResult, RunningFarm};
pub use options::Farm;
pub use result::{FarmProgress, ItemResult, Outcome, WorkItem};
