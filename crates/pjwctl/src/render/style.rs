//! Colours, each with its meaning.

use anstyle::{AnsiColor, Style};

use super::Terminal;

/// The text style (bold red) of failures, such as a job without the cores that it requested.
pub const FAILURE: Style = AnsiColor::Red.on_default().bold();
/// The text style (yellow) of warnings, which are less serious than failures.
pub const WARNING: Style = AnsiColor::Yellow.on_default();
/// The text style (dimmed) of less important information.
pub const SECONDARY: Style = Style::new().dimmed();
/// The text style (bold) of headings.
pub const HEADING: Style = Style::new().bold();

/// Returns the text style (a colour) in which the output of pjwctl shows a job. `position` is the position of the job
/// in the list of jobs, from 0. There are eight colours, which repeat.
#[must_use]
pub fn job_style(position: usize) -> Style {
    const COLOURS: [AnsiColor; 8] = [
        AnsiColor::Green,
        AnsiColor::Cyan,
        AnsiColor::Magenta,
        AnsiColor::Blue,
        AnsiColor::BrightGreen,
        AnsiColor::BrightCyan,
        AnsiColor::BrightMagenta,
        AnsiColor::BrightBlue,
    ];
    COLOURS[position % COLOURS.len()].on_default()
}

/// Returns `text` between the terminal escape sequences that begin and end `style`. If `term` has no colours, or if
/// `text` is empty, returns `text` unchanged.
#[must_use]
pub fn apply_style(text: &str, style: Style, term: Terminal) -> String {
    if term.has_colours && !text.is_empty() { format!("{style}{text}{style:#}") } else { text.to_owned() }
}
