//! Parser of the connector's datagrams, with detection of lost messages.
//!
//! The kernel numbers its messages separately for each PU on which an event happens (`cn_proc.c`,
//! `send_msg`). A buffer overrun is an error of the next read. A message for which the kernel had no memory
//! leaves only a gap in the numbers.

use pjw_core::ids::{Pid, Tid};
use pjw_core::{snapshot::ProcessEvent, time::Nanos};

/// The first number (`idx`) of the id in each message of the proc connector (linux/connector.h). The proc connector
/// is the part of the kernel that reports process events.
pub(super) const CN_IDX_PROC: u32 = 1;
/// The second number (`val`) of the id in each message of the proc connector (linux/connector.h). The proc connector
/// is the part of the kernel that reports process events.
pub(super) const CN_VAL_PROC: u32 = 1;
/// The size of the header of a netlink message (`struct nlmsghdr`, netlink(7)), in bytes.
pub(super) const NETLINK_HEADER: usize = 16;
/// The size of the header of a connector message (`struct cn_msg`, linux/connector.h), in bytes. This header follows
/// the header of the netlink message.
pub(super) const CONNECTOR_HEADER: usize = 20;
/// Bytes of the fields `what`, `cpu` and `timestamp_ns`.
const EVENT_HEADER: usize = 16;
/// Values of the field `what` (linux/cn_proc.h).
const FORK: u32 = 0x1;
const EXEC: u32 = 0x2;
const SID: u32 = 0x80;
const EXIT: u32 = 0x8000_0000;
/// The largest `NR_CPUS`.
const MAX_PUS: usize = 8192;

/// The sequence number that is expected in the next message of each PU (logical CPU). The kernel counts the process
/// events of each PU separately. A gap in the numbers of a PU shows that messages were lost. `None` before the first
/// message of the PU.
#[derive(Debug, Default)]
pub(super) struct SequenceNumbers(Vec<Option<u32>>);

impl SequenceNumbers {
    /// Records the sequence number of a message. Returns whether messages before it are missing. `None` if the
    /// message is too short. The reply to a subscription also has a number of its PU, or names no PU.
    fn check_message(&mut self, connector: &[u8], body: &[u8]) -> Option<bool> {
        let (pu, number) = (u32_at(body, 4)?, u32_at(connector, 8)?);
        Some(self.record_number(pu, number))
    }

    /// Records the sequence number `number` of a message of the PU `pu`. Returns whether earlier messages of this PU
    /// were lost: `number` does not follow the one before. False for the first message of a PU, and for an invalid
    /// PU.
    fn record_number(&mut self, pu: u32, number: u32) -> bool {
        let index = usize::try_from(pu).unwrap_or(usize::MAX);
        if index >= MAX_PUS {
            return false;
        }
        if self.0.len() <= index {
            self.0.resize(index + 1, None);
        }
        let expected = self.0[index].replace(number.wrapping_add(1));
        expected.is_some_and(|expected| expected != number)
    }
}

/// Parses `bytes`, a datagram of the proc connector (the kernel's process events), and appends the events to
/// `events`. Returns whether earlier messages were lost: whether the sequence numbers, which `numbers` records, have
/// a gap. Truncated and unknown messages are skipped.
pub(super) fn parse_datagram(
    mut bytes: &[u8],
    numbers: &mut SequenceNumbers,
    events: &mut Vec<ProcessEvent>,
) -> bool {
    let mut is_gap = false;
    while let Some(length) = u32_at(bytes, 0).map(|length| length as usize) {
        if length < NETLINK_HEADER || length > bytes.len() {
            break;
        }
        let connector = &bytes[NETLINK_HEADER..length];
        let from_proc =
            u32_at(connector, 0) == Some(CN_IDX_PROC) && u32_at(connector, 4) == Some(CN_VAL_PROC);
        if let Some(body) = connector.get(CONNECTOR_HEADER..).filter(|_| from_proc) {
            is_gap |= numbers.check_message(connector, body).unwrap_or(false);
            events.extend(parse_event(body));
        }
        let aligned = length.next_multiple_of(4).min(bytes.len());
        bytes = &bytes[aligned..];
    }
    is_gap
}

/// Parses the body of a message of the proc connector (`struct proc_event` in linux/cn_proc.h). `None` for events that
/// pjw does not use, and for a body that is too short.
fn parse_event(body: &[u8]) -> Option<ProcessEvent> {
    let number = |index: usize| u32_at(body, EVENT_HEADER + 4 * index);
    match u32_at(body, 0)? {
        FORK => {
            let (parent, tid, child) = (Pid(number(1)?), Tid(number(2)?), Pid(number(3)?));
            Some(if tid.0 == child.0 {
                ProcessEvent::Fork { parent, creator: Tid(number(0)?), child, at: nanos_at(body, 8)? }
            } else {
                ProcessEvent::ThreadFork { pid: child, tid }
            })
        }
        EXEC => Some(ProcessEvent::Exec { pid: Pid(number(1)?) }),
        SID => Some(ProcessEvent::Session { pid: Pid(number(1)?) }),
        EXIT => {
            let (tid, pid) = (Tid(number(0)?), Pid(number(1)?));
            Some(if tid.0 == pid.0 {
                ProcessEvent::Exit { pid }
            } else {
                ProcessEvent::ThreadExit { pid, tid }
            })
        }
        _ => None,
    }
}

fn nanos_at(bytes: &[u8], at: usize) -> Option<Nanos> {
    bytes.get(at..at + 8)?.try_into().ok().map(u64::from_ne_bytes).map(Nanos)
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..at + 4)?.try_into().ok().map(u32::from_ne_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn datagram(what: u32, numbers: &[u32]) -> Vec<u8> {
        message(0, 0, what, numbers)
    }

    fn message(pu: u32, number: u32, what: u32, numbers: &[u32]) -> Vec<u8> {
        let mut body = what.to_ne_bytes().to_vec();
        body.extend(pu.to_ne_bytes());
        body.extend(7_u64.to_ne_bytes());
        numbers.iter().for_each(|number| body.extend(number.to_ne_bytes()));
        let mut bytes = Vec::new();
        bytes.extend(u32::try_from(NETLINK_HEADER + CONNECTOR_HEADER + body.len()).unwrap().to_ne_bytes());
        bytes.extend([0; 12]);
        bytes.extend(CN_IDX_PROC.to_ne_bytes());
        bytes.extend(CN_VAL_PROC.to_ne_bytes());
        bytes.extend(number.to_ne_bytes());
        bytes.extend([0; 8]);
        bytes.extend(body);
        bytes
    }

    fn parsed(bytes: &[u8]) -> Vec<ProcessEvent> {
        let mut events = Vec::new();
        parse_datagram(bytes, &mut SequenceNumbers::default(), &mut events);
        events
    }

    #[test]
    fn each_kind_of_event_is_parsed() {
        let (pid, tid) = (Pid(20), Tid(21));
        assert_eq!(
            parsed(&datagram(FORK, &[11, 10, 20, 20])),
            [ProcessEvent::Fork { parent: Pid(10), creator: Tid(11), child: pid, at: Nanos(7) }]
        );
        assert_eq!(parsed(&datagram(FORK, &[10, 10, 21, 20])), [ProcessEvent::ThreadFork { pid, tid }]);
        assert_eq!(parsed(&datagram(EXEC, &[20, 20])), [ProcessEvent::Exec { pid }]);
        assert_eq!(parsed(&datagram(EXIT, &[20, 20, 0, 0])), [ProcessEvent::Exit { pid }]);
        assert_eq!(parsed(&datagram(EXIT, &[21, 20, 0, 0])), [ProcessEvent::ThreadExit { pid, tid }]);
        assert_eq!(parsed(&datagram(0x4, &[20, 20])), [], "uid changes are ignored");
    }

    #[test]
    fn truncated_and_hostile_messages_are_skipped() {
        let whole = datagram(FORK, &[10, 10, 20, 20]);
        for end in 0..whole.len() {
            assert_eq!(parsed(&whole[..end]), [], "{end}");
        }
        assert_eq!(parsed(&[0xff; 200]), []);
        assert_eq!(parsed(&[0; 200]), []);
    }

    /// The event code of the reply to a subscription.
    const NONE: u32 = 0;

    #[test]
    fn a_gap_in_the_numbers_of_a_pu_is_a_loss() {
        let mut numbers = SequenceNumbers::default();
        let mut skips = |pu, number, what| {
            parse_datagram(&message(pu, number, what, &[20, 20]), &mut numbers, &mut Vec::new())
        };
        assert!(!skips(0, 7, EXEC), "the number before the first message is unknown");
        assert!(!skips(1, u32::MAX, EXEC), "each PU has its own numbers");
        assert!(!skips(0, 8, 0x4), "ignored messages are numbered too");
        assert!(!skips(1, 0, EXEC), "the numbers wrap around");
        assert!(skips(0, 10, EXEC));
        assert!(!skips(0, 11, EXEC), "one loss is reported once");
        assert!(!skips(u32::MAX, 40, NONE), "a reply that names no PU has the subscriber's number");
        assert!(!skips(1, 1, NONE) && !skips(1, 2, EXEC), "a reply that names a PU has a number of that PU");
    }
}
