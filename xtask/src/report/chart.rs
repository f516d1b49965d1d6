//! The pictures: GB/s of decode and replay, and TFLOP/s of prompts; a pair of bars for each case that we ran right.
//!
//! Blue is oxattn, amber the best peer on the same paged cache (the two stay apart for every common kind of colour
//! blindness, and in grey). A peer on a contiguous cache is a thin outline, and the read-only ceiling that our run
//! measured, where bytes set the pace, a dashed line.

use super::{
    compare::{Comparison, compare},
    record::{Record, Row},
    svg::{Anchor, Svg},
};

const WIDTH: f64 = 1000.0;
/// Where bars begin: the longest name of a case ends before it.
const LEFT: f64 = 350.0;
const RIGHT: f64 = 975.0;
const TOP: f64 = 112.0;
const BAR: f64 = 14.0;
/// From one case to the next.
const PITCH: f64 = 36.0;
const HEADING: f64 = 30.0;
/// An estimate of a character's width in a bar's label.
const CHARACTER: f64 = 6.2;

const INK: &str = "#222222";
const QUIET: &str = "#595959";
const OURS: &str = "#0072b2";
const PEER: &str = "#f0b040";
const MARKER: &str = "fill=\"#ffffff\" fill-opacity=\"0.7\" stroke=\"#222222\" stroke-width=\"1\"";
const CEILING: &str = "stroke=\"#222222\" stroke-width=\"1.2\" stroke-dasharray=\"5 3\"";

/// What a picture shows.
struct Picture {
    title: &'static str,
    heading: &'static str,
    /// Of the bars, and how far apart its marks are.
    unit: &'static str,
    step: usize,
    of: fn(&Row) -> Option<f64>,
    /// Sections of the records, and what each is called.
    sections: &'static [(&'static str, &'static str)],
    ceiling: Option<f64>,
}

/// Decodes.
pub fn decode(ours: &Record, peers: &[Record]) -> String {
    let picture = Picture {
        title: "Decode attention in GB/s: oxattn beside the best paged peer of each case",
        heading: "Decode attention, GB/s of the bytes that must move",
        unit: "GB/s",
        step: 1000,
        of: |row| row.gbps,
        sections: &[
            ("decode", "decode: query heads/KV heads/head dim, page, batch, keys"),
            ("replay", "replay: batches with the lengths of chat traffic"),
        ],
        ceiling: read_ceiling(ours),
    };
    let cases = compare(ours, peers, &picture.names());
    picture.draw(ours, cases.into_iter().filter(|case| !case.label().contains("fp8")).collect())
}

/// Prompts, by the kernel that each was given.
pub fn prompts(ours: &Record, peers: &[Record]) -> String {
    let picture = Picture {
        title: "Prompts in TFLOP/s: oxattn beside the best paged peer of each case",
        heading: "Causal prompts, TFLOP/s of the pairs that meet",
        unit: "TFLOP/s",
        step: 100,
        of: |row| row.tflops,
        sections: &[
            ("prefill", "prompts: query heads/KV heads/head dim, batch, tokens"),
            ("append-chunk", "new tokens over a cache"),
        ],
        ceiling: None,
    };
    let cases = compare(ours, peers, &picture.names());
    picture.draw(ours, cases.into_iter().filter(|case| case.ours.peer == "oxattn" && case.best().is_some()).collect())
}

impl Picture {
    fn names(&self) -> Vec<&'static str> {
        self.sections.iter().map(|section| section.0).collect()
    }

    /// The whole document.
    fn draw(&self, ours: &Record, mut cases: Vec<Comparison>) -> String {
        cases.retain(|case| case.ours.us.is_some());
        let most = cases.iter().flat_map(|case| self.rates(case)).chain(self.ceiling).fold(1.0, f64::max);
        let half_step = self.step as f64 / 2.0;
        let end = (most / half_step).ceil() * half_step;
        let scale = Scale { pixels: (RIGHT - LEFT) / end, of: self.of };
        let sections = cases.chunk_by(|a, b| a.ours.section == b.ours.section);
        let bottom = TOP + HEADING * sections.clone().count() as f64 + PITCH * cases.len() as f64;

        let mut svg = Svg::new(WIDTH, self.title);
        self.legend(&mut svg, ours);
        for mark in (0..=end as u32).step_by(self.step) {
            let x = scale.x(f64::from(mark));
            svg.vertical(x, [TOP, bottom], "stroke=\"#dddddd\"");
            svg.text([x, TOP - 5.0], 11, Anchor::Middle, QUIET, &mark.to_string());
            svg.text([x, bottom + 14.0], 11, Anchor::Middle, QUIET, &mark.to_string());
        }
        svg.text([LEFT - 12.0, TOP - 5.0], 11, Anchor::End, QUIET, self.unit);
        let mut y = TOP;
        for section in sections {
            let what =
                self.sections.iter().find(|named| named.0 == section[0].ours.section).map_or("", |named| named.1);
            svg.text([12.0, y + 19.0], 11, Anchor::Start, QUIET, what);
            y += HEADING;
            for case in section {
                pair(&mut svg, &scale, y, case);
                y += PITCH;
            }
        }
        if let Some(rate) = self.ceiling {
            svg.vertical(scale.x(rate), [TOP, bottom], CEILING);
        }
        svg.finish(bottom + 24.0)
    }

    fn rates<'a>(&self, case: &'a Comparison) -> impl Iterator<Item = f64> + 'a {
        [Some(case.ours), case.best(), case.contiguous].into_iter().flatten().filter_map(self.of)
    }

    fn legend(&self, svg: &mut Svg, ours: &Record) {
        let measured: Vec<String> = ["card", "driver", "date"]
            .into_iter()
            .filter_map(|field| {
                Some(format!("{}{}", if field == "driver" { "driver " } else { "" }, ours.info(field)?))
            })
            .collect();
        svg.text([12.0, 26.0], 17, Anchor::Start, INK, self.heading);
        svg.text([WIDTH - 12.0, 26.0], 12, Anchor::End, QUIET, &measured.join(", "));
        let (first, second) = (42.0, 64.0);
        let label = |svg: &mut Svg, x: f64, y: f64, text: &str| svg.text([x, y + 11.5], 12, Anchor::Start, INK, text);
        svg.rect([12.0, first, 24.0, BAR], &format!("fill=\"{OURS}\""));
        label(svg, 44.0, first, "oxattn");
        svg.rect([LEFT, first, 24.0, BAR], &format!("fill=\"{PEER}\""));
        label(svg, LEFT + 32.0, first, "best peer on the same paged cache, named in its bar");
        if let Some(rate) = self.ceiling {
            svg.vertical(24.0, [second, second + BAR], CEILING);
            label(svg, 44.0, second, &format!("read-only ceiling of the same run, {rate:.0}"));
        }
        svg.rect([LEFT + 10.0, second, 4.0, BAR], MARKER);
        label(svg, LEFT + 32.0, second, "best peer on a contiguous cache, an easier layout");
    }
}

/// GB/s that our run reached by reading alone.
fn read_ceiling(ours: &Record) -> Option<f64> {
    ours.rows.iter().find(|row| row.section == "ceiling" && row.case == "read only")?.gbps
}

/// How long a rate is, and whose.
struct Scale {
    pixels: f64,
    of: fn(&Row) -> Option<f64>,
}

impl Scale {
    fn x(&self, rate: f64) -> f64 {
        LEFT + rate * self.pixels
    }
}

/// A case: its name, its two bars, and where a contiguous cache would be. `y` is the top of the upper bar.
fn pair(svg: &mut Svg, scale: &Scale, y: f64, case: &Comparison) {
    svg.text([LEFT - 10.0, y + BAR + 4.0], 11, Anchor::End, INK, &case.label());
    let marker = case.contiguous.and_then(scale.of).map(|rate| scale.x(rate));
    let mut bar = |row: &Row, y: f64, fill: &str, inside: &str, name: &str| {
        let Some(rate) = (scale.of)(row) else { return };
        let end = scale.x(rate);
        svg.rect([LEFT, y, end - LEFT, BAR], &format!("fill=\"{fill}\""));
        let label = format!("{rate:.0}{name}");
        let width = label.len() as f64 * CHARACTER + 10.0;
        let fits = width < end - LEFT && marker.is_none_or(|x| x > LEFT + width);
        let beside = marker.filter(|x| (end - 8.0..end + width).contains(x)).map_or(end, |x| x + 4.0);
        let (x, ink) = if fits { (LEFT, inside) } else { (beside, INK) };
        svg.text([x + 5.0, y + 11.0], 11, Anchor::Start, ink, &label);
    };
    bar(case.ours, y, OURS, "#ffffff", "");
    if let Some(best) = case.best() {
        bar(best, y + BAR, PEER, INK, &format!("  {}", best.peer));
    }
    if let Some(x) = marker {
        svg.rect([x - 2.0, y - 2.0, 4.0, 2.0 * BAR + 4.0], MARKER);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OURS_JSON: &str = r#"
{"section": "_info", "card": "H200", "driver": "580.1", "date": "2026-11-29"}
{"section": "ceiling", "case": "read only", "peer": "oxattn", "us": 1.0, "gbps": 4400.0, "ok": true}
{"section": "decode", "case": "full", "peer": "oxattn", "us": 10.0, "gbps": 4000.0, "ok": true}
{"section": "decode", "case": "p16 fp8", "peer": "oxattn", "ok": true, "error": "not supported"}
{"section": "decode", "case": "broken", "peer": "oxattn", "us": 1.0, "gbps": 1.0, "ok": false}
"#;
    const PEERS_JSON: &str = r#"
{"section": "_info"}
{"section": "decode", "case": "full", "peer": "quick", "us": 16.0, "gbps": 2500.0, "ok": true}
{"section": "decode", "case": "full", "peer": "x-dense", "us": 8.0, "gbps": 4500.0, "ok": true}
{"section": "decode", "case": "broken", "peer": "quick", "us": 16.0, "gbps": 2500.0, "ok": true}
"#;

    /// The scale ends at 4500 GB/s, 625 pixels from the bars' begin.
    #[test]
    fn bars_are_as_long_as_the_rates() {
        let ours = Record::parse("ours", OURS_JSON).unwrap();
        let peers = [Record::parse("peers", PEERS_JSON).unwrap()];
        let picture = decode(&ours, &peers);
        assert!(picture.contains(r##"width="555.6" height="14.0" fill="#0072b2""##), "{picture}");
        assert!(picture.contains(r##"width="347.2" height="14.0" fill="#f0b040""##), "{picture}");
        assert!(
            picture.contains(r##"<rect x="973.0" y="140.0" width="4.0" height="32.0" fill="#ffffff""##),
            "{picture}"
        );
        assert!(picture.contains("M961.1 112.0V178.0"), "{picture}");
        assert!(picture.contains(">2500  quick<") && picture.contains("H200, driver 580.1, 2026-11-29"));
        assert!(!picture.contains("fp8") && !picture.contains("broken") && !picture.contains("x-dense"));
    }

    /// The scale ends at 650 TFLOP/s.
    #[test]
    fn prompts_are_compared_where_a_peer_reads_pages() {
        let ours = r#"
{"section": "_info"}
{"section": "prefill", "case": "both", "peer": "oxattn", "us": 10.0, "gbps": 1.0, "tflops": 520.0, "ok": true}
{"section": "prefill", "case": "both", "peer": "oxattn-ragged", "us": 9.0, "gbps": 1.0, "tflops": 555.0, "ok": true}
{"section": "prefill", "case": "alone", "peer": "oxattn", "us": 10.0, "gbps": 1.0, "tflops": 444.0, "ok": true}
"#;
        let peers = r#"
{"section": "_info"}
{"section": "prefill", "case": "both", "peer": "fa3-paged", "us": 20.0, "gbps": 1.0, "tflops": 260.0}
{"section": "prefill", "case": "both", "peer": "fa3-dense", "us": 8.0, "gbps": 1.0, "tflops": 650.0}
"#;
        let ours = Record::parse("ours", ours).unwrap();
        let picture = prompts(&ours, &[Record::parse("peers", peers).unwrap()]);
        assert!(picture.contains(r##"width="500.0" height="14.0" fill="#0072b2""##), "{picture}");
        assert!(picture.contains(r##"width="250.0" height="14.0" fill="#f0b040""##), "{picture}");
        assert!(picture.contains(">260  fa3-paged<") && picture.contains(r#"<rect x="973.0""#), "{picture}");
        assert!(!picture.contains("alone") && !picture.contains("555"), "{picture}");
    }

    #[test]
    fn nothing_measured_is_an_empty_picture() {
        let ours = Record::parse("ours", r#"{"section": "_info"}"#).unwrap();
        assert!(decode(&ours, &[]).ends_with("</svg>\n"));
    }
}
