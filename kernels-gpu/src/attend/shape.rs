//! What a block is made of: the tile table's row as constants, and the block's shared memory.
use simt::shared::Shared;

use crate::abi::tile::{ATTEND_TILE_ROWS, AttendTile, Family, TALL_STAGES};
use crate::tile::{PanelTile, SharedTile};

/// Key fragments a warp asks for at once, at most: 32 registers.
pub(super) const BATCH: usize = 8;
/// Batches of the widest head.
pub(super) const MOST_BATCHES: usize = 16;
/// Rounds of the widest tile.
pub(super) const MOST_ROUNDS: usize = 8;

/// The next place in a ring of `places`.
#[inline(always)]
pub(super) fn next(place: u32, places: u32) -> u32 {
    if place + 1 == places { 0 } else { place + 1 }
}

/// The tile table's row as constants.
pub(super) struct Shape<const HEAD_DIM: u32, const HOPPER: bool>;

impl<const HEAD_DIM: u32, const HOPPER: bool> Shape<HEAD_DIM, HOPPER> {
    pub const TILE: AttendTile = match AttendTile::new(HEAD_DIM, if HOPPER { Family::Sm90a } else { Family::Sm80 }) {
        Some(tile) => tile,
        None => panic!("no tile for this head dim"),
    };
    /// 16-byte pieces of a row.
    pub const CHUNKS: u32 = HEAD_DIM / 8;
    /// Whether a warp keeps the query fragments of a short item in registers: up to 56 of them, beside as many
    /// accumulators, and on smaller parts, where half as many warps share the rows, up to 40.
    pub const RESIDENT_QUERIES: bool = HEAD_DIM <= if HOPPER { 224 } else { 160 };
    /// Whether tall items are computed by `wgmma`: rows that are whole panels.
    pub const HAS_WARPGROUPS: bool = HOPPER && HEAD_DIM.is_multiple_of(64) && HEAD_DIM <= 256;
    /// Rows of a tall item that the block's warps take in one block each.
    pub const TALL_BLOCK_ROWS: u32 = ATTEND_TILE_ROWS * Self::TILE.warps();
    /// Warps that a tall item's rows keep together.
    pub const WARPS_TOGETHER: u32 = if Self::HAS_WARPGROUPS { 4 } else { 1 };
    /// Keys whose scores a warp has at once, in a tall item: 16 registers for a block of rows, or 32.
    pub const STEP_TOKENS: u32 = if Self::HAS_WARPGROUPS { Self::TILE.tile_tokens() } else { 32 };
    /// Rounds in which the block's threads copy a tile of K (and of V), a piece each.
    pub const ROUNDS: usize = (Self::TILE.tile_tokens() * Self::CHUNKS / Self::TILE.threads()) as usize;

    /// First step of a batch of key fragments, and how many: fewer where queries are read again, and fewest where the
    /// loop would spill.
    pub const fn steps_of_batch(batch: usize, is_light: bool) -> (usize, usize) {
        let size = if Self::RESIDENT_QUERIES {
            BATCH
        } else if HEAD_DIM <= 256 && is_light {
            if HOPPER { BATCH / 2 } else { BATCH / 4 }
        } else if HEAD_DIM <= 256 {
            BATCH / 8
        } else {
            BATCH / 4
        };
        let steps = (HEAD_DIM / 16) as usize;
        let first = batch * size;
        (
            first,
            if first >= steps {
                0
            } else if steps - first < size {
                steps - first
            } else {
                size
            },
        )
    }

    pub const fn checked(query_steps: usize, output_steps: usize) -> AttendTile {
        assert!(query_steps as u32 * 16 == HEAD_DIM);
        assert!(output_steps as u32 * 16 * Self::TILE.output_warps == HEAD_DIM);
        assert!(Self::TILE.stages == 2 || Self::TILE.stages == 3);
        assert!(SharedTile::<HEAD_DIM>::ROW_BYTES == Self::TILE.row_bytes());
        assert!((Self::TILE.tile_tokens() * Self::CHUNKS).is_multiple_of(Self::TILE.threads()));
        // Panels lie at multiples of 1024 bytes, and a warpgroup's scores are those of 64 keys.
        assert!(!Self::HAS_WARPGROUPS || Self::TILE.stage_bytes().is_multiple_of(2048));
        assert!(!Self::HAS_WARPGROUPS || Self::TILE.tile_tokens() == 64 && Self::TILE.warps().is_multiple_of(4));
        assert!(Self::ROUNDS <= MOST_ROUNDS && Self::steps_of_batch(MOST_BATCHES, false).1 == 0);
        Self::TILE
    }
}

/// The block's shared memory: stages of keys and values, as many slots of query rows, two buffers of row addresses,
/// the warps' states. Slots turn with the items, so an item's query rows stay while it runs. Tall items use the first
/// two stages, and what follows them for their query rows.
#[derive(Clone, Copy)]
pub(super) struct Room<const HEAD_DIM: u32, const HOPPER: bool> {
    base: Shared<u8>,
}

impl<const HEAD_DIM: u32, const HOPPER: bool> Room<HEAD_DIM, HOPPER> {
    pub const TILE: AttendTile = Shape::<HEAD_DIM, HOPPER>::TILE;

    #[inline(always)]
    pub fn new() -> Self {
        Room { base: Shared::dynamic() }
    }

    #[inline(always)]
    pub fn stage(self, stage: u32) -> Shared<u8> {
        self.base.add_bytes(stage * Self::TILE.stage_bytes())
    }

    #[inline(always)]
    pub fn keys(self, stage: u32) -> SharedTile<HEAD_DIM> {
        SharedTile::new(self.stage(stage))
    }

    #[inline(always)]
    pub fn values(self, stage: u32) -> SharedTile<HEAD_DIM> {
        SharedTile::new(self.stage(stage).add_bytes(Self::TILE.tile_tokens() * Self::TILE.row_bytes()))
    }

    #[inline(always)]
    pub fn queries(self, slot: u32) -> SharedTile<HEAD_DIM> {
        SharedTile::new(self.stage(Self::TILE.stages).add_bytes(slot * ATTEND_TILE_ROWS * Self::TILE.row_bytes()))
    }

    /// Where row `row` of the tile of parity `parity` is in global memory: K's address, then V's.
    #[inline(always)]
    pub fn row_address(self, parity: u32, row: u32) -> Shared<[u32; 4]> {
        let start = self.base.add_bytes(Self::TILE.addresses_offset_bytes());
        start.cast().add(parity * Self::TILE.tile_tokens() + row)
    }

    /// The warps' maxima and sums at the end of a short item, `[kv_warps][16]`.
    #[inline(always)]
    pub fn warp_states(self) -> Shared<[f32; 2]> {
        self.base.add_bytes(Self::TILE.states_offset_bytes()).cast()
    }

    /// One of the two places where tall items keep what comes next: 32 bytes.
    #[inline(always)]
    pub fn tall_slot(self, slot: u32) -> Shared<[u32; 4]> {
        self.warp_states().cast().add(2 * slot)
    }

    /// The query rows of a tall item, behind its two stages.
    #[inline(always)]
    pub fn tall_queries(self) -> SharedTile<HEAD_DIM> {
        SharedTile::new(self.stage(TALL_STAGES))
    }

    /// The same in panels, and keys and values too.
    #[inline(always)]
    pub fn query_panels(self) -> PanelTile {
        PanelTile::new(self.stage(TALL_STAGES), Self::TILE.tall_rows(true))
    }

    #[inline(always)]
    pub fn key_panels(self, stage: u32) -> PanelTile {
        PanelTile::new(self.stage(stage), Self::TILE.tile_tokens())
    }

    #[inline(always)]
    pub fn value_panels(self, stage: u32) -> PanelTile {
        let bytes = Self::TILE.tile_tokens() * Self::TILE.row_bytes();
        PanelTile::new(self.stage(stage).add_bytes(bytes), Self::TILE.tile_tokens())
    }
}
