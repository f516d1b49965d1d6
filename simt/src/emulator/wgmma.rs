//! What `wgmma` reads and computes: descriptors to addresses, 16-byte pieces to products. `face/wgmma.rs` says what the
//! fields mean.
use super::arithmetic;

/// Values of K in one product.
pub const DEPTH: usize = 16;
/// Rows of one warp.
pub const WARP_ROWS: usize = 16;

/// A descriptor, decoded.
#[derive(Clone, Copy, Debug)]
pub struct Operand {
    start: u32,
    leading: u32,
    stride: u32,
    /// 16-byte pieces that lie together: 1, 2, 4 or 8.
    run: u32,
    transposed: bool,
}

impl Operand {
    pub fn new(descriptor: u64, transposed: bool) -> Self {
        let field = |shift: u32| (descriptor >> shift & 0x3fff) as u32 * 16;
        let run = [1, 8, 4, 2][(descriptor >> 62) as usize];
        Operand { start: field(0), leading: field(16), stride: field(32), run, transposed }
    }

    /// Addresses of the 16-byte pieces that hold `rows` (whole eights), in the order in which [`unpack`] takes them.
    pub fn pieces(self, rows: std::ops::Range<u32>) -> impl Iterator<Item = u32> {
        // Either a row and which eight of K, or a k and which eight rows.
        let (outer, inner) = match self.transposed {
            false => (rows, 0..2),
            true => (0..DEPTH as u32, rows.start / 8..rows.end / 8),
        };
        outer.flat_map(move |outer| inner.clone().map(move |inner| self.piece(outer, inner)))
    }

    fn piece(self, outer: u32, inner: u32) -> u32 {
        let eight = outer % 8 * 16 * self.run;
        let offset = match (self.run, self.transposed) {
            (1, false) => outer / 8 * self.stride + inner * self.leading,
            (1, true) => outer / 8 * self.leading + inner * self.stride,
            (_, false) => outer / 8 * self.stride + inner * 16,
            (run, true) => outer / 8 * self.stride + inner / run * self.leading + inner % run * 16,
        };
        let address = self.start + offset + eight;
        address ^ (address >> 7 & (self.run - 1)) << 4
    }

    /// The values of `pieces`, by row: `rows` times [`DEPTH`].
    pub fn unpack<'a>(self, pieces: impl Iterator<Item = &'a [u8]>, rows: usize, is_bf16: bool) -> Vec<f32> {
        let mut values = vec![0.0; rows * DEPTH];
        for (index, piece) in pieces.enumerate() {
            for (within, bytes) in piece.chunks_exact(2).enumerate() {
                let (row, k) = match self.transposed {
                    false => (index / 2, index % 2 * 8 + within),
                    true => (index % (rows / 8) * 8 + within, index / (rows / 8)),
                };
                values[row * DEPTH + k] = decode(u16::from_le_bytes([bytes[0], bytes[1]]) as u32, is_bf16);
            }
        }
        values
    }
}

fn decode(bits: u32, is_bf16: bool) -> f32 {
    if is_bf16 { arithmetic::f32_from_bf16(bits) } else { arithmetic::f32_from_f16(bits) }
}

/// A warp's rows of A, from the four registers of each lane.
pub fn unpack_registers(lanes: &[[u32; 4]; 32], is_bf16: bool) -> Vec<f32> {
    let mut values = vec![0.0; WARP_ROWS * DEPTH];
    for (lane, registers) in lanes.iter().enumerate() {
        for (index, register) in registers.iter().enumerate() {
            for half in 0..2 {
                let (row, k) = (lane / 4 + index % 2 * 8, lane % 4 * 2 + index / 2 * 8 + half);
                values[row * DEPTH + k] = decode(register >> (16 * half) & 0xffff, is_bf16);
            }
        }
    }
    values
}

/// `c += a * b` for one warp, summed in f32 in ascending `k`. `a` is by row, `b` by column, `c` by row.
pub fn multiply_accumulate(c: &mut [f32], a: &[f32], b: &[f32]) {
    let columns = c.len() / WARP_ROWS;
    for (row, a) in c.chunks_exact_mut(columns).zip(a.chunks_exact(DEPTH)) {
        for (c, b) in row.iter_mut().zip(b.chunks_exact(DEPTH)) {
            *c = a.iter().zip(b).fold(*c, |sum, (a, b)| sum + a * b);
        }
    }
}

/// Where register `index` of tile `tile` of a lane lies in a warp's rows.
pub fn accumulator(lane: usize, tile: usize, index: usize, columns: usize) -> usize {
    (lane / 4 + index / 2 * 8) * columns + tile * 8 + lane % 4 * 2 + index % 2
}
