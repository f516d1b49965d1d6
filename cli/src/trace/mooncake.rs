//! The Mooncake trace: one JSON object a line. `hash_ids`, the shared prefix blocks, is read past: each request gets
//! pages of its own.

use super::{Place, Request, TraceError};
use serde_json::value::RawValue;

#[derive(serde::Deserialize)]
struct Row<'a> {
    #[serde(borrow)]
    timestamp: Option<&'a RawValue>,
    #[serde(borrow)]
    input_length: Option<&'a RawValue>,
    #[serde(borrow)]
    output_length: Option<&'a RawValue>,
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
        requests.push(Request {
            arrival_ms: Some(arrival.count(&arrival_text)?),
            prompt_tokens: prompt.length(&prompt_text)?,
            output_tokens: output.length(&output_text)?,
        });
    }
    Ok(requests)
}

/// The JSON reader sees one line at a time, so the place at the end of its message is replaced by ours.
fn refusal(line: u64, error: &serde_json::Error) -> TraceError {
    let message = error.to_string();
    let reason = message.split_once(" at line ").map_or(message.as_str(), |(reason, _)| reason).to_owned();
    TraceError::Json { line, character: error.column() as u64, reason }
}
