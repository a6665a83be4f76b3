//! Templates of real programs, compiled here with cc.

mod fork;
mod group;
mod life;
mod pool;
mod programs;
mod refusals;
mod replicas;

use programs::*;
