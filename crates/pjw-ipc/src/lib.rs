//! pjw-ipc speaks: the Varlink interface `org.pjw.Warden`, its types, a server and a client.
//!
//! `org.pjw.Warden.varlink` is the source. [`wire`] has its types, whose JSON is public (docs/contract.md), and
//! [`call`] its methods; [`server`] and [`client`] know the protocol and nothing of pjw beside them. Why the
//! server is our own: docs/adr/0002-ipc.md.
#![forbid(unsafe_code)]

pub mod bind;
pub mod call;
pub mod client;
mod connection;
mod dial;
pub mod server;
mod unsent;
pub mod wire;

/// The interface's description.
pub const DESCRIPTION: &str = include_str!("org.pjw.Warden.varlink");
/// The interface's name.
pub const INTERFACE: &str = "org.pjw.Warden";
