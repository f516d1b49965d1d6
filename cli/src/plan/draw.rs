//! Draws a schedule: one lane a team of blocks, one box a work item, in the order they run.
//!
//! In: the lanes, in tiles of KV. Out: an SVG document 1000 px wide. A request keeps its colour in every lane; an item
//! that holds only a part of its rows' keys is hatched, since its result has to be folded with others. After each item
//! comes a blank as long as what an item costs besides its tiles, so that lengths are the planner's own loads. Two
//! lines mark the fair share, which is the mean load, and the makespan, which is the largest.

use crate::svg::{Anchor, Svg};
use std::collections::BTreeMap;

/// One work item in its lane.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Block {
    /// Index of the request in the batch; decides the colour.
    pub request: u32,
    /// Its length, in tiles of KV that a short item reads.
    pub tiles: f64,
    /// What it costs besides.
    pub blank_tiles: f64,
    /// Whether it writes a partial state.
    pub split: bool,
}

/// What the picture says besides the lanes.
pub struct Caption<'a> {
    /// First line.
    pub title: &'a str,
    /// Second line, smaller.
    pub subtitle: &'a str,
    /// KV lengths of the requests, for the tips under the pointer.
    pub kv_lens: &'a [u32],
    /// Keys of a tile.
    pub tile_tokens: u32,
}

const WIDTH: f64 = 1000.0;
const LEFT: f64 = 70.0;
const RIGHT: f64 = 24.0;
const TOP: f64 = 92.0;
const BOTTOM: f64 = 48.0;
const INK: &str = "#222222";
const FAINT: &str = "#767676";
const MAKESPAN: &str = "#b00020";
/// Room for the lanes, shared among them: few lanes are tall, and none is thinner than 2 or taller than 28.
const LANES_HEIGHT: f64 = 560.0;

/// The picture of `lanes`.
pub fn schedule(lanes: &[Vec<Block>], caption: &Caption) -> String {
    let lane_height = (LANES_HEIGHT / lanes.len().max(1) as f64).clamp(2.0, 28.0);
    let lanes_height = lane_height * lanes.len() as f64;
    let ends: Vec<f64> =
        lanes.iter().map(|lane| lane.iter().map(|block| block.tiles + block.blank_tiles).sum()).collect();
    let makespan = ends.iter().copied().fold(0.0, f64::max);
    let fair_share = ends.iter().sum::<f64>() / lanes.len().max(1) as f64;
    let scale = (WIDTH - LEFT - RIGHT) / (makespan.max(1.0) * 1.02);
    let bottom = TOP + lanes_height;
    let x_of = |tiles: f64| LEFT + tiles * scale;

    let mut svg = Svg::new(WIDTH, bottom + BOTTOM, caption.title);
    svg.definitions(concat!(
        r#"<pattern id="split" width="5" height="5" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">"#,
        r##"<rect width="1.6" height="5" fill="#000000" fill-opacity="0.2"/></pattern>"##
    ));
    svg.text(LEFT, 26.0, 17.0, Anchor::Start, INK, caption.title);
    svg.text(LEFT, 46.0, 13.0, Anchor::Start, FAINT, caption.subtitle);

    let step = tick_step(makespan.ceil() as u64);
    for tick in (0..=makespan as u64).step_by(step as usize) {
        let x = x_of(tick as f64);
        svg.line([x, TOP], [x, bottom + 5.0], "#dddddd", 1.0, "");
        svg.text(x, bottom + 20.0, 12.0, Anchor::Middle, FAINT, &thousands(tick));
    }
    let axis = format!(
        "load of a team's queue, in tiles of {} keys and up to 16 rows; a blank is what an item costs besides",
        caption.tile_tokens
    );
    svg.text(LEFT, bottom + 38.0, 12.0, Anchor::Start, FAINT, &axis);

    let gap = if lane_height > 6.0 { 1.0 } else { 0.0 };
    let mut requests: BTreeMap<u32, Vec<[f64; 4]>> = BTreeMap::new();
    let mut split = Vec::new();
    for (lane, blocks) in lanes.iter().enumerate() {
        let y = TOP + lane as f64 * lane_height;
        let mut tiles = 0.0;
        for block in blocks {
            let width = block.tiles * scale;
            // A hairline between neighbours, which a block too thin to spare it goes without.
            let seam = if width > 4.0 { 0.6 } else { 0.0 };
            let rect = [x_of(tiles), y, width - seam, lane_height - gap];
            requests.entry(block.request).or_default().push(rect);
            if block.split {
                split.push(rect);
            }
            tiles += block.tiles + block.blank_tiles;
        }
    }
    for (&request, rects) in &requests {
        let tip = match caption.kv_lens.get(request as usize) {
            Some(&kv_len) => format!("request {request}: {} keys, {} items", thousands(kv_len as u64), rects.len()),
            None => format!("request {request}: {} items", rects.len()),
        };
        svg.rects(rects, &colour(request), &tip);
    }
    svg.rects(&split, "url(#split)", "split: writes a partial state");

    let labelled = (lanes.len() as f64 * 14.0 / lanes_height.max(1.0)).ceil().max(1.0) as u64;
    let labelled = tick_step_at_least(labelled);
    for lane in (0..lanes.len()).step_by(labelled as usize) {
        let y = TOP + (lane as f64 + 0.5) * lane_height + 4.0;
        svg.text(LEFT - 8.0, y, 11.0, Anchor::End, FAINT, &lane.to_string());
    }
    svg.text(LEFT - 8.0, TOP - 8.0, 11.0, Anchor::End, FAINT, "team");

    let fair_x = x_of(fair_share);
    let end_x = x_of(makespan);
    svg.line([fair_x, TOP - 6.0], [fair_x, bottom], INK, 1.5, "5 3");
    svg.line([end_x, TOP - 6.0], [end_x, bottom], MAKESPAN, 1.5, "");
    let fair_text = format!("fair share {}", decimal(fair_share));
    let end_text = format!("makespan {}", decimal(makespan));
    svg.text(end_x, TOP - 10.0, 12.0, Anchor::End, MAKESPAN, &end_text);
    // 130 px hold the makespan's label; nearer than that, the fair share's goes to its left.
    let (x, anchor) = if end_x - fair_x > 260.0 {
        (fair_x, Anchor::Start)
    } else if end_x - fair_x > 130.0 {
        (end_x - 130.0, Anchor::End)
    } else {
        (fair_x.min(end_x - 130.0), Anchor::End)
    };
    svg.text(x, TOP - 10.0, 12.0, anchor, INK, &fair_text);
    svg.finish()
}

/// A request's colour: hues a golden angle apart, so that neighbours differ and none repeats soon, in two lightnesses.
fn colour(request: u32) -> String {
    let hue = (request as f64 * 137.508 + 205.0) % 360.0;
    let lightness: f64 = if request.is_multiple_of(2) { 0.66 } else { 0.54 };
    let saturation = 0.55;
    // HSL to RGB, as CSS Color 4 defines it.
    let channel = |shift: f64| {
        let k = (shift + hue / 30.0) % 12.0;
        let chroma = saturation * lightness.min(1.0 - lightness);
        let value = lightness - chroma * (k - 3.0).min(9.0 - k).clamp(-1.0, 1.0);
        (value * 255.0).round() as u8
    };
    format!("#{:02x}{:02x}{:02x}", channel(0.0), channel(8.0), channel(4.0))
}

/// From a tick to the next, so that there are at most ten.
fn tick_step(largest: u64) -> u64 {
    tick_step_at_least(largest.div_ceil(10))
}

/// The smallest 1, 2 or 5 times a power of ten that is at least `least`.
fn tick_step_at_least(least: u64) -> u64 {
    let mut power = 1;
    loop {
        for factor in [1, 2, 5] {
            if factor * power >= least {
                return factor * power;
            }
        }
        power *= 10;
    }
}

/// A number with a comma between groups of three digits.
pub fn thousands(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// With a digit after the point, unless it is 0.
fn decimal(number: f64) -> String {
    if number.fract() == 0.0 {
        return thousands(number as u64);
    }
    format!("{}.{}", thousands((number * 10.0).round() as u64 / 10), (number * 10.0).round() as u64 % 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_numbers() {
        for (largest, step) in [(0, 1), (9, 1), (10, 1), (11, 2), (48, 5), (101, 20), (12_600, 2_000)] {
            assert_eq!(tick_step(largest), step, "{largest}");
        }
    }

    #[test]
    fn numbers_read_easily() {
        assert_eq!(thousands(0), "0");
        assert_eq!(thousands(999), "999");
        assert_eq!(thousands(1_000), "1,000");
        assert_eq!(thousands(1_234_567), "1,234,567");
        assert_eq!(decimal(1234.56), "1,234.6");
        assert_eq!(decimal(0.96), "1.0");
        assert_eq!(decimal(12.0), "12");
    }

    #[test]
    fn neighbouring_requests_have_colours_of_their_own() {
        let colours: std::collections::HashSet<String> = (0..64).map(colour).collect();
        assert_eq!(colours.len(), 64);
    }

    #[test]
    fn every_block_is_drawn_once_and_split_ones_are_hatched() {
        let block = |request, tiles, split| Block { request, tiles, blank_tiles: 2.0, split };
        let lanes = vec![vec![block(0, 4.0, false), block(1, 6.0, true)], vec![block(1, 6.0, true)], vec![]];
        let caption = Caption { title: "a & b", subtitle: "", kv_lens: &[250, 700], tile_tokens: 64 };
        let document = schedule(&lanes, &caption);
        let rectangles = |tip: &str| {
            let line = document.lines().find(|line| line.contains(tip)).unwrap();
            line.matches('M').count()
        };
        assert_eq!(rectangles("<title>request 0: 250 keys, 1 items</title>"), 1);
        assert_eq!(rectangles("<title>request 1: 700 keys, 2 items</title>"), 2);
        assert_eq!(rectangles("<title>split: "), 2);
        assert!(document.contains("a &amp; b"));
        // 4 + 2 and 6 + 2 in the first lane, 6 + 2 in the second, nothing in the third.
        assert!(document.contains("makespan 14<"));
        assert!(document.contains("fair share 7.3<"));
    }

    #[test]
    fn an_empty_schedule_is_a_picture_too() {
        let caption = Caption { title: "", subtitle: "", kv_lens: &[], tile_tokens: 64 };
        for lanes in [vec![], vec![vec![]; 3]] {
            assert!(schedule(&lanes, &caption).ends_with("</svg>\n"));
        }
    }
}
