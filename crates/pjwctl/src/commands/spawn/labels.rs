//! The output of instances, with the rank before each line.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, PipeReader, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use anyhow::Context;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use pjw_spawn::Stdio;

/// A line that is longer is printed in pieces.
const MAX_LINE: usize = 64 * 1024;

/// The pipes from which pjwctl reads the output of its instances, for the option `--label`. pjwctl prints each line
/// with the rank of the instance before it.
#[derive(Default)]
pub(super) struct LabelledPipes {
    pipes: BTreeMap<u64, Labelled>,
}

/// One stream of an instance.
struct Labelled {
    rank: u32,
    is_error: bool,
    pipe: File,
    /// The beginning of a line whose end has not been read.
    line: Vec<u8>,
}

impl LabelledPipes {
    /// Makes two pipes for the standard output and the standard error of the instance with the rank `rank`. Returns the
    /// writing ends of the pipes.
    pub(super) fn add(&mut self, rank: u32) -> anyhow::Result<Stdio> {
        let mut stream = |is_error: bool| -> anyhow::Result<Option<Arc<OwnedFd>>> {
            let (reader, writer) = io::pipe().context("a pipe for the output can't be made")?;
            let number = u64::from(rank) * 2 + u64::from(is_error);
            self.pipes
                .insert(number, Labelled { rank, is_error, pipe: nonblocking(reader)?, line: Vec::new() });
            Ok(Some(Arc::new(writer.into())))
        };
        Ok(Stdio { input: None, output: stream(false)?, error: stream(true)? })
    }

    /// Iterates over the open pipes: the number of each pipe, and its file descriptor for reading.
    pub(super) fn descriptors(&self) -> impl Iterator<Item = (u64, BorrowedFd<'_>)> {
        self.pipes.iter().map(|(number, labelled)| (*number, labelled.pipe.as_fd()))
    }

    /// Reads the output that is available in the pipe with the number `number`, and prints it with labels. Closes the
    /// pipe if it has reached its end, or if the output can't be printed.
    pub(super) fn read(&mut self, number: u64) {
        let Some(labelled) = self.pipes.get_mut(&number) else { return };
        if !labelled.print_available().unwrap_or(false) {
            self.pipes.remove(&number);
        }
    }

    /// Prints the output that is available in all pipes, and then closes the pipes.
    pub(super) fn finish(&mut self) {
        for (_, mut labelled) in std::mem::take(&mut self.pipes) {
            if labelled.print_available().unwrap_or(false) {
                let _ = labelled.print_line(&[]);
            }
        }
    }
}

fn nonblocking(reader: PipeReader) -> anyhow::Result<File> {
    fcntl(&reader, FcntlArg::F_SETFL(OFlag::O_NONBLOCK)).context("a pipe for the output can't be set up")?;
    Ok(OwnedFd::from(reader).into())
}

impl Labelled {
    /// Returns whether more may come.
    fn print_available(&mut self) -> io::Result<bool> {
        let mut bytes = [0; 16 * 1024];
        loop {
            let count = match self.pipe.read(&mut bytes) {
                Ok(0) => {
                    self.print_line(&[])?;
                    return Ok(false);
                }
                Ok(count) => count,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(true),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            };
            for piece in bytes[..count].split_inclusive(|byte| *byte == b'\n') {
                if piece.ends_with(b"\n") || self.line.len() + piece.len() > MAX_LINE {
                    self.print_line(piece)?;
                } else {
                    self.line.extend_from_slice(piece);
                }
            }
        }
    }

    /// Prints the beginning that was read before, and the rest of the line.
    fn print_line(&mut self, rest: &[u8]) -> io::Result<()> {
        if self.line.is_empty() && rest.is_empty() {
            return Ok(());
        }
        let label = format!("{}: ", self.rank);
        let end: &[u8] = if rest.ends_with(b"\n") { b"" } else { b"\n" };
        let text = [label.as_bytes(), &self.line, rest, end].concat();
        self.line.clear();
        if self.is_error { io::stderr().write_all(&text) } else { write_flushed(&text) }
    }
}

fn write_flushed(text: &[u8]) -> io::Result<()> {
    let mut stdout = io::stdout().lock();
    stdout.write_all(text)?;
    stdout.flush()
}
