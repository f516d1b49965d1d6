//! The Mooncake trace: one JSON object a line. `hash_ids` has a hash for each block of the prompt, chained, so that prompts
//! are equal as far as their leading hashes are; a row may do without.

use super::{BLOCK_TOKENS, Place, Request, TraceError, ValueReason};
use serde_json::value::RawValue;

#[derive(serde::Deserialize)]
struct Row<'a> {
    #[serde(borrow)]
    timestamp: Option<&'a RawValue>,
    #[serde(borrow)]
    input_length: Option<&'a RawValue>,
    #[serde(borrow)]
    output_length: Option<&'a RawValue>,
    #[serde(borrow)]
    hash_ids: Option<&'a RawValue>,
}

pub fn parse(text: &str) -> Result<Vec<Request>, TraceError> {
    let mut requests = Vec::new();
    for (index, text) in text.lines().enumerate().filter(|(_, text)| !text.trim().is_empty()) {
        let line = index as u64 + 1;
        let row: Row = serde_json::from_str(text).map_err(|error| refusal(line, &error))?;
        let field = |column, value: Option<&RawValue>| match value {
            Some(value) => Ok((Place { line, column }, value.get().to_owned())),
            None => Err(TraceError::MissingColumn { line, column, format: "Mooncake" }),
        };
        let (arrival, arrival_text) = field("timestamp", row.timestamp)?;
        let (prompt, prompt_text) = field("input_length", row.input_length)?;
        let (output, output_text) = field("output_length", row.output_length)?;
        let prompt_tokens = prompt.length(&prompt_text)?;
        let hashes = row.hash_ids.map(|hashes| prompt_blocks(line, hashes.get(), prompt_tokens)).transpose()?;
        requests.push(Request {
            arrival_ms: Some(arrival.count(&arrival_text)?),
            prompt_tokens,
            output_tokens: output.length(&output_text)?,
            prompt_blocks: hashes.unwrap_or_default().into(),
        });
    }
    Ok(requests)
}

/// The hashes of a prompt, as many as it has blocks.
fn prompt_blocks(line: u64, text: &str, prompt_tokens: u32) -> Result<Vec<u64>, TraceError> {
    let refuse = |reason| Place { line, column: "hash_ids" }.refuse(text, reason);
    let hashes: Vec<u64> = serde_json::from_str(text).map_err(|_| refuse(ValueReason::NotHashes))?;
    if hashes.len() != prompt_tokens.div_ceil(BLOCK_TOKENS) as usize {
        return Err(refuse(ValueReason::BlockCount { found: hashes.len(), prompt_tokens }));
    }
    Ok(hashes)
}

/// The JSON reader sees one line at a time, so the place at the end of its message is replaced by ours.
fn refusal(line: u64, error: &serde_json::Error) -> TraceError {
    let message = error.to_string();
    let reason = message.split_once(" at line ").map_or(message.as_str(), |(reason, _)| reason).to_owned();
    TraceError::Json { line, character: error.column() as u64, reason }
}
