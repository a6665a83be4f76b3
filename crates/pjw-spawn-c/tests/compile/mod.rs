//! Programs of C that the tests of the libraries for C compile against their headers. The tests of pjw-job-c use this
//! file too.

use std::path::Path;
use std::process::Command;

/// Compiles a program against the library `lib{library}.so` of a crate and its headers. Cargo must have built the
/// library beside the running test. `source` is a path in the directory of the crate. `flags` are further arguments of
/// `cc`. The program finds the library in its own directory.
///
/// # Panics
/// If the library can't be linked there, or if `cc` is missing or refuses the program.
pub(crate) fn compile(library: &str, crate_directory: &Path, source: &str, flags: &[&str], program: &Path) {
    let directory = program.parent().unwrap();
    let name = format!("lib{library}.so");
    let built = std::env::current_exe().unwrap().with_file_name(&name);
    for name in [&name, &format!("{name}.0")] {
        std::os::unix::fs::symlink(&built, directory.join(name)).unwrap();
    }
    let output = Command::new("cc")
        .args(["-Wall", "-Wextra", "-Werror", "-o"])
        .arg(program)
        .arg(crate_directory.join(source))
        .args(flags)
        .arg("-I")
        .arg(crate_directory.join("include"))
        .arg("-L")
        .arg(directory)
        .args([&format!("-l{library}"), "-Wl,-rpath,$ORIGIN"])
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}
