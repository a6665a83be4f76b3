//! What is wrong with a configuration, told so that it can be put right without reading anything else.
//!
//! A problem has a place (file, line, column), the line itself with a caret below the offending part, and a
//! sentence. Files are written by people and sometimes are no configuration at all, so whatever is quoted is
//! cut to a readable length and control characters are written as escapes: nothing in a file can move a
//! cursor.

use std::fmt;
use std::ops::Range;
use std::path::Path;

/// So many characters of a line are quoted.
const QUOTED_LINE: usize = 100;
/// So many characters of it stand before the caret where it has to be cut.
const BEFORE_CARET: usize = 40;
/// So many characters of a value or key are repeated in a sentence.
const QUOTED_VALUE: usize = 60;

/// One thing that is wrong. Its `Display` is the message for a terminal, of one to three lines.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    file: String,
    place: Option<Place>,
    key: Option<String>,
    text: String,
}

/// Where in a file something stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Place {
    /// From 1.
    line: usize,
    /// In characters, from 1.
    column: usize,
    quote: Quote,
}

/// A piece of a line that may be shown.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Quote {
    shown: String,
    /// In characters of `shown`.
    caret_from: usize,
    caret_length: usize,
}

impl Problem {
    /// A problem of the whole file.
    pub(super) fn of_file(path: &Path, text: impl Into<String>) -> Self {
        Self { file: file_name(path), place: None, key: None, text: text.into() }
    }

    /// A problem of something in it.
    pub(super) fn at(path: &Path, place: Place, key: Option<&str>, text: impl Into<String>) -> Self {
        let key = key.map(|key| visible(key, QUOTED_VALUE));
        Self { file: file_name(path), place: Some(place), key, text: text.into() }
    }

    /// The key that is concerned, with the names of its tables: `balance.pin`.
    #[must_use]
    pub fn key(&self) -> Option<&str> {
        self.key.as_deref()
    }

    /// The line that is concerned, from 1.
    #[must_use]
    pub fn line(&self) -> Option<usize> {
        self.place.as_ref().map(|place| place.line)
    }

    /// The file, the place in it, and the key.
    #[must_use]
    pub fn whereabouts(&self) -> String {
        let key = self.key.as_ref().map(|key| format!(": {key}")).unwrap_or_default();
        match &self.place {
            Some(place) => format!("{}:{}:{}{key}", self.file, place.line, place.column),
            None => format!("{}{key}", self.file),
        }
    }

    /// The message on one line and without the quoted one: for the log, and for readers who may not be
    /// allowed to see the file.
    #[must_use]
    pub fn summary(&self) -> String {
        format!("{}: {}", self.whereabouts(), self.text)
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.summary())?;
        let Some(place) = &self.place else { return Ok(()) };
        let number = place.line.to_string();
        let (margin, before) = (number.len() + 2, place.quote.caret_from);
        write!(f, "\n  {number} | {}", place.quote.shown)?;
        write!(f, "\n{:margin$} | {:before$}{}", "", "", "^".repeat(place.quote.caret_length))
    }
}

impl Place {
    /// Where `span` (in bytes) begins in `text`. A span that isn't one of `text` is taken for its end.
    pub(super) fn of(text: &str, span: Range<usize>) -> Self {
        let start = boundary(text, span.start);
        let end = boundary(text, span.end).max(start);
        let line_start = text[..start].rfind('\n').map_or(0, |at| at + 1);
        let line_end = text[start..].find('\n').map_or(text.len(), |at| start + at);
        let line = text[line_start..line_end].trim_end_matches('\r');
        let column = text[line_start..start].chars().count();
        let width = text[start..end.min(line_end)].chars().count();
        Self {
            line: text[..line_start].matches('\n').count() + 1,
            column: column + 1,
            quote: Quote::of(line, column, width),
        }
    }

    pub(super) fn line(&self) -> usize {
        self.line
    }
}

impl Quote {
    /// `column` and `width` count characters of `line`, `column` from 0.
    fn of(line: &str, column: usize, width: usize) -> Self {
        let length = line.chars().count();
        let skipped = if length > QUOTED_LINE { column.saturating_sub(BEFORE_CARET) } else { 0 };
        let mut shown = String::from(if skipped > 0 { "…" } else { "" });
        let mut count = shown.chars().count();
        let (mut caret_from, mut caret_end) = (None, None);
        for (at, character) in line.chars().enumerate().skip(skipped).take(QUOTED_LINE) {
            if at == column {
                caret_from = Some(count);
            }
            if at == column + width {
                caret_end = Some(count);
            }
            let piece = shown_as(character);
            count += piece.chars().count();
            shown.push_str(&piece);
        }
        let caret_from = caret_from.unwrap_or(count);
        let caret_length = caret_end.unwrap_or(count).saturating_sub(caret_from).max(1);
        if length > skipped + QUOTED_LINE {
            shown.push('…');
        }
        Self { shown, caret_from, caret_length }
    }
}

/// A value or key for a sentence: in quotation marks, cut to a readable length, with nothing invisible.
pub(super) fn quoted(text: &str) -> String {
    format!("\"{}\"", visible(text, QUOTED_VALUE))
}

/// The known word that was probably meant: the nearest by letters left out, added, changed or exchanged, if
/// it is near enough to be a slip.
pub(super) fn nearest<'a>(wrong: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let length = wrong.chars().count();
    if length > QUOTED_VALUE {
        return None;
    }
    let near = known.into_iter().map(|word| (distance(&wrong.to_lowercase(), word), word));
    near.filter(|(slips, word)| *slips <= (length.min(word.len()) / 3).max(1)).min().map(|(_, word)| word)
}

/// Optimal string alignment distance: slips of one letter, and exchanges of two neighbours, count one each.
fn distance(a: &str, b: &str) -> usize {
    let (a, b): (Vec<char>, Vec<char>) = (a.chars().collect(), b.chars().collect());
    let mut rows: Vec<Vec<usize>> = vec![(0..=b.len()).collect()];
    for i in 1..=a.len() {
        let mut row = vec![i];
        for j in 1..=b.len() {
            let change = rows[i - 1][j - 1] + usize::from(a[i - 1] != b[j - 1]);
            let mut least = change.min(rows[i - 1][j] + 1).min(row[j - 1] + 1);
            if i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] {
                least = least.min(rows[i - 2][j - 2] + 1);
            }
            row.push(least);
        }
        rows.push(row);
    }
    rows[a.len()][b.len()]
}

fn file_name(path: &Path) -> String {
    visible(&path.to_string_lossy(), 4096)
}

fn visible(text: &str, characters: usize) -> String {
    let mut shown: String = text.chars().take(characters).map(shown_as).collect();
    if text.chars().nth(characters).is_some() {
        shown.push('…');
    }
    shown
}

/// Control characters, and those that turn the direction of writing, as escapes; a tab as a blank, so that
/// the caret stands right.
fn shown_as(character: char) -> String {
    match character {
        '\t' => " ".to_owned(),
        '"' | '\'' | '\\' => character.to_string(),
        other => other.escape_debug().to_string(),
    }
}

fn boundary(text: &str, at: usize) -> usize {
    let mut at = at.min(text.len());
    while !text.is_char_boundary(at) {
        at -= 1;
    }
    at
}
