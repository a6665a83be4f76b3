//! Commands that wait because their user sends commands too often.

use std::sync::atomic::{AtomicUsize, Ordering};

use pjw_ipc::call::{Call, Reply};
use pjw_ipc::wire::Job;

use super::daemon::{CallReplies, Daemon};
use super::{answer, pjwctl};

#[test]
fn assign_want_and_release_wait_while_their_user_sends_commands_too_often() {
    for arguments in
        [&["assign", "a", "--cores", "1"][..], &["want", "a", "1"], &["release", "a"], &["release", "--all"]]
    {
        let commands = AtomicUsize::new(0);
        let daemon = Daemon::start(move |call| {
            if commands.fetch_add(1, Ordering::Relaxed) == 0 {
                return CallReplies::busy("you send commands too often: wait a little and try again");
            }
            let (id, cpus, enforcement) = ("manual:a".to_owned(), "0".to_owned(), "cpuset".to_owned());
            CallReplies::reply(match call {
                Call::Assign(_) | Call::Want(_) => {
                    Reply::Job { job: Job { id, cpus, enforcement, wants: Some(1), ..Job::default() } }
                }
                Call::Release(_) | Call::ReleaseAll => Reply::Released { released: vec![id] },
                other => panic!("{other:?}"),
            })
        });
        let answer = answer(&mut pjwctl(&daemon.socket(), arguments));
        assert!(answer.code == Some(0) && answer.stdout.contains("manual:a"), "{arguments:?}: {answer:?}");
        let calls = daemon.calls();
        assert!(matches!(&calls[..], [refused, repeated] if refused == repeated), "{calls:?}");
    }
}
