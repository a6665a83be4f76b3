//! What pjwctl prints while instances run: messages, and the output of instances with the rank before each line.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, PipeReader, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use anyhow::Context;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::poll::{PollFd, PollFlags, PollTimeout};
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use pjw_spawn::Stdio;

use super::streams::{OutputStream, StreamState, takes_text};
use crate::output;

/// The length of the longest line in bytes, without its line break. A longer line is divided into lines of this length.
const MAX_LINE: usize = 1 << 20;
/// The bytes that are read at once: as many as a pipe usually holds.
const BUFFER_SIZE: usize = 64 * 1024;
/// The most pipes that are read before signals and ends of instances are looked at again.
const MAX_PIPES: usize = 64;

/// The names of the streams, for messages.
const STREAM_NAMES: [&str; 2] = ["output", "error"];

/// The output of pjwctl while instances run: messages, and with the option `--label` what the instances print, with the
/// rank of the instance before each line. Nothing waits for a reader, except at the end. While lines are not printed,
/// the pipes of the instances are not read, so the instances wait.
pub(super) struct LabelledPipes {
    pipes: BTreeMap<u64, Labelled>,
    /// The set of the pipes. `None` without pipes.
    readable: Option<Epoll>,
    /// Standard output and standard error.
    streams: [OutputStream; 2],
}

/// One stream of an instance.
struct Labelled {
    rank: u32,
    is_error: bool,
    pipe: File,
    line: LineBuffer,
}

/// The beginning of a line whose line break has not been read.
#[derive(Default)]
struct LineBuffer(Vec<u8>);

impl Default for LabelledPipes {
    fn default() -> Self {
        let streams = [rustix::stdio::stdout(), rustix::stdio::stderr()].map(OutputStream::new);
        Self { pipes: BTreeMap::new(), readable: None, streams }
    }
}

impl LabelledPipes {
    /// Makes two pipes for the standard output and the standard error of the instance with the rank `rank`. Returns
    /// the writing ends of the pipes, for the instance. The reading ends are added to the pipes that
    /// [`LabelledPipes::forward_output`] reads.
    pub(super) fn add(&mut self, rank: u32) -> anyhow::Result<Stdio> {
        let set = match self.readable.take() {
            Some(set) => set,
            None => Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).context("no epoll set can be made")?,
        };
        let set = self.readable.insert(set);
        let mut stream = |is_error: bool| -> anyhow::Result<Option<Arc<OwnedFd>>> {
            let (reader, writer) = io::pipe().context("a pipe for the output can't be made")?;
            let number = u64::from(rank) * 2 + u64::from(is_error);
            let pipe = nonblocking(reader)?;
            set.add(&pipe, EpollEvent::new(EpollFlags::EPOLLIN, number))
                .context("a pipe for the output can't be watched")?;
            self.pipes.insert(number, Labelled { rank, is_error, pipe, line: LineBuffer::default() });
            Ok(Some(Arc::new(writer.into())))
        };
        Ok(Stdio { input: None, output: stream(false)?, error: stream(true)? })
    }

    /// Iterates over the descriptors to wait for before [`LabelledPipes::forward_output`] is called: the streams that
    /// have not taken all lines, or else the set of the pipes of the instances.
    pub(super) fn poll_descriptors(&self) -> impl Iterator<Item = PollFd<'_>> {
        let stalled = self.streams.iter().filter(|stream| stream.is_stalled());
        let stalled = stalled.map(|stream| PollFd::new(stream.descriptor(), PollFlags::POLLOUT));
        let set = self.readable.as_ref().filter(|_| !self.pipes.is_empty() && !self.is_stalled());
        stalled.chain(set.map(|set| PollFd::new(set.0.as_fd(), PollFlags::POLLIN)))
    }

    /// Prints the pending text and new output of the instances, as much as possible without waiting. First prints the
    /// text that standard output and standard error have not taken before. If both then have taken everything, reads
    /// the available output of the instances, and prints each line with the rank of the instance. Reads from at most
    /// [`MAX_PIPES`] pipes, and at most 64 KiB from each.
    pub(super) fn forward_output(&mut self) {
        self.print();
        let mut events = [EpollEvent::empty(); MAX_PIPES];
        let count = match &self.readable {
            Some(set) if !self.is_stalled() => set.wait(&mut events, EpollTimeout::ZERO).unwrap_or(0),
            _ => 0,
        };
        for event in &events[..count] {
            if self.is_stalled() {
                return;
            }
            self.read_pipe(event.data());
        }
    }

    /// Prints `message` to standard error, as [`output::print_error`] does, but does not wait for the reader.
    pub(super) fn print_message(&mut self, message: &str) {
        self.print_to_stderr(&output::error_line(message));
    }

    /// Prints `text` to standard error unchanged. Does not wait for the reader.
    pub(super) fn print_to_stderr(&mut self, text: &str) {
        self.streams[1].add(text.as_bytes());
        self.print();
    }

    /// Prints the output that is available in all pipes, closes the pipes, and waits until everything is printed. If
    /// standard output or standard error accepts no text for the time `timeout`, drops the rest of the text for that
    /// stream.
    pub(super) fn finish(&mut self, timeout: PollTimeout) {
        for (_, mut labelled) in std::mem::take(&mut self.pipes) {
            // A process that an instance left in the background may write for ever.
            let mut bytes_left = capacity(&labelled.pipe);
            loop {
                match self.read_available_output(&mut labelled) {
                    Ok(Available::Bytes(count)) if count < bytes_left => bytes_left -= count,
                    Ok(Available::Bytes(_) | Available::Nothing) => {
                        self.add_unfinished_line(&mut labelled);
                        break;
                    }
                    Ok(Available::End) | Err(_) => break,
                }
                self.print_all(timeout);
            }
            self.print_all(timeout);
        }
        self.print_all(timeout);
    }

    /// Returns whether output of instances was lost because standard output or standard error took no more. A closed
    /// pipe does not count.
    pub(super) fn has_failed(&self) -> bool {
        self.readable.is_some() && self.streams.iter().any(|stream| stream.state == StreamState::Failed)
    }

    /// Whether there are lines that the streams have not taken.
    pub(super) fn is_stalled(&self) -> bool {
        self.streams.iter().any(OutputStream::is_stalled)
    }

    /// Reads once from the pipe with the number `number`, and prints the lines that are complete. Closes the pipe if
    /// no process can write to it any more, if it can't be read, or if nobody reads the stream of pjwctl to which the
    /// lines go.
    fn read_pipe(&mut self, number: u64) {
        let Some(mut labelled) = self.pipes.remove(&number) else { return };
        let available = self.read_available_output(&mut labelled);
        self.print();
        let is_open = self.streams[usize::from(labelled.is_error)].state != StreamState::Closed;
        if is_open && matches!(available, Ok(Available::Bytes(_) | Available::Nothing)) {
            self.pipes.insert(number, labelled);
        } else if let Some(set) = &self.readable {
            // A spawner thread may have a copy of the descriptor, with which the pipe would stay in the set.
            let _ = set.delete(&labelled.pipe);
        }
    }

    /// Reads once from the pipe of `labelled`. Adds each line that is complete to the output stream, with the rank
    /// before it. Keeps the beginning of an incomplete line for the next call, or adds it if the pipe has ended.
    ///
    /// # Errors
    /// If the pipe can't be read.
    fn read_available_output(&mut self, labelled: &mut Labelled) -> io::Result<Available> {
        let mut bytes = [0; BUFFER_SIZE];
        match labelled.pipe.read(&mut bytes) {
            Ok(0) => {
                self.add_unfinished_line(labelled);
                Ok(Available::End)
            }
            Ok(count) => {
                let Labelled { rank, is_error, line, .. } = labelled;
                let stream = &mut self.streams[usize::from(*is_error)];
                line.add(&bytes[..count], |line| add_labelled(stream, *rank, line));
                Ok(Available::Bytes(count))
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(Available::Nothing),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(Available::Bytes(0)),
            Err(error) => Err(error),
        }
    }

    /// Adds the beginning of a line whose end was not read to the output stream.
    fn add_unfinished_line(&mut self, labelled: &mut Labelled) {
        let stream = &mut self.streams[usize::from(labelled.is_error)];
        labelled.line.take_unfinished(|line| add_labelled(stream, labelled.rank, line));
    }

    /// Prints what the streams take without waiting. Standard output is first: its failure is reported on the other.
    fn print(&mut self) {
        for index in 0..2 {
            match self.streams[index].print() {
                Err(error) if error.kind() != io::ErrorKind::BrokenPipe => self.report_failure(index, &error),
                Ok(()) | Err(_) => {}
            }
        }
    }

    /// Prints all pending text, and waits until standard output and standard error have accepted it. If one of the
    /// two accepts no text for the time `timeout`, drops the rest of the text for this stream, and reports the loss
    /// on standard error.
    pub(super) fn print_all(&mut self, timeout: PollTimeout) {
        self.print();
        while let Some(index) = self.streams.iter().position(OutputStream::is_stalled) {
            if let Ok(false) = takes_text(self.streams[index].descriptor(), timeout) {
                self.streams[index].drop_text(StreamState::Failed);
                let name = STREAM_NAMES[index];
                self.streams[1].add(
                    output::error_line(&format!(
                        "standard {name} takes no more: the rest of the output of the instances is lost"
                    ))
                    .as_bytes(),
                );
            }
            self.print();
        }
    }

    /// Reports on standard error that the stream with the index `index` has failed. This happens once for each stream,
    /// because a stream that has failed drops all text.
    fn report_failure(&mut self, index: usize, error: &io::Error) {
        let name = STREAM_NAMES[index];
        let line = output::error_line(&format!(
            "can't write the output of the instances to standard {name}: {error}; the instances go on, and what they print \
             there is lost: check the target of standard {name}"
        ));
        self.streams[1].add(line.as_bytes());
    }
}

/// Adds `line` with the rank before it to the output stream `stream`.
fn add_labelled(stream: &mut OutputStream, rank: u32, line: &[u8]) {
    stream.add(format!("{rank}: ").as_bytes());
    stream.add(line);
    stream.add(b"\n");
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
    capacity.unwrap_or(BUFFER_SIZE)
}

impl LineBuffer {
    /// Appends `bytes`, which were read from a pipe. Calls `print` with each line that is then complete, without its
    /// line break. The beginning of an incomplete line is kept for the next call. A line of more than [`MAX_LINE`]
    /// bytes is printed in pieces of this length.
    fn add(&mut self, bytes: &[u8], mut print: impl FnMut(&[u8])) {
        for piece in bytes.split_inclusive(|byte| *byte == b'\n') {
            let (mut rest, is_whole) = piece.strip_suffix(b"\n").map_or((piece, false), |line| (line, true));
            // A line of exactly the limit is not cut, so nothing is printed before the next byte is there.
            while rest.len() > MAX_LINE - self.0.len() {
                let (head, tail) = rest.split_at(MAX_LINE - self.0.len());
                self.0.extend_from_slice(head);
                // Not cleared: the memory of a long line is not kept for each instance.
                print(&std::mem::take(&mut self.0));
                rest = tail;
            }
            self.0.extend_from_slice(rest);
            if is_whole {
                print(&std::mem::take(&mut self.0));
            }
        }
    }

    /// Calls `print` for the beginning of a line that has no end.
    fn take_unfinished(&mut self, mut print: impl FnMut(&[u8])) {
        if !self.0.is_empty() {
            print(&std::mem::take(&mut self.0));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The lines of a stream of these pieces, as numbers of bytes.
    fn lengths(pieces: &[&[u8]]) -> Vec<usize> {
        let (mut buffer, mut lengths) = (LineBuffer::default(), Vec::new());
        let mut print = |line: &[u8]| lengths.push(line.len());
        for piece in pieces {
            buffer.add(piece, &mut print);
        }
        buffer.take_unfinished(print);
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
