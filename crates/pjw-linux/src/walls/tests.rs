//! Walls on this machine.

mod own;
mod scopes;
mod yard;
