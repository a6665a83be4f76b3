//! What is published of a state that a test makes up.

use super::*;

#[test]
fn a_text_is_cut_to_a_readable_length_between_characters() {
    let told = |text: &str| event_on_the_wire(&Event::new(EventKind::Refused, text)).text;
    assert_eq!(told(&"x".repeat(LONGEST_TEXT)), "x".repeat(LONGEST_TEXT));
    let long = told(&"ä".repeat(50_000));
    assert!(long.len() <= LONGEST_TEXT && long.ends_with("ä…"), "{} bytes", long.len());
}
