//! Groups that `pjwctl spawn` refuses: nothing starts, and one line says what is wrong. Instances that fail on their
//! own.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use pjw_core::cpuset::CpuSet;
use pjw_tests::programs::program_path;
use pjw_tests::skipping::skip;
use pjw_tests::waiting::wait_until;
use serde_json::Value;

use super::templates::has_templates;
use super::{local, sorted_lines, text};
use crate::permissions::programs_are_reachable;
use crate::processes::is_root;

/// A user without processes and without privileges, which no other test uses.
const PLAIN_USER: u32 = 65_530;
/// A user of whose processes and threads a test knows the number.
const COUNTED_USER: u32 = 65_531;

/// Runs a shell line as a plain user, with the path of pjwctl in `$0`. A plain user runs it as itself.
fn as_plain_user(line: &str) -> Output {
    let mut shell = Command::new("sh");
    shell.args(["-c", line]).arg(program_path("pjwctl")).env("PATH", "/usr/bin:/bin");
    if nix::unistd::Uid::effective().is_root() {
        shell.uid(PLAIN_USER).gid(PLAIN_USER);
    }
    shell.current_dir("/").stdin(Stdio::null()).output().unwrap()
}

#[test]
fn nothing_starts_if_something_is_wrong_and_one_line_says_what() {
    let dir = tempfile::tempdir().unwrap();
    let marker = dir.path().join("started");
    let marker = marker.to_str().unwrap();
    let touch = ["touch", marker];
    let unknown = ["touch", marker, "%x"];
    let plain_file = dir.path().join("plain");
    std::fs::write(&plain_file, "").unwrap();
    let plain_file = plain_file.to_str().unwrap();
    // Its only argument is longer than execve(2) allows.
    let long = dir.path().join("long");
    std::fs::write(&long, format!("* touch {marker} {}", "x".repeat(200_000))).unwrap();
    let long = format!("-n 2 --multi {}", long.display());
    let (missing, binary) = (dir.path().join("none"), dir.path().join("binary"));
    std::fs::write(&binary, [0x7f, 0x45, 0xff]).unwrap();
    let [missing, binary] = [missing, binary].map(|file| format!("-n 2 --multi {}", file.display()));
    let cases: [(&str, &[&str], i32, &str); 12] = [
        ("-n 0 --", &touch, 1, "the number of instances is 0: start at least 1"),
        ("-n 2 --", &["/no/such/program"], 127, "there is no program /no/such/program: check its name"),
        (
            "-n 2 --",
            &["no-such-program"],
            127,
            "there is no program no-such-program: check its name, and PATH",
        ),
        ("-n 2 --", &[dir.path().to_str().unwrap()], 126, "it is a directory; name the program in it"),
        ("-n 2 --", &[plain_file], 126, "it may not be executed; check its permissions"),
        ("-n 2 --", &unknown, 1, "unknown placeholder %x: use %r for the rank"),
        ("-n 2 --map 0;8000 --", &touch, 1, "the part 8000 of the map is not inside the CPUs"),
        ("-n 100000000 --", &touch, 1, "there is room for"),
        ("-n 2 --multi /dev/zero", &[], 1, "can't read /dev/zero: it has more than 1 MiB: name a file"),
        (
            &long,
            &[],
            1,
            "/long: line 1: argument 2 has 200001 bytes with its NUL byte, and execve(2) takes at most",
        ),
        (
            &missing,
            &[],
            1,
            "No such file or directory (os error 2); give the path of a text file with a line",
        ),
        (&binary, &[], 1, "it is no text in UTF-8; give the path of a text file with a line"),
    ];
    for (line, command, code, message) in cases {
        let output = local(line, command);
        let error = text(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{line}: {error}");
        assert!(
            error.starts_with("pjwctl: nothing was started: ") && error.contains(message),
            "{line}: {error}"
        );
        assert_eq!(error.lines().count(), 1, "{error}");
    }
    assert!(!Path::new(marker).exists());
}

#[test]
fn the_number_of_instances_is_checked_before_there_is_memory_for_each() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("multi");
    std::fs::write(&file, "* true\n").unwrap();
    for command in ["-- true".to_owned(), format!("--multi {}", file.display())] {
        // The ranks alone would take 16 GiB.
        let line = format!("ulimit -v 4000000; exec \"$0\" spawn --local -n 4294967295 {command}");
        let output = Command::new("sh").args(["-c", &line]).arg(program_path("pjwctl")).output().unwrap();
        let error = text(&output.stderr);
        assert_eq!((output.status.code(), error.lines().count()), (Some(1), 1), "{command}: {error}");
        assert!(error.contains("and 4294967295 were asked for: "), "{command}: {error}");
    }
}

#[test]
fn more_instances_than_pids_max_allows_are_refused_beforehand() {
    if !is_root() {
        return;
    }
    let Some(hierarchy) = pids_hierarchy() else {
        skip("the pids controller is not available in a hierarchy that can be written");
        return;
    };
    let cgroup = hierarchy.join(format!("pjw-test-{}", std::process::id()));
    std::fs::create_dir(&cgroup).unwrap();
    std::fs::write(cgroup.join("pids.max"), "20").unwrap();
    let program = program_path("pjwctl");
    let run = |instances: u32| {
        let enter = format!("echo $$ >{}/cgroup.procs && exec \"$@\"", cgroup.display());
        let mut shell = Command::new("sh");
        shell.args([
            "-c",
            &enter,
            "sh",
            program.to_str().unwrap(),
            "spawn",
            "--local",
            "-n",
            &instances.to_string(),
        ]);
        shell.args(["--", "true"]).output().unwrap()
    };
    let (few, many) = (run(4), run(40));
    wait_until("the cgroup can be removed", || std::fs::remove_dir(&cgroup).is_ok());
    assert!(few.status.success(), "{few:?}");
    let error = text(&many.stderr);
    assert_eq!(many.status.code(), Some(1), "{error}");
    assert!(error.contains("pids.max is 20") && error.contains("start fewer, or raise it"), "{error}");
}

/// A limit of 20 processes for pjwctl and all that it starts.
struct LimitOf20<'a> {
    /// A shell line that ends in `"$@"` and gives pjwctl the limit.
    enter: &'a str,
    /// The user of pjwctl. `None` for that of the test.
    uid: Option<u32>,
    /// Whether no process counts for the limit any more.
    is_unused: &'a dyn Fn() -> bool,
}

/// Starts `sleep` so often with the words of `line`, at the limit. Returns how many have begun, and the text on
/// standard error. The instances are killed.
fn begun_at_limit(limit: &LimitOf20<'_>, line: &str) -> (usize, String) {
    let mut shell = Command::new("sh");
    shell
        .args(["-c", limit.enter, "sh"])
        .arg(program_path("pjwctl"))
        .args(["spawn", "--local", "--async", "--json"]);
    shell.args(line.split_whitespace()).args(["--", "sh", "-c", "exec >/dev/null 2>&1; exec sleep 1000"]);
    shell.env("PATH", "/usr/bin:/bin").current_dir("/").stdin(Stdio::null());
    if let Some(uid) = limit.uid {
        shell.uid(uid).gid(uid);
    }
    let output = shell.output().unwrap();
    let report: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
    let instances = report["instances"].as_array().cloned().unwrap_or_default();
    let pids: Vec<u32> =
        instances.iter().filter_map(|instance| u32::try_from(instance["pid"].as_u64()?).ok()).collect();
    pids.iter().for_each(|pid| drop(crate::processes::KillOnDrop(*pid)));
    // A process that has ended counts until it is waited for. This applies to a template too.
    wait_until("the instances have ended, and what started them", limit.is_unused);
    (pids.len(), text(&output.stderr))
}

/// pjwctl itself, N instances, and a thread for each part of the CPUs, or for all together a thread and a template.
fn check_that_starters_count(limit: &LimitOf20<'_>) {
    let cpus: Vec<String> = affinity().iter().map(|pu| pu.0.to_string()).collect();
    let one = format!("--map {}", cpus[0]);
    let template = if cfg!(target_arch = "x86_64") { 1 } else { 0 };
    let mut cases = vec![(one.clone(), 18), (format!("{one} --proxy auto"), 18 - template)];
    if cpus.len() > 1 {
        cases.push((format!("--map {};{}", cpus[0], cpus[1]), 17));
    }
    for (map, most) in cases {
        let (begun, error) = begun_at_limit(limit, &format!("-n {most} {map}"));
        assert_eq!(begun, most, "{map}: {error}");
        let (begun, error) = begun_at_limit(limit, &format!("-n {} {map}", most + 1));
        assert_eq!(begun, 0, "{map}: {error}");
        let expected = format!(
            "nothing was started: there is room for 19 more processes, and {} were asked for, with ",
            most + 1
        );
        assert!(error.contains(&expected), "{map}: {error}");
    }
}

fn affinity() -> CpuSet {
    crate::processes::mask(std::process::id())
}

#[test]
fn what_starts_the_instances_counts_in_the_limit_of_a_cgroup() {
    if !is_root() {
        return;
    }
    let Some(hierarchy) = pids_hierarchy() else {
        skip("the pids controller is not available in a hierarchy that can be written");
        return;
    };
    let cgroup = hierarchy.join(format!("pjw-test-starters-{}", std::process::id()));
    std::fs::create_dir(&cgroup).unwrap();
    std::fs::write(cgroup.join("pids.max"), "20").unwrap();
    let enter = format!("echo $$ >{}/cgroup.procs && exec \"$@\"", cgroup.display());
    let is_unused = || std::fs::read_to_string(cgroup.join("pids.current")).is_ok_and(|n| n.trim() == "0");
    check_that_starters_count(&LimitOf20 { enter: &enter, uid: None, is_unused: &is_unused });
    wait_until("the cgroup can be removed", || std::fs::remove_dir(&cgroup).is_ok());
}

#[test]
fn what_starts_the_instances_counts_in_the_limit_of_a_user() {
    if !is_root() || is_root_without_reachable_programs() {
        return;
    }
    let (enter, is_unused) = ("exec prlimit --nproc=20:20 \"$@\"", || has_no_process(COUNTED_USER));
    check_that_starters_count(&LimitOf20 { enter, uid: Some(COUNTED_USER), is_unused: &is_unused });
}

/// Whether a user has no process, also none that has ended and that nobody has waited for.
fn has_no_process(uid: u32) -> bool {
    let is_users = |status: String| {
        let owner = status.lines().find_map(|line| line.strip_prefix("Uid:"));
        owner.and_then(|ids| ids.split_whitespace().next()?.parse::<u32>().ok()) == Some(uid)
    };
    let entries = std::fs::read_dir("/proc").unwrap().flatten();
    let mut statuses = entries.filter_map(|entry| std::fs::read_to_string(entry.path().join("status")).ok());
    !statuses.any(is_users)
}

/// A directory in which cgroups with a pids controller can be made.
fn pids_hierarchy() -> Option<PathBuf> {
    let v1 = Path::new("/sys/fs/cgroup/pids");
    if v1.join("cgroup.procs").exists() {
        return Some(v1.to_owned());
    }
    let v2 = Path::new("/sys/fs/cgroup");
    let controllers = std::fs::read_to_string(v2.join("cgroup.subtree_control")).unwrap_or_default();
    controllers.split_whitespace().any(|name| name == "pids").then(|| v2.to_owned())
}

#[test]
fn more_instances_than_the_user_may_have_are_refused_beforehand() {
    if is_root_without_reachable_programs() {
        return;
    }
    let output = as_plain_user("exec prlimit --nproc=5:5 \"$0\" spawn --local -n 40 -- true");
    let error = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{error}");
    let (begin, end) =
        ("pjwctl: nothing was started: there is room for ", "start fewer, or raise it: ulimit -u N");
    assert!(error.starts_with(begin) && error.trim_end().ends_with(end), "{error}");
    assert!(error.contains("40 were asked for: RLIMIT_NPROC of this user is 5, and "), "{error}");
    // The threads of pjwctl count too.
    let output = as_plain_user("\"$0\" spawn --local -n 4 -- true");
    assert!(output.status.success(), "{output:?}");
}

/// Without this check, some instances started and the others failed.
#[test]
fn more_instances_than_there_is_room_for_descriptors_are_refused_beforehand() {
    let with_900_open =
        "ulimit -n 1024; for i in {10..909}; do eval \"exec $i</dev/null\"; done; exec \"$@\"";
    let mut command = Command::new("bash");
    command.args(["-c", with_900_open, "bash"]).arg(program_path("pjwctl"));
    let output = command.args(["spawn", "--local", "-n", "400", "--", "true"]).output().unwrap();
    let error = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{error}");
    assert!(error.starts_with("pjwctl: nothing was started: the instances need "), "{error}");
    assert!(error.contains(" that are open, and a reserve of 64, this is "), "{error}");
    assert!(
        error.contains("at most 1024 may be open (RLIMIT_NOFILE)") && error.lines().count() == 1,
        "{error}"
    );
}

#[test]
fn commands_that_are_run_and_spawned_fail_with_the_same_exit_codes() {
    if is_root_without_reachable_programs() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let write = "cd \"$0\" && chmod 755 . && mkdir closed && cp /bin/true closed/hidden && chmod 000 closed && \
                 printf '#!/no/such/interpreter\n' >script && chmod 755 script && : >plain";
    assert!(Command::new("sh").args(["-c", write]).arg(dir.path()).status().unwrap().success());
    let place = dir.path().display();
    for (command, code, cause) in [
        (
            format!("{place}/closed/hidden"),
            126,
            "Permission denied (os error 13); check the permissions of its",
        ),
        ("hidden".to_owned(), 127, "check its name, and PATH"),
        (format!("{place}/script"), 127, "the interpreter /no/such/interpreter in the first line of "),
        (format!("{place}/plain"), 126, "it may not be executed; check its permissions"),
        (format!("{place}/closed"), 126, "it is a directory"),
    ] {
        // The starter of a job executes its command as run does, and needs no daemon.
        for verb in ["spawn --local -n 1", "hook condor-job-wrapper"] {
            let line = format!("PATH={place}/closed:$PATH exec \"$0\" {verb} -- {command}");
            let output = as_plain_user(&line);
            let error = text(&output.stderr);
            assert_eq!(output.status.code(), Some(code), "{line}: {error}");
            assert!(error.lines().last().unwrap_or_default().contains(cause), "{line}: {error}");
        }
    }
    std::fs::set_permissions(dir.path().join("closed"), Permissions::from_mode(0o755)).unwrap();
}

fn is_root_without_reachable_programs() -> bool {
    nix::unistd::Uid::effective().is_root() && !programs_are_reachable()
}

#[test]
fn a_program_that_may_not_be_traced_is_refused_by_always_and_executed_by_auto() {
    if is_root_without_reachable_programs() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    std::fs::set_permissions(dir.path(), Permissions::from_mode(0o755)).unwrap();
    let program = dir.path().join("unreadable");
    // Another process writes the file: one that a child of this process has open for writing can't be executed.
    let copied = Command::new("cp").arg("/bin/true").arg(&program).status().unwrap();
    assert!(copied.success());
    std::fs::set_permissions(&program, Permissions::from_mode(0o111)).unwrap();
    let run = |proxy: &str| {
        as_plain_user(&format!("exec \"$0\" spawn --local -n 2 --proxy {proxy} -- {}", program.display()))
    };
    let (refused, executed) = (run("always"), run("auto"));
    let line = text(&refused.stderr);
    assert_eq!((refused.status.code(), line.lines().count()), (Some(1), 1), "{line}");
    assert!(line.starts_with("pjwctl: nothing was started: "), "{line}");
    assert!(executed.status.success(), "{executed:?}");
    if cfg!(target_arch = "x86_64") {
        assert!(
            line.contains("ptrace is forbidden here") && line.contains("--proxy auto or never"),
            "{line}"
        );
        let line = text(&executed.stderr);
        assert!(line.contains("each instance executed the program: ptrace is forbidden here"), "{line}");
    }
}

/// Copies a program to `copy`, with an entry point (`e_entry`, elf(5)) that is not in its memory. A shell writes the
/// copy, as above.
fn copy_damaged(program: &Path, copy: &Path) {
    let write = "cp \"$1\" \"$0\" && printf '\\377\\377\\377\\377\\377\\0\\0\\0' | dd of=\"$0\" bs=1 seek=24 conv=notrunc 2>&1";
    let written = Command::new("sh").args(["-c", write]).arg(copy).arg(program).output().unwrap();
    assert!(written.status.success(), "{written:?}");
}

#[test]
fn a_damaged_program_is_called_damaged_and_no_other_way_to_start_it_is_advised() {
    if !has_templates() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let program = dir.path().join("damaged");
    copy_damaged(Path::new("/bin/true"), &program);
    let refused = local("-n 2 --proxy always --", &[program.to_str().unwrap()]);
    assert_eq!(
        (refused.status.code(), text(&refused.stderr)),
        (
            Some(1),
            format!(
                "pjwctl: nothing was started: --proxy can't load {}: the file of the program is damaged: its entry point is \
                 not in the memory that it loads; copy or build the program again\n",
                program.display()
            )
        )
    );
    let executed = local("-n 2 --proxy auto --", &[program.to_str().unwrap()]);
    let said = text(&executed.stderr);
    assert_eq!(executed.status.code(), Some(139), "{said}");
    assert!(
        said.contains("each instance executed the program: the file of the program is damaged"),
        "{said}"
    );
}

#[test]
fn a_mistake_in_a_file_of_commands_is_reported_with_its_line() {
    let dir = tempfile::tempdir().unwrap();
    let (file, marker) = (dir.path().join("multi"), dir.path().join("started"));
    let place = file.display();
    let long = format!("1-2 sh -c 'exit 0' {}", "x".repeat(140_000));
    for (line, code, reason) in [
        ("1 true out.%x", 1, "argument out.%x has the unknown placeholder %x: use %r for the rank"),
        ("1 true 50%", 1, "argument 50% has the unknown placeholder %: use %r for the rank"),
        ("1 no-such-program", 127, "there is no program no-such-program: check its name, and PATH"),
        (
            long.as_str(),
            1,
            "argument 3 has 140001 bytes with its NUL byte, and execve(2) takes at most 131072 (MAX_ARG_STRLEN); shorten \
             it, or pass its text in a file",
        ),
    ] {
        let touch = format!("0 touch {}", marker.display());
        std::fs::write(&file, format!("# two programs\n{touch}\n\n{line}\n")).unwrap();
        let output = local(&format!("--multi {place}"), &[]);
        let said = text(&output.stderr);
        assert_eq!((output.status.code(), said.lines().count()), (Some(code), 1), "{said}");
        assert!(
            said.starts_with(&format!("pjwctl: nothing was started: {place}: line 4: {reason}")),
            "{said}"
        );
        assert!(!marker.exists(), "an instance was started: {said}");
    }
}

#[test]
fn a_program_that_is_gone_when_it_is_executed_is_reported_for_each_instance() {
    let dir = tempfile::tempdir().unwrap();
    let script = dir.path().join("script");
    // The script is found, and its interpreter is not there.
    let write = "printf '#!/no/such/interpreter\n' >\"$0\" && chmod 755 \"$0\"";
    assert!(Command::new("sh").args(["-c", write]).arg(&script).status().unwrap().success());
    let output = local("-n 3 --", &[script.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(127), "{output:?}");
    let line = |rank| {
        format!(
            "pjwctl: instance {rank} was not started: step exec failed: No such file or directory; the interpreter \
             /no/such/interpreter in the first line of {} is missing: install it, or correct that line",
            script.display()
        )
    };
    assert_eq!(sorted_lines(&output.stderr), [line(0), line(1), line(2)]);
}

#[test]
fn one_instance_whose_arguments_are_too_long_fails_alone_and_a_line_has_the_remedy() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("multi");
    // execve(2) takes strings of 131072 bytes with their NUL byte. Only the rank 10 has two digits.
    std::fs::write(&file, format!("* true {}%r\n", "x".repeat(131_070))).unwrap();
    for proxy in ["never", "auto"] {
        let output = local(&format!("-n 11 --json --proxy {proxy} --multi {}", file.display()), &[]);
        assert_eq!(output.status.code(), Some(126), "{proxy}: {output:?}");
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        let instances = report["instances"].as_array().unwrap();
        assert!(instances[..10].iter().all(|instance| instance["exit"] == 0), "{proxy}: {report}");
        assert_eq!((&instances[10]["step"], &instances[10]["errno"]), (&"exec".into(), &"E2BIG".into()));
        let line = "pjwctl: instance 10 was not started: step exec failed: Argument list too long; make its arguments and \
                    its environment smaller";
        assert!(text(&output.stderr).lines().any(|said| said == line), "{proxy}: {output:?}");
    }
}

#[test]
fn a_search_for_libraries_in_many_places_is_told() {
    let dir = tempfile::tempdir().unwrap();
    let directories: Vec<String> = (0..100)
        .map(|number| {
            let directory = dir.path().join(number.to_string());
            std::fs::create_dir(&directory).unwrap();
            directory.display().to_string()
        })
        .collect();
    let run_many = |instances: &str, directories: &[String], proxy: &str| {
        let mut pjwctl = Command::new(program_path("pjwctl"));
        pjwctl.args(["spawn", "--local", "-n", instances, "--proxy", proxy, "--", "/bin/sh", "-c", "exit 0"]);
        pjwctl.env("LD_LIBRARY_PATH", directories.join(":")).output().unwrap()
    };
    let run = |directories: &[String], proxy: &str| run_many("2", directories, proxy);
    let output = run(&directories, "never");
    let error = text(&output.stderr);
    assert!(output.status.success(), "{error}");
    let begin = "pjwctl: LD_LIBRARY_PATH makes each start of /bin/sh open 100 files that are not there: ";
    assert!(error.starts_with(begin) && error.contains("--proxy always"), "{error}");
    assert_eq!(text(&run(&directories[..10], "never").stderr), "");
    if cfg!(target_arch = "x86_64") {
        assert!(!text(&run(&directories, "auto").stderr).contains("LD_LIBRARY_PATH"));
    }
    // Each instance executes the program, and another --proxy would not change that. sh never calls pspawn_fork_here.
    for (instances, proxy) in [("1", "never"), ("1", "auto"), ("2", "late")] {
        let error = text(&run_many(instances, &directories, proxy).stderr);
        assert!(error.contains(begin), "-n {instances} --proxy {proxy}: {error}");
        assert!(!error.contains("--proxy always"), "-n {instances} --proxy {proxy}: {error}");
    }
}
