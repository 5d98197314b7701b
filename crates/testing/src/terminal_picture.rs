//! Pictures of a terminal in the manual: SVG of what a program draws, compared with the files in
//! `docs/images`.
//!
//! The text of a picture is that of the program, so a test can tell whether the picture in the
//! manual is still what the program draws.

use std::path::Path;

/// The width of a character, in pixels.
const CELL_WIDTH: usize = 8;
/// The height of a line, in pixels.
const CELL_HEIGHT: usize = 18;
/// From the top of a line to the foot of its letters, in pixels.
const BASELINE: usize = 14;
/// The free space around the text, in pixels.
const MARGIN: usize = 10;

const BACKGROUND: &str = "#1e2127";
const FOREGROUND: &str = "#dcdfe4";
const RED: &str = "#ff7b72";

/// The variable of the environment by which tests write the pictures in the manual: `write`.
pub const VARIABLE: &str = "BLOCKYARD_PICTURES";

/// Whether tests write the pictures in the manual before they compare them.
pub fn is_written() -> bool {
    std::env::var(VARIABLE).is_ok_and(|value| value == "write")
}

/// Characters in a line that look alike.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TerminalSpan {
    /// The characters, each one column wide.
    pub text: String,
    /// Whether they are bold.
    pub is_bold: bool,
    /// Whether the colours of text and background are exchanged.
    pub is_reversed: bool,
    /// Whether they are red.
    pub is_red: bool,
}

impl TerminalSpan {
    /// Plain characters.
    pub fn plain(text: &str) -> TerminalSpan {
        TerminalSpan { text: text.to_owned(), ..TerminalSpan::default() }
    }

    /// The number of columns.
    fn columns(&self) -> usize {
        self.text.chars().count()
    }

    /// Draws the characters from a column of a line on.
    fn draw(&self, column: usize, line: usize, svg: &mut String) {
        let (x, y) = (MARGIN + column * CELL_WIDTH, MARGIN + line * CELL_HEIGHT);
        let width = self.columns() * CELL_WIDTH;
        let colour = if self.is_red { RED } else { FOREGROUND };
        let colour = if self.is_reversed { BACKGROUND } else { colour };
        if self.is_reversed {
            rectangle([x, y, width, CELL_HEIGHT], FOREGROUND, svg);
        }
        let weight = if self.is_bold { r#" font-weight="bold""# } else { "" };
        let look = format!("fill=\"{colour}\"{weight}");
        // Each word has its place and width, since programs join blanks, and fonts differ in the
        // width of their letters.
        let mut x = x;
        for word in self.text.split(' ') {
            let width = word.chars().count() * CELL_WIDTH;
            if width > 0 {
                let length = format!(r#"textLength="{width}" lengthAdjust="spacingAndGlyphs""#);
                let (y, word) = (y + BASELINE, escaped(word));
                *svg += &format!("<text x=\"{x}\" y=\"{y}\" {length} {look}>{word}</text>\n");
            }
            x += width + CELL_WIDTH;
        }
    }
}

/// Draws a rectangle, of which x, y, width and height are given.
fn rectangle([x, y, width, height]: [usize; 4], colour: &str, svg: &mut String) {
    let size = format!(r#"width="{width}" height="{height}""#);
    *svg += &format!("<rect x=\"{x}\" y=\"{y}\" {size} fill=\"{colour}\"/>\n");
}

/// The text with the characters that XML gives a meaning replaced (XML 1.0, 2.4).
fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

/// The lines of a terminal as SVG. `title` is read by programs for users who do not see.
pub fn svg(title: &str, lines: &[Vec<TerminalSpan>]) -> String {
    let columns = |line: &Vec<TerminalSpan>| line.iter().map(TerminalSpan::columns).sum::<usize>();
    let width = 2 * MARGIN + lines.iter().map(columns).max().unwrap_or(0) * CELL_WIDTH;
    let height = 2 * MARGIN + lines.len() * CELL_HEIGHT;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" \
         viewBox=\"0 0 {width} {height}\" role=\"img\" font-size=\"13\" \
         font-family=\"DejaVu Sans Mono, Menlo, Consolas, monospace\">\n\
         <title>{}</title>\n",
        escaped(title)
    );
    rectangle([0, 0, width, height], BACKGROUND, &mut svg);
    for (number, line) in lines.iter().enumerate() {
        let mut column = 0;
        for span in line {
            span.draw(column, number, &mut svg);
            column += span.columns();
        }
    }
    svg + "</svg>\n"
}

/// Compares a picture with that of the manual.
///
/// # Panics
/// If they differ: the message says how to write the picture of the manual again.
pub fn check(name: &str, svg: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/images").join(name);
    if is_written() {
        std::fs::write(&path, svg).expect("the manual can be written");
    }
    let kept = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        kept == svg,
        "docs/images/{name} is not what the program draws; write it again by \
         `{VARIABLE}=write cargo test -p blockyard --bin blockyard picture`, and look at it"
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_stands_in_its_column_and_markup_is_text() {
        let head = TerminalSpan { is_bold: true, is_reversed: true, ..TerminalSpan::plain("r/s") };
        let lines = [vec![TerminalSpan::plain("a<b  c "), head], vec![TerminalSpan::plain("   ")]];
        let svg = svg("x & y", &lines);
        assert!(svg.contains("<title>x &amp; y</title>"), "{svg}");
        assert!(svg.contains(r#"width="100" height="56""#), "{svg}");
        assert!(svg.contains(r#"<text x="10" y="24" textLength="24" "#), "{svg}");
        assert!(svg.contains(">a&lt;b</text>"), "{svg}");
        assert!(svg.contains(r#"<text x="50" y="24" textLength="8" "#), "{svg}");
        assert!(svg.contains(r##"<rect x="66" y="10" width="24" height="18" fill="#dcdfe4"/>"##));
        assert!(svg.contains(r##"fill="#1e2127" font-weight="bold">r/s</text>"##), "{svg}");
        assert_eq!(svg.matches("<text ").count(), 3, "blanks are not drawn: {svg}");
    }

    #[test]
    #[should_panic(expected = "is not what the program draws")]
    fn a_picture_that_the_manual_lacks_fails() {
        check("no-such-picture.svg", "<svg/>");
    }
}
