//! Rotary position embedding of queries and keys: RoFormer (Su et al. 2021), section 3.4.
//!
//! In: rows of queries and keys, a position for each token, and the angle a pair of elements turns by from a position
//! to the next (or a table of cosines and sines). Out: the rows, each pair `(a, b)` turned to `(a cos - b sin, b cos +
//! a sin)`, computed in f32; elements past `rotary_dim` as they were. Invariant: every element is read once and written
//! once, by the same thread, so a row may be rotated in place; a token that is to be skipped writes nothing.
//!
//! An angle is a whole number of 2^-64 turns: times a position it wraps as turns do and loses nothing, so cosines are
//! as good at position 2^31 as at 1. In radians, f32 has 0.06 between neighbours at position 10^6.
use simt::{
    global::Global,
    grid,
    math::{cos_sin_of_turn, multiply_add, multiply_high},
    number::{Bf16, F16},
    tensor::Element,
    thread,
};

use crate::abi::parameters::{RopeParameters, RowsView};
use crate::abi::tile::{ROPE_HEADS, ROPE_THREADS};
use crate::tile::unroll;

const HEADS: usize = ROPE_HEADS as usize;

/// A format rows come in; a piece is eight elements.
pub trait Rotated: Copy + 'static {
    /// A piece as it lies in memory.
    type Piece: Copy;
    /// Its bytes.
    const PIECE_BYTES: u64;
    /// A piece of zeros.
    const ZERO: Self::Piece;

    /// Reads a piece.
    ///
    /// # Safety
    /// `at` is live and 16-byte aligned.
    unsafe fn load(at: Global<u8>) -> Self::Piece;

    /// Writes a piece.
    ///
    /// # Safety
    /// As [`load`](Self::load), and no other thread uses it.
    unsafe fn store(at: Global<u8>, piece: Self::Piece);

    /// Its elements.
    fn unpack(piece: Self::Piece) -> [f32; 8];

    /// Eight elements, rounded to nearest even.
    fn pack(values: [f32; 8]) -> Self::Piece;
}

impl Rotated for f32 {
    type Piece = [[u32; 4]; 2];
    const PIECE_BYTES: u64 = 32;
    const ZERO: [[u32; 4]; 2] = [[0; 4]; 2];

    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    unsafe fn load(at: Global<u8>) -> [[u32; 4]; 2] {
        let at = at.cast::<[u32; 4]>();
        // SAFETY: the caller's contract is this function's own.
        unsafe { [at.load(), at.add(1).load()] }
    }
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    unsafe fn store(at: Global<u8>, piece: [[u32; 4]; 2]) {
        let at = at.cast::<[u32; 4]>();
        // SAFETY: the caller's contract is this function's own.
        unsafe {
            at.store(piece[0]);
            at.add(1).store(piece[1]);
        }
    }
    #[inline(always)]
    fn unpack([a, b]: [[u32; 4]; 2]) -> [f32; 8] {
        [a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3]].map(f32::from_bits)
    }
    #[inline(always)]
    fn pack(values: [f32; 8]) -> [[u32; 4]; 2] {
        let [a, b, c, d, e, f, g, h] = values.map(f32::to_bits);
        [[a, b, c, d], [e, f, g, h]]
    }
}

macro_rules! sixteen_bit {
    ($type:ty) => {
        impl Rotated for $type {
            type Piece = [u32; 4];
            const PIECE_BYTES: u64 = 16;
            const ZERO: [u32; 4] = [0; 4];

            #[inline(always)]
            #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
            unsafe fn load(at: Global<u8>) -> [u32; 4] {
                // SAFETY: the caller's contract is this function's own.
                unsafe { at.cast::<[u32; 4]>().load() }
            }
            #[inline(always)]
            #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
            unsafe fn store(at: Global<u8>, piece: [u32; 4]) {
                // SAFETY: the caller's contract is this function's own.
                unsafe { at.cast::<[u32; 4]>().store(piece) }
            }
            #[inline(always)]
            fn unpack(piece: [u32; 4]) -> [f32; 8] {
                let [(a, b), (c, d), (e, f), (g, h)] = piece.map(<$type as Element>::unpack);
                [a, b, c, d, e, f, g, h]
            }
            #[inline(always)]
            fn pack([a, b, c, d, e, f, g, h]: [f32; 8]) -> [u32; 4] {
                let pack = <$type as Element>::pack;
                [pack(a, b), pack(c, d), pack(e, f), pack(g, h)]
            }
        }
    };
}
sixteen_bit!(Bf16);
sixteen_bit!(F16);

/// What a thread works on: 16 elements of each row of a group of heads, in two pieces.
#[derive(Clone, Copy)]
struct Unit {
    token: u32,
    first_head: u32,
    /// Pairs `8 * index ..` if it is below `rotary_dim / 16`, else elements to copy.
    index: u32,
}

/// Rotates; threads take units in turn. Neighbours take neighbouring pieces of a row.
///
/// # Safety
/// `p` describes live memory as [`crate::abi`] says; the launch has [`ROPE_THREADS`] threads.
#[inline(always)]
pub unsafe fn rope<T: Rotated>(p: RopeParameters) {
    grid::wait_for_previous_grid();
    grid::allow_next_grid();
    let end = p.tokens * p.token_units.get();
    let mut index = thread::block_idx_x() * ROPE_THREADS + thread::thread_idx_x();
    while index < end {
        let (token, rest) = p.token_units.divide(index);
        let (group, unit) = p.units.divide(rest);
        let unit = Unit { token, first_head: group * ROPE_HEADS, index: unit };
        // SAFETY: the caller's contract.
        unsafe {
            if unit.index < p.rotary_dim / 16 {
                rotate::<T>(&p, unit);
            } else {
                copy::<T>(&p, unit);
            }
        }
        index += thread::grid_dim_x() * ROPE_THREADS;
    }
}

#[inline(always)]
unsafe fn rotate<T: Rotated>(p: &RopeParameters, unit: Unit) {
    let apart = if p.interleaved != 0 { 1 } else { p.rotary_dim as u64 / 16 };
    let first = if p.interleaved != 0 { 2 * unit.index as u64 } else { unit.index as u64 };
    let mut data = [(T::ZERO, T::ZERO); HEADS];
    // SAFETY: the kernel's contract.
    unsafe {
        // Rows first: their loads do not wait for those that lead to a position.
        unroll::<HEADS>(|i| {
            if unit.first_head + (i as u32) < p.heads {
                let row = row_of(p, false, unit.token, unit.first_head + i as u32).add(first * T::PIECE_BYTES);
                data[i] = (T::load(row), T::load(row.add(apart * T::PIECE_BYTES)));
            }
        });
        let Some(position) = position_of(p, unit.token) else { return };
        let (cosines, sines) = cos_sin(p, position, unit.index);
        unroll::<HEADS>(|i| {
            if unit.first_head + (i as u32) < p.heads {
                let (low, high) = (T::unpack(data[i].0), T::unpack(data[i].1));
                let (low, high) = if p.interleaved != 0 {
                    let (a, b) = evens_and_odds(low, high);
                    interleave(turn(a, b, cosines, sines))
                } else {
                    turn(low, high, cosines, sines)
                };
                let row = row_of(p, true, unit.token, unit.first_head + i as u32).add(first * T::PIECE_BYTES);
                T::store(row, T::pack(low));
                T::store(row.add(apart * T::PIECE_BYTES), T::pack(high));
            }
        });
    }
}

/// Copies the elements of a unit past `rotary_dim`: two pieces, or one at the end of a row.
#[inline(always)]
unsafe fn copy<T: Rotated>(p: &RopeParameters, unit: Unit) {
    let first = 2 * unit.index;
    let is_pair = first + 1 < p.head_dim / 8;
    let mut data = [(T::ZERO, T::ZERO); HEADS];
    // SAFETY: the kernel's contract.
    unsafe {
        unroll::<HEADS>(|i| {
            if is_copied(p, unit.first_head + i as u32) {
                let row = row_of(p, false, unit.token, unit.first_head + i as u32).add(first as u64 * T::PIECE_BYTES);
                data[i].0 = T::load(row);
                if is_pair {
                    data[i].1 = T::load(row.add(T::PIECE_BYTES));
                }
            }
        });
        if position_of(p, unit.token).is_none() {
            return;
        }
        unroll::<HEADS>(|i| {
            if is_copied(p, unit.first_head + i as u32) {
                let row = row_of(p, true, unit.token, unit.first_head + i as u32).add(first as u64 * T::PIECE_BYTES);
                T::store(row, data[i].0);
                if is_pair {
                    T::store(row.add(T::PIECE_BYTES), data[i].1);
                }
            }
        });
    }
}

/// Whether a head is there and its rows are not rotated in place.
#[inline(always)]
fn is_copied(p: &RopeParameters, head: u32) -> bool {
    let in_place = if head < p.query_heads { p.q.address == p.q_out.address } else { p.k.address == p.k_out.address };
    head < p.heads && !in_place
}

/// Position of a token, or `None` where it is to be skipped.
#[inline(always)]
unsafe fn position_of(p: &RopeParameters, token: u32) -> Option<u32> {
    // SAFETY: the kernel's contract.
    let position = unsafe {
        if p.positions != 0 {
            Global::<u32>::new(p.positions).add(token as u64).load_constant() as i32 as i64
        } else {
            let begin = |request: u32| Global::<u32>::new(p.query_begin).add(request as u64).load_constant();
            if token >= begin(p.request_count) {
                return None;
            }
            // The last request that begins at or before the token; empty ones before it begin there too.
            let (mut low, mut high) = (0, p.request_count);
            while high - low > 1 {
                let middle = (low + high) / 2;
                if begin(middle) <= token { low = middle } else { high = middle }
            }
            let offset = Global::<u32>::new(p.offsets).add(low as u64).load_constant() as i32;
            offset as i64 + (token - begin(low)) as i64
        }
    };
    let cached = p.turns != 0 || position < p.cached_positions as i64;
    (position >= 0 && cached).then_some(position as u32)
}

/// Cosines and sines of pairs `8 * unit ..`.
#[inline(always)]
unsafe fn cos_sin(p: &RopeParameters, position: u32, unit: u32) -> ([f32; 8], [f32; 8]) {
    // SAFETY: the kernel's contract.
    unsafe {
        if p.turns == 0 {
            let row = Global::<f32>::new(p.cos_sin).add(position as u64 * p.rotary_dim as u64 + 8 * unit as u64);
            let eight = |at: Global<f32>| f32::unpack(<f32 as Rotated>::load(at.cast()));
            return (eight(row), eight(row.add(p.rotary_dim as u64 / 2)));
        }
        let turns = Global::<[u32; 4]>::new(p.turns).add(4 * unit as u64);
        let (a, b, c, d) = (
            turns.load_constant(),
            turns.add(1).load_constant(),
            turns.add(2).load_constant(),
            turns.add(3).load_constant(),
        );
        // The upper half of the 64-bit product, whose overflow is whole turns.
        let at = |low: u32, high: u32| {
            cos_sin_of_turn(high.wrapping_mul(position).wrapping_add(multiply_high(low, position)))
        };
        let pairs = [
            at(a[0], a[1]),
            at(a[2], a[3]),
            at(b[0], b[1]),
            at(b[2], b[3]),
            at(c[0], c[1]),
            at(c[2], c[3]),
            at(d[0], d[1]),
            at(d[2], d[3]),
        ];
        (pairs.map(|pair| pair.0), pairs.map(|pair| pair.1))
    }
}

/// Turns eight pairs.
#[inline(always)]
fn turn(a: [f32; 8], b: [f32; 8], cosines: [f32; 8], sines: [f32; 8]) -> ([f32; 8], [f32; 8]) {
    let (mut x, mut y) = (a, b);
    unroll::<8>(|i| {
        x[i] = multiply_add(a[i], cosines[i], -(b[i] * sines[i]));
        y[i] = multiply_add(b[i], cosines[i], a[i] * sines[i]);
    });
    (x, y)
}

#[inline(always)]
fn evens_and_odds(low: [f32; 8], high: [f32; 8]) -> ([f32; 8], [f32; 8]) {
    let ([a, b, c, d, e, f, g, h], [i, j, k, l, m, n, o, q]) = (low, high);
    ([a, c, e, g, i, k, m, o], [b, d, f, h, j, l, n, q])
}

#[inline(always)]
fn interleave((evens, odds): ([f32; 8], [f32; 8])) -> ([f32; 8], [f32; 8]) {
    let ([a, c, e, g, i, k, m, o], [b, d, f, h, j, l, n, q]) = (evens, odds);
    ([a, b, c, d, e, f, g, h], [i, j, k, l, m, n, o, q])
}

/// The row of a head in the list of query heads and key heads.
#[inline(always)]
fn row_of(p: &RopeParameters, output: bool, token: u32, head: u32) -> Global<u8> {
    let (q, k) = if output { (&p.q_out, &p.k_out) } else { (&p.q, &p.k) };
    let at = |view: &RowsView, head: u32| {
        Global::new(view.address)
            .add_bytes(token as i64 * view.token_stride_bytes)
            .add_bytes(head as i64 * view.head_stride_bytes)
    };
    if head < p.query_heads { at(q, head) } else { at(k, head - p.query_heads) }
}
