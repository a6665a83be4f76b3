//! The load of a bench: processes with many threads, forks, MPI programs, a barrier, and the owner
//! of a lent core.

pub mod barrier;
pub mod compiled;
pub mod fork_load;
pub mod forker;
pub mod idle_jobs;
pub mod mpi;
pub mod owner;
pub mod processes;
pub mod user_load;
