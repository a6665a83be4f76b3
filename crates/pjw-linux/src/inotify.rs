//! Reads events of inotify(7) without blocking, and not without end.

use nix::sys::inotify::{Inotify, InotifyEvent};

/// The largest number of reads in one call. A read returns some hundreds of events. The kernel keeps at most 16,384
/// events (`max_queued_events`, inotify(7)).
const MAX_READS: usize = 64;

/// Returns the events of `inotify` that the kernel has queued. Does not wait for events. `inotify` must be non-blocking
/// (`IN_NONBLOCK`).
///
/// The iterator ends after at most 64 calls of read(2), even if programs cause events faster than the caller reads. The
/// remaining events stay queued for the next call of this function, and poll(2) still shows `inotify` as readable. The
/// iterator also ends at an error of read(2).
pub fn read_events(inotify: &Inotify) -> impl Iterator<Item = InotifyEvent> {
    (0..MAX_READS).map_while(|_| inotify.read_events().ok()).flatten()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use nix::sys::inotify::{AddWatchFlags, InitFlags};

    use super::*;

    #[test]
    fn events_are_read_once_and_a_program_that_makes_more_meanwhile_does_not_keep_the_reader() {
        let dir = tempfile::tempdir().unwrap();
        let inotify = Inotify::init(InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK).unwrap();
        inotify.add_watch(dir.path(), AddWatchFlags::IN_CREATE | AddWatchFlags::IN_DELETE).unwrap();
        assert_eq!(read_events(&inotify).count(), 0);
        let make_two_events = || {
            fs::write(dir.path().join("file"), "").unwrap();
            fs::remove_file(dir.path().join("file")).unwrap();
        };
        make_two_events();
        assert_eq!(read_events(&inotify).count(), 2);
        assert_eq!(read_events(&inotify).count(), 0);
        make_two_events();
        let read = read_events(&inotify).inspect(|_| make_two_events()).count();
        assert!(read > 2, "{read}");
        assert!(read_events(&inotify).next().is_some(), "the rest is left to the next call");
    }
}
