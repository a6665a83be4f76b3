//! The warden: one cycle of observe, reconcile, audit, journal and apply, and the report of a cycle.

mod cycle;
mod newborns;
mod report;

pub use cycle::Warden;
pub use report::{ConfinedNewborn, EventsRead, Faults, Refused, Report};
