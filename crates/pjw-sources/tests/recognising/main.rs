//! The recognition of processes: attributes in, one line of text per claim out.

mod cgroups;
mod environment;
mod hostile;
mod slurm_node;
mod story;
