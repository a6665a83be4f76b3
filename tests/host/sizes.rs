//! The variables that tell a program the size of its job, and `--cores all`.

use std::path::Path;
use std::process::{Command, Output};

use pjw_core::cpuset::CpuSet;
use pjw_tests::daemon::Daemon;
use pjw_tests::waiting::wait_until;

use crate::processes::{has_two_cores, is_installed};

/// The variables that are set without a list in the configuration, each with whether it counts PUs instead of cores.
const DEFAULTS: [(&str, bool); 10] = [
    ("OMP_NUM_THREADS", false),
    ("MKL_NUM_THREADS", false),
    ("OPENBLAS_NUM_THREADS", false),
    ("NUMEXPR_NUM_THREADS", false),
    ("GOMAXPROCS", true),
    ("RAYON_NUM_THREADS", true),
    ("JULIA_NUM_THREADS", false),
    ("PYTHON_CPU_COUNT", true),
    ("ATHENA_PROC_NUMBER", false),
    ("ATHENA_CORE_NUMBER", false),
];
/// A shell command that prints some of the variables.
const PRINT: &str = "echo $OMP_NUM_THREADS $GOMAXPROCS $N";

fn text(output: &Output) -> String {
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout.clone()).unwrap()
}

/// Runs a command that pjwctl starts, without variables from the environment of this test.
fn run(daemon: &Daemon, words: &[&str], own: &[(&str, &str)]) -> Output {
    let mut command: Command = daemon.pjwctl_command(words);
    for name in DEFAULTS.iter().map(|(name, _)| *name).chain(["PJW_VARIABLES"]) {
        command.env_remove(name);
    }
    let output = command.envs(own.iter().copied()).output().unwrap();
    wait_until("the job is over", || daemon.status().jobs.is_empty());
    output
}

fn pus_of_core(daemon: &Daemon, core: usize) -> usize {
    daemon.status().cores[core].cpus.parse::<CpuSet>().unwrap().len()
}

#[test]
fn a_command_has_the_size_of_its_job_in_the_variables_of_the_configuration() {
    let daemon = Daemon::start("");
    let shell = ["run", "--cores", "1", "--", "sh", "-c", PRINT];
    let pus = pus_of_core(&daemon, 0);
    assert_eq!(text(&run(&daemon, &shell, &[])), format!("1 {pus}\n"));
    assert_eq!(text(&run(&daemon, &shell, &[("OMP_NUM_THREADS", "7")])), format!("7 {pus}\n"));
    daemon.configure("[run]\nvariables = [\"N=cores\"]\n");
    assert!(daemon.pjwctl(&["reload"]).status.success());
    assert_eq!(text(&run(&daemon, &shell, &[])), "1\n", "a reload changes the list");
}

#[test]
fn commands_and_instances_have_each_variable_of_the_default_list() {
    let daemon = Daemon::start("");
    let status = daemon.status();
    let pus: usize = status.cores.iter().map(|core| core.cpus.parse::<CpuSet>().unwrap().len()).sum();
    let (cores, pus) = (status.node.cores.to_string(), pus.to_string());
    let line =
        |&(name, counts_pus): &(&str, bool)| format!("{name}={}\n", if counts_pus { &pus } else { &cores });
    let expected: String = DEFAULTS.iter().map(line).collect();
    let print = DEFAULTS.map(|(name, _)| format!("echo {name}=${name}")).join("; ");
    for start in [&["run", "--cores", "all"][..], &["spawn", "-n", "1", "--cores", "all"]] {
        let words = [start, &["--", "sh", "-c", print.as_str()]].concat();
        assert_eq!(text(&run(&daemon, &words, &[])), expected, "{words:?}");
    }
}

#[test]
fn each_instance_has_the_size_of_its_own_part() {
    if !has_two_cores() {
        return;
    }
    let daemon = Daemon::start("[run]\nvariables = [\"OMP_NUM_THREADS=cores\", \"N=cores\"]\n");
    let spawn = |words: &str, own: &[(&str, &str)]| {
        let words: Vec<&str> = words.split_whitespace().chain(["--", "sh", "-c", PRINT]).collect();
        let mut lines: Vec<String> = text(&run(&daemon, &words, own)).lines().map(str::to_owned).collect();
        lines.sort();
        lines
    };
    assert_eq!(spawn("spawn -n 2 --cores 2", &[]), ["1 1", "1 1"]);
    assert_eq!(spawn("spawn -n 1 --cores 2", &[]), ["2 2"]);
    let outer = [("OMP_NUM_THREADS", "9"), ("PJW_VARIABLES", "OMP_NUM_THREADS=9")];
    assert_eq!(spawn("spawn -n 1 --cores 2", &outer), ["2 2"], "the job around it does not count");
    assert_eq!(spawn("spawn -n 2 --cores 2", &[("N", "5")]), ["1 5", "1 5"]);
    let cores: Vec<String> = daemon.status().cores.iter().take(2).map(|core| core.cpus.clone()).collect();
    let both = cores.join(",");
    let map = format!("spawn -n 2 --cores 2 --map {};{both}", cores[0]);
    assert_eq!(spawn(&map, &outer), ["1 1", "2 2"], "parts of other sizes");
    let local = format!("spawn --local -n 1 --map {}", cores[0]);
    let own = [("N", "unset")];
    assert_eq!(
        spawn(&local, &own),
        [format!("1 {} unset", pus_of_core(&daemon, 0))],
        "the defaults without a daemon"
    );
}

#[test]
fn all_cores_are_what_the_machine_has_free() {
    if !has_two_cores() {
        return;
    }
    let daemon = Daemon::start("");
    let all = daemon.status().node.cores;
    let shell = ["run", "--cores", "all", "--", "sh", "-c", "echo $PJW_NCORES $OMP_NUM_THREADS"];
    assert_eq!(text(&run(&daemon, &shell, &[])), format!("{all} {all}\n"));
    let spawn = ["spawn", "-n", "1", "--cores", "all", "--", "sh", "-c", "echo $OMP_NUM_THREADS"];
    assert_eq!(text(&run(&daemon, &spawn, &[])), format!("{all}\n"));
    daemon.assign("other", 1, &[]).unwrap();
    let rest = daemon.pjwctl(&["assign", &daemon.job_id("rest"), "--cores", "all"]);
    assert!(rest.status.success(), "{rest:?}");
    assert_eq!(daemon.job("rest").unwrap().requested_cores, all - 1);
    for words in
        [&["run", "--cores", "all", "--", "true"][..], &["spawn", "-n", "1", "--cores", "all", "--", "true"]]
    {
        let refused = daemon.pjwctl(words);
        assert_eq!(refused.status.code(), Some(1), "{refused:?}");
        let message = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(message.contains("no whole core is free") && message.lines().count() == 1, "{message}");
    }
    let again = daemon.pjwctl(&["assign", &daemon.job_id("rest"), "--cores", "all"]);
    assert!(again.status.success(), "what it has is everything that it can have: {again:?}");
}

/// Builds a program that prints how many threads OpenMP starts. `None` if the compiler can't.
fn openmp_program(dir: &Path) -> Option<String> {
    if !is_installed("cc") {
        return None;
    }
    let (source, program) = (dir.join("threads.c"), dir.join("threads"));
    std::fs::write(
        &source,
        "#include <omp.h>\n#include <stdio.h>\nint main(void) {\n\
         #pragma omp parallel\n#pragma omp single\nprintf(\"%d\\n\", omp_get_num_threads());\nreturn 0; }\n",
    )
    .unwrap();
    let built = Command::new("cc").args(["-fopenmp", "-o"]).arg(&program).arg(&source).output().unwrap();
    if !built.status.success() {
        pjw_tests::skipping::skip("the C compiler has no OpenMP");
        return None;
    }
    Some(program.to_str().unwrap().to_owned())
}

#[test]
fn an_openmp_program_starts_one_thread_per_core_of_its_job() {
    let dir = tempfile::tempdir().unwrap();
    let Some(program) = openmp_program(dir.path()) else { return };
    let daemon = Daemon::start("");
    let words = ["run", "--cores", "1", "--", &program];
    assert_eq!(text(&run(&daemon, &words, &[])), "1\n");
    assert_eq!(text(&run(&daemon, &words, &[("OMP_NUM_THREADS", "3")])), "3\n", "the user's own value");
    let all = daemon.status().node.cores.to_string();
    for proxy in ["never", "auto"] {
        let words = ["spawn", "-n", "1", "--cores", "all", "--proxy", proxy, "--", &program];
        assert_eq!(text(&run(&daemon, &words, &[])), format!("{all}\n"), "{proxy}");
    }
}

#[test]
fn instances_whose_parts_have_the_same_size_share_a_template_and_a_single_one_executes_its_program() {
    let dir = tempfile::tempdir().unwrap();
    let Some(program) = openmp_program(dir.path()).filter(|_| has_two_cores()) else { return };
    let daemon = Daemon::start("");
    let cores: Vec<String> = daemon.status().cores.iter().take(2).map(|core| core.cpus.clone()).collect();
    let equal = cores.join(";");
    let unequal = format!("{};{}", cores[0], cores.join(","));
    let spawn = |instances: &str, map: &str, proxy: &str| {
        let words =
            ["spawn", "-n", instances, "--local", "--json", "--map", map, "--proxy", proxy, "--", &program];
        run(&daemon, &words, &[])
    };
    let mode = |output: &Output| {
        let (text, json) = (text(output), text(output).find('{').unwrap_or_default());
        let mut threads: Vec<String> = text[..json].lines().map(str::to_owned).collect();
        threads.sort();
        let printed: serde_json::Value = serde_json::from_str(&text[json..]).unwrap();
        let word = |name: &str| printed[name].as_str().unwrap().to_owned();
        (threads.join(" "), word("mode"), word("why"))
    };
    let (threads, name, why) = mode(&spawn("2", &unequal, "auto"));
    assert_eq!((threads.as_str(), name.as_str()), ("1 2", "exec"));
    if cfg!(target_arch = "x86_64") {
        assert!(why.contains("different values of"), "{why}");
        // The constructor of the OpenMP library reads OMP_NUM_THREADS when the program is loaded.
        for (instances, map, proxy, expected) in [
            ("2", &equal, "auto", "1 1"),
            ("4", &unequal, "auto", "1 1 2 2"),
            ("5", &unequal, "always", "1 1 1 2 2"),
        ] {
            let (threads, name, why) = mode(&spawn(instances, map, proxy));
            assert_eq!((threads.as_str(), name.as_str()), (expected, "proxy"), "-n {instances}: {why}");
            assert!(why.contains("each instance is a fork"), "-n {instances}: {why}");
        }
        let three = spawn("3", &unequal, "always");
        let (threads, _, why) = mode(&three);
        assert_eq!(threads, "1 1 2", "{why}");
        assert!(why.starts_with("2 of 3 instances are forks") && why.contains("a single instance"), "{why}");
        assert!(String::from_utf8_lossy(&three.stderr).contains(&why), "{three:?}");
    }
    let refused = spawn("2", &unequal, "always");
    let message = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && refused.stdout.is_empty(), "{refused:?}");
    assert!(
        message.contains("nothing was started") && message.contains("--proxy auto or never"),
        "{message}"
    );
}

#[test]
fn a_bad_list_of_variables_is_refused_with_line_and_column() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("pjwd.toml");
    std::fs::write(&file, "[run]\nvariables = [\"GOMAXPROCS=threads\"]\n").unwrap();
    let output = Command::new(pjw_tests::programs::program_path("pjwd"))
        .args(["--check-config", "--config"])
        .arg(&file)
        .output()
        .unwrap();
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success());
    assert!(
        message.contains("pjwd.toml:2:14: run.variables: \"threads\" is no unit of GOMAXPROCS"),
        "{message}"
    );
}
