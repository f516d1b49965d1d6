//! The picture: GB/s of decode and replay, a pair of bars for each case that we ran right.
//!
//! Blue is oxattn, amber the best peer on the same paged cache (the two stay apart for every common kind of colour
//! blindness, and in grey). A peer on a contiguous cache is a thin outline, and the read-only ceiling that our run
//! measured a dashed line.

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

/// The whole document.
pub fn decode(ours: &Record, peers: &[Record]) -> String {
    let cases: Vec<Comparison> = compare(ours, peers, &["decode", "replay"])
        .into_iter()
        .filter(|case| case.ours.us.is_some() && !case.label().contains("fp8"))
        .collect();
    let ceiling = read_ceiling(ours);
    let most = cases.iter().flat_map(rates).chain(ceiling).fold(1.0, f64::max);
    let end = (most / 500.0).ceil() * 500.0;
    let scale = Scale { per_gbps: (RIGHT - LEFT) / end };
    let sections = cases.chunk_by(|a, b| a.ours.section == b.ours.section);
    let bottom = TOP + HEADING * sections.clone().count() as f64 + PITCH * cases.len() as f64;

    let mut svg = Svg::new(WIDTH, "Decode attention in GB/s: oxattn beside the best paged peer of each case");
    legend(&mut svg, ours, ceiling);
    for gbps in (0..=end as u32).step_by(1000) {
        let x = scale.x(f64::from(gbps));
        svg.vertical(x, [TOP, bottom], "stroke=\"#dddddd\"");
        svg.text([x, TOP - 5.0], 11, Anchor::Middle, QUIET, &gbps.to_string());
        svg.text([x, bottom + 14.0], 11, Anchor::Middle, QUIET, &gbps.to_string());
    }
    svg.text([LEFT - 12.0, TOP - 5.0], 11, Anchor::End, QUIET, "GB/s");
    let mut y = TOP;
    for section in sections {
        let what = match section[0].ours.section.as_str() {
            "decode" => "decode: query heads/KV heads/head dim, page, batch, keys",
            _ => "replay: batches with the lengths of chat traffic",
        };
        svg.text([12.0, y + 19.0], 11, Anchor::Start, QUIET, what);
        y += HEADING;
        for case in section {
            pair(&mut svg, &scale, y, case);
            y += PITCH;
        }
    }
    if let Some(gbps) = ceiling {
        svg.vertical(scale.x(gbps), [TOP, bottom], CEILING);
    }
    svg.finish(bottom + 24.0)
}

/// GB/s that our run reached by reading alone.
fn read_ceiling(ours: &Record) -> Option<f64> {
    ours.rows.iter().find(|row| row.section == "ceiling" && row.case == "read only")?.gbps
}

fn rates<'a>(case: &'a Comparison) -> impl Iterator<Item = f64> + 'a {
    [Some(case.ours), case.best(), case.contiguous].into_iter().flatten().filter_map(|row| row.gbps)
}

struct Scale {
    per_gbps: f64,
}

impl Scale {
    fn x(&self, gbps: f64) -> f64 {
        LEFT + gbps * self.per_gbps
    }
}

fn legend(svg: &mut Svg, ours: &Record, ceiling: Option<f64>) {
    let measured: Vec<String> = ["card", "driver", "date"]
        .into_iter()
        .filter_map(|field| Some(format!("{}{}", if field == "driver" { "driver " } else { "" }, ours.info(field)?)))
        .collect();
    svg.text([12.0, 26.0], 17, Anchor::Start, INK, "Decode attention, GB/s of the bytes that must move");
    svg.text([WIDTH - 12.0, 26.0], 12, Anchor::End, QUIET, &measured.join(", "));
    let (first, second) = (42.0, 64.0);
    let label = |svg: &mut Svg, x: f64, y: f64, text: &str| svg.text([x, y + 11.5], 12, Anchor::Start, INK, text);
    svg.rect([12.0, first, 24.0, BAR], &format!("fill=\"{OURS}\""));
    label(svg, 44.0, first, "oxattn");
    svg.rect([LEFT, first, 24.0, BAR], &format!("fill=\"{PEER}\""));
    label(svg, LEFT + 32.0, first, "best peer on the same paged cache, named in its bar");
    if let Some(gbps) = ceiling {
        svg.vertical(24.0, [second, second + BAR], CEILING);
        label(svg, 44.0, second, &format!("read-only ceiling of the same run, {gbps:.0}"));
    }
    svg.rect([LEFT + 10.0, second, 4.0, BAR], MARKER);
    label(svg, LEFT + 32.0, second, "best peer on a contiguous cache, an easier layout");
}

/// A case: its name, its two bars, and where a contiguous cache would be. `y` is the top of the upper bar.
fn pair(svg: &mut Svg, scale: &Scale, y: f64, case: &Comparison) {
    svg.text([LEFT - 10.0, y + BAR + 4.0], 11, Anchor::End, INK, &case.label());
    let marker = case.contiguous.and_then(|row| row.gbps).map(|gbps| scale.x(gbps));
    let mut bar = |row: &Row, y: f64, fill: &str, inside: &str, name: &str| {
        let Some(gbps) = row.gbps else { return };
        let end = scale.x(gbps);
        svg.rect([LEFT, y, end - LEFT, BAR], &format!("fill=\"{fill}\""));
        let label = format!("{gbps:.0}{name}");
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

    #[test]
    fn nothing_measured_is_an_empty_picture() {
        let ours = Record::parse("ours", r#"{"section": "_info"}"#).unwrap();
        assert!(decode(&ours, &[]).ends_with("</svg>\n"));
    }
}
