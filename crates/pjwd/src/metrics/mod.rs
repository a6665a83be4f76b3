//! Metrics for Prometheus: a text file for node_exporter, and an HTTP endpoint.
//!
//! The loop keeps counters and hands over, after each cycle, a [`pulse::Pulse`] that never changes again. All else
//! happens on the thread of the control server ([`service`]), so neither a slow disk nor a slow client delays a cycle.
//! A statistic is defined once, in [`table`]; [`text`] writes the table in either format; [`textfile`] and [`http`]
//! carry the text. Switched off, none of it runs and the loop counts nothing.

pub mod counters;
pub mod facts;
pub mod http;
pub mod pulse;
pub mod service;
pub mod table;
pub mod text;
pub mod textfile;

#[cfg(test)]
mod shipped_tests;
#[cfg(test)]
mod tests;
