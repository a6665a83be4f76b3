//! pjw-sim simulates the kernel for tests of the warden. It contains no second warden.
//!
//! [`world::SimMachine`] has processes, threads, masks, cgroups and a clock, and follows the kernel's rules for them.
//! [`node::SimMachineInterface`] shows this machine to the warden as the real node would, with the faults that
//! [`faults::Faults`] draws from a seed. [`journal::SimJournal`] stores records and can fail. [`workload`] starts,
//! changes and ends processes. All random choices come from [`seed::RandomStream`], so a failing seed can be replayed.
//! The runs are in the tests of pjwd, because they run the whole cycle of the daemon. With the feature `testing`,
//! `testing::ScriptedMachine` is a machine whose events a test chooses one by one.
//!
//! The other part replays logs of jobs on machines that are not present: [`swf`] parses the logs, [`replay`] runs
//! them through the allocator or through another policy of [`mod@reference`], [`locality`] measures the grants.
//! [`demand`] replays what jobs use of their cores through the lending decision.
#![forbid(unsafe_code)]

pub mod demand;
pub mod faults;
pub mod journal;
pub mod locality;
pub mod node;
pub mod reference;
pub mod replay;
pub mod seed;
pub mod swf;
#[cfg(feature = "testing")]
pub mod testing;
pub mod workload;
pub mod world;
