//! What differs between instances in memory: the strings of the arguments and of the environment, and the pointers to
//! them. A pure computation.

use std::ops::Range;

/// Writes go in pieces of pages, because a fork copies whole pages.
const PAGE: usize = 4096;

/// The arguments and environment variables of one instance (a process that is forked from a template), each with its
/// NUL byte. The variables come first: most variables are the same in all instances, so their pages often need no
/// change.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(in crate::proxy::templates) struct InstanceStrings {
    bytes: Vec<u8>,
    /// Where each variable and each argument begins.
    variables: Vec<usize>,
    arguments: Vec<usize>,
}

/// The arguments and environment variables of one instance (a process that is forked from a template) at fixed
/// addresses in memory, and the pointers to these strings.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(in crate::proxy::templates) struct PlacedStrings {
    /// The address of the first string.
    at: u64,
    strings: Vec<u8>,
    /// As on the stack: the arguments, a zero, the variables, a zero.
    pointers: Vec<u64>,
    /// Where the arguments begin in `strings`.
    arguments_at: usize,
}

impl InstanceStrings {
    /// Makes the value from `arguments` and the environment variables `variables`. The strings must not contain NUL
    /// bytes.
    pub(in crate::proxy::templates) fn new<'a>(
        arguments: impl Iterator<Item = &'a [u8]>,
        variables: impl Iterator<Item = &'a [u8]>,
    ) -> Self {
        let mut bytes = Vec::new();
        let mut add = |text: &[u8]| {
            let start = bytes.len();
            bytes.extend_from_slice(text);
            bytes.push(0);
            start
        };
        let variables = variables.map(&mut add).collect();
        let arguments = arguments.map(add).collect();
        Self { bytes, variables, arguments }
    }

    /// Returns the size of all strings in bytes, with their NUL bytes.
    pub(in crate::proxy::templates) fn size(&self) -> u64 {
        self.bytes.len() as u64
    }

    /// Returns the size in bytes of the longest argument or environment variable, with its NUL byte.
    pub(in crate::proxy::templates) fn longest(&self) -> usize {
        let starts = || self.variables.iter().chain(&self.arguments).copied();
        let ends = starts().skip(1).chain([self.bytes.len()]);
        starts().zip(ends).map(|(start, end)| end - start).max().unwrap_or(0)
    }

    /// Returns the number of arguments.
    pub(in crate::proxy::templates) fn argument_count(&self) -> usize {
        self.arguments.len()
    }

    /// Returns the number of environment variables.
    pub(in crate::proxy::templates) fn variable_count(&self) -> usize {
        self.variables.len()
    }

    /// Returns the number of pointers that are needed for the strings: one for each argument and each variable, and the
    /// two null pointers that end the two lists.
    pub(in crate::proxy::templates) fn pointer_count(&self) -> usize {
        self.arguments.len() + self.variables.len() + 2
    }

    /// Iterates over the environment variables, without their NUL bytes.
    pub(in crate::proxy::templates) fn variables(&self) -> impl Iterator<Item = &[u8]> {
        self.variables.iter().filter_map(|start| self.bytes[*start..].split(|byte| *byte == 0).next())
    }

    /// Returns these strings with their addresses in the memory of a process, and the pointers to them. `at` is the
    /// address of the first string. The other strings follow it.
    pub(in crate::proxy::templates) fn place_at(self, at: u64) -> PlacedStrings {
        let addresses = |starts: &[usize]| starts.iter().map(|start| at + *start as u64).collect::<Vec<_>>();
        let pointers = [addresses(&self.arguments), vec![0], addresses(&self.variables), vec![0]].concat();
        let arguments_at = self.arguments.first().copied().unwrap_or(self.bytes.len());
        PlacedStrings { at, strings: self.bytes, pointers, arguments_at }
    }
}

impl PlacedStrings {
    /// Returns the address range of the arguments, which `/proc/PID/cmdline` shows.
    pub(in crate::proxy::templates) fn argument_range(&self) -> Range<u64> {
        self.at + self.arguments_at as u64..self.at + self.strings.len() as u64
    }

    /// Returns the address range of the environment variables, which `/proc/PID/environ` shows.
    pub(in crate::proxy::templates) fn variable_range(&self) -> Range<u64> {
        self.at..self.at + self.arguments_at as u64
    }

    /// Returns the changes that turn `before`, the strings now in memory, into these strings. Each change contains an
    /// address and the new bytes. `pointers_at` is the address in memory of the list of pointers to the strings.
    pub(in crate::proxy::templates) fn changes(
        &self,
        before: &Self,
        pointers_at: u64,
    ) -> Vec<(u64, Vec<u8>)> {
        let mut changes = Vec::new();
        let is_same = |index: usize| before.pointers.get(index) == self.pointers.get(index);
        let mut index = 0;
        while index < self.pointers.len() {
            if is_same(index) {
                index += 1;
                continue;
            }
            let end =
                (index..self.pointers.len()).find(|index| is_same(*index)).unwrap_or(self.pointers.len());
            let bytes = self.pointers[index..end].iter().flat_map(|pointer| pointer.to_ne_bytes()).collect();
            changes.push((pointers_at + 8 * index as u64, bytes));
            index = end;
        }
        // A piece ends where a page of the process ends. Most pages are the same, and are compared faster as a whole.
        let mut start = 0;
        while start < self.strings.len() {
            let in_page = usize::try_from((self.at + start as u64) % PAGE as u64).unwrap_or(0);
            let end = (start + PAGE - in_page).min(self.strings.len());
            let is_new =
                |at: &usize| self.at != before.at || before.strings.get(*at) != self.strings.get(*at);
            if (self.at != before.at || before.strings.get(start..end) != self.strings.get(start..end))
                && let (Some(first), Some(last)) = ((start..end).find(is_new), (start..end).rfind(is_new))
            {
                changes.push((self.at + first as u64, self.strings[first..=last].to_vec()));
            }
            start = end;
        }
        changes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image(at: u64, arguments: &[&str], variables: &[&str]) -> PlacedStrings {
        InstanceStrings::new(
            arguments.iter().map(|text| text.as_bytes()),
            variables.iter().map(|text| text.as_bytes()),
        )
        .place_at(at)
    }

    #[test]
    fn pointers_lead_to_their_strings() {
        let image = image(0x1000, &["prog", "x"], &["A=1"]);
        assert_eq!(image.strings, b"A=1\0prog\0x\0");
        assert_eq!(image.pointers, [0x1004, 0x1009, 0, 0x1000, 0]);
        assert_eq!((image.variable_range(), image.argument_range()), (0x1000..0x1004, 0x1004..0x100b));
    }

    #[test]
    fn the_longest_string_counts_with_its_nul_byte() {
        let strings = InstanceStrings::new([&b"p"[..], b"22"].into_iter(), [&b"A=333"[..]].into_iter());
        assert_eq!((strings.longest(), strings.size()), (6, 11));
        assert_eq!(strings.variables().collect::<Vec<_>>(), [b"A=333"]);
    }

    #[test]
    fn an_image_without_variables_has_an_empty_environment() {
        let image = image(0x1000, &["p"], &[]);
        assert_eq!(image.pointers, [0x1000, 0, 0]);
        assert_eq!((image.variable_range(), image.argument_range()), (0x1000..0x1000, 0x1000..0x1002));
    }

    #[test]
    fn only_pages_that_differ_are_written() {
        let long = format!("A={}", "a".repeat(2 * PAGE));
        let before = image(0x1000, &["p", "1"], &[&long]);
        let after = image(0x1000, &["p", "2"], &[&long]);
        let changes = after.changes(&before, 0x9000);
        assert_eq!(changes.len(), 1);
        assert_eq!(changes[0], (0x1000 + long.len() as u64 + 3, b"2".to_vec()));
        assert_eq!(after.changes(&after, 0x9000), []);
        assert_eq!(image(0x5000, &["p", "2"], &[&long]).changes(&after, 0x9000).len(), 5);
    }

    #[test]
    fn only_pointers_that_differ_are_written() {
        let before = image(0x1000, &["p", "9", "z"], &["A=1"]);
        let after = image(0x1000, &["p", "10", "z"], &["A=1"]);
        let changes = after.changes(&before, 0x9000);
        assert_eq!(changes[0], (0x9010, 0x1009u64.to_ne_bytes().to_vec()));
        assert_eq!(changes[1], (0x1006, b"10\0z\0".to_vec()));
    }
}
