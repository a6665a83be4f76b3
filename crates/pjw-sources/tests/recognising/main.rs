//! The recognition of the jobs of processes: each test compares the claims of a process as text.

mod cgroups;
mod environment;
mod hostile;
mod slurm_node;
mod test_process;
