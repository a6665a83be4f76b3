//! The command `pjwctl`. All code is in the library.
#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    pjwctl::main()
}
