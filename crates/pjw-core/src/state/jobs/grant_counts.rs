//! The number of grants that contain each PU, so that a question about all grants needs no visit to every job.

use crate::basics::{CpuSet, Pu, prelude::*};

/// The PUs (logical CPUs) that jobs hold, each with the number of jobs that hold it. The set of PUs that a job holds is
/// the grant of the job.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct GrantCounts(BTreeMap<Pu, usize>);

impl<'a> FromIterator<&'a CpuSet> for GrantCounts {
    fn from_iter<T: IntoIterator<Item = &'a CpuSet>>(grants: T) -> Self {
        let mut counts = Self::default();
        grants.into_iter().for_each(|cpus| counts.add(cpus));
        counts
    }
}

impl GrantCounts {
    /// Adds 1 to the number of each PU (logical CPU) in `grant`. `grant` is the set of PUs that one more job holds.
    pub fn add(&mut self, grant: &CpuSet) {
        grant.iter().for_each(|pu| *self.0.entry(pu).or_default() += 1);
    }

    /// Subtracts the grant of one job: subtracts 1 from the number of each PU (logical CPU) in `grant`. The grant must
    /// have been added before.
    pub(crate) fn remove(&mut self, grant: &CpuSet) {
        for pu in grant.iter() {
            if let Some(count) = self.0.get_mut(&pu) {
                *count = count.saturating_sub(1);
                if *count == 0 {
                    self.0.remove(&pu);
                }
            }
        }
    }

    /// Returns the PUs (logical CPUs) that at least one of the counted jobs holds.
    #[must_use]
    pub fn cpus(&self) -> CpuSet {
        self.0.keys().copied().collect()
    }

    /// Returns one set of PUs (logical CPUs) for each number `n` that occurs as the count of a PU, in ascending order
    /// of `n`. The set has all PUs that at least `n` grants contain. A grant is the set of PUs that a job holds.
    pub(crate) fn cpus_by_min_count(&self) -> impl Iterator<Item = CpuSet> {
        let numbers: BTreeSet<usize> = self.0.values().copied().collect();
        let held = |least| self.0.iter().filter(move |(_, count)| **count >= least).map(|(&pu, _)| pu);
        numbers.into_iter().map(move |least| held(least).collect())
    }
}
