//! Text helpers: sets of PUs and times in sentences.

use crate::basics::{cpuset::CpuSet, prelude::*};

/// Formats a set of PUs (logical CPUs) for use in a sentence: `CPU 0`, `CPUs 0-3,8`, or `no CPU` for the empty set.
/// Without the word `CPU`, a reader could mistake the CPU number 0 for a count of CPUs.
#[must_use]
pub fn cpus_text(cpus: &CpuSet) -> String {
    match cpus.len() {
        0 => "no CPU".to_owned(),
        1 => format!("CPU {cpus}"),
        _ => format!("CPUs {cpus}"),
    }
}

/// Formats a set of PUs (logical CPUs) and the verb `is` or `are`, for use in a sentence: `CPU 0 is`, `CPUs 0-3 are`.
pub(crate) fn cpus_with_is_are(cpus: &CpuSet) -> String {
    format!("{} {}", cpus_text(cpus), if cpus.len() == 1 { "is" } else { "are" })
}

/// Formats a set of PUs (logical CPUs) and the verb `was` or `were`, for use in a sentence: `CPU 0 was`, `CPUs 0-3
/// were`.
pub(crate) fn cpus_with_was_were(cpus: &CpuSet) -> String {
    format!("{} {}", cpus_text(cpus), if cpus.len() == 1 { "was" } else { "were" })
}

/// Formats a time for use in a sentence: `2.3 s`, `120 s`, `2 h 01 min`. Events and reports about a job both use this
/// function, so that they have the same figures. Below 100 s, the time has one decimal place. From 6000 s on, it is in
/// hours and minutes.
#[must_use]
pub fn duration_text(milliseconds: u64) -> String {
    match milliseconds / 1000 {
        seconds if seconds < 100 => {
            let tenths = (milliseconds + 50) / 100;
            format!("{}.{} s", tenths / 10, tenths % 10)
        }
        seconds if seconds < 6000 => format!("{seconds} s"),
        seconds => format!("{} h {:02} min", seconds / 3600, seconds / 60 % 60),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_has_a_decimal_place_below_100_s_and_hours_from_6000_s_on() {
        let texts =
            [0, 49, 50, 2_249, 2_250, 99_940, 100_900, 5_999_999, 6_000_000, 7_260_000].map(duration_text);
        let expected = [
            "0.0 s",
            "0.0 s",
            "0.1 s",
            "2.2 s",
            "2.3 s",
            "99.9 s",
            "100 s",
            "5999 s",
            "1 h 40 min",
            "2 h 01 min",
        ];
        assert_eq!(texts, expected);
    }
}
