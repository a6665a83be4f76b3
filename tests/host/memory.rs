//! The memory of jobs: by the pages of real farms of processes, beside a sum over their `smaps`.

use std::fs;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use pjw_core::ids::Pid;
use pjw_tests::daemon::Daemon;
use pjw_tests::skipping::skip;
use pjw_tests::waiting::wait_until;
use serde_json::Value;

use crate::processes::{KillOnDrop, Shell, is_installed, is_root};

/// A farm: a parent with 200 MiB, and four forked workers with 20 MiB of their own each. With `early`, the workers are
/// forked first, and each makes the 200 MiB itself. Prints the pids of the workers, and then sleeps. With a third
/// argument, the workers become larger by so many MiB in each second.
pub const FARM: &str = r#"
import os, signal, sys, time
early, grow = sys.argv[1] == "early", int(sys.argv[2])
MIB = 1 << 20
def make(mebibytes):
    block = bytearray(mebibytes * MIB)
    for at in range(0, len(block), 4096):
        block[at] = 1
    return block
def work(common):
    own = [make(200)] if common is None else []
    own.append(make(20))
    os.write(ready, b"x")
    while True:
        time.sleep(1)
        if grow:
            own.append(make(grow))
common = None if early else make(200)
done, ready = os.pipe()
workers = []
for _ in range(4):
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        work(common)
    workers.append(pid)
count = 0
while count < 4:
    count += len(os.read(done, 4))
print(*workers, flush=True)
signal.pause()
"#;

/// A farm in a process group of its own, which ends with this value.
pub struct Farm {
    shell: Shell,
    workers: Vec<u32>,
}

impl Farm {
    pub fn start(kind: &str, grow: u32) -> Self {
        let mut shell = Shell::start();
        let dir = std::env::temp_dir().join(format!("pjw-farm-{}-{kind}.py", shell.pid()));
        fs::write(&dir, FARM).unwrap();
        let workers = shell.run(&format!("exec python3 {} {kind} {grow}", dir.display()));
        fs::remove_file(dir).unwrap();
        let workers: Vec<u32> = workers.split_whitespace().map(|pid| pid.parse().unwrap()).collect();
        assert_eq!(workers.len(), 4);
        Self { shell, workers }
    }

    fn pids(&self) -> Vec<u32> {
        [&[self.shell.pid()], &self.workers[..]].concat()
    }

    pub fn assign(&self, daemon: &Daemon) {
        daemon.assign("farm", 1, &self.pids()).unwrap();
    }
}

/// The sums of RSS, PSS and USS over the mappings of these processes, in bytes.
fn sum_over_smaps(pids: &[u32]) -> [u64; 3] {
    let texts: Vec<String> =
        pids.iter().map(|pid| fs::read_to_string(format!("/proc/{pid}/smaps")).unwrap()).collect();
    let sum = |names: &[&str]| {
        let lines = texts.iter().flat_map(|text| text.lines());
        let values = lines.filter_map(|line| {
            let (name, rest) = line.split_once(':')?;
            let value = rest.trim().strip_suffix(" kB")?;
            names.contains(&name).then(|| value.parse::<u64>().unwrap() * 1024)
        });
        values.sum()
    };
    [sum(&["Rss"]), sum(&["Pss"]), sum(&["Private_Clean", "Private_Dirty"])]
}

/// Reads the memory of `farm` until the sums over the mappings are the same before and after the reading. Returns the
/// last reading, these sums, and the number of readings, which is at least two. A page of the Python interpreter that
/// only the farm maps is private until another test starts Python: 2.4 MB of the 88 MB of private memory.
fn memory_between_equal_sums(daemon: &Daemon, farm: &Farm) -> (Value, [u64; 3], usize) {
    let mut readings = vec![memory(daemon)];
    let mut sums = sum_over_smaps(&farm.pids());
    wait_until("no other process maps or unmaps a file of the farm during a reading", || {
        let before = sums;
        readings.push(memory(daemon));
        sums = sum_over_smaps(&farm.pids());
        before == sums
    });
    (readings.pop().expect("a reading"), sums, readings.len() + 1)
}

pub fn show(daemon: &Daemon, arguments: &[&str]) -> Value {
    let id = daemon.job_id("farm");
    let words = [&["show", id.as_str(), "--json"], arguments].concat();
    let output = daemon.pjwctl(&words);
    assert!(output.status.success(), "{output:?}");
    serde_json::from_slice(&output.stdout).unwrap()
}

pub fn memory(daemon: &Daemon) -> Value {
    show(daemon, &["--memory"])["memory"].clone()
}

pub fn number(value: &Value) -> u64 {
    value.as_u64().unwrap_or_else(|| panic!("{value} is no number"))
}

/// Whether two numbers differ by at most so many permille of the second one.
pub fn agree(one: u64, other: u64, permille: u64) -> bool {
    one.abs_diff(other) * 1000 <= other * permille
}

#[test]
fn the_memory_of_a_sleeping_farm_is_that_of_a_sum_over_smaps() {
    if !is_installed("python3") {
        return;
    }
    let farm = Farm::start("late", 0);
    let daemon = Daemon::start("");
    farm.assign(&daemon);
    let (read, [rss, pss, uss], readings) = memory_between_equal_sums(&daemon, &farm);
    assert_eq!(read["source"], "smaps");
    assert!(agree(number(&read["rss"]), rss, 20), "{} {rss}", read["rss"]);
    assert!(agree(number(&read["pss"]), pss, 20), "{} {pss}", read["pss"]);
    assert!(agree(number(&read["uss"]), uss, 20), "{} {uss}", read["uss"]);
    let shared = (rss - uss) * 1000 / rss;
    assert!(agree(number(&read["shared_permille"]), shared, 20), "{} {shared}", read["shared_permille"]);
    assert!(shared >= 750, "a late fork shares most pages: {shared}");
    assert_eq!((number(&read["address_spaces"]), number(&read["gone"])), (5, 0));
    assert!(number(&read["page_tables"]) > 0 && number(&read["available"]) > 0, "{read}");
    let of_each: Vec<u64> =
        read["processes"].as_array().unwrap().iter().map(|one| number(&one["page_tables"])).collect();
    assert!(of_each.iter().all(|&bytes| bytes > 0), "each process has page tables: {read}");
    assert_eq!(of_each.iter().sum::<u64>(), number(&read["page_tables"]));
    let pids: Vec<u64> =
        read["processes"].as_array().unwrap().iter().map(|one| number(&one["pid"])).collect();
    let mut expected: Vec<u64> = farm.pids().into_iter().map(u64::from).collect();
    expected.sort_unstable();
    assert_eq!(pids, expected);
    for worker in read["processes"].as_array().unwrap().iter().filter(|one| one["pid"] != farm.shell.pid()) {
        let (rss, uss) = (number(&worker["rss"]), number(&worker["uss"]));
        assert!((rss - uss) * 1000 / rss >= 750, "{worker}");
    }
    assert_eq!(read["history"].as_array().unwrap().len(), readings, "each reading is kept");
}

#[test]
fn workers_that_were_forked_early_share_little() {
    if !is_installed("python3") {
        return;
    }
    // The farm has more than 1 GiB, so it starts when this test has its turn.
    let daemon = Daemon::start("");
    let farm = Farm::start("early", 0);
    farm.assign(&daemon);
    let read = memory(&daemon);
    assert!(number(&read["shared_permille"]) < 100, "{}", read["shared_permille"]);
    assert!(number(&read["uss"]) > 4 * (200 << 20), "{}", read["uss"]);
}

#[test]
fn the_memory_on_each_numa_node_is_read_on_request() {
    if !is_installed("python3") {
        return;
    }
    if !PathBuf::from("/proc/self/numa_maps").exists() {
        skip("this kernel has no numa_maps");
        return;
    }
    let farm = Farm::start("late", 0);
    let daemon = Daemon::start("");
    farm.assign(&daemon);
    assert_eq!(memory(&daemon)["by_node"].as_object().unwrap().len(), 0);
    let read = show(&daemon, &["--memory", "--nodes"])["memory"].clone();
    let on_all_nodes = |of: &Value| of["by_node"].as_object().unwrap().values().map(number).sum::<u64>();
    assert!(agree(on_all_nodes(&read), number(&read["rss"]), 20), "{read}");
    for process in read["processes"].as_array().unwrap() {
        assert!(agree(on_all_nodes(process), number(&process["rss"]), 20), "{process}");
    }
    let text = daemon.pjwctl(&["show", &daemon.job_id("farm"), "--memory", "--nodes"]);
    let text = String::from_utf8_lossy(&text.stdout).into_owned();
    assert!(text.contains("        swap  page tables\n") && text.contains("       pid      node "), "{text}");
}

/// A process with 100 MiB and a child with the same address space, as the tasks of Process-in-Process have it.
const ONE_ADDRESS_SPACE: &str = r#"
#define _GNU_SOURCE
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>
static int task(void *unused) { (void)unused; prctl(PR_SET_PDEATHSIG, SIGKILL); for (;;) pause(); }
int main(void) {
    char *stack = malloc(1 << 20), *data = malloc(100 << 20);
    memset(data, 1, 100 << 20);
    int pid = clone(task, stack + (1 << 20), CLONE_VM | SIGCHLD, NULL);
    printf("%d\n", pid);
    fflush(stdout);
    for (;;) pause();
}
"#;

#[test]
fn processes_with_one_address_space_are_counted_once() {
    if !is_installed("cc") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let (source, program) = (dir.path().join("tasks.c"), dir.path().join("tasks"));
    fs::write(&source, ONE_ADDRESS_SPACE).unwrap();
    assert!(Command::new("cc").arg("-o").args([&program, &source]).status().unwrap().success());
    let mut shell = Shell::start();
    let task: u32 = shell.run(&format!("exec {}", program.display())).parse().unwrap();
    let daemon = Daemon::start("");
    daemon.assign("farm", 1, &[shell.pid(), task]).unwrap();
    let shown = show(&daemon, &["--memory"]);
    let read = &shown["memory"];
    let spaces: Vec<&Value> =
        read["processes"].as_array().unwrap().iter().map(|process| &process["address_space"]).collect();
    if pjw_linux::sys::kcmp::compare_address_spaces(Pid(task), Pid(task)).is_err() {
        skip("this kernel or this user has no kcmp");
        return;
    }
    assert_eq!(number(&read["address_spaces"]), 1, "{read}");
    assert!(spaces[0].is_u64() && spaces[0] == spaces[1], "{shown}");
    let [rss, _, _] = sum_over_smaps(&[shell.pid()]);
    assert!(agree(number(&read["rss"]), rss, 20), "the pages of both count once: {read}");
    assert_eq!(read["processes"].as_array().unwrap().len(), 2);
}

#[test]
fn processes_that_end_are_no_error() {
    let daemon = Daemon::start("");
    let mut shell = Shell::start();
    daemon.assign("farm", 1, &[shell.pid()]).unwrap();
    shell.send_line("while :; do /bin/true; done");
    for _ in 0..50 {
        let read = memory(&daemon);
        assert!(read["denied"].as_array().unwrap().is_empty(), "{read}");
        assert!(number(&read["rss"]) > 0, "{read}");
    }
}

#[test]
fn a_process_that_may_not_be_read_is_named_with_its_user_and_the_reason() {
    if !is_root() || !is_installed("setpriv") {
        return;
    }
    // Since Linux 6.15 CAP_PERFMON, which CAP_SYS_ADMIN includes, suffices for reading.
    let set = "-sys_ptrace,-perfmon,-sys_admin";
    let daemon = Daemon::start_by(&["setpriv", "--bounding-set", set, "--"]);
    let mut command = Command::new("sh");
    command.uid(65_534).gid(65_534);
    let others = Shell::from_command(command);
    // A process with more capabilities than the daemon can't be read either.
    let mut command = Command::new("setpriv");
    command.args(["--bounding-set", set, "--", "sh"]);
    let mut own = Shell::from_command(command);
    assert_eq!(own.run("echo ready"), "ready");
    daemon.assign("farm", 1, &[others.pid(), own.pid()]).unwrap();
    let read = memory(&daemon);
    let denied = read["denied"].as_array().unwrap();
    assert_eq!((denied.len(), number(&denied[0]["pid"])), (1, u64::from(others.pid())), "{read}");
    assert_eq!(denied[0]["uid"], 65_534);
    let why = denied[0]["why"].as_str().unwrap();
    assert!(
        why.starts_with("it belongs to user 65534, and pjwd runs as user 0 without CAP_SYS_PTRACE"),
        "{why}"
    );
    assert!(number(&read["rss"]) > 0, "the others are read: {read}");
    let text = daemon.pjwctl(&["show", &daemon.job_id("farm"), "--memory"]);
    let text = String::from_utf8_lossy(&text.stdout).into_owned();
    assert!(text.contains(&format!("process {} could not be read: it belongs to", others.pid())), "{text}");
}

#[test]
fn a_job_that_does_not_exist_has_no_memory() {
    let daemon = Daemon::start("");
    let refused = daemon.pjwctl(&["show", &daemon.job_id("nothing"), "--memory"]);
    let message = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert_eq!(refused.status.code(), Some(1));
    assert!(message.contains("there is no job") && message.lines().count() == 1, "{message}");
}

/// The number of memory cgroups that were made: each test has one of its own.
static CGROUPS: AtomicU32 = AtomicU32::new(0);

/// A memory cgroup of this test, if this user may make one. It is removed with this value.
pub struct MemoryCgroup(pub PathBuf);

impl MemoryCgroup {
    pub fn make() -> Option<Self> {
        let mounts = pjw_linux::cgroup::CgroupMounts::read();
        let v1 =
            mounts.v1_mounts.iter().find(|(options, _)| options.split(',').any(|option| option == "memory"));
        let root = v1.map(|(_, root)| root.clone()).or(mounts.v2_mount_point)?;
        let own = fs::read_to_string("/proc/self/cgroup").ok()?;
        let is_line = |controllers: &str| match v1 {
            Some(_) => controllers.split(',').any(|controller| controller == "memory"),
            None => controllers.is_empty(),
        };
        let path = own.lines().find_map(|line| {
            let mut parts = line.splitn(3, ':').skip(1);
            is_line(parts.next()?).then_some(parts.next()?)
        })?;
        // In v2, only a cgroup without processes can have children with controllers: the root, for example.
        let places = [root.join(path.trim_start_matches('/')), root];
        places.iter().find_map(|place| {
            let number = CGROUPS.fetch_add(1, Ordering::Relaxed);
            let dir = place.join(format!("pjw-test-{}-{number}", std::process::id()));
            fs::create_dir(&dir).ok()?;
            let made = Self(dir);
            made.0.join("memory.stat").exists().then_some(made)
        })
    }

    pub fn add(&self, pid: u32) {
        fs::write(self.0.join("cgroup.procs"), pid.to_string()).unwrap();
    }

    /// The pages of files that the kernel counts in the cgroup, in bytes: those that a process of it was the first to
    /// read. `cache` in v1 and `file` in v2, Documentation/admin-guide/cgroup-v1/memory.rst and cgroup-v2.rst.
    pub fn file_pages(&self) -> u64 {
        let stat = fs::read_to_string(self.0.join("memory.stat")).unwrap();
        let mut fields = stat.lines().filter_map(|line| line.split_once(' '));
        let (_, bytes) = fields.find(|(name, _)| ["cache", "file"].contains(name)).unwrap();
        bytes.parse().unwrap()
    }
}

impl Drop for MemoryCgroup {
    fn drop(&mut self) {
        wait_until("the cgroup can be removed", || fs::remove_dir(&self.0).is_ok() || !self.0.exists());
    }
}

#[test]
fn the_estimate_of_a_job_with_a_memory_cgroup_agrees_with_its_pages() {
    if !is_installed("python3") {
        return;
    }
    let Some(cgroup) = MemoryCgroup::make() else {
        skip("this user may make no memory cgroup here");
        return;
    };
    let mut shell = Shell::start();
    cgroup.add(shell.pid());
    let script = std::env::temp_dir().join(format!("pjw-farm-{}.py", shell.pid()));
    fs::write(&script, FARM).unwrap();
    let workers = shell.run(&format!("exec python3 {} late 0", script.display()));
    fs::remove_file(script).unwrap();
    let workers: Vec<u32> = workers.split_whitespace().map(|pid| pid.parse().unwrap()).collect();
    let daemon = Daemon::start("");
    daemon.assign("farm", 1, &[&[shell.pid()], &workers[..]].concat()).unwrap();
    let estimate = show(&daemon, &[])["memory"].clone();
    let pages = memory(&daemon);
    assert_eq!(estimate["source"], "cgroup", "{estimate}");
    assert!(estimate["uss"].is_null() && estimate["processes"][0]["pss"].is_null(), "{estimate}");
    assert!(
        agree(number(&estimate["shared_permille"]), number(&pages["shared_permille"]), 50),
        "{estimate} {pages}"
    );
    assert!(
        agree(number(&estimate["pss"]), number(&pages["pss"]), 50),
        "{} {}",
        estimate["pss"],
        pages["pss"]
    );
    let peak = number(&pages["peak"]);
    assert!(peak >= number(&pages["pss"]) * 9 / 10, "{pages}");
    daemon.release("farm").unwrap();
    let report = daemon.pjwctl(&["report", &daemon.job_id("farm"), "--json"]);
    let report: Value = serde_json::from_slice(&report.stdout).unwrap();
    assert!(number(&report["memory_peak"]) >= peak, "the report has it, also in cgroup v1: {report}");
    drop(daemon);
    drop(shell);
    workers.into_iter().map(KillOnDrop).for_each(drop);
}

#[test]
fn a_job_without_a_memory_cgroup_of_its_own_has_no_estimate() {
    let daemon = Daemon::start("");
    let shell = Shell::start();
    daemon.assign("farm", 1, &[shell.pid()]).unwrap();
    let shown = show(&daemon, &[]);
    if !shown["memory"].is_null() {
        assert_eq!(shown["memory"]["source"], "cgroup", "systemd gave the job a cgroup of its own: {shown}");
        return;
    }
    assert_eq!(memory(&daemon)["source"], "smaps");
}
