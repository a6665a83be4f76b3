//! The paths of the built programs.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// Returns the directory of `pjwd`, `pjwctl`, `libpjw_spawn.so` and `libpjw_job.so`, and builds them first, so that no
/// old binary is tested. The variable `PJW_PROGRAMS` names another directory. Then nothing is built: this is for users
/// who can't build.
///
/// # Panics
/// If the programs can't be built.
pub fn program_dir() -> &'static PathBuf {
    static DIRECTORY: OnceLock<PathBuf> = OnceLock::new();
    DIRECTORY.get_or_init(|| {
        if let Some(directory) = std::env::var_os("PJW_PROGRAMS") {
            return PathBuf::from(directory);
        }
        let test = std::env::current_exe().expect("the path of the test can be read");
        let directory = test.ancestors().nth(2).expect("the test is in target/PROFILE/deps").to_owned();
        let mut build = Command::new(env!("CARGO"));
        build
            .args([
                "build",
                "--quiet",
                "--locked",
                "-p",
                "pjwd",
                "-p",
                "pjwctl",
                "-p",
                "pjw-spawn-c",
                "-p",
                "pjw-job-c",
            ])
            .current_dir(env!("CARGO_MANIFEST_DIR"));
        // The same features as in the build of the tests.
        if pjw_linux::bpf::HAS_BPF_PROGRAMS {
            build.args(["--features", "pjwd/bpf"]);
        }
        if directory.ends_with("release") {
            build.arg("--release");
        }
        assert!(build.status().expect("cargo runs").success(), "pjwd and pjwctl do not build");
        directory
    })
}

/// Returns the path of a program, such as `pjwd`.
///
/// # Panics
/// If the programs can't be built.
#[must_use]
pub fn program_path(name: &str) -> PathBuf {
    program_dir().join(name)
}

/// Copies a program to `target`, to be executed under another name. A child process writes the file. If this process
/// had the file open for writing, children that other tests start at the same time would have it open too, and the file
/// could not be executed (execve(2), ETXTBSY).
///
/// # Panics
/// If the program can't be copied.
pub fn copy_program(source: &str, target: &Path) {
    let copied = Command::new("cp").arg("--").arg(source).arg(target).status();
    assert!(copied.expect("cp runs").success(), "{source} can't be copied to {}", target.display());
}
