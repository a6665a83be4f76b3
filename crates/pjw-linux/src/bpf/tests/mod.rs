//! The task scan compared with /proc, for live processes. Where no BPF program can be loaded, these tests
//! print that and pass.

use std::path::Path;
use std::process::Command;

#[cfg(feature = "bpf")]
mod address_spaces;
#[cfg(feature = "bpf")]
mod affinity_monitor;
#[cfg(feature = "bpf")]
mod figures;
#[cfg(feature = "bpf")]
mod lent_cpu_monitor;
#[cfg(feature = "bpf")]
mod modes;
#[cfg(feature = "bpf")]
mod side_by_side;
#[cfg(feature = "bpf")]
pub(crate) mod test_process;

#[cfg(feature = "bpf")]
pub(super) use test_process::scan;

#[test]
fn the_object_files_match_their_sources() {
    for (folder, name) in [("src/bpf", "tasks"), ("src/bpf/lent", "lent")] {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join(folder);
        let check = Command::new("sha256sum")
            .args(["--check", "--strict", &format!("{name}.bpf.sum")])
            .current_dir(&folder)
            .output();
        let Ok(check) = check else {
            println!("skipped: there is no sha256sum here");
            return;
        };
        let output = String::from_utf8_lossy(&check.stdout);
        assert!(
            check.status.success(),
            "{output}run `make bpf`, which needs clang, and commit all three files"
        );
        let checked: Vec<&str> = output.lines().filter_map(|line| line.strip_suffix(": OK")).collect();
        assert_eq!(checked, [format!("{name}.bpf.c"), format!("{name}.bpf.o")]);
    }
}

#[cfg(not(feature = "bpf"))]
#[test]
fn a_build_without_bpf_reports_that() {
    let error = super::TaskScan::load().unwrap_err();
    assert!(matches!(error, super::TaskScanUnavailable::NotCompiled));
    assert!(error.to_string().contains("--features bpf"), "{error}");
    let error = super::LentCpuMonitor::new().unwrap_err();
    assert!(error.to_string().contains("--features bpf"), "{error}");
    let error = super::load_programs().1.unwrap_err();
    assert!(error.to_string().contains("--features bpf"), "{error}");
}
