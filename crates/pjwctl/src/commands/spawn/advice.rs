//! Advice about the start of a program that is dearer than it has to be.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use pjw_spawn::SpawnContext;

use super::group::Program;
use super::library_search::missing_file_opens;
use crate::output;

/// From so many opens of missing files at a start on there is advice.
const MANY_MISSED_OPENS: usize = 100;

/// Prints advice about each program in `programs` that starts slowly because of `LD_LIBRARY_PATH`: at each start, the
/// dynamic linker tries to open 100 or more files that do not exist. Called before the start of the instances.
pub(super) fn print_advice(programs: &[Program]) {
    print_lines(programs.iter().map(|program| (&program.context, program.instances.len() > 1)));
}

/// Prints advice about programs that start slowly because of `LD_LIBRARY_PATH`, as [`print_advice`] does, but after the
/// start of the instances. `contexts` contains the contexts whose instances all executed their program: none was forked
/// from a loaded copy of the program. The advice about a program is printed once, even if several contexts have the
/// same program.
pub(super) fn print_advice_after_exec<'a>(contexts: impl Iterator<Item = &'a SpawnContext>) {
    let mut programs = BTreeSet::new();
    let contexts = contexts.filter(|context| programs.insert(context.program_path().to_owned()));
    print_lines(contexts.map(|context| (context, false)));
}

/// With each context: whether its instances could be forks of a loaded program.
fn print_lines<'a>(contexts: impl Iterator<Item = (&'a SpawnContext, bool)>) {
    let Some(library_path) = std::env::var_os("LD_LIBRARY_PATH").filter(|path| !path.is_empty()) else {
        return;
    };
    for (context, can_be_forked) in contexts {
        let path = Path::new(OsStr::from_bytes(context.program_path().to_bytes()));
        let missed = missing_file_opens(path, &library_path);
        if missed >= MANY_MISSED_OPENS {
            output::print_error(&format!(
                "LD_LIBRARY_PATH makes each start of {} open {missed} files that are not there: name fewer directories \
                 in it{}",
                path.display(),
                if can_be_forked { ", or load the program once with --proxy always" } else { "" }
            ));
        }
    }
}
