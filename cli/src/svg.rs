//! Just enough SVG: a document built from rectangles, paths, lines and text, every string escaped.
//!
//! Lengths are user units, which are pixels at the document's own size; they are written with at most two decimals, so
//! that a committed picture stays small and a change of the schedule shows as a change of few lines.

use std::fmt::Write;

/// A picture in the making.
pub struct Svg {
    body: String,
    width: f64,
    height: f64,
}

/// Where a text stands relative to its point.
#[derive(Clone, Copy)]
pub enum Anchor {
    /// Begins there.
    Start,
    /// Is centred there.
    Middle,
    /// Ends there.
    End,
}

impl Svg {
    /// An empty white picture that says `description` to those who cannot see it.
    pub fn new(width: f64, height: f64, description: &str) -> Svg {
        let mut svg = Svg { body: String::new(), width, height };
        let _ = writeln!(svg.body, "<title>{}</title>", Escaped(description));
        svg.rect(0.0, 0.0, width, height, "#ffffff");
        svg
    }

    /// Verbatim elements, such as a pattern to fill with.
    pub fn definitions(&mut self, elements: &str) {
        let _ = writeln!(self.body, "<defs>{elements}</defs>");
    }

    /// A filled rectangle.
    pub fn rect(&mut self, x: f64, y: f64, width: f64, height: f64, fill: &str) {
        let (x, y, width, height) = (Short(x), Short(y), Short(width), Short(height));
        let _ = writeln!(
            self.body,
            r#"<rect x="{x}" y="{y}" width="{width}" height="{height}" fill="{}"/>"#,
            Escaped(fill)
        );
    }

    /// Rectangles `[x, y, width, height]` of one fill, as one element; the tip shows under the pointer.
    pub fn rects(&mut self, rects: &[[f64; 4]], fill: &str, tip: &str) {
        if rects.is_empty() {
            return;
        }
        let _ = write!(self.body, r#"<path fill="{}" d=""#, Escaped(fill));
        for &[x, y, width, height] in rects {
            let (x, y, back, width, height) = (Short(x), Short(y), Short(-width), Short(width), Short(height));
            let _ = write!(self.body, "M{x} {y}h{width}v{height}h{back}z");
        }
        let _ = writeln!(self.body, r#""><title>{}</title></path>"#, Escaped(tip));
    }

    /// A line; `dash` is SVG's list of dash lengths, empty for a solid line.
    pub fn line(&mut self, from: [f64; 2], to: [f64; 2], stroke: &str, width: f64, dash: &str) {
        let [x1, y1] = from.map(Short);
        let [x2, y2] = to.map(Short);
        let _ = write!(
            self.body,
            r#"<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{}" stroke-width="{}""#,
            Escaped(stroke),
            Short(width)
        );
        if !dash.is_empty() {
            let _ = write!(self.body, r#" stroke-dasharray="{}""#, Escaped(dash));
        }
        self.body.push_str("/>\n");
    }

    /// One line of text, its baseline at `y`.
    pub fn text(&mut self, x: f64, y: f64, size: f64, anchor: Anchor, fill: &str, text: &str) {
        let anchor = match anchor {
            Anchor::Start => "start",
            Anchor::Middle => "middle",
            Anchor::End => "end",
        };
        let _ = writeln!(
            self.body,
            r#"<text x="{}" y="{}" font-size="{}" text-anchor="{anchor}" fill="{}">{}</text>"#,
            Short(x),
            Short(y),
            Short(size),
            Escaped(fill),
            Escaped(text)
        );
    }

    /// The whole document.
    pub fn finish(self) -> String {
        let (width, height) = (Short(self.width), Short(self.height));
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" viewBox=\"0 0 {width} \
             {height}\" font-family=\"Helvetica, Arial, 'DejaVu Sans', sans-serif\">\n{}</svg>\n",
            self.body
        )
    }
}

/// A number with at most two decimals and no trailing zeros.
struct Short(f64);

impl std::fmt::Display for Short {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // Adding 0 turns a negative zero into zero.
        write!(formatter, "{}", (self.0 * 100.0).round() / 100.0 + 0.0)
    }
}

/// Text or an attribute's value, safe inside XML.
struct Escaped<'a>(&'a str);

impl std::fmt::Display for Escaped<'_> {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for character in self.0.chars() {
            match character {
                '&' => formatter.write_str("&amp;")?,
                '<' => formatter.write_str("&lt;")?,
                '>' => formatter.write_str("&gt;")?,
                '"' => formatter.write_str("&quot;")?,
                '\'' => formatter.write_str("&#39;")?,
                // XML has no way to write other control characters.
                character if character.is_control() => formatter.write_char(' ')?,
                character => formatter.write_char(character)?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strings_are_escaped_in_text_and_attributes() {
        let mut svg = Svg::new(10.0, 10.0, "a < b & \"c\"");
        svg.text(1.0, 2.0, 3.0, Anchor::End, "\"/><script>", "</text>\u{0}'");
        let document = svg.finish();
        assert!(document.contains("<title>a &lt; b &amp; &quot;c&quot;</title>"));
        assert!(document.contains(r#"fill="&quot;/&gt;&lt;script&gt;">&lt;/text&gt; &#39;</text>"#));
        assert!(!document.contains("<script>"));
    }

    #[test]
    fn numbers_are_short() {
        for (number, text) in [(1.0, "1"), (0.126, "0.13"), (-2.5, "-2.5"), (1e6, "1000000"), (-0.0001, "0")] {
            assert_eq!(Short(number).to_string(), text);
        }
    }

    #[test]
    fn rectangles_of_one_fill_are_one_element() {
        let mut svg = Svg::new(10.0, 10.0, "");
        svg.rects(&[[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]], "red", "two");
        svg.rects(&[], "blue", "none");
        let document = svg.finish();
        assert!(document.contains(r#"<path fill="red" d="M1 2h3v4h-3zM5 6h7v8h-7z"><title>two</title></path>"#));
        assert!(!document.contains("blue"));
    }
}
