//! The groups whose members are administrators: who is in one of them, and which of them do not exist.

use std::time::Duration;

use nix::unistd::{Gid, Group, Uid, User, getgrouplist};
use pjw_core::plan::Warning;
use pjw_ipc::server::Peer;
use tokio::sync::watch;
use tokio::task::spawn_blocking;
use tokio::time::timeout;

use super::inbox::{EventLoopMessage, MessageSender, WarningOrigin};
use super::settings::ControlSettings;

/// The time after which groups that do not exist are looked up again.
const RETRY_INTERVAL: Duration = Duration::from_secs(60);

/// Sends the event loop a warning through `outbox` for each group of `admin_groups` that does not exist. Returns when
/// the event loop has ended. The groups are looked up:
///
/// - at the start of the daemon,
/// - after each reload of the configuration, which changes `settings`,
/// - each minute while there is a warning.
///
/// A message is sent only if the warnings have changed.
pub(super) async fn watch_admin_groups(
    mut settings: watch::Receiver<ControlSettings>,
    outbox: MessageSender,
) {
    let mut reported = Vec::new();
    loop {
        let groups = settings.borrow_and_update().rules.admin_groups.clone();
        // The name service may contact a remote server. The lookup must not block the thread that serves all clients.
        let looked_up = spawn_blocking(move || unknown_group_warnings(&groups)).await;
        let warnings = looked_up.unwrap_or_default();
        if warnings != reported {
            reported.clone_from(&warnings);
            let _ = outbox.send(EventLoopMessage::Warnings { origin: WarningOrigin::AdminGroups, warnings });
        }
        // A group can be made at any time, and a name service can be late.
        let changed = if reported.is_empty() {
            settings.changed().await
        } else {
            timeout(RETRY_INTERVAL, settings.changed()).await.unwrap_or(Ok(()))
        };
        if changed.is_err() {
            return;
        }
    }
}

/// Returns a warning for each name in `groups` that is no group. There is no warning for a number. There is also none
/// if the name service fails, because the service may only be late.
fn unknown_group_warnings(groups: &[String]) -> Vec<Warning> {
    let is_unknown = |group: &&String| {
        group.parse::<u32>().is_err() && matches!(Group::from_name(group.as_str()), Ok(None))
    };
    let warning = |group: &String| {
        let text =
            format!("there is no group {group:?}, which admin_groups names: it gives nobody the rights");
        Warning::new("unknown-group", text, "correct admin_groups, or create the group; pjwctl reload")
    };
    groups.iter().filter(is_unknown).map(warning).collect()
}

/// Returns whether the user of the client `peer` is a member of one of `groups`, which are names or numbers. Blocks
/// while the name service looks them up.
pub(super) fn in_any_group(peer: Peer, groups: &[String]) -> bool {
    let Ok(Some(user)) = User::from_uid(Uid::from_raw(peer.uid)) else { return false };
    let Ok(name) = std::ffi::CString::new(user.name) else { return false };
    let groups_of_user = getgrouplist(&name, user.gid).unwrap_or_default();
    groups.iter().filter_map(|group| group_id(group)).any(|gid| groups_of_user.contains(&gid))
}

/// Returns the id of the group named `group`. If there is no such group and `group` is a number, returns this number
/// (chown(1)).
fn group_id(group: &str) -> Option<Gid> {
    match Group::from_name(group) {
        Ok(Some(group)) => Some(group.gid),
        _ => group.parse().ok().map(Gid::from_raw),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_that_does_not_exist_is_reported_and_a_number_is_a_group() {
        let groups = ["root", "4294967", "pjw-no-such-group"].map(str::to_owned);
        let warnings = unknown_group_warnings(&groups);
        let [warning] = warnings.as_slice() else { panic!("{warnings:?}") };
        assert_eq!(warning.code, "unknown-group");
        assert!(warning.text.contains("\"pjw-no-such-group\""), "{}", warning.text);
    }

    #[test]
    fn a_group_of_the_administrators_is_known_by_its_name_or_its_number() {
        assert_eq!(group_id("root"), Some(Gid::from_raw(0)));
        assert_eq!(group_id("4294967294"), Some(Gid::from_raw(4_294_967_294)));
        assert_eq!(group_id("no-such-group"), None);
        let root = Peer { uid: 0, gid: 0, pid: None };
        assert!(in_any_group(root, &["no-such-group".to_owned(), "0".to_owned()]));
        assert!(!in_any_group(root, &["4294967294".to_owned()]));
    }
}
