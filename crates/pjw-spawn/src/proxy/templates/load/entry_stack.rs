//! The stack that execve(2) makes: the argument count, the pointers to arguments and variables, the auxiliary vector.

use nix::errno::Errno;

use super::tracee::Tracee;

/// The content of the initial stack of a program: the arguments, the environment and the auxiliary vector, as execve(2)
/// wrote them.
#[derive(Debug, Clone)]
pub(in crate::proxy::templates) struct EntryStack {
    /// The address of the argument count.
    pub(in crate::proxy::templates) address: u64,
    /// The pointers to the arguments, a zero, the pointers to the variables, a zero.
    pub(in crate::proxy::templates) pointers: Vec<u64>,
    /// How many of the pointers are arguments.
    pub(in crate::proxy::templates) argument_count: usize,
    auxiliary: Vec<(u64, u64)>,
}

impl EntryStack {
    /// Reads the initial stack of the process `tracee`, which must be stopped directly after execve(2). `stack_pointer`
    /// is the stack pointer of the process. Fails with `ENOEXEC` if the stack has another layout.
    pub(in crate::proxy::templates) fn read(tracee: &Tracee, stack_pointer: u64) -> Result<Self, Errno> {
        let argument_count = usize::try_from(tracee.read_u64(stack_pointer)?).map_err(|_| Errno::ENOEXEC)?;
        let mut words = Words { tracee, address: stack_pointer + 8, unused: Vec::new() };
        let mut pointers = Vec::new();
        while pointers.iter().filter(|pointer| **pointer == 0).count() < 2 {
            pointers.push(words.next_word()?);
        }
        let mut auxiliary = Vec::new();
        loop {
            match (words.next_word()?, words.next_word()?) {
                (0, _) => break,
                pair => auxiliary.push(pair),
            }
        }
        if pointers.get(argument_count) != Some(&0) {
            return Err(Errno::ENOEXEC);
        }
        Ok(Self { address: stack_pointer, pointers, argument_count, auxiliary })
    }

    /// Returns a value without content, for a program that is already running. At `address` in the memory of the
    /// program there is room for the pointers to the arguments and environment variables of a forked process.
    pub(in crate::proxy::templates) fn without_content(address: u64) -> Self {
        Self { address: address - 8, pointers: Vec::new(), argument_count: 0, auxiliary: Vec::new() }
    }

    /// Returns the value of an entry of the auxiliary vector, getauxval(3). `kind` is the type of the entry, such as
    /// `AT_ENTRY`. `None` if there is no such entry.
    pub(in crate::proxy::templates) fn auxiliary_value(&self, kind: u64) -> Option<u64> {
        self.auxiliary.iter().find(|(entry_kind, _)| *entry_kind == kind).map(|(_, value)| *value)
    }

    /// Returns the number of environment variables.
    pub(in crate::proxy::templates) fn variable_count(&self) -> usize {
        self.pointers.len().saturating_sub(self.argument_count + 2)
    }
}

/// Reads the words of a stack one after the other, upwards. Reads the memory in blocks that end where a page ends,
/// because no mapping ends elsewhere.
struct Words<'a> {
    tracee: &'a Tracee,
    /// The address of the memory that is read next.
    address: u64,
    /// The bytes that were read, and not returned yet.
    unused: Vec<u8>,
}

impl Words<'_> {
    /// Returns the next word of the stack. If all words that were read before have been returned, first reads the stack
    /// up to the end of the next page. Fails with the error of this access.
    fn next_word(&mut self) -> Result<u64, Errno> {
        if self.unused.is_empty() {
            let length = 4096 - self.address % 4096;
            self.unused = vec![0; usize::try_from(length).unwrap_or(8)];
            self.tracee.read(self.address, &mut self.unused)?;
            self.address += length;
        }
        let word: [u8; 8] = *self.unused.first_chunk().ok_or(Errno::EFAULT)?;
        self.unused.drain(..word.len());
        Ok(u64::from_ne_bytes(word))
    }
}
