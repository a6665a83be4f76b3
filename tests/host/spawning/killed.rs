//! `pjwctl spawn` that is killed: nothing of it is left, but the instances that were to live on.

use std::collections::BTreeSet;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, SystemTime};

use nix::unistd::Uid;
use pjw_tests::daemon::Daemon;
use pjw_tests::programs::program_path;
use pjw_tests::waiting::{wait_for, wait_until, wait_until_empty};

use crate::processes::KillOnDrop;

/// The variable in the environment of the instances of a killed pjwctl.
const MARK: &str = "PJW_TEST_SPAWN";
/// A number from which the points in time, the signals and the options follow. Without it they follow from the time.
const SEED: &str = "PJW_TEST_SEED";
/// The points in time at which pjwctl is killed, and the time of the last one after its start.
const KILLS: usize = 50;
const LAST_POINT_MICROSECONDS: u64 = 150_000;
/// The signals that end a process, signal(7). Not SIGSEGV and SIGBUS: a handler of Rust's runtime takes the first one that
/// another process sends before pjwctl has given them their default effect. Not SIGPIPE: Rust's runtime ignores it. The
/// numbers are SIGSTKFLT and SIGIO, whose names not every shell knows, and real-time signals.
const SIGNALS: [&str; 22] = [
    "HUP", "INT", "QUIT", "ILL", "TRAP", "ABRT", "FPE", "KILL", "USR1", "USR2", "ALRM", "TERM", "XCPU",
    "XFSZ", "VTALRM", "PROF", "PWR", "16", "29", "34", "50", "64",
];

/// Random numbers: splitmix64.
struct Random(u64);

impl Random {
    /// Makes random numbers, and prints where they begin.
    fn start() -> Self {
        let of_time = || {
            let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap();
            now.as_secs() ^ (u64::from(now.subsec_nanos()) << 32)
        };
        let seed = std::env::var(SEED).map_or_else(|_| of_time(), |text| text.parse().unwrap());
        println!("to do the same again: {SEED}={seed}");
        Self(seed)
    }

    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % end
    }

    fn one_of<T: Copy>(&mut self, list: &[T]) -> T {
        list[usize::try_from(self.below(list.len() as u64)).unwrap()]
    }
}

/// The processes with the mark of this test in their environment.
fn marked_processes(mark: &str) -> Vec<u32> {
    let line = format!("{MARK}={mark}");
    let has_mark = |pid: &u32| {
        let environ = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        environ.split(|byte| *byte == 0).any(|variable| variable == line.as_bytes())
    };
    let entries = std::fs::read_dir("/proc").unwrap().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).filter(has_mark).collect()
}

/// The marked processes that do not sleep as instances do. A template waits for a message, and a process that has not begun
/// its program has no timer.
fn marked_without_instances(mark: &str) -> Vec<u32> {
    let sleeps = |pid: &u32| {
        std::fs::read_to_string(format!("/proc/{pid}/wchan")).is_ok_and(|place| place.contains("nanosleep"))
    };
    marked_processes(mark).into_iter().filter(|pid| !sleeps(pid)).collect()
}

/// The mounted tmpfs of this process: replicas lie in such.
fn tmpfs_mounts() -> BTreeSet<String> {
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
    mounts.lines().filter(|line| line.contains(" - tmpfs ")).map(str::to_owned).collect()
}

/// Starts `pjwctl spawn` without core dumps: some of the signals make one.
fn start_marked(daemon: Option<&Daemon>, options: &[&str], mark: &str) -> Child {
    let mut command = Command::new("sh");
    // nohup(1), or a shell that started this test in the background, lets it and its children ignore some signals.
    let as_usual = "ulimit -c 0; exec env --default-signal \"$@\"";
    command.args(["-c", as_usual, "sh"]).arg(program_path("pjwctl"));
    match daemon {
        Some(daemon) => command.arg("--socket").arg(daemon.socket()).args(["spawn", "--cores", "1"]),
        None => command.args(["spawn", "--local"]),
    };
    command.args(["-n", "40"]).args(options).args(["--", "sleep", "1000"]).env(MARK, mark);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
}

#[test]
fn pjwctl_killed_at_any_moment_leaves_no_process_no_job_no_mount_and_no_cgroup() {
    let daemon = Daemon::start("");
    let mark = format!("spawn-{}", std::process::id());
    let mut random = Random::start();
    let mounts = tmpfs_mounts();
    let ways: &[&str] = match Uid::effective().is_root() {
        true => &["", "--label", "--async", "--replicate"],
        false => &["", "--label", "--async"],
    };
    for _ in 0..KILLS {
        let daemon_of_job = (random.below(5) > 0).then_some(&daemon);
        let way = random.one_of(ways);
        let proxy = random.one_of(&["--proxy=never", "--proxy=auto"]);
        let (signal, point) = (random.one_of(&SIGNALS), random.below(LAST_POINT_MICROSECONDS));
        let case = format!("{proxy} {way}, SIG{signal} after {point} us");
        let options: Vec<&str> = [proxy, way].into_iter().filter(|option| !option.is_empty()).collect();
        let mut pjwctl = start_marked(daemon_of_job, &options, &mark);
        std::thread::sleep(Duration::from_micros(point));
        let send = format!("kill -{signal} {}", pjwctl.id());
        assert!(Command::new("sh").args(["-c", &send]).status().unwrap().success(), "{case}");
        let status = wait_for("pjwctl ends", || pjwctl.try_wait().unwrap());
        if way == "--async" {
            wait_until_empty(&format!("only instances are left: {case}"), || marked_without_instances(&mark));
            marked_processes(&mark).into_iter().for_each(|pid| drop(KillOnDrop(pid)));
        } else {
            assert!(!status.success(), "{case}: {status}");
        }
        wait_until_empty(&format!("no instance is left: {case}"), || marked_processes(&mark));
        wait_until(&format!("the job is over: {case}"), || daemon.status().jobs.is_empty());
        assert_eq!(tmpfs_mounts(), mounts, "{case}");
    }
    // The daemon's end checks that no cgroup is left.
}
