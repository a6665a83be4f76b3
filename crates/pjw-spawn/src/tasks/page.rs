//! The size of a page.

/// The size of a page on x86-64 in bytes.
pub(super) const PAGE: u64 = 4096;
