//! Shared prefixes: which requests read their first keys together.
//!
//! In: how many leading keys each request has in common with the one before it. Out: [`Unit`]s, the rows of several
//! requests against keys they have in common, and for each request the tile where its own keys begin. Invariant: a unit's
//! rows see all of its keys, and every request keeps a key of its own.
//!
//! Requests side by side with `t` tiles in common form *groups*, which nest: the intervals of longest common prefixes
//! (Abouelhoda, Kurtz and Ohlebusch, "Replacing suffix trees with enhanced suffix arrays", 2004), found with one stack. A
//! group becomes a unit where that costs less than leaving its keys to the groups and requests inside it. The choice is
//! made from the inside out, for every number of levels and as if no unit were around, and then spelled from the outside
//! in, where a unit has to pay from the end of the one around it. So no unit costs more than it saves, but other choices
//! may save more.
//!
//! A request takes part if two like it fit a row tile, so that it has one row tile itself; with more rows there would be
//! nothing to save. Others may stand between.

use super::cost::{Cost, TILE_COST};
use super::{SplitMode, Target};
use crate::config::{AttentionConfig, MAX_SHARED_PREFIX_LEVELS};
use crate::page_table::{PageTable, QueryLengths};
use kernels_gpu::abi::divisor::Divisor;
use kernels_gpu::abi::tile::ATTEND_TILE_ROWS;

/// What a request pays for each unit above it: its rows' partial states, written, read and folded. About a tile, which
/// for the usual 4 rows of 128 moves as many bytes as 8 states. What a batch as a whole must save is measured, below.
const MEMBER_COST: u64 = TILE_COST;

/// What a batch must save to share, in costs of each queue: its pieces of a prefix are short, and a second launch folds
/// them. Measured on an H200, 32/8 heads of 128, with 128 keys of each request's own, in us shared and flat: by the attend
/// kernel 16 requests with 1024 keys in common 18.2 and 14.5, with 2048 19.8 and 22.8; 64 with 512 35.6 and 26.5, with 1024
/// 31.6 and 43.1; by the prefill kernel (and flat by the other) 16 with 1024 16.6 and 14.5, with 2048 14.2 and 22.8; 64 with
/// 256 22.0 and 18.5, with 512 22.4 and 26.5.
const START_COST: i64 = 26;

/// Numbers of levels that may be left, 0 to the most.
const CHOICES: usize = MAX_SHARED_PREFIX_LEVELS as usize + 1;

/// What became of a batch's shared prefixes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Sharing {
    /// Requests some of whose keys are read for others too.
    pub shared_requests: usize,
    /// Keys that are not read once more, over all requests.
    pub saved_kv_tokens: u64,
    /// Why nothing is shared, where the table says that something could be.
    pub not_shared: Option<NotShared>,
}

/// Why a plan shares nothing. The plan is then the one of a table without prefixes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum NotShared {
    /// The attention has no levels:
    /// [`AttentionConfig::with_shared_prefixes`](crate::AttentionConfig::with_shared_prefixes).
    NoLevels,
    /// Results must not depend on the rest of the batch.
    SplitMode,
    /// Windows go by the position of a row in its request, as the next do.
    Window,
    /// ALiBi goes by positions.
    Alibi,
    /// Masks go by requests.
    Mask,
    /// Temperatures go by requests.
    Temperatures,
    /// The parts of a row's outputs are weighed by their number, which differs between requests that share.
    Sigmoid,
    /// Queries are rotated by the position of a row in its request, unless positions are given.
    Rope,
    /// A user-defined variant may ask for a row's position or request.
    CustomVariant,
    /// No group of requests has enough in common to save time.
    DoesNotPay,
}

impl std::fmt::Display for NotShared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            NotShared::NoLevels => "the attention is made without levels of shared prefixes",
            NotShared::SplitMode => "results of this split mode must not depend on the rest of the batch",
            NotShared::Window => "windows go by the position of a row in its request",
            NotShared::Alibi => "ALiBi goes by the position of a row in its request",
            NotShared::Mask => "masks go by requests",
            NotShared::Temperatures => "temperatures go by requests",
            NotShared::Sigmoid => "sigmoid weights are not folded over pieces that differ in number",
            NotShared::Rope => "queries are rotated by the position of a row in its request; positions given would do",
            NotShared::CustomVariant => "a user-defined variant may ask for the request of a row",
            NotShared::DoesNotPay => "no group of requests has enough in common to save time",
        })
    }
}

impl NotShared {
    /// Why plans for an attention never share, if so.
    pub(super) fn always(config: &AttentionConfig, mode: SplitMode) -> Option<NotShared> {
        let is_free = matches!(mode, SplitMode::Balanced | SplitMode::Unsplit);
        let is_windowed = config.window_left.is_some() || !config.causal && config.window_right.is_some();
        let reasons = [
            (config.shared_prefix_levels == 0, NotShared::NoLevels),
            (!is_free, NotShared::SplitMode),
            (is_windowed, NotShared::Window),
            (config.alibi, NotShared::Alibi),
            (config.mask.is_some(), NotShared::Mask),
            (config.temperatures, NotShared::Temperatures),
            (config.sigmoid_bias.is_some(), NotShared::Sigmoid),
            (config.rope.is_some() && !config.rope_positions, NotShared::Rope),
            (config.custom_variant.is_some(), NotShared::CustomVariant),
        ];
        reasons.into_iter().find_map(|(applies, reason)| applies.then_some(reason))
    }
}

/// Most rows of a request that takes part: half of a row tile.
pub(super) fn most_member_rows(target: Target) -> u32 {
    target.tall_rows.max(ATTEND_TILE_ROWS) / 2
}

/// A request that takes part, in the order of the batch.
#[derive(Clone, Copy, Debug)]
pub(super) struct Member {
    pub request: u32,
    pub query_begin: u32,
    /// Packed rows: all of its one row tile.
    pub rows: u32,
    /// Tiles in common with the member before.
    common_tiles: u32,
    page_begin: u32,
}

/// A group of members and its keys from one tile up to another.
#[derive(Clone, Copy, Debug)]
pub(super) struct Unit {
    /// Of the group's first member.
    pub first: Member,
    /// Query tokens from the first member's first to the last one's last.
    pub query_len: u32,
    pub begin_tiles: u32,
    pub end_tiles: u32,
    /// Its row tiles among all.
    pub first_row_tile: u32,
    pub row_tiles: u32,
}

impl Unit {
    pub fn page_begin(&self) -> u32 {
        self.first.page_begin
    }
}

/// Some rows of a unit: those of members side by side.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct UnitRows {
    /// Counted from the unit's first row.
    pub row_begin: u32,
    pub rows: u32,
    /// Among all members.
    pub first_member: u32,
    pub members: u32,
}

/// The best choice for some members, with so many levels, where no unit is around them.
#[derive(Clone, Copy, Debug, Default)]
struct Choice {
    /// What it saves.
    gain: i64,
    /// What a tile of their first keys costs.
    tile_cost: i64,
}

/// Members whose groups are closed: a group, or a request alone.
#[derive(Clone, Copy, Debug)]
struct Closed {
    first_member: u32,
    /// What a tile of keys costs if all read it for themselves.
    flat_cost: i64,
    /// By levels.
    choices: [Choice; CHOICES],
}

/// A group that more members may join.
#[derive(Clone, Copy, Debug)]
struct Open {
    first_member: u32,
    end_tiles: u32,
    flat_cost: i64,
    /// If it is no unit.
    apart: [Choice; CHOICES],
    /// What those inside save if it is one, by levels left for them.
    inside: [i64; CHOICES],
}

impl Open {
    fn new(first_member: u32, end_tiles: u32) -> Open {
        Open { first_member, end_tiles, flat_cost: 0, apart: Default::default(), inside: [0; CHOICES] }
    }

    fn join(&mut self, closed: &Closed) {
        self.flat_cost += closed.flat_cost;
        let sums = self.apart.iter_mut().zip(&mut self.inside);
        for ((apart, inside), choice) in sums.zip(&closed.choices) {
            apart.gain += choice.gain;
            apart.tile_cost += choice.tile_cost;
            // Their units would begin where this one ends, and might not pay any more.
            *inside += (choice.gain - (closed.flat_cost - choice.tile_cost) * self.end_tiles as i64).max(0);
        }
    }
}

/// A group, and whether it is a unit, a bit for each number of levels left.
#[derive(Clone, Copy, Debug)]
struct Group {
    first_member: u32,
    end_member: u32,
    end_tiles: u32,
    unit_bits: u32,
    /// What a unit of it saves for each tile, and what it costs besides.
    saved_cost: i64,
    fixed_cost: i64,
}

/// A group around the one looked at.
#[derive(Clone, Copy, Debug)]
struct Around {
    first_member: u32,
    end_member: u32,
    /// Where the last unit down to here ends.
    end_tiles: u32,
    levels: u32,
}

/// How rows are packed into row tiles.
#[derive(Clone, Copy, Debug)]
pub(super) struct Packing {
    pub group: Divisor,
    pub tile_tokens: Divisor,
    /// Packed rows up to which a row tile is short.
    pub short_rows: u32,
    pub target: Target,
}

impl Packing {
    fn tile_rows(&self) -> u32 {
        self.target.tall_rows.max(ATTEND_TILE_ROWS)
    }

    pub fn is_tall(&self, rows: u32) -> bool {
        self.target.tall_rows > 0 && rows > self.short_rows
    }

    pub fn cost(&self, rows: u32) -> Cost {
        Cost::new(self.is_tall(rows), rows, self.target.half_rows())
    }

    /// The row tiles of members side by side in the batch; whole members, and none that stand apart.
    fn row_tiles<'a>(&'a self, members: &'a [Member]) -> impl Iterator<Item = UnitRows> + 'a {
        let mut begin = 0;
        std::iter::from_fn(move || {
            let first = members.get(begin)?;
            let row_of = |member: &Member| (member.query_begin - members[0].query_begin) * self.group.get();
            let mut tile = UnitRows { row_begin: row_of(first), first_member: begin as u32, ..UnitRows::default() };
            for member in &members[begin..] {
                if row_of(member) != tile.row_begin + tile.rows || tile.rows + member.rows > self.tile_rows() {
                    break;
                }
                tile.rows += member.rows;
                tile.members += 1;
            }
            begin += tile.members as usize;
            Some(tile)
        })
    }
}

/// The units of a batch. All memory is allocated at first.
#[derive(Debug)]
pub(super) struct Shared {
    levels: u32,
    /// Whether nothing is asked of the batch as a whole.
    always: bool,
    members: Vec<Member>,
    open: Vec<Open>,
    groups: Vec<Group>,
    around: Vec<Around>,
    /// Outer ones before those inside them.
    units: Vec<Unit>,
    row_tiles: Vec<UnitRows>,
    /// Where the own keys of each request begin; empty where nothing is shared.
    first_tiles: Vec<u32>,
}

impl Shared {
    /// Room for `members` requests that take part, of `requests`; 0 levels for nothing ever shared.
    pub fn new(levels: u32, always: bool, requests: usize, members: usize) -> Shared {
        let room = |count: usize| if levels > 0 { count } else { 0 };
        Shared {
            levels,
            always,
            members: Vec::with_capacity(room(members)),
            open: Vec::with_capacity(room(members)),
            groups: Vec::with_capacity(room(members)),
            around: Vec::with_capacity(room(members)),
            units: Vec::with_capacity(room(members)),
            row_tiles: Vec::with_capacity(room(members * levels as usize)),
            first_tiles: Vec::with_capacity(room(requests)),
        }
    }

    /// Nothing is shared.
    pub fn clear(&mut self) {
        self.members.clear();
        self.groups.clear();
        self.units.clear();
        self.row_tiles.clear();
        self.first_tiles.clear();
    }

    /// Finds the units of a batch whose table has prefixes.
    pub fn find(&mut self, table: &PageTable<'_>, query: QueryLengths<'_>, packing: &Packing, teams: u32) -> Sharing {
        self.clear();
        self.gather(table, query, packing);
        self.choose(packing);
        let (sharing, saved_cost) = self.spell(table.requests(), packing);
        let pays = self.always || saved_cost > teams as i64 * START_COST;
        if self.units.is_empty() || !pays {
            self.clear();
            return Sharing { not_shared: Some(NotShared::DoesNotPay), ..Sharing::default() };
        }
        sharing
    }

    pub fn units(&self) -> &[Unit] {
        &self.units
    }

    pub fn members(&self) -> &[Member] {
        &self.members
    }

    pub fn row_tiles_of(&self, unit: usize) -> &[UnitRows] {
        let Unit { first_row_tile, row_tiles, .. } = self.units[unit];
        &self.row_tiles[first_row_tile as usize..][..row_tiles as usize]
    }

    /// Tiles of the request's first keys that units read.
    #[inline(always)]
    pub fn first_tile(&self, request: usize) -> u32 {
        self.first_tiles.get(request).copied().unwrap_or(0)
    }

    /// The requests that take part, and what each has in common with the one before.
    fn gather(&mut self, table: &PageTable<'_>, query: QueryLengths<'_>, packing: &Packing) {
        let most_rows = most_member_rows(packing.target);
        let (mut query_begin, mut common, mut seen_before) = (0, u32::MAX, 0);
        for (request, (&kv_len, &shared)) in table.kv_lens().iter().zip(table.shared_tokens()).enumerate() {
            let query_len = query.len_of(request);
            let rows = query_len * packing.group.get();
            common = common.min(shared);
            if (1..=most_rows).contains(&rows) {
                // Every row sees the keys before the first one's own, which so stays with the request: sinks count there.
                let seen = kv_len.saturating_sub(query_len);
                let common_tiles = packing.tile_tokens.divide(common.min(seen).min(seen_before)).0;
                let page_begin = table.page_begin(request);
                self.members.push(Member { request: request as u32, query_begin, rows, common_tiles, page_begin });
                (common, seen_before) = (u32::MAX, seen);
            }
            query_begin += query_len;
        }
    }

    /// Closes groups, inner ones first, and chooses which would be units.
    fn choose(&mut self, packing: &Packing) {
        for end in 1..=self.members.len() {
            let common_tiles = self.members.get(end).map_or(0, |member| member.common_tiles);
            // What ends here and is in no open group: first the last member.
            let flat_cost = packing.cost(self.members[end - 1].rows).tile as i64;
            let choices = [Choice { gain: 0, tile_cost: flat_cost }; CHOICES];
            let mut ended = Closed { first_member: end as u32 - 1, flat_cost, choices };
            while let Some(mut open) = self.open.pop_if(|open| open.end_tiles > common_tiles) {
                open.join(&ended);
                ended = self.close(&open, end as u32, packing);
            }
            if common_tiles > 0 {
                if self.open.last().is_none_or(|open| open.end_tiles < common_tiles) {
                    self.open.push(Open::new(ended.first_member, common_tiles));
                }
                let open = self.open.last_mut().expect("one at least");
                open.join(&ended);
            }
        }
    }

    /// Closes a group.
    fn close(&mut self, open: &Open, end_member: u32, packing: &Packing) -> Closed {
        let Open { first_member, end_tiles, flat_cost, apart, inside } = *open;
        let members = &self.members[first_member as usize..end_member as usize];
        let (mut tile_cost, mut fixed_cost) = (0, members.len() as i64 * MEMBER_COST as i64);
        for tile in packing.row_tiles(members) {
            let cost = packing.cost(tile.rows);
            tile_cost += cost.tile as i64;
            fixed_cost += cost.item as i64;
        }
        let saved_cost = flat_cost - tile_cost;
        let (mut choices, mut unit_bits) = (apart, 0);
        for levels in 1..=self.levels as usize {
            let gain = saved_cost * end_tiles as i64 - fixed_cost + inside[levels - 1];
            if gain > apart[levels].gain {
                choices[levels] = Choice { gain, tile_cost };
                unit_bits |= 1 << levels;
            }
        }
        self.groups.push(Group { first_member, end_member, end_tiles, unit_bits, saved_cost, fixed_cost });
        Closed { first_member, flat_cost, choices }
    }

    /// Makes units of the chosen groups, outer ones first, and their row tiles.
    /// Returns what they save beside.
    fn spell(&mut self, requests: usize, packing: &Packing) -> (Sharing, i64) {
        let (mut sharing, mut all_saved_cost) = (Sharing::default(), 0);
        let tile_tokens = packing.tile_tokens.get() as u64;
        self.first_tiles.resize(requests, 0);
        self.around.clear();
        // In the order of their ends, so from the last one each comes after those around it.
        for group in self.groups.iter().rev() {
            let holds =
                |around: &Around| around.first_member <= group.first_member && group.end_member <= around.end_member;
            while self.around.last().is_some_and(|around| !holds(around)) {
                self.around.pop();
            }
            let (begin_tiles, levels) =
                self.around.last().map_or((0, self.levels), |around| (around.end_tiles, around.levels));
            let Group { first_member, end_member, end_tiles, unit_bits, saved_cost, fixed_cost } = *group;
            let pays = saved_cost * (end_tiles - begin_tiles) as i64 > fixed_cost;
            let is_unit = unit_bits >> levels & 1 == 1 && pays;
            self.around.push(Around {
                first_member,
                end_member,
                end_tiles: if is_unit { end_tiles } else { begin_tiles },
                levels: levels - u32::from(is_unit),
            });
            if !is_unit {
                continue;
            }
            all_saved_cost += saved_cost * (end_tiles - begin_tiles) as i64 - fixed_cost;
            let members = &self.members[first_member as usize..end_member as usize];
            let first_row_tile = self.row_tiles.len() as u32;
            let in_all = |tile: UnitRows| UnitRows { first_member: tile.first_member + first_member, ..tile };
            self.row_tiles.extend(packing.row_tiles(members).map(in_all));
            let (first, last) = (members[0], members[members.len() - 1]);
            let row_tiles = self.row_tiles.len() as u32 - first_row_tile;
            self.units.push(Unit {
                first,
                query_len: last.query_begin - first.query_begin + packing.group.divide(last.rows).0,
                begin_tiles,
                end_tiles,
                first_row_tile,
                row_tiles,
            });
            for member in members {
                let first_tile = &mut self.first_tiles[member.request as usize];
                sharing.shared_requests += usize::from(*first_tile == 0);
                *first_tile = end_tiles;
            }
            sharing.saved_kv_tokens +=
                (members.len() as u64 - row_tiles as u64) * (end_tiles - begin_tiles) as u64 * tile_tokens;
        }
        (sharing, all_saved_cost)
    }
}
