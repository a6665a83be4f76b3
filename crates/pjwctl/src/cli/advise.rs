//! The options of `pjwctl advise`.

use std::time::Duration;

use clap::Args;
use jiff::SignedDuration;
use pjw_spawn::farm::advise::FarmCosts;

use super::json::JsonArg;
use super::number::one_to;

/// The examples and remarks below the help of `pjwctl advise`.
pub(super) const EXAMPLES: &str = "Examples:\n  \
    pjwctl advise --serial 5m --item 2s                     the items for the CPUs of this process\n  \
    pjwctl advise --serial 5m --item 2s --workers 64\n  \
    pjwctl advise --serial 5m --item 2s --workers 64 --items 10000   what these items make of it\n\n\
    A farm holds all its cores while its serial part runs on one of them: initialisation, merging, the end. Efficiency is the \
    time that one core needs for everything, divided by the core time that the farm holds. More: docs/farms.md. \
    Needs no pjwd.";

/// The most workers of a farm.
const MAX_WORKERS: u32 = 16_384;

/// The command line options of `pjwctl advise`. The command computes how many items a farm needs so that its cores
/// are busy for most of the time, for example for 90 % of it. A farm is a group of worker processes. An item is one
/// of the numbered units of work that the workers share.
#[derive(Debug, Clone, Args)]
pub struct AdviseArgs {
    /// The time in which only one process works, such as 90s, 5m or 1h30m; 0s for none
    #[arg(long, value_name = "TIME", value_parser = serial_time, allow_hyphen_values = true)]
    pub serial: Duration,
    /// The time of one item on one core, such as 1ms or 2.5s
    #[arg(long, value_name = "TIME", value_parser = item_time, allow_hyphen_values = true)]
    pub item: Duration,
    /// The number of workers, each on a core of its own [default: the CPUs of this process]
    #[arg(long, value_name = "N", value_parser = worker_count)]
    pub workers: Option<u32>,
    /// The number of items that there are
    #[arg(long, value_name = "M", value_parser = item_count, allow_hyphen_values = true)]
    pub items: Option<u64>,
    /// Whether JSON is printed.
    #[command(flatten)]
    pub json: JsonArg,
}

/// The units of a time, for a message.
const UNITS: &str = "us, ms, s, m and h";

/// Parses a time with its unit. `None` if it is negative or longer than a year.
fn time(text: &str) -> Option<Duration> {
    const YEAR: Duration = Duration::from_secs(366 * 24 * 3600);
    let parsed: SignedDuration = text.parse().ok()?;
    Duration::try_from(parsed).ok().filter(|time| *time <= YEAR)
}

fn worker_count(text: &str) -> Result<u32, String> {
    one_to(MAX_WORKERS, text)
}

fn item_count(text: &str) -> Result<u64, String> {
    const MAX: u64 = FarmCosts::MAX_ITEMS;
    let count = text.parse().ok().filter(|count| (1..=MAX).contains(count));
    count.ok_or_else(|| format!("give a number from 1 to {MAX}, the most items of a farm"))
}

fn serial_time(text: &str) -> Result<Duration, String> {
    time(text).ok_or_else(|| {
        format!("give a time from 0s to a year, in units of {UNITS}, such as 90s, 5m or 1h30m")
    })
}

fn item_time(text: &str) -> Result<Duration, String> {
    let above_zero = time(text).filter(|time| !time.is_zero());
    above_zero.ok_or_else(|| {
        format!("give a time above 0 and of at most a year, in units of {UNITS}, such as 1ms or 2.5s")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_has_a_unit_and_is_not_negative() {
        assert_eq!(serial_time("0s"), Ok(Duration::ZERO));
        assert_eq!(serial_time("1h30m"), Ok(Duration::from_secs(5400)));
        assert_eq!(item_time("2.5s"), Ok(Duration::from_millis(2500)));
        assert_eq!(item_time("10us"), Ok(Duration::from_micros(10)));
        for text in ["", "2", "-2s", "soon", "10000000h"] {
            assert!(serial_time(text).is_err(), "{text:?}");
            assert!(item_time(text).is_err(), "{text:?}");
        }
        assert!(item_time("0s").is_err());
        for message in [serial_time("1d").unwrap_err(), item_time("1d").unwrap_err()] {
            assert!(message.contains("in units of us, ms, s, m and h"), "{message}");
        }
    }

    #[test]
    fn a_number_of_items_that_no_farm_has_is_refused_with_the_largest_one() {
        assert_eq!(item_count("1"), Ok(1));
        assert_eq!(item_count("8796093022208"), Ok(FarmCosts::MAX_ITEMS));
        for text in ["0", "-1", "8796093022209", "1180591620717411303424", "many", ""] {
            let message = item_count(text).unwrap_err();
            assert!(message.starts_with("give a number from 1 to 8796093022208"), "{text:?}: {message}");
        }
    }

    #[test]
    fn a_negative_time_is_refused_as_a_time_and_not_as_an_unknown_option() {
        use clap::{Args as _, Command};
        let command = AdviseArgs::augment_args(Command::new("advise"));
        for words in
            [["advise", "--serial", "-1s", "--item", "2s"], ["advise", "--serial", "1s", "--item", "-2s"]]
        {
            let message = command.clone().try_get_matches_from(words).unwrap_err().to_string();
            assert!(message.contains("in units of us, ms, s, m and h"), "{message}");
        }
    }
}
