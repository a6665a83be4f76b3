//! Numbers of cores, jobs or instances in options of `pjwctl`.

use std::num::IntErrorKind;

/// Parses `text` as a number of at least 1. If `text` is no such number, returns an error message.
pub(super) fn at_least_one(text: &str) -> Result<u32, String> {
    one_to(u32::MAX, text)
}

/// Parses `text` as a number from 1 to `max`. If `text` is no such number, returns an error message.
pub(super) fn one_to(max: u32, text: &str) -> Result<u32, String> {
    let number = text.parse().ok().filter(|number| (1..=max).contains(number));
    number.ok_or_else(|| {
        if max == u32::MAX && !is_too_large(text) {
            "give a number of at least 1".to_owned()
        } else {
            format!("give a number from 1 to {max}")
        }
    })
}

/// Returns whether `text` is a number above [`u32::MAX`].
pub(super) fn is_too_large(text: &str) -> bool {
    text.parse::<u32>().is_err_and(|error| *error.kind() == IntErrorKind::PosOverflow)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_that_is_no_number_from_1_to_the_most_is_refused_with_the_numbers_that_are_taken() {
        assert_eq!((at_least_one("1"), one_to(4, "4")), (Ok(1), Ok(4)));
        for text in ["0", "-1", "x", "", "1.5"] {
            assert_eq!(at_least_one(text), Err("give a number of at least 1".to_owned()), "{text:?}");
        }
        for text in ["4294967296", "18446744073709551615", "99999999999999999999999"] {
            assert_eq!(at_least_one(text), Err("give a number from 1 to 4294967295".to_owned()), "{text:?}");
        }
        for text in ["0", "5", "x", "4294967296"] {
            assert_eq!(one_to(4, text), Err("give a number from 1 to 4".to_owned()), "{text:?}");
        }
    }
}
