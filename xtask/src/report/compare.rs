//! Our rows beside the peers' rows of the same section and case.
//!
//! A peer that reads a contiguous cache has an easier layout: it is a bound to look at, never the peer we are compared
//! with. A row without GB/s in a section that moves bytes is a preparation for the work, not the work, and is left out.

use super::record::{Record, Row};

/// What marks the name of a peer whose cache is contiguous.
const CONTIGUOUS: [&str; 4] = ["dense", "varlen", "ragged", "sdpa"];

/// One case: our row, and the peers'.
pub struct Comparison<'a> {
    pub ours: &'a Row,
    /// Peers of the same layout, fastest first, each once.
    pub peers: Vec<&'a Row>,
    /// The fastest peer on a contiguous cache.
    pub contiguous: Option<&'a Row>,
}

/// The cases of these sections, in the order of the sections and then of our record.
pub fn compare<'a>(ours: &'a Record, peers: &'a [Record], sections: &[&str]) -> Vec<Comparison<'a>> {
    let of_section = |section: &&str| ours.rows.iter().filter(|row| row.section == **section).collect::<Vec<_>>();
    sections.iter().flat_map(of_section).map(|row| comparison(row, peers)).collect()
}

fn comparison<'a>(ours: &'a Row, peers: &'a [Record]) -> Comparison<'a> {
    let does_the_work = |row: &Row| row.us.is_some() && (row.section == "plan" || row.gbps.is_some());
    let mut rows: Vec<&Row> = (peers.iter().flat_map(|record| &record.rows))
        .filter(|row| row.section == ours.section && row.case == ours.case && does_the_work(row))
        .collect();
    rows.sort_by(|a, b| a.us.partial_cmp(&b.us).expect("JSON has no NaN"));
    let (contiguous, mut paged): (Vec<&Row>, Vec<&Row>) =
        rows.into_iter().partition(|row| CONTIGUOUS.iter().any(|mark| row.peer.contains(mark)));
    let mut seen = Vec::new();
    paged.retain(|row| {
        let name = implementation(&row.peer);
        let first = !seen.contains(&name);
        seen.push(name);
        first
    });
    Comparison { ours, peers: paged, contiguous: contiguous.first().copied() }
}

/// A peer's name without how its arguments were passed.
fn implementation(peer: &str) -> &str {
    peer.strip_suffix("-devptr").unwrap_or(peer)
}

impl<'a> Comparison<'a> {
    pub fn best(&self) -> Option<&'a Row> {
        self.peers.first().copied()
    }

    /// The case, and in brackets how ours was run where that is not the usual way, such as `unsplit`.
    pub fn label(&self) -> String {
        match self.ours.peer.strip_prefix("oxattn-") {
            Some(way) => format!("{} ({way})", self.ours.case),
            None => self.ours.case.clone(),
        }
    }

    /// How many of our calls fit into the best peer's: above 1, we are faster.
    pub fn ratio(&self) -> Option<f64> {
        Some(self.best()?.us? / self.ours.us?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OURS: &str = r#"
{"section": "_info"}
{"section": "replay", "case": "r", "peer": "oxattn", "us": 50.0, "gbps": 4000.0, "ok": true}
{"section": "decode", "case": "a", "peer": "oxattn", "us": 10.0, "gbps": 4000.0, "ok": true}
{"section": "decode", "case": "alone", "peer": "oxattn", "us": 3.0, "gbps": 100.0, "ok": true}
{"section": "decode", "case": "failed", "peer": "oxattn", "ok": false, "error": "no"}
{"section": "append_kv", "case": "w", "peer": "oxattn", "us": 8.0, "gbps": 900.0, "ok": true}
{"section": "plan", "case": "p", "peer": "oxattn", "us": 4.0, "ok": true}
"#;
    const PEERS: &str = r#"
{"section": "_info"}
{"section": "decode", "case": "a", "peer": "slow", "us": 20.0, "gbps": 2000.0, "ok": true}
{"section": "decode", "case": "a", "peer": "quick", "us": 12.5, "gbps": 3200.0, "ok": true}
{"section": "decode", "case": "a", "peer": "wrong", "us": 1.0, "gbps": 9000.0, "ok": false}
{"section": "decode", "case": "a", "peer": "x-dense", "us": 9.0, "gbps": 4400.0, "ok": true}
{"section": "decode", "case": "a", "peer": "x-varlen", "us": 8.0, "gbps": 4500.0, "ok": true}
{"section": "decode", "case": "failed", "peer": "quick", "us": 7.0, "gbps": 3200.0, "ok": true}
{"section": "replay", "case": "a", "peer": "elsewhere", "us": 2.0, "gbps": 1.0, "ok": true}
{"section": "append_kv", "case": "w", "peer": "prepare", "us": 3.0}
{"section": "append_kv", "case": "w", "peer": "write", "us": 12.0, "gbps": 600.0}
{"section": "plan", "case": "p", "peer": "f-devptr", "us": 36.0}
{"section": "plan", "case": "p", "peer": "f", "us": 30.0}
{"section": "plan", "case": "p", "peer": "g", "us": 44.0}
"#;

    type Line = (String, Vec<String>, Option<String>, Option<f64>);

    fn lines(sections: &[&str]) -> Vec<Line> {
        let ours = Record::parse("ours", OURS).unwrap();
        let peers = [Record::parse("peers", PEERS).unwrap()];
        let line = |c: &Comparison| {
            let names = c.peers.iter().map(|row| row.peer.clone()).collect();
            (c.ours.case.clone(), names, c.contiguous.map(|row| row.peer.clone()), c.ratio())
        };
        compare(&ours, &peers, sections).iter().map(line).collect()
    }

    fn line(case: &str, peers: &[&str], contiguous: Option<&str>, ratio: Option<f64>) -> Line {
        (case.into(), peers.iter().map(|name| name.to_string()).collect(), contiguous.map(String::from), ratio)
    }

    #[test]
    fn the_best_peer_is_right_and_paged_and_of_this_case() {
        let expected = [
            line("a", &["quick", "slow"], Some("x-varlen"), Some(1.25)),
            line("alone", &[], None, None),
            line("failed", &["quick"], None, None),
            line("r", &[], None, None),
        ];
        assert_eq!(lines(&["decode", "replay"]), expected);
    }

    #[test]
    fn a_preparation_is_no_append() {
        assert_eq!(lines(&["append_kv"]), [line("w", &["write"], None, Some(1.5))]);
    }

    #[test]
    fn a_planner_counts_once_at_its_best() {
        assert_eq!(lines(&["plan"]), [line("p", &["f", "g"], None, Some(7.5))]);
    }

    #[test]
    fn a_section_nobody_ran_is_empty() {
        assert_eq!(lines(&["mla"]), []);
    }
}
