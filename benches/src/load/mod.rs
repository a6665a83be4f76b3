//! The load of a bench: processes with many threads, forks, MPI programs, a barrier, the owner
//! of a lent core, farms, and processes with much memory.

pub mod barrier;
pub mod compiled;
pub mod farm_process;
pub mod fork_load;
pub mod forker;
pub mod idle_jobs;
pub mod memory_process;
pub mod mpi;
pub mod owner;
pub mod processes;
pub mod ranks;
pub mod user_load;
