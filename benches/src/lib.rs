//! The measuring programs.
