//! Programs that can't have a template. Nothing of them is left.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use nix::errno::Errno;

use super::*;
use crate::proxy::{ForkError, Template, TemplateError};
use crate::syscall_filter::refuse_call;
use crate::{ExitStatus, SpawnContext, SpawnError, SpawnStep};

const TRUE: &str = "int main(void) { return 0; }";

fn refusal(program: &Path, environment: &[&str]) -> TemplateError {
    Template::load_until_main(&context(program, environment), &instance(0, &["x"])).unwrap_err()
}

/// Returns the refusal of a program where a seccomp filter makes the system call `call` fail with `errno`.
fn refusal_without(call: libc::c_long, errno: Errno, program: &Path) -> TemplateError {
    let program = program.to_owned();
    // The filter holds for this thread and those that it starts.
    let refused = std::thread::spawn(move || {
        refuse_call(call, errno);
        refusal(&program, &["A=1"])
    });
    refused.join().unwrap()
}

#[test]
fn a_program_that_is_not_there_or_not_executable_is_refused_with_the_step() {
    let directory = tempfile::tempdir().unwrap();
    let missing = refusal(&directory.path().join("missing"), &[]);
    assert_eq!(
        missing,
        TemplateError::StartFailed(SpawnError { step: SpawnStep::Exec, errno: Errno::ENOENT })
    );
    let a_directory = refusal(directory.path(), &[]);
    assert_eq!(
        a_directory,
        TemplateError::StartFailed(SpawnError { step: SpawnStep::Exec, errno: Errno::EACCES })
    );
    let text = directory.path().join("text");
    write_executable(&text, "no program");
    assert_eq!(
        refusal(&text, &[]),
        TemplateError::StartFailed(SpawnError { step: SpawnStep::Exec, errno: Errno::ENOEXEC })
    );
}

#[test]
fn a_program_without_its_entry_point_is_called_damaged() {
    let directory = tempfile::tempdir().unwrap();
    for (name, flags) in [("dynamic", &[][..]), ("fixed", &["-no-pie"])] {
        let program = compile(directory.path(), name, TRUE, flags);
        // `e_entry`, elf(5). Another process writes, as in `write_executable`.
        let write = "printf '\\377\\377\\377\\377\\377\\0\\0\\0' | dd of=\"$0\" bs=1 seek=24 conv=notrunc";
        let written = Command::new("sh").args(["-c", write]).arg(&program).output().unwrap();
        assert!(written.status.success(), "{written:?}");
        let refused = refusal(&program, &[]);
        assert_eq!(refused, TemplateError::Damaged, "{name}");
        assert!(refused.is_program_failure());
    }
}

#[test]
fn a_set_user_id_program_and_one_with_capabilities_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let program = compile(directory.path(), "true", TRUE, &[]);
    std::fs::set_permissions(&program, PermissionsExt::from_mode(0o4755)).unwrap();
    assert_eq!(refusal(&program, &[]), TemplateError::Privileged);
    std::fs::set_permissions(&program, PermissionsExt::from_mode(0o755)).unwrap();
    if Command::new("setcap").arg("cap_net_raw+ep").arg(&program).status().is_ok_and(|done| done.success()) {
        assert_eq!(refusal(&program, &[]), TemplateError::Privileged);
    } else {
        eprintln!("skipped: capabilities of files, which setcap could not give");
    }
}

#[test]
fn a_program_that_ends_before_main_is_refused_with_its_status() {
    let directory = tempfile::tempdir().unwrap();
    let source = directory.path().join("library.c");
    std::fs::write(&source, "int there(void) { return 0; }").unwrap();
    let library = directory.path().join("libgone.so");
    let made = Command::new("cc").args(["-shared", "-o"]).args([&library, &source]).status().unwrap();
    assert!(made.success());
    let program = compile(
        directory.path(),
        "needs",
        "int there(void); int main(void) { return there(); }",
        &[library.to_str().unwrap()],
    );
    std::fs::remove_file(&library).unwrap();
    assert_eq!(refusal(&program, &[]), TemplateError::Exited(127));
}

#[test]
fn threads_before_main_are_refused_with_their_number() {
    let directory = tempfile::tempdir().unwrap();
    let source = directory.path().join("audit.c");
    // An auditor of the dynamic linker runs while the linker links.
    std::fs::write(
        &source,
        "#define _GNU_SOURCE\n#include <sched.h>\n#include <unistd.h>\nstatic char stack[65536];\n\
         static int wait(void *x) { for (;;) pause(); return x != 0; }\n\
         unsigned la_version(unsigned v) {\n\
         int flags = CLONE_VM | CLONE_FS | CLONE_FILES | CLONE_SIGHAND | CLONE_THREAD;\n\
         clone(wait, stack + sizeof stack, flags, 0); return v; }",
    )
    .unwrap();
    let library = directory.path().join("audit.so");
    let made =
        Command::new("cc").args(["-shared", "-fPIC", "-o"]).args([&library, &source]).status().unwrap();
    assert!(made.success());
    let program = compile(directory.path(), "true", TRUE, &[]);
    let audit = format!("LD_AUDIT={}", library.display());
    assert_eq!(refusal(&program, &[&audit]), TemplateError::MultipleThreads(2));
}

#[test]
fn a_32_bit_program_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let source = directory.path().join("small.c");
    std::fs::write(&source, "void _start(void) { for (;;) {} }").unwrap();
    let program = directory.path().join("small");
    let made =
        Command::new("cc").args(["-m32", "-nostdlib", "-static", "-o"]).args([&program, &source]).status();
    if !made.unwrap().success() {
        eprintln!("skipped: this compiler makes no 32-bit programs");
        return;
    }
    let refused = refusal(&program, &[]);
    let no_support = TemplateError::StartFailed(SpawnError { step: SpawnStep::Exec, errno: Errno::ENOEXEC });
    assert!([TemplateError::WrongArchitecture, no_support].contains(&refused), "{refused}");
}

#[test]
fn a_forbidden_ptrace_is_told() {
    let directory = tempfile::tempdir().unwrap();
    let program = compile(directory.path(), "true", TRUE, &[]);
    for errno in [Errno::EPERM, Errno::ENOSYS] {
        let refused = refusal_without(libc::SYS_ptrace, errno, &program);
        assert_eq!(refused, TemplateError::Forbidden(errno));
        assert!(refused.to_string().contains("ptrace_scope"), "{refused}");
    }
}

#[test]
fn a_forbidden_clone3_is_not_taken_for_a_forbidden_ptrace() {
    let directory = tempfile::tempdir().unwrap();
    let program = compile(directory.path(), "true", TRUE, &[]);
    let refused = refusal_without(libc::SYS_clone3, Errno::EPERM, &program);
    let not_cloned = SpawnError { step: SpawnStep::Clone, errno: Errno::EPERM };
    assert_eq!(refused, TemplateError::StartFailed(not_cloned));
    assert!(!refused.to_string().contains("ptrace"), "{refused}");
}

#[test]
fn a_forbidden_pidfd_open_is_told_before_an_instance_begins() {
    let directory = tempfile::tempdir().unwrap();
    let source = "#include <fcntl.h>\n#include <unistd.h>\nint main(int c, char **v) {\n\
                  return write(open(v[1], O_WRONLY | O_APPEND), \"x\", 1) != 1; }";
    let program = compile(directory.path(), "begins", source, &[]);
    let marks = directory.path().join("marks");
    for errno in [Errno::EPERM, Errno::ENOSYS] {
        std::fs::write(&marks, "").unwrap();
        let refused = refusal_without(libc::SYS_pidfd_open, errno, &program);
        assert_eq!(refused, TemplateError::PidfdForbidden(errno));
        assert!(refused.to_string().contains("pidfd_open(2)"), "{refused}");
        let (program, argument) = (program.clone(), marks.to_str().unwrap().to_owned());
        let started = std::thread::spawn(move || {
            refuse_call(libc::SYS_pidfd_open, errno);
            let instances = (0..3).map(|rank| instance(rank, &["begins", &argument])).collect();
            let mut batch = context(&program, &["A=1"]).fork_from_templates().start(instances).unwrap();
            for (_, child) in batch.by_ref() {
                assert_eq!(child.unwrap().wait(), Ok(ExitStatus::Code(0)));
            }
            (batch.forked_count(), batch.template_error())
        });
        // Each instance executes the program, and begins once.
        assert_eq!(started.join().unwrap(), (0, Some(TemplateError::PidfdForbidden(errno))));
        assert_eq!(std::fs::read(&marks).unwrap().len(), 3);
    }
}

#[test]
fn instances_start_where_clone3_is_missing() {
    let directory = tempfile::tempdir().unwrap();
    let program = compile(directory.path(), "true", TRUE, &[]);
    let started = std::thread::spawn(move || {
        // The filter holds for this thread and those that it starts. It is that of a container.
        refuse_call(libc::SYS_clone3, Errno::ENOSYS);
        let instances = || (0..3).map(|rank| instance(rank, &["true"])).collect::<Vec<_>>();
        let context = context(&program, &["A=1"]);
        for (context, forks) in [(context.clone(), 0), (context.fork_from_templates(), 3)] {
            let mut batch = context.start(instances()).unwrap();
            for (_, child) in batch.by_ref() {
                assert_eq!(child.unwrap().wait(), Ok(ExitStatus::Code(0)));
            }
            assert_eq!((batch.forked_count(), batch.template_error()), (forks, None));
        }
        let missing = SpawnContext::from_path("/nowhere/program".as_ref());
        missing.spawn_n(vec![instance(0, &["x"])]).unwrap().remove(0).unwrap_err()
    });
    let error = started.join().unwrap();
    assert_eq!(error, SpawnError { step: SpawnStep::Exec, errno: Errno::ENOENT });
}

#[test]
fn an_instance_with_long_arguments_is_executed_where_the_template_may_not_be_written_to() {
    let directory = tempfile::tempdir().unwrap();
    let source = "#include <string.h>\nint main(int c, char **v) { return strlen(v[1]) % 251; }";
    let program = compile(directory.path(), "length", source, &[]);
    let lengths = [1, 2, 3, 1000, 4, 2000, 5];
    let started = std::thread::spawn(move || {
        // The filter holds for this thread and those that it starts.
        refuse_call(libc::SYS_process_vm_writev, Errno::EPERM);
        let arguments = |length: usize| ["length".to_owned(), "x".repeat(length)];
        let instances = (0..).zip(lengths).map(|(rank, length)| {
            let arguments = arguments(length);
            instance(rank, &arguments.each_ref().map(String::as_str))
        });
        let mut batch = context(&program, &["A=1"]).fork_from_templates().start(instances.collect()).unwrap();
        for (index, child) in batch.by_ref() {
            let code = i32::try_from(lengths[index] % 251).unwrap();
            assert_eq!(child.unwrap().wait(), Ok(ExitStatus::Code(code)), "{} bytes", lengths[index]);
        }
        (batch.forked_count(), batch.fork_error())
    });
    let (forked, error) = started.join().unwrap();
    assert_eq!((forked, error), (5, Some(ForkError::WriteForbidden(Errno::EPERM))));
    assert!(error.unwrap().to_string().contains("ptrace_scope"));
}
