//! C programs check the functions of the headers and of libpjw_spawn.so: `program.c` those of pjw_spawn.h, `farm.c`
//! those of pjw_farm.h. The Python program `farm.py` checks the module pjw_farm.

#![allow(clippy::unwrap_used)] // a test may fail

use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

mod compile;

use compile::compile;

#[test]
fn a_c_program_starts_processes_by_each_function_of_the_header() {
    run_c_program("tests/program.c");
}

#[test]
fn a_cpp_program_can_combine_flags() {
    let source = "#include <pjw_spawn.h>\n\
                  int main() { return pspawn_v(0, 0, 0, 1, 0, 0, PSPAWN_ARGV_EACH | PSPAWN_ENVP_EACH, 0); }\n";
    if !is_valid_cpp(source) {
        println!("skipped: there is no c++");
    }
}

#[test]
fn a_cpp_program_can_use_each_function_of_the_header_for_tasks() {
    let source = r#"
        #include <pjw_tasks.h>
        int main() {
            size_t bytes = 0;
            if (pjw_tasks_init() != 0) return 1;
            double *own = static_cast<double *>(pjw_tasks_alloc("own", sizeof(double)));
            if (pjw_tasks_shared() && pjw_tasks_publish("value", own, sizeof *own) != 0) return 1;
            const void *found = pjw_tasks_find("own", &bytes, PJW_TASKS_FOREVER);
            if (pjw_tasks_barrier(PJW_TASKS_FOREVER) != 0) return 1;
            return found == own && pjw_tasks_rank() < pjw_tasks_size() ? 0 : 1;
        }
    "#;
    if !is_valid_cpp(source) {
        println!("skipped: there is no c++");
    }
}

/// Fails if `source` is no valid C++, or if the compiler warns. Returns false if there is no compiler.
fn is_valid_cpp(source: &str) -> bool {
    let mut compiler = Command::new("c++");
    compiler.args(["-fsyntax-only", "-Wall", "-Wextra", "-Werror", "-x", "c++", "-"]);
    compiler.arg("-I").arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("include"));
    let Ok(mut compiler) = compiler.stdin(Stdio::piped()).stderr(Stdio::piped()).spawn() else {
        return false;
    };
    compiler.stdin.take().unwrap().write_all(source.as_bytes()).unwrap();
    let output = compiler.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    true
}

#[test]
fn a_c_program_runs_farms_by_each_function_of_the_header() {
    run_c_program("tests/farm.c");
}

#[test]
fn the_example_of_a_farm_prints_the_squares_in_order() {
    let squares: String = (0..10).map(|number| format!("{number} {}\n", number * number)).collect();
    assert_eq!(run_c_program("examples/farm.c"), squares);
}

/// Compiles a program and runs it. Returns what it prints.
fn run_c_program(source: &str) -> String {
    let directory = tempfile::tempdir().unwrap();
    let program = directory.path().join("program");
    compile("pjw_spawn", Path::new(env!("CARGO_MANIFEST_DIR")), source, &["-pthread"], &program);
    let output = Command::new(&program).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn a_python_program_runs_farms_by_each_call_of_the_module() {
    let python_version = Command::new("python3").arg("--version").output();
    if !python_version.is_ok_and(|output| output.status.success()) {
        println!("skipped: there is no python3");
        return;
    }
    let library = std::env::current_exe().unwrap().with_file_name("libpjw_spawn.so");
    let crate_directory = Path::new(env!("CARGO_MANIFEST_DIR"));
    let output = Command::new("python3")
        .args(["-B", "-W", "error"])
        .arg(crate_directory.join("tests/farm.py"))
        .env("PJW_SPAWN_LIBRARY", library)
        .env("PYTHONPATH", crate_directory.join("python"))
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn the_module_of_python_has_the_version_of_the_library() {
    let project = Path::new(env!("CARGO_MANIFEST_DIR")).join("python/pyproject.toml");
    let version = format!("version = \"{}\"", env!("CARGO_PKG_VERSION"));
    assert!(
        std::fs::read_to_string(project).unwrap().lines().any(|line| line == version),
        "it has no {version}"
    );
}
