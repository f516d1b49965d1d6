//! CSV with a header, for the formats that are tables: finds columns by name, in any order, among any others.
//!
//! Fields are numbers, so a quote is a character like any other and refused as one: an unclosed quote would
//! otherwise swallow the rows after it.

use super::{Place, TraceError};

/// The rows of a table, with the wanted columns only, in the order asked for.
pub struct Table<'a, const COLUMNS: usize> {
    text: &'a str,
    reader: csv::Reader<&'a [u8]>,
    columns: [&'static str; COLUMNS],
    positions: [usize; COLUMNS],
    record: csv::StringRecord,
}

impl<'a, const COLUMNS: usize> Table<'a, COLUMNS> {
    /// Reads the header.
    pub fn new(text: &'a str, format: &'static str, columns: [&'static str; COLUMNS]) -> Result<Self, TraceError> {
        let mut reader = csv::ReaderBuilder::new().quoting(false).trim(csv::Trim::All).from_reader(text.as_bytes());
        let header = reader.headers().map_err(|error| refusal(text, error))?;
        let mut positions = [0; COLUMNS];
        for (position, &column) in positions.iter_mut().zip(&columns) {
            *position = header.iter().position(|name| name == column).ok_or(TraceError::MissingColumn {
                line: 1,
                column,
                format,
            })?;
        }
        Ok(Table { text, reader, columns, positions, record: csv::StringRecord::new() })
    }

    /// The next row's fields with their places; `None` after the last.
    pub fn next_row(&mut self) -> Result<Option<[(Place, &str); COLUMNS]>, TraceError> {
        if !self.reader.read_record(&mut self.record).map_err(|error| refusal(self.text, error))? {
            return Ok(None);
        }
        let line = line_of(self.text, self.record.position());
        Ok(Some(std::array::from_fn(|index| {
            let place = Place { line, column: self.columns[index] };
            (place, self.record.get(self.positions[index]).unwrap_or_default())
        })))
    }
}

/// The line a record stands on: its position is that of the blank lines before it.
fn line_of(text: &str, position: Option<&csv::Position>) -> u64 {
    position.map_or(1, |position| {
        let rest = &text.as_bytes()[(position.byte() as usize).min(text.len())..];
        let blank = rest.iter().take_while(|byte| byte.is_ascii_whitespace());
        position.line() + blank.filter(|&&byte| byte == b'\n').count() as u64
    })
}

fn refusal(text: &str, error: csv::Error) -> TraceError {
    let line = line_of(text, error.position());
    match *error.kind() {
        csv::ErrorKind::UnequalLengths { expected_len: expected, len: found, .. } => {
            TraceError::FieldCount { line, found, expected }
        }
        _ => TraceError::Csv { line, reason: error.to_string() },
    }
}
