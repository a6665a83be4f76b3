//! pjwd(8), generated from the output of `pjwd --help`, because only the daemon's program knows its options.

use super::{page::Page, roff};

/// Makes the manual page pjwd(8) of the daemon. `help` is the output of `pjwd --help`. `None` if `help` is not in the
/// format of such an output.
pub(super) fn page(help: &str) -> Option<Page> {
    let (about, rest) = help.split_once("\nUsage: ")?;
    let (usage, options) = rest.split_once("\n\nOptions:\n")?;
    let (title, description) = about.split_once("\n\n")?;
    let about = title.trim().trim_start_matches("pjwd").trim_end_matches('.');
    let text = [
        roff::page_header("pjwd", 8, &format!("the process jail warden, which{about}")),
        roff::section("SYNOPSIS") + &roff::escape_roff(usage) + "\n",
        roff::section("DESCRIPTION") + &roff::paragraphs(description),
        roff::section("OPTIONS") + &options.split("\n\n").map(option_entry).collect::<Option<String>>()?,
        roff::section("SIGNALS"),
        roff::list_entry(
            "SIGHUP",
            "The configuration is read again, as with pjwctl reload; a bad one leaves the old one in \
             force.",
        ),
        roff::list_entry(
            "SIGTERM, SIGINT",
            "pjwd ends. Jobs run on where they are, and the next pjwd finds them; to put back every mask \
             first, give pjwctl release --all.",
        ),
        roff::section("FILES"),
        roff::list_entry("/etc/pjw/pjwd.toml", "Root's configuration. See pjwd.toml(5)."),
        roff::list_entry(
            "/run/pjwd/pjwd.sock",
            "Root's socket; state and undo journal are in the same directory.",
        ),
        roff::list_entry(
            "/run/pjwd-lock/warden.lock",
            "Root's lock against a second pjwd; another user's is in /tmp/pjwd-UID-lock, and in \
             /run/user/UID/pjwd-lock where /run/user/UID is a directory. It stays when the state directory \
             is deleted, and tells the next pjwd of that.",
        ),
        roff::list_entry(
            "$XDG_RUNTIME_DIR/pjwd/pjwd.sock",
            "A user's socket; without the variable /run/user/UID/pjwd/pjwd.sock, or \
             /tmp/pjwd-UID/pjwd.sock where /run/user/UID is no directory.",
        ),
        roff::section("ENVIRONMENT"),
        roff::list_entry(
            "PJW_LOG",
            "How much is logged, instead of what log_level in the configuration says.",
        ),
        roff::section("EXIT STATUS") + "0 done; 1 failed, with the reason on stderr; 2 usage.\n",
        roff::see_also("pjwd"),
    ];
    Some(Page { name: "pjwd".into(), section: 8, text: text.concat() })
}

/// Returns the list entry for an option. `entry` is the text of the option in the help: its name on one line, and its
/// description on the next ones.
fn option_entry(entry: &str) -> Option<String> {
    let (name, description) = entry.trim().split_once('\n')?;
    let description = description.lines().map(str::trim).collect::<Vec<_>>().join("\n");
    Some(roff::list_entry(name, &description))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The form in which clap prints a help.
    const HELP: &str = "\
pjwd keeps the jobs on this machine out of each other's way.

Every job gets cores of its own. Ask it with
pjwctl.

Usage: pjwd [OPTIONS]

Options:
      --config <FILE>
          The configuration. Root's default is
          /etc/pjw/pjwd.toml

  -h, --help
          Print help
";

    #[test]
    fn the_help_of_the_daemon_becomes_its_page() {
        let text = page(HELP).unwrap().text;
        assert!(
            text.contains("pjwd \\- the process jail warden, which keeps the jobs on this machine"),
            "{text}"
        );
        let option =
            ".TP\n\\fB\\-\\-config <FILE>\\fR\nThe configuration. Root's default is\n/etc/pjw/pjwd.toml\n";
        assert!(text.contains(option), "{text}");
        assert!(text.contains(".TP\n\\fB\\-h, \\-\\-help\\fR\nPrint help\n"), "{text}");
        assert!(text.contains(".SH DESCRIPTION\nEvery job gets cores of its own."), "{text}");
    }

    #[test]
    fn a_text_that_is_no_help_makes_no_page() {
        assert!(page("").is_none());
        assert!(page("pjwd: illegal option\nUsage: pjwd\n").is_none());
    }
}
