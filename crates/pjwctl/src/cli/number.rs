//! Numbers of cores, jobs or instances in options of `pjwctl`.

/// Parses `text` as a number of at least 1. If `text` is no such number, returns an error message.
pub(super) fn at_least_one(text: &str) -> Result<u32, String> {
    one_to(u32::MAX, text)
}

/// Parses `text` as a number from 1 to `max`. If `text` is no such number, returns an error message.
pub(super) fn one_to(max: u32, text: &str) -> Result<u32, String> {
    let number = text.parse().ok().filter(|number| (1..=max).contains(number));
    number.ok_or_else(|| match max {
        u32::MAX => "give a number of at least 1".to_owned(),
        _ => format!("give a number from 1 to {max}"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_that_is_no_number_from_1_to_the_most_is_refused_with_the_numbers_that_are_taken() {
        assert_eq!((at_least_one("1"), one_to(4, "4")), (Ok(1), Ok(4)));
        for text in ["0", "-1", "x", "", "1.5", "99999999999"] {
            assert_eq!(at_least_one(text), Err("give a number of at least 1".to_owned()), "{text:?}");
        }
        for text in ["0", "5", "x"] {
            assert_eq!(one_to(4, text), Err("give a number from 1 to 4".to_owned()), "{text:?}");
        }
    }
}
