//! Limits for machines from a file or a synthetic description.

/// Maximum number of PUs of a machine from a file or a synthetic description.
pub const MAX_PUS: u32 = 65_536;
