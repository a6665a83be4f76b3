//! Limits for machines from a file or a synthetic description.

/// The maximum number of PUs of a machine whose topology is read from a file or from a synthetic description.
/// A topology with more PUs is rejected.
pub const MAX_PUS: u32 = 65_536;
