//! Ways to compute many short items on several processes, with which the bench `farm` compares a farm: Python's
//! `multiprocessing.Pool`, `xargs -P`, and pjw's own Python module `pjw_farm`.

use std::fmt::Write;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};

use crate::load::compiled::compile;

/// The beginning of each Python program. The function `work` computes an item: it uses CPU time, as an item of the farm
/// does.
const PYTHON_WORK: &str = r"
import sys, time
workers, items, seconds = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
def work(item):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass
begin = time.monotonic()
";
const PYTHON_POOL: &str = r"
import multiprocessing
with multiprocessing.get_context('fork').Pool(workers) as pool:
    assert sum(1 for _ in pool.imap_unordered(work, range(items))) == items
print(time.monotonic() - begin)
";
const PYTHON_FARM: &str = r"
import pjw_farm
with pjw_farm.Farm(work, items, workers=workers) as farm:
    assert sum(1 for _ in farm) == items
print(time.monotonic() - begin)
";
/// The program that xargs starts for each item.
const ITEM_PROGRAM: &str = r"
#include <stdlib.h>
#include <time.h>
int main(void) {
    struct timespec now;
    long end = 0, at;
    do {
        clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
        at = now.tv_sec * 1000000000 + now.tv_nsec;
        if (!end) end = at + ITEM_NS;
    } while (at < end);
    return 0;
}
";

/// A way to compute many short items in several processes, with which benches compare a farm of the crate pjw-spawn.
#[derive(Debug)]
pub enum ItemPool {
    /// `multiprocessing.Pool.imap_unordered` of Python, by fork.
    PythonPool,
    /// The Python module `pjw_farm` of this project.
    PythonFarm,
    /// `xargs -P WORKERS -n 1 PROGRAM`: xargs starts a process of a program for each item.
    Xargs {
        /// The path of the program that computes one item.
        program: PathBuf,
        /// The path of a file with one line for each item.
        list: PathBuf,
    },
}

impl ItemPool {
    /// Returns the item pool [`ItemPool::Xargs`] for `items` items. Compiles the program that computes one item, and
    /// writes the list of items, both in `directory`. `item` is the CPU time of one item.
    ///
    /// # Errors
    /// If `cc` is missing, or if a file can't be written.
    pub fn xargs(directory: &Path, items: u32, item: Duration) -> anyhow::Result<Self> {
        let flag = format!("-DITEM_NS={}", item.as_nanos());
        let program = compile(directory, "item", ITEM_PROGRAM, &[&flag])?;
        let list = directory.join("items");
        let lines = (0..items).fold(String::new(), |mut lines, number| {
            let _ = writeln!(lines, "{number}");
            lines
        });
        std::fs::write(&list, lines).with_context(|| format!("can't write {}", list.display()))?;
        Ok(Self::Xargs { program, list })
    }

    /// Returns the name under which this item pool appears as a peer in the results of a bench.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::PythonPool => "multiprocessing.Pool",
            Self::PythonFarm => "pjw_farm in Python",
            Self::Xargs { .. } => "xargs -P",
        }
    }

    /// Measures how long this way takes to compute `items` items in `workers` processes, in seconds. `item` is the CPU
    /// time of one item. The start of the Python interpreter does not count.
    ///
    /// # Errors
    /// If python3 or xargs is not installed, or fails.
    pub fn measure(&self, workers: u32, items: u32, item: Duration) -> anyhow::Result<f64> {
        match self {
            Self::PythonPool => measure_in_python(PYTHON_POOL, workers, items, item),
            Self::PythonFarm => measure_in_python(PYTHON_FARM, workers, items, item),
            Self::Xargs { program, list } => {
                let begin = Instant::now();
                let list = File::open(list).context("can't read the list of items")?;
                let mut command = Command::new("xargs");
                command.args(["-P", &workers.to_string(), "-n", "1"]).arg(program).stdin(list);
                let status = command.status().context("can't start xargs")?;
                ensure!(status.success(), "xargs failed: {status}");
                Ok(begin.elapsed().as_secs_f64())
            }
        }
    }
}

/// Returns the time in seconds in which `workers` workers compute `items` items in Python, without the start of Python.
/// `way` is the Python code that computes the items and prints the time. `item` is the CPU time of one item.
///
/// # Errors
/// If python3 is not installed or fails.
fn measure_in_python(way: &str, workers: u32, items: u32, item: Duration) -> anyhow::Result<f64> {
    // Cargo builds the library beside the bench.
    let library = std::env::current_exe()?.with_file_name("libpjw_spawn.so");
    let output = Command::new("python3")
        .args(["-B", "-c", &format!("{PYTHON_WORK}{way}")])
        .args([workers.to_string(), items.to_string(), item.as_secs_f64().to_string()])
        .env("PYTHONPATH", concat!(env!("CARGO_MANIFEST_DIR"), "/../crates/pjw-spawn-c/python"))
        .env("PJW_SPAWN_LIBRARY", library)
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .context("can't start python3")?;
    ensure!(output.status.success(), "python3 failed: {}", output.status);
    String::from_utf8_lossy(&output.stdout).trim().parse().context("python3 printed no time")
}
