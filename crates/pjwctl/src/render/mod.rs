//! Answers as text: each renderer takes a value and a [`Page`] and returns a string. No I/O, no clock, no
//! decision.
//!
//! Texts that come from the daemon may hold what a user named a process or a job: [`text::printable`] keeps
//! control characters off the terminal.

pub mod core_map;
pub mod defrag;
pub mod doctor;
pub mod events;
pub mod explain;
pub mod jobs;
pub mod picture;
pub mod plan;
pub mod show;
pub mod simulate;
pub mod status;
pub mod style;
pub mod text;
pub mod topology;

use std::collections::BTreeMap;

/// What a text is written on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Page {
    /// Its columns.
    pub width: usize,
    /// Whether it takes ANSI colours.
    pub colour: bool,
}

/// Users' names by number.
pub type UserNames = BTreeMap<u32, String>;

/// A user's name, or the number of one that has none.
#[must_use]
pub fn user(names: &UserNames, uid: u32) -> String {
    names.get(&uid).map_or_else(|| uid.to_string(), |name| text::printable(name))
}

#[cfg(test)]
pub(crate) mod samples;
