//! Colours, each with its meaning.

use anstyle::{AnsiColor, Style};

use super::Page;

/// What is wrong: overlaps, jobs without the cores they asked for.
pub const ALARM: Style = AnsiColor::Red.on_default().bold();
/// What a person should know.
pub const NOTICE: Style = AnsiColor::Yellow.on_default();
/// What is there, but not the point.
pub const QUIET: Style = Style::new().dimmed();
/// Headings.
pub const HEADING: Style = Style::new().bold();

/// The colour of the `n`th job; they repeat, the letters don't. None of them is one of the meanings above.
#[must_use]
pub fn of_job(n: usize) -> Style {
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

/// The text in a style, on a page that takes it.
#[must_use]
pub fn paint(text: &str, style: Style, page: Page) -> String {
    if page.colour && !text.is_empty() { format!("{style}{text}{style:#}") } else { text.to_owned() }
}
