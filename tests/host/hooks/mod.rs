//! The shipped hooks, called as by their schedulers: with recorded environments, and a real daemon.

mod failing;
mod openpbs;
mod others;
mod slurm;

use std::fs::File;
use std::io::{Seek, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use pjw_tests::daemon::Daemon;
use pjw_tests::programs::program_path;

use crate::processes::Shell;

/// A user that is not root. Its name is nobody on every machine.
pub const NOBODY: u32 = 65_534;
/// Another user, which runs no tests.
pub const OTHER: u32 = 65_533;

/// Returns the path of a shipped hook.
pub fn hook_path(name: &str) -> String {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../config/hooks").join(name);
    file.to_str().unwrap().to_owned()
}

/// Copies a shipped hook to `dir`, with the path of the built `pjwctl` in it, and returns the path.
pub fn installed_hook(dir: &Path, name: &str) -> PathBuf {
    with_program(dir, name, &program_path("pjwctl"))
}

/// The same, with more time. The hooks wait for 1.2 s by default, and on a busy machine a request may take longer. A
/// starter of a job keeps its time: it waits so long for a job that does not exist, too.
pub fn patient_hook(dir: &Path, name: &str) -> PathBuf {
    with_program(dir, name, &patient_pjwctl(dir, "patient-pjwctl", ""))
}

/// Copies a shipped hook to the directory of `daemon`, and returns the path. The hook calls this daemon, whatever its
/// environment says, and has more time as that of [`patient_hook`].
pub fn hook_for_daemon(daemon: &Daemon, name: &str) -> PathBuf {
    let options = format!("--socket {}", daemon.socket().display());
    with_program(daemon.dir(), name, &patient_pjwctl(daemon.dir(), "pjwctl", &options))
}

/// Makes a script that executes the built `pjwctl` with these options and a longer time limit, and returns its path.
fn patient_pjwctl(dir: &Path, name: &str, options: &str) -> PathBuf {
    let script = dir.join(name);
    if !script.exists() {
        let program = format!("{} {options}", program_path("pjwctl").display());
        let text = format!(
            "#!/bin/sh\n[ \"$1\" = hook ] || exec {program} \"$@\"\nhook=$2\nshift 2\n\
             case $hook in *-starter | *-wrapper) exec {program} hook \"$hook\" \"$@\" ;; esac\n\
             exec {program} hook \"$hook\" --timeout 60 \"$@\"\n"
        );
        write_executable(&script, &text);
    }
    script
}

fn with_program(dir: &Path, name: &str, program: &Path) -> PathBuf {
    let text = std::fs::read_to_string(hook_path(name)).unwrap();
    let caller = program.file_name().unwrap().display();
    let file = dir.join(format!("{caller}-{}", name.replace('/', "-")));
    // Another process may be running the file, so it is written only once.
    if !file.exists() {
        write_executable(&file, &text.replace("/usr/bin/pjwctl", program.to_str().unwrap()));
    }
    file
}

/// Gives other users access to the directory of the daemon, with its socket.
pub fn make_accessible(daemon: &Daemon) {
    std::fs::set_permissions(daemon.dir(), std::fs::Permissions::from_mode(0o755)).unwrap();
}

/// Writes an executable file. A child process writes it: if this process had the file open for writing, children that
/// other tests start at the same time would have it open too, and the file could not be executed (execve(2),
/// ETXTBSY).
pub fn write_executable(file: &Path, text: &str) {
    let mut writer = Command::new("sh");
    writer.args(["-c", "cat >\"$0\" && chmod 755 \"$0\"", file.to_str().unwrap()]).stdin(Stdio::piped());
    let mut writer = writer.spawn().unwrap();
    writer.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
    assert!(writer.wait().unwrap().success());
}

/// A call of a hook. Its environment has only the variables that are set here.
pub struct Call(Command);

impl Call {
    pub fn new(program: impl AsRef<Path>) -> Self {
        let mut command = Command::new(program.as_ref());
        command.env_clear().current_dir("/").stdin(Stdio::null());
        Self(command)
    }

    /// Sets the variables of a recorded environment.
    pub fn with_environment(mut self, text: &str) -> Self {
        self.0.envs(text.lines().filter_map(|line| line.split_once('=')));
        self
    }

    pub fn with_variable(mut self, name: &str, value: &str) -> Self {
        self.0.env(name, value);
        self
    }

    pub fn without_variable(mut self, name: &str) -> Self {
        self.0.env_remove(name);
        self
    }

    pub fn args(mut self, args: &[&str]) -> Self {
        self.0.args(args);
        self
    }

    /// Runs the hook as the user `uid`.
    pub fn with_user(mut self, uid: u32) -> Self {
        self.0.uid(uid).gid(uid);
        self
    }

    /// Sets the standard input.
    pub fn with_input(mut self, text: &str) -> Self {
        let mut file: File = tempfile::tempfile().unwrap();
        file.write_all(text.as_bytes()).unwrap();
        file.rewind().unwrap();
        self.0.stdin(file);
        self
    }

    pub fn with_socket(self, socket: &Path) -> Self {
        self.with_variable("PJW_SOCKET", socket.to_str().unwrap())
    }

    /// Starts the hook, with pipes for its output.
    pub fn spawn(mut self) -> Child {
        self.0.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    }

    pub fn output(mut self) -> Output {
        self.0.output().unwrap()
    }

    /// Checks that the hook succeeds and prints nothing.
    pub fn assert_silent_success(self) {
        let output = self.output();
        assert!(output.status.success(), "{output:?}");
        assert!(output.stdout.is_empty() && output.stderr.is_empty(), "{output:?}");
    }

    /// Checks that the hook succeeds and prints one line about the use of the cores by the job `job`.
    pub fn assert_line_about(self, job: &str) {
        let output = self.output();
        assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
        let line = String::from_utf8(output.stdout).unwrap();
        assert!(line.starts_with(&format!("pjw: {job} ")) && line.contains("of CPU time in"), "{line}");
        assert!(line.ends_with("of 1 core used\n") && line.lines().count() == 1, "{line}");
    }

    /// Checks that the hook succeeds and prints one line with a warning to stderr. Returns the line.
    pub fn assert_warning(self, expected: &str) -> String {
        let output = self.output();
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success() && output.stdout.is_empty(), "{output:?}");
        assert!(stderr.lines().count() == 1 && stderr.contains(expected), "{expected:?}: {stderr}");
        stderr
    }

    /// Checks that the hook fails and prints one line with the reason to stderr. Returns the line.
    pub fn assert_refusal(self, expected: &str) -> String {
        let output = self.output();
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        assert!(stderr.lines().count() == 1 && stderr.contains(expected), "{expected:?}: {stderr}");
        assert!(output.stdout.is_empty(), "{output:?}");
        stderr
    }
}

/// Lets a process of a job use CPU time for so long that there is something to say about the job at its end. The
/// process lives as long as the returned shell.
pub fn use_cpu_time(daemon: &Daemon, job: &str) -> Shell {
    let mut shell = Shell::start();
    let request = serde_json::json!({ "job": job, "pids": [shell.pid()] });
    let _: serde_json::Value = daemon.call("Assign", &request).unwrap();
    assert_eq!(shell.run("i=0; while [ $i -lt 500000 ]; do i=$((i+1)); done; echo done"), "done");
    shell
}

/// Returns the number of cores that have a PU of the set.
pub fn core_count_of(daemon: &Daemon, cpus: &str) -> usize {
    let set = |list: &str| list.parse::<pjw_core::cpuset::CpuSet>().unwrap();
    daemon.status().cores.iter().filter(|core| set(&core.cpus).intersects(&set(cpus))).count()
}
