//! A group of processes that pjw-spawn starts, each on one PU.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context as _, ensure};
use pjw_core::cpuset::CpuSet;
use pjw_spawn::{Arguments, Child, ExitStatus, Instance, Placement, SpawnContext, Stdio};

/// A program, and the settings with which a group of its processes is started.
#[derive(Debug)]
pub struct SpawnedGroup {
    context: SpawnContext,
    arguments: Arc<Arguments>,
    placements: Vec<Arc<Placement>>,
}

impl SpawnedGroup {
    /// Makes a group for `program` with the argument `argument`. Each process is bound to one PU of `pus`, in turn.
    ///
    /// # Errors
    /// If the program can't be executed, or the argument can't be passed on.
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

    /// Configures the group so that its processes are forked from a process of the program that has called
    /// `pspawn_fork_here`.
    #[must_use]
    pub fn with_late_forks(self) -> Self {
        Self { context: self.context.use_fork_here_templates(), ..self }
    }

    /// Starts `count` processes, and waits for each after all have begun.
    ///
    /// # Errors
    /// If a process did not begin, or failed.
    pub fn spawn(&self, count: u32) -> anyhow::Result<()> {
        for child in self.context.spawn_n(self.instances(count))? {
            wait(&child?)?;
        }
        Ok(())
    }

    /// Starts `count` processes, and waits for each as soon as it has begun.
    ///
    /// # Errors
    /// If a process did not begin, or failed, or if templates were meant and are not possible.
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
