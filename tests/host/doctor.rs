//! `pjwctl doctor` on real processes: it finds problems, prints no control characters, and changes nothing.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use pjw_core::cpuset::CpuSet;
use pjw_tests::daemon::{Daemon, Enforcement};
use pjw_tests::programs::{copy_program, program_path};
use pjw_tests::skipping::skip;
use pjw_tests::waiting::wait_until;
use serde_json::Value;

use crate::permissions::programs_are_reachable;
use crate::processes::{Shell, has_cpusets, has_two_cores, is_asleep, is_root, masks};

const NO_SOCKET: &str = "/nonexistent/pjwd.sock";
const NOBODY: u32 = 65_534;

fn doctor(socket: &Path, words: &[&str]) -> Command {
    let mut command = Command::new(program_path("pjwctl"));
    command.arg("--socket").arg(socket).arg("doctor").args(words);
    command.env_remove("PJW_SOCKET").current_dir("/").stdin(Stdio::null());
    command
}

#[track_caller]
fn json_of(output: &Output) -> Value {
    assert!(output.status.success(), "{output:?}");
    assert!(!output.stdout.contains(&0x1b), "{}", String::from_utf8_lossy(&output.stdout));
    serde_json::from_slice(&output.stdout).unwrap()
}

fn run_doctor(socket: &Path) -> Value {
    json_of(&doctor(socket, &["--json"]).output().unwrap())
}

fn findings<'a>(report: &'a Value, code: &'a str) -> impl Iterator<Item = &'a Value> {
    report["findings"].as_array().unwrap().iter().filter(move |finding| finding["code"] == code)
}

fn finding_about<'a>(report: &'a Value, code: &'a str, job: &str) -> Option<&'a Value> {
    let names = |finding: &&Value| finding["jobs"].as_array().unwrap().iter().any(|id| id == job);
    findings(report, code).find(names)
}

fn reported_job<'a>(report: &'a Value, id: &str) -> &'a Value {
    let jobs = report["jobs"].as_array().unwrap();
    jobs.iter().find(|job| job["id"] == id).unwrap_or_else(|| panic!("{id}: {report}"))
}

#[test]
fn without_root_doctor_reports_what_it_could_not_read() {
    if !is_root() || !programs_are_reachable() {
        return;
    }
    let output = doctor(Path::new(NO_SOCKET), &["--json"]).uid(NOBODY).gid(NOBODY).output().unwrap();
    let report = json_of(&output);
    let finding = findings(&report, "not-root").next().expect("the report says what was not read");
    assert!(finding["text"].as_str().unwrap().contains("user 65534"), "{finding}");
}

#[test]
fn without_a_daemon_doctor_names_the_first_mistake_in_the_configuration_of_the_user() {
    if !is_root() || !programs_are_reachable() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let (directory, file) = (dir.path().join("pjw"), dir.path().join("pjw/pjwd.toml"));
    fs::create_dir(&directory).unwrap();
    fs::write(&file, "interval = \"1s\"\nmodus = 1\n").unwrap();
    for path in [dir.path(), directory.as_path(), file.as_path()] {
        fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
    }
    let mut command = doctor(Path::new(NO_SOCKET), &["--json"]);
    command.env("XDG_CONFIG_HOME", dir.path()).uid(NOBODY).gid(NOBODY);
    let expected = format!("{}:2:1: modus", file.display());
    let is_named = |report: &Value| {
        findings(report, "wrong-configuration")
            .any(|finding| finding["text"].as_str().unwrap().contains(&expected))
    };
    let report = json_of(&command.output().unwrap());
    assert!(is_named(&report), "{report}");
    fs::write(&file, "interval = \"1s\"\n").unwrap();
    let report = json_of(&command.output().unwrap());
    assert!(!is_named(&report), "{report}");
}

/// Makes a program whose name would clear the screen, and looks like further fields of `/proc/PID/stat`.
fn make_hostile_program(dir: &Path) -> PathBuf {
    let path = dir.join("x) R 1\n\x1b[2J");
    copy_program("/bin/sleep", &path);
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    path
}

#[test]
fn with_a_daemon_doctor_finds_the_problems_of_registered_jobs() {
    if !has_two_cores() {
        return;
    }
    let daemon = Daemon::start("interval = \"50ms\"\n");
    let dir = tempfile::tempdir().unwrap();
    let hostile = make_hostile_program(dir.path());
    let mut shell = Shell::start();
    let spinners: Vec<u32> = (0..3).map(|_| shell.background("sh -c 'while :; do :; done'")).collect();
    let mut command = Command::new(hostile);
    command.arg("1000");
    let hostile_shell = Shell::from_command(command);
    // Beside the three loops on one core, a program that begins would be a fourth thread that wants a CPU.
    wait_until("the hostile program sleeps", || is_asleep(hostile_shell.pid()));
    let cpus = daemon.assign("a", 1, &[shell.pid(), hostile_shell.pid()]).unwrap();
    assert!(!cpus.is_empty());

    let report = run_doctor(&daemon.socket());
    let a = daemon.job_id("a");
    let seen = reported_job(&report, &a);
    assert_eq!(seen["cpus"].as_str().unwrap().parse::<CpuSet>().unwrap(), cpus);
    assert_eq!((&seen["granted_by"], &seen["processes"]), (&"warden".into(), &5.into()), "{seen}");
    // The three loops share the PUs of one core. A core with three PUs or more may have room for them.
    if cpus.len() < 3 {
        let finding = finding_about(&report, "oversubscribed", &a).unwrap_or_else(|| panic!("{report}"));
        assert!(finding["text"].as_str().unwrap().starts_with("3 threads of "), "{finding}");
        let named: Vec<u64> = finding["pids"].as_array().unwrap().iter().filter_map(Value::as_u64).collect();
        assert!(spinners.iter().all(|&pid| named.contains(&u64::from(pid))), "{finding}");
    }
    assert!(finding_about(&report, "outside", &a).is_none(), "{report}");
    let shown = doctor(&daemon.socket(), &["--all"]).output().unwrap();
    assert!(!shown.stdout.contains(&0x1b), "{}", String::from_utf8_lossy(&shown.stdout));
}

#[test]
fn doctor_reports_that_a_daemon_only_observes() {
    let daemon = Daemon::start("mode = \"observe\"\n");
    let report = run_doctor(&daemon.socket());
    let facts = report["facts"].as_array().unwrap();
    let warden = facts.iter().find(|fact| fact["code"] == "warden").unwrap();
    assert!(warden["text"].as_str().unwrap().contains("changes nothing"), "{warden}");
}

/// Whether the doctor sees all processes of the machine. If not, the test is reported as skipped.
fn sees_kernel_threads() -> bool {
    // Outside containers, process 2 is the parent of all kernel threads.
    let is_seen = fs::read_to_string("/proc/2/comm").is_ok_and(|comm| comm == "kthreadd\n");
    if !is_seen {
        skip("no kernel thread is seen, as in a container: doctor does not know which pjwd run");
    }
    is_seen
}

#[test]
fn doctor_names_the_jobs_of_a_killed_daemon_and_the_remedy() {
    if !is_root() || !has_two_cores() || !has_cpusets() || !sees_kernel_threads() {
        return;
    }
    let mut daemon = Daemon::start_with(Enforcement::Cpuset, "");
    let shell = Shell::start();
    let cpus = daemon.assign("left", 1, &[shell.pid()]).unwrap();
    let id = daemon.job_id("left");
    daemon.check_after_reply(&id, &"cpuset".to_owned(), || daemon.job("left").unwrap().enforcement);
    // Without its socket, the doctor knows nothing of the daemon but its process and its files.
    let report = run_doctor(Path::new(NO_SOCKET));
    assert!(finding_about(&report, "no-warden", &id).is_none(), "the daemon runs: {report}");

    daemon.kill();
    let report = run_doctor(Path::new(NO_SOCKET));
    let finding = finding_about(&report, "no-warden", &id).unwrap_or_else(|| panic!("{report}"));
    assert_eq!(finding["severity"], "problem", "{finding}");
    assert!(finding["text"].as_str().unwrap().contains("has ended"), "{finding}");
    assert!(finding["remedy"].as_str().unwrap().contains("pjwd --release-all --beside"), "{finding}");
    assert_eq!(finding["pids"][0], shell.pid(), "{finding}");
    let seen = reported_job(&report, &id);
    assert_eq!(seen["cpus"].as_str().unwrap().parse::<CpuSet>().unwrap(), cpus);
    assert_eq!((&seen["granted_by"], &seen["processes"]), (&"warden".into(), &1.into()), "{seen}");
}

#[test]
fn doctor_changes_no_mask() {
    let mut shell = Shell::start();
    let children: Vec<u32> = (0..4).map(|_| shell.background("sleep 1000")).collect();
    let before = masks(&children);
    run_doctor(Path::new(NO_SOCKET));
    assert_eq!(masks(&children), before);
}

/// Cgroups of a batch system in a v1 hierarchy of cpusets. They are removed when this value is dropped.
struct Cpusets {
    top: PathBuf,
    made: Vec<PathBuf>,
}

impl Cpusets {
    /// Makes the top cgroup. `None`, with a report, if v1 cpusets are not mounted or not writable.
    fn new() -> Option<Self> {
        let mounts = pjw_linux::cgroup::CgroupMounts::read();
        let has = |options: &str| options.split(',').any(|option| option == "cpuset");
        let Some((_, mount)) = mounts.v1_mounts.iter().find(|(options, _)| has(options)) else {
            skip("no v1 hierarchy of cpusets is mounted; the virtual machine has v2 and a real Slurm");
            return None;
        };
        let top = mount.join(format!("slurm_doctor{}", std::process::id()));
        let mut cpusets = Self { top: top.clone(), made: Vec::new() };
        let memory = fs::read_to_string(mount.join("cpuset.mems")).unwrap();
        let all = fs::read_to_string(mount.join("cpuset.cpus")).unwrap();
        if let Err(error) = cpusets.make(&top, all.trim(), memory.trim()) {
            skip(format_args!("can't make {}: {error}", top.display()));
            return None;
        }
        Some(cpusets)
    }

    fn make(&mut self, dir: &Path, cpus: &str, memory: &str) -> std::io::Result<()> {
        fs::create_dir(dir)?;
        self.made.push(dir.to_owned());
        fs::write(dir.join("cpuset.mems"), memory)?;
        fs::write(dir.join("cpuset.cpus"), cpus)
    }

    /// Makes the cgroups of a job of root, with a process in it.
    fn add_job(&mut self, id: u32, cpus: &str, pid: u32) {
        let memory = fs::read_to_string(self.top.join("cpuset.mems")).unwrap();
        let all = fs::read_to_string(self.top.join("cpuset.cpus")).unwrap();
        let user = self.top.join("uid_0");
        if !user.exists() {
            self.make(&user, all.trim(), memory.trim()).unwrap();
        }
        let job = user.join(format!("job_{id}"));
        self.make(&job, cpus, memory.trim()).unwrap();
        let step = job.join("step_0");
        self.make(&step, cpus, memory.trim()).unwrap();
        fs::write(step.join("cgroup.procs"), pid.to_string()).unwrap();
    }
}

impl Drop for Cpusets {
    fn drop(&mut self) {
        for dir in self.made.iter().rev() {
            wait_until("the cgroup has no process", || fs::remove_dir(dir).is_ok());
        }
    }
}

#[test]
fn without_a_daemon_doctor_finds_the_jobs_of_a_scheduler_and_their_overlap() {
    if !is_root() || !has_two_cores() {
        return;
    }
    // The test needs only the lock of this daemon: the daemon of another test would take these jobs for its own.
    let mut daemon = Daemon::start("mode = \"observe\"\n");
    daemon.stop();
    let Some(mut cpusets) = Cpusets::new() else { return };
    let mut shell = Shell::start();
    let (first, second) = (shell.background("sleep 1000"), shell.background("sleep 1000"));
    let stray = shell.background("sleep 1000");
    cpusets.add_job(4711, "0", first);
    cpusets.add_job(4712, "0-1", second);

    let report = run_doctor(Path::new(NO_SOCKET));
    assert_eq!(reported_job(&report, "slurm:4711")["cpus"], "0");
    assert_eq!(reported_job(&report, "slurm:4711")["granted_by"], "scheduler");
    let overlap = finding_about(&report, "overlap", "slurm:4711");
    // If the machine has only two CPUs, the second job may run on all of them, which is another finding.
    let unbound = finding_about(&report, "unbound", "slurm:4712");
    assert!(overlap.is_some() || unbound.is_some(), "{report}");
    assert!(findings(&report, "no-warden").next().is_some(), "{report}");
    for job in ["slurm:4711", "slurm:4712"] {
        assert_eq!(reported_job(&report, job)["processes"], 1, "process {stray} is in no job: {report}");
    }
    drop(shell);
}
