//! `pjwctl spawn --proxy`: programs that can't be executed.

use std::process::Command;

use pjw_tests::skipping::skip;

use super::{local, text};

#[test]
fn a_program_that_can_not_be_executed_has_the_same_exit_code_and_cause_with_each_proxy() {
    if !cfg!(target_arch = "x86_64") {
        skip("templates exist for x86_64 only");
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
