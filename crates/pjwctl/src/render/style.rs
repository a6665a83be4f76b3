//! Colours, each with its meaning.

use anstyle::{AnsiColor, Style};

use super::Terminal;

/// The text style of failures, such as a job without the cores that it requested: bold red.
pub const FAILURE: Style = AnsiColor::Red.on_default().bold();
/// The text style of warnings that are less serious than failures: yellow.
pub const WARNING: Style = AnsiColor::Yellow.on_default();
/// The text style of less important information: dimmed.
pub const SECONDARY: Style = Style::new().dimmed();
/// The text style of headings: bold.
pub const HEADING: Style = Style::new().bold();

/// Returns the colour of a job in the core map. `n` is the position of the job in the list of jobs, from 0. The
/// colours repeat after eight jobs.
#[must_use]
pub fn job_style(n: usize) -> Style {
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
    COLOURS[n % COLOURS.len()].on_default()
}

/// Returns `text` between the terminal escape sequences for `style`. Returns `text` unchanged if `term` has
/// no colours.
#[must_use]
pub fn apply_style(text: &str, style: Style, term: Terminal) -> String {
    if term.has_colours && !text.is_empty() { format!("{style}{text}{style:#}") } else { text.to_owned() }
}
