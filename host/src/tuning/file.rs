//! The text of a [`Tuning`]: a line a fact, names and values in turn.
//!
//! ```text
//! oxattn tuning 1
//! card NVIDIA H200
//! driver 13000
//! bundle 5eed
//! entries 1
//! dtype bf16 head_dim 128 kv_heads 8 group 4 variant plain page 16 requests 64 rows 2048 keys 65536 prompts 1/1 attend_ns 72000 prefill_ns 69000 batches 1
//! ```
//!
//! `page` is 0 where keys and values are ragged. `requests`, `rows` and `keys` are powers of two, which stand for all numbers
//! up to the next; `prompts` is the prompts' part of the work, `1/2` for a half up to all, `0/1` for none. Times are sums
//! over the batches. The number of entries tells a file that was cut between lines.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use super::{Bucket, DTYPES, MOST_PROMPT_PARTS, Machine, Shape, Times, Tuning};
use crate::page_table::PageTableError;

/// The version of the format that this code reads and writes.
const VERSION: u32 = 1;
/// What every file begins with, before the version.
const TITLE: &str = "oxattn tuning";

/// Why there is no tuning, or no entry in one.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TuningError {
    /// The file could not be read.
    #[error("tuning {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The file is damaged, or none of ours.
    #[error("tuning {}: {source}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// Where and why.
        source: Box<TuningError>,
    },
    /// A line cannot be read.
    #[error("line {line}: {reason}")]
    Line {
        /// The line, from 1.
        line: usize,
        /// What is wrong with it.
        reason: LineError,
    },
    /// The name of a user-defined variant has blanks.
    #[error("variant {name:?} cannot be written to a tuning; names without blanks can")]
    Variant {
        /// The name.
        name: String,
    },
    /// A batch that does not hold together.
    #[error(transparent)]
    PageTable(#[from] PageTableError),
}

/// What is wrong with a line of a tuning.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LineError {
    /// Another file altogether.
    #[error("`{found}` begins no tuning; `{TITLE} {VERSION}` does")]
    Foreign {
        /// The line, cut to 80 characters.
        found: String,
    },
    /// A format this code does not read.
    #[error("format version {found}; version {VERSION} is supported")]
    Version {
        /// The file's.
        found: String,
    },
    /// Another name than the one that comes next, or none.
    #[error("`{found}` where `{wanted}` must stand")]
    Name {
        /// What stands there, cut to 80 characters; empty at the end of the line or file.
        found: String,
        /// The name that comes next.
        wanted: &'static str,
    },
    /// A value that the name cannot have.
    #[error("{name} is `{found}`; it must be {wanted}")]
    Value {
        /// Its name.
        name: &'static str,
        /// The value, cut to 80 characters.
        found: String,
        /// What is supported.
        wanted: &'static str,
    },
    /// More than a line holds.
    #[error("`{found}` after the end of the line")]
    Rest {
        /// The first word too many, cut to 80 characters.
        found: String,
    },
    /// The file was cut within a line.
    #[error("the line has no end")]
    NoEnd,
    /// Batches of which the file has told already.
    #[error("the same batches as on an earlier line")]
    Again,
    /// Fewer or more entries than the file says it has.
    #[error("the file ends after {found} entries; it says it has {wanted}")]
    Entries {
        /// Entries there are.
        found: usize,
        /// Entries said.
        wanted: usize,
    },
}

impl Tuning {
    /// Reads a file.
    ///
    /// # Errors
    /// Refuses what cannot be read, and a damaged file with its line.
    pub fn load(path: &Path) -> Result<Tuning, TuningError> {
        let text =
            std::fs::read_to_string(path).map_err(|source| TuningError::Read { path: path.to_owned(), source })?;
        text.parse().map_err(|source| TuningError::File { path: path.to_owned(), source: Box::new(source) })
    }
}

impl fmt::Display for Tuning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Machine { card, driver, bundle } = &self.machine;
        write!(f, "{TITLE} {VERSION}\ncard {card}\ndriver {driver}\nbundle {bundle}\n")?;
        writeln!(f, "entries {}", self.times.len())?;
        for ((shape, bucket), times) in &self.times {
            let Shape { dtype, head_dim, kv_heads, group, variant, page_size_tokens } = shape;
            let Bucket { requests, rows, keys, prompt_parts } = bucket;
            let Times { attend_ns, prefill_ns, batches } = times;
            let prompts = if *prompt_parts == 0 { "0/1".to_owned() } else { format!("1/{prompt_parts}") };
            writeln!(
                f,
                "dtype {dtype} head_dim {head_dim} kv_heads {kv_heads} group {group} variant {variant} \
                 page {page_size_tokens} requests {requests} rows {rows} keys {keys} prompts {prompts} \
                 attend_ns {attend_ns} prefill_ns {prefill_ns} batches {batches}"
            )?;
        }
        Ok(())
    }
}

impl FromStr for Tuning {
    type Err = TuningError;

    fn from_str(text: &str) -> Result<Tuning, TuningError> {
        let refuse = |line, reason| TuningError::Line { line, reason };
        let mut lines = text.lines().enumerate().map(|(index, text)| (index + 1, text));
        let end = text.lines().count() + 1;
        let mut header = |name: &'static str| {
            let (line, text) = lines.next().unwrap_or((end, ""));
            let value = text.strip_prefix(name).and_then(|rest| rest.strip_prefix(' '));
            let missing = || refuse(line, LineError::Name { found: excerpt(text), wanted: name });
            value.map(|value| (line, value)).ok_or_else(missing)
        };
        let number = |(line, found): (usize, &str), name| {
            let wanted = "a whole number of at most 32 bits";
            canonical::<u32>(found)
                .ok_or_else(|| refuse(line, LineError::Value { name, found: excerpt(found), wanted }))
        };

        let foreign =
            |_: TuningError| refuse(1, LineError::Foreign { found: excerpt(text.lines().next().unwrap_or_default()) });
        let (line, version) = header(TITLE).map_err(foreign)?;
        if version != VERSION.to_string() {
            return Err(refuse(line, LineError::Version { found: excerpt(version) }));
        }
        if !text.ends_with('\n') {
            return Err(refuse(end - 1, LineError::NoEnd));
        }
        let (_, card) = header("card")?;
        let driver = number(header("driver")?, "driver")?;
        let (_, bundle) = header("bundle")?;
        let wanted = number(header("entries")?, "entries")? as usize;

        let mut tuning = Tuning::new(Machine::new(card, driver, bundle));
        for (line, text) in lines {
            let (key, times) = entry(text).map_err(|reason| refuse(line, reason))?;
            if tuning.times.insert(key, times).is_some() {
                return Err(refuse(line, LineError::Again));
            }
        }
        let found = tuning.times.len();
        if found != wanted {
            return Err(refuse(end - 1, LineError::Entries { found, wanted }));
        }
        Ok(tuning)
    }
}

fn entry(text: &str) -> Result<((Shape, Bucket), Times), LineError> {
    let mut words = Words { rest: text };
    let shape = Shape {
        dtype: words.value("dtype", |found| {
            DTYPES.iter().map(|dtype| dtype.name()).find(|name| *name == found).ok_or("bf16 or f16")
        })?,
        head_dim: words.number("head_dim")?,
        kv_heads: words.number("kv_heads")?,
        group: words.number("group")?,
        variant: words.value("variant", |found| check_variant(found).map(|()| found.to_owned()))?,
        page_size_tokens: words.number("page")?,
    };
    let bucket = Bucket {
        requests: words.power_of_two("requests")?,
        rows: words.power_of_two("rows")?,
        keys: words.power_of_two("keys")?,
        prompt_parts: words.value("prompts", |found| {
            let parts = found.strip_prefix("1/").and_then(canonical::<u64>);
            let is_part = |parts: &u64| parts.is_power_of_two() && *parts <= MOST_PROMPT_PARTS;
            let parts = if found == "0/1" { Some(0) } else { parts.filter(is_part) };
            parts.ok_or("0/1, or 1/1, 1/2 and so on to 1/1024")
        })?,
    };
    let times = Times {
        attend_ns: words.number("attend_ns")?,
        prefill_ns: words.number("prefill_ns")?,
        batches: words.value("batches", |found| canonical(found).filter(|&count| count > 0).ok_or("at least 1"))?,
    };
    match words.rest {
        "" => Ok(((shape, bucket), times)),
        rest => Err(LineError::Rest { found: excerpt(rest) }),
    }
}

/// `plain`, `modified`, or `custom.` and a name without blanks.
pub(super) fn check_variant(text: &str) -> Result<(), &'static str> {
    let is_name = |name: &str| !name.is_empty() && !name.contains(char::is_whitespace);
    match text {
        "plain" | "modified" => Ok(()),
        _ if text.strip_prefix("custom.").is_some_and(is_name) => Ok(()),
        _ => Err("plain, modified, or custom. and a name"),
    }
}

/// A number as `Display` writes it: no sign, no leading zeros.
fn canonical<N: FromStr + ToString>(text: &str) -> Option<N> {
    text.parse().ok().filter(|number: &N| number.to_string() == text)
}

/// The words of a line that are left, a blank between each.
struct Words<'a> {
    rest: &'a str,
}

impl<'a> Words<'a> {
    fn next(&mut self) -> &'a str {
        let (word, rest) = self.rest.split_once(' ').unwrap_or((self.rest, ""));
        self.rest = rest;
        word
    }

    /// The value of the name that comes next; `read` says what it must be where it is not.
    fn value<T>(
        &mut self,
        name: &'static str,
        read: impl FnOnce(&str) -> Result<T, &'static str>,
    ) -> Result<T, LineError> {
        let found = self.next();
        if found != name {
            return Err(LineError::Name { found: excerpt(found), wanted: name });
        }
        let found = self.next();
        read(found).map_err(|wanted| LineError::Value { name, found: excerpt(found), wanted })
    }

    fn number<N: FromStr + ToString>(&mut self, name: &'static str) -> Result<N, LineError> {
        self.value(name, |found| canonical(found).ok_or("a whole number in range"))
    }

    fn power_of_two(&mut self, name: &'static str) -> Result<u64, LineError> {
        let is_power = |number: &u64| *number == 0 || number.is_power_of_two();
        self.value(name, |found| canonical(found).filter(is_power).ok_or("a power of two, or 0"))
    }
}

/// At most 80 characters of `text`.
fn excerpt(text: &str) -> String {
    text.chars().take(80).collect()
}
