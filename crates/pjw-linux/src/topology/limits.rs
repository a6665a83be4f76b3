//! Limits for machines from a file or a synthetic description.

/// The maximum number of PUs (logical CPUs) in a topology that is read from a file or from a synthetic
/// description. A topology with more PUs is rejected. The limit does not apply to the topology of this machine.
pub const MAX_PUS: u32 = 65_536;
