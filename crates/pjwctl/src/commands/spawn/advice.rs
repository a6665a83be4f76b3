//! Advice about programs that start slowly, because the dynamic linker searches many directories of `LD_LIBRARY_PATH`.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use pjw_spawn::SpawnContext;

use super::group::Program;
use super::library_search::missing_file_opens;

/// The smallest number of missing files that a start tries to open for which there is advice.
const MANY_MISSED_OPENS: usize = 100;

/// Returns advice about each program in `programs` that starts slowly because of `LD_LIBRARY_PATH`: at each start, the
/// dynamic linker tries to open 100 or more files that do not exist. For the time before the start of the instances.
pub(super) fn before_start(programs: &[Program]) -> Vec<String> {
    library_path_advice(programs.iter().map(|program| (&program.context, program.instances.len() > 1)))
}

/// Returns advice about programs that start slowly because of `LD_LIBRARY_PATH`, as [`before_start`] does, but after
/// the start of the instances. `contexts` contains the contexts whose instances all executed their program: none was
/// forked from a loaded copy of the program. There is one advice about a program, even if several contexts have the
/// same program.
pub(super) fn after_exec<'a>(contexts: impl Iterator<Item = &'a SpawnContext>) -> Vec<String> {
    let mut programs = BTreeSet::new();
    let contexts = contexts.filter(|context| programs.insert(context.program_path().to_owned()));
    library_path_advice(contexts.map(|context| (context, false)))
}

/// Returns a text of advice about each program that starts slowly because of `LD_LIBRARY_PATH`. A program counts as
/// slow if each start tries to open at least [`MANY_MISSED_OPENS`] files that do not exist. `contexts` has a context
/// (the settings for the start of a program) for each program. The bool says whether instances of the program could
/// be forked from a template (a process that has loaded the program).
fn library_path_advice<'a>(contexts: impl Iterator<Item = (&'a SpawnContext, bool)>) -> Vec<String> {
    let Some(library_path) = std::env::var_os("LD_LIBRARY_PATH").filter(|path| !path.is_empty()) else {
        return Vec::new();
    };
    let advice = contexts.filter_map(|(context, can_be_forked)| {
        let path = Path::new(OsStr::from_bytes(context.program_path().to_bytes()));
        let missed = missing_file_opens(path, &library_path);
        (missed >= MANY_MISSED_OPENS).then(|| {
            format!(
                "LD_LIBRARY_PATH makes each start of {} open {missed} files that are not there: name fewer directories \
                 in it{}",
                path.display(),
                if can_be_forked { ", or load the program once with --proxy always" } else { "" }
            )
        })
    });
    advice.collect()
}
