//! The setup of a bench of the daemon: how much it does, the programs that it starts, the machine, the interrupt.

pub mod effort;
pub mod scale;

use crate::{
    load::processes, measure::other_programs, measure::results::print_line, peers::echo,
    programs::daemon::Programs, programs::interrupt::Interrupt, setup::effort::Effort, setup::scale::Scale,
};

/// The effort, the interrupt, the programs to measure and the size of the machine.
#[derive(Debug)]
pub struct Setup {
    /// How much is to be done.
    pub effort: Effort,
    /// Whether it is to end early.
    pub interrupt: Interrupt,
    /// pjwd and pjwctl.
    pub programs: Programs,
    /// The machine.
    pub scale: Scale,
}

impl Setup {
    /// Runs this program as a load process or an echo server and does not return, if its arguments say so. Otherwise it
    /// finds the programs and the size of the machine, and prints how many CPUs other programs use.
    ///
    /// # Errors
    /// If the programs are not built, or the topology or the CPU use can't be read.
    pub fn prepare() -> anyhow::Result<Self> {
        processes::run_as_load_process()?;
        echo::run_as_echo_server()?;
        let (effort, interrupt) = (Effort::from_arguments(), Interrupt::install()?);
        let (programs, scale) = (Programs::for_benches()?, Scale::from_this_machine()?);
        let used = other_programs::measure_cpu_use(&scale.usable_pus, &interrupt)?;
        print_line(&format!("other programs use {used:.1} CPUs of {} now", scale.usable_pus.len()))?;
        Ok(Self { effort, interrupt, programs, scale })
    }
}
