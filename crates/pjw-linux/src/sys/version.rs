//! The kernel's version, and features that follow from it.

use nix::sys::utsname::uname;

/// Returns the release of the running kernel, as `uname -r` prints it. Empty if the kernel does not provide a
/// release.
pub(crate) fn kernel_release() -> String {
    uname().map(|name| name.release().to_string_lossy().into_owned()).unwrap_or_default()
}

/// Returns whether the running kernel, according to its version, keeps the affinity masks of threads when a cpuset
/// changes. True on Linux 6.2 and later.
pub(crate) fn affinity_survives_by_version() -> bool {
    affinity_survives(&kernel_release())
}

/// Linux 6.2 and later store the requested mask (commit 8f9ea86fdf99).
fn affinity_survives(release: &str) -> bool {
    is_at_least(release, (6, 2))
}

/// Returns whether the running kernel has the version `version` (major and minor version number) or a later version.
pub(crate) fn is_kernel_at_least(version: (u32, u32)) -> bool {
    is_at_least(&kernel_release(), version)
}

fn is_at_least(release: &str, version: (u32, u32)) -> bool {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(str::parse::<u32>);
    match (numbers.next(), numbers.next()) {
        (Some(Ok(major)), Some(Ok(minor))) => (major, minor) >= version,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn affinity_survives_cpuset_writes_since_linux_6_2() {
        for (release, expected) in [
            ("6.2.0", true),
            ("6.18.44-fc-v669", true),
            ("10.0", true),
            ("6.1.0-28-amd64", false),
            ("4.18.0-553.el8.x86_64", false),
            ("", false),
            ("nonsense", false),
            ("99999999999.1", false),
        ] {
            assert_eq!(affinity_survives(release), expected, "{release}");
        }
    }
}
