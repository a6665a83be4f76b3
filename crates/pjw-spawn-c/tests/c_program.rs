//! A C program is compiled against pjw_spawn.h and libpjw_spawn.so, and checks the functions itself: `program.c`.

#![allow(clippy::unwrap_used)] // a test may fail

use std::path::Path;
use std::process::Command;

mod compile;

use compile::compile;

#[test]
fn a_c_program_starts_processes_by_each_function_of_the_header() {
    let directory = tempfile::tempdir().unwrap();
    let program = directory.path().join("program");
    compile("pjw_spawn", Path::new(env!("CARGO_MANIFEST_DIR")), "tests/program.c", &[], &program);
    let output = Command::new(&program).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}
