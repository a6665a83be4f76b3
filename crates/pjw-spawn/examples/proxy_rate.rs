//! Measures instances of a small program: by a fork loop, by posix_spawn(3), by a template. CPU time and rate.
//!
//! `proxy_rate [COUNT [LIBRARIES]]`: with LIBRARIES, the program uses so many of them.
#![allow(missing_docs, clippy::print_stdout, clippy::unwrap_used)]

use std::collections::VecDeque;
use std::ffi::CString;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio as Standard};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::sched::{CpuSet, sched_setaffinity};
use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::TimeValLike;
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::{ForkResult, Pid, fork};
use pjw_spawn::proxy::Template;
use pjw_spawn::{Arguments, Child, Instance, Placement, SpawnContext, Stdio};

const TRUE: &str = "int main(void) { return 0; }";
const FORK_LOOP: &str = r#"
#define _GNU_SOURCE
#include <sched.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>
int main(int argc, char **argv) {
    int count = atoi(argv[1]), pins = argc > 2, running = 0;
    for (int i = 0; i < count; i++) {
        pid_t pid = fork();
        if (pid == 0) {
            if (pins) { cpu_set_t one; CPU_ZERO(&one); CPU_SET(i % 2, &one); sched_setaffinity(0, sizeof one, &one); }
            _exit(0);
        }
        running++;
        while (waitpid(-1, 0, WNOHANG) > 0) running--;
    }
    while (running-- && wait(0) > 0) {}
    return 0;
}
"#;
const SPAWN_LOOP: &str = r#"
#define _GNU_SOURCE
#include <sched.h>
#include <spawn.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>
extern char **environ;
int main(int argc, char **argv) {
    int count = atoi(argv[1]), running = 0; char *args[] = {argv[2], 0};
    for (int i = 0; i < count; i++) {
        pid_t pid; posix_spawn(&pid, argv[2], 0, 0, args, environ);
        cpu_set_t one; CPU_ZERO(&one); CPU_SET(i % 2, &one); sched_setaffinity(pid, sizeof one, &one);
        running++;
        while (waitpid(-1, 0, WNOHANG) > 0) running--;
    }
    while (running-- && wait(0) > 0) {}
    return 0;
}
"#;

fn cpu() -> Duration {
    let of = |who| {
        let usage = getrusage(who).unwrap();
        (usage.user_time() + usage.system_time()).num_microseconds()
    };
    Duration::from_micros(u64::try_from(of(UsageWho::RUSAGE_SELF) + of(UsageWho::RUSAGE_CHILDREN)).unwrap())
}

fn measure(name: &str, count: u32, work: impl FnOnce()) -> f64 {
    let (start, cpu_before) = (Instant::now(), cpu());
    work();
    let (wall, used) = (start.elapsed(), cpu() - cpu_before);
    let each = used.as_secs_f64() * 1e6 / f64::from(count);
    println!("{name:36} {each:8.1} us CPU, {:8.0}/s", f64::from(count) / wall.as_secs_f64());
    each
}

fn compile(directory: &Path, name: &str, source: &str, flags: &[&str]) -> PathBuf {
    let (file, program) = (directory.join(format!("{name}.c")), directory.join(name));
    std::fs::write(&file, source).unwrap();
    assert!(
        Command::new("cc")
            .arg("-O1")
            .arg(&file)
            .arg("-o")
            .arg(&program)
            .args(flags)
            .status()
            .unwrap()
            .success()
    );
    program
}

fn run(program: &Path, arguments: &[&str]) {
    assert!(Command::new(program).args(arguments).stdout(Standard::null()).status().unwrap().success());
}

fn proxy(program: &Path, count: u32, pins: bool) {
    let context = SpawnContext::from_path(program);
    let arguments = Arc::new(Arguments::parse(&[program.as_os_str()]).unwrap());
    let on = |list: &str| Arc::new(Placement::on_cpus(list.parse().unwrap()));
    let placements = if pins { [on("0"), on("1")] } else { [on("0-1"), on("0-1")] };
    let instance = |rank: u32| Instance {
        rank,
        size: count,
        arguments: Arc::clone(&arguments),
        variables: vec![CString::new(format!("PJW_RANK={rank}")).unwrap()],
        placement: Arc::clone(&placements[rank as usize % 2]),
        stdio: Stdio::default(),
    };
    let mut template = Template::load_until_main(&context, &instance(0)).unwrap();
    let instances: Vec<Instance> = (0..count).map(instance).collect();
    run_all(&mut template, &instances);
}

fn run_all(template: &mut Template, instances: &[Instance]) {
    let mut children: VecDeque<Child> = VecDeque::new();
    template.fork_all(instances, |_, child| {
        children.push_back(child.unwrap());
        while children.front().is_some_and(|child| child.try_wait().unwrap().is_some()) {
            drop(children.pop_front());
        }
    });
    for child in &children {
        child.wait().unwrap();
    }
}

/// Makes a program that calls one function in each of `count` libraries, like Pynamic: each library has data, and
/// functions that call the C library and the library before.
fn many_libraries(directory: &Path, count: u32) -> PathBuf {
    let libraries: Vec<String> = (0..count).map(|number| library(directory, number)).collect();
    let declared: String = (0..count).map(|number| format!("int begin_{number}(int);\n")).collect();
    let called: String = (0..count).map(|number| format!("    sum += begin_{number}(sum);\n")).collect();
    let source = format!("{declared}int main(void) {{\n    int sum = 1;\n{called}    return sum == 0;\n}}\n");
    let path = format!("-Wl,-rpath,{}", directory.display());
    let mut flags = vec!["-Wl,--no-as-needed", &path];
    flags.extend(libraries.iter().map(String::as_str));
    compile(directory, "many", &source, &flags)
}

/// Makes one library. Returns its path.
fn library(directory: &Path, number: u32) -> String {
    let functions: String = (0..20)
        .map(|at| {
            format!(
                "int work_{number}_{at}(char *to) {{ memset(to, {at}, 64); return (int)strlen(to) + abs({at}) + \
                 atoi(to); }}\n"
            )
        })
        .collect();
    let calls: String =
        (0..20).map(|at| format!("    sum += work_{number}_{at}(data + {at} * 64);\n")).collect();
    let source = format!(
        "#include <stdlib.h>\n#include <string.h>\nstatic char data[16384] = {{1}};\n{functions}\
         int begin_{number}(int sum) {{\n{calls}    return sum;\n}}\n"
    );
    let name = format!("libpart{number}.so");
    compile(directory, &name, &source, &["-shared", "-fPIC"]).to_str().unwrap().to_owned()
}

/// This program as a template, with `PJW_LATE=template`: its instances end at once. With `PJW_LATE=COUNT` it is the
/// bare fork loop of the same size. Every child gets a mask.
fn late(mode: &str) {
    if mode == "template" {
        let own = pjw_spawn::proxy::fork_here().unwrap();
        assert!(own.is_some());
    } else {
        let mut running = 0;
        for number in 0..mode.parse::<usize>().unwrap() {
            // SAFETY: the process has one thread, and the child ends at once.
            if let ForkResult::Child = unsafe { fork() }.unwrap() {
                let mut one = CpuSet::new();
                one.set(number % 2).unwrap();
                sched_setaffinity(Pid::from_raw(0), &one).unwrap();
                end_now();
            }
            running += 1;
            while running > 0 && waitpid(None, Some(WaitPidFlag::WNOHANG)).unwrap() != WaitStatus::StillAlive
            {
                running -= 1;
            }
        }
        for _ in 0..running {
            waitpid(None, None).unwrap();
        }
    }
    end_now();
}

fn end_now() -> ! {
    // SAFETY: _exit(2) runs no code of this process.
    unsafe { libc::_exit(0) }
}

fn late_proxy(count: u32) {
    let program = std::env::current_exe().unwrap();
    let context = SpawnContext::from_path(&program).set_variable("PJW_LATE", "template");
    let arguments = Arc::new(Arguments::parse(&["late", "%r"]).unwrap());
    let placements = ["0", "1"].map(|list| Arc::new(Placement::on_cpus(list.parse().unwrap())));
    let instance = |rank: u32| Instance {
        rank,
        size: count,
        arguments: Arc::clone(&arguments),
        variables: Vec::new(),
        placement: Arc::clone(&placements[rank as usize % 2]),
        stdio: Stdio::default(),
    };
    let instances: Vec<Instance> = (0..count).map(instance).collect();
    run_all(&mut Template::load_until_fork_here(&context, &instances[0]).unwrap(), &instances);
}

fn main() {
    if let Ok(mode) = std::env::var("PJW_LATE") {
        late(&mode);
    }
    let mut arguments = std::env::args().skip(1);
    let count: u32 = arguments.next().map_or(2000, |text| text.parse().unwrap());
    let libraries: u32 = arguments.next().map_or(0, |text| text.parse().unwrap());
    let directory = tempfile::tempdir().unwrap();
    let forks = compile(directory.path(), "fork_loop", FORK_LOOP, &[]);
    let spawns = compile(directory.path(), "spawn_loop", SPAWN_LOOP, &[]);
    let number = count.to_string();
    let small = match libraries {
        0 => compile(directory.path(), "true", TRUE, &[]),
        libraries => many_libraries(directory.path(), libraries),
    };
    let fixed = compile(directory.path(), "true_static", TRUE, &["-static"]);
    for _ in 0..5 {
        let own_program = std::env::current_exe().unwrap();
        let bare = measure("fork loop of this program, pinned", count, || {
            assert!(Command::new(&own_program).env("PJW_LATE", &number).status().unwrap().success());
        });
        let late = measure("late fork of this program, pinned", count, || late_proxy(count));
        println!("  CPU: fork loop / late fork, pinned {:.2}", bare / late);
    }
    for _ in 0..3 {
        let fork = measure("fork loop", count, || run(&forks, &[&number]));
        let pinned = measure("fork loop, child pins itself", count, || run(&forks, &[&number, "pins"]));
        let spawn = measure("posix_spawn, pinned after", count, || {
            run(&spawns, &[&number, small.to_str().unwrap()]);
        });
        let both = measure("template", count, || proxy(&small, count, false));
        let own = measure("template, pinned", count, || proxy(&small, count, true));
        measure("template of a static program", count, || proxy(&fixed, count, true));
        println!(
            "  CPU: fork / template {:.2}, both pinned {:.2}, template / posix_spawn {:.2}",
            fork / both,
            pinned / own,
            own / spawn
        );
    }
}
