//! pjw-core decides: plain data in, plain data out.
//!
//! No I/O, no clock, no threads, no async, no globals. The kernel's facts arrive as a
//! [`snapshot::Snapshot`], a person's wishes as a [`command::Command`], the time as a number; what should be
//! done leaves as a [`plan::Plan`]. The heart is [`reconcile::reconcile`]; [`audit::audit`] checks every plan
//! and shares no code with what it checks.
#![forbid(unsafe_code)]

pub mod allocate;
mod asks;
pub mod audit;
pub mod balance;
pub mod bindings;
pub mod command;
mod confine;
pub mod cpuset;
pub mod defrag;
pub mod demand;
pub mod diagnosis;
pub mod event;
pub mod explain;
mod facts;
pub mod fortify;
mod hotplug;
pub mod housekeeping;
pub mod job;
mod jobs;
mod looking;
pub mod membership;
pub mod newborn;
pub mod node;
pub mod plan;
pub mod policy;
pub mod pool;
pub mod process;
pub mod reconcile;
pub mod record;
pub mod roster;
mod serve;
pub mod snapshot;
pub mod state;
pub mod stirred;
pub mod strays;
pub mod topology;
pub mod touch;
pub mod wall;
