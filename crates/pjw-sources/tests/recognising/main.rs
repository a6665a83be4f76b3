//! What is recognised, as stories: marks in, one line of text per claim out.

mod cgroups;
mod environment;
mod hostile;
mod slurm_node;
mod story;
