//! pjw-ipc is the interface between pjwd and its clients: the Varlink interface `org.pjw.Warden`, its types, a server
//! and a client.
//!
//! `org.pjw.Warden.varlink` defines the interface. [`wire`] has its types, whose JSON is public (docs/contract.md),
//! and [`call`] its methods. [`server`] and [`client`] implement the protocol and do not depend on other parts of
//! pjw. docs/adr/0002-ipc.md says why the server is our own.
#![forbid(unsafe_code)]

pub mod bind;
pub mod call;
pub mod client;
mod connection;
pub mod daemon_process;
mod dial;
mod lending;
pub mod refused_provision;
pub mod report;
mod request;
pub mod server;
mod service;
pub mod service_commands;
mod slots;
pub mod socket_access;
#[cfg(test)]
mod tests;
mod unsent;
pub mod wire;

/// The definition of the interface between pjwd and its clients (`org.pjw.Warden`), in the Varlink language. The
/// server sends this text to a client that calls the standard Varlink method `GetInterfaceDescription`.
pub const INTERFACE_DEFINITION: &str = include_str!("org.pjw.Warden.varlink");
/// The Varlink name of the interface between pjwd and its clients. The full name of each method begins with this
/// name. Example: `org.pjw.Warden.GetJob`.
pub const INTERFACE_NAME: &str = "org.pjw.Warden";
