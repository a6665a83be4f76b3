//! The prolog, epilog and task prolog of Slurm.

use std::path::PathBuf;
use std::process::Output;

use pjw_tests::daemon::Daemon;
use pjw_tests::programs::program_path;

use super::{Call, core_count_of, patient_hook, use_cpu_time};
use crate::processes::has_two_cores;

pub const PROLOG: &str = include_str!("../../../crates/pjw-sources/tests/fixtures/slurm-prolog.environ.txt");
pub const EPILOG: &str = include_str!("../../../crates/pjw-sources/tests/fixtures/slurm-epilog.environ.txt");
const STEP: &str =
    include_str!("../../../crates/pjw-sources/tests/fixtures/slurm-task-prolog-step.environ.txt");
const BATCH: &str =
    include_str!("../../../crates/pjw-sources/tests/fixtures/slurm-task-prolog-batch.environ.txt");

struct Node {
    daemon: Daemon,
}

impl Node {
    fn start(config: &str) -> Self {
        Self { daemon: Daemon::start(config) }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.daemon.dir().join(name)
    }

    /// Returns the call of a shipped hook with a recorded environment. The configuration files of Slurm are in the
    /// directory of this node.
    fn hook(&self, name: &str, environment: &str) -> Call {
        let file = patient_hook(self.daemon.dir(), &format!("slurm/{name}.sh"));
        let conf = self.path("slurm.conf");
        Call::new(file)
            .with_environment(environment)
            .with_variable("SLURM_CONF", conf.to_str().unwrap())
            .with_socket(&self.daemon.socket())
    }
}

/// Runs a hook that waits until its time limit. On a busy machine, it may have no time left to say what it waited for.
/// Then it is run again.
fn output_in_time(call: impl Fn() -> Call) -> Output {
    let is_in_time = |output: &Output| !String::from_utf8_lossy(&output.stderr).contains(" within ");
    let mut outputs = (0..10).map(|_| call().output());
    outputs.find(is_in_time).expect("every call took too long")
}

#[test]
fn a_prolog_reserves_cores_and_an_epilog_releases_them() {
    if !has_two_cores() {
        return;
    }
    let node = Node::start("");
    let free = node.daemon.status().pool.free;
    for _ in 0..2 {
        node.hook("prolog", PROLOG).assert_silent_success();
        let job = node.daemon.job("slurm:4").unwrap();
        assert_eq!((job.owner, job.state.as_str(), job.granted_by.as_str()), (1001, "reserved", "warden"));
        assert_eq!(job.cpus.parse::<pjw_core::cpuset::CpuSet>().unwrap().len() % 2, 0, "{job:?}");
        assert_eq!(node.daemon.status().jobs.len(), 1);
    }
    for _ in 0..2 {
        node.hook("epilog", EPILOG).assert_silent_success();
        assert!(node.daemon.status().jobs.is_empty());
        assert_eq!(node.daemon.status().pool.free, free);
    }
    node.hook("prolog", PROLOG).assert_silent_success();
    assert!(node.daemon.job("slurm:4").is_some(), "a requeued job has the same id");
}

#[test]
fn many_prologs_at_once_serve_as_many_jobs_as_there_are_cores() {
    let node = Node::start("");
    let cores = node.daemon.status().node.cores;
    let jobs = (3 * cores).min(48);
    std::thread::scope(|scope| {
        for id in 0..jobs {
            let id = (100 + id).to_string();
            let call = node
                .hook("prolog", PROLOG)
                .with_variable("SLURM_JOB_ID", &id)
                .with_variable("SLURM_JOB_CPUS_PER_NODE", "1");
            scope.spawn(move || assert!(call.output().status.success()));
        }
    });
    let served = node.daemon.status().jobs;
    assert_eq!(served.len(), jobs.min(cores) as usize, "{served:?}");
}

#[test]
fn the_core_count_is_that_of_this_node_and_can_be_overridden() {
    if !has_two_cores() {
        return;
    }
    let node = Node::start("");
    let many = |call: Call| {
        call.with_variable("SLURM_NODELIST", "a[1-2],n1").with_variable("SLURM_JOB_CPUS_PER_NODE", "64(x2),1")
    };
    many(node.hook("prolog", PROLOG)).assert_silent_success();
    assert_eq!(node.daemon.job("slurm:4").unwrap().requested_cores, 1);
    let hook = ["hook", "slurm-prolog", "--timeout", "60", "--cores", "2"];
    let call = Call::new(program_path("pjwctl")).with_environment(PROLOG).with_socket(&node.daemon.socket());
    call.with_variable("SLURM_JOB_CPUS_PER_NODE", "1").args(&hook).assert_silent_success();
    assert_eq!(node.daemon.job("slurm:4").unwrap().requested_cores, 2);
}

#[test]
fn the_prolog_reserves_no_cores_if_slurm_chooses_them() {
    if !has_two_cores() {
        return;
    }
    let node = Node::start("");
    std::fs::write(node.path("slurm.conf"), "TaskPlugin=task/cgroup,task/affinity\n").unwrap();
    for conf in ["ConstrainCores=yes\n", "ConstrainCores=true\n", "Include site.conf\n"] {
        std::fs::write(node.path("cgroup.conf"), conf).unwrap();
        node.hook("prolog", PROLOG).assert_silent_success();
        assert!(node.daemon.status().jobs.is_empty(), "{conf:?}");
    }
    std::fs::write(node.path("cgroup.conf"), "ConstrainCores=no\n").unwrap();
    node.hook("prolog", PROLOG).assert_silent_success();
    assert!(node.daemon.job("slurm:4").is_some());
}

#[test]
fn a_task_gets_its_cores_and_nothing_else_in_variables() {
    if !has_two_cores() {
        return;
    }
    let node = Node::start("[run]\nvariables = [\"OMP_NUM_THREADS=cores\", \"GOMAXPROCS=pus\"]\n");
    node.hook("prolog", PROLOG).assert_silent_success();
    let cpus = node.daemon.job("slurm:4").unwrap().cpus;
    let cores = core_count_of(&node.daemon, &cpus);
    let variables = |call: Call| {
        let output = call.output();
        assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    let directory = node.daemon.state_dir().join("jobs/slurm:4");
    let directory = format!("export PJW_JOB_DIR={}\n", directory.display());
    let grant = format!("export PJW_CPUS={cpus}\nexport PJW_NCORES={cores}\n{directory}");
    let sizes = |count: u32| {
        let record = format!("export PJW_VARIABLES=OMP_NUM_THREADS={count}:GOMAXPROCS={count}\n");
        format!("export OMP_NUM_THREADS={count}\nexport GOMAXPROCS={count}\n{record}")
    };
    let places = "export OMP_PLACES=threads\n";
    for environment in [STEP, BATCH] {
        assert_eq!(variables(node.hook("task-prolog", environment)), format!("{grant}{}{places}", sizes(2)));
    }
    let in_batch_script = node
        .hook("task-prolog", STEP)
        .with_variable("OMP_NUM_THREADS", "5")
        .with_variable("PJW_VARIABLES", "OMP_NUM_THREADS=5:GOMAXPROCS=5");
    assert_eq!(
        variables(in_batch_script),
        format!("{grant}{}{places}", sizes(2)),
        "a step does not keep what the batch script was told"
    );
    let chosen = node
        .hook("task-prolog", STEP)
        .with_variable("OMP_NUM_THREADS", "7")
        .with_variable("GOMAXPROCS", "7")
        .with_variable("OMP_PLACES", "sockets");
    assert_eq!(variables(chosen), grant, "variables of the user are not changed");
    let four = node.hook("task-prolog", STEP).with_variable("SLURM_STEP_TASKS_PER_NODE", "2");
    let four = variables(four.with_variable("SLURM_CPUS_PER_TASK", "1"));
    assert_eq!(four, format!("{grant}{}", sizes(1)), "tasks that share a mask get no OMP_PLACES");
}

#[test]
fn a_task_waits_until_its_job_gets_cores() {
    if !has_two_cores() {
        return;
    }
    let node = Node::start("on_exhausted = \"wait\"\n");
    let all = node.daemon.status().node.cores;
    node.daemon.assign("other", all, &[]).unwrap();
    node.hook("prolog", PROLOG).assert_warning("waits for free cores");
    let socket = node.daemon.socket();
    let call = Call::new(program_path("pjwctl")).with_environment(STEP).with_socket(&socket);
    let task =
        std::thread::spawn(move || call.args(&["hook", "slurm-task-prolog", "--timeout", "30"]).output());
    node.daemon.release("other").unwrap();
    let output = task.join().unwrap();
    assert!(String::from_utf8_lossy(&output.stdout).starts_with("export PJW_CPUS="), "{output:?}");
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
}

#[test]
fn a_task_starts_only_when_it_is_on_its_cores() {
    if !has_two_cores() {
        return;
    }
    // With this configuration the daemon does not find the task. It is in the job only after the test assigns it.
    let node = Node::start("[sources.slurm]\nenabled = false\n");
    let _: serde_json::Value =
        node.daemon.call("Assign", &serde_json::json!({ "job": "slurm:4", "cores": 1 })).unwrap();
    let cpus = node.daemon.job("slurm:4").unwrap().cpus;
    let task = |timeout| {
        let call =
            Call::new(program_path("pjwctl")).with_environment(STEP).with_socket(&node.daemon.socket());
        call.args(&["hook", "slurm-task-prolog", "--timeout", timeout])
    };
    let output_texts = |output: Output| {
        assert!(output.status.success(), "{output:?}");
        let text = |bytes| String::from_utf8(bytes).unwrap();
        (text(output.stdout), text(output.stderr))
    };

    let (variables, warning) = output_texts(output_in_time(|| task("3")));
    assert!(variables.starts_with(&format!("export PJW_CPUS={cpus}\n")), "{variables}");
    assert!(warning.lines().count() == 1 && warning.contains("has not brought this task to"), "{warning}");

    let waiting = task("60").spawn();
    let request = serde_json::json!({ "job": "slurm:4", "pids": [waiting.id()] });
    let _: serde_json::Value = node.daemon.call("Assign", &request).unwrap();
    let (variables, warning) = output_texts(waiting.wait_with_output().unwrap());
    assert!(variables.starts_with(&format!("export PJW_CPUS={cpus}\n")), "{variables}");
    assert_eq!(warning, "");
}

#[test]
fn a_task_of_an_unknown_job_gets_no_variables() {
    let node = Node::start("");
    let task = || {
        let call =
            Call::new(program_path("pjwctl")).with_environment(STEP).with_socket(&node.daemon.socket());
        call.args(&["hook", "slurm-task-prolog", "--timeout", "3"])
    };
    let output = output_in_time(task);
    let warning = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success() && output.stdout.is_empty(), "{output:?}");
    assert!(warning.lines().count() == 1 && warning.contains("knows no job slurm:4"), "{warning}");
    std::fs::write(node.path("pjwd.toml"), "mode = \"observe\"\n").unwrap();
    let _: serde_json::Value = node.daemon.call("Reload", &serde_json::json!({})).unwrap();
    node.hook("task-prolog", STEP).assert_silent_success();
}

#[test]
fn a_job_is_named_by_its_sluid_if_its_cgroup_is() {
    let node = Node::start("");
    let sluid = "s1KZ0000000000";
    let hook = |name, environment| {
        node.hook(name, environment)
            .with_variable("SLURM_JOB_SLUID", sluid)
            .with_variable("SLURM_JOB_CPUS_PER_NODE", "1")
    };
    std::fs::write(node.path("cgroup.conf"), "CgroupJobIdPaths=yes\n").unwrap();
    hook("prolog", PROLOG).assert_silent_success();
    assert!(node.daemon.job("slurm:4").is_some());
    hook("epilog", EPILOG).assert_silent_success();
    std::fs::write(node.path("cgroup.conf"), "").unwrap();
    hook("prolog", PROLOG).assert_silent_success();
    let unified = std::path::Path::new("/sys/fs/cgroup/cgroup.controllers").exists();
    let id = if unified { format!("slurm:{sluid}") } else { "slurm:4".to_owned() };
    assert!(node.daemon.job(&id).is_some(), "{:?}", node.daemon.status().jobs);
    hook("epilog", EPILOG).assert_silent_success();
    assert!(node.daemon.status().jobs.is_empty());
}

#[test]
fn an_epilog_prints_one_line_about_a_job_that_ran() {
    let node = Node::start("[sources.slurm]\nenabled = false\n");
    let request = serde_json::json!({ "job": "slurm:4", "cores": 1 });
    let _: serde_json::Value = node.daemon.call("Assign", &request).unwrap();
    // A process is left, as after an epilog that comes before the end of a background process.
    let _left = use_cpu_time(&node.daemon, "slurm:4");
    node.hook("epilog", EPILOG).assert_line_about("slurm:4");
}
