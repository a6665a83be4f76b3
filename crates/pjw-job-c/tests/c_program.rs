//! The C program `program.c` checks the functions of pjw_job.h and libpjw_job.so.

#![allow(clippy::unwrap_used)] // a test may fail

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use job::layout::CoreMapContent;
use job::{CORE_MAP_FILE_NAME, CoreMapWriter, WANTED_CORES_FILE_NAME};

#[path = "../../pjw-spawn-c/tests/compile/mod.rs"]
mod compile;

use compile::compile;

#[test]
fn a_c_program_reads_its_cores_waits_for_a_change_and_wants_fewer_cores() {
    let directory = tempfile::tempdir().unwrap();
    let (program, job) = (directory.path().join("program"), directory.path().join("job"));
    compile("pjw_job", Path::new(env!("CARGO_MANIFEST_DIR")), "tests/program.c", &[], &program);
    std::fs::create_dir(&job).unwrap();
    let wanted_cores_file = job.join(WANTED_CORES_FILE_NAME);
    std::fs::write(&wanted_cores_file, "").unwrap();
    let before = CoreMapContent {
        epoch: 7,
        is_live: true,
        own: "0-1".parse().unwrap(),
        borrowed: "2".parse().unwrap(),
        leaving: "2".parse().unwrap(),
        leaving_at_ns: Some(99),
        core_count: 3,
        ..CoreMapContent::default()
    };
    let mut writer =
        CoreMapWriter::create(&job.join(CORE_MAP_FILE_NAME), &job.join("temporary"), &before).unwrap();
    let mut child = Command::new(&program).arg(&job).spawn().unwrap();
    let deadline = Instant::now() + Duration::from_secs(60);
    while std::fs::read_to_string(&wanted_cores_file).unwrap() != "1\n" && child.try_wait().unwrap().is_none()
    {
        assert!(Instant::now() < deadline, "the program did not want one core in time");
        std::thread::sleep(Duration::from_millis(1));
    }
    let own = "0".parse().unwrap();
    writer
        .write(&CoreMapContent { epoch: 8, is_live: true, own, core_count: 1, ..CoreMapContent::default() })
        .unwrap();
    assert!(child.wait().unwrap().success());
}
