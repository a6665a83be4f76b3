//! Walls on this machine.

mod bystanders;
mod own;
mod scopes;
mod yard;
