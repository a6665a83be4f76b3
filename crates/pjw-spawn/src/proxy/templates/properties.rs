//! The properties of a template that its instances can't change: the variables that the dynamic linker has read
//! already, and the version of the program file.

use std::ffi::{CStr, CString, OsStr};
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use super::load::entry_stack::EntryStack;
use super::message::strings::InstanceStrings;
use crate::proxy::refusal::ForkError;

/// The prefixes of the variables that the dynamic linker of glibc reads.
const LINKER_VARIABLES: [&[u8]; 2] = [b"LD_", b"GLIBC_TUNABLES="];

/// Properties of a template (a process that is stopped before its program begins) that can't be changed in the
/// processes that are forked from it. These are the environment variables that the dynamic linker has read, and the
/// version of the program file.
pub(super) struct TemplateProperties {
    /// The variables that the dynamic linker has read.
    linker_variables: Vec<CString>,
    /// The version of the program file. `None` if the file was not found.
    file_version: Option<FileVersion>,
}

/// The device number and the inode number of a file, and the time of its last status change (ctime) in seconds and
/// nanoseconds.
type FileVersion = (u64, u64, i64, i64);

impl TemplateProperties {
    /// Determines these properties for a template of the program at the path `program`. The template is started with
    /// the environment `variables`.
    pub(super) fn for_program(program: &CStr, variables: &[&CStr]) -> Self {
        let linker_variables = variables.iter().filter(|variable| is_linker_variable(variable.to_bytes()));
        let linker_variables = linker_variables.map(|variable| CStr::to_owned(variable)).collect();
        Self { linker_variables, file_version: file_version(program) }
    }

    /// Returns whether the file of the program is unchanged since this value was made. `program` is the path of the
    /// file.
    pub(super) fn is_current(&self, program: &CStr) -> bool {
        self.file_version.is_some() && file_version(program) == self.file_version
    }

    /// Checks that a process with the arguments and environment variables `strings` can be forked from the template,
    /// whose initial stack is `stack`. The numbers of arguments and variables must be those of the template, and the
    /// variables for the dynamic linker must be equal.
    pub(super) fn check(&self, strings: &InstanceStrings, stack: &EntryStack) -> Result<(), ForkError> {
        if strings.argument_count() != stack.argument_count {
            return Err(ForkError::Mismatch("number of arguments"));
        }
        if strings.variable_count() != stack.variable_count() {
            return Err(ForkError::Mismatch("number of variables"));
        }
        let linker_variables = strings.variables().filter(|variable| is_linker_variable(variable));
        if !linker_variables.eq(self.linker_variables.iter().map(|variable| variable.to_bytes())) {
            return Err(ForkError::Mismatch("variable of the dynamic linker"));
        }
        Ok(())
    }
}

/// Returns whether the dynamic linker reads this environment variable (`NAME=value`).
pub(super) fn is_linker_variable(variable: &[u8]) -> bool {
    LINKER_VARIABLES.iter().any(|prefix| variable.starts_with(prefix))
}

fn file_version(program: &CStr) -> Option<FileVersion> {
    let metadata = fs::metadata(Path::new(OsStr::from_bytes(program.to_bytes()))).ok()?;
    Some((metadata.dev(), metadata.ino(), metadata.ctime(), metadata.ctime_nsec()))
}
