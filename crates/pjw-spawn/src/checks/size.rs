//! Whether the arguments and the environment of the instances fit the limits of execve(2).

use std::ffi::CString;
use std::sync::Arc;

use nix::sys::resource::{Resource, getrlimit};
use nix::unistd::{SysconfVar, sysconf};

use super::error::CheckError;
use crate::arguments::{Argument, Arguments, Piece};
use crate::instance::Instance;
use crate::layout::RANK_VARIABLES;
use crate::setup::Setup;

/// The longest string with its NUL byte, in pages: `MAX_ARG_STRLEN` of the kernel.
const MAX_STRING_PAGES: usize = 32;
/// The least value of the limit for all strings and pointers together: `ARG_MAX`.
const MIN_TOTAL: u64 = 128 * 1024;
/// The greatest value of the limit for all strings and pointers together: 3/4 of the usual stack (`_STK_LIM`).
const MAX_TOTAL: u64 = 6 * 1024 * 1024;
/// The number of bytes that are counted for the value of a rank variable, with its NUL byte. A number has at most 10
/// digits. A list of CPUs can be longer.
const RANK_VALUE_BYTES: usize = 11;

/// The size of some strings: the longest one, and all of them with their pointers.
#[derive(Debug, Clone, Copy, Default)]
struct Size {
    longest: usize,
    total: usize,
}

/// Checks that the arguments and the environment of at least one instance are small enough for execve(2). Fails only if
/// they are too large for every instance. The error is then about the first one. `setup` contains the environment that
/// all instances have in common. The limits are those of bprm_stack_limits() in fs/exec.c, Linux 6.18.
pub(super) fn check_sizes(setup: &Setup, instances: &[Instance]) -> Result<(), CheckError> {
    let (max_string, max_total) = (max_string(), max_total());
    let mut shared = size_of_strings(&setup.environment);
    shared.add(setup.program.as_bytes_with_nul().len());
    if setup.has_rank_variables {
        RANK_VARIABLES.iter().for_each(|name| shared.add(name.len() + 1 + RANK_VALUE_BYTES));
    }
    let mut previous: Option<(&Arc<Arguments>, Size)> = None;
    let mut first_error = None;
    for instance in instances {
        // Neighbours mostly share their arguments.
        let arguments_size = match previous {
            Some((arguments, size)) if Arc::ptr_eq(arguments, &instance.arguments) => size,
            _ => size_of_arguments(&instance.arguments),
        };
        previous = Some((&instance.arguments, arguments_size));
        let environment_size = shared.with(size_of_strings(&instance.variables));
        let size = environment_size.with(arguments_size);
        if size.longest <= max_string && size.total as u64 <= max_total {
            return Ok(());
        }
        first_error.get_or_insert_with(|| {
            if size.longest > max_string {
                long_string_error(setup, instance, max_string)
            } else {
                total_error(arguments_size, environment_size, max_total)
            }
        });
    }
    Err(first_error.unwrap_or(CheckError::NoInstances))
}

/// Returns the error for an instance with a string that is too long for execve(2). The error names the first such
/// argument, or else the first such variable. `max_string` is the limit, which [`max_string`] returns.
fn long_string_error(setup: &Setup, instance: &Instance, max_string: usize) -> CheckError {
    let bytes = |string: &CString| string.as_bytes_with_nul().len();
    let is_too_long = |string: &CString| bytes(string) > max_string;
    let arguments = instance.arguments.expand(instance.rank, instance.size);
    let mut variables = setup.environment.iter().chain(&instance.variables);
    let (string, size, remedy, is_environment) = if let Some(index) = arguments.iter().position(is_too_long) {
        (
            format!("argument {index}"),
            bytes(&arguments[index]),
            "shorten it, or pass its text in a file",
            false,
        )
    } else if let Some(variable) = variables.find(|variable| is_too_long(variable)) {
        let name = variable.to_bytes().split(|byte| *byte == b'=').next().unwrap_or_default();
        let string = format!("the variable {}", String::from_utf8_lossy(name));
        (string, bytes(variable), "shorten it, or remove it from the environment", true)
    } else {
        ("the path of the program".to_owned(), bytes(&setup.program), "use a shorter path", false)
    };
    CheckError::TooLarge {
        why: format!(
            "{string} has {size} bytes with its NUL byte, and execve(2) takes at most {max_string} (MAX_ARG_STRLEN)"
        ),
        remedy: remedy.to_owned(),
        is_environment,
    }
}

/// Returns the error for an instance whose arguments and environment are together too large for execve(2), while each
/// string is short enough. `arguments` and `environment` are their sizes, and `max_total` is the limit, which
/// [`max_total`] returns.
fn total_error(arguments: Size, environment: Size, max_total: u64) -> CheckError {
    let total = arguments.with(environment).total as u64;
    let is_too_large = |size: Size| size.total as u64 > max_total;
    let remedy = match (is_too_large(arguments), is_too_large(environment)) {
        (true, false) => "give fewer or shorter arguments",
        (false, true) => "start with fewer or shorter variables",
        (true, true) => "make both smaller",
        (false, false) => "make one of them smaller",
    };
    // A larger stack limit helps up to the greatest value that the kernel takes from it.
    let higher_limit = if total <= MAX_TOTAL { ", or raise the stack limit (ulimit -s)" } else { "" };
    let because = if max_total < MAX_TOTAL { " with this stack limit" } else { "" };
    CheckError::TooLarge {
        why: format!(
            "the arguments and the environment have about {total} bytes with their pointers, and execve(2) takes at \
             most {max_total}{because}"
        ),
        remedy: format!("{remedy}{higher_limit}"),
        is_environment: is_too_large(environment) && !is_too_large(arguments),
    }
}

/// Returns the limit for a string with its NUL byte, in bytes.
fn max_string() -> usize {
    let page = sysconf(SysconfVar::PAGE_SIZE).ok().flatten().and_then(|size| usize::try_from(size).ok());
    MAX_STRING_PAGES * page.unwrap_or(4096)
}

/// Returns the limit for all strings and pointers together, in bytes.
fn max_total() -> u64 {
    let stack = getrlimit(Resource::RLIMIT_STACK).map_or(u64::MAX, |(soft, _)| soft);
    (stack / 4).clamp(MIN_TOTAL, MAX_TOTAL)
}

/// Returns the size of a list of strings, with their NUL bytes and pointers.
fn size_of_strings(strings: &[CString]) -> Size {
    let mut size = Size::default();
    strings.iter().for_each(|string| size.add(string.as_bytes_with_nul().len()));
    size
}

/// Returns the least size of an argument list. A placeholder stands for a number of up to 10 digits, and counts as
/// one digit.
fn size_of_arguments(arguments: &Arguments) -> Size {
    let min_length = |piece: &Piece| if let Piece::Literal(literal) = piece { literal.len() } else { 1 };
    let mut size = Size::default();
    for argument in &arguments.list {
        size.add(match argument {
            Argument::Fixed(fixed) => fixed.as_bytes_with_nul().len(),
            Argument::PerInstance(pieces) => pieces.iter().map(min_length).sum::<usize>() + 1,
        });
    }
    size
}

impl Size {
    /// Adds a string of `bytes` bytes. This number includes its NUL byte.
    fn add(&mut self, bytes: usize) {
        self.longest = self.longest.max(bytes);
        self.total += bytes + size_of::<usize>();
    }

    /// Returns the size of the strings of both values together.
    fn with(self, other: Self) -> Self {
        Self { longest: self.longest.max(other.longest), total: self.total + other.total }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::context::SpawnContext;
    use crate::instance::Stdio;
    use crate::placement::Placement;

    /// The instance with the rank 10 of 11, of the program `true` with one argument and one variable of its own.
    fn instance(argument: &str, variable: &str) -> Instance {
        Instance {
            rank: 10,
            size: 11,
            arguments: Arc::new(Arguments::parse(&["true", argument]).unwrap()),
            variables: vec![CString::new(variable).unwrap()],
            placement: Arc::new(Placement::default()),
            stdio: Stdio::default(),
        }
    }

    fn check(instances: &[Instance]) -> Result<(), String> {
        // The environment of the test can be large.
        let context = SpawnContext::new("true").unwrap().set_environment([("A", "1")]);
        check_sizes(&context.setup, instances).map_err(|error| error.to_string())
    }

    #[test]
    fn the_first_string_that_is_too_long_is_named_with_its_limit_and_a_remedy_for_it() {
        let max_string = max_string();
        let long = "x".repeat(max_string);
        let limit = format!("and execve(2) takes at most {max_string} (MAX_ARG_STRLEN)");
        assert_eq!(
            check(&[instance(&long, &format!("LONG={long}"))]).unwrap_err(),
            format!(
                "argument 1 has {} bytes with its NUL byte, {limit}; shorten it, or pass its text in a file",
                max_string + 1
            )
        );
        let with_placeholders = format!("%r{long}%n");
        let error = check(&[instance(&with_placeholders, "A=1")]).unwrap_err();
        assert!(error.starts_with(&format!("argument 1 has {} bytes", max_string + 5)), "{error}");
        assert_eq!(
            check(&[instance("short", &format!("LONG={long}"))]).unwrap_err(),
            format!(
                "the variable LONG has {} bytes with its NUL byte, {limit}; shorten it, or remove it from the \
                 environment",
                max_string + 6
            )
        );
    }

    #[test]
    fn one_instance_that_is_small_enough_is_enough() {
        let max_string = max_string();
        let long = instance(&"x".repeat(max_string), "A=1");
        assert_eq!(check(&[long.clone(), instance(&"x".repeat(max_string - 1), "A=1"), long]), Ok(()));
    }

    #[test]
    fn the_remedy_for_a_total_that_is_too_large_names_only_what_helps() {
        let error = |arguments, environment, max_total| {
            let size = |total| Size { longest: 0, total };
            total_error(size(arguments), size(environment), max_total).to_string()
        };
        assert_eq!(
            error(200_000, 5_000, 131_072),
            "the arguments and the environment have about 205000 bytes with their pointers, and execve(2) takes at \
             most 131072 with this stack limit; give fewer or shorter arguments, or raise the stack limit (ulimit -s)"
        );
        for (arguments, environment, remedy) in [
            (5_000, 200_000, "; start with fewer or shorter variables, or raise the stack limit (ulimit -s)"),
            (100_000, 100_000, "; make one of them smaller, or raise the stack limit (ulimit -s)"),
            (200_000, 200_000, "; make both smaller, or raise the stack limit (ulimit -s)"),
            (7 << 20, 5_000, " with this stack limit; give fewer or shorter arguments"),
        ] {
            let text = error(arguments, environment, MIN_TOTAL);
            assert!(text.ends_with(remedy), "{arguments} and {environment}: {text}");
        }
        let text = error(7 << 20, 5_000, MAX_TOTAL);
        assert!(text.ends_with("takes at most 6291456; give fewer or shorter arguments"), "{text}");
    }
}
