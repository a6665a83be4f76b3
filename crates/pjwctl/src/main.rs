//! The command `pjwctl`; everything it does is in the library beside it.
#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    pjwctl::main()
}
