//! Register and shared tiles: what a hot loop is made of.
//!
//! Register arrays stay in registers only where every index is a compile-time constant, so iteration over them
//! goes through [`unroll`], and they start from [`zeros`]: `[0f32; N]` becomes a loop over local memory past 64
//! elements.

use simt::shared::Shared;
use simt::tensor::Element;
use simt::wgmma::{Descriptor, KMajor, MnMajor, Swizzle};

/// Calls `f(0)`, `f(1)`, up to `f(N - 1)`, each with a constant. `N` is at most 64.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub fn unroll<const N: usize>(mut f: impl FnMut(usize)) {
    const { assert!(N <= 64) };
    macro_rules! steps {
        ($($i:literal)*) => { $(if N > $i { f($i); })* };
    }
    steps!(0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31);
    steps!(32 33 34 35 36 37 38 39 40 41 42 43 44 45 46 47 48 49 50 51 52 53 54 55 56 57 58 59 60 61 62 63);
}

/// A register array of zeros.
#[inline(always)]
pub fn zeros<const N: usize, const M: usize>() -> [[f32; M]; N] {
    // SAFETY: all-zero bytes are zeros.
    unsafe { core::mem::zeroed() }
}

/// Rows of 16-bit values in shared memory.
pub trait Rows: Copy {
    /// Where piece `chunk` (16 bytes, 8 elements) of row `row` lies.
    fn chunk(self, row: u32, chunk: u32) -> Shared<u8>;

    /// An eighth of the bytes from a row to the eighth after it.
    fn row_bytes(self) -> u32;
}

/// The rows of a tile from `first` on.
#[derive(Clone, Copy)]
pub struct RowsFrom<T: Rows> {
    /// The tile.
    pub tile: T,
    /// Its row that is row 0 here.
    pub first: u32,
}

impl<T: Rows> Rows for RowsFrom<T> {
    #[inline(always)]
    fn chunk(self, row: u32, chunk: u32) -> Shared<u8> {
        self.tile.chunk(self.first + row, chunk)
    }

    #[inline(always)]
    fn row_bytes(self) -> u32 {
        self.tile.row_bytes()
    }
}

/// A tile of 16-bit rows in shared memory, laid out so that `ldmatrix` (eight rows, 16 bytes of each) touches
/// every bank once.
///
/// Rows whose bytes are a multiple of 128 would put the same piece of eight rows into the same banks, so there
/// piece `c` of row `r` lies at `c ^ (r % 8)`; other rows are padded by 16 bytes, which makes their stride an odd
/// number of pieces.
#[derive(Clone, Copy)]
pub struct SharedTile<const HEAD_DIM: u32> {
    base: Shared<u8>,
}

impl<const HEAD_DIM: u32> SharedTile<HEAD_DIM> {
    const SWIZZLED: bool = HEAD_DIM.is_multiple_of(64);

    /// Bytes from a row to the next; the same as [`AttendTile::row_bytes`](crate::abi::tile::AttendTile::row_bytes).
    pub const ROW_BYTES: u32 = if Self::SWIZZLED { 2 * HEAD_DIM } else { 2 * HEAD_DIM + 16 };

    /// The tile whose first row starts at `base`.
    #[inline(always)]
    pub fn new(base: Shared<u8>) -> Self {
        SharedTile { base }
    }

    /// The tile's rows from `row` on, a multiple of 8: where a row lies in its eight does not change.
    #[inline(always)]
    pub fn rows_from(self, row: u32) -> Self {
        SharedTile { base: self.base.add_bytes(row * Self::ROW_BYTES) }
    }

    /// The tile's columns from `column` on, a multiple of 64.
    #[inline(always)]
    pub fn columns_from(self, column: u32) -> Self {
        SharedTile { base: self.base.add_bytes(2 * column) }
    }

    /// Where a lane that reads pieces `2 k + first` of row `row` finds them; `first` is 0 or 1.
    #[inline(always)]
    pub fn lane(self, row: u32, first: u32) -> LanePieces<HEAD_DIM> {
        let base = self.base.anew();
        let mut addresses = [base; 4];
        unroll::<4>(|k| {
            let piece = 2 * k as u32 + first;
            let piece = if Self::SWIZZLED { piece ^ (row & 7) } else { piece };
            addresses[k] = base.add_bytes(row * Self::ROW_BYTES + 16 * piece);
        });
        LanePieces { addresses }
    }
}

impl<const HEAD_DIM: u32> Rows for SharedTile<HEAD_DIM> {
    #[inline(always)]
    fn chunk(self, row: u32, chunk: u32) -> Shared<u8> {
        // Eights apart, so that where they are constants they end up in the instruction, not in a register each.
        let column = if Self::SWIZZLED { (chunk & !7) + ((chunk & 7) ^ (row & 7)) } else { chunk };
        self.base.add_bytes(row * Self::ROW_BYTES + column * 16)
    }

    #[inline(always)]
    fn row_bytes(self) -> u32 {
        Self::ROW_BYTES
    }
}

/// A tile of 16-bit rows in shared memory as `wgmma` reads it with 128-byte swizzle: panels of 64 columns, all rows of a
/// panel one after another, 128 bytes each, in which piece `c` of row `r` lies at `c ^ (r % 8)`.
#[derive(Clone, Copy)]
pub struct PanelTile {
    base: Shared<u8>,
    rows: u32,
}

impl PanelTile {
    /// Bytes of a row in a panel.
    const ROW_BYTES: u32 = 128;

    /// The tile of `rows` rows, a multiple of 8, that starts at `base`, a multiple of 1024.
    #[inline(always)]
    pub fn new(base: Shared<u8>, rows: u32) -> Self {
        PanelTile { base, rows }
    }

    /// Rows of the tile.
    #[inline(always)]
    pub fn rows(self) -> u32 {
        self.rows
    }

    /// Rows from `row` on, a multiple of 8, as an operand whose 16-column step `k` begins [`step_bytes`](Self::step_bytes)
    /// further.
    #[inline(always)]
    pub fn k_major<E: Element>(self, row: u32) -> Descriptor<E, KMajor> {
        let start = self.base.add_bytes(row * Self::ROW_BYTES).anew();
        Descriptor::new(start, 16, 8 * Self::ROW_BYTES, Swizzle::Bytes128)
    }

    /// From the first 16 columns of [`k_major`](Self::k_major) to the `k`th.
    #[inline(always)]
    pub fn step_bytes(self, k: usize) -> u32 {
        k as u32 / 4 * self.rows * Self::ROW_BYTES + k as u32 % 4 * 32
    }

    /// All columns of the rows from `row` on, a multiple of 8, which are the depth of the product.
    #[inline(always)]
    pub fn mn_major<E: Element>(self, row: u32) -> Descriptor<E, MnMajor> {
        let start = self.base.add_bytes(row * Self::ROW_BYTES).anew();
        Descriptor::new(start, self.rows * Self::ROW_BYTES, 8 * Self::ROW_BYTES, Swizzle::Bytes128)
    }
}

impl Rows for PanelTile {
    #[inline(always)]
    fn chunk(self, row: u32, chunk: u32) -> Shared<u8> {
        let panel = chunk / 8 * self.rows * Self::ROW_BYTES;
        self.base.add_bytes(panel + row * Self::ROW_BYTES + ((chunk % 8) ^ (row % 8)) * 16)
    }

    #[inline(always)]
    fn row_bytes(self) -> u32 {
        Self::ROW_BYTES
    }
}

/// A lane's pieces of its row: four addresses where rows are swizzled, else one; the others are constants away.
#[derive(Clone, Copy)]
pub struct LanePieces<const HEAD_DIM: u32> {
    addresses: [Shared<u8>; 4],
}

impl<const HEAD_DIM: u32> LanePieces<HEAD_DIM> {
    /// Piece `2 k + first` of the row `rows` further down, a multiple of 8.
    #[inline(always)]
    pub fn piece(&self, rows: u32, k: usize) -> Shared<u8> {
        let rows_bytes = rows * SharedTile::<HEAD_DIM>::ROW_BYTES;
        if SharedTile::<HEAD_DIM>::SWIZZLED {
            self.addresses[k % 4].add_bytes(rows_bytes + k as u32 / 4 * 128)
        } else {
            self.addresses[0].add_bytes(rows_bytes + k as u32 * 32)
        }
    }
}
