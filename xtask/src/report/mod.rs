//! `cargo xtask report`: records of the GPU suite to a picture and tables.
//!
//! In: one record of `oxattn bench --json` and records of its peers on the same cases (`benches/record/README.md`
//! describes them). Out: `bench-decode.svg` and `bench-decode.md` of a record with decodes, `bench-prompts.svg` of one with
//! prompts. Each file is read ([`record`]), each of our rows is
//! paired with the fastest peer of the same case and cache layout ([`compare`]), and the pairs are written as bars
//! ([`chart`], on [`svg`]) and as tables ([`table`]). Invariant: every figure in the output is a figure of the records
//! or the quotient of two, and both sides were measured on one card with one driver.

mod chart;
mod compare;
mod record;
mod svg;
mod table;

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, ensure};

use self::record::Record;

#[derive(clap::Args)]
pub struct Arguments {
    /// The record of `oxattn bench --json`.
    #[arg(long, value_name = "FILE")]
    ours: PathBuf,
    /// Records of the peers.
    #[arg(long, value_name = "FILE", num_args = 0..)]
    peers: Vec<PathBuf>,
    /// The folder to write into.
    #[arg(long, value_name = "FOLDER", default_value = "docs")]
    out: PathBuf,
}

pub fn run(arguments: &Arguments) -> Result<()> {
    let ours = read(&arguments.ours)?;
    let peers = arguments.peers.iter().map(|path| read(path)).collect::<Result<Vec<_>>>()?;
    one_machine(&ours, &peers)?;
    let has = |section: &str| ours.rows.iter().any(|row| row.section == section);
    if has("decode") {
        write(&arguments.out.join("bench-decode.svg"), &chart::decode(&ours, &peers))?;
        write(&arguments.out.join("bench-decode.md"), &table::page(&ours, &peers))?;
    }
    if has("prefill") {
        write(&arguments.out.join("bench-prompts.svg"), &chart::prompts(&ours, &peers))?;
    }
    Ok(())
}

/// Times of two cards or two drivers say nothing about each other.
fn one_machine(ours: &Record, peers: &[Record]) -> Result<()> {
    for peer in peers {
        for field in ["card", "driver"] {
            if let (Some(here), Some(there)) = (ours.info(field), peer.info(field)) {
                ensure!(here == there, "{} has the {field} {there:?}, but {} has {here:?}", peer.name, ours.name);
            }
        }
    }
    Ok(())
}

fn read(path: &Path) -> Result<Record> {
    let text = fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    Record::parse(&name, &text).with_context(|| format!("cannot use {}", path.display()))
}

fn write(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))?;
    println!("wrote {}", path.display());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(header: &str) -> Record {
        Record::parse("r.jsonl", header).unwrap()
    }

    #[test]
    fn records_of_two_drivers_are_refused() {
        let ours = record(r#"{"section": "_info", "card": "H200", "driver": "580.1"}"#);
        let same = record(r#"{"section": "_info", "card": "H200", "driver": "580.1"}"#);
        let silent = record(r#"{"section": "_info"}"#);
        let other = record(r#"{"section": "_info", "card": "H200", "driver": "570.2"}"#);
        assert!(one_machine(&ours, &[same, silent]).is_ok());
        let message = one_machine(&ours, &[other]).unwrap_err().to_string();
        assert!(message.contains("driver \"570.2\""), "{message}");
    }
}
