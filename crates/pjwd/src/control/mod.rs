//! The control server: it answers calls on the socket, and passes commands and questions on to the event loop.

mod admin_groups;
pub mod admission;
mod assign;
pub mod inbox;
mod memory;
mod memory_estimates;
mod memory_findings;
pub mod query;
mod refused_provision;
pub mod server;
pub mod settings;
