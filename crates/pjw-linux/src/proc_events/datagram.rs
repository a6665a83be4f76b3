//! Reads what the kernel writes into one datagram of the connector, and sees whether one before it is missing.
//!
//! The kernel numbers its messages, by the PU on which the event happened (`cn_proc.c`, `send_msg`). An overrun of the
//! socket's buffer is an error of the next read; a message for which the kernel had no memory leaves a gap and nothing
//! else.

use pjw_core::process::{Pid, Tid};
use pjw_core::snapshot::Nanos;

use super::ProcEvent;

pub(super) const CN_IDX_PROC: u32 = 1;
pub(super) const CN_VAL_PROC: u32 = 1;
pub(super) const NETLINK_HEADER: usize = 16;
pub(super) const CONNECTOR_HEADER: usize = 20;
/// `what`, `cpu`, `timestamp_ns`.
const EVENT_HEADER: usize = 16;
const FORK: u32 = 0x1;
const EXEC: u32 = 0x2;
const SID: u32 = 0x80;
const EXIT: u32 = 0x8000_0000;
/// The largest `NR_CPUS` there is.
const MOST_PUS: usize = 8192;

/// Which number the next message of each PU will have; `None` if none was heard of it yet.
#[derive(Debug, Default)]
pub(super) struct Numbers(Vec<Option<u32>>);

impl Numbers {
    /// Takes in a message's number. The answer to a subscription, anybody's, has one of its PU's too, or names no PU.
    fn skip_at(&mut self, connector: &[u8], body: &[u8]) -> Option<bool> {
        let (pu, number) = (word(body, 4)?, word(connector, 8)?);
        Some(self.skip(pu, number))
    }

    /// Takes in the number of a PU's message, and tells whether some between it and the one before are missing.
    fn skip(&mut self, pu: u32, number: u32) -> bool {
        let place = usize::try_from(pu).unwrap_or(usize::MAX);
        if place >= MOST_PUS {
            return false;
        }
        if self.0.len() <= place {
            self.0.resize(place + 1, None);
        }
        let expected = self.0[place].replace(number.wrapping_add(1));
        expected.is_some_and(|expected| expected != number)
    }
}

/// Reads the events of one datagram, and tells whether messages before them are missing; whatever is cut short or unknown
/// is passed over.
pub(super) fn read(mut datagram: &[u8], numbers: &mut Numbers, events: &mut Vec<ProcEvent>) -> bool {
    let mut is_gap = false;
    while let Some(length) = word(datagram, 0).map(|length| length as usize) {
        if length < NETLINK_HEADER || length > datagram.len() {
            break;
        }
        let connector = &datagram[NETLINK_HEADER..length];
        let from_proc = word(connector, 0) == Some(CN_IDX_PROC) && word(connector, 4) == Some(CN_VAL_PROC);
        if let Some(body) = connector.get(CONNECTOR_HEADER..).filter(|_| from_proc) {
            is_gap |= numbers.skip_at(connector, body).unwrap_or(false);
            events.extend(event(body));
        }
        let aligned = length.next_multiple_of(4).min(datagram.len());
        datagram = &datagram[aligned..];
    }
    is_gap
}

fn event(body: &[u8]) -> Option<ProcEvent> {
    let number = |index: usize| word(body, EVENT_HEADER + 4 * index);
    match word(body, 0)? {
        FORK => {
            let (parent, tid, child) = (Pid(number(1)?), Tid(number(2)?), Pid(number(3)?));
            Some(if tid.0 == child.0 {
                ProcEvent::Fork { parent, child, at: long(body, 8)? }
            } else {
                ProcEvent::ThreadBorn { pid: child, tid }
            })
        }
        EXEC => Some(ProcEvent::Exec { pid: Pid(number(1)?) }),
        SID => Some(ProcEvent::Session { pid: Pid(number(1)?) }),
        EXIT => {
            let (tid, pid) = (Tid(number(0)?), Pid(number(1)?));
            Some(if tid.0 == pid.0 { ProcEvent::Exit { pid } } else { ProcEvent::ThreadExit { pid, tid } })
        }
        _ => None,
    }
}

fn long(bytes: &[u8], at: usize) -> Option<Nanos> {
    bytes.get(at..at + 8)?.try_into().ok().map(u64::from_ne_bytes).map(Nanos)
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
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

    fn heard(bytes: &[u8]) -> Vec<ProcEvent> {
        let mut events = Vec::new();
        read(bytes, &mut Numbers::default(), &mut events);
        events
    }

    #[test]
    fn each_kind_of_event_is_told_apart() {
        let (pid, tid) = (Pid(20), Tid(21));
        assert_eq!(
            heard(&datagram(FORK, &[10, 10, 20, 20])),
            [ProcEvent::Fork { parent: Pid(10), child: pid, at: Nanos(7) }]
        );
        assert_eq!(heard(&datagram(FORK, &[10, 10, 21, 20])), [ProcEvent::ThreadBorn { pid, tid }]);
        assert_eq!(heard(&datagram(EXEC, &[20, 20])), [ProcEvent::Exec { pid }]);
        assert_eq!(heard(&datagram(EXIT, &[20, 20, 0, 0])), [ProcEvent::Exit { pid }]);
        assert_eq!(heard(&datagram(EXIT, &[21, 20, 0, 0])), [ProcEvent::ThreadExit { pid, tid }]);
        assert_eq!(heard(&datagram(0x4, &[20, 20])), [], "uid changes are nobody's business");
    }

    #[test]
    fn what_is_cut_short_or_hostile_is_passed_over() {
        let whole = datagram(FORK, &[10, 10, 20, 20]);
        for end in 0..whole.len() {
            assert_eq!(heard(&whole[..end]), [], "{end}");
        }
        assert_eq!(heard(&[0xff; 200]), []);
        assert_eq!(heard(&[0; 200]), []);
    }

    /// What answers a subscription.
    const NONE: u32 = 0;

    #[test]
    fn a_gap_in_the_numbers_of_one_pu_is_a_loss() {
        let mut numbers = Numbers::default();
        let mut skips =
            |pu, number, what| read(&message(pu, number, what, &[20, 20]), &mut numbers, &mut Vec::new());
        assert!(!skips(0, 7, EXEC), "what was before the first is unknown");
        assert!(!skips(1, u32::MAX, EXEC), "each PU has its own");
        assert!(!skips(0, 8, 0x4), "what is nobody's business is numbered too");
        assert!(!skips(1, 0, EXEC), "they begin anew after the last");
        assert!(skips(0, 10, EXEC));
        assert!(!skips(0, 11, EXEC), "one loss is told once");
        assert!(!skips(u32::MAX, 40, NONE), "an answer that names no PU has the subscriber's number");
        assert!(!skips(1, 1, NONE) && !skips(1, 2, EXEC), "one that names a PU has a number of that PU");
    }
}
