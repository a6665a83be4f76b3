//! Replies as text: each renderer takes a value and a [`Terminal`] and returns a string. No I/O, no clock, no decision.
//!
//! Users choose the names of processes and jobs. [`text::escape_control_characters`] keeps control characters in such
//! names off the terminal.

pub mod advise;
pub mod core_map;
pub mod defrag;
pub mod demand;
pub mod diagram;
pub mod doctor;
pub mod events;
pub mod explain;
pub mod jobs;
pub mod plan;
pub mod report;
pub mod show;
pub mod simulate;
pub mod status;
pub mod style;
pub mod text;
pub mod topology;

use std::collections::BTreeMap;

/// The properties of the output for which a text is made: its width in columns, and whether the text can have
/// colours. The output is usually a terminal. It can also be a file or a pipe.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Terminal {
    /// The maximum line width of the text, in columns: the width of the terminal, or 80 for a file or pipe.
    pub width: usize,
    /// Whether the text may contain ANSI colours.
    pub has_colours: bool,
}

/// A map from user ids to user names. Used to show the names of the owners of jobs and processes.
pub type UserNames = BTreeMap<u32, String>;

/// Returns the name of the user with the id `uid`, with control characters escaped. If `names` does not contain the
/// user, returns the user id as text.
#[must_use]
pub fn user_name(names: &UserNames, uid: u32) -> String {
    names.get(&uid).map_or_else(|| uid.to_string(), |name| text::escape_control_characters(name))
}

#[cfg(test)]
pub(crate) mod samples;
