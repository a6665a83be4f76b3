//! The memory content that differs between the instances of a template: the strings of the arguments and of the
//! environment, and the pointers to these strings. A pure computation.

use std::ops::Range;

/// The size of a page in bytes. Each page is compared and written for itself, because the kernel copies whole pages
/// after a fork.
const PAGE: usize = 4096;

/// The arguments and environment variables of one instance (a process that is forked from a template), each with its
/// NUL byte. The variables come first: most variables are the same in all instances, so their pages often need no
/// change.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(in crate::proxy::templates) struct InstanceStrings {
    bytes: Vec<u8>,
    /// The offsets in `bytes` at which the variables begin.
    variables: Vec<usize>,
    /// The offsets in `bytes` at which the arguments begin.
    arguments: Vec<usize>,
}

/// The arguments and environment variables of one instance (a process that is forked from a template) at fixed
/// addresses in memory, and the pointers to these strings.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(in crate::proxy::templates) struct PlacedStrings {
    /// The address of the first string.
    address: u64,
    strings: Vec<u8>,
    /// As on the stack: the arguments, a zero, the variables, a zero.
    pointers: Vec<u64>,
    /// The offset in `strings` at which the arguments begin.
    arguments_offset: usize,
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

    /// Returns these strings with their addresses in the memory of a process, and the pointers to them. `address`
    /// is the address of the first string. The other strings follow it.
    pub(in crate::proxy::templates) fn place_at(self, address: u64) -> PlacedStrings {
        let addresses =
            |starts: &[usize]| starts.iter().map(|start| address + *start as u64).collect::<Vec<_>>();
        let pointers = [addresses(&self.arguments), vec![0], addresses(&self.variables), vec![0]].concat();
        let arguments_offset = self.arguments.first().copied().unwrap_or(self.bytes.len());
        PlacedStrings { address, strings: self.bytes, pointers, arguments_offset }
    }
}

impl PlacedStrings {
    /// Returns the address range of the arguments, which `/proc/PID/cmdline` shows.
    pub(in crate::proxy::templates) fn argument_range(&self) -> Range<u64> {
        self.address + self.arguments_offset as u64..self.address + self.strings.len() as u64
    }

    /// Returns the address range of the environment variables, which `/proc/PID/environ` shows.
    pub(in crate::proxy::templates) fn variable_range(&self) -> Range<u64> {
        self.address..self.address + self.arguments_offset as u64
    }

    /// Returns the changes that turn `before`, the strings now in memory, into these strings. Each change contains an
    /// address and the new bytes. `pointers_at` is the address in memory of the list of pointers to the strings.
    pub(in crate::proxy::templates) fn changes(
        &self,
        before: &Self,
        pointers_at: u64,
    ) -> Vec<(u64, Vec<u8>)> {
        let mut changes = self.pointer_changes(before, pointers_at);
        changes.extend(self.string_changes(before));
        changes
    }

    /// Returns the changes of the list of pointers at the address `pointers_at`: one for each run of pointers that
    /// differ from those in `before`.
    fn pointer_changes(&self, before: &Self, pointers_at: u64) -> Vec<(u64, Vec<u8>)> {
        let is_same = |index: &usize| before.pointers.get(*index) == self.pointers.get(*index);
        let count = self.pointers.len();
        let mut changes = Vec::new();
        let mut end = 0;
        while let Some(start) = (end..count).find(|index| !is_same(index)) {
            end = (start..count).find(is_same).unwrap_or(count);
            let bytes = self.pointers[start..end].iter().flat_map(|pointer| pointer.to_ne_bytes()).collect();
            changes.push((pointers_at + 8 * start as u64, bytes));
        }
        changes
    }

    /// Returns the changes of the strings from `before`: one for each page of memory in which a byte differs. A change
    /// has the address of the first byte in the page that differs, and the new bytes from this byte to the last one in
    /// the page that differs. If the strings have another address than in `before`, all bytes count as different.
    fn string_changes(&self, before: &Self) -> Vec<(u64, Vec<u8>)> {
        let has_moved = self.address != before.address;
        let is_new = |at: &usize| has_moved || before.strings.get(*at) != self.strings.get(*at);
        let mut changes = Vec::new();
        let mut start = 0;
        while start < self.strings.len() {
            let offset_in_page = usize::try_from((self.address + start as u64) % PAGE as u64).unwrap_or(0);
            let end = (start + PAGE - offset_in_page).min(self.strings.len());
            // Most pages are the same. They are compared faster as a whole.
            let is_same_page = !has_moved && before.strings.get(start..end) == self.strings.get(start..end);
            if !is_same_page
                && let (Some(first), Some(last)) = ((start..end).find(is_new), (start..end).rfind(is_new))
            {
                changes.push((self.address + first as u64, self.strings[first..=last].to_vec()));
            }
            start = end;
        }
        changes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn placed(address: u64, arguments: &[&str], variables: &[&str]) -> PlacedStrings {
        InstanceStrings::new(
            arguments.iter().map(|text| text.as_bytes()),
            variables.iter().map(|text| text.as_bytes()),
        )
        .place_at(address)
    }

    #[test]
    fn pointers_lead_to_their_strings() {
        let strings = placed(0x1000, &["prog", "x"], &["A=1"]);
        assert_eq!(strings.strings, b"A=1\0prog\0x\0");
        assert_eq!(strings.pointers, [0x1004, 0x1009, 0, 0x1000, 0]);
        assert_eq!((strings.variable_range(), strings.argument_range()), (0x1000..0x1004, 0x1004..0x100b));
    }

    #[test]
    fn the_longest_string_counts_with_its_nul_byte() {
        let strings = InstanceStrings::new([&b"p"[..], b"22"].into_iter(), [&b"A=333"[..]].into_iter());
        assert_eq!((strings.longest(), strings.size()), (6, 11));
        assert_eq!(strings.variables().collect::<Vec<_>>(), [b"A=333"]);
    }

    #[test]
    fn strings_without_variables_have_an_empty_environment() {
        let strings = placed(0x1000, &["p"], &[]);
        assert_eq!(strings.pointers, [0x1000, 0, 0]);
        assert_eq!((strings.variable_range(), strings.argument_range()), (0x1000..0x1000, 0x1000..0x1002));
    }

    #[test]
    fn only_pages_that_differ_are_written() {
        let long = format!("A={}", "a".repeat(2 * PAGE));
        let before = placed(0x1000, &["p", "1"], &[&long]);
        let after = placed(0x1000, &["p", "2"], &[&long]);
        let changes = after.changes(&before, 0x9000);
        assert_eq!(changes.len(), 1);
        assert_eq!(changes[0], (0x1000 + long.len() as u64 + 3, b"2".to_vec()));
        assert_eq!(after.changes(&after, 0x9000), []);
        assert_eq!(placed(0x5000, &["p", "2"], &[&long]).changes(&after, 0x9000).len(), 5);
    }

    #[test]
    fn only_pointers_that_differ_are_written() {
        let before = placed(0x1000, &["p", "9", "z"], &["A=1"]);
        let after = placed(0x1000, &["p", "10", "z"], &["A=1"]);
        let changes = after.changes(&before, 0x9000);
        assert_eq!(changes[0], (0x9010, 0x1009u64.to_ne_bytes().to_vec()));
        assert_eq!(changes[1], (0x1006, b"10\0z\0".to_vec()));
    }
}
