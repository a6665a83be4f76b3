//! The choice of the socket of the daemon.

use std::os::unix::net::UnixListener;

use super::*;
use crate::tests::close;

#[test]
fn a_socket_that_a_killed_daemon_left_behind_does_not_hide_the_systems() {
    let dir = tempfile::tempdir().unwrap();
    let (own, system) = (dir.path().join("own"), dir.path().join("system"));
    let choice = || choose_socket(own.clone(), system.clone());
    assert_eq!(choice(), own, "where a user would start one");
    let killed = UnixListener::bind(&own).unwrap();
    let _system = UnixListener::bind(&system).unwrap();
    assert_eq!(choice(), own);
    close(killed, &own);
    assert!(own.exists());
    assert_eq!(choice(), system);
    std::fs::remove_file(&system).unwrap();
    assert_eq!(choice(), own, "with no other, the error names this one");
}
