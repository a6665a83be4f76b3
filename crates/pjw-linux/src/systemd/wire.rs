//! Encoder and parser of the D-Bus messages that calls to systemd need.
//!
//! D-Bus specification, "Message Protocol" and "Marshaling". Written by hand: the Rust library panics at the
//! sender name that systemd uses on its private socket, and the library is much larger than this file.

use super::request::{Property, PropertyValue, Reply, SystemdError};

/// Types of messages.
const CALL: u8 = 1;
const REPLY: u8 = 2;
const ERROR: u8 = 3;
/// Codes of header fields.
const PATH: u8 = 1;
const INTERFACE: u8 = 2;
const MEMBER: u8 = 3;
const ERROR_NAME: u8 = 4;
const REPLY_SERIAL: u8 = 5;
const DESTINATION: u8 = 6;
const SIGNATURE: u8 = 8;

/// The size of the first part of each D-Bus message, in bytes. This part has a fixed size, and contains the size of
/// the rest of the message.
pub(super) const PREFIX_BYTES: usize = 16;
/// Maximum length of a reply, in bytes. The specification allows 128 MiB.
const MAX_MESSAGE_BYTES: usize = 1 << 20;

/// The destination of a D-Bus method call: the bus name, the object path, the interface and the method.
pub(super) struct CallDestination<'a> {
    /// Name of the peer on the bus. `None` without a bus.
    pub(super) to: Option<&'a str>,
    pub(super) path: &'a str,
    pub(super) interface: &'a str,
    pub(super) method: &'a str,
}

/// The arguments of a D-Bus method call, in the binary format of D-Bus, with their type signature.
#[derive(Debug, Default)]
pub(super) struct CallArguments {
    bytes: Bytes,
    signature: String,
}

/// Little-endian bytes. Each value is aligned to a multiple of its size.
#[derive(Debug, Default)]
struct Bytes(Vec<u8>);

impl Bytes {
    fn align(&mut self, to: usize) {
        self.0.resize(self.0.len().next_multiple_of(to), 0);
    }

    fn number(&mut self, number: u32) {
        self.align(4);
        self.0.extend(number.to_le_bytes());
    }

    fn length(&mut self, length: usize) {
        // No message of this client is nearly that long. A peer rejects a wrong length.
        self.number(u32::try_from(length).unwrap_or(u32::MAX));
    }

    fn text(&mut self, text: &str) {
        self.length(text.len());
        self.0.extend(text.as_bytes());
        self.0.push(0);
    }

    fn signature(&mut self, signature: &str) {
        self.0.push(u8::try_from(signature.len()).unwrap_or(u8::MAX));
        self.0.extend(signature.as_bytes());
        self.0.push(0);
    }

    /// Appends an array. Its length excludes the padding before the first element.
    fn array(&mut self, alignment: usize, elements: impl FnOnce(&mut Self)) {
        self.align(4);
        let length_position = self.0.len();
        self.number(0);
        self.align(alignment);
        let begin = self.0.len();
        elements(self);
        let length = u32::try_from(self.0.len() - begin).unwrap_or(u32::MAX);
        self.0[length_position..length_position + 4].copy_from_slice(&length.to_le_bytes());
    }
}

impl CallArguments {
    /// Appends the string argument `text`.
    pub(super) fn text(mut self, text: &str) -> Self {
        self.signature.push('s');
        self.bytes.text(text);
        self
    }

    /// Appends the boolean argument `true`.
    pub(super) fn boolean_true(mut self) -> Self {
        self.signature.push('b');
        self.bytes.number(1);
        self
    }

    /// Appends `properties`, a list of properties of a systemd unit, as one argument.
    pub(super) fn properties(mut self, properties: &[Property]) -> Self {
        self.signature.push_str("a(sv)");
        self.bytes.array(8, |bytes| properties.iter().for_each(|property| append_property(bytes, property)));
        self
    }

    /// Appends an empty list of auxiliary units: the last argument of systemd's method `StartTransientUnit`.
    pub(super) fn no_auxiliary_units(mut self) -> Self {
        self.signature.push_str("a(sa(sv))");
        self.bytes.array(8, |_| {});
        self
    }
}

/// Appends a property: its name, and its value as a variant.
fn append_property(bytes: &mut Bytes, (name, value): &Property) {
    bytes.align(8);
    bytes.text(name);
    match value {
        PropertyValue::Text(text) => {
            bytes.signature("s");
            bytes.text(text);
        }
        PropertyValue::Texts(strings) => {
            bytes.signature("as");
            bytes.array(4, |bytes| strings.iter().for_each(|text| bytes.text(text)));
        }
        PropertyValue::Number(number) => {
            bytes.signature("t");
            bytes.align(8);
            bytes.0.extend(number.to_le_bytes());
        }
        PropertyValue::Pids(pids) => {
            bytes.signature("au");
            bytes.array(4, |bytes| pids.iter().for_each(|pid| bytes.number(*pid)));
        }
        PropertyValue::Set(set) => {
            bytes.signature("ay");
            bytes.array(1, |bytes| bytes.0.extend(set));
        }
    }
}

/// Returns the name of the systemd unit `unit` as a part of a D-Bus object path. Each byte other than a letter or a
/// digit is replaced by `_` and its hexadecimal code.
pub(super) fn escape_unit(unit: &str) -> String {
    let escape = |byte: u8| {
        let is_plain = byte.is_ascii_alphanumeric();
        if is_plain { char::from(byte).to_string() } else { format!("_{byte:02x}") }
    };
    unit.bytes().map(escape).collect()
}

/// Returns the bytes of a D-Bus method call. `call` is its destination, `body` contains its arguments, and `serial`
/// is its serial number, which the reply repeats.
pub(super) fn encode_call(call: &CallDestination<'_>, body: &CallArguments, serial: u32) -> Vec<u8> {
    let mut bytes = Bytes(vec![b'l', CALL, 0, 1]);
    bytes.length(body.bytes.0.len());
    bytes.number(serial);
    let strings = [
        (PATH, "o", Some(call.path)),
        (INTERFACE, "s", Some(call.interface)),
        (MEMBER, "s", Some(call.method)),
        (DESTINATION, "s", call.to),
    ];
    bytes.array(8, |bytes| {
        for (field, signature, text) in strings {
            let Some(text) = text else { continue };
            bytes.align(8);
            bytes.0.push(field);
            bytes.signature(signature);
            bytes.text(text);
        }
        if !body.signature.is_empty() {
            bytes.align(8);
            bytes.0.push(SIGNATURE);
            bytes.signature("g");
            bytes.signature(&body.signature);
        }
    });
    bytes.align(8);
    bytes.0.extend(&body.bytes.0);
    bytes.0
}

/// Returns the size of the rest of a D-Bus message in bytes, from `prefix`, the first part of the message. `None` if
/// the message is malformed, or if its header or its body is larger than 1 MiB.
pub(super) fn remaining_size(prefix: &[u8; PREFIX_BYTES]) -> Option<usize> {
    let reader = Reader::new(prefix)?;
    let body = usize::try_from(reader.number_at(4)?).ok()?;
    let fields = usize::try_from(reader.number_at(12)?).ok()?;
    if prefix[3] != 1 || body > MAX_MESSAGE_BYTES || fields > MAX_MESSAGE_BYTES {
        return None;
    }
    Some(fields.next_multiple_of(8) + body)
}

/// Parses `message`, a D-Bus message, as the reply to the call with the serial number `serial`. Returns `None` if the
/// message is no reply to this call, for example a signal. A reply that is an error of systemd becomes a
/// [`SystemdError`]. If the reply is a list of strings, returns this list. Otherwise the list is empty.
pub(super) fn parse_reply(message: &[u8], serial: u32) -> Option<Reply> {
    let mut reader = Reader::new(message)?;
    let kind = *message.get(1)?;
    let end = PREFIX_BYTES + usize::try_from(reader.number_at(12)?).ok()?;
    reader.at = PREFIX_BYTES;
    let (mut error_name, mut replies_to, mut body_signature) = (String::new(), None, String::new());
    while reader.at < end {
        reader.align(8);
        let field = reader.byte()?;
        let signature = reader.signature()?;
        match (field, signature.as_str()) {
            (ERROR_NAME, "s") => error_name = reader.text()?,
            (REPLY_SERIAL, "u") => replies_to = Some(reader.number()?),
            (SIGNATURE, "g") => body_signature = reader.signature()?,
            (_, "s" | "o") => drop(reader.text()?),
            (_, "u") => drop(reader.number()?),
            (_, "g") => drop(reader.signature()?),
            _ => return None,
        }
    }
    if replies_to != Some(serial) {
        return None;
    }
    reader.align(8);
    match kind {
        REPLY => Some(Ok((body_signature == "v").then(|| reader.strings()).flatten().unwrap_or_default())),
        ERROR => {
            let text = body_signature.starts_with('s').then(|| reader.text()).flatten().unwrap_or_default();
            Some(Err(systemd_error(&error_name, text)))
        }
        _ => None,
    }
}

/// Converts the D-Bus error with the name `name` and the message `text` to a [`SystemdError`].
fn systemd_error(name: &str, text: String) -> SystemdError {
    match name {
        "org.freedesktop.systemd1.NoSuchUnit" => SystemdError::NoSuchUnit,
        "org.freedesktop.systemd1.UnitExists" => SystemdError::UnitExists,
        "org.freedesktop.DBus.Error.ServiceUnknown"
        | "org.freedesktop.DBus.Error.NameHasNoOwner"
        | "org.freedesktop.DBus.Error.Disconnected" => SystemdError::Unreachable(text),
        "org.freedesktop.DBus.Error.NoReply"
        | "org.freedesktop.DBus.Error.Timeout"
        | "org.freedesktop.DBus.Error.TimedOut" => SystemdError::NoReply,
        other => SystemdError::Refused { name: other.to_owned(), text },
    }
}

/// Parser of a received message, in the byte order of the sender. Its functions return `None` for malformed data.
struct Reader<'a> {
    bytes: &'a [u8],
    is_little: bool,
    at: usize,
}

impl<'a> Reader<'a> {
    fn new(bytes: &'a [u8]) -> Option<Self> {
        let is_little = match bytes.first()? {
            b'l' => true,
            b'B' => false,
            _ => return None,
        };
        Some(Self { bytes, is_little, at: 0 })
    }

    fn align(&mut self, to: usize) {
        self.at = self.at.next_multiple_of(to);
    }

    fn take(&mut self, length: usize) -> Option<&'a [u8]> {
        let taken = self.bytes.get(self.at..self.at.checked_add(length)?)?;
        self.at += length;
        Some(taken)
    }

    fn byte(&mut self) -> Option<u8> {
        self.take(1)?.first().copied()
    }

    fn number(&mut self) -> Option<u32> {
        self.align(4);
        let bytes: [u8; 4] = self.take(4)?.try_into().ok()?;
        Some(if self.is_little { u32::from_le_bytes(bytes) } else { u32::from_be_bytes(bytes) })
    }

    fn number_at(&self, at: usize) -> Option<u32> {
        Self { at, ..*self }.number()
    }

    fn text(&mut self) -> Option<String> {
        let length = usize::try_from(self.number()?).ok()?;
        let text = String::from_utf8_lossy(self.take(length)?).into_owned();
        self.byte().map(|_| text)
    }

    /// Reads a variant that contains a list of strings. Returns `None` if the variant has another type or is malformed.
    fn strings(&mut self) -> Option<Vec<String>> {
        if self.signature()? != "as" {
            return None;
        }
        let length = usize::try_from(self.number()?).ok()?;
        let end = self.at.checked_add(length).filter(|&end| end <= self.bytes.len())?;
        let mut strings = Vec::new();
        while self.at < end {
            strings.push(self.text()?);
        }
        Some(strings)
    }

    fn signature(&mut self) -> Option<String> {
        let length = usize::from(self.byte()?);
        let text = String::from_utf8_lossy(self.take(length)?).into_owned();
        self.byte().map(|_| text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A reply as systemd and the bus encode it.
    fn written(kind: u8, serial: u32, error: Option<(&str, &str)>) -> Vec<u8> {
        let mut body = Bytes::default();
        if let Some((_, text)) = error {
            body.text(text);
        }
        message(kind, serial, body, |bytes| {
            // On its private socket, systemd uses a sender that is no unique name.
            bytes.0.push(7);
            bytes.signature("s");
            bytes.text("org.freedesktop.systemd1");
            if let Some((name, _)) = error {
                bytes.align(8);
                bytes.0.push(ERROR_NAME);
                bytes.signature("s");
                bytes.text(name);
                bytes.align(8);
                bytes.0.push(SIGNATURE);
                bytes.signature("g");
                bytes.signature("s");
            }
        })
    }

    /// The reply with the value of a property.
    fn property(strings: &[&str]) -> Vec<u8> {
        let mut body = Bytes::default();
        body.signature("as");
        body.array(4, |bytes| strings.iter().for_each(|text| bytes.text(text)));
        message(REPLY, 2, body, |bytes| {
            bytes.0.push(SIGNATURE);
            bytes.signature("g");
            bytes.signature("v");
        })
    }

    /// A reply to the call with this serial number, with more header fields.
    fn message(kind: u8, serial: u32, body: Bytes, fields: impl Fn(&mut Bytes)) -> Vec<u8> {
        let mut bytes = Bytes(vec![b'l', kind, 1, 1]);
        bytes.length(body.0.len());
        bytes.number(77);
        bytes.array(8, |bytes| {
            bytes.0.push(REPLY_SERIAL);
            bytes.signature("u");
            bytes.number(serial);
            bytes.align(8);
            fields(bytes);
        });
        bytes.align(8);
        bytes.0.extend(body.0);
        bytes.0
    }

    #[test]
    fn a_call_is_encoded_as_the_specification_says() {
        let hello = CallDestination { to: Some("a.b"), path: "/a", interface: "a.b", method: "Hello" };
        let bytes = encode_call(&hello, &CallArguments::default().text("x").boolean_true(), 5);
        let expected: &[u8] = b"l\x01\0\x01\x0c\0\0\0\x05\0\0\0\x48\0\0\0\
            \x01\x01o\0\x02\0\0\0/a\0\0\0\0\0\0\
            \x02\x01s\0\x03\0\0\0a.b\0\0\0\0\0\
            \x03\x01s\0\x05\0\0\0Hello\0\0\0\
            \x06\x01s\0\x03\0\0\0a.b\0\0\0\0\0\
            \x08\x01g\0\x02sb\0\
            \x01\0\0\0x\0\0\0\x01\0\0\0";
        assert_eq!(bytes, expected);
        assert_eq!(
            remaining_size(bytes[..PREFIX_BYTES].try_into().unwrap()),
            Some(bytes.len() - PREFIX_BYTES)
        );
    }

    #[test]
    fn properties_are_pairs_of_a_name_and_a_variant() {
        let set = [
            ("AllowedCPUs", PropertyValue::Set(vec![0b101, 1])),
            ("TasksMax", PropertyValue::Number(u64::MAX)),
        ];
        let body = CallArguments::default().properties(&set).no_auxiliary_units();
        assert_eq!(body.signature, "a(sv)a(sa(sv))");
        let expected: &[u8] = b"\x38\0\0\0\0\0\0\0\
            \x0b\0\0\0AllowedCPUs\0\x02ay\0\x02\0\0\0\x05\x01\0\0\0\0\0\0\
            \x08\0\0\0TasksMax\0\x01t\0\xff\xff\xff\xff\xff\xff\xff\xff\
            \0\0\0\0\0\0\0\0";
        let got: String = body.bytes.0.iter().map(|byte| format!("{byte:02x}")).collect();
        let want: String = expected.iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(got, want);
    }

    #[test]
    fn a_reply_differs_from_an_error_and_from_a_reply_to_another_call() {
        assert_eq!(parse_reply(&written(REPLY, 2, None), 2), Some(Ok(Vec::new())));
        assert_eq!(parse_reply(&written(REPLY, 3, None), 2), None);
        let error = |name, text| parse_reply(&written(ERROR, 2, Some((name, text))), 2);
        assert_eq!(error("org.freedesktop.systemd1.NoSuchUnit", "x"), Some(Err(SystemdError::NoSuchUnit)));
        assert_eq!(error("org.freedesktop.DBus.Error.NoReply", ""), Some(Err(SystemdError::NoReply)));
        let refused = SystemdError::Refused { name: "a.B".to_owned(), text: "no".to_owned() };
        assert_eq!(error("a.B", "no"), Some(Err(refused)));
        assert_eq!(parse_reply(&written(4, 2, None), 2), None, "a signal");
    }

    #[test]
    fn a_unit_name_is_escaped() {
        assert_eq!([escape_unit("-.slice"), escape_unit("pjw.slice")], ["_2d_2eslice", "pjw_2eslice"]);
    }

    #[test]
    fn a_property_with_a_list_of_strings_is_parsed() {
        for strings in [&[][..], &["cpuset"], &["io", "memory", "cpuset"]] {
            let read: Vec<String> = strings.iter().map(|text| (*text).to_owned()).collect();
            assert_eq!(parse_reply(&property(strings), 2), Some(Ok(read)));
        }
        let whole = property(&["io", "cpuset"]);
        for (at, byte) in (0..whole.len()).flat_map(|at| [0, 1, 0x7f, 0xff].map(|byte| (at, byte))) {
            let mut broken = whole.clone();
            broken[at] = byte;
            let _ = parse_reply(&broken, 2);
            let _ = parse_reply(&whole[..at], 2);
        }
    }

    #[test]
    fn malformed_messages_are_rejected() {
        let whole = written(ERROR, 2, Some(("a.B", "no")));
        for end in 0..whole.len() {
            // A truncated message does not panic. An error without its text is still an error.
            let _ = parse_reply(&whole[..end], 2);
        }
        for at in 0..whole.len() {
            for byte in [0, 1, 0x7f, 0xff] {
                let mut broken = whole.clone();
                broken[at] = byte;
                let _ = parse_reply(&broken, 2);
                let _ = remaining_size(broken[..PREFIX_BYTES].try_into().unwrap());
            }
        }
        assert_eq!(remaining_size(b"HTTP/1.1 400 Bad"), None);
        assert_eq!(remaining_size(b"l\x02\0\x01\xff\xff\xff\x7f\0\0\0\0\0\0\0\0"), None, "too long");
    }
}
