//! Problems of a configuration, with everything that is needed to correct the file.
//!
//! A problem has a position (file, line, column), the line itself with a caret below the wrong part, and a sentence.
//! A file may contain anything, so quoted text is cut to a readable length and control characters are escaped: a file
//! can't move the cursor of a terminal.

use std::fmt;
use std::ops::Range;
use std::path::Path;

/// The largest number of characters of a line that are quoted.
const QUOTED_LINE: usize = 100;
/// How many characters before the caret are quoted if the line is cut.
const BEFORE_CARET: usize = 40;
/// The largest number of characters of a value or key in a sentence.
const QUOTED_VALUE: usize = 60;

/// A mistake in the configuration file, or the reason why the file can't be read. The error message (`Display`) has
/// one to three lines. If the mistake is in one line of the file, the message quotes this line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigError {
    file: String,
    position: Option<Box<FilePosition>>,
    key: Option<String>,
    text: String,
}

/// A position in the configuration file: the line, the column, and the text of the line for the error message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct FilePosition {
    /// The line number, from 1.
    line: usize,
    /// The column in characters, from 1.
    column: usize,
    quote: Quote,
}

/// A part of a line that is safe to print.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Quote {
    shown: String,
    /// In characters of `shown`.
    caret_from: usize,
    caret_length: usize,
}

impl ConfigError {
    /// Makes an error that concerns the whole configuration file `path`. `text` is the description of the error.
    pub(super) fn for_whole_file(path: &Path, text: impl Into<String>) -> Self {
        Self { file: file_name(path), position: None, key: None, text: text.into() }
    }

    /// Makes an error about a mistake at `position` in the configuration file `path`. `key` is the configuration key
    /// that has the mistake, or `None` if no single key has it. `text` is the description of the mistake.
    pub(super) fn at_position(
        path: &Path,
        position: FilePosition,
        key: Option<&str>,
        text: impl Into<String>,
    ) -> Self {
        let key = key.map(|key| escape_and_cut(key, QUOTED_VALUE));
        Self { file: file_name(path), position: Some(Box::new(position)), key, text: text.into() }
    }

    /// Returns the path of the configuration file, with escaped control characters.
    #[must_use]
    pub fn file(&self) -> &str {
        &self.file
    }

    /// Returns the configuration key that has the mistake, such as `balance.pin`. `None` if the error concerns no
    /// single key, for example if the file can't be read.
    #[must_use]
    pub fn key(&self) -> Option<&str> {
        self.key.as_deref()
    }

    /// Returns the number of the line with the mistake, counted from 1. `None` if the mistake concerns the whole file.
    #[must_use]
    pub fn line(&self) -> Option<usize> {
        self.position.as_ref().map(|position| position.line)
    }

    /// Returns the position of the mistake as text, in the form `FILE:LINE:COLUMN: KEY`. Leaves out LINE and COLUMN
    /// if the mistake concerns the whole file, and KEY if the mistake concerns no single key.
    #[must_use]
    pub fn location(&self) -> String {
        let key = self.key.as_ref().map(|key| format!(": {key}")).unwrap_or_default();
        match &self.position {
            Some(position) => format!("{}:{}:{}{key}", self.file, position.line, position.column),
            None => format!("{}{key}", self.file),
        }
    }

    /// Returns the error as one line for the log and for clients of pjwd: the position and the description of the
    /// mistake. Does not quote the wrong line of the file, because not every client has permission to read the file.
    #[must_use]
    pub fn log_line(&self) -> String {
        format!("{}: {}", self.location(), self.text)
    }
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.log_line())?;
        let Some(position) = &self.position else { return Ok(()) };
        let number = position.line.to_string();
        let (margin, before) = (number.len() + 2, position.quote.caret_from);
        write!(f, "\n  {number} | {}", position.quote.shown)?;
        write!(f, "\n{:margin$} | {:before$}{}", "", "", "^".repeat(position.quote.caret_length))
    }
}

impl FilePosition {
    /// Returns the position in `text`, the content of a configuration file, at which the byte range `span` begins. A
    /// range beyond the end of `text` gives the position of the end.
    pub(super) fn from_span(text: &str, span: Range<usize>) -> Self {
        let start = char_boundary(text, span.start);
        let end = char_boundary(text, span.end).max(start);
        let line_start = text[..start].rfind('\n').map_or(0, |at| at + 1);
        let line_end = text[start..].find('\n').map_or(text.len(), |at| start + at);
        let line = text[line_start..line_end].trim_end_matches('\r');
        let column = text[line_start..start].chars().count();
        let width = text[start..end.min(line_end)].chars().count();
        Self {
            line: text[..line_start].matches('\n').count() + 1,
            column: column + 1,
            quote: Quote::from_line(line, column, width),
        }
    }

    /// Returns the line number of this position in the configuration file, counted from 1.
    pub(super) fn line(&self) -> usize {
        self.line
    }
}

impl Quote {
    /// Returns the part of `line` that an error message shows, and where the carets (`^`) stand below this part. The
    /// carets mark `width` characters of `line`, from the character with the index `column` on. If `line` is longer
    /// than [`QUOTED_LINE`] characters, it is cut so that the character at `column` is shown.
    fn from_line(line: &str, column: usize, width: usize) -> Self {
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
            let piece = escaped(character);
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

/// Returns `text` in quotation marks, for error messages. Control characters are escaped. A text of more than 60
/// characters is cut.
pub(super) fn quote_and_cut(text: &str) -> String {
    format!("\"{}\"", escape_and_cut(text, QUOTED_VALUE))
}

/// Returns the word in `known` that the user probably meant by the misspelled word `wrong`: the word with the smallest
/// edit distance. `None` if `wrong` differs too much from each of these words.
pub(super) fn closest_word<'a>(wrong: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let length = wrong.chars().count();
    if length > QUOTED_VALUE {
        return None;
    }
    let distances = known.into_iter().map(|word| (edit_distance(&wrong.to_lowercase(), word), word));
    let max_distance = |word: &str| (length.min(word.len()) / 3).max(1);
    distances.filter(|(distance, word)| *distance <= max_distance(word)).min().map(|(_, word)| word)
}

/// Returns the end of a message about the misspelled word `wrong`: a question that names the word in `known` that the
/// user probably meant ([`closest_word`]). Empty if there is no such word.
pub(super) fn suggestion_text<'a>(wrong: &str, known: impl IntoIterator<Item = &'a str>) -> String {
    let meant = closest_word(wrong, known);
    meant.map(|word| format!("; did you mean {}?", quote_and_cut(word))).unwrap_or_default()
}

/// Returns the edit distance of `a` and `b`: the smallest number of single changes that make `b` of `a`. A change
/// inserts, removes or replaces one character, or exchanges two neighbours (optimal string alignment distance).
fn edit_distance(a: &str, b: &str) -> usize {
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
    escape_and_cut(&path.to_string_lossy(), 4096)
}

/// Returns `text` with escaped control characters, for error messages. A text of more than `characters` characters is
/// cut, and gets `…` at its end.
pub(super) fn escape_and_cut(text: &str, characters: usize) -> String {
    let mut shown: String = text.chars().take(characters).map(escaped).collect();
    if text.chars().nth(characters).is_some() {
        shown.push('…');
    }
    shown
}

/// Escapes control characters and characters that change the direction of writing. A tab becomes a space, so that the
/// caret stays aligned.
fn escaped(character: char) -> String {
    match character {
        '\t' => " ".to_owned(),
        '"' | '\'' | '\\' => character.to_string(),
        other => other.escape_debug().to_string(),
    }
}

/// Returns the last boundary between two characters of `text` that is not behind the byte `at`.
fn char_boundary(text: &str, at: usize) -> usize {
    let mut at = at.min(text.len());
    while !text.is_char_boundary(at) {
        at -= 1;
    }
    at
}
