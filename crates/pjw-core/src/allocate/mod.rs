//! Allocation: chooses the cores for a request.

mod choose;
pub mod defrag;
mod fewest;
mod groups;
mod kinds;
pub mod offer;
mod reasons;
mod tree;

pub use crate::state::pool::PuOffer;
pub use offer::{
    LargestRequests, allocate, allocate_for_groups, allocate_shared, largest_requests,
    request_for_all_available,
};
