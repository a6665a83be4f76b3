//! Templates of real programs, compiled here with cc.
#![cfg(target_arch = "x86_64")]

mod fork;
mod group;
mod life;
mod pool;
mod programs;
mod refusals;
mod replicas;

use programs::*;
