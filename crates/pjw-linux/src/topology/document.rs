//! Validates an XML file before hwloc parses it: complete, a topology, and of a realistic size.
//!
//! hwloc rejects a truncated file without a message, and trusts the numbers in the file. This check names the
//! line of an error. It rejects numbers that would make hwloc allocate too much memory, and endless nesting.
//! hwloc itself checks the rest.

use pjw_core::cpuset::{CpuSet, Pu};
use thiserror::Error;

use super::limits::MAX_PUS;
use super::nesting::{Nesting, Object};

/// Topologies of real machines have about 15 levels.
const MAX_DEPTH: usize = 64;
/// Maximum number of 32-bit words in a set.
const MAX_SET_WORDS: usize = (Pu::MAX.0 as usize + 1) / 32;

/// Error: the content of a topology file (the XML file that `lstopo` writes) is invalid. Contains the number of
/// the wrong line, and a description of the problem in this line.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("line {line}: {problem}")]
pub struct TopologyXmlError {
    /// The number of the line with the error, counted from 1.
    pub line: usize,
    /// The problem in this line, as text for display.
    pub problem: String,
}

/// Checks `text`, the content of a topology file (XML in the format of hwloc), before hwloc reads it. An invalid file
/// can crash hwloc or make it use too much memory.
pub(super) fn check_topology_xml(text: &str) -> Result<(), TopologyXmlError> {
    let nesting = Nesting::default();
    let mut reader = Reader { text, at: 0, open: Vec::new(), pus: 0, has_root: false, nesting };
    let checked = reader.read_document();
    checked.map_err(|problem| TopologyXmlError { line: line_of(text, reader.at), problem })
}

/// Returns the number of the line, from 1, that has the byte offset `at`.
fn line_of(text: &str, at: usize) -> usize {
    1 + text.as_bytes()[..at.min(text.len())].iter().filter(|&&byte| byte == b'\n').count()
}

/// Reads and checks a topology document in the XML format of hwloc. Contains the text and the position in it.
struct Reader<'a> {
    text: &'a str,
    /// The position: the offset in `text` of the next byte, in bytes.
    at: usize,
    /// The open elements, each with the offset of its start tag.
    open: Vec<(&'a str, usize)>,
    /// The number of PUs until now.
    pus: u32,
    /// Whether the first element has begun.
    has_root: bool,
    nesting: Nesting,
}

impl<'a> Reader<'a> {
    /// Returns the text from the position on.
    fn remaining(&self) -> &'a str {
        &self.text[self.at..]
    }

    /// Reads and checks the whole text. Stops at the first error, and returns its description. The position of the
    /// reader is then near the error.
    fn read_document(&mut self) -> Result<(), String> {
        self.at = if self.text.starts_with('\u{feff}') { '\u{feff}'.len_utf8() } else { 0 };
        while let Some(next) = self.remaining().find('<') {
            if self.open.is_empty() && !self.remaining()[..next].trim().is_empty() {
                let problem =
                    if self.has_root { "there is text after the topology" } else { "it is not XML" };
                return Err(problem.to_owned());
            }
            self.at += next;
            self.read_markup()?;
        }
        if let Some((name, began)) = self.open.last() {
            let line = line_of(self.text, *began);
            self.at = self.text.len();
            return Err(format!("it is cut off: <{name}> of line {line} has no end tag"));
        }
        match (self.has_root, self.remaining().trim().is_empty()) {
            (true, true) => Ok(()),
            (true, false) => Err("there is text after the topology".to_owned()),
            (false, _) if self.at == 0 => Err("it is not XML".to_owned()),
            (false, _) => Err("it is cut off before <topology>".to_owned()),
        }
    }

    /// Reads the XML markup at the position of the reader, which begins with `<`: a tag, a comment, a declaration or a
    /// CDATA section. Moves the position behind it. Fails if the markup is cut off or not allowed.
    fn read_markup(&mut self) -> Result<(), String> {
        for (begin, end) in [("<?", "?>"), ("<!--", "-->"), ("<![CDATA[", "]]>")] {
            if self.remaining().starts_with(begin) {
                return self.skip_behind(end);
            }
        }
        if self.remaining().starts_with("<!") {
            // An internal subset could define entities that expand without limit.
            let declaration = self.remaining().split('>').next().unwrap_or_default();
            if declaration.contains('[') || declaration.contains("<!ENTITY") {
                return Err("it has an entity declaration or an internal subset".to_owned());
            }
            return self.skip_behind(">");
        }
        match self.remaining().strip_prefix("</") {
            Some(after_slash) => self.read_end_tag(after_slash),
            None => self.read_start_tag(),
        }
    }

    /// Moves the position behind the next `end`.
    fn skip_behind(&mut self, end: &str) -> Result<(), String> {
        let found = self.remaining().find(end);
        self.at += found.ok_or_else(|| format!("it is cut off: {end} is missing"))? + end.len();
        Ok(())
    }

    /// Reads an end tag, checks that it ends the innermost open element, and moves the position behind it.
    /// `after_slash` is the text after `</`.
    fn read_end_tag(&mut self, after_slash: &'a str) -> Result<(), String> {
        let (name, _) = after_slash.split_once('>').ok_or("it is cut off inside a tag")?;
        match self.open.pop() {
            Some((open, _)) if open == name.trim_end() => {
                if open == "object" {
                    self.nesting.close_object()?;
                }
            }
            Some((open, began)) => {
                let line = line_of(self.text, began);
                return Err(format!("</{}> where <{open}> of line {line} should end", shorten(name)));
            }
            None => return Err(format!("</{}> has no start tag", shorten(name))),
        }
        self.at += 2 + name.len() + 1;
        Ok(())
    }

    /// Reads a start tag with its attributes, and moves the position behind it. Checks the attributes on which hwloc
    /// relies, such as sets and numbers, and the place of the element in the document.
    fn read_start_tag(&mut self) -> Result<(), String> {
        let began = self.at;
        self.at += 1;
        let name = self.take_name();
        if self.remaining().is_empty() {
            return Err("it is cut off inside a tag".to_owned());
        }
        if name.is_empty() {
            return Err("a < that starts no tag".to_owned());
        }
        if self.open.is_empty() {
            if self.has_root {
                return Err("there is more than one topology in it".to_owned());
            }
            if name != "topology" {
                return Err(format!("it begins with <{}> and not with <topology>", shorten(name)));
            }
            self.has_root = true;
        }
        let (mut object, mut number) = (Object::default(), None);
        let is_empty_element = loop {
            self.skip_blanks();
            if self.skip_prefix("/>") {
                break true;
            }
            if self.skip_prefix(">") {
                break false;
            }
            let (attribute, value) = self.read_attribute()?;
            match attribute {
                "type" if name == "object" => object.kind = shorten(value),
                "os_index" => number = Some(value),
                "gp_index" => object.gp_index = Some(shorten(value)),
                set if set.ends_with("set") => {
                    let bits = Some(parse_cpu_set(set, value)?);
                    match set {
                        "cpuset" => object.cpus = bits,
                        "complete_cpuset" => object.all_cpus = bits,
                        "nodeset" => object.nodes = bits,
                        "complete_nodeset" => object.all_nodes = bits,
                        _ => {}
                    }
                }
                _ => {}
            }
        };
        self.open.push((name, began));
        if self.open.len() > MAX_DEPTH {
            return Err(format!("its elements are nested more than {MAX_DEPTH} deep"));
        }
        if name == "topology" {
            self.nesting.is_off = !has_version_2(&self.text[began..self.at]);
        }
        if name == "object" {
            object.number = self.check_number(&object.kind, number)?;
            self.nesting.open_object(object)?;
        }
        if is_empty_element {
            self.open.pop();
            if name == "object" {
                self.nesting.close_object()?;
            }
        }
        Ok(())
    }

    /// Reads an attribute of a start tag, and moves the position behind it. Returns its name, and its value without the
    /// quotes.
    fn read_attribute(&mut self) -> Result<(&'a str, &'a str), String> {
        let name = self.take_name();
        if name.is_empty() && matches!(self.remaining(), "" | "/") {
            return Err("it is cut off inside a tag".to_owned());
        }
        if name.is_empty() {
            return Err("a tag contains something else than an attribute".to_owned());
        }
        self.skip_blanks();
        let value = self.remaining().strip_prefix('=').map(str::trim_start);
        if self.remaining().is_empty() || value == Some("") {
            return Err(format!("it is cut off before the value of {}", shorten(name)));
        }
        let quote = value.and_then(|value| value.chars().next()).filter(|c| matches!(c, '"' | '\''));
        let (Some(value), Some(quote)) = (value, quote) else {
            return Err(format!("{} has no value", shorten(name)));
        };
        let begin = self.text.len() - value.len() + 1;
        let length = self.text[begin..].find(quote);
        let length = length.ok_or_else(|| format!("it is cut off inside the value of {}", shorten(name)))?;
        self.at = begin + length + 1;
        Ok((name, &self.text[begin..begin + length]))
    }

    fn take_name(&mut self) -> &'a str {
        let is_name = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.' | ':');
        let remaining = self.remaining();
        let name = &remaining[..remaining.find(|c| !is_name(c)).unwrap_or(remaining.len())];
        self.at += name.len();
        name
    }

    /// Moves the position behind `prefix` if the remaining text begins with `prefix`. Returns whether it does.
    fn skip_prefix(&mut self, prefix: &str) -> bool {
        let has_prefix = self.remaining().starts_with(prefix);
        if has_prefix {
            self.at += prefix.len();
        }
        has_prefix
    }

    fn skip_blanks(&mut self) {
        self.at = self.text.len() - self.remaining().trim_start().len();
    }

    /// Checks the number `number` (attribute `os_index`) of a PU or NUMA node, from which hwloc makes sets of bits.
    /// Also counts the PUs, and fails if there are too many. Returns the number, or `None` if an object of the type
    /// `kind` needs none.
    fn check_number(&mut self, kind: &str, number: Option<&str>) -> Result<Option<Pu>, String> {
        if !matches!(kind, "PU" | "NUMANode") {
            return Ok(None);
        }
        self.pus += u32::from(kind == "PU");
        if self.pus > MAX_PUS {
            return Err(format!("it has more than {MAX_PUS} PUs, the most that is handled"));
        }
        let text = number.ok_or_else(|| format!("a {kind} has no number"))?;
        let number = text.parse().ok().filter(|&number| number <= Pu::MAX.0);
        let wrong = || format!("{kind} number {} is not one from 0 to {}", shorten(text), Pu::MAX);
        number.map(Pu).map(Some).ok_or_else(wrong)
    }
}

/// hwloc converts files of hwloc 1, which nest NUMA nodes differently.
fn has_version_2(tag: &str) -> bool {
    tag.contains("version=\"2") || tag.contains("version='2")
}

/// Parses the value `value` of the attribute `name`, which is a set of PUs or NUMA nodes. The value has words of 32
/// bits with commas between them, such as `0x0000000f,,0xffffffff`. The first word has the highest bits. An empty word
/// is zero. `0xf...f` as the first word says that all higher bits are set: these are left out.
fn parse_cpu_set(name: &str, value: &str) -> Result<CpuSet, String> {
    let mut words: Vec<&str> = value.split(',').collect();
    if words.first() == Some(&"0xf...f") {
        words.remove(0);
    }
    if words.len() > MAX_SET_WORDS {
        return Err(format!("{} is longer than {} bits", shorten(name), MAX_SET_WORDS * 32));
    }
    let mut set = vec![0_u64; words.len().div_ceil(2)];
    for (at, word) in words.iter().rev().enumerate() {
        let digits = word.strip_prefix("0x").unwrap_or(word);
        let is_word = digits.len() <= 8 && digits.chars().all(|c| c.is_ascii_hexdigit());
        let bits = if digits.is_empty() { Ok(0) } else { u64::from_str_radix(digits, 16) };
        match bits {
            Ok(bits) if is_word => set[at / 2] |= bits << (at % 2 * 32),
            _ => return Err(format!("{} is no word of the set {}", shorten(word), shorten(name))),
        }
    }
    Ok(CpuSet::from_words(&set))
}

/// Returns the first 40 characters of `text`, for an error message.
fn shorten(text: &str) -> String {
    text.chars().take(40).collect()
}
