//! Parsers for the types of values. Each error is a sentence that states what is allowed.

use std::ops::{Range, RangeInclusive};
use std::time::Duration;

use jiff::SignedDuration;
use toml::de::{DeArray, DeValue};

use pjw_core::cpu_count_variables::{CpuCountVariable, MAX_CPU_COUNT_VARIABLES, parse_cpu_count_variable};

use super::problem::{escape_and_cut, quote_and_cut, suggestion_text};

/// The largest number of groups.
const GROUPS_MAX: usize = 64;
/// The longest group name in bytes (LOGIN_NAME_MAX is 256; directory services have long names).
const GROUP_NAME_MAX: usize = 255;

/// The words that are allowed as the value of a configuration key, the default first. Each word is paired with the
/// setting that it stands for.
pub(super) type Choices<T> = &'static [(&'static str, T)];

/// The error that the value of a configuration key is not allowed. The error describes the allowed values.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ValueError {
    /// A sentence about the mistake.
    pub(super) text: String,
    /// The bytes of the file with the mistake, if they are only a part of the value.
    pub(super) span: Option<Range<usize>>,
    /// The full name of the key with the mistake, such as `provision.cores`. `None` if it is the key that is read.
    pub(super) key: Option<String>,
}

/// A parser that can report several mistakes uses `?` on a parser that reports one.
impl From<ValueError> for Vec<ValueError> {
    fn from(error: ValueError) -> Self {
        vec![error]
    }
}

impl ValueError {
    /// Makes an error with `text` as its message.
    pub(super) fn with_message(text: impl Into<String>) -> Self {
        Self { text: text.into(), span: None, key: None }
    }

    /// Adds the position of the mistake to this error. `span` is the byte range of the mistake in the configuration
    /// file.
    pub(super) fn at_span(self, span: Range<usize>) -> Self {
        Self { span: Some(span), ..self }
    }

    /// Adds the key that has the mistake to this error. `key` is its full name, such as `provision.cores`.
    pub(super) fn in_key(self, key: String) -> Self {
        Self { key: Some(key), ..self }
    }

    /// Makes the error that `value` is not allowed. `wanted` describes the allowed values, for example `true or false`.
    pub(super) fn not_allowed(value: &DeValue<'_>, wanted: &str) -> Self {
        Self::with_message(format!("{} is not allowed here: write {wanted}", wrong_value_text(value)))
    }
}

/// Parses `value`, which must be one of the words in `choices`. Returns the setting that the word stands for.
///
/// # Errors
/// If the value is none of the words. The error lists the words.
pub(super) fn parse_choice<T: Copy>(value: &DeValue<'_>, choices: Choices<T>) -> Result<T, ValueError> {
    let allowed = list_choices(choices);
    let text = parse_text(value, &allowed)?;
    if let Some((_, meaning)) = choices.iter().find(|(choice, _)| *choice == text) {
        return Ok(*meaning);
    }
    Err(ValueError::with_message(format!(
        "{} is not allowed here: write {allowed}{}",
        quote_and_cut(text),
        suggestion_text(text, choices.iter().map(|(choice, _)| *choice))
    )))
}

/// Returns the word in `choices` that stands for the setting `meaning`, in quotation marks as in the configuration
/// file.
pub(super) fn show_choice<T: PartialEq>(meaning: &T, choices: Choices<T>) -> String {
    let choice = choices.iter().find(|(_, known)| known == meaning).map_or("", |(choice, _)| choice);
    format!("\"{choice}\"")
}

/// Returns the string in `value`. `wanted` describes the allowed values for the error message.
///
/// # Errors
/// If the value is not a string.
pub(super) fn parse_text<'v>(value: &'v DeValue<'_>, wanted: &str) -> Result<&'v str, ValueError> {
    value.as_str().ok_or_else(|| ValueError::not_allowed(value, wanted))
}

/// Parses `value`, which must be `true` or `false`.
///
/// # Errors
/// If the value is anything else.
pub(super) fn parse_boolean(value: &DeValue<'_>) -> Result<bool, ValueError> {
    value.as_bool().ok_or_else(|| ValueError::not_allowed(value, "true or false, without quotation marks"))
}

/// Parses `value`, which must be a whole number in `range`.
///
/// # Errors
/// If the value is no such number.
pub(super) fn parse_number(value: &DeValue<'_>, range: RangeInclusive<u32>) -> Result<u32, ValueError> {
    let wanted = format!("a whole number from {} to {}", range.start(), range.end());
    let integer = value.as_integer().ok_or_else(|| ValueError::not_allowed(value, &wanted))?;
    let number = u32::from_str_radix(integer.as_str(), integer.radix()).ok();
    number.filter(|number| range.contains(number)).ok_or_else(|| ValueError::not_allowed(value, &wanted))
}

/// Parses `value`, which must be a duration in `range`, such as `"500ms"` or `"1h 30m"`.
///
/// # Errors
/// If the value is no such duration.
pub(super) fn parse_duration(
    value: &DeValue<'_>,
    range: RangeInclusive<Duration>,
) -> Result<Duration, ValueError> {
    let (least, most) = (format_duration(*range.start()), format_duration(*range.end()));
    let wanted = format!("a time from {least} to {most} with its unit (ms, s, m, h), such as \"{least}\"");
    let text = parse_text(value, &wanted)?;
    let parsed: Option<SignedDuration> = text.parse().ok();
    let parsed = parsed.and_then(|duration| Duration::try_from(duration).ok());
    parsed.filter(|duration| range.contains(duration)).ok_or_else(|| ValueError::not_allowed(value, &wanted))
}

/// Returns `duration` in the syntax of the configuration file: a string in quotation marks, with units.
pub(super) fn show_duration(duration: &Duration) -> String {
    format!("\"{}\"", format_duration(*duration))
}

/// Parses each element of the list `items` with `parse`. The second argument of `parse` has the results of the
/// preceding elements.
///
/// # Errors
/// The mistakes of all elements, each with the position of its element.
pub(super) fn parse_each<T>(
    items: &DeArray<'_>,
    mut parse: impl FnMut(&DeValue<'_>, &[T]) -> Result<T, ValueError>,
) -> Result<Vec<T>, Vec<ValueError>> {
    let (mut parsed, mut mistakes) = (Vec::new(), Vec::new());
    for item in items.iter() {
        match parse(item.get_ref(), &parsed) {
            Ok(element) => parsed.push(element),
            Err(mistake) => mistakes.push(mistake.at_span(item.span())),
        }
    }
    if mistakes.is_empty() { Ok(parsed) } else { Err(mistakes) }
}

/// Parses `value`, a list of user groups by name or number. The groups need not exist, because a directory service may
/// be unavailable.
///
/// # Errors
/// If the value is not such a list, has too many groups, or has a group twice.
pub(super) fn parse_groups(value: &DeValue<'_>) -> Result<Vec<String>, Vec<ValueError>> {
    let wanted = "a list of group names, such as [\"pjw\"]";
    let items = value.as_array().ok_or_else(|| ValueError::not_allowed(value, wanted))?;
    if items.len() > GROUPS_MAX {
        let text = format!("{} groups are too many: list at most {GROUPS_MAX}", items.len());
        return Err(ValueError::with_message(text).into());
    }
    parse_each(items, |item, groups: &[String]| {
        let name = parse_text(item, wanted)?;
        let is_forbidden = |character: char| character.is_control() || ":,".contains(character);
        if name.trim().is_empty() || name.len() > GROUP_NAME_MAX || name.contains(is_forbidden) {
            return Err(ValueError::with_message(format!(
                "{} is not the name of a group: write {wanted}",
                quote_and_cut(name)
            )));
        }
        if groups.iter().any(|known| known == name) {
            let name = quote_and_cut(name);
            return Err(ValueError::with_message(format!(
                "the group {name} is listed twice: list each group once"
            )));
        }
        Ok(name.to_owned())
    })
}

/// Parses `value`, the list of environment variables that tell a program the number of cores or PUs (logical CPUs) of
/// its job. Example of an entry: `OMP_NUM_THREADS=cores`.
///
/// # Errors
/// If the value is not such a list.
pub(super) fn parse_cpu_count_variables(
    value: &DeValue<'_>,
) -> Result<Vec<CpuCountVariable>, Vec<ValueError>> {
    let wanted = "a list such as [\"OMP_NUM_THREADS=cores\", \"GOMAXPROCS=pus\"]";
    let items = value.as_array().ok_or_else(|| ValueError::not_allowed(value, wanted))?;
    if items.len() > MAX_CPU_COUNT_VARIABLES {
        let count = items.len();
        let text = format!("{count} variables are too many: list at most {MAX_CPU_COUNT_VARIABLES}");
        return Err(ValueError::with_message(text).into());
    }
    parse_each(items, |item, variables| {
        let parsed = parse_cpu_count_variable(parse_text(item, wanted)?, variables);
        parsed.map_err(|error| ValueError::with_message(escape_and_cut(&error.to_string(), 300)))
    })
}

/// Returns the environment variables in `variables` as a list in the syntax of the configuration file.
pub(super) fn show_cpu_count_variables(variables: &[CpuCountVariable]) -> String {
    format!("{:?}", variables.iter().map(ToString::to_string).collect::<Vec<_>>())
}

/// Returns a wrong value of the configuration as text for an error message. Strings are quoted, so that `true` and
/// `"true"` differ. For a list, a table or a time, the text is only the type of the value.
fn wrong_value_text(value: &DeValue<'_>) -> String {
    match value {
        DeValue::String(text) => quote_and_cut(text),
        DeValue::Integer(integer) => match integer.radix() {
            10 => unquoted(integer.as_str()),
            radix => format!("{} in base {radix}", unquoted(integer.as_str())),
        },
        DeValue::Float(float) => unquoted(float.as_str()),
        DeValue::Boolean(boolean) => boolean.to_string(),
        DeValue::Datetime(_) => "a date or time of day".to_owned(),
        DeValue::Array(_) => "a list".to_owned(),
        DeValue::Table(_) => "a table".to_owned(),
    }
}

fn unquoted(text: &str) -> String {
    quote_and_cut(text).trim_matches('"').to_owned()
}

/// Returns the words in `choices` as text, such as `"a", "b" or "c"`.
fn list_choices<T>(choices: Choices<T>) -> String {
    let choices: Vec<String> = choices.iter().map(|(choice, _)| quote_and_cut(choice)).collect();
    match choices.split_last() {
        Some((last, [])) => last.clone(),
        Some((last, others)) => format!("{} or {last}", others.join(", ")),
        None => String::new(),
    }
}

fn format_duration(duration: Duration) -> String {
    SignedDuration::try_from(duration)
        .map_or_else(|_| format!("{duration:?}"), |signed| format!("{signed:#}"))
}
