//! The files of a job after one of them could not be written.

use super::*;

#[test]
fn what_was_written_into_want_while_no_daemon_ran_counts_also_if_the_core_map_is_written_later() {
    let mut published = Published::new();
    published.publish("a", "0-1");
    published.write("a", "1");
    published.restart();
    // A file can't replace a directory.
    let json = published.path("a").join("coremap.json");
    fs::remove_file(&json).unwrap();
    fs::create_dir(&json).unwrap();
    published.files.publish(&id("a"), Some(content("0")));
    assert_eq!(published.files.warnings().count(), 1);
    fs::remove_dir(&json).unwrap();
    published.publish("a", "0");
    assert!(published.files.next_read_at().is_some(), "it is read although the kernel reports no change");
    assert_eq!(published.written(), [Some(1)]);
}
