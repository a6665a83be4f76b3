//! The load of a bench: processes with many threads, idle jobs, forks, MPI programs, ranks that share memory, farms,
//! the owner of a lent core, processes with much memory, and processes of a plain user. Also a barrier, and C programs
//! that a bench compiles.

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
