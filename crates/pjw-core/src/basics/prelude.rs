//! The names that each module would have from the standard library's prelude, and the ordered maps and sets.

pub(crate) use alloc::borrow::ToOwned;
pub(crate) use alloc::boxed::Box;
pub(crate) use alloc::collections::{BTreeMap, BTreeSet};
pub(crate) use alloc::string::{String, ToString};
pub(crate) use alloc::vec::Vec;
