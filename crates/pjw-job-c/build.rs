//! Gives libpjw_job.so the name by which programs load it. The number changes with the binary interface.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libpjw_job.so.0");
}
