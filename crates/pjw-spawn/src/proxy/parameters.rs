//! The arguments and variables that `fork_here` returns to an instance.

use std::ffi::{CStr, c_char};
use std::ptr;

/// The arguments and environment variables of one instance: a process that is forked from a [`super::Template`]. In
/// the instance, [`fork_here`](super::fork_here) returns this value. This value contains only pointers to the strings
/// in the memory of the instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InstanceParameters {
    /// The address of the list of pointers to the arguments. A null pointer ends the list.
    arguments: usize,
    /// The address of the list of pointers to the variables. A null pointer ends the list.
    variables: usize,
}

impl InstanceParameters {
    /// Makes the value from the two lists of pointers in the memory of this process: the pointers to the arguments, and
    /// the pointers to the environment variables. `address` is the address of the first list. The second list follows
    /// directly after the null pointer that ends the first list.
    ///
    /// # Safety
    /// Both lists must exist, and must end with a null pointer. The lists and their strings must never be freed or
    /// changed.
    #[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "there are no templates"))]
    pub(super) unsafe fn from_address(address: usize) -> Self {
        let mut arguments = Strings(ptr::with_exposed_provenance(address));
        while arguments.next().is_some() {}
        Self { arguments: address, variables: arguments.0.addr() + size_of::<*const c_char>() }
    }

    /// Returns the arguments of this instance (a process that was forked from a template). The first one is argument
    /// 0.
    pub fn arguments(&self) -> impl Iterator<Item = &'static CStr> + use<> {
        Strings(ptr::with_exposed_provenance(self.arguments)).map(text)
    }

    /// Returns the environment variables that only this instance (a process that was forked from a template) has.
    /// Each has the form `NAME=value`. [`fork_here`](super::fork_here) has already set them in the environment. The
    /// variables that all instances have from their [`crate::SpawnContext`] are not returned.
    pub fn variables(&self) -> impl Iterator<Item = &'static CStr> + use<> {
        self.variable_pointers().map(text)
    }

    /// Returns the arguments of this instance (a process that was forked from a template) in the form of the
    /// parameter `argv` of `main` in C. This is the address of an array of pointers to C strings. The last pointer of
    /// the array is null.
    #[must_use]
    pub fn argv(&self) -> *const *const c_char {
        ptr::with_exposed_provenance(self.arguments)
    }

    /// Iterates over pointers to the environment variables that only this instance (a process that was forked from a
    /// template) has. Each variable is a C string of the form `NAME=value`.
    pub(super) fn variable_pointers(&self) -> impl Iterator<Item = *const c_char> + use<> {
        Strings(ptr::with_exposed_provenance(self.variables))
    }
}

/// Iterates over the pointers of a list. Ends at the null pointer that ends the list.
struct Strings(*const *const c_char);

impl Iterator for Strings {
    type Item = *const c_char;

    fn next(&mut self) -> Option<*const c_char> {
        // SAFETY: the caller of `InstanceParameters::from_address` guarantees the list. The iterator stays at its end.
        unsafe {
            let pointer = *self.0;
            if pointer.is_null() {
                return None;
            }
            self.0 = self.0.add(1);
            Some(pointer)
        }
    }
}

fn text(pointer: *const c_char) -> &'static CStr {
    // SAFETY: the caller of `InstanceParameters::from_address` guarantees the strings.
    unsafe { CStr::from_ptr(pointer) }
}
