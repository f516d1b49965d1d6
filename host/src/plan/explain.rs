//! Why a plan is as it is: the cuts, the queues' loads and the bytes, as data and as text.

use std::fmt;

use kernels_gpu::abi::plan::WorkItem;
use kernels_gpu::abi::tile::{ATTEND_TILE_ROWS, Teams};

use super::cost::{Cost, TILE_COST};
use super::{Plan, Sharing, SplitMode};

/// How even the queues are. A load is the sum of its items' [`Cost`], in tiles of short items.
#[derive(Clone, Debug, PartialEq)]
pub struct Balance {
    /// Load of each queue.
    pub queue_loads: Vec<f64>,
    /// Smallest load.
    pub min: f64,
    /// Mean load.
    pub mean: f64,
    /// Largest load: the plan's predicted time in tiles.
    pub max: f64,
}

impl Balance {
    /// Part of the queues' time that is work: mean over largest load, 1 for an empty plan.
    pub fn efficiency(&self) -> f64 {
        if self.max == 0.0 { 1.0 } else { self.mean / self.max }
    }
}

/// A plan's figures; its `Display` is the text of `oxattn plan`.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Explain {
    /// Packed query rows of a short item, and of a tall one, at most; 0 where there are no tall ones.
    pub tile_rows: [u32; 2],
    /// Keys of a tile.
    pub tile_tokens: u32,
    /// How units were cut.
    pub mode: SplitMode,
    /// Requests of the batch.
    pub requests: usize,
    /// Query tokens of the batch.
    pub query_tokens: u64,
    /// Keys of the batch.
    pub kv_tokens: u64,
    /// (Request, row tile) pairs, each for all KV heads; of keys that requests share, row tiles of several.
    pub units: u64,
    /// Units that are tall: their many rows take longer to compute than their keys to arrive.
    pub tall_units: u64,
    /// Units cut in two or more pieces.
    pub cut_units: u64,
    /// Most pieces of one unit.
    pub most_pieces: u32,
    /// What became of prefixes in common; `None` where the table names none.
    pub sharing: Option<Sharing>,
    /// Tiles of the longest unit.
    pub longest_unit_tiles: u32,
    /// Load the planner aimed at for a queue, in tiles of short items.
    pub share_tiles: f64,
    /// Work items.
    pub items: u32,
    /// Teams of blocks, blocks of a team, and KV heads a block takes one after another.
    pub teams: Teams,
    /// Partial states.
    pub partial_rows: u32,
    /// Bytes of keys and values the attend kernel reads.
    pub kv_bytes: u64,
    /// Bytes of partial states, written once and read once.
    pub partial_bytes: u64,
    /// Bytes of the image.
    pub image_bytes: u64,
    /// How even the queues are.
    pub balance: Balance,
    /// What the device reads from its memory, where the planner's target says.
    pub read_gb_per_s: Option<u32>,
    /// Microseconds of a run there, by [`Plan::predict_us`].
    pub predicted_us: Option<f64>,
}

/// Keys that an item reads.
pub(super) fn keys(item: &WorkItem) -> u64 {
    (item.kv_end_tokens - item.kv_begin_tokens) as u64
}

impl Plan {
    /// The load of each queue.
    pub fn balance(&self) -> Balance {
        let load = |(item, cost): (&WorkItem, Cost)| cost.of(self.tiles(item)) as f64 / TILE_COST as f64;
        let queue_loads: Vec<f64> = self.costs().map(|items| items.map(load).sum()).collect();
        Balance {
            min: queue_loads.iter().copied().reduce(f64::min).unwrap_or(0.0),
            max: queue_loads.iter().copied().fold(0.0, f64::max),
            mean: queue_loads.iter().sum::<f64>() / queue_loads.len().max(1) as f64,
            queue_loads,
        }
    }

    /// Why the plan is as it is.
    pub fn explain(&self) -> Explain {
        let key_bytes = self.config.kv_heads as u64 * self.config.key_and_value_bytes();
        let state_columns = self.target.state_columns_of(&self.config) as u64;
        let keys: u64 = self.items().iter().map(keys).sum();
        Explain {
            tile_rows: [ATTEND_TILE_ROWS, self.target.tall_rows],
            tile_tokens: self.target.tile_tokens,
            mode: self.mode,
            requests: self.totals.requests,
            query_tokens: self.totals.query_tokens,
            kv_tokens: self.totals.kv_tokens,
            units: self.totals.units,
            tall_units: self.totals.tall_units,
            cut_units: self.written.cut_units,
            most_pieces: self.written.most_pieces.max(u32::from(self.header.items > 0)),
            sharing: (self.sharing != Sharing::default()).then_some(self.sharing),
            longest_unit_tiles: self.totals.longest_unit_tiles,
            share_tiles: self.totals.share as f64 / TILE_COST as f64,
            items: self.header.items,
            teams: self.target.teams(self.config.kv_heads),
            partial_rows: self.header.partial_rows,
            kv_bytes: keys * key_bytes,
            partial_bytes: self.header.partial_rows as u64 * 4 * (state_columns + 1),
            image_bytes: self.header.image_bytes,
            balance: self.balance(),
            read_gb_per_s: self.target.read_gb_per_s,
            predicted_us: self.target.read_gb_per_s.and_then(|rate| self.predict_us(rate as f64)),
        }
    }
}

impl Explain {
    fn why(&self) -> String {
        let (longest, share) = (self.longest_unit_tiles, self.share_tiles);
        match self.mode {
            SplitMode::Unsplit => "uncut: splitting is off".to_owned(),
            SplitMode::FixedSplit { tokens } => format!("cut at multiples of {tokens} keys, rounded up to whole tiles"),
            SplitMode::BatchInvariant => "cut by each request's own lengths, whatever the batch".to_owned(),
            SplitMode::Balanced if self.cut_units == 0 => {
                format!("uncut: whole units fill the queues to within 4% of the share of {share} tiles")
            }
            SplitMode::Balanced => {
                format!("cut where a queue reached its share of {share} tiles; the longest unit has {longest}")
            }
        }
    }
}

impl fmt::Display for Explain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let balance = &self.balance;
        writeln!(
            f,
            "batch     {} requests, {} query tokens, {} keys",
            self.requests, self.query_tokens, self.kv_tokens
        )?;
        let [short, tall] = self.tile_rows;
        match tall {
            0 => writeln!(f, "tile      {short} packed query rows x {} keys", self.tile_tokens)?,
            _ => writeln!(f, "tile      {short} or {tall} packed query rows x {} keys", self.tile_tokens)?,
        }
        writeln!(
            f,
            "units     {} (request, row tile), {} tall, the longest {} tiles",
            self.units, self.tall_units, self.longest_unit_tiles
        )?;
        writeln!(f, "items     {}; {} units cut, in at most {} pieces", self.items, self.cut_units, self.most_pieces)?;
        writeln!(f, "why       {}", self.why())?;
        match self.sharing {
            Some(Sharing { not_shared: Some(reason), .. }) => writeln!(f, "shared    nothing: {reason}")?,
            Some(Sharing { shared_requests, saved_kv_tokens, .. }) => {
                writeln!(f, "shared    {saved_kv_tokens} keys of {shared_requests} requests are not read once more")?;
            }
            None => {}
        }
        writeln!(
            f,
            "teams     {} of {} blocks, {} KV heads a block; load min {} mean {:.1} max {} tiles, {:.1}% busy",
            self.teams.teams,
            self.teams.blocks,
            self.teams.heads_per_block,
            balance.min,
            balance.mean,
            balance.max,
            100.0 * balance.efficiency()
        )?;
        writeln!(f, "fold      {} partial states, {} bytes", self.partial_rows, self.partial_bytes)?;
        write!(f, "bytes     {} of keys and values, {} of plan", self.kv_bytes, self.image_bytes)?;
        match self.read_gb_per_s.zip(self.predicted_us) {
            Some((rate, us)) => write!(f, "\ntime      {us:.1} us predicted, where memory is read at {rate} GB/s"),
            None => Ok(()),
        }
    }
}
