//! `pjwctl spawn --proxy`: programs that can't be executed, and those that can't have a template.

use std::process::Command;

use pjw_tests::skipping::skip;

use super::{local, text};
use crate::processes::is_installed;

/// Whether there are templates here. If not, reports that the test is skipped.
pub(super) fn has_templates() -> bool {
    let has_templates = cfg!(target_arch = "x86_64");
    if !has_templates {
        skip("templates exist for x86_64 only");
    }
    has_templates
}

#[test]
fn a_program_that_can_not_be_executed_has_the_same_exit_code_and_cause_with_each_proxy() {
    if !has_templates() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    // Another process writes the files: one that a child of this process has open for writing can't be executed.
    let write = "cd \"$0\" && printf '#!/no/such/interpreter\n' >script && printf text >plain && \
                 head -c 100 /bin/true >truncated && chmod 755 script plain truncated";
    assert!(Command::new("sh").args(["-c", write]).arg(dir.path()).status().unwrap().success());
    for (name, code, cause) in [
        ("script", 127, "; the interpreter /no/such/interpreter in the first line of "),
        ("plain", 126, "; it needs a format that the kernel knows, or a first line with #!"),
        ("truncated", 126, ": step exec failed: "),
    ] {
        let program = dir.path().join(name);
        for proxy in ["never", "auto", "late", "always"] {
            let output = local(&format!("-n 2 --proxy {proxy} --"), &[program.to_str().unwrap()]);
            let said = text(&output.stderr);
            assert_eq!(output.status.code(), Some(code), "{name} --proxy {proxy}: {said}");
            assert!(said.contains(cause), "{name} --proxy {proxy}: {said}");
            if proxy == "always" {
                assert!(said.starts_with("pjwctl: nothing was started: "), "{name}: {said}");
                assert_eq!(said.lines().count(), 1, "{name}: {said}");
            }
        }
    }
}

/// The dynamic linker calls `choose` while it links the program. There, clone(2) starts a thread that calls pause(2).
/// The flags are `CLONE_VM`, `CLONE_FS`, `CLONE_FILES`, `CLONE_SIGHAND` and `CLONE_THREAD`.
const THREAD_BEFORE_MAIN: &str = r#"
static long stack[8192];
static int zero(void) { return 0; }
static int (*choose(void))(void) {
    long result = 56;
    __asm__ volatile("syscall\n test %%rax, %%rax\n jnz 2f\n 1: mov $34, %%eax\n syscall\n jmp 1b\n 2:"
                     : "+a"(result) : "D"(0x10f00L), "S"(stack + 8192), "d"(0L) : "rcx", "r11", "memory");
    return zero;
}
int chosen(void) __attribute__((ifunc("choose")));
int main(void) { return chosen(); }
"#;

#[test]
fn a_program_with_threads_before_main_is_executed_by_auto_and_refused_by_always_with_one_line() {
    if !has_templates() {
        return;
    }
    if !is_installed("cc") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let (source, program) = (dir.path().join("threads.c"), dir.path().join("threads"));
    std::fs::write(&source, THREAD_BEFORE_MAIN).unwrap();
    let compiled = Command::new("cc").arg("-o").args([&program, &source]).output().unwrap();
    if !compiled.status.success() {
        skip(format_args!("the compiler makes no ifunc: {}", text(&compiled.stderr)));
        return;
    }
    let command = [program.to_str().unwrap()];
    let why = "2 threads run before main: a fork would have only one of them";
    let output = local("-n 2 --proxy auto --", &command);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    assert_eq!(text(&output.stderr), format!("pjwctl: each instance executed the program: {why}\n"));
    let output = local("-n 2 --proxy always --", &command);
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let said = text(&output.stderr);
    let (begin, end) = ("pjwctl: nothing was started: ", format!(": {why}; use --proxy auto or never\n"));
    assert!(said.starts_with(begin) && said.ends_with(&end) && said.lines().count() == 1, "{said}");
}
