//! The example `adaptive_team.c`: its OpenMP team follows the core map of its job. The test publishes the core map as
//! pjwd does.

#![allow(clippy::unwrap_used)] // a test may fail

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use job::layout::CoreMapContent;
use job::{CORE_MAP_FILE_NAME, CoreMapWriter};

#[path = "../../pjw-spawn-c/tests/compile/mod.rs"]
mod compile;

use compile::compile;

/// The compiled example in a temporary directory, which is also the directory of its job.
struct Example(tempfile::TempDir);

impl Example {
    /// Compiles the example. Returns `None` if the compiler has no OpenMP: the test is skipped then.
    fn compile() -> Option<Self> {
        let example = Self(tempfile::tempdir().unwrap());
        let probe = example.directory().join("probe.c");
        std::fs::write(&probe, "#include <omp.h>\nint main(void) { return omp_get_max_threads() < 1; }\n")
            .unwrap();
        let mut probing = Command::new("cc");
        probing.arg("-fopenmp").arg(&probe).arg("-o").arg(example.directory().join("probe"));
        if !probing.output().is_ok_and(|output| output.status.success()) {
            let _ = writeln!(
                std::io::stderr(),
                "skipped: adaptive_team: cc compiles no program with OpenMP here"
            );
            return None;
        }
        let crate_directory = Path::new(env!("CARGO_MANIFEST_DIR"));
        let flags = ["-O2", "-fopenmp"];
        compile("pjw_job", crate_directory, "examples/adaptive_team.c", &flags, &example.program());
        Some(example)
    }

    fn directory(&self) -> &Path {
        self.0.path()
    }

    fn program(&self) -> PathBuf {
        self.directory().join("adaptive_team")
    }

    fn command(&self) -> Command {
        let mut command = Command::new(self.program());
        command.env("PJW_JOB_DIR", self.directory()).stdout(Stdio::piped());
        command
    }

    fn publish(&self, content: &CoreMapContent) -> CoreMapWriter {
        let [page, temporary] = [CORE_MAP_FILE_NAME, "temporary"].map(|name| self.directory().join(name));
        CoreMapWriter::create(&page, &temporary, content).unwrap()
    }
}

/// A program that is killed with its test.
struct KilledOnDrop(Child);

impl Drop for KilledOnDrop {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A core map with the CPUs `own`, of which `leaving` are leaving.
fn cores(epoch: u64, own: &str, leaving: &str) -> CoreMapContent {
    let (own, leaving) = (own.parse().unwrap(), leaving.parse().unwrap());
    CoreMapContent { epoch, is_live: true, own, leaving, ..CoreMapContent::default() }
}

#[test]
fn the_number_of_threads_of_the_team_follows_the_cores_of_the_job() {
    let Some(example) = Example::compile() else { return };
    let mut writer = example.publish(&cores(1, "0-1", ""));
    let mut running = KilledOnDrop(example.command().spawn().unwrap());
    let mut lines = BufReader::new(running.0.stdout.take().unwrap()).lines();
    let mut wait_for_team = |threads: &str| {
        let mut team = |line: Result<String, _>| line.unwrap().split(' ').nth(1).unwrap() == threads;
        assert!(lines.any(&mut team), "the program ended before it had {threads} threads");
    };
    wait_for_team("2");
    for (epoch, own, leaving, threads) in [(2, "0-3", "", "4"), (3, "0-3", "1-3", "1"), (4, "0-2", "", "3")] {
        writer.write(&cores(epoch, own, leaving)).unwrap();
        wait_for_team(threads);
    }
}

#[test]
fn the_result_does_not_depend_on_the_number_of_threads() {
    let Some(example) = Example::compile() else { return };
    let result = |own: &str, arguments: &[&str]| {
        let _writer = example.publish(&cores(1, own, ""));
        let output = example.command().args(arguments).output().unwrap();
        String::from_utf8(output.stdout).unwrap().lines().last().unwrap().to_owned()
    };
    let result_of_one_thread = result("0", &["501"]);
    assert!(result_of_one_thread.starts_with("the middle has 2"), "{result_of_one_thread}");
    assert_eq!(result("0-2", &["501"]), result_of_one_thread);
    assert_eq!(result("0-1", &["fixed", "501"]), result_of_one_thread);
}
