//! Tile shapes: one table from (head dim, GPU family) to how the attend kernel cuts its work.
//!
//! Planner, launcher and kernel read the same function, so shared memory, launch bounds and schedule agree. A
//! tile of K and V is `16 * kv_warps` tokens. Of a short item each warp takes 16 of them, and where the accumulator of
//! a whole row would not fit the registers, `output_warps` warps share a row's output columns. Of a tall item each warp
//! takes rows of its own, against all keys of the tile.

/// The two PTX families of the bundle.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Family {
    /// Ampere and later: `mma.sync`, `cp.async`; fits 99 KiB of shared memory a block up to head dim 256.
    Sm80,
    /// Hopper: the same instructions, 227 KiB a multiprocessor and programmatic dependent launch.
    Sm90a,
}

/// How the attend kernel works for one head dim on one family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttendTile {
    /// Elements of a key or value row, at most: what narrower rows lack is zeros.
    pub head_dim: u32,
    /// Warps that share a tile's tokens, 16 each.
    pub kv_warps: u32,
    /// Warps that share a row's output columns.
    pub output_warps: u32,
    /// Tiles in shared memory.
    pub stages: u32,
    /// Blocks a multiprocessor should hold.
    pub blocks_per_multiprocessor: u32,
}

/// Packed query rows of a short item's tile: the height of one `mma`.
pub const ATTEND_TILE_ROWS: u32 = 16;

/// Tiles in shared memory while a tall item runs: one computed, one on its way.
pub const TALL_STAGES: u32 = 2;

/// Head dims the attend kernel is built for.
pub const ATTEND_HEAD_DIMS: [u32; 10] = [64, 80, 96, 112, 128, 160, 192, 224, 256, 512];

/// The least head dim that the attend kernel is built for and rows of `query_dim` queries and keys and `value_dim` values
/// fit; `None` past the widest.
pub const fn attend_head_dim(query_dim: u32, value_dim: u32) -> Option<u32> {
    let mut i = 0;
    while i < ATTEND_HEAD_DIMS.len() {
        if query_dim <= ATTEND_HEAD_DIMS[i] && value_dim <= ATTEND_HEAD_DIMS[i] {
            return Some(ATTEND_HEAD_DIMS[i]);
        }
        i += 1;
    }
    None
}

/// Head dims of the attend kernels that normalise and rotate queries and keys.
pub const ROTARY_HEAD_DIMS: [u32; 4] = [64, 96, 128, 256];

/// Threads of a merge block: a warp folds a row.
pub const MERGE_THREADS: u32 = 128;
/// Threads of a fold block: a block folds a row tile.
pub const FOLD_THREADS: u32 = 128;
/// Fold blocks that a multiprocessor should hold.
pub const FOLD_BLOCKS_PER_MULTIPROCESSOR: u32 = 3;
/// Shared memory of a fold block: room for 142 states of 128, and for those blocks on a Hopper multiprocessor.
pub const FOLD_SHARED_BYTES: u32 = 72 * 1024;
/// Threads of an append block.
pub const APPEND_THREADS: u32 = 256;
/// 16-byte pieces of K and of V an append thread copies, their loads in flight together.
pub const APPEND_PIECES: u32 = 4;
/// Threads of a RoPE block.
pub const ROPE_THREADS: u32 = 256;
/// Heads a RoPE thread rotates by the same angles, two 16-byte pieces of each (of f32, four) in flight together.
pub const ROPE_HEADS: u32 = 4;
/// Threads of a stream block.
pub const STREAM_THREADS: u32 = 512;
/// 16-byte pieces a stream block takes at a time: eight a thread.
pub const STREAM_GROUP_PIECES: u32 = 8 * STREAM_THREADS;

impl AttendTile {
    /// The row of the table, or `None` where no kernel is built.
    pub const fn new(head_dim: u32, family: Family) -> Option<AttendTile> {
        let hopper = matches!(family, Family::Sm90a);
        let (kv_warps, output_warps, stages, blocks_per_multiprocessor) = match head_dim {
            // Three blocks of 57 KiB on Hopper; a fourth would need 2 KiB more than the 228 of a multiprocessor.
            64 => (4, 1, 3, if hopper { 3 } else { 1 }),
            // 3 stages of 36 KiB twice are 221 of Hopper's 227 KiB; 2 stages with 128 query rows are 98.5 KiB, under
            // Ada's 99.
            80 | 96 | 112 | 128 => (4, 1, if hopper { 3 } else { 2 }, if hopper { 2 } else { 1 }),
            // One block of 8 warps: the same bytes in flight as two of the row above. Half-height tiles on
            // smaller parts.
            160 | 192 | 224 | 256 if hopper => (4, 2, 3, 1),
            160 | 192 | 224 | 256 => (2, 2, 2, 1),
            // 80 KiB a stage; 48 KiB with a tile of 16 tokens.
            512 if hopper => (2, 4, 2, 1),
            512 => (1, 4, 2, 1),
            _ => return None,
        };
        Some(AttendTile { head_dim, kv_warps, output_warps, stages, blocks_per_multiprocessor })
    }

    /// Keys in a tile.
    pub const fn tile_tokens(self) -> u32 {
        16 * self.kv_warps
    }

    /// Warps of a block.
    pub const fn warps(self) -> u32 {
        self.kv_warps * self.output_warps
    }

    /// Threads of a block.
    pub const fn threads(self) -> u32 {
        32 * self.warps()
    }

    /// Blocks of 16 packed rows that a warp takes of a tall item, at most: two where their accumulators fit the
    /// registers, which they do neither beside the arithmetic of a variant that is not light nor where three blocks of
    /// threads share a multiprocessor; none where not even one does.
    pub const fn tall_blocks(self, is_light: bool) -> u32 {
        match self.head_dim {
            0..=128 if is_light && self.blocks_per_multiprocessor < 3 => 2,
            0..=256 => 1,
            _ => 0,
        }
    }

    /// Packed rows of a tall item, at most; 0 where there are only short ones.
    pub const fn tall_rows(self, is_light: bool) -> u32 {
        ATTEND_TILE_ROWS * self.tall_blocks(is_light) * self.warps()
    }

    /// Bytes from one row of a tile to the next: 16 more than the row unless the row is swizzled.
    pub const fn row_bytes(self) -> u32 {
        let row = 2 * self.head_dim;
        if row.is_multiple_of(128) { row } else { row + 16 }
    }

    /// Shared memory of a stage: a tile of K and one of V. At the end of an item it holds the warps' f32 outputs.
    pub const fn stage_bytes(self) -> u32 {
        2 * self.tile_tokens() * self.row_bytes()
    }

    /// Where the row addresses start: after the stages and as many slots of query rows, or after a tall item's stages
    /// and query rows.
    pub const fn addresses_offset_bytes(self) -> u32 {
        let short = self.stages * (self.stage_bytes() + ATTEND_TILE_ROWS * self.row_bytes());
        let tall = TALL_STAGES * self.stage_bytes() + self.tall_rows(true) * self.row_bytes();
        if short > tall { short } else { tall }
    }

    /// Where the warps' running maxima and sums start: after two buffers of 16-byte row addresses.
    pub const fn states_offset_bytes(self) -> u32 {
        self.addresses_offset_bytes() + 2 * 16 * self.tile_tokens()
    }

    /// Shared memory of a block.
    pub const fn shared_bytes(self) -> u32 {
        self.states_offset_bytes() + 8 * ATTEND_TILE_ROWS * self.kv_warps
    }
}

/// Tokens of the smallest box of keys that a prefill kernel has copied at once: the rows of a swizzle's pattern.
pub const PREFILL_LEAST_BOX_TOKENS: u32 = 8;

/// Head dims the prefill kernel is built for: of queries and keys, and of values.
pub const PREFILL_HEAD_DIMS: [[u32; 2]; 4] = [[64, 64], [128, 128], [192, 128], [256, 256]];

/// Head dims of the prefill kernels that normalise and rotate queries and keys.
pub const PREFILL_ROTARY_HEAD_DIMS: [u32; 3] = [64, 128, 256];

/// How the prefill kernel works for one pair of head dims; it is built for Hopper alone. One block fills a
/// multiprocessor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrefillTile {
    /// Elements of a query or key row, at most: what narrower rows lack is zeros.
    pub query_dim: u32,
    /// Elements of a value row, at most.
    pub value_dim: u32,
    /// Keys of a tile.
    pub tile_tokens: u32,
    /// Tiles in shared memory.
    pub stages: u32,
    /// Warpgroups of a block that compute.
    pub warpgroups: u32,
}

impl PrefillTile {
    /// Shared memory of barriers, at the start.
    pub const BARRIER_BYTES: u32 = 1024;
    /// Shared memory in which a warp that computes turns its output rows: 16 of 64 columns.
    pub const TURNED_BYTES: u32 = 2 * 16 * 64;

    /// The tile of a pair of head dims, or `None` where no kernel is built; `is_plain` says that no variant takes its
    /// registers.
    pub const fn new(query_dim: u32, value_dim: u32, is_plain: bool) -> Option<PrefillTile> {
        // Scores, weights and outputs of a row are 1.5 * tile_tokens + value_dim numbers in four threads, which leaves the
        // least registers at 128. Two stages of 192 and 128 are 160 KiB beside 48 of queries.
        let (tile_tokens, stages) = match (query_dim, value_dim) {
            (64, 64) => (128, 4),
            (128, 128) | (192, 128) => (128, 2),
            (256, 256) => (64, 2),
            _ => return None,
        };
        // Rows of 64 leave room for a third warpgroup, which hides the others' softmax: 8192 tokens take 560 us, not 627.
        let warpgroups = if query_dim == 64 && is_plain { 3 } else { 2 };
        Some(PrefillTile { query_dim, value_dim, tile_tokens, stages, warpgroups })
    }

    /// The first of [`PREFILL_HEAD_DIMS`] that rows of `query_dim` queries and keys and `value_dim` values fit.
    pub const fn fitting(query_dim: u32, value_dim: u32, is_plain: bool) -> Option<PrefillTile> {
        let mut i = 0;
        while i < PREFILL_HEAD_DIMS.len() {
            let [widest_query, widest_value] = PREFILL_HEAD_DIMS[i];
            if query_dim <= widest_query && value_dim <= widest_value {
                return PrefillTile::new(widest_query, widest_value, is_plain);
            }
            i += 1;
        }
        None
    }

    /// Packed rows of an item, at most: 64 for each warpgroup that computes.
    pub const fn rows(self) -> u32 {
        64 * self.warpgroups
    }

    /// Threads of a block: one more warpgroup has keys and values copied.
    pub const fn threads(self) -> u32 {
        128 * (1 + self.warpgroups)
    }

    /// Shared memory of an item's query rows.
    pub const fn query_bytes(self) -> u32 {
        2 * self.rows() * self.query_dim
    }

    /// Shared memory of a tile's keys.
    pub const fn key_bytes(self) -> u32 {
        2 * self.tile_tokens * self.query_dim
    }

    /// Shared memory of a stage: a tile's keys, then its values.
    pub const fn stage_bytes(self) -> u32 {
        self.key_bytes() + 2 * self.tile_tokens * self.value_dim
    }

    /// Shared memory of a block.
    pub const fn shared_bytes(self) -> u32 {
        let turned_bytes = 4 * self.warpgroups * PrefillTile::TURNED_BYTES;
        PrefillTile::BARRIER_BYTES + self.query_bytes() + self.stages * self.stage_bytes() + turned_bytes
    }

    /// Tokens of a box: as many as fit both a page and a tile in whole numbers; `None` if the hardware cannot copy such
    /// boxes.
    pub const fn box_tokens(self, page_size_tokens: u32) -> Option<u32> {
        // A power of two that divides the page size and the tile, which is a power of two.
        let page = page_size_tokens & page_size_tokens.wrapping_neg();
        let tokens = if page < self.tile_tokens { page } else { self.tile_tokens };
        if tokens < PREFILL_LEAST_BOX_TOKENS { None } else { Some(tokens) }
    }
}

/// How the attend kernel's blocks stand in teams that share the KV heads of an item.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Teams {
    /// Teams, each with a queue.
    pub teams: u32,
    /// Blocks of a team.
    pub blocks: u32,
    /// KV heads a block takes one after another; the last block may have fewer.
    pub heads_per_block: u32,
}

impl Teams {
    /// Teams for `kv_heads` heads in `blocks` places: of all heads a block (1, 2, ...) the fewest, and so the largest
    /// team, that keeps within 1/24 of the most places busy. Every count is at least 1, whatever the arguments.
    pub const fn new(kv_heads: u32, blocks: u32) -> Teams {
        let kv_heads = if kv_heads == 0 { 1 } else { kv_heads };
        let busiest = Teams::busiest(kv_heads, blocks);
        let mut heads_per_block = 1;
        while heads_per_block < busiest.heads_per_block {
            let teams = Teams::of(kv_heads, blocks, heads_per_block);
            if teams.is_at_least(busiest, 23, 24) {
                return teams;
            }
            heads_per_block += 1;
        }
        busiest
    }

    /// Teams that keep the most places busy, and of those the smallest number of heads a block.
    pub const fn busiest(kv_heads: u32, blocks: u32) -> Teams {
        let kv_heads = if kv_heads == 0 { 1 } else { kv_heads };
        let mut busiest = Teams { teams: 1, blocks: 1, heads_per_block: kv_heads };
        let mut heads_per_block = kv_heads;
        while heads_per_block >= 1 {
            let teams = Teams::of(kv_heads, blocks, heads_per_block);
            if teams.is_at_least(busiest, 1, 1) {
                busiest = teams;
            }
            heads_per_block -= 1;
        }
        busiest
    }

    const fn of(kv_heads: u32, blocks: u32, heads_per_block: u32) -> Teams {
        let members = kv_heads.div_ceil(heads_per_block);
        Teams { teams: blocks / members, blocks: members, heads_per_block }
    }

    /// Whether these teams do at least `part / whole` of the work of `other` in the same time: each team does an item
    /// in `heads_per_block` steps.
    const fn is_at_least(self, other: Teams, part: u64, whole: u64) -> bool {
        self.teams as u64 * other.heads_per_block as u64 * whole
            >= other.teams as u64 * self.heads_per_block as u64 * part
    }
}

const _: () = {
    let mut i = 0;
    while i < ATTEND_HEAD_DIMS.len() {
        let hopper = AttendTile::new(ATTEND_HEAD_DIMS[i], Family::Sm90a).unwrap();
        // 228 KiB a multiprocessor, of which each block costs 1 KiB more than it asks for.
        assert!((hopper.shared_bytes() + 1024) * hopper.blocks_per_multiprocessor <= 228 * 1024);
        assert!(hopper.stage_bytes() >= 4 * hopper.kv_warps * ATTEND_TILE_ROWS * hopper.head_dim);
        let ampere = AttendTile::new(ATTEND_HEAD_DIMS[i], Family::Sm80).unwrap();
        assert!(ampere.shared_bytes() <= 99 * 1024);
        assert!(ampere.stage_bytes() >= 4 * ampere.kv_warps * ATTEND_TILE_ROWS * ampere.head_dim);
        i += 1;
    }
    let mut i = 0;
    while i < PREFILL_HEAD_DIMS.len() {
        let [query_dim, value_dim] = PREFILL_HEAD_DIMS[i];
        assert!(PrefillTile::new(query_dim, value_dim, false).unwrap().shared_bytes() <= 227 * 1024);
        assert!(PrefillTile::new(query_dim, value_dim, true).unwrap().shared_bytes() <= 227 * 1024);
        i += 1;
    }
};

#[cfg(test)]
mod tests {
    use super::{PREFILL_HEAD_DIMS, PREFILL_LEAST_BOX_TOKENS, PrefillTile, Teams, attend_head_dim};

    #[test]
    fn rows_get_the_narrowest_kernel_they_fit() {
        let attend = |query_dim, value_dim| attend_head_dim(query_dim, value_dim);
        assert_eq!([attend(8, 8), attend(64, 72), attend(72, 64), attend(96, 96)], [64, 80, 80, 96].map(Some));
        assert_eq!([attend(320, 8), attend(8, 257), attend(512, 512)], [Some(512); 3]);
        assert_eq!([attend(520, 8), attend(8, 513)], [None; 2]);
        let prefill = |query_dim, value_dim| {
            PrefillTile::fitting(query_dim, value_dim, true).map(|tile| [tile.query_dim, tile.value_dim])
        };
        for dims in PREFILL_HEAD_DIMS {
            assert_eq!(prefill(dims[0], dims[1]), Some(dims));
        }
        assert_eq!([prefill(8, 64), prefill(8, 72), prefill(136, 8)], [[64, 64], [128, 128], [192, 128]].map(Some));
        assert_eq!([prefill(128, 136), prefill(200, 8), prefill(192, 192)], [Some([256, 256]); 3]);
        assert_eq!([prefill(264, 8), prefill(8, 264)], [None; 2]);
    }

    #[test]
    fn boxes_fit_pages_and_tiles() {
        for [query_dim, value_dim] in PREFILL_HEAD_DIMS {
            let tile = PrefillTile::new(query_dim, value_dim, true).unwrap();
            for page in 1..=1024u32 {
                let fits = |tokens: &u32| page.is_multiple_of(*tokens) && tile.tile_tokens.is_multiple_of(*tokens);
                let largest =
                    (PREFILL_LEAST_BOX_TOKENS..=256).filter(|tokens| tokens.is_power_of_two()).filter(fits).max();
                assert_eq!(tile.box_tokens(page), largest, "pages of {page}, head dim {query_dim}");
                assert_eq!(largest.is_some(), page.is_multiple_of(8), "pages of {page}");
            }
            // A lane has a box.
            assert!(tile.tile_tokens / PREFILL_LEAST_BOX_TOKENS <= 32);
        }
        assert!([80, 96, 192, 512, 0].into_iter().all(|head_dim| PrefillTile::new(head_dim, head_dim, true).is_none()));
    }

    #[test]
    fn the_busiest_teams_leave_no_place_idle_that_others_would_use() {
        // Worked by hand: 16 teams of 8 blocks use 128 of 132 places, 33 teams of 4 all.
        assert_eq!(Teams::busiest(8, 132), Teams { teams: 33, blocks: 4, heads_per_block: 2 });
        assert_eq!(Teams::busiest(1, 132), Teams { teams: 132, blocks: 1, heads_per_block: 1 });
        assert_eq!(Teams::busiest(0, 0), Teams { teams: 1, blocks: 1, heads_per_block: 1 });
        for kv_heads in 1..=72u32 {
            for places in 1..=300u32 {
                let busiest = Teams::busiest(kv_heads, places);
                assert!(busiest.teams >= 1 && busiest.teams * busiest.blocks <= places.max(1), "{kv_heads} {places}");
                assert_eq!(busiest.blocks, kv_heads.div_ceil(busiest.heads_per_block), "{kv_heads} {places}");
                // Items a team does in the time of a head, as fractions.
                let is_faster = |heads: u32| {
                    let teams = places / kv_heads.div_ceil(heads);
                    (teams * busiest.heads_per_block).cmp(&(busiest.teams * heads))
                };
                assert!((1..=kv_heads).all(|heads| is_faster(heads).is_le()), "{kv_heads} {places}");
                assert!((1..busiest.heads_per_block).all(|heads| is_faster(heads).is_lt()), "{kv_heads} {places}");
            }
        }
    }

    #[test]
    fn teams_keep_places_busy() {
        // (KV heads, places) to (teams, blocks, heads a block), worked by hand.
        for (kv_heads, places, teams, blocks, heads_per_block) in [
            (8, 264, 33, 8, 1),
            (1, 264, 264, 1, 1),
            (32, 264, 8, 32, 1),
            (4, 132, 33, 4, 1),
            (71, 264, 11, 24, 3),
            (8, 4, 1, 4, 2),
            (8, 1, 1, 1, 8),
            (3, 2, 2, 1, 3),
            (8, 132, 16, 8, 1),
            (0, 0, 1, 1, 1),
            (1, u32::MAX, u32::MAX, 1, 1),
        ] {
            assert_eq!(Teams::new(kv_heads, places), Teams { teams, blocks, heads_per_block }, "{kv_heads} {places}");
        }
    }

    #[test]
    fn teams_cover_each_head_once_and_keep_up_with_the_simple_choice() {
        for kv_heads in 1..=130 {
            for places in 1..=300 {
                let Teams { teams, blocks, heads_per_block } = Teams::new(kv_heads, places);
                assert!(teams >= 1 && teams * blocks <= places, "{kv_heads} {places}");
                let heads = |member| member * heads_per_block..kv_heads.min((member + 1) * heads_per_block);
                assert!((0..blocks).all(|member| !heads(member).is_empty()), "{kv_heads} {places}: an idle member");
                assert!((0..blocks).flat_map(heads).eq(0..kv_heads), "{kv_heads} {places}");
                // Heads done in the time of one: as large a team as there are heads or places.
                let simple = kv_heads.min(places);
                let simple_rate = (places / simple * kv_heads) as f64 / kv_heads.div_ceil(simple) as f64;
                let rate = (teams * kv_heads) as f64 / heads_per_block as f64;
                assert!(rate >= simple_rate * 23.0 / 24.0 - 1e-9, "{kv_heads} {places}");
            }
        }
    }
}
