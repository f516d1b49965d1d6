//! As much SVG as a bar chart needs: rectangles, lines and text; lengths in pixels.

use std::fmt::Write;

pub struct Svg {
    body: String,
    width: f64,
}

#[derive(Clone, Copy)]
pub enum Anchor {
    Start,
    Middle,
    End,
}

impl Svg {
    /// An empty picture that says `title` to those who cannot see it.
    pub fn new(width: f64, title: &str) -> Svg {
        Svg { body: format!("<title>{}</title>\n", escaped(title)), width }
    }

    /// A rectangle; `paint` are its attributes, such as `fill="red"`.
    pub fn rect(&mut self, [x, y, width, height]: [f64; 4], paint: &str) {
        let _ = writeln!(self.body, r#"<rect x="{x:.1}" y="{y:.1}" width="{width:.1}" height="{height:.1}" {paint}/>"#);
    }

    /// A vertical line.
    pub fn vertical(&mut self, x: f64, [top, bottom]: [f64; 2], paint: &str) {
        let _ = writeln!(self.body, r#"<path d="M{x:.1} {top:.1}V{bottom:.1}" fill="none" {paint}/>"#);
    }

    /// One line of text, its baseline at `y`.
    pub fn text(&mut self, [x, y]: [f64; 2], size: u32, anchor: Anchor, fill: &str, text: &str) {
        let anchor = match anchor {
            Anchor::Start => "start",
            Anchor::Middle => "middle",
            Anchor::End => "end",
        };
        let text = escaped(text);
        let _ = writeln!(
            self.body,
            r#"<text x="{x:.1}" y="{y:.1}" font-size="{size}" text-anchor="{anchor}" fill="{fill}">{text}</text>"#
        );
    }

    /// The document, on white.
    pub fn finish(self, height: f64) -> String {
        let Svg { body, width } = self;
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" viewBox=\"0 0 {width} \
             {height}\" font-family=\"Helvetica, Arial, 'DejaVu Sans', sans-serif\">\n<rect width=\"100%\" \
             height=\"100%\" fill=\"#ffffff\"/>\n{body}</svg>\n"
        )
    }
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_cannot_leave_its_element() {
        let mut svg = Svg::new(10.0, "a < b");
        svg.text([1.0, 2.0], 9, Anchor::End, "#000", "</text>&");
        let document = svg.finish(5.0);
        assert!(document.contains("<title>a &lt; b</title>"));
        assert!(document.contains(">&lt;/text&gt;&amp;</text>"));
    }
}
