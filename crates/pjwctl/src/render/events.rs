//! `events`: `TIME EVENT JOB text`, one line for each. `-` if the event concerns no job.

use pjw_ipc::wire::Event;

use super::{Terminal, style, text::escape_control_characters};

/// Returns one line of text for an event of the daemon: its time, kind, job and description. The line is not wrapped,
/// however long it is.
#[must_use]
pub fn event_line(event: &Event, term: Terminal) -> String {
    let style = match event.event.as_str() {
        "violation" | "overrun" => style::FAILURE,
        "recovered" | "stray" | "refused" | "revoked" | "hotplug" | "repaired" => style::WARNING,
        _ => anstyle::Style::new(),
    };
    let kind = style::apply_style(&format!("{:10}", escape_control_characters(&event.event)), style, term);
    let job = if event.job.is_empty() { "-" } else { &event.job };
    format!(
        "{} {kind} {} {}\n",
        escape_control_characters(&event.time),
        escape_control_characters(job),
        escape_control_characters(&event.text)
    )
}

#[cfg(test)]
mod tests {
    use super::super::samples;
    use super::*;

    fn event(kind: &str, job: &str, text: &str) -> Event {
        let time = "2026-05-04T12:00:00Z".into();
        Event { time, event: kind.into(), job: job.into(), text: text.into(), ..Event::default() }
    }

    #[test]
    fn an_event_is_a_line() {
        let line = event_line(&event("assigned", "manual:a", "2 cores: 2-3"), samples::PLAIN_TERMINAL);
        assert_eq!(line, "2026-05-04T12:00:00Z assigned   manual:a 2 cores: 2-3\n");
        let line = event_line(&event("started", "", "pjwd 0.1.0"), samples::PLAIN_TERMINAL);
        assert_eq!(line, "2026-05-04T12:00:00Z started    - pjwd 0.1.0\n");
    }

    #[test]
    fn an_event_stays_a_line_whatever_a_process_is_called() {
        let line = event_line(&event("stray", "", "evil\n\x1b[31mname"), samples::PLAIN_TERMINAL);
        assert_eq!(line, "2026-05-04T12:00:00Z stray      - evil\\n\\u{1b}[31mname\n");
    }

    #[test]
    fn trouble_is_coloured() {
        let line = event_line(&event("violation", "manual:a", "x"), samples::COLOURED_TERMINAL);
        assert!(line.contains("\x1b[1m\x1b[31mviolation \x1b[0m"), "{line:?}");
    }
}
