//! Grants: the PUs that a job holds, and how it holds them.

use serde::{Deserialize, Serialize};

use crate::basics::{CpuSet, Nanos, prelude::*};

/// Who chose the PUs (logical CPUs) of a grant, which are the PUs that a job holds: pjw, or the batch system that
/// started the job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum GrantedBy {
    /// pjw chose the PUs.
    Warden,
    /// The batch system of the job chose the PUs. pjw never adds PUs to such a grant.
    Scheduler,
}

/// A grant: the PUs (logical CPUs) that a job holds, who chose these PUs (pjw or a batch system), and the reasons for
/// the choice.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Grant {
    /// The PUs (logical CPUs) that the job holds by this grant.
    pub cpus: CpuSet,
    /// Who chose the PUs: pjw or the batch system.
    pub granted_by: GrantedBy,
    /// Whether other jobs or the system may hold some of the PUs too. True in each of these cases:
    ///
    /// - pjw granted PUs of other jobs because of the setting `on_exhausted = "share"`.
    /// - A batch system chose PUs that another job holds, or PUs that are reserved for the system.
    ///
    /// The pool of PUs ([`PuPool`](crate::state::pool::PuPool)) records only one holder for each of these
    /// PUs.
    #[serde(rename = "shared")]
    pub is_shared: bool,
    /// Whether the grant may contain only some PUs (SMT siblings) of a core, so that another job may hold the
    /// others. True in each of these cases:
    ///
    /// - The setting `share_smt` was on when pjw made the grant.
    /// - The batch system chose the PUs.
    /// - The grant was recovered from a cpuset that has only some PUs of a core.
    #[serde(default, rename = "by_pus")]
    pub may_split_cores: bool,
    /// The time at which the PUs were granted, in ns since boot.
    #[serde(default, rename = "since")]
    pub granted_at: Nanos,
    /// The reasons why these PUs were chosen, one sentence each, for `pjwctl explain`.
    #[serde(rename = "because")]
    pub reasons: Vec<String>,
    /// The second-best set of PUs, described in a sentence. Empty if there was no second set.
    #[serde(rename = "runner_up")]
    pub second_best: String,
    /// How the job holds the PUs: as its own, or borrowed.
    #[serde(default, rename = "tenure")]
    pub ownership: Ownership,
}

/// The way in which a job holds its PUs (logical CPUs). The job owns the PUs (`Owned`), or borrows them (`Borrowed`).
/// Only jobs of the class besteffort borrow PUs. If such a job can borrow no core at present, it runs on the
/// housekeeping PUs, which are reserved for the system (`Squeezed`), or its processes are frozen (`Frozen`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Ownership {
    /// The job owns the PUs until the job ends or a command releases it.
    #[default]
    Owned,
    /// The job borrows the PUs. Each of these PUs is free, or belongs to a job of the class guaranteed (the
    /// owner) that leaves the PU idle. pjw takes the PU back when the owner needs it, or when pjw grants it
    /// to another job.
    Borrowed,
    /// The job can borrow no core at present. The PUs are the housekeeping PUs, which the job shares with the
    /// system.
    Squeezed,
    /// The job can borrow no core at present. The processes of the job are frozen (`cgroup.freeze`) until it
    /// can, so the PUs have no effect.
    Frozen,
}
