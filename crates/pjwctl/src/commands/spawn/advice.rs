//! Advice about the start of a program that is dearer than it has to be.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use super::group::Program;
use super::library_search::missed_opens;
use crate::output;

/// From so many opens of missing files at a start on there is advice.
const MANY_MISSED_OPENS: usize = 100;

/// Prints a line for each program whose start looks for libraries in many places in vain.
pub(super) fn print(programs: &[Program]) {
    let Some(library_path) = std::env::var_os("LD_LIBRARY_PATH").filter(|path| !path.is_empty()) else {
        return;
    };
    for program in programs {
        let path = Path::new(OsStr::from_bytes(program.context.program().to_bytes()));
        let missed = missed_opens(path, &library_path);
        if missed >= MANY_MISSED_OPENS {
            output::print_error(&format!(
                "LD_LIBRARY_PATH makes each start of {} open {missed} files that are not there: name fewer directories \
                 in it, or load the program once with --proxy always",
                path.display()
            ));
        }
    }
}
