//! The scan beside /proc, on live processes. Where no BPF program may be loaded, these tests say so and pass.

use std::path::Path;
use std::process::Command;

#[cfg(feature = "bpf")]
mod asking;
#[cfg(feature = "bpf")]
pub(crate) mod company;
#[cfg(feature = "bpf")]
mod figures;
#[cfg(feature = "bpf")]
mod modes;
#[cfg(feature = "bpf")]
mod side_by_side;

#[cfg(feature = "bpf")]
pub(super) use company::scan;

#[test]
fn the_checked_in_object_was_made_of_this_source() {
    let room = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/bpf");
    let check =
        Command::new("sha256sum").args(["--check", "--strict", "tasks.bpf.sum"]).current_dir(&room).output();
    let Ok(check) = check else {
        println!("skipped: there is no sha256sum here");
        return;
    };
    let said = String::from_utf8_lossy(&check.stdout);
    assert!(check.status.success(), "{said}run `make bpf`, which needs clang, and commit all three files");
    let checked: Vec<&str> = said.lines().filter_map(|line| line.strip_suffix(": OK")).collect();
    assert_eq!(checked, ["tasks.bpf.c", "tasks.bpf.o"]);
}

#[cfg(not(feature = "bpf"))]
#[test]
fn a_build_without_the_scan_says_so() {
    let error = super::TaskScan::load().unwrap_err();
    assert!(matches!(error, super::ScanUnavailable::NotCompiled));
    assert!(error.to_string().contains("--features bpf"), "{error}");
    let error = super::load().1.unwrap_err();
    assert!(error.to_string().contains("--features bpf"), "{error}");
}
