//! Random choices from one number: the same seed gives the same run on every machine.
//!
//! SplitMix64 (Steele, Lea, Flood 2014). Each kind of choice has a stream of its own. So a new kind of fault does not
//! change the other choices.

/// A pseudorandom number generator. The same seed gives the same sequence of random choices on every machine.
#[derive(Debug, Clone)]
pub struct RandomStream(u64);

impl RandomStream {
    /// Makes a random number generator with the seed `seed`. In a simulation, the seed is the number of the run.
    #[must_use]
    pub fn from_seed(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x5851_f42d_4c95_7f2d)
    }

    /// Returns a new random number generator for one purpose. `purpose` is the name of the purpose, such as
    /// `workload`. The seed of the new generator depends on `purpose` and on the present state of `self`.
    /// Because each purpose has a generator of its own, the random choices for one purpose do not affect the
    /// choices for another purpose.
    #[must_use]
    pub fn substream(&self, purpose: &str) -> Self {
        Self(
            purpose
                .bytes()
                .fold(self.0, |state, byte| (state ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)),
        )
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Returns a random number from 0 to `bound - 1`. Returns 0 if `bound` is 0.
    pub fn random_below(&mut self, bound: u32) -> u32 {
        u32::try_from(self.next() % u64::from(bound.max(1))).unwrap_or(0)
    }

    /// Decides at random: returns true with a probability of `permille` in 1000.
    pub fn random_bool(&mut self, permille: u32) -> bool {
        self.random_below(1000) < permille
    }

    /// Returns a random element of `elements`. `None` if `elements` is empty.
    pub fn random_element<'t, T>(&mut self, elements: &'t [T]) -> Option<&'t T> {
        elements.get(self.random_below(u32::try_from(elements.len()).unwrap_or(u32::MAX)) as usize)
    }
}
