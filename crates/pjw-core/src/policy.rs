//! The numbers and modes that decisions use. The daemon makes one from its configuration; tests write their own.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use crate::cpuset::CpuSet;
use crate::job::Source;
use crate::process::{Pid, Uid};
use crate::wall::{Enforcement, Ground};

/// Whether decisions are carried out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Mode {
    /// Decide, and change nothing.
    Observe,
    /// Decide, and do it.
    #[default]
    Enforce,
}

/// What happens to a request that no free cores can serve.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OnExhausted {
    /// It is refused.
    #[default]
    Refuse,
    /// It gets cores that another job holds too: the one case in which cores are not disjoint.
    Share,
    /// It is accepted and served as soon as cores come free.
    Wait,
}

/// What happens inside a job with more hot threads than PUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Oversubscribed {
    /// Hot threads are pinned evenly: counts differ by at most one.
    Spread,
    /// They float, and the kernel balances.
    #[default]
    Float,
}

/// Everything a decision depends on beside facts, state and time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Policy {
    /// Whether decisions are carried out.
    pub mode: Mode,
    /// PUs that no job ever gets, already resolved against the topology.
    pub housekeeping: CpuSet,
    /// Whether SMT siblings may serve two jobs.
    pub share_smt: bool,
    /// What happens to requests that don't fit.
    pub on_exhausted: OnExhausted,
    /// Whether a user's unclaimed processes join that user's only job.
    pub adopt_strays: bool,
    /// How many cores a plain user may hold in total through `assign` and `run`.
    pub user_max_cores: u32,
    /// The lowest user id that belongs to a person: processes of users below it are never strays.
    pub first_person_uid: u32,
    /// The sources that are looked for.
    pub sources: BTreeSet<Source>,
    /// How many cores a source's jobs get where its own count is unknown.
    pub source_cores: BTreeMap<Source, u32>,
    /// How jobs are to be kept on their cores.
    pub enforcement: Enforcement,
    /// What the node offers for walls.
    pub ground: Ground,
    /// The sources whose job directories may be narrowed: the scheduler never writes their cpuset itself unless it
    /// grants cores by it.
    pub narrowable: BTreeSet<Source>,
    /// The warden's own process, which is never a member.
    pub own_pid: Option<Pid>,
    /// The only user whose processes the warden may change: its own, if it is not root's.
    pub only_user: Option<Uid>,
    /// A thread becomes hot at this demand, in permille of one PU.
    pub hot_permille: u32,
    /// A hot thread becomes cold again at this demand, in permille of one PU.
    pub cold_permille: u32,
    /// How much the newest reading counts in the smoothed demand, in permille.
    pub smoothing_permille: u32,
    /// Whether hot threads are pinned at all.
    pub pin: bool,
    /// What happens with more hot threads than PUs.
    pub oversubscribed: Oversubscribed,
    /// How long a registered job keeps its cores without a member.
    pub reservation_timeout: Duration,
}

impl Default for Policy {
    fn default() -> Self {
        Self {
            mode: Mode::default(),
            housekeeping: CpuSet::new(),
            share_smt: false,
            on_exhausted: OnExhausted::default(),
            adopt_strays: false,
            user_max_cores: 0,
            first_person_uid: 1000,
            sources: Source::ALL.into_iter().collect(),
            source_cores: BTreeMap::new(),
            enforcement: Enforcement::default(),
            ground: Ground::default(),
            narrowable: BTreeSet::from([Source::Slurm]),
            own_pid: None,
            only_user: None,
            hot_permille: 600,
            cold_permille: 300,
            smoothing_permille: 500,
            pin: true,
            oversubscribed: Oversubscribed::default(),
            reservation_timeout: Duration::from_secs(24 * 60 * 60),
        }
    }
}
