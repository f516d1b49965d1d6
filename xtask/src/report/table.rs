//! The page: where the figures come from, then a table for each kind of work.
//!
//! A figure that was not measured is a dash.

use std::fmt::Write;

use super::{
    compare::{Comparison, compare},
    record::{Record, plain},
};

/// The header's fields that a reader looks for first.
const FIRST: [&str; 4] = ["card", "driver", "date", "commit"];

pub fn page(ours: &Record, peers: &[Record]) -> String {
    let mut page = String::from(
        "# The GPU suite beside its peers\n\n\
         ![GB/s of each decode case](bench-decode.svg)\n\n\
         Written by `cargo xtask report` from the records in `benches/record`, whose README says how they are made. \
         Times are microseconds of one call: the median over CUDA graphs of many calls that rotate over more cache \
         than L2 holds; `cold` is one call after L2 was emptied. The best peer is the fastest whose answer was right \
         and which reads the same paged cache; `ratio` is its time over ours, so above 1 oxattn is faster. `of \
         ceiling` is our GB/s over what reading alone (decode, replay) or copying alone (append) reached in the same \
         run. A dash stands for what was not measured.\n\n## Where the figures come from\n",
    );
    source(&mut page, "oxattn", ours);
    for record in peers {
        source(&mut page, "peers", record);
    }
    work(&mut page, "Decode", &compare(ours, peers, &["decode", "replay"]));
    work(&mut page, "Append to the cache", &compare(ours, peers, &["append_kv"]));
    plans(&mut page, &compare(ours, peers, &["plan"]));
    page
}

fn source(page: &mut String, who: &str, record: &Record) {
    let first = FIRST.map(|field| format!("{field} {}", record.info(field).unwrap_or_else(dash)));
    let _ = write!(page, "\n`{}` ({who}): {}", record.name, first.join(", "));
    for (field, value) in &record.header {
        if !FIRST.contains(&field.as_str()) && !["section", "command"].contains(&field.as_str()) {
            let _ = write!(page, ", {field} {}", plain(value));
        }
    }
    match record.info("command") {
        Some(command) => {
            let _ = writeln!(page, "\n\n```sh\n{}\n```", command.trim());
        }
        None => page.push_str("; command –\n"),
    }
}

fn work(page: &mut String, title: &str, cases: &[Comparison]) {
    heading(
        page,
        title,
        &["case", "oxattn us", "best peer us", "best peer", "ratio", "of ceiling", "cold us", "peer cold us"],
    );
    for case in cases {
        let best = case.best();
        row(
            page,
            &[
                case.label().clone(),
                microseconds(case.ours.us),
                microseconds(best.and_then(|row| row.us)),
                best.map_or_else(dash, |row| row.peer.clone()),
                ratio(case),
                case.ours.of_ceiling.map_or_else(dash, |part| format!("{:.1} %", part * 100.0)),
                microseconds(case.ours.us_cold),
                microseconds(best.and_then(|row| row.us_cold)),
            ],
        );
    }
}

/// Every planner, since a server may be tied to one of them.
fn plans(page: &mut String, cases: &[Comparison]) {
    heading(
        page,
        "Host plan time",
        &["case", "oxattn us", "best peer us", "best peer", "ratio", "until idle us", "all peers, us"],
    );
    for case in cases {
        let best = case.best();
        let all: Vec<String> = case.peers.iter().map(|row| format!("{} {}", row.peer, microseconds(row.us))).collect();
        row(
            page,
            &[
                case.label().clone(),
                microseconds(case.ours.us),
                microseconds(best.and_then(|row| row.us)),
                best.map_or_else(dash, |row| row.peer.clone()),
                ratio(case),
                microseconds(case.ours.us_until_idle),
                if all.is_empty() { dash() } else { all.join(", ") },
            ],
        );
    }
    page.push_str(
        "\n`oxattn us` and the peers' times end when the call returns; `until idle` is oxattn's time until the upload \
         has arrived too. Each planner counts at the better of its index arrays passed on the host and on the GPU. A \
         planner with `mla` in its name plans another attention for the same lengths.\n",
    );
}

fn heading(page: &mut String, title: &str, columns: &[&str]) {
    let _ = write!(page, "\n## {title}\n\n| {} |\n|", columns.join(" | "));
    for column in columns {
        let names = ["case", "best peer", "all peers, us"];
        page.push_str(if names.contains(column) { "---|" } else { "--:|" });
    }
    page.push('\n');
}

fn row(page: &mut String, cells: &[String]) {
    let cells: Vec<String> = cells.iter().map(|cell| cell.replace('|', "\\|")).collect();
    let _ = writeln!(page, "| {} |", cells.join(" | "));
}

fn dash() -> String {
    "–".to_owned()
}

/// Three digits or more, and no more decimals than a repetition confirms.
fn microseconds(us: Option<f64>) -> String {
    us.map_or_else(dash, |us| if us < 10.0 { format!("{us:.2}") } else { format!("{us:.1}") })
}

fn ratio(case: &Comparison) -> String {
    case.ratio().map_or_else(dash, |ratio| format!("{ratio:.2}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const OURS: &str = r#"
{"section": "_info", "card": "H200", "driver": "580.1", "date": "2026-11-29", "commit": "abc", "command": "oxattn bench --json"}
{"section": "decode", "case": "a|b", "peer": "oxattn", "us": 10.0, "us_cold": 14.25, "gbps": 4000.0, "of_ceiling": 0.9, "ok": true}
{"section": "decode", "case": "alone", "peer": "oxattn", "us": 3.14159, "gbps": 10.0, "of_ceiling": 0.5, "ok": true}
{"section": "decode", "case": "fp8", "peer": "oxattn", "ok": true, "error": "not supported"}
{"section": "append_kv", "case": "w", "peer": "oxattn", "us": 8.0, "gbps": 900.0, "of_ceiling": 0.3333, "us_cold": 9.0, "ok": true}
{"section": "plan", "case": "p", "peer": "oxattn", "us": 4.0, "us_until_idle": 12.0, "ok": true}
"#;
    const PEERS: &str = r#"
{"section": "_info", "flashinfer": "0.7.4"}
{"section": "decode", "case": "a|b", "peer": "quick", "us": 12.5, "us_cold": 15.0, "gbps": 3200.0, "ok": true}
{"section": "decode", "case": "a|b", "peer": "x-dense", "us": 9.0, "gbps": 4400.0, "ok": true}
{"section": "decode", "case": "fp8", "peer": "quick", "us": 7.0, "gbps": 3200.0, "ok": true}
{"section": "append_kv", "case": "w", "peer": "write", "us": 6.0, "gbps": 1200.0}
{"section": "plan", "case": "p", "peer": "f", "us": 30.0}
{"section": "plan", "case": "p", "peer": "g", "us": 9.0}
"#;

    #[test]
    fn every_row_says_what_was_measured_and_no_more() {
        let ours = Record::parse("ours.jsonl", OURS).unwrap();
        let page = page(&ours, &[Record::parse("peers.jsonl", PEERS).unwrap()]);
        for line in [
            "`ours.jsonl` (oxattn): card H200, driver 580.1, date 2026-11-29, commit abc",
            "oxattn bench --json",
            "`peers.jsonl` (peers): card –, driver –, date –, commit –, flashinfer 0.7.4; command –",
            "| a\\|b | 10.0 | 12.5 | quick | 1.25 | 90.0 % | 14.2 | 15.0 |",
            "| alone | 3.14 | – | – | – | 50.0 % | – | – |",
            "| fp8 | – | 7.00 | quick | – | – | – | – |",
            "| w | 8.00 | 6.00 | write | 0.75 | 33.3 % | 9.00 | – |",
            "| p | 4.00 | 9.00 | g | 2.25 | 12.0 | g 9.00, f 30.0 |",
        ] {
            assert!(page.lines().any(|found| found == line), "{line}\nin\n{page}");
        }
        assert!(!page.contains("x-dense"));
    }

    #[test]
    fn without_peers_there_are_dashes() {
        let ours = Record::parse("ours.jsonl", OURS).unwrap();
        let page = page(&ours, &[]);
        assert!(page.contains("| w | 8.00 | – | – | – | 33.3 % | 9.00 | – |"));
        assert!(page.contains("| p | 4.00 | – | – | – | 12.0 | – |"));
    }
}
