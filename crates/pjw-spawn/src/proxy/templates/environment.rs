//! The environment of a program that makes itself a template: a list of pointers with room for the variables of an
//! instance.
//!
//! setenv(3) would allocate memory in each instance, and so copy pages that the instance otherwise shares with the
//! template.

use std::ffi::c_char;
use std::ptr;

/// How many variables an instance may have that the template lacks. More are set by putenv(3).
const ROOM: usize = 64;

unsafe extern "C" {
    static mut environ: *mut *const c_char;
}

/// The list of pointers to the environment variables of the calling process (`environ`, environ(7)). The list has room
/// for further variables, which can therefore be added without an allocation of memory.
#[derive(Debug)]
pub(super) struct Environment {
    list: *mut *const c_char,
    /// How many variables there are, and how many there may be.
    count: usize,
    capacity: usize,
}

impl Environment {
    /// Returns the size in bytes of a list with the present environment variables and room for 64 further variables.
    ///
    /// # Safety
    /// The process must have only one thread.
    pub(super) unsafe fn size() -> u64 {
        // SAFETY: guaranteed by the caller.
        ((unsafe { count_variables() } + ROOM + 1) * size_of::<*const c_char>()) as u64
    }

    /// Copies the list of environment variables to the memory at `address`, and sets `environ` to the copy.
    ///
    /// # Safety
    /// The process must have only one thread. The memory at `address` must have as many bytes as [`Environment::size`]
    /// returns. The bytes must be zero, and nothing else may use them.
    pub(super) unsafe fn copy_environ_to(address: u64) -> Self {
        let list =
            ptr::with_exposed_provenance_mut::<*const c_char>(usize::try_from(address).unwrap_or_default());
        // SAFETY: guaranteed by the caller. The memory behind the variables is zero, so that the list ends there.
        unsafe {
            let count = count_variables();
            if count > 0 {
                ptr::copy_nonoverlapping(environ, list, count);
            }
            environ = list;
            Self { list, count, capacity: count + ROOM }
        }
    }

    /// Sets the environment variable `variable`, a C string of the form `NAME=value`. Replaces an existing variable
    /// with the same name. Ignores a string without a name.
    ///
    /// # Safety
    /// The process must have only one thread. `variable` must be a C string that is never freed or changed.
    pub(super) unsafe fn set(&mut self, variable: *const c_char) {
        // SAFETY: guaranteed by the caller. The list has `capacity` places and one for the null pointer.
        unsafe {
            if !has_name(variable) {
                return;
            }
            for index in 0..self.count {
                if have_same_name(*self.list.add(index), variable) {
                    *self.list.add(index) = variable;
                    return;
                }
            }
            if self.count < self.capacity {
                *self.list.add(self.count) = variable;
                self.count += 1;
            } else {
                libc::putenv(variable.cast_mut());
            }
        }
    }
}

/// Returns the number of environment variables of this process.
///
/// # Safety
/// The process must have only one thread.
unsafe fn count_variables() -> usize {
    let mut count = 0;
    // SAFETY: the environment is null, or a list that ends with a null pointer.
    unsafe {
        while !environ.is_null() && !(*environ.add(count)).is_null() {
            count += 1;
        }
    }
    count
}

/// Returns whether `text` has the form `NAME=value` with a name that is not empty.
///
/// # Safety
/// `text` must be a C string.
unsafe fn has_name(text: *const c_char) -> bool {
    // SAFETY: guaranteed by the caller. No byte behind the NUL byte is read.
    unsafe { *text.cast::<u8>() != b'=' && have_same_name(text, text) }
}

/// Returns whether two environment variables have the same name: the strings are equal up to and including the first
/// `=`. `false` if they have no `=`.
///
/// # Safety
/// Both must be C strings.
unsafe fn have_same_name(left: *const c_char, right: *const c_char) -> bool {
    let (mut left, mut right) = (left.cast::<u8>(), right.cast::<u8>());
    // SAFETY: guaranteed by the caller. No byte behind the NUL byte is read.
    unsafe {
        while *left == *right && *left != 0 {
            if *left == b'=' {
                return true;
            }
            (left, right) = (left.add(1), right.add(1));
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_have_the_same_name_if_they_are_equal_up_to_the_first_equals_sign() {
        let names_match = |left: &std::ffi::CStr, right: &std::ffi::CStr| {
            // SAFETY: both are C strings.
            unsafe { have_same_name(left.as_ptr(), right.as_ptr()) }
        };
        for (left, right) in [(c"A=1", c"A=2"), (c"A=", c"A=x=y")] {
            assert!(names_match(left, right), "{left:?} {right:?}");
        }
        for (left, right) in [(c"A=1", c"AB=1"), (c"AB=1", c"A=1"), (c"A", c"A"), (c"", c"")] {
            assert!(!names_match(left, right), "{left:?} {right:?}");
        }
        // SAFETY: both are C strings.
        unsafe {
            assert!(has_name(c"A=1".as_ptr()) && !has_name(c"=1".as_ptr()) && !has_name(c"A".as_ptr()));
        };
    }
}
