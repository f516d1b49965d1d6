//! The batch as the planner sees it: one record a request, longest first, and the units each one has.
//!
//! In: page table and query lengths. Out: requests that have query tokens, by falling length of their pieces, and
//! for each its row tiles with the keys their rows may see. All KV heads of a row tile are alike, and go with it. Groups of
//! requests that share their first keys ([`super::shared`]) are requests here too, with those keys; their members begin
//! after them.

use kernels_gpu::abi::divisor::Divisor;
use kernels_gpu::abi::tile::ATTEND_TILE_ROWS;

use super::cost::{Cost, MEMORY_BOUND_ROWS};
use super::shared::{NotShared, Packing, Shared, Sharing};
use super::spread::PieceRule;
use super::{Limits, PlanError, SplitMode, Target, Totals};
use crate::config::AttentionConfig;
use crate::page_table::{Lengths, PageTable, Pages, QueryLengths};

/// Buckets of the sort by length: requests whose pieces differ by less than 1/256 of the longest request may keep
/// their order.
const BUCKETS: usize = 256;

/// Row tiles a team, as a fraction, below which tall ones are half as tall: 1.5. A prompt of 1024 tokens took an H200
/// 60.4 us in 32 tiles of 128 rows, cut along their keys to fill 33 queues, and 37.6 us in 64 of 64 rows.
const ROW_TILES_A_TEAM: (u64, u64) = (3, 2);

/// Elements of a piece's partial state, its rows' outputs, from which a fold counts beside a tile: 8 rows of 256.
const LONG_STATE_ELEMENTS: u32 = 2048;

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Request {
    pub index: u32,
    pub query_begin: u32,
    pub query_len: u32,
    pub kv_len: u32,
    pub page_begin: u32,
    /// Tiles of its row tiles, at most: of all its keys, but for windows.
    pub tiles: u32,
    /// Tiles of a piece of its units, by rule.
    pub piece_tiles: u32,
    /// The tile where its own keys begin.
    pub first_tile: u32,
    /// One more than the number of the group that it is; 0 for a request of the batch.
    group: u32,
}

impl Request {
    /// Which group of requests this is.
    #[inline(always)]
    pub fn unit(&self) -> Option<usize> {
        (self.group > 0).then(|| self.group as usize - 1)
    }
}

/// Some packed rows of a request, for every KV head: up to 16, or many more where it is tall.
#[derive(Clone, Copy, Debug)]
pub(super) struct RowTile {
    pub row_begin: u32,
    pub rows: u32,
    pub is_tall: bool,
    /// Which of the two runs of even and of odd queues its pieces go to.
    pub runs: [u32; 2],
    pub cost: Cost,
    /// Tile of the first key that a row of the tile sees.
    pub first_tile: u32,
    /// One past the last key that a row of the tile sees.
    pub kv_end: u32,
    /// Tiles from there up to `kv_end`.
    pub tiles: u32,
}

/// Keys that a query token sees around its own; more than there are where there is no window.
#[derive(Clone, Copy, Debug)]
struct Window {
    left: i64,
    right: i64,
}

impl Window {
    /// `None` where the causal rule, or its absence, says all.
    fn new(config: &AttentionConfig) -> Option<Window> {
        let is_needed = config.window_left.is_some() || !config.causal && config.window_right.is_some();
        let left = config.window_left.unwrap_or(u32::MAX) as i64;
        is_needed.then_some(Window { left, right: config.keys_after() as i64 })
    }
}

#[derive(Debug)]
pub(super) struct Batch {
    pub heads: u32,
    pub group: Divisor,
    pub tile_tokens: Divisor,
    pub teams: u32,
    /// Whether a decode's partial state is [`LONG_STATE_ELEMENTS`] or more.
    pub folds_are_long: bool,
    causal: bool,
    window: Option<Window>,
    rule: PieceRule,
    /// Packed rows of a tall row tile, at most; 0 where there are none.
    most_tall_rows: u32,
    /// Those of this batch: half as many where full ones would be too few to balance.
    tall_rows: u32,
    /// Whether the height may depend on the batch.
    is_free: bool,
    /// Packed rows up to which a row tile is short.
    short_rows: u32,
    /// Full length; the first `occupied` hold the batch.
    requests: Vec<Request>,
    occupied: usize,
    totals: Totals,
    packing: Packing,
    /// Whether groups are dealt after requests, to be cut where these leave room: the members' own items then are in many
    /// queues, and with them the folds, which the last one of an item's rows has to do.
    groups_last: bool,
    pub shared: Shared,
    /// Why plans never share, if so.
    never_shared: Option<NotShared>,
    pub sharing: Sharing,
}

impl Batch {
    /// Room for all batches within the limits.
    pub fn new(config: &AttentionConfig, target: Target, mode: SplitMode, limits: &Limits) -> Batch {
        // Tall and short items add up in different orders, so where no chunking may show, all are of one kind.
        let is_one_kind = target.tall_rows > 0 && (target.all_tall || matches!(mode, SplitMode::FixedSplit { .. }));
        let nonzero = |n: u32| Divisor::new(n).expect("checked: 1 to 2^31");
        // A request without query tokens takes no room.
        let occupied = limits.max_requests.min(limits.max_query_tokens) as usize;
        let never_shared = NotShared::always(config, mode);
        let levels = if never_shared.is_none() { config.shared_prefix_levels } else { 0 };
        let groups = if levels > 0 { occupied } else { 0 };
        let (group, tile_tokens) = (nonzero(config.group()), nonzero(target.tile_tokens));
        let short_rows = if is_one_kind { 0 } else { ATTEND_TILE_ROWS };
        Batch {
            heads: config.kv_heads,
            group,
            tile_tokens,
            teams: target.teams(config.kv_heads).teams,
            folds_are_long: config.group().min(ATTEND_TILE_ROWS) * config.value_head_dim >= LONG_STATE_ELEMENTS,
            causal: config.causal,
            window: Window::new(config),
            rule: PieceRule::new(config, target, mode),
            most_tall_rows: target.tall_rows,
            tall_rows: target.tall_rows,
            is_free: !target.all_tall && matches!(mode, SplitMode::Balanced | SplitMode::Unsplit),
            short_rows,
            requests: vec![Request::default(); occupied + groups],
            occupied: 0,
            totals: Totals::default(),
            packing: Packing { group, tile_tokens, short_rows, target },
            groups_last: mode == SplitMode::Balanced && !target.all_tall,
            shared: Shared::new(levels, config.always_shares, limits.max_requests as usize, occupied),
            never_shared,
            sharing: Sharing::default(),
        }
    }

    /// Finds what a batch shares.
    pub fn find_sharing(&mut self, table: &PageTable<'_>, query: QueryLengths<'_>) -> Sharing {
        self.shared.clear();
        if table.shared_tokens().iter().all(|&tokens| tokens == 0) {
            return Sharing::default();
        }
        match self.never_shared {
            None => self.shared.find(table, query, &self.packing, self.teams),
            not_shared => Sharing { not_shared, ..Sharing::default() },
        }
    }

    /// Reads a batch and checks it against the limits. On an error the batch is unusable.
    pub fn gather(&mut self, table: &PageTable<'_>, query: QueryLengths<'_>, limits: &Limits) -> Result<(), PlanError> {
        let over = |what, limit_field, got, limit| Err(PlanError::OverLimit { what, limit_field, got, limit });
        let requests = table.requests() as u64;
        if requests > limits.max_requests as u64 {
            return over("requests", "max_requests", requests, limits.max_requests as u64);
        }
        let query_tokens = match query.0 {
            Lengths::Uniform(query_len) => requests * query_len as u64,
            Lengths::Indptr(indptr) => indptr[indptr.len() - 1] as u64,
        };
        if query_tokens > limits.max_query_tokens as u64 {
            return over("query tokens", "max_query_tokens", query_tokens, limits.max_query_tokens as u64);
        }
        let limit = limits.max_kv_len_tokens;
        let longest = table.kv_lens().iter().copied().max().unwrap_or(0);
        if longest > limit {
            let request = table.kv_lens().iter().position(|&kv_len| kv_len > limit).expect("the longest is");
            return Err(PlanError::RequestOverLimit { request, kv_len: table.kv_lens()[request], limit });
        }
        let kv_tokens = table.kv_lens().iter().map(|&kv_len| kv_len as u64).sum();
        if kv_tokens > limits.max_kv_tokens {
            return over("keys", "max_kv_tokens", kv_tokens, limits.max_kv_tokens);
        }

        self.totals = Totals { requests: requests as usize, query_tokens, kv_tokens, ..Totals::default() };
        self.sharing = self.find_sharing(table, query);
        // One loop for each pair of forms, so that none chooses inside it.
        let kv_lens = table.kv_lens();
        let stride = match table.pages() {
            Pages::Rows(stride) => stride,
            // Each request has one page, as long as need be, whose id is the first of its rows.
            Pages::Ragged(_) => 1,
            Pages::Csr(_) => 0,
        };
        match (table.pages(), query.0) {
            (Pages::Csr(pages), Lengths::Uniform(n)) => {
                self.read(kv_lens, longest, |r| pages[r], |r| (r as u32 * n, n))
            }
            (Pages::Csr(pages), Lengths::Indptr(indptr)) => {
                self.read(kv_lens, longest, |r| pages[r], |r| (indptr[r], indptr[r + 1] - indptr[r]))
            }
            (_, Lengths::Uniform(n)) => self.read(kv_lens, longest, |r| r as u32 * stride, |r| (r as u32 * n, n)),
            (_, Lengths::Indptr(indptr)) => {
                self.read(kv_lens, longest, |r| r as u32 * stride, |r| (indptr[r], indptr[r + 1] - indptr[r]))
            }
        }
        Ok(())
    }

    /// Reads the requests into their places by falling length of their pieces: a counting sort, so stable.
    #[inline(always)]
    fn read(
        &mut self,
        kv_lens: &[u32],
        longest: u32,
        page_begin: impl Fn(usize) -> u32,
        query: impl Fn(usize) -> (u32, u32),
    ) {
        self.tall_rows = self.most_tall_rows;
        let half = self.most_tall_rows / 2;
        if self.is_free && half > ATTEND_TILE_ROWS && half.is_multiple_of(ATTEND_TILE_ROWS) {
            let enough = self.teams as u64 * ROW_TILES_A_TEAM.0 / ROW_TILES_A_TEAM.1;
            let (mut all, mut tall) = (0, 0);
            for index in 0..kv_lens.len() {
                let packed_rows = query(index).1 as u64 * self.group.get() as u64;
                let tiles = packed_rows.div_ceil(self.most_tall_rows as u64);
                all += tiles;
                tall += if packed_rows > ATTEND_TILE_ROWS as u64 { tiles } else { 0 };
                if all >= enough {
                    break;
                }
            }
            if tall > 0 && all < enough {
                self.tall_rows = half;
            }
        }
        let scale = ((BUCKETS as u64) << 32) / (self.tiles(longest) as u64 + 1);
        let bucket = |piece_tiles: u32| BUCKETS - 1 - ((piece_tiles as u64 * scale) >> 32) as usize % BUCKETS;
        let mut place = [0u32; BUCKETS];
        for (index, &kv_len) in kv_lens.iter().enumerate() {
            let (_, query_len) = query(index);
            if query_len > 0 {
                let tiles = self.most_tiles(query_len, kv_len) - self.shared.first_tile(index);
                place[bucket(self.piece_tiles(query_len, tiles))] += 1;
            }
        }
        let group_bucket = |tiles: u32| if self.groups_last { BUCKETS - 1 } else { bucket(tiles) };
        for unit in self.shared.units() {
            place[group_bucket(unit.end_tiles - unit.begin_tiles)] += 1;
        }
        let mut occupied = 0;
        for begin in &mut place {
            occupied += std::mem::replace(begin, occupied);
        }
        self.occupied = occupied as usize;

        let mut totals = self.totals;
        for (index, &kv_len) in kv_lens.iter().enumerate() {
            let (query_begin, query_len) = query(index);
            if query_len == 0 {
                continue;
            }
            let first_tile = self.shared.first_tile(index);
            let tiles = self.most_tiles(query_len, kv_len) - first_tile;
            let piece_tiles = self.piece_tiles(query_len, tiles);
            let (index, page_begin) = (index as u32, page_begin(index));
            let request =
                Request { index, query_begin, query_len, kv_len, page_begin, tiles, piece_tiles, first_tile, group: 0 };
            if query_len * self.group.get() <= self.short_rows && self.window.is_none() {
                totals.units += 1;
                totals.cost += Cost::SHORT.of(tiles);
                totals.longest_unit_tiles = totals.longest_unit_tiles.max(tiles);
                totals.costliest_piece = totals.costliest_piece.max(Cost::SHORT.of(piece_tiles));
            } else {
                self.add_up(&request, &mut totals);
            }
            totals.max_query_len_tokens = totals.max_query_len_tokens.max(query_len);
            let place = &mut place[bucket(piece_tiles)];
            self.requests[*place as usize] = request;
            *place += 1;
        }
        for (index, unit) in self.shared.units().iter().enumerate() {
            let tiles = unit.end_tiles - unit.begin_tiles;
            let request = Request {
                index: unit.first.request,
                query_begin: unit.first.query_begin,
                query_len: unit.query_len,
                kv_len: unit.end_tiles * self.tile_tokens.get(),
                page_begin: unit.page_begin(),
                tiles,
                piece_tiles: tiles,
                first_tile: unit.begin_tiles,
                group: index as u32 + 1,
            };
            self.add_up(&request, &mut totals);
            let place = &mut place[group_bucket(tiles)];
            self.requests[*place as usize] = request;
            *place += 1;
        }
        self.totals = totals;
    }

    /// Adds a request's units.
    #[inline(always)]
    fn add_up(&self, request: &Request, totals: &mut Totals) {
        for tile in self.row_tiles(request) {
            totals.units += 1;
            totals.tall_units += u64::from(tile.is_tall);
            totals.cost += tile.cost.of(tile.tiles);
            totals.longest_unit_tiles = totals.longest_unit_tiles.max(tile.tiles);
            totals.costliest_piece = totals.costliest_piece.max(tile.cost.of(request.piece_tiles));
        }
    }

    /// The requests that have query tokens, longest first.
    pub fn requests(&self) -> &[Request] {
        &self.requests[..self.occupied]
    }

    /// Tiles that `tokens` keys fill.
    pub fn tiles(&self, tokens: u32) -> u32 {
        if tokens == 0 { 0 } else { self.tile_tokens.divide(tokens - 1).0 + 1 }
    }

    /// Packed rows of the row tiles of a request, but for the last.
    #[inline(always)]
    fn tile_rows(&self, packed_rows: u32) -> u32 {
        if packed_rows <= self.short_rows || self.tall_rows == 0 { ATTEND_TILE_ROWS } else { self.tall_rows }
    }

    /// Tiles of a piece of any unit of a request, by rule.
    #[inline(always)]
    fn piece_tiles(&self, query_len: u32, tiles: u32) -> u32 {
        let packed_rows = query_len * self.group.get();
        self.rule.piece_tiles(|| packed_rows.div_ceil(self.tile_rows(packed_rows)), tiles)
    }

    /// Tiles that a row tile of a request has at most.
    fn most_tiles(&self, query_len: u32, kv_len: u32) -> u32 {
        let tiles = self.tiles(kv_len);
        let Some(Window { left, right }) = self.window else { return tiles };
        // The rows are those of so many tokens, and their keys begin anywhere in a tile.
        let rows = self.tile_rows(query_len * self.group.get());
        let tokens = query_len.min((rows - 1).div_ceil(self.group.get()) + 1) as i64;
        let tile_tokens = self.tile_tokens.get() as i64;
        ((left + right + tokens + tile_tokens - 2) / tile_tokens + 1).min(tiles as i64) as u32
    }

    /// Tile of the first key that rows `row_begin .. row_end` see through a window, and one past their last key.
    fn windowed(&self, window: Window, request: &Request, row_begin: u32, row_end: u32) -> (u32, u32) {
        let position = |row: u32| self.group.divide(row).0 as i64 + request.kv_len as i64 - request.query_len as i64;
        let end = (position(row_end - 1) + window.right + 1).clamp(0, request.kv_len as i64);
        let begin = (position(row_begin) - window.left).clamp(0, end);
        (self.tile_tokens.divide(begin as u32).0, end as u32)
    }

    /// A request's row tiles, from the last, which sees the most keys, to the first.
    #[inline(always)]
    pub fn row_tiles<'a>(&'a self, request: &'a Request) -> impl ExactSizeIterator<Item = RowTile> + use<'a> {
        let packed_rows = request.query_len * self.group.get();
        let tile_rows = self.tile_rows(packed_rows);
        let shared = request.unit().map_or(&[][..], |unit| self.shared.row_tiles_of(unit));
        let tiles = if shared.is_empty() { packed_rows.div_ceil(tile_rows) } else { shared.len() as u32 };
        (0..tiles).rev().map(move |tile| match shared.get(tile as usize) {
            None => self.row_tile(request, packed_rows, tile_rows, tile),
            Some(rows) => RowTile {
                row_begin: rows.row_begin,
                rows: rows.rows,
                is_tall: self.packing.is_tall(rows.rows),
                runs: self.runs(self.packing.is_tall(rows.rows), rows.rows),
                cost: self.packing.cost(rows.rows),
                first_tile: request.first_tile,
                kv_end: request.kv_len,
                tiles: request.tiles,
            },
        })
    }

    /// A request's row tile, if it has but one.
    #[inline(always)]
    pub fn only_row_tile(&self, request: &Request) -> Option<RowTile> {
        let packed_rows = request.query_len * self.group.get();
        let tile_rows = self.tile_rows(packed_rows);
        (packed_rows <= tile_rows).then(|| self.row_tile(request, packed_rows, tile_rows, 0))
    }

    #[inline(always)]
    fn row_tile(&self, request: &Request, packed_rows: u32, tile_rows: u32, tile: u32) -> RowTile {
        let row_begin = tile * tile_rows;
        let row_end = packed_rows.min(row_begin + tile_rows);
        let (first_tile, kv_end, tiles) = if let Some(window) = self.window {
            let (first_tile, kv_end) = self.windowed(window, request, row_begin, row_end);
            (first_tile, kv_end, self.tiles(kv_end) - first_tile)
        } else if self.causal && row_end < packed_rows {
            let hidden = request.query_len - 1 - self.group.divide(row_end - 1).0;
            let kv_end = request.kv_len.saturating_sub(hidden);
            // A request of several row tiles shares nothing.
            (0, kv_end, self.tiles(kv_end))
        } else {
            (request.first_tile, request.kv_len, request.tiles)
        };
        let rows = row_end - row_begin;
        let (is_tall, cost) = (self.packing.is_tall(rows), self.packing.cost(rows));
        let runs = self.runs(is_tall, packed_rows);
        RowTile { row_begin, rows, is_tall, runs, cost, first_tile, kv_end, tiles }
    }

    /// Which run of even and of odd queues takes pieces of a row tile among so many packed rows. Where all items are tall, odd
    /// queues begin with what memory bounds and even ones with what arithmetic does.
    #[inline(always)]
    fn runs(&self, is_tall: bool, packed_rows: u32) -> [u32; 2] {
        match (self.packing.target.all_tall, packed_rows > MEMORY_BOUND_ROWS) {
            (false, _) => [u32::from(!is_tall); 2],
            (true, true) => [0, 1],
            (true, false) => [1, 0],
        }
    }

    /// What piece ends of units are multiples of, counted from key 0, where the mode wants that.
    pub fn cut_multiple_tiles(&self) -> Option<u32> {
        if let PieceRule::Fixed(tiles) = self.rule { Some(tiles) } else { None }
    }

    pub fn totals(&self) -> Totals {
        self.totals
    }
}
