//! The commands of the instances: one for all, or from a file, as srun(1) has it with `--multi-prog`.
//!
//! Each line of the file has ranks (`0`, `1-3,7`, or `*` for the ranks without a line), a program, and its arguments.
//! Quotes hold words together, a backslash at the end of a line continues it, and `#` begins a comment.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use anyhow::{anyhow, bail};
use pjw_core::cpuset::{CpuListError, CpuSet, Pu};

use crate::cli::SpawnArgs;

/// The longest file of commands that is read, in bytes. An endless file such as /dev/zero must not fill the memory.
const MAX_FILE_BYTES: u64 = 1 << 20;

/// A command, and the ranks of the instances (processes) that execute this command. The instances of `pjwctl spawn`
/// have the ranks 0, 1, 2 and so on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct RankedCommand {
    pub(super) ranks: Vec<u32>,
    pub(super) program: OsString,
    pub(super) arguments: Vec<OsString>,
    /// The number of its line in the file of commands, from 1. `None` for the command of the command line.
    pub(super) line: Option<usize>,
}

impl RankedCommand {
    /// Returns the file and the line of this command in the file of commands, for messages to the user. `request`
    /// contains the command line options. `None` for the command of the command line.
    pub(super) fn place(&self, request: &SpawnArgs) -> Option<String> {
        let (file, line) = request.multi_file.as_ref().zip(self.line)?;
        Some(format!("{}: line {line}", file.display()))
    }
}

/// Returns the commands for the instances of `pjwctl spawn`: one command from the command line, or the commands in the
/// file of the option `--multi`. `request` contains the command line options.
pub(super) fn read_commands(request: &SpawnArgs) -> anyhow::Result<Vec<RankedCommand>> {
    if let Some(path) = &request.multi_file {
        let text = read_file(path).map_err(|error| anyhow!("can't read {}: {error}", path.display()))?;
        return parse_commands(&text, request.instances)
            .map_err(|error| anyhow!("{}: {error}", path.display()));
    }
    let Some((program, arguments)) = request.command.split_first() else {
        bail!("no command was given: add one after --");
    };
    let ranks = (0..request.instances.unwrap_or(0)).collect();
    Ok(vec![RankedCommand { ranks, program: program.clone(), arguments: arguments.to_vec(), line: None }])
}

/// Returns the text of the file of commands `path`, which may also be a pipe.
///
/// # Errors
/// If the file is longer than [`MAX_FILE_BYTES`] or is not in UTF-8.
fn read_file(path: &Path) -> anyhow::Result<String> {
    let mut text = String::new();
    let read = File::open(path).and_then(|file| file.take(MAX_FILE_BYTES + 1).read_to_string(&mut text));
    read.map_err(|error| {
        let why = match error.kind() {
            io::ErrorKind::InvalidData => "it is no text in UTF-8".to_owned(),
            _ => error.to_string(),
        };
        anyhow!("{why}; give the path of a text file with a line for each program")
    })?;
    if text.len() as u64 > MAX_FILE_BYTES {
        bail!("it has more than {} MiB: name a file with a line for each program", MAX_FILE_BYTES >> 20);
    }
    Ok(text)
}

/// Returns the commands in `text`, the content of a file of commands. Each command has the ranks of the instances
/// that execute it. `instances` is the number of instances. If `instances` is `None`, the highest rank in the file
/// determines this number. A command with `*` instead of ranks gets all ranks that no other command has. It is left
/// out if there are none.
///
/// # Errors
/// If the text is malformed. If a rank has no command or two commands, or is not below the number of instances. If a
/// command has `*` and `instances` is `None`.
fn parse_commands(text: &str, instances: Option<u32>) -> anyhow::Result<Vec<RankedCommand>> {
    let mut commands = Vec::new();
    let mut named_ranks = BTreeSet::new();
    // The index of the command with `*`.
    let mut star_command = None;
    for (number, line) in logical_lines(text) {
        let words = split_into_words(&line).map_err(|error| anyhow!("line {number}: {error}"))?;
        let Some((ranks, command)) = words.split_first() else { continue };
        let Some((program, arguments)) = command.split_first() else {
            bail!("line {number}: the program is missing: write ranks, a program and its arguments");
        };
        let arguments = arguments.iter().map(OsString::from).collect();
        let ranks = if ranks == "*" {
            if star_command.replace(commands.len()).is_some() {
                bail!("line {number}: * was used before: remove one of the two lines");
            }
            Vec::new()
        } else {
            parse_ranks(ranks).map_err(|error| anyhow!("line {number}: {error}"))?
        };
        if let Some(rank) = ranks.iter().find(|rank| !named_ranks.insert(**rank)) {
            bail!("line {number}: rank {rank} has a command already: remove it from one of the lines");
        }
        commands.push(RankedCommand { ranks, program: program.into(), arguments, line: Some(number) });
    }
    let size = match (instances, star_command, named_ranks.last()) {
        (Some(instances), ..) => instances,
        (None, None, Some(last)) => last + 1,
        (None, ..) => bail!("the number of instances is unknown: add -n N"),
    };
    if let Some(rank) = named_ranks.last().filter(|last| **last >= size) {
        bail!("rank {rank} is not below the number of instances, {size}: correct the ranks, or -n");
    }
    let others: Vec<u32> = (0..size).filter(|rank| !named_ranks.contains(rank)).collect();
    match (star_command.and_then(|index| commands.get_mut(index)), others.first()) {
        (Some(command), _) => command.ranks = others,
        (None, Some(rank)) => bail!("rank {rank} has no command: add a line for it, or * for all others"),
        (None, None) => {}
    }
    commands.retain(|command| !command.ranks.is_empty());
    Ok(commands)
}

/// Parses a list of ranks, such as `0-2,5`. The list has the form of a CPU list. So the largest rank is [`Pu::MAX`].
fn parse_ranks(text: &str) -> anyhow::Result<Vec<u32>> {
    if text.is_empty() {
        bail!("the ranks are empty: write ranks such as 0-2,5, or * for all others");
    }
    let list: Result<CpuSet, CpuListError> = text.parse();
    match list {
        Ok(list) => Ok(list.iter().map(|rank| rank.0).collect()),
        Err(CpuListError::EmptyPart { list }) => {
            bail!("the ranks {list} have an empty part: remove the comma, or write a rank there")
        }
        Err(CpuListError::NotANumber { text }) => {
            bail!("{text} in the ranks is no number: write ranks such as 0-2,5, or * for all others")
        }
        Err(CpuListError::ReversedRange { first, last }) => {
            bail!("the ranks {first}-{last} run backwards: write {last}-{first}")
        }
        Err(CpuListError::DuplicatePu { pu }) => bail!("rank {pu} is there twice: name each rank once"),
        Err(CpuListError::TooLarge { text }) => {
            bail!(
                "rank {text} is beyond the largest that a line can name, {}: write * for those above",
                Pu::MAX
            )
        }
    }
}

/// Returns the lines of `text`, each with its number, counted from 1. A line that ends with a backslash is joined
/// with the next line. The joined line has the number of its first part.
fn logical_lines(text: &str) -> Vec<(usize, String)> {
    let mut lines: Vec<(usize, String)> = Vec::new();
    let mut continues = false;
    for (index, line) in text.lines().enumerate() {
        let (part, goes_on) = line.strip_suffix('\\').map_or((line, false), |part| (part, true));
        match lines.last_mut().filter(|_| continues) {
            Some((_, last)) => last.push_str(part),
            None => lines.push((index + 1, part.to_owned())),
        }
        continues = goes_on;
    }
    lines
}

/// Splits a line into words at white space, except inside quotes (`'` or `"`). A `#` at the beginning of a word
/// begins a comment, which extends to the end of the line. Fails if a quote is not closed.
fn split_into_words(line: &str) -> anyhow::Result<Vec<String>> {
    let mut words = Vec::new();
    let mut word: Option<String> = None;
    let mut quote = None;
    for c in line.chars() {
        match (quote, c) {
            (Some(open), _) if c == open => quote = None,
            (None, '\'' | '"') => {
                quote = Some(c);
                word.get_or_insert_default();
            }
            (None, '#') if word.is_none() => break,
            (None, _) if c.is_whitespace() => words.extend(word.take()),
            _ => word.get_or_insert_default().push(c),
        }
    }
    if let Some(quote) = quote {
        bail!("the quote {quote} is not closed: add another");
    }
    words.extend(word);
    Ok(words)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The ranks of a command, and its words.
    type Summary = (Vec<u32>, Vec<String>);

    fn summary(text: &str, instances: Option<u32>) -> Result<Vec<Summary>, String> {
        let commands = parse_commands(text, instances).map_err(|error| error.to_string())?;
        let words = |command: RankedCommand| {
            let words = [vec![command.program], command.arguments].concat();
            (command.ranks, words.into_iter().map(|word| word.into_string().unwrap()).collect())
        };
        Ok(commands.into_iter().map(words).collect())
    }

    #[test]
    fn each_line_gives_ranks_a_command() {
        let text = "# a master and workers\n0 master --of %n\n1-2,4 worker 'a b' \\\n  c # last\n* spare\n";
        let expected: Vec<Summary> = vec![
            (vec![0], vec!["master".into(), "--of".into(), "%n".into()]),
            (vec![1, 2, 4], vec!["worker".into(), "a b".into(), "c".into()]),
            (vec![3, 5], vec!["spare".into()]),
        ];
        assert_eq!(summary(text, Some(6)).unwrap(), expected);
    }

    #[test]
    fn the_highest_rank_gives_the_number_of_instances() {
        assert_eq!(summary("0-2 a", None).unwrap()[0].0, [0, 1, 2]);
    }

    #[test]
    fn a_file_that_leaves_something_open_is_refused() {
        for (text, instances, why) in [
            ("0 a\n2 b", None, "rank 1 has no command"),
            ("0 a\n0-1 b", None, "rank 0 has a command already"),
            ("* a", None, "add -n N"),
            ("'' a\n* b", Some(2), "line 1: the ranks are empty"),
            ("* a\n* b", Some(2), "* was used before"),
            ("0-3 a", Some(2), "rank 3 is not below"),
            ("0", None, "the program is missing"),
            ("x a", None, "line 1: x in the ranks is no number"),
            ("0,,1 a", None, "the ranks 0,,1 have an empty part"),
            ("2-1 a", None, "the ranks 2-1 run backwards: write 1-2"),
            ("1,1 a", None, "rank 1 is there twice"),
            ("0-69999 a", None, "line 1: rank 69999 is beyond the largest that a line can name, 65535"),
            ("0 'a", None, "not closed"),
            ("", None, "add -n N"),
        ] {
            let error = summary(text, instances).unwrap_err();
            assert!(error.contains(why), "{text:?}: {error}");
        }
    }
}
