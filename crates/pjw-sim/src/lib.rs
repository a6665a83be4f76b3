//! pjw-sim pretends: a fake kernel, never a second warden.
//!
//! [`world::World`] has processes, threads, masks, cgroups and a clock, and follows the kernel's rules for them;
//! [`node::SimNode`] shows it to the warden as the real node would, with the faults that [`faults::Faults`] draws
//! from a seed; [`journal::SimJournal`] remembers records and can fail. [`workload`] makes things happen. Whatever
//! chance decides comes from [`seed::Seed`], so a failing seed replays. The runs are in pjwd's tests, because it
//! is the whole daemon cycle that they run.
//!
//! Beside that, whole logs of jobs are replayed on machines that aren't here: [`swf`] reads them, [`replay`] runs them
//! through the allocator or through the policies of others in [`mod@reference`], [`places`] measures the grants.
#![forbid(unsafe_code)]

pub mod faults;
pub mod journal;
pub mod minimum;
pub mod node;
pub mod places;
pub mod reference;
pub mod replay;
pub mod seed;
pub mod swf;
pub mod workload;
pub mod world;
