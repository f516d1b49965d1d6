//! ShareGPT conversations: one row a turn, whose prompt counts the whole conversation so far. Each turn is a request
//! of its own; there are no arrival times.

use super::table::Table;
use super::{Request, TraceError, ValueReason};

pub fn parse(text: &str) -> Result<Vec<Request>, TraceError> {
    let columns = ["conversation", "history_tokens", "prompt_tokens", "output_tokens"];
    let mut table = Table::new(text, "ShareGPT turns", columns)?;
    let mut requests = Vec::new();
    while let Some([conversation, history, prompt, output]) = table.next_row()? {
        conversation.0.count(conversation.1)?;
        let history_tokens = history.0.tokens(history.1)?;
        let prompt_tokens = prompt.0.length(prompt.1)?;
        if history_tokens > prompt_tokens {
            return Err(history.0.refuse(history.1, ValueReason::PastPrompt));
        }
        let output_tokens = output.0.length(output.1)?;
        requests.push(Request { prompt_tokens, output_tokens, ..Request::default() });
    }
    Ok(requests)
}
