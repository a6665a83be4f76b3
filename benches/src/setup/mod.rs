//! The setup of a bench: how much it measures, the size of the machine, and what else it needs to start.

pub mod effort;
pub mod empty_cgroup;
pub mod parts;
pub mod scale;

use crate::{
    load::processes, measure::other_programs, measure::results::print_line, peers::echo,
    programs::daemon::Programs, programs::interrupt::StopSignal, setup::effort::Effort, setup::scale::Scale,
};

/// What a bench needs to start: how much to measure, a flag for interruptions, the programs to start, and the size of
/// the machine.
#[derive(Debug)]
pub struct Setup {
    /// How much the bench measures.
    pub effort: Effort,
    /// The flag that is set when the user interrupts the bench.
    pub interrupt: StopSignal,
    /// The directories of the programs that the bench starts, such as `pjwd`.
    pub programs: Programs,
    /// The cores and PUs (logical CPUs) that the bench may use.
    pub scale: Scale,
}

impl Setup {
    /// Prepares a bench: finds the programs to start and the size of the machine. Also prints how many CPUs other
    /// programs use.
    ///
    /// A bench starts its own program again for some helper processes: a load process, or an echo server (a server that
    /// answers with fixed bytes). If the arguments request such a process, this function runs as this process and does
    /// not return.
    ///
    /// # Errors
    /// If a program is missing, or if the machine has fewer than two usable cores. Also if the topology or the CPU use
    /// can't be read.
    pub fn prepare() -> anyhow::Result<Self> {
        processes::run_as_load_process()?;
        echo::run_as_echo_server()?;
        let (effort, interrupt) = (Effort::from_arguments(), StopSignal::install()?);
        let (programs, scale) = (Programs::for_benches()?, prepare_scale(&interrupt)?);
        Ok(Self { effort, interrupt, programs, scale })
    }
}

/// Returns the cores and PUs (logical CPUs) that a bench may use. Also prints how many CPUs other programs use.
///
/// # Errors
/// If the machine has fewer than two usable cores, or if the topology or the CPU use can't be read.
pub fn prepare_scale(interrupt: &StopSignal) -> anyhow::Result<Scale> {
    let scale = Scale::from_this_machine()?;
    let used = other_programs::measure_cpu_use(&scale.usable_pus, interrupt)?;
    print_line(&format!("other programs use {used:.1} CPUs of {} now", scale.usable_pus.len()))?;
    Ok(scale)
}
