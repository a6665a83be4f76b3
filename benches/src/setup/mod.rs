//! The setup of a bench of the daemon: how much it does, the programs that it starts, the machine, the interrupt.

pub mod effort;
pub mod scale;

use crate::{
    load::processes, measure::other_programs, measure::results::say, peers::echo, programs::daemon::Programs,
    programs::interrupt::Interrupt, setup::effort::Effort, setup::scale::Scale,
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
    pub fn find() -> anyhow::Result<Self> {
        processes::attend()?;
        echo::attend()?;
        let (effort, interrupt) = (Effort::asked(), Interrupt::watch()?);
        let (programs, scale) = (Programs::of_benches()?, Scale::of_this_machine()?);
        let others = other_programs::look(&scale.ours, &interrupt)?;
        say(&format!("other programs use {others:.1} CPUs of {} now", scale.ours.len()))?;
        Ok(Self { effort, interrupt, programs, scale })
    }
}
