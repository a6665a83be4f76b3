//! Many instances of one template.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

use super::*;
use crate::proxy::{ForkError, Template};
use crate::{ExitStatus, SpawnError, SpawnStep};
use nix::errno::Errno;

/// Writes the process id and the mask as the first act, without a C library. Ends with 0.
const FIRST_ACT: &str = r#"
static long call(long n, long a, long b, long c) {
    long r; __asm__ volatile("syscall" : "=a"(r) : "a"(n), "D"(a), "S"(b), "d"(c) : "rcx", "r11", "memory"); return r;
}
void _start(void) {
    unsigned long record[2] = {0, 0};
    call(204, 0, 8, (long)&record[1]);
    record[0] = call(39, 0, 0, 0);
    call(1, 1, (long)record, sizeof record);
    call(231, 0, 0, 0);
}
"#;

fn without_libc(directory: &Path) -> std::path::PathBuf {
    let flags = ["-nostdlib", "-static", "-ffreestanding", "-fno-stack-protector", "-O1"];
    compile(directory, "first_act", FIRST_ACT, &flags)
}

#[test]
fn a_thousand_instances_run_their_first_instruction_inside_their_own_part() {
    let directory = tempfile::tempdir().unwrap();
    let context = context(&without_libc(directory.path()), &["A=1"]);
    let cpus = two_cpus();
    let placed = |rank: u32| on(instance(rank, &["first_act", "%r"]), &cpus[rank as usize % 2]);
    let mut template = Template::load_until_main(&context, &placed(0)).unwrap();
    // One pipe for all: a record is written in one piece.
    let (one, mut reader) = with_output(placed(0));
    let instances: Vec<_> = (0..1000)
        .map(|rank| {
            let mut own = placed(rank);
            own.stdio = one.stdio.clone();
            own
        })
        .collect();
    let mut expected = std::collections::BTreeMap::new();
    let mut children = Vec::new();
    template.fork_all(&instances, |instance, child| {
        let child = child.unwrap();
        expected.insert(u64::from(child.pid.0), instance.placement.cpus.clone().unwrap().words()[0]);
        children.push(child);
    });
    for child in &children {
        assert_eq!(child.wait().unwrap(), ExitStatus::Code(0));
    }
    drop((instances, one));
    let mut bytes = Vec::new();
    std::io::Read::read_to_end(&mut reader, &mut bytes).unwrap();
    let words: Vec<u64> =
        bytes.chunks_exact(8).map(|word| u64::from_ne_bytes(word.try_into().unwrap())).collect();
    assert_eq!(words.len(), 2 * 1000);
    for record in words.chunks_exact(2) {
        assert_eq!(expected.remove(&record[0]), Some(record[1]), "process {}", record[0]);
    }
}

#[test]
fn a_thousand_instances_of_a_dynamic_program_end_as_they_should() {
    let directory = tempfile::tempdir().unwrap();
    let source = r#"
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
int main(int argc, char **argv) { return argc == 2 && strcmp(argv[1], getenv("PJW_RANK")) == 0 ? atoi(argv[1]) % 251 : 252; }
"#;
    let program = compile(directory.path(), "rank", source, &[]);
    let context = context(&program, &["A=1"]).add_rank_variables();
    let instances: Vec<_> = (0..1000).map(|rank| instance(rank, &["rank", "%r"])).collect();
    let mut template = Template::load_until_main(&context, &instances[0]).unwrap();
    let mut ranks = BTreeSet::new();
    let mut children = Vec::new();
    template.fork_all(&instances, |instance, child| {
        assert!(ranks.insert(instance.rank));
        children.push((instance.rank, child.unwrap()));
    });
    assert_eq!(ranks.len(), 1000);
    for (rank, child) in children {
        assert_eq!(
            child.wait().unwrap(),
            ExitStatus::Code(i32::try_from(rank % 251).unwrap()),
            "rank {rank}"
        );
    }
}

#[test]
fn one_instance_of_ten_with_too_large_an_environment_fails_and_nine_run() {
    let directory = tempfile::tempdir().unwrap();
    let context = context(&compile(directory.path(), "true", "int main(void) { return 0; }", &[]), &["A=1"]);
    let instances: Vec<_> = (0..10)
        .map(|rank| {
            let mut own = instance(rank, &["true"]);
            let length = if rank == 4 { 200_000 } else { 20_000 * rank as usize % 130_000 };
            own.variables = vec![std::ffi::CString::new(format!("LONG={}", "x".repeat(length))).unwrap()];
            own
        })
        .collect();
    let mut template = Template::load_until_main(&context, &instances[0]).unwrap();
    let mut failed = Vec::new();
    template.fork_all(&instances, |instance, child| match child {
        Ok(child) => assert_eq!(child.wait().unwrap(), ExitStatus::Code(0)),
        Err(error) => failed.push((instance.rank, error)),
    });
    assert_eq!(failed, [(4, ForkError::Failed(SpawnError { step: SpawnStep::Exec, errno: Errno::E2BIG }))]);
}

#[test]
fn instances_that_differ_by_a_byte_in_each_of_many_pages_run() {
    let directory = tempfile::tempdir().unwrap();
    let source = "#include <stdlib.h>\nint main(void) { return atoi(getenv(\"V199\")); }";
    let context = context(&compile(directory.path(), "variable", source, &[]), &["A=1"]);
    let instances: Vec<_> = (0..10)
        .map(|rank| {
            let mut own = instance(rank, &["variable"]);
            let variable = |number| std::ffi::CString::new(format!("V{number}={rank}{}", " ".repeat(4090)));
            own.variables = (0..200).map(|number| variable(number).unwrap()).collect();
            own
        })
        .collect();
    let mut template = Template::load_until_main(&context, &instances[0]).unwrap();
    let mut ranks = BTreeSet::new();
    template.fork_all(&instances, |instance, child| {
        ranks.insert(instance.rank);
        let status = ExitStatus::Code(i32::try_from(instance.rank).unwrap());
        assert_eq!(child.unwrap().wait(), Ok(status));
    });
    assert_eq!(ranks.len(), 10);
}

#[test]
fn a_message_that_is_too_large_ends_the_template_and_each_instance_has_a_result() {
    let directory = tempfile::tempdir().unwrap();
    let context = context(&compile(directory.path(), "true", "int main(void) { return 0; }", &[]), &[]);
    // A mask of 8 KiB beside the calls of other instances.
    let mask = format!("{},{}", two_cpus()[0], pjw_core::cpuset::Pu::MAX);
    let instances: Vec<_> = (0..60)
        .map(|rank| if rank == 27 { on(instance(rank, &["true"]), &mask) } else { instance(rank, &["true"]) })
        .collect();
    let mut template = Template::load_until_main(&context, &instances[0]).unwrap();
    let mut results = Vec::new();
    template.fork_all(&instances, |instance, child| results.push((instance.rank, child)));
    results.sort_by_key(|(rank, _)| *rank);
    assert_eq!(results.iter().map(|(rank, _)| *rank).collect::<Vec<_>>(), (0..60).collect::<Vec<_>>());
    let begun = results.iter().take_while(|(_, child)| child.is_ok()).count();
    assert!(begun < 27, "{begun}");
    for (rank, child) in results {
        match child {
            Ok(child) => assert_eq!(child.wait(), Ok(ExitStatus::Code(0)), "rank {rank}"),
            Err(error) => {
                assert_eq!((rank as usize >= begun, error), (true, ForkError::Ended), "rank {rank}");
            }
        }
    }
}

#[test]
fn an_instance_of_another_shape_needs_another_template() {
    let directory = tempfile::tempdir().unwrap();
    let context = context(&compile(directory.path(), "true", "int main(void) { return 0; }", &[]), &["A=1"]);
    let mut template = Template::load_until_main(&context, &instance(0, &["true"])).unwrap();
    assert_eq!(
        template.fork(&instance(1, &["true", "x"])).unwrap_err(),
        ForkError::Mismatch("number of arguments")
    );
    let mut other = instance(1, &["true"]);
    other.variables = vec![c"B=2".to_owned()];
    assert_eq!(template.fork(&other).unwrap_err(), ForkError::Mismatch("number of variables"));
    let mut first = instance(0, &["true"]);
    first.variables = vec![c"LD_LIBRARY_PATH=/a".to_owned()];
    let mut template = Template::load_until_main(&context, &first).unwrap();
    first.variables = vec![c"LD_LIBRARY_PATH=/b".to_owned()];
    assert_eq!(template.fork(&first).unwrap_err(), ForkError::Mismatch("variable of the dynamic linker"));
}

#[test]
fn a_mask_without_an_online_cpu_is_an_error_of_its_instance() {
    let directory = tempfile::tempdir().unwrap();
    let context = context(&compile(directory.path(), "true", "int main(void) { return 0; }", &[]), &[]);
    let mut template = Template::load_until_main(&context, &instance(0, &["true"])).unwrap();
    let error = template.fork(&on(instance(0, &["true"]), "8000")).unwrap_err();
    assert_eq!(error, ForkError::Failed(SpawnError { step: SpawnStep::Mask, errno: Errno::EINVAL }));
    assert!(template.fork(&instance(1, &["true"])).is_ok());
}

#[test]
fn programs_of_other_languages_run() {
    let directory = tempfile::tempdir().unwrap();
    let script = directory.path().join("script");
    write_executable(&script, "#!/bin/sh -e\necho \"$0 $1\"\n");
    let cpp = directory.path().join("stream");
    std::fs::write(
        directory.path().join("stream.cc"),
        "#include <iostream>\n#include <stdexcept>\nint main(int, char **v) {\n\
         try { throw std::runtime_error(v[1]); } catch (std::exception &e) { std::cout << e.what() << std::endl; } }",
    )
    .unwrap();
    let made = Command::new("c++").arg(directory.path().join("stream.cc")).arg("-o").arg(&cpp).status();
    let this_test = std::env::current_exe().unwrap();
    let mut programs = vec![
        (script.clone(), vec!["called", "r%r"], format!("{} r7\n", script.display())),
        ("/bin/bash".into(), vec!["bash", "-c", "echo $(( $1 + 1 ))", "x", "%r"], "8\n".to_owned()),
        (this_test, vec!["rust", "--list", "--exact", "none%r"], "0 tests, 0 benchmarks\n".to_owned()),
    ];
    if made.is_ok_and(|status| status.success()) {
        programs.push((cpp, vec!["stream", "r%r"], "r7\n".to_owned()));
    }
    if let Some(python) =
        ["/usr/bin/python3", "/usr/local/bin/python3"].iter().find(|path| Path::new(path).exists())
    {
        programs.push((
            python.into(),
            vec!["python3", "-c", "import sys, os; print(sys.argv[1], os.environ['A'])", "r%r"],
            "r7 1\n".to_owned(),
        ));
    }
    for (program, arguments, expected) in programs {
        let context = context(&program, &["A=1", "PATH=/usr/bin:/bin"]);
        let mut template = Template::load_until_main(&context, &instance(0, &arguments)).unwrap();
        let (text, exit, _) = run(&mut template, instance(7, &arguments)).unwrap();
        assert_eq!((text, exit), (expected, ExitStatus::Code(0)), "{}", program.display());
    }
}
