//! Random choices from one number: the same seed gives the same run on every machine.
//!
//! SplitMix64 (Steele, Lea, Flood 2014). Each kind of choice has a stream of its own. So a new kind of fault does not
//! change the other choices.

/// A stream of random choices (a pseudorandom number generator): the same seed gives the same choices on every machine.
#[derive(Debug, Clone)]
pub struct RandomStream(u64);

impl RandomStream {
    /// Returns the stream of a simulation run, with the number of the run as its seed.
    #[must_use]
    pub fn new(number: u64) -> Self {
        Self(number.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x5851_f42d_4c95_7f2d)
    }

    /// Returns an independent stream for the kind of choice named `kind`. Each kind has a stream of its own,
    /// so that a new kind of choice in the code does not change the other choices of a run.
    #[must_use]
    pub fn substream(&self, kind: &str) -> Self {
        Self(
            kind.bytes().fold(self.0, |state, byte| (state ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)),
        )
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Returns a random number from 0 to `bound - 1`. 0 if `bound` is 0.
    pub fn random_below(&mut self, bound: u32) -> u32 {
        u32::try_from(self.next() % u64::from(bound.max(1))).unwrap_or(0)
    }

    /// Decides at random: returns true with a probability of `permille` in 1000.
    pub fn chance(&mut self, permille: u32) -> bool {
        self.random_below(1000) < permille
    }

    /// Returns a random element of `things`. `None` if `things` is empty.
    pub fn pick<'t, T>(&mut self, things: &'t [T]) -> Option<&'t T> {
        things.get(self.random_below(u32::try_from(things.len()).unwrap_or(u32::MAX)) as usize)
    }
}
