//! What a launcher and its instances have to do with each other: the signals of the C library, users, directories.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)] // a test may fail

use std::sync::{Arc, mpsc};
use std::time::Duration;

use pjw_spawn::{Arguments, ExitStatus, Instance, Placement, SpawnContext, Stdio};

fn instances(count: u32, arguments: &[&str]) -> Vec<Instance> {
    let arguments = Arc::new(Arguments::parse(arguments).unwrap());
    let placement = Arc::new(Placement::default());
    let instance = |rank| Instance {
        rank,
        size: count,
        arguments: Arc::clone(&arguments),
        variables: Vec::new(),
        placement: Arc::clone(&placement),
        stdio: Stdio::default(),
    };
    (0..count).map(instance).collect()
}

#[test]
fn a_launcher_whose_spawner_threads_wait_can_set_its_group() {
    let context = SpawnContext::new("sleep").unwrap().kill_when_launcher_ends();
    let children = context.spawn_n(instances(2, &["sleep", "1000"])).unwrap();
    let (done, end) = mpsc::channel();
    std::thread::spawn(move || {
        // SAFETY: sets the group that the process has already. The C library does so in each thread.
        let set = unsafe { libc::setgid(libc::getgid()) };
        let _ = done.send(set);
    });
    assert_eq!(end.recv_timeout(Duration::from_secs(60)), Ok(0), "setgid(3) waits for a spawner thread");
    drop(context);
    for child in children {
        assert_eq!(child.unwrap().wait(), Ok(ExitStatus::Signal(libc::SIGKILL)));
    }
}
