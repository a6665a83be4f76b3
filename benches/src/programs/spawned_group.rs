//! A group of processes that pjw-spawn starts, each on one PU.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context as _, ensure};
use pjw_core::cpuset::CpuSet;
use pjw_spawn::{Arguments, Child, ExitStatus, Instance, Placement, SpawnContext, Stdio};

/// A program, and the settings with which a bench starts groups of its processes by the crate pjw-spawn.
#[derive(Debug)]
pub struct SpawnedGroup {
    context: SpawnContext,
    arguments: Arc<Arguments>,
    placements: Vec<Arc<Placement>>,
}

impl SpawnedGroup {
    /// Makes the settings for groups of processes of `program`. Each process gets the argument `argument` and the
    /// environment variables `environment`. Each process is bound to one of the PUs (logical CPUs) in `pus`, in turn.
    ///
    /// # Errors
    /// If the program can't be executed, or if the path or the argument contains a NUL byte.
    pub fn new(
        program: &Path,
        argument: &str,
        environment: &[(String, String)],
        pus: &CpuSet,
    ) -> anyhow::Result<Self> {
        let variables = environment.iter().map(|(name, value)| (name, value));
        let context = SpawnContext::new(program)?.set_environment(variables);
        let arguments = Arguments::literal(&[program.as_os_str(), argument.as_ref()])?;
        let placements = pus.iter().map(|pu| Arc::new(Placement::on_cpus(CpuSet::from(pu)))).collect();
        Ok(Self { context, arguments: Arc::new(arguments), placements })
    }

    /// Configures the group so that its processes are forked from a template: a process that has loaded the program
    /// and is stopped before `main`.
    #[must_use]
    pub fn with_templates(self) -> Self {
        Self { context: self.context.fork_from_templates(), ..self }
    }

    /// Configures the group so that its processes are forked from a process that has already run a part of the program.
    /// This process stops when it calls `pspawn_fork_here`.
    #[must_use]
    pub fn with_late_forks(self) -> Self {
        Self { context: self.context.use_fork_here_templates(), ..self }
    }

    /// Starts a group of `count` processes. When all processes have begun the program, waits for the end of each
    /// process.
    ///
    /// # Errors
    /// If a process can't be started, or if its exit status is not 0.
    pub fn spawn(&self, count: u32) -> anyhow::Result<()> {
        for child in self.context.spawn_n(self.instances(count))? {
            wait(&child?)?;
        }
        Ok(())
    }

    /// Starts a group of `count` processes. Waits for the end of each process as soon as this process has begun the
    /// program, while other processes are still being started.
    ///
    /// # Errors
    /// If a process can't be started, or if its exit status is not 0. Also if the processes were to be forked from a
    /// template (a process that has loaded the program), and no template can be made.
    pub fn start(&self, count: u32) -> anyhow::Result<()> {
        let mut batch = self.context.start(self.instances(count))?;
        for (_, child) in batch.by_ref() {
            wait(&child?)?;
        }
        batch.template_error().map_or(Ok(()), |refusal| Err(refusal).context("the program has no template"))
    }

    /// Returns `count` instances of the program, with the ranks from 0. The instances use the placements of the group
    /// in turns.
    fn instances(&self, count: u32) -> Vec<Instance> {
        let placements = self.placements.iter().cycle();
        (0..count)
            .zip(placements)
            .map(|(rank, placement)| Instance {
                rank,
                size: count,
                arguments: Arc::clone(&self.arguments),
                variables: Vec::new(),
                placement: Arc::clone(placement),
                stdio: Stdio::default(),
            })
            .collect()
    }
}

fn wait(child: &Child) -> anyhow::Result<()> {
    let exit = child.wait()?;
    ensure!(matches!(exit, ExitStatus::Code(0)), "a process failed: {exit:?}");
    Ok(())
}
