//! Why `pjwctl spawn` has started nothing: the errors of programs that could not be loaded, and the exit code.

use std::ffi::{CStr, OsStr};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use anyhow::anyhow;
use pjw_spawn::proxy::TemplateError;
use pjw_spawn::{CheckError, SpawnError};

use super::instance::{start_failure_code, start_failure_remedy};
use crate::commands::run::{NOT_EXECUTABLE, NOT_FOUND};

/// Error: the program could not be started when it was loaded before the first instance. The cause and the exit code are
/// those of an instance that fails to start with the same error.
#[derive(Debug, thiserror::Error)]
#[error("{}: {error}{}", .program.display(), start_failure_remedy(*.error, .program))]
struct UnstartableProgram {
    error: SpawnError,
    /// The path of the program.
    program: PathBuf,
}

/// An option for which pjwctl loads the program before the first instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LoadOption {
    /// `--proxy always`: the instances are forked from the loaded program.
    Proxy,
    /// `--replicate`: the loaded program shows which libraries it uses.
    Replicate,
}

impl LoadOption {
    fn name(self) -> &'static str {
        match self {
            Self::Proxy => "--proxy",
            Self::Replicate => "--replicate",
        }
    }

    /// Returns how the program can be started without being loaded before.
    fn alternative(self) -> &'static str {
        match self {
            Self::Proxy => "use --proxy auto or never",
            Self::Replicate => "start without --replicate",
        }
    }
}

/// Returns the error for the program at `program_path`, which could not be loaded for `option` because of `refusal`.
pub(super) fn load_error(refusal: TemplateError, program_path: &CStr, option: LoadOption) -> anyhow::Error {
    let program = Path::new(OsStr::from_bytes(program_path.to_bytes()));
    let (option, alternative) = (option.name(), option.alternative());
    let remedy = match refusal {
        TemplateError::StartFailed(error) => {
            return UnstartableProgram { error, program: program.to_owned() }.into();
        }
        TemplateError::Damaged => "copy or build the program again".to_owned(),
        TemplateError::PidfdForbidden(_) => {
            format!("allow pidfd_open(2) in the seccomp profile, or {alternative}")
        }
        _ if refusal.is_program_failure() => {
            format!(
                "it fails without {option} too: start it once alone, and check its file and its libraries"
            )
        }
        _ => alternative.to_owned(),
    };
    anyhow!("{option} can't load {}: {refusal}; {remedy}", program.display())
}

/// Returns the exit code of pjwctl if nothing was started because of `error`: 127 if a program or its interpreter does
/// not exist, 126 if a program can't be executed, and otherwise 1.
pub(super) fn exit_code(error: &anyhow::Error) -> u8 {
    match (error.downcast_ref::<CheckError>(), error.downcast_ref::<UnstartableProgram>()) {
        (Some(CheckError::NoProgram { .. }), _) => NOT_FOUND,
        (Some(CheckError::NotExecutable { .. }), _) => NOT_EXECUTABLE,
        (_, Some(UnstartableProgram { error, .. })) => start_failure_code(*error),
        _ => 1,
    }
}

#[cfg(test)]
mod tests {
    use nix::errno::Errno;
    use pjw_spawn::SpawnStep;

    use super::*;

    #[test]
    fn a_program_that_does_not_start_has_the_exit_code_and_the_remedy_that_it_has_without_the_option() {
        let gone = "; the program, or the interpreter that it names, is gone: install it again";
        for (step, errno, code, end) in [
            (SpawnStep::Exec, Errno::ENOENT, 127, gone),
            (SpawnStep::Exec, Errno::ENOEXEC, 126, "or a first line with #!"),
            (SpawnStep::Clone, Errno::EPERM, 1, "the system call: allow clone3(2) in the profile"),
        ] {
            for option in [LoadOption::Proxy, LoadOption::Replicate] {
                let refusal = TemplateError::StartFailed(SpawnError { step, errno });
                let error = load_error(refusal, c"/no/such/program", option);
                let text = error.to_string();
                assert_eq!(exit_code(&error), code, "{text}");
                assert!(text.starts_with("/no/such/program: step ") && text.ends_with(end), "{text}");
                assert!(!["ptrace", option.name()].iter().any(|word| text.contains(word)), "{text}");
            }
        }
    }

    #[test]
    fn a_start_without_the_option_is_advised_only_if_it_helps() {
        let seccomp = "; allow pidfd_open(2) in the seccomp profile, or ";
        let fails =
            "; it fails without OPTION too: start it once alone, and check its file and its libraries";
        for (refusal, remedy, advises_start) in [
            (TemplateError::Privileged, "; ", true),
            (TemplateError::Forbidden(Errno::EPERM), "; ", true),
            (TemplateError::PidfdForbidden(Errno::EPERM), seccomp, true),
            (TemplateError::Exited(127), fails, false),
            (TemplateError::Damaged, "; copy or build the program again", false),
        ] {
            for (option, name, alternative) in [
                (LoadOption::Proxy, "--proxy", "use --proxy auto or never"),
                (LoadOption::Replicate, "--replicate", "start without --replicate"),
            ] {
                let error = load_error(refusal, c"/bin/program", option);
                let end = if advises_start { alternative } else { "" };
                let expected = format!(
                    "{name} can't load /bin/program: {refusal}{}{end}",
                    remedy.replace("OPTION", name)
                );
                assert_eq!((error.to_string(), exit_code(&error)), (expected, 1));
            }
        }
    }
}
