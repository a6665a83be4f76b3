//! The files in the state directory, and the lock against a second daemon.

pub mod journal;
pub mod lock;
pub mod reports;
