//! Numbers in the variables, arguments and files of batch systems.

use std::str::FromStr;

/// Parses a number that consists of decimal digits only. `None` if `text` is no such number or does not fit into `T`.
/// (`str::parse` would also accept a plus sign.)
pub(crate) fn parse_digits<T: FromStr>(text: &str) -> Option<T> {
    text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok())?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_digits_are_a_number() {
        assert_eq!(
            [parse_digits("0"), parse_digits("007"), parse_digits("4294967295")],
            [Some(0), Some(7), Some(u32::MAX)]
        );
        for text in ["", "+4", "-4", " 4", "4 ", "4.0", "0x4", "four", "٤", "4294967296"] {
            assert_eq!(parse_digits::<u32>(text), None, "{text:?}");
        }
    }
}
