//! Programs of C that a bench writes and compiles with `cc`.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;

use anyhow::{Context, bail};

/// A program that ends at once.
const SMALL: &str = "int main(void) { return 0; }\n";
/// The source of a program with `IMAGE_MB` MB of data in its file. Its argument is a percentage. The program writes
/// the first byte of so many percent of the pages of this data.
const IMAGE: &str = r"
#include <stdlib.h>
static volatile char image[IMAGE_MB << 20] = {1};
int main(int argc, char **argv) {
    size_t pages = sizeof image / 4096 * (argc > 1 ? atoi(argv[1]) : 0) / 100;
    for (size_t page = 0; page < pages; page++) image[page * 4096] = 2;
    return 0;
}
";

/// Compiles the C program with the source text `source` by `cc`, with the additional options `flags`. Returns the path
/// of the program, which is `directory/name`.
///
/// # Errors
/// If the source can't be written to `directory/name.c`, or if `cc` is not installed or can't compile the program.
pub fn compile(directory: &Path, name: &str, source: &str, flags: &[&str]) -> anyhow::Result<PathBuf> {
    let (file, program) = (directory.join(format!("{name}.c")), directory.join(name));
    std::fs::write(&file, source).with_context(|| format!("can't write {}", file.display()))?;
    let mut command = Command::new("cc");
    command.arg("-O1").arg(&file).arg("-o").arg(&program).args(flags).stdin(Stdio::null());
    let status = command.status().context("can't start cc: make deps installs it")?;
    if !status.success() {
        bail!("cc can't compile {}: {status}", file.display());
    }
    Ok(program)
}

/// Returns the options of `cc` for a program that uses a library of this workspace, such as the library `pjw_job` of
/// the crate `pjw-job-c`. Creates symbolic links to the library in `directory`, where the program then finds the
/// library.
///
/// # Errors
/// If a link can't be created.
pub fn library_flags(directory: &Path, library: &str, crate_name: &str) -> anyhow::Result<[String; 4]> {
    let name = format!("lib{library}.so");
    // Cargo builds the library beside the bench.
    let built = std::env::current_exe()?.with_file_name(&name);
    for name in [&name, &format!("{name}.0")] {
        symlink(&built, directory.join(name)).with_context(|| format!("can't link {name}"))?;
    }
    let include = concat!("-I", env!("CARGO_MANIFEST_DIR"), "/../crates/");
    let directory = directory.display();
    Ok([
        format!("{include}{crate_name}/include"),
        format!("-L{directory}"),
        format!("-l{library}"),
        format!("-Wl,-rpath,{directory}"),
    ])
}

/// Compiles a small C program that is linked dynamically and ends at once. Returns its path.
///
/// # Errors
/// The errors of [`compile`].
pub fn compile_small(directory: &Path) -> anyhow::Result<PathBuf> {
    compile(directory, "small", SMALL, &[])
}

/// Compiles a C program with `megabytes` MB of data in its file. The argument of the program says how many percent of
/// the pages of this data the program writes. Returns the path of the program.
///
/// # Errors
/// The errors of [`compile`].
pub fn compile_image(directory: &Path, megabytes: u32) -> anyhow::Result<PathBuf> {
    compile(directory, "image", IMAGE, &[&format!("-DIMAGE_MB={megabytes}"), "-mcmodel=medium"])
}

/// Compiles a C program with `count` shared libraries of its own. The program calls one function of each library. Each
/// library has data, and functions that call the C library. The benchmark Pynamic has such programs. Returns the path
/// of the program.
///
/// # Errors
/// The errors of [`compile`].
pub fn compile_with_libraries(directory: &Path, count: u32) -> anyhow::Result<PathBuf> {
    let compilers = u32::try_from(thread::available_parallelism()?.get())?;
    thread::scope(|scope| {
        let threads: Vec<_> = (0..compilers)
            .map(|first| {
                let mut numbers = (first..count).step_by(compilers as usize);
                scope.spawn(move || numbers.try_for_each(|number| compile_library(directory, number)))
            })
            .collect();
        threads.into_iter().try_for_each(|thread| {
            thread.join().unwrap_or_else(|_| bail!("a thread that compiled has failed"))
        })
    })?;
    let declarations: String = (0..count).map(|number| format!("int begin_{number}(int);\n")).collect();
    let calls: String = (0..count).map(|number| format!("    sum += begin_{number}(sum);\n")).collect();
    let source =
        format!("{declarations}int main(void) {{\n    int sum = 1;\n{calls}    return sum == 0;\n}}\n");
    let directory_text = directory.display();
    let mut flags = vec![
        "-Wl,--no-as-needed".to_owned(),
        format!("-Wl,-rpath,{directory_text}"),
        format!("-L{directory_text}"),
    ];
    flags.extend((0..count).map(|number| format!("-lpart{number}")));
    let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
    compile(directory, "many_libraries", &source, &flags)
}

/// Compiles the shared library `libpartNUMBER.so` in `directory`. The library has 20 functions that call the C library,
/// and the function `begin_NUMBER`, which calls all of them.
fn compile_library(directory: &Path, number: u32) -> anyhow::Result<()> {
    let functions: String = (0..20)
        .map(|at| {
            format!(
                "int work_{number}_{at}(char *to) {{ memset(to, {at}, 64); to[63] = 0; return (int)strlen(to) + \
                 abs({at}) + atoi(to); }}\n"
            )
        })
        .collect();
    let calls: String =
        (0..20).map(|at| format!("    sum += work_{number}_{at}(data + {at} * 64);\n")).collect();
    let source = format!(
        "#include <stdlib.h>\n#include <string.h>\nstatic char data[16384] = {{1}};\n{functions}\
         int begin_{number}(int sum) {{\n{calls}    return sum & 1;\n}}\n"
    );
    compile(directory, &format!("libpart{number}.so"), &source, &["-shared", "-fPIC"]).map(drop)
}
