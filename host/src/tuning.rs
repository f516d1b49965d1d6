//! Measured choices of a kernel: what batches took by each, on one machine.
//!
//! In: times of whole batches by both kernels, as `oxattn tune` takes them. Out: a [`Tuning`], which is a small text file
//! too, and for a batch the times of batches like it. A [`Device`](crate::Device) given one has its attentions choose by it
//! where it knows such batches, and by the rule of lengths where it does not.
//!
//! Batches are alike if their attentions agree in dtype, head dim, KV heads, query heads a KV head, page size and kernel
//! (plain, modified by whatever variants, or a user-defined one), and their numbers of requests, packed rows and keys and the
//! prompts' part of the work round down to the same powers of two.
//!
//! Invariant: equal measurements, in whatever order, are equal bytes; a file that was cut or garbled is refused with its line.
//! Times of another card, driver or kernel bundle decide nothing.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::attention::{BatchLengths, Kernel};
use crate::config::{AttentionConfig, DType};
use crate::page_table::{PageTable, QueryLengths};

mod file;

pub use file::{LineError, TuningError};

/// What times hold for.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Machine {
    /// The card's name.
    pub card: String,
    /// The driver's CUDA version, 1000 * major + 10 * minor.
    pub driver: u32,
    /// The hash of the source that the crate's kernels were built from. Bundles of user-defined variants do not count: after
    /// one was built anew its times must be taken anew.
    pub bundle: String,
}

/// Why a device makes no use of a tuning that it was given.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TuningMismatch {
    /// Taken on another card.
    #[error("its times are of the card {measured}; this is {here}")]
    Card {
        /// The tuning's.
        measured: String,
        /// The device's.
        here: String,
    },
    /// Taken under another driver.
    #[error("its times are of CUDA driver version {measured}; this is {here}")]
    Driver {
        /// The tuning's.
        measured: u32,
        /// The device's.
        here: u32,
    },
    /// Taken of other kernels.
    #[error("its times are of the kernels {measured}; these are {here}")]
    Bundle {
        /// The tuning's.
        measured: String,
        /// The device's.
        here: String,
    },
}

impl Machine {
    /// One by its names, with single blanks between their words.
    pub fn new(card: &str, driver: u32, bundle: &str) -> Machine {
        let words = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
        Machine { card: words(card), driver, bundle: words(bundle) }
    }

    /// Whether times taken on it hold `here`.
    pub fn check(&self, here: &Machine) -> Result<(), TuningMismatch> {
        if self.card != here.card {
            return Err(TuningMismatch::Card { measured: self.card.clone(), here: here.card.clone() });
        }
        if self.driver != here.driver {
            return Err(TuningMismatch::Driver { measured: self.driver, here: here.driver });
        }
        if self.bundle != here.bundle {
            return Err(TuningMismatch::Bundle { measured: self.bundle.clone(), here: here.bundle.clone() });
        }
        Ok(())
    }
}

/// What batches that are alike took, all together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Times {
    /// Nanoseconds by the attend kernel.
    pub attend_ns: u64,
    /// By the prefill kernel.
    pub prefill_ns: u64,
    /// How many there were.
    pub batches: u32,
}

impl Times {
    /// The kernel that took less time; the attend kernel if both took the same.
    pub fn faster(&self) -> Kernel {
        if self.prefill_ns < self.attend_ns { Kernel::Prefill } else { Kernel::Attend }
    }

    /// What a batch took by a kernel, in the mean.
    pub fn mean_us(&self, kernel: Kernel) -> f64 {
        let ns = match kernel {
            Kernel::Attend => self.attend_ns,
            Kernel::Prefill => self.prefill_ns,
        };
        ns as f64 / 1e3 / self.batches.max(1) as f64
    }
}

/// What attentions have in common whose times say something about each other.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Shape {
    dtype: &'static str,
    head_dim: u32,
    kv_heads: u32,
    group: u32,
    /// `plain`, `modified`, or `custom.` and the name of a user-defined variant.
    variant: String,
    /// 0 where keys and values are ragged.
    page_size_tokens: u32,
}

/// Which dtypes kernels have.
const DTYPES: [DType; 2] = [DType::Bf16, DType::F16];

impl Shape {
    fn new(config: &AttentionConfig) -> Shape {
        Shape {
            dtype: config.dtype.name(),
            head_dim: config.head_dim,
            kv_heads: config.kv_heads,
            group: config.group(),
            variant: match config.custom_variant {
                Some(name) => format!("custom.{name}"),
                None if config.is_plain() => "plain".to_owned(),
                None => "modified".to_owned(),
            },
            page_size_tokens: if config.ragged { 0 } else { config.page_size_tokens },
        }
    }
}

/// What batches of a shape have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Bucket {
    /// Rounded down to a power of two, as the next are; 0 stays 0.
    requests: u64,
    /// Packed query rows.
    rows: u64,
    keys: u64,
    /// Into how many parts, a power of two, the work must be cut for the prompts to have one; 0 where there are none.
    prompt_parts: u64,
}

/// The most parts that are told apart.
const MOST_PROMPT_PARTS: u64 = 1 << 10;

impl Bucket {
    pub fn new(lengths: &BatchLengths) -> Bucket {
        let floor = |number: u64| if number == 0 { 0 } else { 1 << number.ilog2() };
        let prompt_parts = match lengths.prompt_work {
            0 => 0,
            prompts => lengths.work.div_ceil(prompts).next_power_of_two().min(MOST_PROMPT_PARTS),
        };
        Bucket { requests: floor(lengths.requests), rows: floor(lengths.rows), keys: floor(lengths.keys), prompt_parts }
    }
}

/// The times of some batches of one attention.
#[derive(Clone, Debug, Default)]
pub(crate) struct Measured(Vec<(Bucket, Times)>);

impl Measured {
    /// Of batches like one.
    pub fn get(&self, bucket: Bucket) -> Option<Times> {
        let index = self.0.binary_search_by_key(&bucket, |(bucket, _)| *bucket).ok()?;
        Some(self.0[index].1)
    }
}

/// What batches took on one machine.
///
/// ```
/// use oxattn::{AttentionConfig, Kernel, Machine, PageTable, QueryLengths, Tuning};
/// use std::time::Duration;
///
/// let mut tuning = Tuning::new(Machine::new("NVIDIA H200", 13000, "5eed"));
/// let config = AttentionConfig::new(32, 8, 128, 16);
/// let table = PageTable::block_table(16, 64, &[1024u32; 64])?;
/// let [attend, prefill] = [72, 69].map(Duration::from_micros);
/// tuning.record(&config, &table, QueryLengths::uniform(8), attend, prefill)?;
///
/// let text = tuning.to_string();
/// assert_eq!(text.parse::<Tuning>()?, tuning);
/// // Numbers from one power of two up to the next are alike.
/// let like_it = PageTable::block_table(16, 64, &[1000u32; 70])?;
/// let times = tuning.times(&config, &like_it, QueryLengths::uniform(8))?;
/// assert_eq!(times.map(|times| times.faster()), Some(Kernel::Prefill));
/// let fewer = PageTable::block_table(16, 64, &[1024u32; 63])?;
/// assert_eq!(tuning.times(&config, &fewer, QueryLengths::uniform(8))?, None);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tuning {
    machine: Machine,
    times: BTreeMap<(Shape, Bucket), Times>,
}

impl Tuning {
    /// One without times.
    pub fn new(machine: Machine) -> Tuning {
        Tuning { machine, times: BTreeMap::new() }
    }

    /// What the times hold for.
    pub fn machine(&self) -> &Machine {
        &self.machine
    }

    /// Kinds of batches of which there are times.
    pub fn len(&self) -> usize {
        self.times.len()
    }

    /// Whether there are no times.
    pub fn is_empty(&self) -> bool {
        self.times.is_empty()
    }

    /// Adds what a batch took by each kernel to the times of batches like it.
    ///
    /// # Errors
    /// Refuses query lengths for another number of requests, and a user-defined variant whose name the file cannot hold.
    pub fn record(
        &mut self,
        config: &AttentionConfig,
        table: &PageTable<'_>,
        queries: QueryLengths<'_>,
        attend: Duration,
        prefill: Duration,
    ) -> Result<(), TuningError> {
        queries.check_requests(table.requests())?;
        let shape = Shape::new(config);
        file::check_variant(&shape.variant).map_err(|_| TuningError::Variant { name: shape.variant.clone() })?;
        let bucket = Bucket::new(&BatchLengths::new(table, queries, config));
        let times = self.times.entry((shape, bucket)).or_default();
        let ns = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        times.attend_ns = times.attend_ns.saturating_add(ns(attend));
        times.prefill_ns = times.prefill_ns.saturating_add(ns(prefill));
        times.batches = times.batches.saturating_add(1);
        Ok(())
    }

    /// What batches like one took.
    ///
    /// # Errors
    /// Refuses query lengths for another number of requests.
    pub fn times(
        &self,
        config: &AttentionConfig,
        table: &PageTable<'_>,
        queries: QueryLengths<'_>,
    ) -> Result<Option<Times>, TuningError> {
        queries.check_requests(table.requests())?;
        let bucket = Bucket::new(&BatchLengths::new(table, queries, config));
        Ok(self.times.get(&(Shape::new(config), bucket)).copied())
    }

    /// Those of one attention's batches.
    pub(crate) fn of(&self, config: &AttentionConfig) -> Measured {
        let shape = Shape::new(config);
        let of_shape = self.times.iter().filter(|((found, _), _)| *found == shape);
        Measured(of_shape.map(|((_, bucket), times)| (*bucket, *times)).collect())
    }
}

/// A tuning that a device was given, and why it is of no use there, if so.
#[derive(Debug)]
pub(crate) struct GivenTuning {
    pub tuning: Tuning,
    pub mismatch: Option<TuningMismatch>,
}

#[cfg(test)]
mod tests;
