//! The user and the groups of an instance.

/// The user and the groups as which a started process runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Credentials {
    /// The real, effective and saved user id.
    pub uid: u32,
    /// The real, effective and saved group id.
    pub gid: u32,
    /// The ids of the supplementary groups. They replace those of the caller.
    pub groups: Vec<u32>,
}
