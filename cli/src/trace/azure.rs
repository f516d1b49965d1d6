//! The Azure LLM inference trace: one row a request, in order of arrival.

use super::table::Table;
use super::{Request, TraceError};

pub fn parse(text: &str) -> Result<Vec<Request>, TraceError> {
    let mut table = Table::new(text, "Azure", ["arrival_ms", "context_tokens", "generated_tokens"])?;
    let mut requests = Vec::new();
    while let Some([arrival, prompt, output]) = table.next_row()? {
        requests.push(Request {
            arrival_ms: Some(arrival.0.count(arrival.1)?),
            prompt_tokens: prompt.0.length(prompt.1)?,
            output_tokens: output.0.length(output.1)?,
            ..Request::default()
        });
    }
    Ok(requests)
}
