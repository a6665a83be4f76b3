//! Reads lists of strings and CPU sets from the memory of a C program.

use std::ffi::{CStr, CString, OsStr, c_char, c_uint};
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;

use libc::cpu_set_t;
use pjw_core::cpuset::CpuSet;

use crate::failure::Failure;

/// Lists of strings for the processes that one call starts, such as their arguments. The value contains no list, one
/// list for all processes, or one list for each process.
#[derive(Debug, Default)]
pub(crate) struct StringLists(Vec<Arc<Vec<CString>>>);

impl StringLists {
    /// Returns a value that contains no list.
    pub(crate) fn none() -> Self {
        Self::default()
    }

    /// Returns one list for all processes. The list contains only `argument`. If `argument` contains a NUL byte, the
    /// list is empty.
    pub(crate) fn single_string(argument: &OsStr) -> Self {
        Self(vec![Arc::new(CString::new(argument.as_bytes()).into_iter().collect())])
    }

    /// Reads one argument list, which all processes get, from the C array `list`. Fails if `list` is NULL or empty.
    ///
    /// # Safety
    /// `list` must be NULL or an array of C strings that ends with NULL.
    pub(crate) unsafe fn one_for_all(list: *const *const c_char) -> Result<Self, Failure> {
        // SAFETY: the caller guarantees the same.
        unsafe { Self::read(list, 1, false) }
    }

    /// Reads argument lists from the C array `lists`. If `each` is true, the array contains `count` lists, one for each
    /// process, one after the other. If `each` is false, the array contains one list for all processes. Fails if
    /// `lists` is NULL or a list is empty.
    ///
    /// # Safety
    /// `lists` must be NULL or point to as many lists as `each` and `count` say. Each list must consist of C strings
    /// and end with NULL.
    pub(crate) unsafe fn read(
        lists: *const *const c_char,
        count: c_uint,
        each: bool,
    ) -> Result<Self, Failure> {
        if lists.is_null() {
            return Err(Failure::invalid("argv is NULL"));
        }
        // SAFETY: the caller guarantees the same.
        let lists = unsafe { Self::read_lists(lists, count, each) };
        if lists.0.iter().any(|list| list.is_empty()) {
            return Err(Failure::invalid(
                "an argument list is empty: it needs at least argument 0, the program's name",
            ));
        }
        Ok(lists)
    }

    /// Reads environments from the C array `lists`. If `each` is true, the array contains `count` environments, one for
    /// each process, one after the other. If `each` is false, it contains one environment for all processes. If `lists`
    /// is NULL, the result has no list: each process gets the environment of the caller.
    ///
    /// # Safety
    /// The requirements of [`StringLists::read`].
    pub(crate) unsafe fn read_environments(
        lists: *const *const c_char,
        count: c_uint,
        each: bool,
    ) -> Result<Self, Failure> {
        // SAFETY: the caller guarantees the same.
        Ok(if lists.is_null() { Self::none() } else { unsafe { Self::read_lists(lists, count, each) } })
    }

    /// Reads the lists from the array `next`: `count` lists if `each` is true, else one list.
    ///
    /// # Safety
    /// As [`StringLists::read`], and `next` must not be NULL.
    unsafe fn read_lists(mut next: *const *const c_char, count: c_uint, each: bool) -> Self {
        let list_count = if each { count } else { 1 };
        let lists = (0..list_count).map(|_| {
            let mut list = Vec::new();
            // SAFETY: each list ends with NULL, and the next one begins after it.
            unsafe {
                while !(*next).is_null() {
                    list.push(CStr::from_ptr(*next).to_owned());
                    next = next.add(1);
                }
                next = next.add(1);
            }
            Arc::new(list)
        });
        Self(lists.collect())
    }

    /// Returns whether this value contains no list.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the names and the values of the environment variables, if this value contains one environment for all
    /// processes. `None` if it contains no environment or several environments. Also `None` if a string in the
    /// environment does not have the form `NAME=value`.
    pub(crate) fn one_of_assignments(&self) -> Option<Vec<(&OsStr, &OsStr)>> {
        let [list] = &self.0[..] else { return None };
        list.iter().map(split_assignment).collect()
    }

    /// Iterates over the lists, in the order of the processes. A list that is common to all processes occurs once.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Vec<CString>> {
        self.0.iter().map(AsRef::as_ref)
    }
}

/// Returns the name and the value of a variable `NAME=value`. `None` if the text has no `=`.
fn split_assignment(variable: &CString) -> Option<(&OsStr, &OsStr)> {
    let bytes = variable.to_bytes();
    let equals_sign = bytes.iter().position(|byte| *byte == b'=')?;
    Some((OsStr::from_bytes(&bytes[..equals_sign]), OsStr::from_bytes(&bytes[equals_sign + 1..])))
}

/// Returns the C strings as `OsStr`, the type that the functions of `pjw_spawn` take.
pub(crate) fn to_os_strs(list: &[CString]) -> Vec<&OsStr> {
    list.iter().map(|text| OsStr::from_bytes(text.to_bytes())).collect()
}

/// Reads `count` affinity masks (`cpu_set_t`) from the C array `masks`, which contains pointers to the masks. Fails if
/// one of the pointers is NULL, or if `masks` is NULL and `count` is not 0.
///
/// # Safety
/// `masks` must be NULL or an array of `count` pointers. Each pointer must be NULL or point to a mask.
pub(crate) unsafe fn read_masks(
    masks: *const *const cpu_set_t,
    count: c_uint,
) -> Result<Vec<CpuSet>, Failure> {
    if count > 0 && masks.is_null() {
        return Err(Failure::invalid("mask is NULL, and clen is not 0"));
    }
    let read_mask = |index: c_uint| {
        // SAFETY: the caller gives `count` pointers.
        let mask = unsafe { (*masks.add(index as usize)).cast::<[u64; size_of::<cpu_set_t>() / 8]>() };
        // SAFETY: the pointer is NULL or points to a set. The set may be aligned to less than a word.
        let words = (!mask.is_null()).then(|| unsafe { mask.read_unaligned() });
        let words = words.ok_or_else(|| Failure::invalid(format!("mask {index} is NULL")))?;
        Ok(CpuSet::from_words(&words))
    };
    (0..count).map(read_mask).collect()
}
