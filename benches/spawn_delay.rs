//! Measures the time from the call that starts a process to the process's first instruction, by the process's own
//! clock; the time from the death of a pool's worker to `main` of the worker that replaces it; and the processes each
//! second that `pjwctl spawn` starts through the daemon.
//!
//! The process is a program without libc: its first system calls read its mask and the time. The peers are bare
//! vfork(2) and exec in a program of C, without a mask and with one that the process sets in between; posix_spawn(3)
//! without a mask; and `taskset -c PU PROGRAM`, which is how scripts bind a process. For the rate: `pjwctl spawn
//! --local`, which asks no daemon, and posix_spawn(3) one after the other. For the pool: a supervisor that waits for
//! the worker and starts the program again by posix_spawn(3).
#![forbid(unsafe_code)]

use std::fs::File;
use std::io::{PipeReader, Read, pipe};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::{Command, Stdio as ProcessStdio};
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context as _, ensure};
use nix::sys::signal::Signal;
use nix::time::{ClockId, clock_gettime};
use pjw_benches::load::compiled::compile;
use pjw_benches::measure::results::{Figure, median, print_line, publish, quantile};
use pjw_benches::peers::vfork_delay::VforkDelay;
use pjw_benches::programs::daemon::PrivateWarden;
use pjw_benches::setup::Setup;
use pjw_benches::setup::empty_cgroup::EmptyCgroup;
use pjw_core::cpuset::CpuSet;
use pjw_spawn::pool::WorkerPool;
use pjw_spawn::{Arguments, ExitStatus, Instance, Placement, SpawnContext, Stdio};

/// The program: it writes records of [`RECORD_SIZE`] bytes to its standard output.
const SOURCE: &str = include_str!("../crates/pjw-spawn/tests/programs/first_act.c");
const RECORD_SIZE: usize = 32;
/// Where a record has the time of the first act (CLOCK_MONOTONIC, ns), and the first word of the mask.
const TIME_AT: usize = 8;
const MASK_AT: usize = 16;
const OWN: &str = "pjw-spawn with a mask";
const OWN_IN_CGROUP: &str = "pjw-spawn with a mask and a cgroup";
const BARE: &str = "bare vfork and exec";
const BARE_WITH_MASK: &str = "bare vfork, mask and exec";
const POSIX_SPAWN: &str = "posix_spawn without a mask";
const WRAPPER: &str = "taskset -c PU PROGRAM";

/// Returns the index of the way, of `count` ways, that has the turn `turn` in the round `round`. Each way follows each
/// other way equally often, because a way that follows taskset finds cold caches.
fn at_turn(turn: usize, round: usize, count: usize) -> usize {
    (turn * (1 + round % (count - 1)) + round) % count
}

fn main() -> anyhow::Result<()> {
    let setup = Setup::prepare()?;
    let directory = tempfile::tempdir().context("can't make a directory for the program")?;
    let flags = ["-nostdlib", "-static", "-ffreestanding", "-fno-stack-protector"];
    let program = compile(directory.path(), "first_act", SOURCE, &flags)?;
    let mut figures = delays(&setup, directory.path(), &program)?;
    figures.extend(delays_in_cgroup(&setup, directory.path(), &program)?);
    figures.extend(replacements(&setup, directory.path())?);
    figures.extend(rates(&setup, &program)?);
    publish("spawn_delay", &figures)
}

/// Measures the time from the call that starts `program` to its first instruction, for pjw-spawn and for other ways, in
/// turns. Returns the figures.
fn delays(setup: &Setup, directory: &Path, program: &Path) -> anyhow::Result<Vec<Figure>> {
    let pus = &setup.scale.usable_pus;
    let (mut reader, writer) = pipe().context("can't make a pipe")?;
    let output = Arc::new(OwnedFd::from(writer));
    let own = OwnStart::new(program, pus, &output, None)?;
    let mut vfork = VforkDelay::start(directory, pus, program)?;
    let run_to_end = |mut command: Command| -> anyhow::Result<()> {
        let mut child = command
            .stdin(ProcessStdio::null())
            .stdout(output.try_clone().context("can't copy the pipe")?)
            .spawn()
            .context("can't start the program")?;
        ensure!(child.wait()?.success(), "the program failed");
        Ok(())
    };
    let first_pu = pus.first().context("no PU can be used")?.0.to_string();
    let mut times = [OWN, BARE, BARE_WITH_MASK, POSIX_SPAWN, WRAPPER].map(|name| (name, Vec::new()));
    for round in 0..setup.effort.pick(5, 1000) {
        setup.interrupt.check()?;
        for turn in 0..times.len() {
            let at = at_turn(turn, round, times.len());
            let (name, times) = &mut times[at];
            let before = now_ns()?;
            match *name {
                BARE | BARE_WITH_MASK => {
                    times.push(vfork.measure(*name == BARE_WITH_MASK)?);
                    continue;
                }
                OWN => own.start(round)?,
                POSIX_SPAWN => run_to_end(Command::new(program))?,
                _ => {
                    let mut taskset = Command::new("taskset");
                    taskset.arg("-c").arg(&first_pu).arg(program);
                    run_to_end(taskset)?;
                }
            }
            times.push(own.microseconds_since(before, &mut reader)?);
        }
    }
    let [(_, own), peers @ ..] = &times;
    let at = |values: &[f64], share| quantile(values, share).context("nothing was measured");
    let bare_us = at(&peers[0].1, 0.5)?;
    for (name, values) in peers.iter().skip(1).chain(&times[..1]) {
        let added_us = at(values, 0.5)? - bare_us;
        print_line(&format!("{name} adds {added_us:.0} us to {BARE} (p50)"))?;
    }
    let mut figures = Vec::new();
    for (quantile_name, share) in [("p50", 0.5), ("p99", 0.99)] {
        let title = format!("{OWN}, from the call to the first instruction: {quantile_name}");
        for (peer, values) in peers {
            figures.push(Figure::new(&title, at(own, share)?, "us", peer, at(values, share)?));
        }
    }
    Ok(figures)
}

/// Measures the same time as [`delays`] for processes that are born in a cgroup of v2 (`CLONE_INTO_CGROUP`), in turns
/// with processes that stay in the cgroup of the bench. Returns the figures. Measures nothing if no cgroup can be made.
fn delays_in_cgroup(setup: &Setup, directory: &Path, program: &Path) -> anyhow::Result<Vec<Figure>> {
    let Some(cgroup) = EmptyCgroup::make() else {
        print_line(&format!("{OWN_IN_CGROUP}: not measured, because this user can make no cgroup of v2"))?;
        return Ok(Vec::new());
    };
    let pus = &setup.scale.usable_pus;
    let (mut reader, writer) = pipe().context("can't make a pipe")?;
    let output = Arc::new(OwnedFd::from(writer));
    let outside = OwnStart::new(program, pus, &output, None)?;
    let inside = OwnStart::new(program, pus, &output, Some(cgroup.open()?))?;
    let mut vfork = VforkDelay::start(directory, pus, program)?;
    let mut times = [BARE, OWN, OWN_IN_CGROUP].map(|name| (name, Vec::new()));
    for round in 0..setup.effort.pick(5, 1000) {
        setup.interrupt.check()?;
        for turn in 0..times.len() {
            let at = at_turn(turn, round, times.len());
            let (name, times) = &mut times[at];
            let before = now_ns()?;
            match *name {
                BARE => {
                    times.push(vfork.measure(false)?);
                    continue;
                }
                OWN => outside.start(round)?,
                _ => inside.start(round)?,
            }
            times.push(outside.microseconds_since(before, &mut reader)?);
        }
    }
    let at = |values: &[f64], share| quantile(values, share).context("nothing was measured");
    let [(bare_name, bare), (own_name, own), (_, in_cgroup)] = &times;
    let added_us = at(in_cgroup, 0.5)? - at(bare, 0.5)?;
    print_line(&format!("{OWN_IN_CGROUP} adds {added_us:.0} us to {BARE} (p50)"))?;
    let mut figures = Vec::new();
    for (quantile_name, share) in [("p50", 0.5), ("p99", 0.99)] {
        let title = format!("{OWN_IN_CGROUP}, from the call to the first instruction: {quantile_name}");
        for (peer, values) in [(bare_name, bare), (own_name, own)] {
            figures.push(Figure::new(&title, at(in_cgroup, share)?, "us", peer, at(values, share)?));
        }
    }
    Ok(figures)
}

/// Starts of one process by pjw-spawn, on one PU after the other.
struct OwnStart {
    context: SpawnContext,
    instances: Vec<Instance>,
}

impl OwnStart {
    /// Prepares the start of `program` by pjw-spawn: one instance on each PU of `pus`, with the standard output
    /// `output`. `cgroup` is the directory of the cgroup of v2 in which the processes are born. `None` for the cgroup
    /// of the bench.
    fn new(
        program: &Path,
        pus: &CpuSet,
        output: &Arc<OwnedFd>,
        cgroup: Option<OwnedFd>,
    ) -> anyhow::Result<Self> {
        let cgroup = cgroup.map(Arc::new);
        let arguments = Arc::new(Arguments::literal(&[program.as_os_str()])?);
        let stdio = Stdio { output: Some(Arc::clone(output)), ..Stdio::default() };
        let on_pu = |pu| Instance {
            rank: 0,
            size: 1,
            arguments: Arc::clone(&arguments),
            variables: Vec::new(),
            placement: Arc::new(Placement { cgroup: cgroup.clone(), ..Placement::on_cpus(CpuSet::from(pu)) }),
            stdio: stdio.clone(),
        };
        Ok(Self { context: SpawnContext::new(program)?, instances: pus.iter().map(on_pu).collect() })
    }

    fn start(&self, round: usize) -> anyhow::Result<()> {
        let instance = self.instances[round % self.instances.len()].clone();
        for child in self.context.spawn_n(vec![instance])? {
            let exit = child?.wait()?;
            ensure!(matches!(exit, ExitStatus::Code(0)), "the program failed: {exit:?}");
        }
        Ok(())
    }

    /// Reads the record of the process that was started after `before`. Returns the time until its first act, in us.
    #[expect(clippy::cast_precision_loss, reason = "a time of some seconds")]
    fn microseconds_since(&self, before: u64, reader: &mut PipeReader) -> anyhow::Result<f64> {
        let mut record = [0; RECORD_SIZE];
        reader.read_exact(&mut record).context("the program wrote no record")?;
        let word = |at: usize| record[at..at + 8].try_into().map(u64::from_ne_bytes);
        ensure!(word(MASK_AT)? != 0 || self.instances.len() > 64, "the program has no mask");
        Ok(word(TIME_AT)?.saturating_sub(before) as f64 / 1000.0)
    }
}

/// A worker: it writes a record with the time at which `main` begins, and waits for a signal.
const WORKER: &str = r"
#include <stdint.h>
#include <time.h>
#include <unistd.h>
int main(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    uint64_t record[4] = {0, now.tv_sec * 1000000000ull + now.tv_nsec, 1, 0};
    if (write(1, record, sizeof record) != sizeof record) return 1;
    for (;;) pause();
}
";

/// Measures the time from the signal that kills a worker to `main` of the worker that replaces it, for the pool of
/// pjw-spawn and for a supervisor that uses posix_spawn(3). Returns the figures.
fn replacements(setup: &Setup, directory: &Path) -> anyhow::Result<Vec<Figure>> {
    let program = compile(directory, "worker", WORKER, &[])?;
    let (mut reader, writer) = pipe().context("can't make a pipe")?;
    let output = Arc::new(OwnedFd::from(writer));
    let own = OwnStart::new(&program, &setup.scale.usable_pus, &output, None)?;
    let mut pool = WorkerPool::start(&own.context, own.instances.clone(), 2)?;
    for _ in 0..own.instances.len() {
        own.microseconds_since(0, &mut reader)?;
    }
    let restart = || {
        let output = output.try_clone().context("can't copy the pipe")?;
        let mut command = Command::new(&program);
        command.stdin(ProcessStdio::null()).stdout(output).spawn().context("can't start the worker")
    };
    let mut supervised = restart()?;
    own.microseconds_since(0, &mut reader)?;
    let (mut pool_ms, mut supervisor_ms) = (Vec::new(), Vec::new());
    for round in 0..setup.effort.pick(5, 1000) {
        setup.interrupt.check()?;
        let worker = pool.worker(round % own.instances.len()).context("a worker was not replaced")?;
        let before = now_ns()?;
        worker.send_signal(Signal::SIGKILL as i32)?;
        let ended = pool.wait(None)?.context("no worker has ended")?;
        ended.replacement.context("the worker was not replaced")??;
        pool_ms.push(own.microseconds_since(before, &mut reader)? / 1000.0);
        // This call makes the next spare worker, so that the spare is ready when the next worker dies.
        ensure!(pool.wait(Some(0))?.is_none(), "another worker has ended");
        let before = now_ns()?;
        supervised.kill()?;
        supervised.wait()?;
        supervised = restart()?;
        supervisor_ms.push(own.microseconds_since(before, &mut reader)? / 1000.0);
    }
    supervised.kill()?;
    supervised.wait()?;
    for index in 0..own.instances.len() {
        if let Some(worker) = pool.worker(index) {
            worker.send_signal(Signal::SIGKILL as i32)?;
            worker.wait()?;
        }
    }
    let peer = "a supervisor that uses posix_spawn";
    let figure = |(name, share)| {
        let [own, peer_value] = [&pool_ms, &supervisor_ms].map(|times| quantile(times, share));
        let (own, peer_value) = own.zip(peer_value).context("nothing was measured")?;
        let title = format!("pool, from the death of a worker to main of the next: {name}");
        Ok(Figure::new(&title, own, "ms", peer, peer_value))
    };
    [("p50", 0.5), ("p99", 0.99)].into_iter().map(figure).collect()
}

/// Measures how many processes per second `pjwctl spawn` starts and waits for, in a job of the daemon and with
/// `--local`. Compares this with posix_spawn(3), one process after the other. Returns the figures.
fn rates(setup: &Setup, program: &Path) -> anyhow::Result<Vec<Figure>> {
    let warden = PrivateWarden::start(&setup.programs, &setup.scale.unusable_pus, &setup.interrupt)?;
    let count: u32 = setup.effort.pick(20, 2000);
    let cores = setup.scale.core_count.to_string();
    let mut rates = [Vec::new(), Vec::new(), Vec::new()];
    for _ in 0..setup.effort.pick(1, 7) {
        setup.interrupt.check()?;
        let number = count.to_string();
        let through_daemon = || {
            let arguments = ["spawn", "-n", &number, "--cores", &cores, "--proxy", "never", "--"];
            succeed(warden.pjwctl_command(&arguments).arg(program))
        };
        let local = || {
            let arguments = ["spawn", "--local", "-n", &number, "--proxy", "never", "--"];
            succeed(warden.pjwctl_command(&arguments).arg(program))
        };
        let serial = || (0..count).try_for_each(|_| succeed(&mut Command::new(program)));
        let ways: [&dyn Fn() -> anyhow::Result<()>; 3] = [&through_daemon, &local, &serial];
        for (way, rates) in ways.iter().zip(&mut rates) {
            let begin = Instant::now();
            way()?;
            rates.push(f64::from(count) / begin.elapsed().as_secs_f64());
        }
    }
    let [through_daemon, local, serial] = rates.map(|rates| median(&rates).unwrap_or_default());
    let title = format!("pjwctl spawn -n {count} through the daemon: rate");
    Ok(vec![
        Figure::new(&title, through_daemon, "1/s", "pjwctl spawn --local", local),
        Figure::new(&title, through_daemon, "1/s", "posix_spawn, one after the other", serial),
    ])
}

/// Runs a command to its end. Its output is discarded.
fn succeed(command: &mut Command) -> anyhow::Result<()> {
    let null = File::options().write(true).open("/dev/null").context("can't open /dev/null")?;
    let status =
        command.stdin(ProcessStdio::null()).stdout(null).status().context("can't start a command")?;
    ensure!(status.success(), "a command failed: {status}");
    Ok(())
}

fn now_ns() -> anyhow::Result<u64> {
    let time = clock_gettime(ClockId::CLOCK_MONOTONIC)?;
    Ok(u64::try_from(time.tv_sec())? * 1_000_000_000 + u64::try_from(time.tv_nsec())?)
}
