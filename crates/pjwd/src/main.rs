//! pjwd
fn main() {}
