//! What a bench of the daemon begins with.

use crate::crowd;
use crate::demo::ending::Ending;
use crate::demo::experiment::Scale;
use crate::demo::load;
use crate::demo::warden::Programs;
use crate::echo;
use crate::effort::Effort;
use crate::results::say;

/// How much is asked, when to end, what is measured, and where.
#[derive(Debug)]
pub struct Ground {
    /// How much is to be done.
    pub effort: Effort,
    /// Whether it is to end early.
    pub ending: Ending,
    /// pjwd and pjwctl.
    pub programs: Programs,
    /// The machine.
    pub scale: Scale,
}

impl Ground {
    /// Plays the part of a crowd or an echo server, if this program was started for that, and does not come back; else
    /// finds all of it, and tells how busy the machine is.
    ///
    /// # Errors
    /// If the programs are not built, or the machine can't be looked at.
    pub fn find() -> anyhow::Result<Self> {
        crowd::attend()?;
        echo::attend()?;
        let (effort, ending) = (Effort::asked(), Ending::watch()?);
        let (programs, scale) = (Programs::of_benches()?, Scale::of_this_machine()?);
        let others = load::look(&scale.ours, &ending)?;
        say(&format!("other programs use {others:.1} CPUs of {} now", scale.ours.len()))?;
        Ok(Self { effort, ending, programs, scale })
    }
}
