//! The protocol on a real socket: interface description, limits, streams, the stop of the server, clients.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)] // a test may fail
#![allow(missing_docs)]

mod abandoned;
mod bounds;
mod client;
mod descriptors;
mod every_method;
mod fixture;
mod interface;
mod stopping;
mod streams;
