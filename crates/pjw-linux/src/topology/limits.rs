//! Limits for machines from a file or a synthetic description.

/// The maximum number of PUs of a machine that is read from a file or a synthetic description. A description with more
/// PUs is refused.
pub const MAX_PUS: u32 = 65_536;
