//! Ranks that share memory as threads of one process, as processes, or as tasks in one address space. The ranks run the
//! C program `peers/ranks.c`.

use std::io::Read;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Context as _, bail, ensure};
use pjw_core::cpuset::{CpuSet, Pu};
use pjw_spawn::{Arguments, ExitStatus, Instance, Placement, SpawnContext, Stdio};

use super::compiled::compile;

const SOURCE: &str = include_str!("../peers/ranks.c");

/// The way in which the ranks (parallel workers) of a program share memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SharingWay {
    /// The ranks are processes that share one address space, as `pjwctl spawn --share memory` starts them.
    Tasks,
    /// The ranks are threads of one process.
    Threads,
    /// The ranks are processes that map the same files in memory.
    Processes,
}

impl SharingWay {
    /// All ways in which the ranks (parallel workers) of a program can share memory.
    pub const ALL: [Self; 3] = [Self::Tasks, Self::Threads, Self::Processes];

    /// Returns the name of this way to share memory, such as `tasks`. The results of a bench contain this name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Tasks => "tasks",
            Self::Threads => "threads",
            Self::Processes => "processes",
        }
    }
}

/// What a group of ranks (parallel workers of the program `ranks.c`) measures, how many ranks there are, and on which
/// PUs (logical CPUs) they run.
#[derive(Debug, Clone, Copy)]
pub struct RankWork<'a> {
    /// The name of the measurement, such as `pages` (the size of the page tables).
    pub part: &'a str,
    /// The number of ranks.
    pub count: u32,
    /// A parameter of the measurement, such as a number of bytes. Its meaning depends on `part`.
    pub argument: u32,
    /// The PUs of the ranks. Rank `r` runs on the PU with the index `r % n`, where `n` is the length of the list. Ranks
    /// that are threads all run on all of these PUs. If the list is empty, the ranks are not bound.
    pub pus: &'a [Pu],
    /// The path of a Unix socket, for a measurement of messages over a socket. `None` for all other measurements.
    pub socket: Option<&'a Path>,
}

/// The compiled C program `ranks.c`. It measures how fast ranks (the parallel workers of a program) share memory.
#[derive(Debug)]
pub struct RankProgram {
    path: PathBuf,
    /// The number of groups that were started, so that each has a name of its own.
    groups: AtomicU32,
}

impl RankProgram {
    /// Compiles `ranks.c` in `directory`: a C program that measures how fast ranks (parallel workers) share memory.
    ///
    /// # Errors
    /// If the program can't be compiled as a static executable.
    pub fn compile(directory: &Path) -> anyhow::Result<Self> {
        let include = concat!("-I", env!("CARGO_MANIFEST_DIR"), "/../crates/pjw-spawn-c/include");
        let path = compile(directory, "ranks", SOURCE, &["-O2", "-static-pie", "-pthread", include])?;
        Ok(Self { path, groups: AtomicU32::new(0) })
    }

    /// Returns the path of the compiled program `ranks.c`.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Starts a group of ranks (parallel workers), waits for their end, and returns the numbers that they print. `work`
    /// says what the ranks measure, and `way` how they share memory.
    ///
    /// # Errors
    /// If a rank can't be started, or if it fails.
    pub fn measure(&self, way: SharingWay, work: &RankWork<'_>) -> anyhow::Result<Vec<f64>> {
        let (mut reader, writer) = std::io::pipe()?;
        let output = Some(Arc::new(OwnedFd::from(writer)));
        let (context, instances) = self.prepare_group(way, work, &Stdio { output, ..Stdio::default() })?;
        let children = context.spawn_n(instances)?;
        for child in children {
            let exit = child?.wait().context("a rank can't be waited for")?;
            ensure!(
                exit == ExitStatus::Code(0),
                "{} as {}: a rank ended with {exit:?}",
                work.part,
                way.name()
            );
        }
        let mut text = String::new();
        reader.read_to_string(&mut text)?;
        Ok(text.split_whitespace().map(str::parse).collect::<Result<_, _>>()?)
    }

    /// Starts `count` ranks that end at once, and waits for their end. `way` says whether the ranks are tasks, threads
    /// of one process, or processes.
    ///
    /// # Errors
    /// If a rank can't be started, or if it fails.
    pub fn start_nothing(&self, way: SharingWay, count: u32) -> anyhow::Result<()> {
        let work = RankWork { part: "nothing", count, argument: 0, pus: &[], socket: None };
        let (context, instances) = self.prepare_group(way, &work, &Stdio::default())?;
        for child in context.spawn_n(instances)? {
            let exit = child?.wait().context("a process can't be waited for")?;
            ensure!(exit == ExitStatus::Code(0), "a process ended with {exit:?}");
        }
        Ok(())
    }

    /// Returns the context and the instances of a group that does the work `work`. The group has a name of its own. It
    /// has one instance for each rank, or a single instance if the ranks are threads. If `work.pus` is not empty, the
    /// ranks are bound to these PUs in turns. `stdio` has the streams of all instances.
    fn prepare_group(
        &self,
        way: SharingWay,
        work: &RankWork<'_>,
        stdio: &Stdio,
    ) -> anyhow::Result<(SpawnContext, Vec<Instance>)> {
        let kind = if way == SharingWay::Threads { "threads" } else { "ranks" };
        let path = self.path.to_str().context("the path of the program is no text")?;
        let (count, argument) = (work.count.to_string(), work.argument.to_string());
        let mut arguments = vec![path, work.part, kind, &count, &argument];
        if let Some(socket) = work.socket {
            let Some(socket) = socket.to_str() else { bail!("the path of the socket is no text") };
            arguments.push(socket);
        }
        let arguments = Arc::new(Arguments::literal(&arguments)?);
        let number = self.groups.fetch_add(1, Ordering::Relaxed);
        let group = format!("bench.{}.{number}", std::process::id());
        let context = SpawnContext::new(&self.path)?.add_rank_variables().set_variable("PJW_GROUP", group);
        let context = if way == SharingWay::Tasks { context.share_memory()? } else { context };
        let size = if way == SharingWay::Threads { 1 } else { work.count };
        let all_pus: CpuSet = work.pus.iter().copied().collect();
        let placement = |rank: u32| match work.pus {
            [] => Placement::default(),
            _ if way == SharingWay::Threads => Placement::on_cpus(all_pus.clone()),
            pus => Placement::on_cpus(CpuSet::from(pus[rank as usize % pus.len()])),
        };
        let instances = (0..size).map(|rank| Instance {
            rank,
            size,
            arguments: Arc::clone(&arguments),
            variables: Vec::new(),
            placement: Arc::new(placement(rank)),
            stdio: stdio.clone(),
        });
        Ok((context, instances.collect()))
    }
}
