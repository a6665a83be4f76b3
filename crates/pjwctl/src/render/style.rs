//! Colours, each with its meaning.

use anstyle::{AnsiColor, Style};

use super::Terminal;

/// Broken promises: overlaps, jobs without the cores that they requested.
pub const ALARM: Style = AnsiColor::Red.on_default().bold();
/// Conditions that an administrator should know.
pub const NOTICE: Style = AnsiColor::Yellow.on_default();
/// Additional information.
pub const QUIET: Style = Style::new().dimmed();
/// Headings.
pub const HEADING: Style = Style::new().bold();

/// The colour of job number `n`. Colours repeat, letters do not. None of them is one of the colours above.
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

/// The text in a style, if the page has colours.
#[must_use]
pub fn paint(text: &str, style: Style, term: Terminal) -> String {
    if term.colour && !text.is_empty() { format!("{style}{text}{style:#}") } else { text.to_owned() }
}
