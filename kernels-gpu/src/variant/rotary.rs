//! Any of the stock changes over queries and keys that are normalised and rotated on their way to their product: QK norm
//! and RoPE, in that order.
//!
//! In: [`RotaryParameters`], whose addresses are 0 where a change is off; rows as they lie in the cache, neither
//! normalised nor rotated. A row `x` becomes `x / sqrt(mean(x^2) + epsilon) * weight`, then each of its pairs turns by the
//! row's position times the pair's angle, all in f32, and is rounded once, as a kernel of its own before attention would
//! leave it. A key's position is its place among its request's keys, so that keys which move in the cache, as
//! StreamingLLM's do, need not be rotated again. A query's is its token's place, or given.
//!
//! RoPE: Su et al., "RoFormer" (2021). Re-based positions: Xiao et al., "Efficient streaming language models with
//! attention sinks" (2023). QK norm: as in Qwen 3 and Gemma 3.

use super::ModifiedParameters;

/// [`Rotary`]'s parameters.
#[derive(Clone, Copy, Debug, PartialEq)]
#[cfg_attr(not(target_arch = "nvptx64"), derive(bytemuck::Pod, bytemuck::Zeroable))]
#[repr(C)]
pub struct RotaryParameters {
    /// The stock changes.
    pub modified: ModifiedParameters,
    /// `[rotary_dim / 2]` u64 angle of each pair at position 1, in 2^-64 of a turn, then `[3, rotary_dim / 2, 2]` f32
    /// cosines and sines of each pair's at positions 4, 8 and 16; 0 for no rotation.
    pub turns: u64,
    /// `[query tokens]` i32 positions of query tokens, counted from their request's first key; 0 for their places.
    pub positions: u64,
    /// `[head_dim]` f32 weights of the queries' norm, or 0 for none.
    pub query_norm: u64,
    /// The same of the keys'.
    pub key_norm: u64,
    /// What is added to a query's mean square.
    pub query_epsilon: f32,
    /// The same of a key's.
    pub key_epsilon: f32,
    /// First elements of a row, which are rotated: a multiple of 16.
    pub rotary_dim: u32,
    /// 1 if a pair is two neighbours; 0 if it is two elements `rotary_dim / 2` apart.
    pub interleaved: u32,
}

const _: () = assert!(size_of::<RotaryParameters>() == size_of::<ModifiedParameters>() + 4 * 8 + 4 * 4);

#[cfg(any(target_arch = "nvptx64", feature = "emulator"))]
pub use device::Rotary;

#[cfg(any(target_arch = "nvptx64", feature = "emulator"))]
mod device {
    use simt::{global::Global, math, registers::anew, shared::Shared, tensor::Element, thread, warp};

    use super::RotaryParameters;
    use crate::rope::cos_sin_of_turns;
    use crate::tile::{Rows, unroll};
    use crate::variant::{Modified, Piece, QueryAt, RowAt, Variant};

    /// Attention with any of the stock changes, norms and a rotary embedding.
    #[derive(Clone, Copy)]
    pub struct Rotary {
        modified: Modified,
        p: RotaryParameters,
    }

    /// What happens to the rows of a tile besides the rotation.
    #[derive(Clone, Copy)]
    struct Norm {
        weights: u64,
        epsilon: f32,
    }

    impl Rotary {
        /// Changes the first `rows` rows of a tile. A lane has 8 columns of a row, 4 pairs where they are rotated, and the
        /// lanes of a row are neighbours; `position` gives a row's and the sign that it has.
        ///
        /// Where positions are consecutive a lane's first row has exact angles, and the next are one turn further each: at
        /// most fifteen products, and so fifteen roundings, later. From row to row a lane goes 4, 8 or 16 rows.
        #[inline(always)]
        #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
        unsafe fn transform<E: Element, const HEAD_DIM: u32>(
            &self,
            is_consecutive: bool,
            tile: impl Rows,
            rows: u32,
            threads: u32,
            norm: Norm,
            position: impl Fn(u32) -> (u32, f32),
        ) {
            let units = HEAD_DIM / 8;
            let lanes = units.next_power_of_two();
            let thread = anew(thread::thread_idx_x()) % threads;
            let (first_row, unit) = (thread / lanes, thread % lanes);
            let p = &self.p;
            let is_rotated = p.turns != 0 && unit < p.rotary_dim / 8;
            let is_apart = is_rotated && p.interleaved == 0;
            // Where both halves of a lane's columns begin: in the two halves of what is rotated, or side by side.
            let [first, second] =
                if is_apart { [4 * unit, 4 * unit + p.rotary_dim / 2] } else { [8 * unit, 8 * unit + 4] };
            let exact = |position: u32| {
                let turns = Global::<[u32; 4]>::new(p.turns).add(2 * unit as u64);
                // SAFETY: an angle for each pair that is rotated, by the trait's contract.
                let [low, high] = unsafe { [turns.load_constant(), turns.add(1).load_constant()] };
                let ([a, b], [c, d]) = (cos_sin_of_turns(low, position), cos_sin_of_turns(high, position));
                [a, b, c, d]
            };
            let (mut angles, mut step) = ([(1.0, 0.0); 4], [(1.0, 0.0); 4]);
            // On smaller parts 16 bytes of it would be spilled at 128.
            let has_room = HEAD_DIM != 128 || cfg!(any(target_feature = "sm_90a", not(target_arch = "nvptx64")));
            let is_consecutive = is_consecutive && has_room;
            if is_consecutive && is_rotated {
                // Of 4 rows, then of 8 and 16.
                let pairs = p.rotary_dim / 2;
                let place = pairs + (threads / lanes).ilog2().saturating_sub(2) * pairs + 4 * unit;
                let steps = Global::<u64>::new(p.turns).add(place as u64).cast::<[f32; 4]>();
                // SAFETY: what follows the angles, by the trait's contract.
                let [[a, b, c, d], [e, f, g, h]] = unsafe { [steps.load_constant(), steps.add(1).load_constant()] };
                (angles, step) = (exact(position(first_row).0), [(a, b), (c, d), (e, f), (g, h)]);
            }
            if norm.weights == 0 {
                let mut angles_of = |row: u32| {
                    if is_consecutive {
                        let now = angles;
                        angles = turned_by(now, step);
                        return (now, 1.0);
                    }
                    let (position, sign) = position(row);
                    (exact(position), sign)
                };
                let columns = Columns { tile, first, second };
                // SAFETY: the caller's contract.
                unsafe {
                    let rows = [first_row, rows, threads / lanes];
                    match (is_apart, has_room) {
                        _ if !is_rotated => {}
                        (true, true) => columns.turn::<E, true, 2>(rows, &mut angles_of),
                        (true, false) => columns.turn::<E, true, 1>(rows, &mut angles_of),
                        (false, true) => columns.turn::<E, false, 2>(rows, &mut angles_of),
                        (false, false) => columns.turn::<E, false, 1>(rows, &mut angles_of),
                    }
                }
                return;
            }
            let mut begin = 0;
            // The same number of rounds for all lanes of a warp.
            while begin < rows {
                let row = begin + first_row;
                let is_here = unit < units && row < rows;
                let columns = Columns { tile, first, second };
                let (mut low, mut high) = ([0.0; 4], [0.0; 4]);
                // SAFETY: the caller's contract; the warp's lanes are together.
                unsafe {
                    if is_here {
                        (low, high) = columns.load::<E>(row);
                    }
                    let mut squares = 0.0;
                    unroll::<4>(|i| {
                        squares = math::multiply_add(low[i], low[i], squares);
                        squares = math::multiply_add(high[i], high[i], squares);
                    });
                    let mut apart = 1;
                    while apart < lanes {
                        squares += warp::shuffle_xor_f32(squares, apart);
                        apart *= 2;
                    }
                    let mean = math::multiply_add(squares, 1.0 / HEAD_DIM as f32, norm.epsilon);
                    let scale = math::exp2(-0.5 * math::log2(mean));
                    if is_here {
                        let weights = |column: u32| {
                            let weights = Global::<f32>::new(norm.weights).add(column as u64);
                            weights.cast::<[u32; 4]>().load_constant().map(f32::from_bits)
                        };
                        let [of_low, of_high] = [weights(first), weights(second)];
                        unroll::<4>(|i| {
                            low[i] *= scale * of_low[i];
                            high[i] *= scale * of_high[i];
                        });
                    }
                    if is_here {
                        if is_rotated {
                            let mut sign = 1.0;
                            if !is_consecutive {
                                let at = position(row);
                                (angles, sign) = (exact(at.0), at.1);
                            }
                            if !is_apart {
                                (low, high) = to_pairs(low, high);
                            }
                            (low, high) = turn(low, high, angles, sign);
                            if !is_apart {
                                (low, high) = from_pairs(low, high);
                            }
                        }
                        columns.store::<E>(row, low, high);
                    }
                }
                if is_consecutive {
                    angles = turned_by(angles, step);
                }
                begin += threads / lanes;
            }
        }
    }

    /// A lane's columns of a row: four from `first` on and four from `second`.
    #[derive(Clone, Copy)]
    struct Columns<T> {
        tile: T,
        first: u32,
        second: u32,
    }

    impl<T: Rows> Columns<T> {
        /// Turns the pairs of row `first_row` and each `apart`-th after it, up to `rows`. A pair is two columns in the same
        /// place of either four, or two neighbours; the loads of `TOGETHER` rows are under way at once. `angles_of` gives the angles of a row and their sign, row by row.
        #[inline(always)]
        #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
        unsafe fn turn<E: Element, const IS_APART: bool, const TOGETHER: usize>(
            self,
            [first_row, rows, apart]: [u32; 3],
            angles_of: &mut impl FnMut(u32) -> ([(f32, f32); 4], f32),
        ) {
            let mut row = first_row;
            while row < rows {
                let mut loaded = [([0.0; 4], [0.0; 4]); TOGETHER];
                let row_of = |i: usize| row + i as u32 * apart;
                unroll::<TOGETHER>(|i| {
                    if row_of(i) < rows {
                        // SAFETY: the caller's contract.
                        loaded[i] = unsafe { self.load::<E>(row_of(i)) };
                    }
                });
                unroll::<TOGETHER>(|i| {
                    if row_of(i) < rows {
                        let (mut low, mut high) = loaded[i];
                        let (angles, sign) = angles_of(row_of(i));
                        if !IS_APART {
                            (low, high) = to_pairs(low, high);
                        }
                        (low, high) = turn(low, high, angles, sign);
                        if !IS_APART {
                            (low, high) = from_pairs(low, high);
                        }
                        // SAFETY: the caller's contract.
                        unsafe { self.store::<E>(row_of(i), low, high) };
                    }
                });
                row += TOGETHER as u32 * apart;
            }
        }

        #[inline(always)]
        fn at(self, row: u32, column: u32) -> Shared<[u32; 2]> {
            self.tile.chunk(row, column / 8).add_bytes(column % 8 * 2).cast()
        }

        #[inline(always)]
        #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
        unsafe fn load<E: Element>(self, row: u32) -> ([f32; 4], [f32; 4]) {
            // SAFETY: the caller's contract.
            unsafe { (unpack::<E>(self.at(row, self.first).load()), unpack::<E>(self.at(row, self.second).load())) }
        }

        #[inline(always)]
        #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
        unsafe fn store<E: Element>(self, row: u32, low: [f32; 4], high: [f32; 4]) {
            // SAFETY: the caller's contract.
            unsafe {
                self.at(row, self.first).store(pack::<E>(low));
                self.at(row, self.second).store(pack::<E>(high));
            }
        }
    }

    /// Turns four pairs by their angles' cosines and sines, or back where `sign` is -1.
    #[inline(always)]
    fn turn(mut low: [f32; 4], mut high: [f32; 4], angles: [(f32, f32); 4], sign: f32) -> ([f32; 4], [f32; 4]) {
        unroll::<4>(|i| {
            let (cosine, sine) = angles[i];
            let (x, y, sine) = (low[i], high[i], sine * sign);
            low[i] = math::multiply_add(x, cosine, -(y * sine));
            high[i] = math::multiply_add(y, cosine, x * sine);
        });
        (low, high)
    }

    /// Cosines and sines of sums of angles.
    #[inline(always)]
    fn turned_by(mut angles: [(f32, f32); 4], step: [(f32, f32); 4]) -> [(f32, f32); 4] {
        unroll::<4>(|i| {
            let ((cosine, sine), (of_cosine, of_sine)) = (angles[i], step[i]);
            angles[i] = (
                math::multiply_add(cosine, of_cosine, -(sine * of_sine)),
                math::multiply_add(cosine, of_sine, sine * of_cosine),
            );
        });
        angles
    }

    #[inline(always)]
    fn unpack<E: Element>(words: [u32; 2]) -> [f32; 4] {
        let [(a, b), (c, d)] = words.map(E::unpack);
        [a, b, c, d]
    }

    #[inline(always)]
    fn pack<E: Element>([a, b, c, d]: [f32; 4]) -> [u32; 2] {
        [E::pack(a, b), E::pack(c, d)]
    }

    /// The first elements of four neighbouring pairs, and the second ones.
    #[inline(always)]
    fn to_pairs([a, b, c, d]: [f32; 4], [e, f, g, h]: [f32; 4]) -> ([f32; 4], [f32; 4]) {
        ([a, c, e, g], [b, d, f, h])
    }

    /// And back.
    #[inline(always)]
    fn from_pairs([a, c, e, g]: [f32; 4], [b, d, f, h]: [f32; 4]) -> ([f32; 4], [f32; 4]) {
        ([a, b, c, d], [e, f, g, h])
    }

    impl Variant for Rotary {
        type Parameters = RotaryParameters;
        type Row = <Modified as Variant>::Row;
        const TRANSFORMS: bool = true;
        const PADS: bool = false;

        #[inline(always)]
        fn bind(p: RotaryParameters) -> Self {
            Rotary { modified: Modified::bind(p.modified), p }
        }

        #[inline(always)]
        #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
        unsafe fn transform_queries<E: Element, const HEAD_DIM: u32>(
            &self,
            tile: impl Rows,
            rows: u32,
            threads: u32,
            at: impl Fn(u32) -> QueryAt,
        ) {
            let norm = Norm { weights: self.p.query_norm, epsilon: self.p.query_epsilon };
            if norm.weights == 0 && self.p.turns == 0 {
                return;
            }
            let position = |row: u32| {
                let at = at(row);
                let position = match self.p.positions {
                    0 => at.position,
                    // SAFETY: a position for each query token, by the trait's contract.
                    positions => unsafe { Global::<u32>::new(positions).add(at.query as u64).load_constant() as i32 },
                };
                (position.unsigned_abs(), if position < 0 { -1.0 } else { 1.0 })
            };
            // SAFETY: the caller's contract is this function's own.
            unsafe { self.transform::<E, HEAD_DIM>(false, tile, rows, threads, norm, position) }
        }

        #[inline(always)]
        #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
        unsafe fn transform_keys<E: Element, const HEAD_DIM: u32>(
            &self,
            tile: impl Rows,
            [begin, end]: [u32; 2],
            threads: u32,
        ) {
            let norm = Norm { weights: self.p.key_norm, epsilon: self.p.key_epsilon };
            if norm.weights == 0 && self.p.turns == 0 {
                return;
            }
            // SAFETY: the caller's contract is this function's own.
            unsafe { self.transform::<E, HEAD_DIM>(true, tile, end - begin, threads, norm, |row| (begin + row, 1.0)) }
        }

        #[inline(always)]
        #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
        unsafe fn row(&self, at: impl FnOnce() -> RowAt) -> Self::Row {
            // SAFETY: the caller's contract is this function's own.
            unsafe { self.modified.row(at) }
        }

        #[inline(always)]
        fn logit(&self, row: Self::Row, score: f32, key: u32) -> f32 {
            self.modified.logit(row, score, key)
        }

        #[inline(always)]
        fn factor(&self) -> Option<f32> {
            self.modified.factor()
        }

        #[inline(always)]
        #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
        unsafe fn tile_logits<const COLUMNS: usize>(
            &self,
            rows: [Self::Row; 2],
            first_key: u32,
            limits: Option<[i32; 2]>,
            scores: &mut [[f32; 4]; COLUMNS],
        ) {
            // SAFETY: the caller's contract is this function's own.
            unsafe { self.modified.tile_logits(rows, first_key, limits, scores) }
        }

        #[inline(always)]
        fn may_hide(&self, rows: [Self::Row; 2], keys: [u32; 2]) -> bool {
            self.modified.may_hide(rows, keys)
        }

        #[inline(always)]
        #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
        unsafe fn hides(&self, row: Self::Row, key: u32) -> bool {
            // SAFETY: the caller's contract is this function's own.
            unsafe { self.modified.hides(row, key) }
        }

        #[inline(always)]
        #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
        unsafe fn start(&self, row: Self::Row, piece: Piece) -> [f32; 2] {
            // SAFETY: the caller's contract is this function's own.
            unsafe { self.modified.start(row, piece) }
        }

        #[inline(always)]
        fn is_softmax(&self) -> bool {
            self.modified.is_softmax()
        }
    }
}
