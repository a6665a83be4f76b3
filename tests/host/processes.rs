//! Processes for the jobs of the tests. Each process ends with its test.

use pjw_tests::cpusets::NoCpusets;
use pjw_tests::skipping::skip;
use pjw_tests::waiting::wait_until;
use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill, killpg};
use nix::unistd::Pid;
use pjw_core::cpuset::CpuSet;
use pjw_core::ids::Tid;
use pjw_linux::cgroup::{CgroupMounts, CpusetMount};

/// The longest time for which [`has_variable`] waits for a process that executes a program.
const LONGEST_EXEC: Duration = Duration::from_secs(2);

/// A shell that runs lines of commands. It ends when this value is dropped, with all processes of its process group.
pub struct Shell {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<std::process::ChildStdout>,
}

impl Shell {
    /// Starts a shell, and waits until it has answered and sleeps. A process that was just started may not have
    /// executed its program yet. On a busy machine, a shell that begins may wait for a CPU for so long that it is hot.
    pub fn start() -> Self {
        let mut shell = Self::from_command(Command::new("sh"));
        assert_eq!(shell.run("echo begun"), "begun");
        wait_until("the shell waits for a line", || is_asleep(shell.pid()));
        shell
    }

    pub fn from_command(mut command: Command) -> Self {
        // In a process group of its own, so that everything the shell starts ends with the test.
        let mut child =
            command.process_group(0).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let input = child.stdin.take();
        let output = BufReader::new(child.stdout.take().unwrap());
        Self { child, input, output }
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends a line to the shell, without waiting.
    pub fn send_line(&mut self, line: &str) {
        writeln!(self.input.as_mut().unwrap(), "{line}").unwrap();
    }

    /// Sends a line to the shell and returns the one line that it prints.
    pub fn run(&mut self, line: &str) -> String {
        self.send_line(line);
        let mut output = String::new();
        self.output.read_line(&mut output).unwrap();
        output.trim().to_owned()
    }

    /// Starts a child of the shell in the background, and returns its process id.
    pub fn background(&mut self, command: &str) -> u32 {
        self.run(&format!("{command} >/dev/null 2>&1 & echo $!")).parse().unwrap()
    }
}

impl Drop for Shell {
    fn drop(&mut self) {
        self.input = None;
        let _ = killpg(Pid::from_raw(self.child.id().cast_signed()), Signal::SIGKILL);
        let _ = self.child.wait();
    }
}

/// Kills the process with this id when this value is dropped.
pub struct KillOnDrop(pub u32);

impl Drop for KillOnDrop {
    fn drop(&mut self) {
        kill_process(self.0);
    }
}

/// Kills a process. It may have ended.
pub fn kill_process(pid: u32) {
    let _ = kill(Pid::from_raw(pid.cast_signed()), Signal::SIGKILL);
}

/// The state of the first thread of a process, as /proc/PID/stat has it. `None` if the process is gone.
fn state(pid: u32) -> Option<char> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit(") ").next()?.chars().next()
}

/// Whether a process has ended: it is gone, or a zombie for which its parent has not waited.
pub fn is_ended(pid: u32) -> bool {
    state(pid).is_none_or(|state| ['Z', 'X'].contains(&state))
}

/// Whether the first thread of a process sleeps until something happens. Such a thread wants no CPU.
pub fn is_asleep(pid: u32) -> bool {
    state(pid) == Some('S')
}

/// Returns the processes that have this variable in their environment. The variable has the form `NAME=VALUE`.
pub fn processes_with_variable(variable: &str) -> Vec<u32> {
    let entries = std::fs::read_dir("/proc").unwrap().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    pids.filter(|pid| has_variable(*pid, variable)).collect()
}

/// Whether a process has this variable in its environment. The variable has the form `NAME=VALUE`.
///
/// The environment of a process that executes a program reads as empty for a moment. This function waits until the
/// process has its new environment. Otherwise a list of processes could lack a process that exists all the time.
pub fn has_variable(pid: u32, variable: &str) -> bool {
    let begun = Instant::now();
    let mut is_last_reading = false;
    loop {
        let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        if !environment.is_empty() || is_last_reading || begun.elapsed() > LONGEST_EXEC {
            return environment.split(|byte| *byte == 0).any(|known| known == variable.as_bytes());
        }
        // The process may have been in execve(2) during the reading and not any more now. So it is read once more.
        is_last_reading = !is_executing(pid);
        if !is_last_reading {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Whether a process is in the part of execve(2) in which it has the memory of the new program, and neither arguments
/// nor an environment. A kernel thread and a process that has ended have no program.
fn is_executing(pid: u32) -> bool {
    let has_no_arguments = std::fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|words| words.is_empty());
    has_no_arguments && std::fs::read_link(format!("/proc/{pid}/exe")).is_ok()
}

/// Whether the kernel has frozen the cgroup of a process. A process that uses no CPU time for a while need not be
/// frozen: it may wait for a CPU.
pub fn is_frozen(pid: u32) -> bool {
    let Some(mount) = CpusetMount::from_mounts(&CgroupMounts::read()) else { return false };
    let (hierarchy, controller, file, frozen) = match mount.v1_freezer_mount_point {
        Some(freezer) => (freezer, "freezer", "freezer.state", "FROZEN"),
        None => (mount.mount_point, "", "cgroup.events", "frozen 1"),
    };
    let Some(path) = cgroup_path(pid, controller) else { return false };
    let text = std::fs::read_to_string(hierarchy.join(path).join(file)).unwrap_or_default();
    text.lines().any(|line| line == frozen)
}

/// The cgroup of a process in the v1 hierarchy with this controller, relative to the root of the hierarchy. In the v2
/// hierarchy if `controller` is empty.
fn cgroup_path(pid: u32, controller: &str) -> Option<String> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/cgroup")).ok()?;
    let mut lines = text.lines().filter_map(|line| line.split_once(':')?.1.split_once(':'));
    let (_, path) = lines.find(|(names, _)| names.split(',').any(|name| name == controller))?;
    Some(path.trim_start_matches('/').to_owned())
}

/// Returns the mask of a process. Empty if the process has ended.
pub fn mask(pid: u32) -> CpuSet {
    pjw_linux::sys::affinity::get_mask(Tid(pid)).unwrap_or_default()
}

/// Returns the mask of each thread of the processes, by thread id. Threads that have ended are left out.
pub fn masks(pids: &[u32]) -> Vec<(u32, String)> {
    let mut all = Vec::new();
    for pid in pids {
        for entry in std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten() {
            let tid: u32 = entry.file_name().to_string_lossy().parse().unwrap();
            all.extend(Some(mask(tid)).filter(|mask| !mask.is_empty()).map(|mask| (tid, mask.to_string())));
        }
    }
    all.sort();
    all
}

/// Whether the masks of these threads are inside one core each, and no two are in the same one.
pub fn has_own_core_each(tids: &[u32]) -> bool {
    let topology = pjw_linux::topology::load_topology(pjw_linux::topology::TopologySource::Live).unwrap();
    let core = |tid: &u32| {
        let allowed = mask(*tid);
        let core = topology.core_cpus(allowed.first()?);
        allowed.is_subset(&core).then_some(core)
    };
    let cores: Option<BTreeSet<CpuSet>> = tids.iter().map(core).collect();
    cores.is_some_and(|cores| cores.len() == tids.len())
}

/// Returns the number of cores of this machine.
pub fn core_count() -> u32 {
    let topology = pjw_linux::topology::load_topology(pjw_linux::topology::TopologySource::Live).unwrap();
    u32::try_from(topology.cores().len()).unwrap()
}

/// Whether this machine has two cores. If not, reports that the test is skipped.
pub fn has_two_cores() -> bool {
    let enough = core_count() >= 2;
    if !enough {
        skip("this machine has one core, and the test needs two");
    }
    enough
}

/// Whether a program is installed. If not, reports that the test is skipped.
pub fn is_installed(program: &str) -> bool {
    let found =
        Command::new("sh").args(["-c", &format!("command -v {program}")]).stdout(Stdio::null()).status();
    let is_there = found.is_ok_and(|status| status.success());
    if !is_there {
        skip(format_args!("{program} is not installed"));
    }
    is_there
}

/// Whether the tests run as root. If not, reports that the test is skipped.
pub fn is_root() -> bool {
    let is_root = nix::unistd::Uid::effective().is_root();
    if !is_root {
        skip("the test needs root, to run programs as several users");
    }
    is_root
}

/// Whether jobs can have cpusets on this machine. If not, reports that the test is skipped.
pub fn has_cpusets() -> bool {
    let hierarchy = pjw_tests::cpusets::find_hierarchy();
    if let Err(NoCpusets(why)) = &hierarchy {
        skip(why);
    }
    hierarchy.is_ok()
}
