//! Tile shapes: one table from (head dim, GPU family) to how the attend kernel cuts its work.
//!
//! Planner, launcher and kernel read the same function, so shared memory, launch bounds and schedule agree. A
//! tile of K and V is `16 * kv_warps` tokens; each warp takes 16 of them, and where the accumulator of a whole
//! row would not fit the registers, `output_warps` warps share a row's output columns.

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
    /// Elements of a key or value row.
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

/// Packed query rows of the attend kernel's tile: the height of one `mma`.
pub const ATTEND_TILE_ROWS: u32 = 16;

/// Head dims the attend kernel is built for.
pub const ATTEND_HEAD_DIMS: [u32; 10] = [64, 80, 96, 112, 128, 160, 192, 224, 256, 512];

/// Threads of a merge block: four warps share a row's states.
pub const MERGE_THREADS: u32 = 128;
/// Shared memory of a merge block: each warp's accumulator of up to 512 columns, and its sum.
pub const MERGE_SHARED_BYTES: u32 = MERGE_THREADS / 32 * (512 + 1) * 4;
/// Threads of an append block.
pub const APPEND_THREADS: u32 = 256;
/// 16-byte pieces of K and of V an append thread copies, their loads in flight together.
pub const APPEND_PIECES: u32 = 4;
/// Threads of a stream block.
pub const STREAM_THREADS: u32 = 512;
/// 16-byte pieces a stream block takes at a time: eight a thread.
pub const STREAM_GROUP_PIECES: u32 = 8 * STREAM_THREADS;

impl AttendTile {
    /// The row of the table, or `None` where no kernel is built.
    pub const fn new(head_dim: u32, family: Family) -> Option<AttendTile> {
        let hopper = matches!(family, Family::Sm90a);
        let (kv_warps, output_warps, stages, blocks_per_multiprocessor) = match head_dim {
            // 128 threads at 4 blocks have 128 registers each: enough for a 64-wide accumulator.
            64 => (4, 1, 3, if hopper { 3 } else { 1 }),
            // 3 stages of 36 KiB twice are 222 of Hopper's 227 KiB; 2 stages are 74 KiB, under Ada's 99.
            80 | 96 | 112 | 128 => (4, 1, if hopper { 3 } else { 2 }, if hopper { 2 } else { 1 }),
            // One block of 8 warps: the same bytes in flight as two of the row above. Half-height tiles on
            // smaller parts.
            160 | 192 | 224 | 256 if hopper => (4, 2, 3, 1),
            160 | 192 | 224 | 256 => (2, 2, 2, 1),
            // 80 KiB a stage; 40 KiB with a tile of 16 tokens.
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

    /// Threads of a block.
    pub const fn threads(self) -> u32 {
        32 * self.kv_warps * self.output_warps
    }

    /// Bytes from one row of a tile to the next: 16 more than the row unless the row is swizzled.
    pub const fn row_bytes(self) -> u32 {
        let row = 2 * self.head_dim;
        if row % 128 == 0 { row } else { row + 16 }
    }

    /// Shared memory of a stage: a tile of K and one of V. At the end of an item it holds the warps' f32 outputs.
    pub const fn stage_bytes(self) -> u32 {
        2 * self.tile_tokens() * self.row_bytes()
    }

    /// Where the row addresses start: after the stages and as many slots of query rows.
    pub const fn addresses_offset_bytes(self) -> u32 {
        self.stages * (self.stage_bytes() + ATTEND_TILE_ROWS * self.row_bytes())
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
};
