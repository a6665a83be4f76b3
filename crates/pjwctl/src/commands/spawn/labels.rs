//! The output of instances, with the rank before each line.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, PipeReader, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use anyhow::Context;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use pjw_spawn::Stdio;

use crate::output;

/// The longest line in bytes, without its end. A longer one is cut behind each so many bytes.
const MAX_LINE: usize = 1 << 20;
/// The bytes that are read at once: as many as a pipe usually holds.
const BUFFER: usize = 64 * 1024;

/// The pipes from which pjwctl reads the output of its instances, for the option `--label`. pjwctl prints each line
/// with the rank of the instance before it.
#[derive(Default)]
pub(super) struct LabelledPipes {
    pipes: BTreeMap<u64, Labelled>,
    /// Whether standard output and standard error took no more, for another reason than a closed pipe. What the
    /// instances write to that stream is dropped then: an instance that can go on does not end with its output.
    has_failed: [bool; 2],
}

/// One stream of an instance.
struct Labelled {
    rank: u32,
    is_error: bool,
    pipe: File,
    line: LineBuffer,
}

/// The beginning of a line whose end has not been read.
#[derive(Default)]
struct LineBuffer(Vec<u8>);

impl LabelledPipes {
    /// Makes two pipes for the standard output and the standard error of the instance with the rank `rank`. Returns the
    /// writing ends of the pipes.
    pub(super) fn add(&mut self, rank: u32) -> anyhow::Result<Stdio> {
        let mut stream = |is_error: bool| -> anyhow::Result<Option<Arc<OwnedFd>>> {
            let (reader, writer) = io::pipe().context("a pipe for the output can't be made")?;
            let number = u64::from(rank) * 2 + u64::from(is_error);
            let pipe = nonblocking(reader)?;
            self.pipes.insert(number, Labelled { rank, is_error, pipe, line: LineBuffer::default() });
            Ok(Some(Arc::new(writer.into())))
        };
        Ok(Stdio { input: None, output: stream(false)?, error: stream(true)? })
    }

    /// Iterates over the open pipes: the number of each pipe, and its file descriptor for reading.
    pub(super) fn descriptors(&self) -> impl Iterator<Item = (u64, BorrowedFd<'_>)> {
        self.pipes.iter().map(|(number, labelled)| (*number, labelled.pipe.as_fd()))
    }

    /// Reads output that is available in the pipe with the number `number`, at most 64 KiB, and prints it with labels.
    /// Closes the pipe if it has reached its end, or if the reader of the output has closed its own pipe.
    pub(super) fn read(&mut self, number: u64) {
        let Some(mut labelled) = self.pipes.remove(&number) else { return };
        if matches!(self.print_available(&mut labelled), Ok(Available::Bytes(_) | Available::Nothing)) {
            self.pipes.insert(number, labelled);
        }
    }

    /// Prints the output that is available in all pipes, and then closes the pipes.
    pub(super) fn finish(&mut self) {
        for (_, mut labelled) in std::mem::take(&mut self.pipes) {
            // What an instance left in the background may write for ever.
            let mut left = capacity(&labelled.pipe);
            loop {
                match self.print_available(&mut labelled) {
                    Ok(Available::Bytes(count)) if count < left => left -= count,
                    Ok(Available::Bytes(_) | Available::Nothing) => {
                        let print = |line: &[u8]| self.print(labelled.rank, labelled.is_error, line);
                        let _ = labelled.line.take_rest(print);
                        break;
                    }
                    Ok(Available::End) | Err(_) => break,
                }
            }
        }
    }

    /// Returns whether output was lost because standard output or standard error took no more. A closed pipe does not
    /// count.
    pub(super) fn has_failed(&self) -> bool {
        self.has_failed.contains(&true)
    }

    /// Reads once, and prints the lines whose end is known.
    ///
    /// # Errors
    /// If the pipe can't be read, or if the reader of the output has closed its own pipe.
    fn print_available(&mut self, labelled: &mut Labelled) -> io::Result<Available> {
        let Labelled { rank, is_error, pipe, line } = labelled;
        let print = |line: &[u8]| self.print(*rank, *is_error, line);
        let mut bytes = [0; BUFFER];
        match pipe.read(&mut bytes) {
            Ok(0) => line.take_rest(print).map(|()| Available::End),
            Ok(count) => line.add(&bytes[..count], print).map(|()| Available::Bytes(count)),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(Available::Nothing),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(Available::Bytes(0)),
            Err(error) => Err(error),
        }
    }

    /// Prints a line with its label. The first failure of a stream is reported, and from then on its lines are dropped.
    ///
    /// # Errors
    /// If the reader of the output has closed its pipe.
    fn print(&mut self, rank: u32, is_error: bool, line: &[u8]) -> io::Result<()> {
        if self.has_failed[usize::from(is_error)] {
            return Ok(());
        }
        let text = [format!("{rank}: ").as_bytes(), line, b"\n"].concat();
        let written = if is_error {
            output::write_all_waiting(io::stderr().as_fd(), &text)
        } else {
            output::write_all_waiting(io::stdout().as_fd(), &text)
        };
        match written {
            Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
                self.has_failed[usize::from(is_error)] = true;
                let name = if is_error { "error" } else { "output" };
                output::print_error(&format!(
                    "can't write the output of the instances to standard {name}: {error}; the instances go on, and what \
                     they print there is lost: check the target of standard {name}"
                ));
                Ok(())
            }
            other => other,
        }
    }
}

/// What one read from a pipe has found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Available {
    /// So many bytes. More may be there.
    Bytes(usize),
    /// Nothing now.
    Nothing,
    /// Nothing, and no process has the writing end any more.
    End,
}

fn nonblocking(reader: PipeReader) -> anyhow::Result<File> {
    fcntl(&reader, FcntlArg::F_SETFL(OFlag::O_NONBLOCK)).context("a pipe for the output can't be set up")?;
    Ok(OwnedFd::from(reader).into())
}

/// The most bytes that a pipe can hold. An instance may have changed it.
fn capacity(pipe: &File) -> usize {
    let capacity = fcntl(pipe, FcntlArg::F_GETPIPE_SZ).ok().and_then(|bytes| usize::try_from(bytes).ok());
    capacity.unwrap_or(BUFFER)
}

impl LineBuffer {
    /// Adds `bytes`, and calls `print` for each line that ends in them, without its end. A line of more than
    /// [`MAX_LINE`] bytes is cut.
    fn add(&mut self, bytes: &[u8], mut print: impl FnMut(&[u8]) -> io::Result<()>) -> io::Result<()> {
        for piece in bytes.split_inclusive(|byte| *byte == b'\n') {
            let (mut rest, is_whole) = piece.strip_suffix(b"\n").map_or((piece, false), |line| (line, true));
            // A line of exactly the limit is not cut, so nothing is printed before the next byte is there.
            while rest.len() > MAX_LINE - self.0.len() {
                let (head, tail) = rest.split_at(MAX_LINE - self.0.len());
                self.0.extend_from_slice(head);
                // Not cleared: the memory of a long line is not kept for each instance.
                print(&std::mem::take(&mut self.0))?;
                rest = tail;
            }
            self.0.extend_from_slice(rest);
            if is_whole {
                print(&std::mem::take(&mut self.0))?;
            }
        }
        Ok(())
    }

    /// Calls `print` for the beginning of a line that has no end.
    fn take_rest(&mut self, mut print: impl FnMut(&[u8]) -> io::Result<()>) -> io::Result<()> {
        if self.0.is_empty() { Ok(()) } else { print(&std::mem::take(&mut self.0)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The lines of a stream of these pieces, as numbers of bytes.
    fn lengths(pieces: &[&[u8]]) -> Vec<usize> {
        let (mut buffer, mut lengths) = (LineBuffer::default(), Vec::new());
        let mut print = |line: &[u8]| {
            lengths.push(line.len());
            Ok(())
        };
        for piece in pieces {
            buffer.add(piece, &mut print).unwrap();
        }
        buffer.take_rest(print).unwrap();
        lengths
    }

    #[test]
    fn a_line_is_cut_at_the_limit_only_however_it_is_read() {
        assert_eq!(lengths(&[b"ab\n\nc", b"d\n", b"e"]), [2, 0, 2, 1]);
        for (length, expected) in [
            (200_000, vec![200_000]),
            (MAX_LINE, vec![MAX_LINE]),
            (MAX_LINE + 1, vec![MAX_LINE, 1]),
            (2 * MAX_LINE, vec![MAX_LINE, MAX_LINE]),
        ] {
            let text = [vec![b'x'; length], b"\n".to_vec()].concat();
            for size in [4_096, 50_021, 3 * MAX_LINE] {
                let pieces: Vec<&[u8]> = text.chunks(size).collect();
                assert_eq!(lengths(&pieces), expected, "{length} in pieces of {size}");
                let without_end: Vec<&[u8]> = text[..length].chunks(size).collect();
                assert_eq!(lengths(&without_end), expected, "{length} without an end");
            }
        }
    }
}
