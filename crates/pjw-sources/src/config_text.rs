//! The texts of configuration files with one setting in each line, as several batch systems have them.

/// Returns the value of `key` in `text`, which has lines `KEY=VALUE` or `KEY VALUE`. If the key occurs several times,
/// the last line counts. Keys are not case-sensitive, and comments begin with `#`. `None` if no line has the key.
pub(crate) fn find_value<'a>(text: &'a str, key: &str) -> Option<&'a str> {
    let value_in_line = |line: &'a str| {
        let line = line.split('#').next()?.trim();
        let end = line.find(|c: char| c == '=' || c.is_whitespace())?;
        let (name, value) = line.split_at(end);
        let value = value.trim_start().trim_start_matches('=').trim().trim_matches('"');
        name.eq_ignore_ascii_case(key).then_some(value)
    };
    text.lines().filter_map(value_in_line).next_back()
}
