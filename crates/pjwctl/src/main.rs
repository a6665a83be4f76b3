//! pjwctl
fn main() {}
