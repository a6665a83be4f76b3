//! The rules of the protocol on a real socket: description, limits, streams, stop, clients.
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
