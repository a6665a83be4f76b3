//! Allocation: chooses the cores for a request.

mod choose;
pub mod defrag;
mod fewest;
mod kinds;
pub mod offer;
mod reasons;
mod tree;

pub use crate::state::pool::Offer;
pub use offer::{Fits, allocate, allocate_shared, fits};
