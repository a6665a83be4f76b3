//! The protocol rule by rule, on a real socket: what is described, what is bounded, how it ends, who is heard.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)] // a test may fail
#![allow(missing_docs)]

mod bounds;
mod client;
mod descriptors;
mod desk;
mod every_method;
mod interface;
mod stopping;
mod streams;
