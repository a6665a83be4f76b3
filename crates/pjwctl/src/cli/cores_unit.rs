//! The unit in which a number of cores is given.

use clap::ValueEnum;

/// The value of `--smt` of `pjwctl assign`, `pjwctl run` and `pjwctl spawn`: whether the number after `--cores`
/// counts whole cores or hardware threads (logical CPUs).
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum CoresUnitArg {
    /// Whole cores with all their hardware threads
    Whole,
    /// Hardware threads (also: share); siblings may belong to another job if the configuration sets share_smt
    #[value(alias = "share")]
    Pus,
}
