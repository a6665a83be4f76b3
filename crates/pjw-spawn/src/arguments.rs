//! The arguments of instances, with placeholders: `%r` is the rank, `%n` the number of instances, `%%` a percent sign.

use std::ffi::{CString, OsStr};
use std::os::unix::ffi::OsStrExt;

use thiserror::Error;

/// The argument list for a group of processes of one program, including argument 0. An argument may contain
/// placeholders: `%r` stands for the rank of the process (its position in the group, counted from 0), `%n` for the
/// number of processes, and `%%` for a percent sign. [`Arguments::expand`] returns the arguments of one process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Arguments {
    pub(crate) list: Vec<Argument>,
}

/// One argument of a command: a fixed string, or a string with placeholders whose text differs between instances
/// (processes).
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Argument {
    /// A string that is the same for all instances.
    Fixed(CString),
    /// The parts from which the text for each instance is made.
    PerInstance(Vec<Piece>),
}

/// A part of an argument: a literal string without NUL bytes, or a placeholder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Piece {
    Literal(Vec<u8>),
    Rank,
    Size,
}

/// Error: an argument list for a group of processes is empty, or has an argument with an unknown placeholder or a NUL
/// byte.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum ArgumentError {
    /// An argument contains a percent sign that is not followed by `r`, `n` or `%`.
    #[error(
        "argument {argument} has the unknown placeholder {placeholder}: use %r for the rank, %n for the number of \
         instances, %% for a percent sign"
    )]
    UnknownPlaceholder {
        /// The argument. Bytes that are not UTF-8 are replaced by U+FFFD.
        argument: String,
        /// The unknown placeholder, such as `%x`. `%` alone if it ends the argument.
        placeholder: String,
    },
    /// An argument contains a NUL byte, at which execve(2) would end the argument.
    #[error("argument {argument} has a NUL byte: remove it")]
    NulByte {
        /// The argument. Bytes that are not UTF-8 are replaced by U+FFFD.
        argument: String,
    },
    /// The list is empty: it does not even contain argument 0.
    #[error("the argument list is empty: give at least argument 0, the name of the program")]
    EmptyList,
}

impl Arguments {
    /// Makes the argument list for a group of processes from `list`, which begins with argument 0. In each argument,
    /// the placeholder `%r` stands for the rank of a process (its position in the group, counted from 0), `%n` for the
    /// number of processes, and `%%` for a percent sign.
    ///
    /// # Errors
    /// If an argument contains an unknown placeholder or a NUL byte, or if the list is empty.
    pub fn parse<S: AsRef<OsStr>>(list: &[S]) -> Result<Self, ArgumentError> {
        Self::from_list(list, split_at_placeholders)
    }

    /// Makes an argument list without placeholders from `list`, which begins with argument 0. All processes get the
    /// same arguments. A percent sign has no special meaning.
    ///
    /// # Errors
    /// If an argument contains a NUL byte, or if the list is empty.
    pub fn literal<S: AsRef<OsStr>>(list: &[S]) -> Result<Self, ArgumentError> {
        Self::from_list(list, |argument| Ok(vec![Piece::Literal(argument.to_vec())]))
    }

    /// Makes the argument list for a group of processes of one program. `program`, the name of the program, becomes
    /// argument 0 without changes. `arguments` contains the further arguments, which can have placeholders: `%r` stands
    /// for the rank of a process (its position in the group, counted from 0), `%n` for the number of processes, and
    /// `%%` for a percent sign.
    ///
    /// # Errors
    /// If one of `arguments` contains an unknown placeholder, or if the name or an argument contains a NUL byte.
    pub fn for_command<S: AsRef<OsStr>>(program: &OsStr, arguments: &[S]) -> Result<Self, ArgumentError> {
        let mut list = Self::literal(&[program])?.list;
        match Self::parse(arguments) {
            Ok(arguments) => list.extend(arguments.list),
            Err(ArgumentError::EmptyList) => {}
            Err(error) => return Err(error),
        }
        Ok(Self { list })
    }

    /// Makes the argument list from `list`. `split` divides an argument into literal texts and placeholders. Fails if
    /// an argument contains a NUL byte, if `split` fails, or if `list` is empty.
    fn from_list<S: AsRef<OsStr>>(
        list: &[S],
        split: impl Fn(&[u8]) -> Result<Vec<Piece>, ArgumentError>,
    ) -> Result<Self, ArgumentError> {
        let parse_argument = |text: &S| {
            let bytes = text.as_ref().as_bytes();
            if bytes.contains(&0) {
                return Err(ArgumentError::NulByte { argument: lossy(bytes) });
            }
            let pieces = split(bytes)?;
            let literals: Option<Vec<&[u8]>> = pieces.iter().map(Piece::literal).collect();
            Ok(match literals.map(|literals| CString::new(literals.concat())) {
                Some(Ok(fixed)) => Argument::Fixed(fixed),
                _ => Argument::PerInstance(pieces),
            })
        };
        let list: Vec<Argument> = list.iter().map(parse_argument).collect::<Result<_, _>>()?;
        if list.is_empty() { Err(ArgumentError::EmptyList) } else { Ok(Self { list }) }
    }

    /// Returns the arguments of one process in a group of `process_count` processes. `rank` is the rank of the process:
    /// its position in the group, counted from 0. The placeholders are replaced: `%r` by the rank, `%n` by the number
    /// of processes, `%%` by a percent sign.
    #[must_use]
    pub fn expand(&self, rank: u32, process_count: u32) -> Vec<CString> {
        let expanded = self.list.iter().map(|argument| match argument {
            Argument::Fixed(fixed) => fixed.clone(),
            Argument::PerInstance(pieces) => {
                let mut bytes = Vec::new();
                pieces.iter().for_each(|piece| piece.append(rank, process_count, &mut bytes));
                CString::new(bytes).unwrap_or_default()
            }
        });
        expanded.collect()
    }
}

impl Piece {
    fn literal(&self) -> Option<&[u8]> {
        match self {
            Self::Literal(bytes) => Some(bytes),
            Self::Rank | Self::Size => None,
        }
    }

    /// Appends the text of this part of an argument to `bytes`. A placeholder becomes `rank` (the rank of the instance)
    /// or `size` (the number of instances).
    pub(crate) fn append(&self, rank: u32, size: u32, bytes: &mut Vec<u8>) {
        match self {
            Self::Literal(literal) => bytes.extend_from_slice(literal),
            Self::Rank => bytes.extend_from_slice(rank.to_string().as_bytes()),
            Self::Size => bytes.extend_from_slice(size.to_string().as_bytes()),
        }
    }
}

/// Divides an argument into literal texts and the placeholders `%r` and `%n`. `%%` becomes a percent sign. Fails if the
/// argument contains another character after a percent sign, or ends with one.
fn split_at_placeholders(argument: &[u8]) -> Result<Vec<Piece>, ArgumentError> {
    let mut pieces = Vec::new();
    let mut literal = Vec::new();
    let mut bytes = argument.iter().copied();
    while let Some(byte) = bytes.next() {
        if byte != b'%' {
            literal.push(byte);
            continue;
        }
        let piece = match bytes.next() {
            Some(b'%') => {
                literal.push(b'%');
                continue;
            }
            Some(b'r') => Piece::Rank,
            Some(b'n') => Piece::Size,
            other => {
                let placeholder: Vec<u8> = [b'%'].into_iter().chain(other).collect();
                return Err(ArgumentError::UnknownPlaceholder {
                    argument: lossy(argument),
                    placeholder: lossy(&placeholder),
                });
            }
        };
        pieces.push(Piece::Literal(std::mem::take(&mut literal)));
        pieces.push(piece);
    }
    pieces.push(Piece::Literal(literal));
    pieces.retain(|piece| piece.literal().is_none_or(|literal| !literal.is_empty()));
    Ok(pieces)
}

fn lossy(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn expand(argument: &str, rank: u32, size: u32) -> String {
        let list = Arguments::parse(&[argument]).unwrap().expand(rank, size);
        list[0].to_str().unwrap().to_owned()
    }

    #[test]
    fn placeholders_are_replaced_for_each_instance() {
        assert_eq!(expand("out.%r", 3, 8), "out.3");
        assert_eq!(expand("%r/%n", 3, 8), "3/8");
        assert_eq!(expand("100%%", 3, 8), "100%");
        assert_eq!(expand("%%r", 3, 8), "%r");
        assert_eq!(expand("", 3, 8), "");
    }

    #[test]
    fn an_unknown_placeholder_is_refused_by_name() {
        for (argument, placeholder) in [("a%x", "%x"), ("50%", "%"), ("%R", "%R")] {
            let error = Arguments::parse(&[argument]).unwrap_err();
            assert!(
                matches!(&error, ArgumentError::UnknownPlaceholder { placeholder: p, .. } if p == placeholder)
            );
            assert!(error.to_string().contains("%r for the rank"), "{error}");
        }
    }

    #[test]
    fn literal_arguments_keep_their_percent_signs() {
        let list = Arguments::literal(&["prog", "%x%r"]).unwrap();
        assert_eq!(list.expand(1, 2)[1].to_str().unwrap(), "%x%r");
    }

    #[test]
    fn the_name_of_a_program_has_no_placeholders() {
        let list = Arguments::for_command(OsStr::new("50%"), &["%r"]).unwrap().expand(7, 8);
        assert_eq!(list, [c"50%".to_owned(), c"7".to_owned()]);
        assert_eq!(
            Arguments::for_command::<&str>(OsStr::new("prog"), &[]).unwrap().expand(0, 1),
            [c"prog".to_owned()]
        );
    }

    #[test]
    fn an_empty_list_and_a_nul_byte_are_refused() {
        assert_eq!(Arguments::parse::<&str>(&[]), Err(ArgumentError::EmptyList));
        assert!(matches!(Arguments::parse(&["a\0b"]), Err(ArgumentError::NulByte { .. })));
    }
}
