//! The crate by which a program reads the cores of its job, and asks for more or fewer cores.
//!
//! pjwd publishes the *core map* of each job in a directory, by default `/run/pjwd/jobs/ID`. A program opens its job
//! once with [`Job::of_this_process`], reads its cores with [`Job::cores`], which makes no system call, and waits for
//! changes with [`Job::wait_for_change`]. Without a daemon the cores are those of the affinity mask of the calling
//! thread, so a program that uses this crate runs anywhere.
//!
//! ```no_run
//! let job = pjw_job::Job::of_this_process();
//! let mut cores = job.cores();
//! loop {
//!     println!("{} cores: {}", cores.core_count, cores.cpus);
//!     if let Some(changed) = job.wait_for_change(cores.epoch, None) {
//!         cores = changed;
//!     }
//! }
//! ```
//!
//! The examples `thread_pool` and `spin_lock` are programs that follow the core map, and are meant to be copied.
//!
//! The core map is a state and not a series of messages: a program that was busy while the core map changed twice reads
//! the last state. `docs/coremap.md` describes the files byte for byte.
//!
//! The core map is the CPUs of a job, as pjwd publishes them. It is in the file `coremap` of 4096 bytes, which programs
//! map into their memory. [`layout`] describes the file, and pjwd writes it by [`CoreMapWriter`]. Programs need these
//! two only in tests, to make a file of their own.

pub mod layout;

mod directory;
mod futex;
mod job;
mod mask;
mod page;
mod writer;

pub use directory::{CORE_MAP_FILE_NAME, FILE_MODE, WANTED_CORES_FILE_NAME, find_job_directory};
pub use job::{Cores, CoresSource, Job, WantError};
pub use page::{CoreMapError, CoreMapReader};
pub use pjw_core::cpuset::{CpuSet, Pu};
pub use writer::CoreMapWriter;
