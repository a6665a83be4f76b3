//! pjwd.toml(5), generated from the shipped configuration file, which documents every key.

use super::{page::Page, roff};

const SHIPPED: &str = include_str!("../../../../../config/pjwd.toml");

/// Makes the manual page pjwd.toml(5) of the daemon's configuration file.
pub(super) fn page() -> Page {
    let mut blocks = SHIPPED.split("\n\n");
    // The first block describes the file itself. Its first line is a title.
    let first_block = blocks.next().map(prose).unwrap_or_default();
    let about = "the configuration of the process jail warden";
    let description = first_block.split_once('\n').map_or("", |(_, description)| description).trim();
    let mut text = roff::page_header("pjwd.toml", 5, about);
    text += &roff::section("DESCRIPTION");
    text += "pjwd reads one file, in TOML: the one that \\-\\-config names, else /etc/pjw/pjwd.toml as root and\n\
             $XDG_CONFIG_HOME/pjw/pjwd.toml (~/.config without the variable) as any other user.\n.PP\n";
    text += &roff::escape_roff(description);
    text.push('\n');
    text += &roff::section("KEYS");
    text += &blocks.map(block_text).collect::<String>();
    text += &roff::see_also("pjwd.toml");
    Page { name: "pjwd.toml".into(), section: 5, text }
}

/// Returns the text of the manual page for `block`, a block of the configuration file between blank lines. A block
/// has a description, which may end with an example of a table, and then the keys with their defaults.
fn block_text(block: &str) -> String {
    let keys: Vec<&str> = block.lines().filter_map(key).collect();
    let text = prose(block);
    let (description, example) = text.split_at(text.find("[[").unwrap_or(text.len()));
    let entry = if keys.is_empty() {
        format!(".PP\n{}\n", roff::escape_roff(description.trim()))
    } else {
        roff::list_entry(&keys.join(", "), description.trim())
    };
    if example.is_empty() { entry } else { entry + &roff::verbatim(example.trim_end()) }
}

/// Returns `line` without its `#`, if the rest is a key or the header of a table.
fn key(line: &str) -> Option<&str> {
    line.strip_prefix('#').filter(|line| !line.is_empty() && !line.starts_with(' '))
}

/// Returns the description in `block`: its comment lines, without the `# `.
fn prose(block: &str) -> String {
    block.lines().filter_map(|line| line.strip_prefix("# ")).map(|line| line.to_owned() + "\n").collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_key_of_the_shipped_file_is_in_the_page() {
        let text = page().text;
        for key in SHIPPED.lines().filter_map(key) {
            assert!(text.contains(&roff::escape_roff(key)), "{key} is missing in {text}");
        }
        assert!(
            text.contains(".TP\n\\fBmode = \"enforce\"\\fR\n\"enforce\": jobs are kept on their cores."),
            "{text}"
        );
        assert!(
            text.contains(".nf\n[[provision]]\nname = \"web\"\ncores = 4\n"),
            "the lines of an example are kept: {text}"
        );
    }
}
