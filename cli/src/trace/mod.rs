//! Reads a trace of serving requests.
//!
//! In: a file in one of three public formats, told apart by its first line, never by its name. Out: every request, in
//! file order, or one [`TraceError`] that names the line, the column and the reason; there is no half-read trace.
//!
//! | format | first line | arrival | prompt | output |
//! | --- | --- | --- | --- | --- |
//! | [`azure`] | header with `context_tokens` or `generated_tokens` | `arrival_ms` | `context_tokens` | `generated_tokens` |
//! | [`sharegpt`] | header with `conversation` or `history_tokens` | none | `prompt_tokens` | `output_tokens` |
//! | [`mooncake`] | JSON object | `timestamp`, ms | `input_length` | `output_length` |
//!
//! Mooncake also says which prompts begin alike.

mod azure;
mod mooncake;
mod sharegpt;
mod table;

use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The longest prompt or output a trace may name: eight times the longest context window in public use (2 Mi tokens),
/// so that a corrupt number is refused before anything is sized by it.
pub const MAX_LENGTH_TOKENS: u32 = 1 << 24;

/// Tokens of a prompt block: one hash each in the [`mooncake`] format.
pub const BLOCK_TOKENS: u32 = 512;

/// One request of a trace. Both lengths are from 1 to [`MAX_LENGTH_TOKENS`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Request {
    /// Milliseconds since the start of the trace, where the format has it.
    pub arrival_ms: Option<u64>,
    /// Tokens in the cache when decoding begins.
    pub prompt_tokens: u32,
    /// Tokens to decode.
    pub output_tokens: u32,
    /// A hash of each block of [`BLOCK_TOKENS`] tokens of the prompt, the last one's whatever it holds, and of all before
    /// it: prompts are equal as far as their leading hashes are. Empty where the format has none.
    pub prompt_blocks: Arc<[u64]>,
}

/// Why a trace was not read. Lines count from 1, the header included.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TraceError {
    /// The file could not be read.
    #[error("the file cannot be read: {0}")]
    Read(#[from] std::io::Error),
    /// The bytes are not text.
    #[error("line {line}: not UTF-8 text")]
    NotText {
        /// The first bad line.
        line: u64,
    },
    /// There is no request in the file.
    #[error("there is no request: {reason}")]
    Empty {
        /// What there is instead.
        reason: &'static str,
    },
    /// The first line belongs to no format.
    #[error(
        "line 1: `{found}` starts no known trace format; known are the headers \
         `arrival_ms,context_tokens,generated_tokens` (Azure) and \
         `conversation,history_tokens,prompt_tokens,output_tokens` (ShareGPT turns), and JSON lines with `timestamp`, \
         `input_length` and `output_length` (Mooncake)"
    )]
    UnknownFormat {
        /// The first line, cut to 80 characters.
        found: String,
    },
    /// A column or key of the format is not there.
    #[error("line {line}: column `{column}` of the {format} format is missing")]
    MissingColumn {
        /// The header's line, or the object's.
        line: u64,
        /// The column.
        column: &'static str,
        /// The format the first line chose.
        format: &'static str,
    },
    /// A row is shorter or longer than the header.
    #[error("line {line}: {found} fields where the header has {expected}")]
    FieldCount {
        /// The row's line.
        line: u64,
        /// Fields found.
        found: u64,
        /// Fields of the header.
        expected: u64,
    },
    /// The line is not the JSON object it should be.
    #[error("line {line}, character {character}: {reason}")]
    Json {
        /// The line.
        line: u64,
        /// Where in the line, from 1.
        character: u64,
        /// What the JSON reader said.
        reason: String,
    },
    /// A field holds a value no request can have.
    #[error("line {line}, column `{column}`: `{found}` {reason}")]
    Value {
        /// The line.
        line: u64,
        /// The column.
        column: &'static str,
        /// The field as written, cut to 80 characters.
        found: String,
        /// What is wrong with it.
        reason: ValueReason,
    },
    /// The CSV reader refused the file for another reason.
    #[error("line {line}: {reason}")]
    Csv {
        /// The line.
        line: u64,
        /// What the CSV reader said.
        reason: String,
    },
}

/// What is wrong with a field.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ValueReason {
    /// Nothing between the commas.
    #[error("is empty")]
    Missing,
    /// Text, a fraction, or digits past 64 bits.
    #[error("is not a whole number of at most 64 bits")]
    NotWhole,
    /// Below zero.
    #[error("is negative")]
    Negative,
    /// A length of zero.
    #[error("is zero; a request has at least 1 token of prompt and 1 of output")]
    Zero,
    /// Past [`MAX_LENGTH_TOKENS`].
    #[error("is more than {MAX_LENGTH_TOKENS} tokens, the longest supported")]
    TooLong,
    /// A conversation's history that its own prompt does not hold.
    #[error("is more than the prompt_tokens of the row, which count the history too")]
    PastPrompt,
    /// Other than an array of hashes.
    #[error("is not an array of whole numbers of at most 64 bits")]
    NotHashes,
    /// More or fewer hashes than the prompt has blocks.
    #[error(
        "has {found} hashes; a prompt of {prompt_tokens} tokens has {} blocks of {BLOCK_TOKENS}",
        prompt_tokens.div_ceil(BLOCK_TOKENS)
    )]
    BlockCount {
        /// Hashes found.
        found: usize,
        /// The row's prompt.
        prompt_tokens: u32,
    },
}

/// Why a trace's file was not read.
#[derive(Debug, thiserror::Error)]
#[error("trace {}: {source}", path.display())]
#[non_exhaustive]
pub struct TraceFileError {
    /// The file.
    pub path: PathBuf,
    /// Where and why.
    pub source: TraceError,
}

/// Reads the trace at `path`.
pub fn read(path: &Path) -> Result<Vec<Request>, TraceFileError> {
    let read = || parse(&std::fs::read(path)?);
    read().map_err(|source| TraceFileError { path: path.to_path_buf(), source })
}

/// Reads a trace from the bytes of its file.
pub fn parse(bytes: &[u8]) -> Result<Vec<Request>, TraceError> {
    let text = std::str::from_utf8(bytes).map_err(|error| {
        let line = 1 + bytes[..error.valid_up_to()].iter().filter(|&&byte| byte == b'\n').count() as u64;
        TraceError::NotText { line }
    })?;
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    if text.trim().is_empty() {
        return Err(TraceError::Empty { reason: "the file is empty" });
    }
    let first_line = text.lines().next().unwrap_or_default().trim();
    let names = |column: &str| first_line.split(',').any(|name| name.trim() == column);
    let requests = if first_line.starts_with('{') {
        mooncake::parse(text)?
    } else if names("context_tokens") || names("generated_tokens") {
        azure::parse(text)?
    } else if names("conversation") || names("history_tokens") {
        sharegpt::parse(text)?
    } else {
        return Err(TraceError::UnknownFormat { found: excerpt(first_line) });
    };
    if requests.is_empty() {
        return Err(TraceError::Empty { reason: "there is a header and no row" });
    }
    Ok(requests)
}

/// A field's place, for its error.
#[derive(Clone, Copy)]
struct Place {
    line: u64,
    column: &'static str,
}

impl Place {
    fn refuse(self, found: &str, reason: ValueReason) -> TraceError {
        TraceError::Value { line: self.line, column: self.column, found: excerpt(found), reason }
    }

    /// A number that may be zero: a time, a count.
    fn count(self, text: &str) -> Result<u64, TraceError> {
        let text = text.trim();
        if text.is_empty() {
            return Err(self.refuse(text, ValueReason::Missing));
        }
        if let Some(magnitude) = text.strip_prefix('-')
            && magnitude.parse::<f64>().is_ok()
        {
            return Err(self.refuse(text, ValueReason::Negative));
        }
        text.parse().map_err(|_| self.refuse(text, ValueReason::NotWhole))
    }

    /// A number of tokens, at most [`MAX_LENGTH_TOKENS`].
    fn tokens(self, text: &str) -> Result<u32, TraceError> {
        match self.count(text)? {
            count if count > MAX_LENGTH_TOKENS as u64 => Err(self.refuse(text, ValueReason::TooLong)),
            count => Ok(count as u32),
        }
    }

    /// A number of tokens of a prompt or output.
    fn length(self, text: &str) -> Result<u32, TraceError> {
        match self.tokens(text)? {
            0 => Err(self.refuse(text, ValueReason::Zero)),
            length => Ok(length),
        }
    }
}

/// At most 80 characters of `text`: a binary file's first line can be the whole file.
fn excerpt(text: &str) -> String {
    text.chars().take(80).collect()
}

#[cfg(test)]
mod tests;
