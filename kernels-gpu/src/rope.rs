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
    thread,
};

use crate::abi::parameters::{RopeParameters, RowsView};
use crate::abi::tile::{ROPE_HEADS, ROPE_THREADS};
use crate::pieces::Pieces;
use crate::tile::unroll;

const HEADS: usize = ROPE_HEADS as usize;

/// Where rows go.
pub trait Output<T: Pieces>: Copy {
    /// What has to be looked up before the rows of some heads of a token can be written.
    type Place: Copy;

    /// Looks it up.
    ///
    /// # Safety
    /// The kernel's contract.
    unsafe fn place(self, p: &RopeParameters, token: u32, first_head: u32) -> Self::Place;

    /// Whether the elements of a head past `rotary_dim` have to be written too.
    fn takes_rest(self, p: &RopeParameters, head: u32) -> bool;

    /// Writes a rotated piece of a head's row.
    ///
    /// # Safety
    /// The kernel's contract; no other thread writes it.
    unsafe fn put(self, p: &RopeParameters, place: Self::Place, at: Row, piece: u32, values: [f32; 8]);

    /// Writes a piece as it was read.
    ///
    /// # Safety
    /// As [`put`](Self::put).
    unsafe fn put_rest(self, p: &RopeParameters, place: Self::Place, at: Row, piece: u32, value: T::Piece);
}

/// A row of the list of query heads and key heads.
#[derive(Clone, Copy)]
pub struct Row {
    /// Its token.
    pub token: u32,
    /// Its head in the list.
    pub head: u32,
}

/// Rows go to `q_out` and `k_out`.
#[derive(Clone, Copy)]
pub struct ToRows;

impl<T: Pieces> Output<T> for ToRows {
    type Place = ();

    #[inline(always)]
    unsafe fn place(self, _: &RopeParameters, _: u32, _: u32) {}

    #[inline(always)]
    fn takes_rest(self, p: &RopeParameters, head: u32) -> bool {
        if head < p.query_heads { p.q.address != p.q_out.address } else { p.k.address != p.k_out.address }
    }

    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    unsafe fn put(self, p: &RopeParameters, _: (), at: Row, piece: u32, values: [f32; 8]) {
        // SAFETY: the caller's contract is this function's own.
        unsafe { T::store(piece_of::<T>([&p.q_out, &p.k_out], p, at, piece), T::pack(values)) }
    }

    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    unsafe fn put_rest(self, p: &RopeParameters, _: (), at: Row, piece: u32, value: T::Piece) {
        // SAFETY: the caller's contract is this function's own.
        unsafe { T::store(piece_of::<T>([&p.q_out, &p.k_out], p, at, piece), value) }
    }
}

/// Rotates; threads take units in turn. Neighbours take neighbouring pieces of a row.
///
/// # Safety
/// `p` describes live memory as [`crate::abi`] says; the launch has [`ROPE_THREADS`] threads.
#[inline(always)]
pub unsafe fn rope<T: Pieces>(p: RopeParameters) {
    grid::wait_for_previous_grid();
    grid::allow_next_grid();
    let mut index = thread::block_idx_x() * ROPE_THREADS + thread::thread_idx_x();
    while index < p.tokens * p.token_units.get() {
        // SAFETY: the caller's contract.
        unsafe { turn_unit::<T, ToRows>(&p, index, ToRows) };
        index += thread::grid_dim_x() * ROPE_THREADS;
    }
}

/// What a thread works on: 16 elements of each row of a group of heads, in two pieces.
#[derive(Clone, Copy)]
struct Unit {
    token: u32,
    first_head: u32,
    /// Pairs `8 * index ..` if it is below `rotary_dim / 16`, else elements to copy.
    index: u32,
}

impl Unit {
    #[inline(always)]
    fn row(self, i: usize) -> Row {
        Row { token: self.token, head: self.first_head + i as u32 }
    }
}

/// Does unit `index` of the launch's: rotates its elements, or copies those past `rotary_dim`.
///
/// # Safety
/// The kernel's contract; `index` is below `tokens * token_units`.
#[inline(always)]
pub unsafe fn turn_unit<T: Pieces, O: Output<T>>(p: &RopeParameters, index: u32, output: O) {
    let (token, rest) = p.token_units.divide(index);
    let (group, unit) = p.units.divide(rest);
    let unit = Unit { token, first_head: group * ROPE_HEADS, index: unit };
    // SAFETY: the caller's contract.
    unsafe {
        if unit.index < p.rotary_dim / 16 {
            rotate::<T, O>(p, unit, output);
        } else {
            copy::<T, O>(p, unit, output);
        }
    }
}

#[inline(always)]
unsafe fn rotate<T: Pieces, O: Output<T>>(p: &RopeParameters, unit: Unit, output: O) {
    let apart = if p.interleaved != 0 { 1 } else { p.rotary_dim / 16 };
    let first = if p.interleaved != 0 { 2 * unit.index } else { unit.index };
    let mut data = [(T::ZERO, T::ZERO); HEADS];
    // SAFETY: the kernel's contract.
    unsafe {
        // Rows first: their loads do not wait for those that lead to a position.
        unroll::<HEADS>(|i| {
            let row = unit.row(i);
            if row.head < p.heads {
                let piece = |piece| T::load(piece_of::<T>([&p.q, &p.k], p, row, piece));
                data[i] = (piece(first), piece(first + apart));
            }
        });
        let Some(position) = position_of(p, unit.token) else { return };
        let place = output.place(p, unit.token, unit.first_head);
        let (cosines, sines) = cos_sin(p, position, unit.index);
        unroll::<HEADS>(|i| {
            let row = unit.row(i);
            if row.head < p.heads {
                let (low, high) = (T::unpack(data[i].0), T::unpack(data[i].1));
                let (low, high) = if p.interleaved != 0 {
                    let (a, b) = evens_and_odds(low, high);
                    interleave(turn(a, b, cosines, sines))
                } else {
                    turn(low, high, cosines, sines)
                };
                output.put(p, place, row, first, low);
                output.put(p, place, row, first + apart, high);
            }
        });
    }
}

/// Copies the elements of a unit past `rotary_dim`: two pieces, or one at the end of a row.
#[inline(always)]
unsafe fn copy<T: Pieces, O: Output<T>>(p: &RopeParameters, unit: Unit, output: O) {
    let first = 2 * unit.index;
    let is_pair = first + 1 < p.head_dim / 8;
    let is_copied = |row: Row| row.head < p.heads && output.takes_rest(p, row.head);
    let mut data = [(T::ZERO, T::ZERO); HEADS];
    // SAFETY: the kernel's contract.
    unsafe {
        unroll::<HEADS>(|i| {
            let row = unit.row(i);
            if is_copied(row) {
                let piece = |piece| T::load(piece_of::<T>([&p.q, &p.k], p, row, piece));
                data[i].0 = piece(first);
                if is_pair {
                    data[i].1 = piece(first + 1);
                }
            }
        });
        if position_of(p, unit.token).is_none() {
            return;
        }
        let place = output.place(p, unit.token, unit.first_head);
        unroll::<HEADS>(|i| {
            let row = unit.row(i);
            if is_copied(row) {
                output.put_rest(p, place, row, first, data[i].0);
                if is_pair {
                    output.put_rest(p, place, row, first + 1, data[i].1);
                }
            }
        });
    }
}

/// Position of a token, or `None` where it is to be skipped.
///
/// # Safety
/// The kernel's contract.
#[inline(always)]
pub unsafe fn position_of(p: &RopeParameters, token: u32) -> Option<u32> {
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
            let eight = |at: Global<f32>| f32::unpack(f32::load(at.cast()));
            return (eight(row), eight(row.add(p.rotary_dim as u64 / 2)));
        }
        let turns = Global::<[u32; 4]>::new(p.turns).add(4 * unit as u64);
        let (a, b, c, d) = (
            turns.load_constant(),
            turns.add(1).load_constant(),
            turns.add(2).load_constant(),
            turns.add(3).load_constant(),
        );
        let [a, b, c, d] = [a, b, c, d].map(|turns| cos_sin_of_turns(turns, position));
        let pairs = [a[0], a[1], b[0], b[1], c[0], c[1], d[0], d[1]];
        (pairs.map(|pair| pair.0), pairs.map(|pair| pair.1))
    }
}

/// Cosines and sines of two pairs, whose angles at position 1 are two u64, in 2^-64 of a turn.
#[inline(always)]
pub(crate) fn cos_sin_of_turns(turns: [u32; 4], position: u32) -> [(f32, f32); 2] {
    // The upper half of the 64-bit product, whose overflow is whole turns.
    let at =
        |low: u32, high: u32| cos_sin_of_turn(high.wrapping_mul(position).wrapping_add(multiply_high(low, position)));
    [at(turns[0], turns[1]), at(turns[2], turns[3])]
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

/// Where a piece of a row lies in queries or keys.
#[inline(always)]
pub fn piece_of<T: Pieces>([q, k]: [&RowsView; 2], p: &RopeParameters, at: Row, piece: u32) -> Global<u8> {
    let of = |view: &RowsView, head: u32| {
        Global::new(view.address)
            .add_bytes(at.token as i64 * view.token_stride_bytes)
            .add_bytes(head as i64 * view.head_stride_bytes)
            .add(piece as u64 * T::PIECE_BYTES)
    };
    if at.head < p.query_heads { of(q, at.head) } else { of(k, at.head - p.query_heads) }
}
