//! Values of one kind each, from TOML to the house's types, with a sentence for whatever isn't one.

use std::ops::RangeInclusive;
use std::time::Duration;

use jiff::SignedDuration;
use toml::de::DeValue;

use super::problem::{nearest, quoted};

/// So many groups may be named.
const GROUPS_MAX: usize = 64;
/// The longest name of a group that is taken (LOGIN_NAME_MAX; directory services have long ones).
const GROUP_NAME_MAX: usize = 255;

/// The words that a key knows, each with its meaning. The default comes first.
pub(super) type Words<T> = &'static [(&'static str, T)];

/// Why a value is not right and what would be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Wrong(pub(super) String);

impl Wrong {
    /// With a sentence of its own.
    pub(super) fn because(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    pub(super) fn kind(value: &DeValue<'_>, wanted: &str) -> Self {
        Self(format!("{} is not allowed here: write {wanted}", found(value)))
    }
}

/// One of the words.
pub(super) fn word<T: Copy>(value: &DeValue<'_>, words: Words<T>) -> Result<T, Wrong> {
    let allowed = listed(words);
    let text = text(value, &allowed)?;
    if let Some((_, meaning)) = words.iter().find(|(word, _)| *word == text) {
        return Ok(*meaning);
    }
    let meant = nearest(text, words.iter().map(|(word, _)| *word));
    let meant = meant.map(|word| format!("; did you mean {}?", quoted(word))).unwrap_or_default();
    Err(Wrong(format!("{} is not allowed here: write {allowed}{meant}", quoted(text))))
}

/// The word for a meaning, as it would stand in a file.
pub(super) fn show_word<T: Copy + PartialEq>(meaning: T, words: Words<T>) -> String {
    let word = words.iter().find(|(_, known)| *known == meaning).map_or("", |(word, _)| word);
    format!("\"{word}\"")
}

/// A text; `wanted` says what it should tell.
pub(super) fn text<'v>(value: &'v DeValue<'_>, wanted: &str) -> Result<&'v str, Wrong> {
    value.as_str().ok_or_else(|| Wrong::kind(value, wanted))
}

/// `true` or `false`.
pub(super) fn truth(value: &DeValue<'_>) -> Result<bool, Wrong> {
    value.as_bool().ok_or_else(|| Wrong::kind(value, "true or false, without quotation marks"))
}

/// A whole number in a range.
pub(super) fn number(value: &DeValue<'_>, range: RangeInclusive<u32>) -> Result<u32, Wrong> {
    let wanted = format!("a whole number from {} to {}", range.start(), range.end());
    let integer = value.as_integer().ok_or_else(|| Wrong::kind(value, &wanted))?;
    let number = u32::from_str_radix(integer.as_str(), integer.radix()).ok();
    number.filter(|number| range.contains(number)).ok_or_else(|| Wrong::kind(value, &wanted))
}

/// A length of time in a range, such as `500ms` or `1h 30m`.
pub(super) fn duration(value: &DeValue<'_>, range: RangeInclusive<Duration>) -> Result<Duration, Wrong> {
    let (least, most) = (plain(*range.start()), plain(*range.end()));
    let wanted = format!("a time from {least} to {most} with its unit (ms, s, m, h), such as \"{least}\"");
    let text = text(value, &wanted)?;
    let parsed: Option<SignedDuration> = text.parse().ok();
    let parsed = parsed.and_then(|duration| Duration::try_from(duration).ok());
    parsed.filter(|duration| range.contains(duration)).ok_or_else(|| Wrong::kind(value, &wanted))
}

/// A length of time as it would stand in a file.
pub(super) fn show_duration(duration: Duration) -> String {
    format!("\"{}\"", plain(duration))
}

/// Names or numbers of groups. Whether they exist is not asked: directory services may be late or away.
pub(super) fn groups(value: &DeValue<'_>) -> Result<Vec<String>, Wrong> {
    let wanted = "a list of group names, such as [\"pjw\"]";
    let items = value.as_array().ok_or_else(|| Wrong::kind(value, wanted))?;
    if items.len() > GROUPS_MAX {
        return Err(Wrong(format!("{} groups are too many: name at most {GROUPS_MAX}", items.len())));
    }
    let mut groups: Vec<String> = Vec::new();
    for item in items.iter() {
        let name = text(item.get_ref(), wanted)?;
        let odd = |character: char| character.is_control() || ":,".contains(character);
        if name.trim().is_empty() || name.len() > GROUP_NAME_MAX || name.contains(odd) {
            return Err(Wrong(format!("{} is not the name of a group: write {wanted}", quoted(name))));
        }
        if groups.iter().any(|known| known == name) {
            return Err(Wrong(format!("the group {} stands twice: name each group once", quoted(name))));
        }
        groups.push(name.to_owned());
    }
    Ok(groups)
}

/// What a file has where something else is wanted. Texts in quotation marks, so that `true` and `"true"`
/// differ.
fn found(value: &DeValue<'_>) -> String {
    match value {
        DeValue::String(text) => quoted(text),
        DeValue::Integer(integer) => match integer.radix() {
            10 => unquoted(integer.as_str()),
            radix => format!("{} in base {radix}", unquoted(integer.as_str())),
        },
        DeValue::Float(float) => unquoted(float.as_str()),
        DeValue::Boolean(truth) => truth.to_string(),
        DeValue::Datetime(_) => "a date or time of day".to_owned(),
        DeValue::Array(_) => "a list".to_owned(),
        DeValue::Table(_) => "a table".to_owned(),
    }
}

fn unquoted(text: &str) -> String {
    quoted(text).trim_matches('"').to_owned()
}

/// `"a", "b" or "c"`.
fn listed<T>(words: Words<T>) -> String {
    let words: Vec<String> = words.iter().map(|(word, _)| quoted(word)).collect();
    match words.split_last() {
        Some((last, [])) => last.clone(),
        Some((last, first)) => format!("{} or {last}", first.join(", ")),
        None => String::new(),
    }
}

fn plain(duration: Duration) -> String {
    SignedDuration::try_from(duration)
        .map_or_else(|_| format!("{duration:?}"), |signed| format!("{signed:#}"))
}
