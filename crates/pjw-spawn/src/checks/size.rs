//! Whether the arguments and the environment of the instances fit the limits of execve(2).

use std::ffi::CString;
use std::sync::Arc;

use nix::sys::resource::{Resource, getrlimit};

use super::error::CheckError;
use crate::arguments::{Argument, Arguments, Piece};
use crate::instance::Instance;
use crate::layout::RANK_VARIABLES;
use crate::setup::Setup;

/// The longest string with its NUL byte: `MAX_ARG_STRLEN`, 32 pages of 4 KiB. With larger pages the limit is higher.
const MAX_STRING: usize = 128 * 1024;
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
/// they are too large for every instance. `setup` contains the environment that all instances have in common. The
/// limits are those of bprm_stack_limits() in fs/exec.c, Linux 6.18.
pub(super) fn check_sizes(setup: &Setup, instances: &[Instance]) -> Result<(), CheckError> {
    let max_total = max_total();
    let mut shared = size_of_strings(&setup.environment);
    shared.add(setup.program.as_bytes_with_nul().len());
    if setup.has_rank_variables {
        RANK_VARIABLES.iter().for_each(|name| shared.add(name.len() + 1 + RANK_VALUE_BYTES));
    }
    let mut previous: Option<(&Arc<Arguments>, Size)> = None;
    let mut why = None;
    for instance in instances {
        // Neighbours mostly share their arguments.
        let arguments_size = match previous {
            Some((arguments, size)) if Arc::ptr_eq(arguments, &instance.arguments) => size,
            _ => size_of_arguments(&instance.arguments),
        };
        previous = Some((&instance.arguments, arguments_size));
        let size = shared.with(arguments_size).with(size_of_strings(&instance.variables));
        if size.longest <= MAX_STRING && size.total as u64 <= max_total {
            return Ok(());
        }
        why.get_or_insert(if size.longest > MAX_STRING {
            format!("a string has {} bytes, at most {MAX_STRING} are allowed", size.longest)
        } else {
            format!("they have {} bytes, at most {max_total} are allowed", size.total)
        });
    }
    Err(CheckError::TooLarge { why: why.unwrap_or_default() })
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
