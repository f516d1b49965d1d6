//! What items cost: the one model by which queues are balanced.
//!
//! In: an item's rows and tiles. Out: its cost, in halves of what a tile of a short item takes. A short item takes as
//! long as its keys and values take to arrive; a tall one of many rows as long as the tensor cores take. On an H200, with
//! a multiprocessor's blocks all at work, a tile of 64 keys of 128 and up to 16 rows arrives in 1.9 us.

/// Cost of a tile of a short item.
pub const TILE_COST: u64 = 2;

/// Packed rows of a request, those of one consumer of the prefill kernel, up to which its keys take longer to arrive there
/// than to compute.
pub(super) const MEMORY_BOUND_ROWS: u32 = 64;

/// What a unit's items cost, and how short its pieces may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cost {
    /// Of each tile.
    pub tile: u64,
    /// Of an item besides its tiles.
    pub item: u64,
    /// Tiles of the shortest piece: in a shorter one the partial states cost more than the balance gains.
    pub shortest_tiles: u32,
}

impl Cost {
    /// Of a short item. Its pipeline does not drain between items; what remains is the fold of the warps' states and the
    /// output rows, with two barriers.
    pub const SHORT: Cost = Cost { tile: TILE_COST, item: 2, shortest_tiles: 2 };

    /// Of a tall item of up to half as many rows as it could have.
    pub const HALF: Cost = Cost { tile: 2, item: 4, shortest_tiles: 4 };

    /// Of a taller one.
    pub const FULL: Cost = Cost { tile: 3, item: 6, shortest_tiles: 4 };

    /// Of an item of `rows` rows; `half_rows` is half of what tall ones may have, or 0 where all cost the same.
    pub const fn new(is_tall: bool, rows: u32, half_rows: u32) -> Cost {
        if !is_tall {
            Cost::SHORT
        } else if rows <= half_rows {
            Cost::HALF
        } else {
            Cost::FULL
        }
    }

    /// Of an item with so many tiles.
    pub const fn of(self, tiles: u32) -> u64 {
        tiles as u64 * self.tile + self.item
    }

    /// Of the shortest piece.
    pub const fn shortest(self) -> u64 {
        self.of(self.shortest_tiles)
    }
}
