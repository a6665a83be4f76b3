//! The interpreter of a program: if it is missing, execve(2) fails with the same error as for a missing program.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{ErrorKind, Read};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use super::elf::DynamicSection;

/// The bytes of a file in which the kernel looks for the interpreter: `BINPRM_BUF_SIZE`, execve(2).
const HEAD_BYTES: u64 = 256;
/// The most scripts that the kernel takes as interpreters of each other: exec_binprm() in fs/exec.c, Linux 6.18.
const MAX_SCRIPTS: usize = 5;

/// Returns an error text with a remedy if the interpreter of the program in the file `program` is missing. The
/// interpreter of a script is named in its first line, and may be a script itself, whose interpreter is then checked
/// too. The interpreter of an ELF file is its dynamic linker. `None` if no interpreter is missing, or if a file can't
/// be read.
pub(super) fn missing_interpreter_text(program: &Path) -> Option<String> {
    let mut file = program.to_owned();
    for _ in 0..MAX_SCRIPTS {
        let Some(interpreter) = script_interpreter(&file) else {
            let linker = DynamicSection::read(&file)?.linker.filter(|linker| is_missing(linker))?;
            let linker = escaped(&linker);
            return Some(format!(
                "its dynamic linker {linker} is missing: install it, or a program that is built for this system"
            ));
        };
        if is_missing(&interpreter) {
            return Some(format!(
                "the interpreter {} in the first line of {} is missing: install it, or correct that line",
                escaped(&interpreter),
                escaped(&file)
            ));
        }
        file = interpreter;
    }
    None
}

/// Returns `path` with control characters escaped. If the first line of a script ends with CRLF, the carriage return
/// belongs to the name of the interpreter, and the user must see it.
fn escaped(path: &Path) -> String {
    path.to_string_lossy().escape_debug().to_string()
}

fn is_missing(path: &Path) -> bool {
    std::fs::metadata(path).is_err_and(|error| error.kind() == ErrorKind::NotFound)
}

/// Returns the interpreter of a script. `None` if the file does not begin with `#!`, or can't be read.
fn script_interpreter(program: &Path) -> Option<PathBuf> {
    let mut head = Vec::new();
    File::open(program).ok()?.take(HEAD_BYTES).read_to_end(&mut head).ok()?;
    let line = head.strip_prefix(b"#!")?.split(|byte| *byte == b'\n').next()?;
    let is_blank = |byte: &u8| [b' ', b'\t', 0].contains(byte);
    let interpreter = line.split(is_blank).find(|word| !word.is_empty())?;
    Some(OsStr::from_bytes(interpreter).into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_interpreter_is_named_also_that_of_an_interpreter() {
        let dir = tempfile::tempdir().unwrap();
        let file = |name: &str, text: &str| {
            let path = dir.path().join(name);
            std::fs::write(&path, text).unwrap();
            path
        };
        let text = |path: &Path| missing_interpreter_text(path).unwrap_or_default();
        let first = file("first", "#! /no/such/interpreter -x\n");
        assert_eq!(
            text(&first),
            format!(
                "the interpreter /no/such/interpreter in the first line of {} is missing: install it, or correct that line",
                first.display()
            )
        );
        let second = file("second", &format!("#!{}\n", first.display()));
        assert_eq!(text(&second), text(&first));
        assert!(text(&file("other system", "#!/bin/sh\r\n")).contains(r"/bin/sh\r in the first line"));
        for (name, content) in
            [("sound", "#!/bin/sh\n"), ("plain", "echo"), ("no name", "#!\n"), ("empty", "")]
        {
            assert_eq!(missing_interpreter_text(&file(name, content)), None, "{name}");
        }
        let own = file("own", "");
        std::fs::write(&own, format!("#!{}\n", own.display())).unwrap();
        assert_eq!(missing_interpreter_text(&own), None, "an end is found");
        assert_eq!(missing_interpreter_text(Path::new("/bin/true")), None);
        assert_eq!(missing_interpreter_text(Path::new("/no/such/program")), None);
    }
}
