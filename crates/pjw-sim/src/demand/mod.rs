//! The replay of a curve of demand: some jobs own cores and use them more or less over time, and a besteffort job wants
//! every core. [`curve`] reads the curve from a file. [`replay`] replays it with the lending decisions of the warden.

pub mod curve;
pub mod replay;
