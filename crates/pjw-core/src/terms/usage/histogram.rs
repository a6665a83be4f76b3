//! For how long a quantity had which value: a histogram with bins of at most 1/64 of the value.

use serde::{Deserialize, Serialize};

use crate::basics::prelude::*;

/// The number of bins between two powers of two.
const BINS_PER_OCTAVE: u64 = 64;

/// A histogram of a quantity, weighted by time, such as the number of PUs (logical CPUs) that a job used. pjw computes
/// percentiles from it, such as the 95th percentile in the report on the job. Each bin covers a range of values, and
/// has the total time in which the quantity had a value in this range. For values below 64, each bin covers one value.
/// Any other bin covers a range of at most 1/64 of its lowest value. So the number of bins is bounded, however long the
/// job runs.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct TimeHistogram {
    /// The time in ns for each bin, by the number of the bin ([`bin_of`]).
    times: BTreeMap<u16, u64>,
}

impl TimeHistogram {
    /// Adds an interval of time to the histogram. `value` is the value of the measured quantity in this interval, such
    /// as the number of PUs (logical CPUs) that a job used. `length_ns` is the length of the interval, in ns.
    pub fn add(&mut self, value: u64, length_ns: u64) {
        let time = self.times.entry(bin_of(value)).or_default();
        *time = time.saturating_add(length_ns);
    }

    /// Returns the total length of all intervals that were added to the histogram, in ns.
    #[must_use]
    pub fn total_ns(&self) -> u64 {
        self.times.values().fold(0, |total, &ns| total.saturating_add(ns))
    }

    /// Returns an upper quantile: the value that the quantity exceeded for at most `time_above_permille` permille of
    /// the time. For example, 50 gives the 95th percentile, and 500 gives the median. Returns 0 if the histogram is
    /// empty.
    ///
    /// The result is the upper end of a bin, so it can be up to 1/64 too large. The result is at most `upper_limit`.
    /// Callers pass the largest value that the quantity had or could have.
    #[must_use]
    pub fn upper_quantile(&self, time_above_permille: u64, upper_limit: u64) -> u64 {
        let total: u128 = self.times.values().map(|&ns| u128::from(ns)).sum();
        let allowed = total * u128::from(time_above_permille) / 1000;
        let mut above = 0_u128;
        for (&bin, &ns) in self.times.iter().rev() {
            above += u128::from(ns);
            if above > allowed {
                return upper_end(bin).min(upper_limit);
            }
        }
        0
    }

    /// Returns for how long the job used each number of PUs (logical CPUs). The values in the histogram must be numbers
    /// of PUs in permille of one PU. Each pair in the result is a number of whole PUs, and the total time in ns in
    /// which the job used this number. The pairs are sorted by the number of PUs. Numbers that the job never used are
    /// left out.
    ///
    /// Each number is rounded to the nearest multiple of `step`, and is at most `upper_limit`. Both parameters are
    /// numbers of whole PUs. Callers pass the largest number of PUs that the job held as `upper_limit`.
    #[must_use]
    pub fn time_by_pu_count(&self, step: u64, upper_limit: u64) -> Vec<(u64, u64)> {
        let mut times: BTreeMap<u64, u64> = BTreeMap::new();
        let step_permille = step.max(1).saturating_mul(1000);
        for (&bin, &ns) in &self.times {
            let used = upper_end(bin).min(upper_limit.saturating_mul(1000));
            let pus = used.saturating_add(step_permille / 2) / step_permille * step.max(1);
            let time = times.entry(pus.min(upper_limit)).or_default();
            *time = time.saturating_add(ns);
        }
        times.into_iter().collect()
    }
}

/// Returns the number of the bin that contains `value`. Below [`BINS_PER_OCTAVE`], each value has a bin of its own.
fn bin_of(value: u64) -> u16 {
    if value < BINS_PER_OCTAVE {
        return u16::try_from(value).unwrap_or_default();
    }
    // The value is in the range from 2^octave to 2^(octave + 1).
    let octave = u64::from(value.ilog2());
    let shift = octave - u64::from(BINS_PER_OCTAVE.ilog2());
    let within = (value >> shift) - BINS_PER_OCTAVE;
    u16::try_from((shift + 1) * BINS_PER_OCTAVE + within).unwrap_or(u16::MAX)
}

/// Returns the largest value in the bin with the number `bin`.
fn upper_end(bin: u16) -> u64 {
    let bin = u64::from(bin);
    if bin < BINS_PER_OCTAVE {
        return bin;
    }
    let (shift, within) = (bin / BINS_PER_OCTAVE - 1, bin % BINS_PER_OCTAVE);
    let next = BINS_PER_OCTAVE + within + 1;
    if shift > u64::from(next.leading_zeros()) { u64::MAX } else { (next << shift) - 1 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_lies_in_its_bin_and_the_bin_is_narrow() {
        for value in (0..100_000).chain([u64::from(u32::MAX), 1 << 40]) {
            let end = upper_end(bin_of(value));
            assert!(value <= end && end - value <= value / 64, "{value} {end}");
            assert!(bin_of(end + 1) == bin_of(value) + 1, "{value} {end}");
        }
        assert!(upper_end(bin_of(u64::MAX)) >= u64::MAX / 2);
    }

    #[test]
    fn the_time_for_each_number_of_pus_is_rounded_to_steps() {
        let mut levels = TimeHistogram::default();
        for (used_permille, ns) in [(0, 5), (400, 1), (990, 20), (1000, 30), (3990, 7), (4000, 2)] {
            levels.add(used_permille, ns);
        }
        assert_eq!(levels.time_by_pu_count(1, 4), [(0, 6), (1, 50), (4, 9)]);
        assert_eq!(levels.time_by_pu_count(3, 4), [(0, 56), (3, 9)]);
        assert_eq!(levels.time_by_pu_count(0, 2), [(0, 6), (1, 50), (2, 9)], "no more than the job had");
        assert_eq!(TimeHistogram::default().time_by_pu_count(1, 4), []);
        let mut large = TimeHistogram::default();
        (0..=256_000).step_by(500).for_each(|used| large.add(used, 1));
        let time_by_pu_count = large.time_by_pu_count(16, 256);
        assert_eq!(
            (time_by_pu_count.len(), time_by_pu_count.iter().map(|(_, ns)| ns).sum::<u64>()),
            (17, 513)
        );
    }

    #[test]
    fn the_95th_percentile_leaves_five_percent_of_the_time_above() {
        let mut levels = TimeHistogram::default();
        assert_eq!(levels.upper_quantile(50, 8000), 0);
        levels.add(1000, 94);
        levels.add(4000, 6);
        assert_eq!(levels.upper_quantile(50, 8000), 4031);
        assert_eq!(levels.upper_quantile(50, 4000), 4000, "no more than the job had");
        levels.add(1000, 100);
        assert_eq!(levels.upper_quantile(50, 8000), 1007);
    }
}
