//! Where the built programs are.

use std::path::PathBuf;
use std::process::Command;
use std::sync::OnceLock;

/// The directory of the built `pjwd` and `pjwctl`. They are built first, because a test of an old binary tests
/// nothing, unless `PJW_PROGRAMS` names a directory: for users who can't build.
///
/// # Panics
/// If they can't be built.
pub fn program_dir() -> &'static PathBuf {
    static DIRECTORY: OnceLock<PathBuf> = OnceLock::new();
    DIRECTORY.get_or_init(|| {
        if let Some(directory) = std::env::var_os("PJW_PROGRAMS") {
            return PathBuf::from(directory);
        }
        let test = std::env::current_exe().expect("a test knows where it is");
        let directory = test.ancestors().nth(2).expect("below target/PROFILE/deps").to_owned();
        let mut build = Command::new(env!("CARGO"));
        build
            .args(["build", "--quiet", "--locked", "-p", "pjwd", "-p", "pjwctl"])
            .current_dir(env!("CARGO_MANIFEST_DIR"));
        // As the tests were built.
        if pjw_linux::bpf::BUILT_IN {
            build.args(["--features", "pjwd/bpf"]);
        }
        if directory.ends_with("release") {
            build.arg("--release");
        }
        assert!(build.status().expect("cargo runs").success(), "pjwd and pjwctl do not build");
        directory
    })
}

/// The path of one of them.
#[must_use]
pub fn program_path(name: &str) -> PathBuf {
    program_dir().join(name)
}
