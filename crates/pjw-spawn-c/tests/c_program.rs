//! A C program is compiled against pjw_spawn.h and libpjw_spawn.so, and checks the functions itself: `program.c`.

#![allow(clippy::unwrap_used)] // a test may fail

use std::path::Path;
use std::process::Command;

/// Compiles `source` of this crate. The program finds the library in the directory of the program.
fn compile(source: &str, program: &Path) {
    let crate_directory = Path::new(env!("CARGO_MANIFEST_DIR"));
    let directory = program.parent().unwrap();
    // Cargo builds the library beside the tests.
    let library = std::env::current_exe().unwrap().with_file_name("libpjw_spawn.so");
    for name in ["libpjw_spawn.so", "libpjw_spawn.so.0"] {
        std::os::unix::fs::symlink(&library, directory.join(name)).unwrap();
    }
    let output = Command::new("cc")
        .args(["-Wall", "-Wextra", "-Werror", "-o"])
        .arg(program)
        .arg(crate_directory.join(source))
        .arg("-I")
        .arg(crate_directory.join("include"))
        .arg("-L")
        .arg(directory)
        .args(["-lpjw_spawn", "-Wl,-rpath,$ORIGIN"])
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn a_c_program_starts_processes_by_each_function_of_the_header() {
    let directory = tempfile::tempdir().unwrap();
    let program = directory.path().join("program");
    compile("tests/program.c", &program);
    let output = Command::new(&program).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}
