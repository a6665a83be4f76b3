//! Measures how soon a killed worker of a pool is replaced: from SIGKILL until its replacement writes a byte in `main`.
//!
//! `pool_latency [COUNT]`
#![allow(missing_docs, clippy::print_stdout, clippy::unwrap_used)]

use std::io::{Read, pipe};
use std::os::fd::OwnedFd;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use pjw_spawn::pool::WorkerPool;
use pjw_spawn::{Arguments, Instance, Placement, SpawnContext, Stdio};

const WORKER: &str = "#include <unistd.h>\nint main(void) { write(1, \"x\", 1); for (;;) pause(); }";

fn main() {
    let count: u32 = std::env::args().nth(1).map_or(1000, |text| text.parse().unwrap());
    let directory = tempfile::tempdir().unwrap();
    let (file, program) = (directory.path().join("worker.c"), directory.path().join("worker"));
    std::fs::write(&file, WORKER).unwrap();
    assert!(Command::new("cc").arg(&file).arg("-o").arg(&program).status().unwrap().success());
    let (mut reader, writer) = pipe().unwrap();
    let output = Arc::new(OwnedFd::from(writer));
    let arguments = Arc::new(Arguments::parse(&["worker", "%r"]).unwrap());
    let instances: Vec<Instance> = (0..4)
        .map(|rank| Instance {
            rank,
            size: 4,
            arguments: Arc::clone(&arguments),
            variables: Vec::new(),
            placement: Arc::new(Placement::on_cpus(if rank % 2 == 0 { "0" } else { "0-1" }.parse().unwrap())),
            stdio: Stdio { output: Some(Arc::clone(&output)), ..Stdio::default() },
        })
        .collect();
    for spares in [0, 2] {
        let context = SpawnContext::from_path(&program);
        let mut pool = WorkerPool::start(&context, instances.clone(), spares).unwrap();
        reader.read_exact(&mut [0; 4]).unwrap();
        let mut times: Vec<Duration> = (0..count)
            .map(|round| {
                let begin = Instant::now();
                pool.worker(round as usize % 4).unwrap().send_signal(9).unwrap();
                pool.wait(None).unwrap().unwrap().replacement.unwrap().unwrap();
                reader.read_exact(&mut [0]).unwrap();
                begin.elapsed()
            })
            .collect();
        times.sort();
        let at = |permille: usize| times[(times.len() - 1) * permille / 1000].as_micros();
        println!("{spares} spares: p50 {} us, p99 {} us, longest {} us", at(500), at(990), at(1000));
        for worker in (0..4).filter_map(|index| pool.worker(index)) {
            worker.send_signal(9).unwrap();
            worker.wait().unwrap();
        }
    }
}
