//! Sample replies for the tests of several renderers.

use jiff::Timestamp;
use pjw_ipc::wire::{Core, Fits, Job, Node, Pool, Status, Thread, Warning};

use super::{Terminal, UserNames};

/// An output for tests: 80 columns wide, without colours.
pub(crate) const PLAIN_TERMINAL: Terminal = Terminal { width: 80, has_colours: false };
/// An output for tests: 80 columns wide, with colours.
pub(crate) const COLOURED_TERMINAL: Terminal = Terminal { width: 80, has_colours: true };

/// Returns the present time in tests: five minutes after the start of the jobs that [`job`] makes.
pub(crate) fn now() -> Timestamp {
    "2026-05-04T12:05:00Z".parse().unwrap()
}

/// Returns the user names in tests: `root` for the user id 0, and `alice` for 1000.
pub(crate) fn names() -> UserNames {
    [(0, "root".to_owned()), (1000, "alice".to_owned())].into()
}

/// Makes a job for tests. `id` is its id, such as `slurm:7`. `cpus` is the list of its CPUs, one for each of its cores.
/// If `cpus` is empty, the job waits for cores.
pub(crate) fn job(id: &str, cpus: &str) -> Job {
    let cores = cpus.parse::<pjw_core::cpuset::CpuSet>().unwrap().len();
    Job {
        id: id.into(),
        source: id.split(':').next().unwrap().into(),
        owner: 1000,
        state: if cpus.is_empty() { "waiting" } else { "running" }.into(),
        class: "normal".into(),
        requested_cores: u32::try_from(cores).unwrap(),
        cpus: cpus.into(),
        granted_by: "warden".into(),
        enforcement: "affinity".into(),
        processes: 1,
        threads: 12,
        hot: 2,
        pinned: 2,
        since: "2026-05-04T12:00:00Z".into(),
        ..Job::default()
    }
}

/// Makes `count` cores for tests, each with `pus` PUs (logical CPUs). The PUs are numbered core by core. `per_l3`,
/// `per_node` and `per_package` are the numbers of cores in one L3 cache, one NUMA node and one package.
pub(crate) fn cores(count: u32, pus: u32, per_l3: u32, per_node: u32, per_package: u32) -> Vec<Core> {
    let core = |n: u32| Core {
        cpus: if pus == 1 { n.to_string() } else { format!("{}-{}", n * pus, n * pus + pus - 1) },
        package: Some(n / per_package),
        numa_node: Some(n / per_node),
        l3: Some(n / per_l3),
    };
    (0..count).map(core).collect()
}

/// Makes a status of the daemon for tests. The machine has two packages, each with four cores of two PUs (logical
/// CPUs). One job holds two cores, and one core is reserved for the system.
pub(crate) fn status() -> Status {
    Status {
        schema: 1,
        version: "0.1.0".into(),
        pid: 812,
        mode: "enforce".into(),
        discovery: "netlink".into(),
        node: Node {
            hostname: "node7".into(),
            cpus: "0-15".into(),
            cores: 8,
            packages: 2,
            numa_nodes: 2,
            l3: 2,
        },
        pool: Pool {
            housekeeping: "0-1".into(),
            free: "6-15".into(),
            allocated: "2-5".into(),
            ..Pool::default()
        },
        fits: Fits { l3: 4, numa_node: 4, package: 4, machine: 5 },
        jobs: vec![Job { requested_cores: 2, ..job("manual:a", "2-5") }],
        warnings: Vec::new(),
        cores: cores(8, 2, 4, 4, 4),
        job_files: "/run/pjwd/jobs".into(),
        variables: None,
        lending: None,
    }
}

/// Makes a warning of the daemon for tests: its code, the id of its job, its text, and its remedy.
pub(crate) fn warning(code: &str, job: &str, text: &str, remedy: &str) -> Warning {
    Warning { code: code.into(), job: job.into(), text: text.into(), remedy: remedy.into() }
}

/// Makes three threads for tests: one hot thread that is pinned to a PU (logical CPU), and two idle threads. The name
/// of one idle thread contains control characters.
pub(crate) fn threads() -> Vec<Thread> {
    let cold = |tid: u32, comm: &str| Thread {
        tid,
        comm: comm.into(),
        state: "S".into(),
        demand: 3,
        last_cpu: 2,
        allowed: "2-3".into(),
        because: "it sleeps most of the time and floats on its job's cores".into(),
        ..Thread::default()
    };
    let hot = Thread {
        tid: 100,
        comm: "solver".into(),
        state: "R".into(),
        demand: 998,
        hot: true,
        last_cpu: 3,
        allowed: "3".into(),
        pinned: Some(3),
        because: "it wants a CPU 99.8% of the time: one of 2 hot threads on 2 cores".into(),
    };
    vec![hot, cold(101, "io"), cold(102, "evil\x1b[2J\nname")]
}

/// Returns `text` without its terminal escape sequences, such as colours.
pub(crate) fn without_colour(text: &str) -> String {
    anstream::adapter::strip_str(text).to_string()
}
