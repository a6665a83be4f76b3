//! The names of the standard library's prelude that a `no_std` crate must import, and the ordered maps and sets.

pub(crate) use alloc::borrow::ToOwned;
pub(crate) use alloc::boxed::Box;
pub(crate) use alloc::collections::{BTreeMap, BTreeSet};
pub(crate) use alloc::string::{String, ToString};
pub(crate) use alloc::vec::Vec;
