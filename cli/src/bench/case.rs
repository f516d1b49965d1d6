//! Cases as data: one JSON object a line.
//!
//! Lengths are written as runs, `512x63,100000` for sixty-three of 512 and one of 100,000.

use oxattn::Layout;
use serde::Deserialize;

use super::Failure;

/// One case; of a batch without variants, all that is not here stays as it is by default.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct Case {
    pub section: String,
    pub case: String,
    pub query_heads: u32,
    pub kv_heads: u32,
    pub head_dim: u32,
    /// Of values, where it is another.
    #[serde(default)]
    pub value_head_dim: Option<u32>,
    pub page_size: u32,
    #[serde(default = "bf16")]
    pub kv_dtype: String,
    #[serde(default)]
    pub layout: String,
    #[serde(default)]
    pub kv_lens: String,
    #[serde(default)]
    pub query_lens: String,
    /// Leading keys that each request has in common with the one before it: whole pages.
    #[serde(default)]
    pub shared_tokens: String,
    /// Levels of those prefixes that a plan may read once.
    #[serde(default = "one")]
    pub prefix_levels: u32,
    #[serde(default)]
    pub tokens: u32,
    #[serde(default)]
    pub batch: u32,
    #[serde(default)]
    pub window_left: Option<u32>,
    #[serde(default)]
    pub soft_cap: Option<f32>,
    #[serde(default)]
    pub sinks: bool,
    #[serde(default)]
    pub alibi: bool,
    #[serde(default)]
    pub mask: bool,
}

fn bf16() -> String {
    "bf16".to_owned()
}

fn one() -> u32 {
    1
}

/// Reads a file of cases; blank lines are skipped.
pub fn parse(text: &str) -> Result<Vec<Case>, Failure> {
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    lines
        .map(|(i, line)| serde_json::from_str(line).map_err(|e| format!("case on line {}: {e}", i + 1).into()))
        .collect()
}

impl Case {
    /// The cache's layout: tokens outside heads unless the case says `hnd`.
    pub fn layout(&self) -> Layout {
        if self.layout == "hnd" { Layout::Hnd } else { Layout::Nhd }
    }

    pub fn kv_lens(&self) -> Result<Vec<u32>, Failure> {
        lengths(&self.kv_lens)
    }

    pub fn query_lens(&self) -> Result<Vec<u32>, Failure> {
        lengths(&self.query_lens)
    }

    /// Empty where nothing is shared.
    pub fn shared_tokens(&self) -> Result<Vec<u32>, Failure> {
        lengths(&self.shared_tokens)
    }
}

/// `512x63,100000` as 64 numbers.
pub fn lengths(text: &str) -> Result<Vec<u32>, Failure> {
    let mut lengths = Vec::new();
    for run in text.split(',').filter(|run| !run.is_empty()) {
        let (length, count) = run.split_once('x').unwrap_or((run, "1"));
        let (length, count): (u32, usize) = (length.trim().parse()?, count.trim().parse()?);
        lengths.extend(std::iter::repeat_n(length, count));
    }
    Ok(lengths)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::serve::Tables;
    use oxattn::PageTable;

    /// What [`lengths`] reads.
    fn runs(lengths: &[u32]) -> String {
        let runs = lengths.chunk_by(|a, b| a == b).map(|run| match run.len() {
            1 => run[0].to_string(),
            count => format!("{}x{count}", run[0]),
        });
        runs.collect::<Vec<_>>().join(",")
    }

    #[test]
    fn runs_are_spelt_out() {
        assert_eq!(lengths("512x3,7,1x2").unwrap(), [512, 512, 512, 7, 1, 1]);
        assert_eq!(lengths("").unwrap(), [0; 0]);
        assert!(lengths("a").is_err());
    }

    #[test]
    fn the_committed_cases_parse() {
        let cases = parse(super::super::SERVING).unwrap();
        let rotating = parse(super::super::ROPE_APPEND).unwrap();
        assert!(rotating.iter().all(|case| case.section == "rope_append" && case.tokens.is_multiple_of(case.batch)));
        assert!(cases.iter().all(|case| case.kv_lens().unwrap().len() == case.query_lens().unwrap().len()));
        let prefixes = parse(super::super::PREFIX).unwrap();
        for case in &prefixes {
            let (kv_lens, shared_tokens) = (case.kv_lens().unwrap(), case.shared_tokens().unwrap());
            assert_eq!((kv_lens.len(), shared_tokens[0]), (shared_tokens.len(), 0));
            if case.case.ends_with("suffix128") {
                let have_suffixes = |(shared, kv_len): (&u32, &u32)| *shared == 0 || shared + 128 == *kv_len;
                assert!(shared_tokens.iter().zip(&kv_lens).all(have_suffixes));
            }
            assert!(shared_tokens.iter().all(|shared| shared.is_multiple_of(case.page_size)));
        }
        // The requests of a sample in flight together, with pages as a prefix cache would have them.
        for trace in ["sample", "grouped"] {
            let name = format!("32/8/128 p16 bf16 mooncake conversation {trace} b64");
            let case = prefixes.iter().find(|case| case.case == name).expect("there is a case for each sample");
            let path = format!("{}/../data/traces/mooncake_conversation_{trace}.jsonl", env!("CARGO_MANIFEST_DIR"));
            let requests = crate::trace::read(path.as_ref()).unwrap();
            let Tables { kv_lens, page_begin, page_ids } = Tables::in_flight(&requests, 64, case.page_size).unwrap();
            let table = PageTable::csr(case.page_size, &page_begin, &kv_lens).unwrap();
            let shared_tokens = table.shared_tokens_of_pages(&page_ids).unwrap();
            assert_eq!((&case.kv_lens, &case.shared_tokens), (&runs(&kv_lens), &runs(&shared_tokens)), "{name}");
        }
        for case in parse(super::super::ROPE_ATTENTION).unwrap() {
            assert_eq!(case.section, "rope_attention");
            assert_eq!(case.kv_lens().unwrap().len(), case.query_lens().unwrap().len());
        }
        let skewed = cases.iter().find(|case| case.case.starts_with("32/8/128 p16 bf16 skew")).unwrap();
        assert_eq!(skewed.kv_lens().unwrap().iter().sum::<u32>(), 63 * 512 + 100_000);
    }
}
