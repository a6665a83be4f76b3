//! Sentences, lists and times for people: escaped, wrapped, shortened.

use jiff::Timestamp;
use pjw_core::cpuset::CpuSet;

/// Returns `text`, with an escape such as `\n` or `\u{202e}` in place of each control character and each character
/// that changes the text direction. The escapes are those of Rust source text. Users choose the names of jobs and
/// processes, and an escaped name can't disturb the terminal.
#[must_use]
pub fn escape_control_characters(text: &str) -> String {
    let is_harmful = |c: char| {
        c.is_control()
            || matches!(c, '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
    };
    let mut safe = String::with_capacity(text.len());
    for c in text.chars() {
        if is_harmful(c) { safe.extend(c.escape_default()) } else { safe.push(c) }
    }
    safe
}

/// Returns `text` wrapped at blanks into lines of at most `width` columns, each with a line break at its end. The
/// first line begins with `first_prefix`, and all further lines begin with `later_prefix`. A word that is longer than
/// a line is not broken. Control characters in the text are escaped, see [`escape_control_characters`].
#[must_use]
pub fn wrap_text(text: &str, width: usize, first_prefix: &str, later_prefix: &str) -> String {
    let mut lines = String::new();
    let mut line = first_prefix.to_owned();
    let mut is_line_empty = true;
    for word in escape_control_characters(text).split_whitespace() {
        if !is_line_empty && char_count(&line) + 1 + char_count(word) > width {
            lines.push_str(&line);
            lines.push('\n');
            later_prefix.clone_into(&mut line);
            is_line_empty = true;
        }
        if !is_line_empty {
            line.push(' ');
        }
        line.push_str(word);
        is_line_empty = false;
    }
    lines + line.trim_end() + "\n"
}

/// Returns `remedy`, wrapped into indented lines of at most `width` columns. A remedy is a text that says how the
/// user can solve a problem. The lines are printed below the description of the problem. If `remedy` is empty,
/// returns an empty text.
#[must_use]
pub fn remedy_lines(remedy: &str, width: usize) -> String {
    if remedy.is_empty() { String::new() } else { wrap_text(remedy, width, "  → ", "    ") }
}

/// Returns a text with one line for each sentence in `sentences`. Control characters in the sentences are escaped. If
/// there are no sentences, the text is the single line `if_empty`.
#[must_use]
pub fn sentence_lines(if_empty: &str, sentences: &[String]) -> String {
    if sentences.is_empty() {
        return format!("{if_empty}\n");
    }
    sentences.iter().map(|sentence| escape_control_characters(sentence) + "\n").collect()
}

/// Returns `text` with line breaks, so that each line has at most `width` columns. A line is broken only after a
/// character for which `may_end` is true. A piece of text without such a character is not broken, even if it is longer
/// than `width`.
#[must_use]
pub fn break_lines(text: &str, width: usize, may_end: fn(char) -> bool) -> String {
    let mut broken = String::new();
    let mut used = 0;
    for piece in text.split_inclusive(may_end) {
        if used > 0 && used + char_count(piece) > width {
            broken.push('\n');
            used = 0;
        }
        broken.push_str(piece);
        used += char_count(piece);
    }
    broken
}

/// Returns the number of characters in `text`. For a text without wide characters, this is the width in terminal
/// columns.
#[must_use]
pub fn char_count(text: &str) -> usize {
    text.chars().count()
}

/// Returns the CPU list `list`, such as `0-3,8`, with control characters escaped. If the list has more than `width`
/// characters, the text has only the first CPUs, and then the number of all CPUs in the list. For example, the text for
/// a list of eight CPUs is `0,2,…(8)`.
#[must_use]
pub fn shorten_cpu_list(list: &str, width: usize) -> String {
    if char_count(list) <= width {
        return escape_control_characters(list);
    }
    let count = list.parse::<CpuSet>().map(|set| set.len()).unwrap_or_default();
    let ending = format!("…({count})");
    let mut short = String::new();
    for piece in list.split(',') {
        if char_count(&short) + char_count(piece) + 1 + char_count(&ending) > width {
            break;
        }
        short.push_str(piece);
        short.push(',');
    }
    escape_control_characters(&(short + &ending))
}

/// Returns the CPU list `list` with a noun before it: `CPU 0` or `CPUs 2-3`. If `list` is empty, returns `no CPU`.
/// `width` is the maximum width of the list in terminal columns, without the noun. A longer list is cut, and the
/// number of all CPUs in `list` follows, as in `CPUs 0,2,…(8)`.
#[must_use]
pub fn cpus_phrase(list: &str, width: usize) -> String {
    match list.parse::<CpuSet>().map(|set| set.len()) {
        Ok(0) => "no CPU".to_owned(),
        Ok(1) => format!("CPU {}", shorten_cpu_list(list, width)),
        _ => format!("CPUs {}", shorten_cpu_list(list, width)),
    }
}

/// Returns `number` with a noun, such as `1 core` or `2 cores`. The noun is `singular` for the number 1, and `plural`
/// for all other numbers.
#[must_use]
pub fn count_with_noun(number: impl Into<u64>, singular: &str, plural: &str) -> String {
    match number.into() {
        1 => format!("1 {singular}"),
        number => format!("{number} {plural}"),
    }
}

/// Returns the time from `start` to `now` as a short text, such as `5m` for five minutes. `start` is a timestamp in
/// the format of RFC 3339. If `start` cannot be parsed, returns `start` with control characters escaped.
#[must_use]
pub fn age_text(start: &str, now: Timestamp) -> String {
    let Ok(start) = start.parse::<Timestamp>() else { return escape_control_characters(start) };
    let seconds = now.as_second().saturating_sub(start.as_second()).max(0);
    match seconds {
        0..=99 => format!("{seconds}s"),
        100..=5_999 => format!("{}m", seconds / 60),
        6_000..=359_999 => format!("{}h", seconds / 3_600),
        _ => format!("{}d", seconds / 86_400),
    }
}

/// Returns a share as a percentage with one digit after the point. `permille` is the share in thousandths: for 987,
/// the text is `98.7%`.
#[must_use]
pub fn percent_text(permille: u32) -> String {
    format!("{}.{}%", permille / 10, permille % 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_are_escaped() {
        assert_eq!(
            escape_control_characters("a\x1b[2Jb\nc\r\u{9b}d\u{202e}e"),
            "a\\u{1b}[2Jb\\nc\\r\\u{9b}d\\u{202e}e"
        );
        assert_eq!(escape_control_characters("größe 数 ok"), "größe 数 ok");
    }

    #[test]
    fn long_texts_are_wrapped_between_words() {
        let text = wrap_text("one two three four", 10, "* ", "  ");
        assert_eq!(text, "* one two\n  three\n  four\n");
        assert_eq!(wrap_text("unbreakable", 5, "* ", "  "), "* unbreakable\n");
        assert_eq!(wrap_text("", 5, "", ""), "\n");
    }

    #[test]
    fn long_lists_keep_their_beginning_and_tell_their_size() {
        assert_eq!(shorten_cpu_list("0-3,8", 5), "0-3,8");
        assert_eq!(shorten_cpu_list("0,2,4,6,8,10,12,14", 12), "0,2,4,6,…(8)");
        assert_eq!(shorten_cpu_list("100000000000", 5), "…(0)");
    }

    #[test]
    fn a_list_of_one_is_no_count() {
        assert_eq!(cpus_phrase("0", 9), "CPU 0");
        assert_eq!(cpus_phrase("0-3,8", 9), "CPUs 0-3,8");
        assert_eq!(cpus_phrase("0,2,4,6,8,10,12,14", 12), "CPUs 0,2,4,6,…(8)");
        assert_eq!(cpus_phrase("", 9), "no CPU");
        assert_eq!(cpus_phrase("\x1b", 9), "CPUs \\u{1b}", "what is no list is told as it is");
    }

    #[test]
    fn ages_are_short() {
        let at = |text: &str| text.parse::<Timestamp>().unwrap();
        let now = at("2026-05-04T12:00:00Z");
        let cases = [
            ("2026-05-04T11:59:59.5Z", "1s"),
            ("2026-05-04T11:58:00Z", "2m"),
            ("2026-05-04T09:00:00Z", "3h"),
            ("2026-04-01T09:00:00Z", "33d"),
            ("2027-01-01T00:00:00Z", "0s"),
            ("", ""),
            ("yester\nday", "yester\\nday"),
        ];
        for (since, expected) in cases {
            assert_eq!(age_text(since, now), expected, "{since:?}");
        }
    }

    #[test]
    fn counts_and_percentages_read_well() {
        assert_eq!(count_with_noun(1_u32, "core", "cores"), "1 core");
        assert_eq!(count_with_noun(0_u32, "core", "cores"), "0 cores");
        assert_eq!(percent_text(987), "98.7%");
    }
}
