//! An SVG writer: rectangles, texts, colours. It escapes all texts.

use std::fmt::Write;

use super::super::core_map::Holder;

/// The width of a letter in a wide font, in hundredths of its height.
const LETTER_WIDTH: u32 = 62;
const TEXT_COLOUR: &str = "#1a1a1a";
const FONTS: &str = "DejaVu Sans, Verdana, Helvetica, Arial, sans-serif";

/// Seven colours that people with colour blindness can distinguish (Okabe and Ito).
const COLOURS: [[u32; 3]; 7] = [
    [0x00, 0x72, 0xb2],
    [0xe6, 0x9f, 0x00],
    [0x00, 0x9e, 0x73],
    [0xcc, 0x79, 0xa7],
    [0x56, 0xb4, 0xe9],
    [0xd5, 0x5e, 0x00],
    [0xf0, 0xe4, 0x42],
];

/// Hatchings, for meanings that a colour alone should not carry.
const PATTERNS: &str = concat!(
    r##"<pattern id="housekeeping" width="6" height="6" patternUnits="userSpaceOnUse" "##,
    r##"patternTransform="rotate(45)"><rect width="6" height="6" fill="#ffffff"/>"##,
    r##"<rect width="2" height="6" fill="#d4d4d4"/></pattern>"##,
    r##"<pattern id="several" width="8" height="8" patternUnits="userSpaceOnUse" "##,
    r##"patternTransform="rotate(45)"><rect width="8" height="8" fill="#b00020"/>"##,
    r##"<rect width="2" height="8" fill="#c9274a"/><rect width="8" height="2" fill="#c9274a"/></pattern>"##,
);

/// The fill colour or pattern of a box, and the colour of the text in the box.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct FillStyle {
    fill: String,
    text: &'static str,
}

impl FillStyle {
    /// Makes a fill with dark text. `fill` is the colour or the pattern in SVG, such as `#ffffff` or `url(#several)`.
    pub(super) fn plain(fill: &str) -> Self {
        Self { fill: fill.to_owned(), text: TEXT_COLOUR }
    }

    /// Returns the fill for a core or a PU (logical CPU) with the holder `holder`, such as a job. Each job has its own
    /// colour, until the colours repeat.
    pub(super) fn for_holder(holder: Holder) -> Self {
        match holder {
            Holder::Job(n) => fill_style_of_job(n),
            Holder::SeveralJobs => Self { fill: "url(#several)".to_owned(), text: "#ffffff" },
            Holder::Lent => Self::plain("#fff3c4"),
            Holder::Housekeeping => Self::plain("url(#housekeeping)"),
            Holder::Free => Self::plain("#ffffff"),
            Holder::Offline => Self { fill: "#9e9e9e".to_owned(), text: "#ffffff" },
        }
    }
}

/// Returns the fill of the job with the index `n` in the list of jobs. The first jobs have the colours in
/// [`COLOURS`], the next jobs the same colours but lighter, and the jobs after these the same colours but darker.
/// Then the colours repeat. The text is white on a dark fill, and dark otherwise.
fn fill_style_of_job(n: usize) -> FillStyle {
    let base = COLOURS[n % COLOURS.len()];
    let [r, g, b] = match n / COLOURS.len() % 3 {
        0 => base,
        1 => base.map(|part| part + (255 - part) * 6 / 10),
        _ => base.map(|part| part * 55 / 100),
    };
    let brightness = (299 * r + 587 * g + 114 * b) / 1000;
    FillStyle {
        fill: format!("#{r:02x}{g:02x}{b:02x}"),
        text: if brightness < 128 { "#ffffff" } else { TEXT_COLOUR },
    }
}

/// Returns `text` with at most `most` characters. A longer text is cut, and ends with `…`.
pub(super) fn truncate_text(text: &str, most: usize) -> String {
    if text.chars().count() <= most {
        return text.to_owned();
    }
    text.chars().take(most.saturating_sub(1)).chain(['…']).collect()
}

/// Returns the estimated width of `text` in pixels, at the font size `size` in pixels. The estimate is larger than the
/// width in any usual font.
pub(super) fn text_width(text: &str, size: u32) -> u32 {
    let letters: u32 = text.chars().map(|c| if c >= '\u{2e80}' { 2 } else { 1 }).sum();
    (letters * size * LETTER_WIDTH).div_ceil(100)
}

/// An SVG document to which rectangles and texts are added.
pub(super) struct Svg {
    svg: String,
}

impl Svg {
    /// Begins an SVG document with the width `width` and the height `height`, in pixels.
    pub(super) fn new(width: u32, height: u32) -> Self {
        let svg = format!(
            "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<svg xmlns=\"http://www.w3.org/2000/svg\" \
             width=\"{width}\" height=\"{height}\" viewBox=\"0 0 {width} {height}\" \
             font-family=\"{FONTS}\" fill=\"{TEXT_COLOUR}\">\n<defs>{PATTERNS}</defs>\n\
             <rect width=\"{width}\" height=\"{height}\" fill=\"#ffffff\"/>\n"
        );
        Self { svg }
    }

    /// Completes the SVG document and returns its text.
    pub(super) fn finish(mut self) -> String {
        self.svg.push_str("</svg>\n");
        self.svg
    }

    /// Begins a group of shapes. A viewer shows `hint` as a tooltip when the pointer is over a shape of the group. The
    /// group ends with the call of [`Svg::end_group`].
    pub(super) fn begin_group(&mut self, hint: &str) {
        self.put(&format!("<g><title>{}</title>", escape_xml(hint)));
    }

    /// Ends the group of shapes that the last call of [`Svg::begin_group`] began.
    pub(super) fn end_group(&mut self) {
        self.put("</g>\n");
    }

    /// Draws `text` in bold. The text begins at the position (`x`, `y`) and has the font size `size`, in pixels.
    pub(super) fn bold_text(&mut self, x: u32, y: u32, size: u32, text: &str) {
        self.text(x, y, size, text, r#" font-weight="bold""#);
    }

    /// Draws `text` as one line. The text begins at the position (`x`, `y`) and has the font size `size`, in pixels.
    pub(super) fn plain_text(&mut self, x: u32, y: u32, size: u32, text: &str) {
        self.text(x, y, size, text, "");
    }

    /// Draws the two texts in `label` on one line, as the header of a box. The first text begins at the position `at`.
    /// The second text ends at the x coordinate `right`. `size` is the font size. All numbers are in pixels.
    pub(super) fn box_header(
        &mut self,
        at: (u32, u32),
        right: u32,
        size: u32,
        label: (&str, &str),
        fill_style: &FillStyle,
    ) {
        let ((x, y), (first, second)) = (at, label);
        let colour = format!(r#" fill="{}""#, fill_style.text);
        self.text(x, y, size, first, &colour);
        if !second.is_empty() {
            let bold = if size < 10 { r#" font-weight="bold""# } else { "" };
            self.text(right, y, size, second, &format!(r#" text-anchor="end"{bold}{colour}"#));
        }
    }

    /// Draws a rectangle. `at` is its upper left corner (x, y), and `size` its width and height. `fill_style` is the
    /// colour or pattern inside it. `line` contains the SVG attributes of its border. `corner_radius` is the radius of
    /// its corners. All numbers are in pixels.
    pub(super) fn rect(
        &mut self,
        at: (u32, u32),
        size: (u32, u32),
        fill_style: &FillStyle,
        line: &str,
        corner_radius: u32,
    ) {
        let ((x, y), (width, height)) = (at, size);
        let radius = if corner_radius > 0 { format!(r#" rx="{corner_radius}""#) } else { String::new() };
        self.put(&format!(
            r#"<rect x="{x}" y="{y}" width="{width}" height="{height}"{radius} fill="{}" {line}/>"#,
            fill_style.fill
        ));
    }

    /// Draws a rectangle with the centred text `text`. `at` is the upper left corner (x, y) of the rectangle, and
    /// `size` its width and height, in pixels.
    pub(super) fn rect_with_text(
        &mut self,
        at: (u32, u32),
        size: (u32, u32),
        fill_style: &FillStyle,
        text: &str,
    ) {
        self.rect(at, size, fill_style, r##"stroke="#6b6b6b""##, 0);
        let (x, y) = (at.0 + size.0 / 2, at.1 + size.1.div_ceil(2) + 3);
        let colour = format!(r#" text-anchor="middle" fill="{}""#, fill_style.text);
        self.text(x, y, 9, text, &colour);
    }

    fn text(&mut self, x: u32, y: u32, size: u32, text: &str, attributes: &str) {
        if !text.is_empty() {
            let text = escape_xml(text);
            self.put(&format!(r#"<text x="{x}" y="{y}" font-size="{size}"{attributes}>{text}</text>"#));
        }
    }

    fn put(&mut self, text: &str) {
        self.svg.push_str(text);
    }
}

/// Returns `text` with XML escapes. Leaves out control characters and the characters that XML does not allow.
fn escape_xml(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for c in text.chars() {
        let _ = match c {
            '&' => safe.write_str("&amp;"),
            '<' => safe.write_str("&lt;"),
            '>' => safe.write_str("&gt;"),
            '"' => safe.write_str("&quot;"),
            '\u{fffe}' | '\u{ffff}' => Ok(()),
            c if c.is_control() => Ok(()),
            c => safe.write_char(c),
        };
    }
    safe
}
