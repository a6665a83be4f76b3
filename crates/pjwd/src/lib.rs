//! lib
#![forbid(unsafe_code)]

pub mod config;
pub mod logging;
pub mod notify;
pub mod report;
