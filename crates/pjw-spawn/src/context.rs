//! What all instances of a program have in common.

use std::ffi::{CString, OsStr};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// What all instances of a program have in common: the program, the environment, the credentials, and how they end.
#[derive(Debug, Clone)]
#[expect(dead_code, reason = "the spawner, which reads them, follows")]
pub struct Context {
    /// The path of the program.
    pub(crate) program: CString,
    /// The variables of every instance, each as `NAME=value`.
    pub(crate) environment: Vec<CString>,
    /// The user and the groups. `None` for those of the caller.
    pub(crate) credentials: Option<Credentials>,
    /// The working directory. `None` for that of the caller.
    pub(crate) directory: Option<CString>,
    /// Whether the kernel kills an instance when its spawner thread ends.
    pub(crate) ends_with_launcher: bool,
    /// Whether each instance gets `PJW_RANK`, `PJW_SIZE` and `PJW_CPUS`.
    pub(crate) has_rank_variables: bool,
}

/// A user with groups.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Credentials {
    /// The user.
    pub uid: u32,
    /// The group.
    pub gid: u32,
    /// The supplementary groups.
    pub groups: Vec<u32>,
}

impl Context {
    /// Makes the context of the program at a path, with the environment of the caller.
    #[must_use]
    pub fn of_path(program: &Path) -> Self {
        let environment = std::env::vars_os().filter_map(|(name, value)| variable(&name, &value));
        Self {
            program: CString::new(program.as_os_str().as_bytes()).unwrap_or_default(),
            environment: environment.collect(),
            credentials: None,
            directory: None,
            ends_with_launcher: false,
            has_rank_variables: false,
        }
    }
}

/// Returns a variable as `NAME=value`. `None` for a text with a NUL byte.
pub(crate) fn variable(name: &OsStr, value: &OsStr) -> Option<CString> {
    CString::new([name.as_bytes(), b"=", value.as_bytes()].concat()).ok()
}
