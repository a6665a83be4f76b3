//! The extended attributes of the directories of cgroups.

use rustix::fs::{XattrFlags, getxattr, removexattr, setxattr};
use rustix::io::Errno;

use super::hierarchy::CgroupDir;

/// Since Linux 5.7 cgroups have `user.` attributes. Before, they have only `trusted.` attributes, which need
/// `CAP_SYS_ADMIN`.
const NAMESPACES: [&str; 2] = ["user", "trusted"];
/// The maximum size of the value of an extended attribute, in bytes (`XATTR_SIZE_MAX` in the kernel).
const MAX_ATTRIBUTE_BYTES: usize = 1 << 16;
/// The size of the buffer with which an attribute is read at first, in bytes. For each read, the kernel allocates and
/// clears as many bytes (`do_getxattr`, fs/xattr.c, Linux 6.18). Paths of cgroups are usually shorter.
const USUAL_ATTRIBUTE_BYTES: usize = 512;

/// The methods take the name of an attribute without its namespace. They use the attribute `user.NAME`, or
/// `trusted.NAME` if the kernel refuses that.
impl CgroupDir {
    /// Reads the extended attribute `name`. `None` if it can't be read, or if the value is not UTF-8.
    pub(crate) fn read_attribute(&self, name: &str) -> Option<String> {
        let mut buffer = vec![0u8; USUAL_ATTRIBUTE_BYTES];
        let length = NAMESPACES.iter().find_map(|namespace| {
            let name = format!("{namespace}.{name}");
            match getxattr(&self.dir, name.as_str(), &mut buffer[..]) {
                Err(Errno::RANGE) => {
                    buffer.resize(MAX_ATTRIBUTE_BYTES, 0);
                    getxattr(&self.dir, name.as_str(), &mut buffer[..]).ok()
                }
                read => read.ok(),
            }
        })?;
        buffer.truncate(length);
        String::from_utf8(buffer).ok()
    }

    /// Whether the cgroup has the extended attribute `name`. Allocates no buffer for the value, because most cgroups
    /// have no such attribute.
    pub(crate) fn has_attribute(&self, name: &str) -> bool {
        // An empty buffer asks for the length.
        NAMESPACES
            .iter()
            .any(|namespace| getxattr(&self.dir, format!("{namespace}.{name}"), &mut [0u8; 0][..]).is_ok())
    }

    /// Writes `value` to the extended attribute `name`. Returns whether the attribute was written. An error is also
    /// logged.
    pub(crate) fn write_attribute(&self, name: &str, value: &str) -> bool {
        let is_written = NAMESPACES.iter().any(|namespace| {
            setxattr(&self.dir, format!("{namespace}.{name}"), value.as_bytes(), XattrFlags::empty()).is_ok()
        });
        if !is_written {
            tracing::debug!(cgroup = self.path, name, "the attribute could not be written");
        }
        is_written
    }

    /// Removes the extended attribute `name`, if the cgroup has it. An error is ignored.
    pub(crate) fn remove_attribute(&self, name: &str) {
        for namespace in NAMESPACES {
            let _ = removexattr(&self.dir, format!("{namespace}.{name}"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_attribute_is_read_whole_if_it_is_longer_than_the_first_buffer() {
        let dir = tempfile::tempdir().unwrap();
        let group = CgroupDir::from_path(dir.path(), "/", true).unwrap();
        for length in [1, USUAL_ATTRIBUTE_BYTES, USUAL_ATTRIBUTE_BYTES + 1] {
            let value = "p".repeat(length);
            group.write_attribute("pjw.test", &value);
            let read = group.read_attribute("pjw.test");
            if length == 1 && read.is_none() {
                return eprintln!("skipped: {} can't have attributes", dir.path().display());
            }
            assert_eq!(read, Some(value));
        }
        assert_eq!(group.read_attribute("pjw.other"), None);
    }
}
