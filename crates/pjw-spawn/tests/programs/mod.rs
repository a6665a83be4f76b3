//! The program `first_act.c`, which reads its mask first, and the records that it writes.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use nix::sched::{CpuSet as NixCpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;
use pjw_core::cpuset::{CpuSet, Pu};
use tempfile::TempDir;

/// The record that one process has written: see `first_act.c`.
pub(crate) struct Record {
    pub(crate) pid: u32,
    pub(crate) cpu: Pu,
    pub(crate) mask: CpuSet,
}

/// Compiles the program. It is removed with the directory.
pub(crate) fn program_without_libc() -> (PathBuf, TempDir) {
    let dir = tempfile::tempdir().unwrap();
    let program = dir.path().join("first_act");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs/first_act.c");
    let flags = ["-O1", "-nostdlib", "-static", "-ffreestanding", "-fno-stack-protector", "-o"];
    let built =
        Command::new("cc").args(flags).arg(&program).arg(source).status().expect("there is a C compiler");
    assert!(built.success());
    (program, dir)
}

/// Reads the records in a file.
pub(crate) fn records(path: &Path) -> Vec<Record> {
    let bytes = std::fs::read(path).unwrap();
    let record = |bytes: &[u8]| {
        let number = |at: usize| u32::from_ne_bytes(bytes[at..at + 4].try_into().unwrap());
        let word = |at: usize| u64::from_ne_bytes(bytes[at..at + 8].try_into().unwrap());
        Record { pid: number(0), cpu: Pu(number(4)), mask: CpuSet::from_words(&[word(16), word(24)]) }
    };
    bytes.chunks_exact(32).map(record).collect()
}

/// The records of processes that are started by posix_spawn(3) and get their mask afterwards, and their masks.
pub(crate) fn peer_records(
    program: &Path,
    output: &Path,
    count: usize,
    parts: &[CpuSet],
) -> (Vec<Record>, BTreeMap<u32, CpuSet>) {
    let file = File::options().append(true).create(true).open(output).unwrap();
    let mut masks = BTreeMap::new();
    for part in parts.iter().cycle().take(count) {
        let mut child =
            Command::new(program).stdin(Stdio::null()).stdout(file.try_clone().unwrap()).spawn().unwrap();
        let mut mask = NixCpuSet::new();
        part.iter().for_each(|pu| mask.set(pu.0 as usize).unwrap());
        // The process may have ended already.
        let _ = sched_setaffinity(Pid::from_raw(child.id().cast_signed()), &mask);
        masks.insert(child.id(), part.clone());
        child.wait().unwrap();
    }
    (records(output), masks)
}

/// The mask of the calling thread.
pub(crate) fn own_mask() -> CpuSet {
    let mask = sched_getaffinity(Pid::from_raw(0)).unwrap();
    (0..NixCpuSet::count())
        .filter(|&pu| mask.is_set(pu).unwrap())
        .map(|pu| Pu(pu.try_into().unwrap()))
        .collect()
}
