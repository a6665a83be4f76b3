//! The instances from their start to their end: results, ends, signals and labelled output, in one loop.

use std::ffi::OsStr;
use std::io::{self, IsTerminal};
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::Context;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::signal::Signal;
use nix::unistd::{Pid, getpgid, getpgrp};
use pjw_spawn::{Child, ExitStatus, Instance, SpawnBatch, SpawnError};

use super::instance::{BRK_HINT, InstanceState, start_failure_remedy};
use super::labels::LabelledPipes;
use super::mode::TemplateUse;
use super::signals::{ReceivedSignal, SignalReader};
use crate::render::text::count_with_noun;

/// The kinds of descriptors, in the upper half of their number in the epoll set. The lower half is an index.
const SIGNALS: u64 = 0;
const BATCH: u64 = 1 << 32;
const CHILD: u64 = 2 << 32;
const KIND: u64 = !0 << 32;
/// The most events that are taken at once.
const MAX_EVENTS: usize = 256;
/// The most lines about failed instances.
const MAX_FAILURE_LINES: usize = 10;
/// The largest group without a progress line on a terminal.
const MAX_SIZE_WITHOUT_PROGRESS: usize = 100;
/// The time between two progress lines.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(100);
/// The maximum time in milliseconds that pjwctl waits for a reader that takes no text, after a signal has ended
/// instances or the start.
const MAX_STALL_AFTER_SIGNAL: u16 = 1000;

/// A program, and the instances (processes) of `pjwctl spawn` that will execute it.
pub(super) struct Program {
    pub(super) context: pjw_spawn::SpawnContext,
    pub(super) instances: Vec<Instance>,
}

/// Error: the start failed after some instances had begun, or pjwctl can't wait for the instances. In both cases, all
/// instances were killed.
#[derive(Debug, thiserror::Error)]
#[error("{0}; the instances that had begun were killed")]
pub(super) struct StartFailure(pub(super) anyhow::Error);

/// The instances (processes) of one `pjwctl spawn`, from the beginning of their start to their end. While pjwctl waits
/// for the instances, the group also prints their labelled output, and passes signals to them.
pub(super) struct InstanceGroup {
    /// What is known of each instance, by rank.
    pub(super) states: Vec<InstanceState>,
    /// The batches that are not finished, with the ranks of their instances.
    batches: Vec<Option<(SpawnBatch, Vec<u32>)>>,
    /// The contexts end their instances when they are dropped.
    contexts: Vec<pjw_spawn::SpawnContext>,
    epoll: Epoll,
    signals: SignalReader,
    labels: LabelledPipes,
    /// The last ending signal (such as SIGTERM) that pjwctl received.
    ending_signal: Option<i32>,
    /// The first ending signal that came during the start. It cancelled the start of the remaining instances.
    start_cancelled_by: Option<i32>,
    /// Signals that came while instances were being started.
    deferred: Vec<ReceivedSignal>,
    running: usize,
    begun: usize,
    failure_lines: usize,
    /// Whether [`BRK_HINT`] may still be printed: once, and only about instances that share their memory.
    may_print_brk_hint: bool,
    /// When the first process was made, and when the last one had begun its program.
    start_period: Option<(Duration, Duration)>,
    progress: Option<Instant>,
    /// Whether the cursor is behind a progress line.
    has_progress_line: bool,
    /// The indexes of the contexts none of whose instances is a fork of a template.
    contexts_without_forks: Vec<usize>,
    /// What the finished batches tell of their templates.
    templates: TemplateUse,
}

impl InstanceGroup {
    /// Begins to start the instances of `programs`. Threads of pjwctl start the instances in the background. `labels`
    /// contains the pipes for labelled output. `unequal_variable` is the name of an environment variable whose value
    /// differs between instances, if there is one.
    ///
    /// # Errors
    /// [`StartFailure`] if a program could not be started after instances of another program had begun. All instances
    /// were killed. Any other error if no instance was started.
    pub(super) fn start(
        programs: Vec<Program>,
        labels: LabelledPipes,
        unequal_variable: Option<String>,
    ) -> anyhow::Result<Self> {
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).context("no epoll set can be made")?;
        let signals = SignalReader::block_signals()?;
        let size = programs.iter().map(|program| program.instances.len()).sum();
        let mut group = Self {
            states: (0..size).map(|_| InstanceState::default()).collect(),
            batches: Vec::new(),
            contexts: Vec::new(),
            epoll,
            signals,
            labels,
            ending_signal: None,
            start_cancelled_by: None,
            deferred: Vec::new(),
            running: 0,
            begun: 0,
            failure_lines: 0,
            may_print_brk_hint: false,
            start_period: None,
            progress: (size > MAX_SIZE_WITHOUT_PROGRESS && io::stderr().is_terminal()).then(Instant::now),
            has_progress_line: false,
            contexts_without_forks: Vec::new(),
            templates: TemplateUse { unequal_variable, ..TemplateUse::default() },
        };
        group.watch(&group.signals.descriptor, SIGNALS)?;
        match programs.into_iter().try_for_each(|program| group.start_program(program)) {
            Ok(()) => Ok(group),
            Err(error) if group.batches.is_empty() => Err(error),
            Err(error) => {
                group.abort();
                Err(StartFailure(error).into())
            }
        }
    }

    /// Begins to start the instances of one program in the background, and adds them to the group. If the start has
    /// begun and the function then fails, the group contains the instances, so that the caller can kill them.
    fn start_program(&mut self, Program { context, instances }: Program) -> anyhow::Result<()> {
        for instance in &instances {
            if let Some(state) = self.states.get_mut(instance.rank as usize) {
                state.cpus = instance.placement.cpus.clone().unwrap_or_default();
            }
        }
        let ranks = instances.iter().map(|instance| instance.rank).collect();
        self.may_print_brk_hint |= context.shares_memory();
        let batch = context.start(instances)?;
        let number = BATCH | self.batches.len() as u64;
        self.contexts.push(context);
        self.batches.push(Some((batch, ranks)));
        match self.batches.last() {
            Some(Some((batch, _))) => self.watch(batch, number),
            _ => Ok(()),
        }
    }

    /// Cancels the start of the remaining instances, kills the instances that have begun, and waits until they have
    /// ended.
    pub(super) fn abort(&mut self) {
        self.clear_progress();
        self.batches.iter().flatten().for_each(|(batch, _)| batch.cancel());
        let mut children: Vec<Child> =
            self.states.iter_mut().filter_map(|state| state.child.take()).collect();
        let batches = std::mem::take(&mut self.batches).into_iter().flatten();
        children.extend(batches.flat_map(|(batch, _)| batch.filter_map(|(_, result)| result.ok())));
        for child in &children {
            let _ = child.send_signal(Signal::SIGKILL as i32);
        }
        for child in &children {
            let _ = child.wait();
        }
        self.signals.unblock();
        self.labels.print_all(MAX_STALL_AFTER_SIGNAL.into());
    }

    /// Waits until each instance has begun its program, has failed to start or was cancelled.
    pub(super) fn wait_until_begun(&mut self) -> anyhow::Result<()> {
        // A spawner thread that could not be started has left results that no descriptor tells of.
        (0..self.batches.len()).try_for_each(|index| self.collect_results(index))?;
        self.handle_events_while(|group| group.batches.iter().any(Option::is_some))
    }

    /// Waits until all instances that have begun their program have ended.
    pub(super) fn wait_until_ended(&mut self) -> anyhow::Result<()> {
        self.handle_events_while(|group| group.running > 0)
    }

    /// Waits for events and handles them as long as `holds` returns `true`. Events are results of starts, ends of
    /// instances, signals, and output of the instances, which is printed. On a terminal, also prints the progress of a
    /// large group.
    fn handle_events_while(&mut self, holds: impl Fn(&Self) -> bool) -> anyhow::Result<()> {
        while holds(self) {
            let mut events = [EpollEvent::empty(); MAX_EVENTS];
            let (count, has_output) = match self.wait_for_events(&mut events) {
                Err(Errno::EINTR) => (0, false),
                other => other.context("waiting for the instances failed")?,
            };
            if has_output {
                self.clear_progress();
                self.labels.forward_output();
            }
            for event in &events[..count] {
                self.handle_event(event.data())?;
            }
            self.show_progress();
        }
        self.clear_progress();
        Ok(())
    }

    /// Waits for events, and stores them in `events`. Returns their number, and whether there is output of instances
    /// to print.
    fn wait_for_events(&self, events: &mut [EpollEvent]) -> nix::Result<(usize, bool)> {
        let mut descriptors: Vec<PollFd<'_>> = self.labels.poll_descriptors().collect();
        if descriptors.is_empty() {
            return Ok((self.epoll.wait(events, EpollTimeout::NONE)?, false));
        }
        descriptors.push(PollFd::new(self.epoll.0.as_fd(), PollFlags::POLLIN));
        poll(&mut descriptors, PollTimeout::NONE)?;
        descriptors.pop();
        let has_output = descriptors.iter().any(|descriptor| descriptor.any() != Some(false));
        Ok((self.epoll.wait(events, EpollTimeout::ZERO)?, has_output))
    }

    /// Prints the rest of the instances' output, then the number of failures that were not printed. After a signal,
    /// also prints the number of instances that were not started. First unblocks the signals, so that a signal can
    /// end pjwctl while standard output or standard error blocks. If a signal ended the start or instances, a stream
    /// that accepts no text for 1 s is given up.
    pub(super) fn print_remaining_output(&mut self) {
        self.read_signals();
        self.signals.unblock();
        // A program may also handle such a signal and go on.
        let has_ended_an_instance =
            self.ending_signal.is_some() && self.states.iter().any(InstanceState::has_ended_by_signal);
        let timeout = if self.start_cancelled_by.is_some() || has_ended_an_instance {
            PollTimeout::from(MAX_STALL_AFTER_SIGNAL)
        } else {
            PollTimeout::NONE
        };
        self.labels.finish(timeout);
        if self.failure_lines > MAX_FAILURE_LINES {
            let more = self.failure_lines - MAX_FAILURE_LINES;
            self.print_message(&format!("{more} more instances failed; --json lists all"));
        }
        if let Some(message) = self.not_started_message() {
            self.print_message(&message);
        }
        self.labels.print_all(timeout);
    }

    /// Returns how many instances were not started after the signal that cancelled the start, as a text for users.
    /// `None` if there are none.
    fn not_started_message(&self) -> Option<String> {
        let signal = self.start_cancelled_by?;
        let count = self.states.iter().filter(|state| state.was_not_started()).count();
        let instances = count_with_noun(count as u64, "instance was", "instances were");
        (count > 0).then(|| format!("{instances} not started after signal {signal}"))
    }

    /// Prints `message` to standard error, as [`print_error`](crate::output::print_error) does, but does not wait for
    /// the reader.
    pub(super) fn print_message(&mut self, message: &str) {
        self.clear_progress();
        self.labels.print_message(message);
    }

    /// Iterates over the contexts whose instances all executed their program: none of the instances was forked from a
    /// template (a process that has loaded the program). The result is complete only when all instances have begun.
    pub(super) fn contexts_without_forks(&self) -> impl Iterator<Item = &pjw_spawn::SpawnContext> {
        self.contexts_without_forks.iter().filter_map(|index| self.contexts.get(*index))
    }

    /// Returns how many instances of the group were forked from templates, and why others were not. A template is a
    /// process that has loaded the program. The result is complete when all instances have begun.
    pub(super) fn template_use(&self) -> TemplateUse {
        TemplateUse { begun: self.begun, ..self.templates.clone() }
    }

    /// Returns the exit code of pjwctl: the highest exit code of an instance ([`InstanceState::exit_code`]). Returns 1
    /// if labelled output could not be printed, or if no instance was started for another reason than a signal and none
    /// failed to start.
    pub(super) fn exit_code(&self) -> ExitCode {
        if self.labels.has_failed() {
            return ExitCode::FAILURE;
        }
        if self.begun == 0
            && self.start_cancelled_by.is_none()
            && self.states.iter().all(|state| state.error.is_none())
        {
            return ExitCode::FAILURE;
        }
        let code = |state: &InstanceState| state.exit_code(self.start_cancelled_by, self.ending_signal);
        ExitCode::from(self.states.iter().map(code).max().unwrap_or(0))
    }

    /// Returns how long the start of all instances took: the time from the creation of the first process until the last
    /// process had begun its program.
    pub(super) fn start_duration(&self) -> Duration {
        self.start_period.map_or(Duration::ZERO, |(begin, end)| end.saturating_sub(begin))
    }

    fn watch(&self, descriptor: impl AsFd, number: u64) -> anyhow::Result<()> {
        let event = EpollEvent::new(EpollFlags::EPOLLIN, number);
        self.epoll.add(descriptor, event).context("a descriptor can't be watched")
    }

    fn handle_event(&mut self, number: u64) -> anyhow::Result<()> {
        let index = usize::try_from(number & !KIND)?;
        match number & KIND {
            BATCH => self.collect_results(index)?,
            CHILD => self.record_end(index),
            _ => self.read_signals(),
        }
        Ok(())
    }

    /// Records the results that the batch with the index `index` has now: started instances, and failed starts. If the
    /// batch is finished, adds its totals to the group, and drops the batch, because the batch holds the writing ends
    /// of the pipes for labelled output. After the last batch, sends the signals that were deferred during the start.
    /// Does nothing if the batch was dropped before.
    ///
    /// Fails if a started instance can't be watched. Keeps the batch then, because its instances must be killed.
    fn collect_results(&mut self, index: usize) -> anyhow::Result<()> {
        let Some((mut batch, ranks)) = self.batches.get_mut(index).and_then(Option::take) else {
            return Ok(());
        };
        let mut recorded = Ok(());
        while recorded.is_ok()
            && let Some((instance, result)) = batch.next_ready_result()
        {
            let Some(&rank) = ranks.get(instance) else { continue };
            recorded = self.record_start_result(index, rank, result);
        }
        if recorded.is_err() || !batch.is_finished() {
            self.batches[index] = Some((batch, ranks));
            return recorded;
        }
        if let Some((begin, end)) = batch.start_period() {
            let (first, last) = self.start_period.unwrap_or((begin, end));
            self.start_period = Some((first.min(begin), last.max(end)));
        }
        if batch.forked_count() == 0 {
            self.contexts_without_forks.push(index);
        }
        self.templates.forked += batch.forked_count();
        self.templates.refusal = self.templates.refusal.or(batch.template_error());
        self.templates.mismatch = self.templates.mismatch.or(batch.fork_error());
        let _ = self.epoll.delete(&batch);
        drop(batch);
        if self.batches.iter().all(Option::is_none) {
            std::mem::take(&mut self.deferred).into_iter().for_each(|signal| self.send(signal));
        }
        Ok(())
    }

    /// Records the result of the start of the instance with the rank `rank`. `index` is the index of its batch. If the
    /// start failed, prints a message. Otherwise adds the instance to the epoll set, in which pjwctl waits for its end.
    /// If signals to pjwctl have cancelled the start of the remaining instances, sends the last of them to the instance.
    /// Fails if the epoll set does not accept the instance.
    fn record_start_result(
        &mut self,
        index: usize,
        rank: u32,
        result: Result<Child, SpawnError>,
    ) -> anyhow::Result<()> {
        let Some(state) = self.states.get_mut(rank as usize) else { return Ok(()) };
        match result {
            Err(error) => {
                state.error = Some(error);
                let program =
                    self.contexts.get(index).map_or(&b""[..], |context| context.program_path().to_bytes());
                let remedy = start_failure_remedy(error, Path::new(OsStr::from_bytes(program)));
                self.print_failure(&format!("instance {rank} was not started: {error}{remedy}"));
            }
            Ok(child) => {
                self.begun += 1;
                self.running += 1;
                state.pid = Some(child.pid.0);
                state.began = Some(Instant::now());
                if let Some(signal) = self.ending_signal {
                    let _ = child.send_signal(signal);
                }
                // An instance that can't be watched is known all the same, and is killed with the others.
                let child = state.child.insert(child);
                self.epoll
                    .add(child, EpollEvent::new(EpollFlags::EPOLLIN, CHILD | u64::from(rank)))
                    .context("an instance can't be watched")?;
            }
        }
        Ok(())
    }

    /// Records the exit status of the instance with the rank `rank`, and no longer watches the instance. Prints a
    /// message if the instance has failed. Does nothing if the instance has not ended.
    fn record_end(&mut self, rank: usize) {
        let Some(state) = self.states.get_mut(rank) else { return };
        let end = match state.child.as_ref().map(Child::try_wait) {
            None | Some(Ok(None)) => return,
            Some(Ok(Some(exit))) => Ok(exit),
            // The pidfd stays readable, so an instance that counted as running would be looked at for ever.
            Some(Err(errno)) => Err(errno),
        };
        if let Some(child) = state.child.take() {
            let _ = self.epoll.delete(&child);
        }
        state.exit = end.ok();
        state.has_unknown_end = end.is_err();
        self.running -= 1;
        let pid = state.pid.unwrap_or(0);
        let is_hinted = self.may_print_brk_hint && state.may_have_missed_brk();
        self.may_print_brk_hint &= !is_hinted;
        let hint = if is_hinted { BRK_HINT } else { "" };
        match end {
            Ok(ExitStatus::Code(0)) => {}
            Ok(ExitStatus::Code(code)) => {
                self.print_failure(&format!("instance {rank} (pid {pid}) ended with exit code {code}{hint}"));
            }
            Ok(ExitStatus::Signal(signal)) => {
                self.print_failure(&format!(
                    "instance {rank} (pid {pid}) was ended by signal {signal}{hint}"
                ));
            }
            Err(errno) => self.print_failure(&format!(
                "instance {rank} (pid {pid}) has ended, and its exit status is lost: waitid: {}",
                errno.desc()
            )),
        }
    }

    fn read_signals(&mut self) {
        while let Some(signal) = self.signals.next_signal() {
            self.forward_signal(signal);
        }
    }

    /// Handles `signal`, which pjwctl received. After the start, sends it to the instances. During the start, an
    /// ending signal (such as SIGTERM) cancels the start of the remaining instances, and is sent to those that have
    /// begun. Any other signal is deferred until all instances have begun.
    fn forward_signal(&mut self, signal: ReceivedSignal) {
        if signal.is_ending {
            self.ending_signal = Some(signal.number);
        }
        let mut batches = self.batches.iter().flatten().peekable();
        let is_starting = batches.peek().is_some();
        if is_starting && signal.is_ending {
            batches.for_each(|(batch, _)| batch.cancel());
            self.start_cancelled_by.get_or_insert(signal.number);
        }
        if is_starting && !signal.is_ending {
            self.deferred.push(signal);
        } else {
            self.send(signal);
        }
    }

    /// Sends a signal to the instances that have not got it. An instance that has ended needs none.
    fn send(&self, signal: ReceivedSignal) {
        let children = self.states.iter().filter_map(|state| state.child.as_ref());
        for child in children.filter(|child| !(signal.is_from_terminal && is_in_own_process_group(child))) {
            let _ = child.send_signal(signal.number);
        }
    }

    fn print_failure(&mut self, text: &str) {
        self.failure_lines += 1;
        if self.failure_lines <= MAX_FAILURE_LINES {
            self.print_message(text);
        }
    }

    /// Prints a line with the numbers of instances that have begun and ended. Does nothing if progress is not shown, if
    /// the last line was printed less than [`PROGRESS_INTERVAL`] ago, or if earlier text is still pending.
    fn show_progress(&mut self) {
        let size = self.states.len();
        let ended = self.begun - self.running;
        let is_due = |shown_at: &&mut Instant| shown_at.elapsed() > PROGRESS_INTERVAL;
        let Some(shown_at) = self.progress.as_mut().filter(is_due) else { return };
        *shown_at = Instant::now();
        if !self.labels.is_stalled() {
            let line = format!("\r{} of {size} instances begun, {ended} ended\x1b[K", self.begun);
            self.labels.print_to_stderr(&line);
            self.has_progress_line = true;
        }
    }

    fn clear_progress(&mut self) {
        if std::mem::take(&mut self.has_progress_line) {
            self.labels.print_to_stderr("\r\x1b[K");
        }
    }
}

/// Whether `child`, a process that pjwctl has started, is still in the process group of pjwctl, to which a terminal
/// sends its signals. timeout(1), for example, makes a group of its own.
fn is_in_own_process_group(child: &Child) -> bool {
    getpgid(Some(Pid::from_raw(child.pid.0.cast_signed()))) == Ok(getpgrp())
}

#[cfg(test)]
mod tests;
