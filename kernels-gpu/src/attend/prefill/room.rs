//! A block's shared memory, and the barriers by which its stages change hands.
use core::marker::PhantomData;

use simt::{mbarrier::Mbarrier, shared::Shared};

use crate::abi::tile::PrefillTile;
use crate::tile::PanelTile;
use crate::variant::Variant;

/// Where things lie: barriers, the item's query rows, then keys and values of each stage, then output rows on their way.
#[derive(Clone, Copy)]
pub(super) struct Room<V, const HEAD_DIM: u32, const VALUE_DIM: u32>(PhantomData<V>);

impl<V: Variant, const HEAD_DIM: u32, const VALUE_DIM: u32> Room<V, HEAD_DIM, VALUE_DIM> {
    pub const TILE: PrefillTile = match PrefillTile::new(HEAD_DIM, VALUE_DIM, V::IS_PLAIN) {
        Some(tile) => tile,
        None => panic!("no tile for these head dims"),
    };

    /// Warps that share a tile's panels.
    pub const PANEL_WARPS: u32 = if HEAD_DIM == 64 { 1 } else { 2 };

    pub const fn checked(columns: usize, depth: usize, steps: usize, value_steps: usize, tiles: usize) -> Self {
        assert!(columns as u32 * 8 == Self::TILE.tile_tokens && depth * 2 == columns);
        assert!(steps as u32 * 16 == HEAD_DIM && value_steps as u32 * 16 == VALUE_DIM && tiles == 2 * value_steps);
        assert!(!V::TRANSFORMS || Self::TILE.warpgroups == 2, "each of two consumers changes half of a tile's keys");
        Room(PhantomData)
    }

    #[inline(always)]
    fn barrier(self, index: u32) -> Mbarrier {
        Mbarrier::new(Shared::<u64>::dynamic().add(index))
    }

    /// The tile's keys have come.
    #[inline(always)]
    pub fn keys_full(self, turn: u32) -> Mbarrier {
        self.barrier(turn % Self::TILE.stages)
    }

    /// The tile's values have come.
    #[inline(always)]
    pub fn values_full(self, turn: u32) -> Mbarrier {
        self.barrier(Self::TILE.stages + turn % Self::TILE.stages)
    }

    /// The tile's keys have been read.
    #[inline(always)]
    pub fn keys_empty(self, turn: u32) -> Mbarrier {
        self.barrier(2 * Self::TILE.stages + turn % Self::TILE.stages)
    }

    /// The tile's values have been read.
    #[inline(always)]
    pub fn values_empty(self, turn: u32) -> Mbarrier {
        self.barrier(3 * Self::TILE.stages + turn % Self::TILE.stages)
    }

    /// What a warp has copied of a tile shorter than the stage has come, and what lies behind is not zero yet.
    #[inline(always)]
    pub fn rest_full(self, warp: u32) -> Mbarrier {
        self.barrier(4 * Self::TILE.stages + warp)
    }

    /// The parity of a tile's phase of its stage.
    #[inline(always)]
    pub fn parity(self, turn: u32) -> u32 {
        turn / Self::TILE.stages % 2
    }

    /// Whether one of the block's items is counted.
    #[inline(always)]
    pub fn split(self) -> Shared<u32> {
        Shared::<u64>::dynamic().add(4 * Self::TILE.stages + 4).cast()
    }

    /// Makes the barriers, and says that nothing is split.
    ///
    /// # Safety
    /// One thread calls this; a barrier of the block comes before any use.
    #[inline(always)]
    pub unsafe fn initialise(self) {
        // SAFETY: the caller's contract.
        unsafe {
            let mut turn = 0;
            while turn < Self::TILE.stages {
                self.keys_full(turn).initialise(Self::PANEL_WARPS);
                self.values_full(turn).initialise(Self::PANEL_WARPS);
                // One arrival of each consumer warp.
                self.keys_empty(turn).initialise(4 * Self::TILE.warpgroups);
                self.values_empty(turn).initialise(4 * Self::TILE.warpgroups);
                turn += 1;
            }
            let mut warp = 0;
            while warp < 2 * Self::PANEL_WARPS {
                self.rest_full(warp).initialise(1);
                warp += 1;
            }
            self.split().store(0);
        }
    }

    #[inline(always)]
    fn start(self, bytes: u32) -> Shared<u8> {
        Shared::dynamic().add_bytes(PrefillTile::BARRIER_BYTES + bytes)
    }

    /// The query rows of an item.
    #[inline(always)]
    pub fn queries(self) -> PanelTile {
        PanelTile::new(self.start(0), Self::TILE.rows())
    }

    #[inline(always)]
    pub fn keys(self, turn: u32) -> PanelTile {
        let stage = turn % Self::TILE.stages;
        PanelTile::new(self.start(Self::TILE.query_bytes() + stage * Self::TILE.stage_bytes()), Self::TILE.tile_tokens)
    }

    #[inline(always)]
    pub fn values(self, turn: u32) -> PanelTile {
        let stage = turn % Self::TILE.stages;
        let bytes = Self::TILE.query_bytes() + stage * Self::TILE.stage_bytes() + Self::TILE.key_bytes();
        PanelTile::new(self.start(bytes), Self::TILE.tile_tokens)
    }

    /// Where warp `warp` of the block turns its output rows: 16 of 64 columns.
    #[inline(always)]
    pub fn turned(self, warp: u32) -> Shared<u8> {
        let turned = Self::TILE.query_bytes() + Self::TILE.stages * Self::TILE.stage_bytes();
        self.start(turned + (warp - 4) * PrefillTile::TURNED_BYTES)
    }

    /// Bytes from the start that are free once all items are done.
    #[inline(always)]
    pub fn free_bytes(self) -> u32 {
        Self::TILE.shared_bytes()
    }
}
