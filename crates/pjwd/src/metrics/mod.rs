//! Metrics for Prometheus: a text file for node_exporter, and an HTTP endpoint.
//!
//! The event loop counts, and publishes a [`meter::MetricsSnapshot`] after each cycle. Everything else runs on the
//! thread of the control server ([`service`]), so a slow disk or a slow client does not delay a cycle. [`table`]
//! defines each metric once, [`text`] writes the table in either format, [`textfile`] and [`http`] deliver the text.
//! With metrics switched off, nothing is counted.

pub mod counters;
pub mod facts;
pub mod family;
pub mod http;
pub mod meter;
pub mod service;
pub mod table;
pub mod text;
pub mod textfile;

#[cfg(test)]
mod shipped_tests;
#[cfg(test)]
mod tests;
