//! Attention over a paged cache: each team of blocks walks its queue of work items, a block for its own KV heads.
//!
//! In: the plan's items, queries, page ids, K and V. Out: output rows and LSE. Pieces of split items leave partial
//! states, which the block that finishes the last piece folds. Invariant: at the top of an iteration the tile to
//! compute and `STAGES - 2` younger ones are on their way or there, whichever items and heads they belong to; the
//! pipeline never drains between items.
//!
//! A tile is `16 * KV_WARPS` keys and values. Each warp takes 16 of the keys and keeps its own softmax over them;
//! at the end of an item the warps' states are folded through the stage just consumed. FlashAttention-2 (Dao,
//! 2023) gives the online softmax, Flash-Decoding the split over keys, FlashInfer (Ye et al., 2025) the packing
//! of query heads into rows and the plan.
//!
//! Previous in the walk: [`crate::abi::plan`]. Next: [`crate::merge::fold_rows`].
use simt::{
    asynchronous::{commit_async_copies, copy_async_16, wait_async_copies},
    atomic::fetch_add,
    block::sync_threads,
    global::Global,
    grid, math,
    shared::Shared,
    tensor::{Element, load_matrix_x4, load_matrix_x4_transposed},
    thread,
};

use crate::{
    abi::{
        divisor::Divisor,
        parameters::{AttendParameters, CacheView, RowsView},
        plan::WorkItem,
        tile::{ATTEND_TILE_ROWS, AttendTile, Family},
    },
    merge::{Values, fold_rows},
    softmax::OnlineSoftmax,
    tile::{SharedTile, unroll, zeros},
    variant::{Piece, RowAt, Variant},
};

/// The kernel. `QUERY_STEPS` is `HEAD_DIM / 16` and `OUTPUT_STEPS` the 16-column steps of a warp's share of the
/// output: they are parameters only because array lengths must be.
///
/// # Safety
/// `p` describes live memory as [`crate::abi`] says, for this block's queue; the launch has the threads and shared
/// memory of [`AttendTile`].
#[inline(always)]
pub unsafe fn attend<
    E: Element + Values,
    V: Variant,
    const HEAD_DIM: u32,
    const HOPPER: bool,
    const QUERY_STEPS: usize,
    const OUTPUT_STEPS: usize,
>(
    p: AttendParameters,
    variant: V::Parameters,
) {
    let shape = const { Shape::<HEAD_DIM, HOPPER>::checked(QUERY_STEPS, OUTPUT_STEPS) };
    let variant = V::bind(variant);
    let (lane, warp) = (thread::lane_idx(), thread::warp_idx());
    let (kv_warp, output_warp) = (warp / shape.output_warps, warp % shape.output_warps);
    let (row, quad) = (lane / 4, lane % 4);
    let room = Room::<HEAD_DIM, HOPPER>::new();
    // Wide heads leave no registers for what a variant keeps of its rows; they are looked at again for every tile.
    let rows_resident = V::IS_LIGHT || Shape::<HEAD_DIM, HOPPER>::RESIDENT_QUERIES;

    // SAFETY: the caller's contract covers every address formed below.
    unsafe {
        let (team, member) = p.team_blocks.divide(thread::block_idx_x());
        let queue = Global::<u32>::new(p.queue_begin).add(team as u64);
        let head_begin = member * p.heads_per_block;
        let head_end = (head_begin + p.heads_per_block).min(p.kv_heads);
        let mut at = Cursor {
            item: queue.load_constant(),
            item_end: queue.add(1).load_constant(),
            head: head_begin,
            head_begin,
            head_end,
        };
        let mut loader = Loader::<HEAD_DIM, HOPPER>::new(&p, at);
        loader.begin(&p, room);

        let (mut stage, mut slot) = (0, 0);
        let mut split = false;
        let item_begin = at.item;
        while at.has_work() {
            let work = Work::read(&p, at);
            let limits = work.limits(&p, row);
            let first_limit = work.limit(&p, 0);
            // The lane's two rows, and the first and last of the item.
            let look_at = |work: &Work| {
                let look_at = |row: u32| variant.row(|| work.at(&p, row));
                [[look_at(row), look_at(row + 8)], [look_at(0), look_at(work.rows - 1)]]
            };
            let variant_rows = look_at(&work);
            let mut queries: [[u32; 4]; QUERY_STEPS] = core::mem::zeroed();
            let mut outputs: [[f32; 4]; OUTPUT_STEPS] = core::mem::zeroed();
            let mut outputs_right: [[f32; 4]; OUTPUT_STEPS] = core::mem::zeroed();
            let mut softmax = OnlineSoftmax::new();
            // What a row starts with counts once: in one warp, and there in one lane's part of the sum.
            unroll::<2>(|half| {
                let piece = Piece { index: work.piece, count: work.pieces, keys: [work.kv_begin, work.kv_end] };
                let [maximum, sum] = variant.start(variant_rows[0][half], piece);
                softmax.maximum[half] = if kv_warp == 0 || !variant.is_softmax() { maximum } else { f32::NEG_INFINITY };
                softmax.sum[half] = if kv_warp == 0 && quad == 0 { sum } else { 0.0 };
            });
            let mut token = work.kv_begin;
            loop {
                if shape.stages == 3 {
                    wait_async_copies::<1>()
                } else {
                    wait_async_copies::<0>()
                }
                sync_threads();
                let page = loader.step(&p, room);

                // Wide heads leave no registers for the queries; their fragments are read again for every tile.
                let query = |k: usize| load_matrix_x4(room.queries(slot).chunk(lane % 16, 2 * k as u32 + lane / 16));
                if Shape::<HEAD_DIM, HOPPER>::RESIDENT_QUERIES && token == work.kv_begin {
                    unroll::<QUERY_STEPS>(|k| queries[k] = query(k));
                }

                // S = Q K^T for this warp's 16 keys: columns 0..8 and 8..16. Even and odd steps add up apart, which
                // halves the chain of dependent products, and fragments come a batch at a time, which shows the latency
                // of shared memory once a batch.
                let keys = room.keys(stage);
                let key_row = kv_warp * 16 + lane % 8 + 8 * (lane / 16);
                let mut even = zeros::<2, 4>();
                let mut odd = zeros::<2, 4>();
                unroll::<MOST_BATCHES>(|batch| {
                    let steps = Shape::<HEAD_DIM, HOPPER>::steps_of_batch(batch);
                    let mut fragments = [[0; 4]; BATCH];
                    unroll::<BATCH>(|i| {
                        if i < steps.1 {
                            let chunk = 2 * (steps.0 + i) as u32 + lane / 8 % 2;
                            fragments[i] = load_matrix_x4(keys.chunk(key_row, chunk));
                        }
                    });
                    unroll::<BATCH>(|i| {
                        if i < steps.1 {
                            let k = steps.0 + i;
                            let a = if Shape::<HEAD_DIM, HOPPER>::RESIDENT_QUERIES { queries[k] } else { query(k) };
                            let b = fragments[i];
                            let scores = if k.is_multiple_of(2) { &mut even } else { &mut odd };
                            E::multiply_accumulate(&mut scores[0], a, [b[0], b[1]]);
                            E::multiply_accumulate(&mut scores[1], a, [b[2], b[3]]);
                        }
                    });
                });
                let mut scores = zeros::<2, 4>();
                unroll::<2>(|n| unroll::<4>(|i| scores[n][i] = even[n][i] + odd[n][i]));

                // Where registers allow, the values' fragments are on their way while the softmax is worked out.
                let values = room.values(stage);
                let value = |n: usize| {
                    let column = 2 * (output_warp * OUTPUT_STEPS as u32 + n as u32) + lane / 16;
                    load_matrix_x4_transposed(values.chunk(kv_warp * 16 + lane % 16, column))
                };
                let mut fragments = [[0; 4]; OUTPUT_STEPS];
                if Shape::<HEAD_DIM, HOPPER>::RESIDENT_QUERIES && V::IS_LIGHT {
                    unroll::<OUTPUT_STEPS>(|n| fragments[n] = value(n));
                }

                let (limits, first_limit, [variant_rows, end_rows]) = if rows_resident {
                    (limits, first_limit, variant_rows)
                } else {
                    let work = Work::read_again(&p, at);
                    (work.limits(&p, row), work.limit(&p, 0), look_at(&work))
                };
                let key = token + kv_warp * 16 + 2 * quad;
                unroll::<2>(|n| {
                    unroll::<4>(|i| {
                        let (half, key) = (i / 2, key + 8 * n as u32 + i as u32 % 2);
                        scores[n][i] = variant.logit(variant_rows[half], scores[n][i], key);
                    })
                });
                let tile_end = token + shape.tile_tokens();
                if (tile_end as i32 > first_limit) | variant.may_hide(end_rows, [token, tile_end]) {
                    unroll::<2>(|n| {
                        unroll::<4>(|i| {
                            let (half, key) = (i / 2, key + 8 * n as u32 + i as u32 % 2);
                            if key as i32 >= limits[half] || variant.hides(variant_rows[half], key) {
                                scores[n][i] = f32::NEG_INFINITY;
                            }
                        })
                    });
                }

                // Weights, and what they do to the accumulators.
                let [left, right] = scores;
                let (upper, lower) = ([left[0], left[1], right[0], right[1]], [left[2], left[3], right[2], right[3]]);
                let ((upper, shrink_upper), (lower, shrink_lower)) = if variant.is_softmax() {
                    (softmax.update(0, upper), softmax.update(1, lower))
                } else {
                    ((upper.map(|logit| variant.weight(logit)), 1.0), (lower.map(|logit| variant.weight(logit)), 1.0))
                };
                let weights = [
                    E::pack(upper[0], upper[1]),
                    E::pack(lower[0], lower[1]),
                    E::pack(upper[2], upper[3]),
                    E::pack(lower[2], lower[3]),
                ];
                unroll::<OUTPUT_STEPS>(|n| {
                    outputs[n] = shrink(outputs[n], shrink_upper, shrink_lower);
                    outputs_right[n] = shrink(outputs_right[n], shrink_upper, shrink_lower);
                });

                // O += P V for this warp's 16 values and its columns.
                unroll::<OUTPUT_STEPS>(|n| {
                    let early = Shape::<HEAD_DIM, HOPPER>::RESIDENT_QUERIES && V::IS_LIGHT;
                    let b = if early { fragments[n] } else { value(n) };
                    E::multiply_accumulate(&mut outputs[n], weights, [b[0], b[1]]);
                    E::multiply_accumulate(&mut outputs_right[n], weights, [b[2], b[3]]);
                });

                loader.publish(&p, room, page);
                let consumed = stage;
                stage = next::<HEAD_DIM, HOPPER>(stage);
                token += shape.tile_tokens();
                if token >= work.kv_end {
                    softmax.finish();
                    sync_threads();
                    let fold = room.fold(consumed);
                    let work = Work::read_again(&p, at);
                    unroll::<2>(|half| {
                        let row = row + 8 * half as u32;
                        if row < work.rows {
                            if output_warp == 0 && quad == 0 {
                                fold.state(kv_warp, row).store([softmax.maximum[half], softmax.sum[half]]);
                            }
                            unroll::<OUTPUT_STEPS>(|n| {
                                let column = 16 * (output_warp * OUTPUT_STEPS as u32 + n as u32) + 2 * quad;
                                fold.pair(kv_warp, row, column).store([outputs[n][2 * half], outputs[n][2 * half + 1]]);
                                fold.pair(kv_warp, row, column + 8)
                                    .store([outputs_right[n][2 * half], outputs_right[n][2 * half + 1]]);
                            });
                        }
                    });
                    sync_threads();
                    split |= work.pieces > 1;
                    fold.write::<E>(&p, &work);
                    break;
                }
            }
            at.advance();
            slot = next::<HEAD_DIM, HOPPER>(slot);
        }
        if split {
            arrive::<E, HEAD_DIM, HOPPER>(&p, Cursor { item: item_begin, ..at });
        }
    }
}

/// Counts the block's pieces of split items in; the block that counts an item's last piece folds the pieces' states,
/// in their order, so that the result does not depend on who that is. It comes after the queue's last item, apart
/// from the loop, whose registers it competes for: a kernel without any fold ran 0.5 to 7% faster on uncut batches.
///
/// The barrier orders the block's partial states before the counts, a count's release and acquire order them before
/// the fold, and the second barrier hands that order to the block.
#[inline(always)]
unsafe fn arrive<E: Element + Values, const HEAD_DIM: u32, const HOPPER: bool>(p: &AttendParameters, queue: Cursor) {
    let threads = Shape::<HEAD_DIM, HOPPER>::TILE.threads();
    let complete = Shared::<u32>::dynamic();
    let words = complete.add(threads).cast::<[u32; 4]>();
    let room = words.add(3 * threads).cast();
    let room_bytes = Shape::<HEAD_DIM, HOPPER>::TILE.addresses_offset_bytes() - 52 * threads;
    let mut head = queue.head_begin;
    // SAFETY: the kernel's contract; shared memory is free after the last item.
    unsafe {
        while head < queue.head_end {
            let mut first = queue.item;
            while first < queue.item_end {
                sync_threads();
                let mine = first + thread::thread_idx_x();
                let mut is_complete = false;
                if mine < queue.item_end {
                    let at = Cursor { item: mine, head, ..queue };
                    let work = Work::read_again(p, at);
                    if work.pieces > 1 {
                        let arrivals = Global::<u32>::new(p.arrivals).add(work.group as u64 + head as u64);
                        is_complete = fetch_add(arrivals, 1) + 1 == work.pieces;
                        if is_complete {
                            arrivals.store(0);
                            // The acquire has emptied the first-level cache, so the item goes by shared memory.
                            let [a, b, c] = work.to_words();
                            let slot = words.add(3 * thread::thread_idx_x());
                            slot.store(a);
                            slot.add(1).store(b);
                            slot.add(2).store(c);
                        }
                    }
                }
                complete.add(thread::thread_idx_x()).store(is_complete as u32);
                sync_threads();
                let mut i = 0;
                while i < threads && first + i < queue.item_end {
                    if complete.add(i).load() == 1 {
                        let slot = words.add(3 * i);
                        let item = [slot.load(), slot.add(1).load(), slot.add(2).load()];
                        let at = Cursor { item: first + i, head, ..queue };
                        fold_item::<E, HEAD_DIM, HOPPER>(p, &Work::from_words(item, at), room, room_bytes);
                    }
                    i += 1;
                }
                first += threads;
            }
            head += 1;
        }
    }
}

/// Folds the partial states of an item's rows.
#[inline(always)]
unsafe fn fold_item<E: Element + Values, const HEAD_DIM: u32, const HOPPER: bool>(
    p: &AttendParameters,
    work: &Work,
    room: Shared<u8>,
    room_bytes: u32,
) {
    let states = work.states(0);
    let (values, lse) = (Global::<f32>::new(p.partial_out).add(states * HEAD_DIM as u64), Global::new(p.partial_lse));
    // SAFETY: the kernel's contract; the states are complete.
    unsafe {
        fold_rows::<HEAD_DIM>(
            (room, room_bytes, Shape::<HEAD_DIM, HOPPER>::TILE.threads()),
            (work.rows, work.pieces),
            (values, lse.add(states)),
            |row, column, values, lse_log2| {
                E::store(work.row(&p.out, p.group, row).add(2 * column as u64), values);
                if column == 0 && p.lse.address != 0 {
                    work.row(&p.lse, p.group, row).cast::<f32>().store(lse_log2 * p.lse_scale);
                }
            },
        );
    }
}

/// Key fragments a warp asks for at once, at most: 32 registers.
const BATCH: usize = 8;
/// Batches of the widest head.
const MOST_BATCHES: usize = 16;

/// The next place in a ring of `stages` places.
#[inline(always)]
fn next<const HEAD_DIM: u32, const HOPPER: bool>(place: u32) -> u32 {
    if place + 1 == Shape::<HEAD_DIM, HOPPER>::TILE.stages { 0 } else { place + 1 }
}

#[inline(always)]
fn shrink(c: [f32; 4], upper: f32, lower: f32) -> [f32; 4] {
    [c[0] * upper, c[1] * upper, c[2] * lower, c[3] * lower]
}

/// A place in the queue: an item and one of this block's heads.
#[derive(Clone, Copy)]
struct Cursor {
    item: u32,
    item_end: u32,
    head: u32,
    head_begin: u32,
    head_end: u32,
}

impl Cursor {
    #[inline(always)]
    fn has_work(self) -> bool {
        self.item < self.item_end
    }

    #[inline(always)]
    fn advance(&mut self) {
        self.head += 1;
        if self.head >= self.head_end {
            self.head = self.head_begin;
            self.item += 1;
        }
    }
}

/// The tile table's row as constants.
struct Shape<const HEAD_DIM: u32, const HOPPER: bool>;

impl<const HEAD_DIM: u32, const HOPPER: bool> Shape<HEAD_DIM, HOPPER> {
    const TILE: AttendTile = match AttendTile::new(HEAD_DIM, if HOPPER { Family::Sm90a } else { Family::Sm80 }) {
        Some(tile) => tile,
        None => panic!("no tile for this head dim"),
    };
    /// 16-byte pieces of a row.
    const CHUNKS: u32 = HEAD_DIM / 8;
    /// Whether a warp keeps the query fragments in registers: up to 56 of them, beside as many accumulators.
    const RESIDENT_QUERIES: bool = HEAD_DIM <= 224;
    /// Rounds in which the block's threads copy a tile of K (and of V), a piece each.
    const ROUNDS: usize = (Self::TILE.tile_tokens() * Self::CHUNKS / Self::TILE.threads()) as usize;

    /// First step of a batch of key fragments, and how many: half as many where queries are read again, and less
    /// where the loop would spill.
    const fn steps_of_batch(batch: usize) -> (usize, usize) {
        let size = if Self::RESIDENT_QUERIES {
            BATCH
        } else if HEAD_DIM <= 256 {
            BATCH / 2
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

    const fn checked(query_steps: usize, output_steps: usize) -> AttendTile {
        assert!(query_steps as u32 * 16 == HEAD_DIM);
        assert!(output_steps as u32 * 16 * Self::TILE.output_warps == HEAD_DIM);
        assert!(Self::TILE.stages == 2 || Self::TILE.stages == 3);
        assert!(SharedTile::<HEAD_DIM>::ROW_BYTES == Self::TILE.row_bytes());
        assert!((Self::TILE.tile_tokens() * Self::CHUNKS).is_multiple_of(Self::TILE.threads()));
        assert!(Self::ROUNDS <= MOST_ROUNDS && Self::steps_of_batch(MOST_BATCHES).1 == 0);
        Self::TILE
    }
}

/// The block's shared memory: stages of keys and values, as many slots of query rows, two buffers of row addresses,
/// the warps' states. Slots turn with the items, so an item's query rows stay while it runs.
#[derive(Clone, Copy)]
struct Room<const HEAD_DIM: u32, const HOPPER: bool> {
    base: Shared<u8>,
}

impl<const HEAD_DIM: u32, const HOPPER: bool> Room<HEAD_DIM, HOPPER> {
    const TILE: AttendTile = Shape::<HEAD_DIM, HOPPER>::TILE;

    #[inline(always)]
    fn new() -> Self {
        Room { base: Shared::dynamic() }
    }

    #[inline(always)]
    fn stage(self, stage: u32) -> Shared<u8> {
        self.base.add_bytes(stage * Self::TILE.stage_bytes())
    }

    #[inline(always)]
    fn keys(self, stage: u32) -> SharedTile<HEAD_DIM> {
        SharedTile::new(self.stage(stage))
    }

    #[inline(always)]
    fn values(self, stage: u32) -> SharedTile<HEAD_DIM> {
        SharedTile::new(self.stage(stage).add_bytes(Self::TILE.tile_tokens() * Self::TILE.row_bytes()))
    }

    #[inline(always)]
    fn queries(self, slot: u32) -> SharedTile<HEAD_DIM> {
        SharedTile::new(self.stage(Self::TILE.stages).add_bytes(slot * ATTEND_TILE_ROWS * Self::TILE.row_bytes()))
    }

    /// Where row `row` of the tile of parity `parity` is in global memory: K's address, then V's.
    #[inline(always)]
    fn row_address(self, parity: u32, row: u32) -> Shared<[u32; 4]> {
        let start = self.base.add_bytes(Self::TILE.addresses_offset_bytes());
        start.cast().add(parity * Self::TILE.tile_tokens() + row)
    }

    #[inline(always)]
    fn fold(self, stage: u32) -> Fold<HEAD_DIM, HOPPER> {
        let states = self.base.add_bytes(Self::TILE.states_offset_bytes());
        Fold { outputs: self.stage(stage).cast(), states: states.cast() }
    }
}

/// A tile whose addresses lie in shared memory.
#[derive(Clone, Copy)]
struct Ready {
    /// Keys it holds, counted to the end of its range; `u32::MAX` for no tile.
    rows: u32,
    /// Its item, if it is the item's first.
    at: Cursor,
    first: bool,
}

/// Brings tiles in, `STAGES - 1` ahead of the one computed and whatever item they belong to.
///
/// The copies of a tile need 16 bytes from each row's address, and an address costs a page lookup and a division;
/// so one thread a row works the addresses out an iteration early and leaves them in shared memory.
struct Loader<const HEAD_DIM: u32, const HOPPER: bool> {
    /// The next tile whose addresses are to be worked out.
    at: Cursor,
    work: Work,
    token: u32,
    ready: Ready,
    stage: u32,
    slot: u32,
    parity: u32,
}

impl<const HEAD_DIM: u32, const HOPPER: bool> Loader<HEAD_DIM, HOPPER> {
    const TILE: AttendTile = Shape::<HEAD_DIM, HOPPER>::TILE;

    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    unsafe fn new(p: &AttendParameters, at: Cursor) -> Self {
        // SAFETY: items of the queue, by the kernel's contract.
        let work = if at.has_work() { unsafe { Work::read(p, at) } } else { Work::none() };
        let token = work.kv_begin;
        let ready = Ready { rows: u32::MAX, at, first: false };
        Loader { at, work, token, ready, stage: 0, slot: 0, parity: 0 }
    }

    /// Fills the pipeline: the first `STAGES - 1` tiles on their way, the next one's addresses ready after a barrier.
    /// Addresses need the plan and the page ids alone, so they are worked out while the grid before this one still
    /// runs; queries, keys and values may be what that grid writes.
    #[inline(always)]
    unsafe fn begin(&mut self, p: &AttendParameters, room: Room<HEAD_DIM, HOPPER>) {
        // SAFETY: the kernel's contract.
        unsafe {
            let page = self.look_up(p);
            self.publish(p, room, page);
            let first = self.ready;
            if Self::TILE.stages == 3 {
                let page = self.look_up(p);
                self.publish(p, room, page);
            }
            let page = self.look_up(p);
            sync_threads();
            grid::wait_for_previous_grid();
            grid::allow_next_grid();
            self.copy(p, room, first, 0);
            if Self::TILE.stages == 3 {
                self.copy(p, room, self.ready, 1);
                sync_threads();
            }
            self.publish(p, room, page);
        }
    }

    /// Starts the copies of the tile whose addresses are ready, and the page lookup of the tile after it.
    #[inline(always)]
    unsafe fn step(&mut self, p: &AttendParameters, room: Room<HEAD_DIM, HOPPER>) -> u32 {
        // SAFETY: the kernel's contract.
        unsafe {
            let page = self.look_up(p);
            self.copy(p, room, self.ready, self.parity ^ 1);
            page
        }
    }

    /// Starts the copies of a tile, and of the query rows where it is its item's first.
    #[inline(always)]
    unsafe fn copy(&mut self, p: &AttendParameters, room: Room<HEAD_DIM, HOPPER>, ready: Ready, parity: u32) {
        // SAFETY: the kernel's contract; the stage was consumed before the last barrier.
        unsafe {
            if ready.rows != u32::MAX {
                if ready.first {
                    self.copy_queries(p, room, ready.at);
                    self.slot = next::<HEAD_DIM, HOPPER>(self.slot);
                }
                let (keys, values) = (room.keys(self.stage), room.values(self.stage));
                let place = |round: usize| {
                    let index = thread::thread_idx_x() + round as u32 * Self::TILE.threads();
                    (index / Shape::<HEAD_DIM, HOPPER>::CHUNKS, index % Shape::<HEAD_DIM, HOPPER>::CHUNKS)
                };
                // All addresses first, so that their latency shows once.
                let mut addresses = [[0; 4]; MOST_ROUNDS];
                unroll::<MOST_ROUNDS>(|round| {
                    if round < Shape::<HEAD_DIM, HOPPER>::ROUNDS {
                        addresses[round] = room.row_address(parity, place(round).0).load();
                    }
                });
                unroll::<MOST_ROUNDS>(|round| {
                    if round < Shape::<HEAD_DIM, HOPPER>::ROUNDS {
                        let (row, chunk) = place(round);
                        let bytes = if row < ready.rows { 16 } else { 0 };
                        let [k_low, k_high, v_low, v_high] = addresses[round];
                        copy_async_16(keys.chunk(row, chunk), address(k_low, k_high).add(16 * chunk as u64), bytes);
                        copy_async_16(values.chunk(row, chunk), address(v_low, v_high).add(16 * chunk as u64), bytes);
                    }
                });
                self.stage = next::<HEAD_DIM, HOPPER>(self.stage);
            }
            commit_async_copies();
        }
    }

    /// The page of this thread's row of the next tile.
    #[inline(always)]
    unsafe fn look_up(&self, p: &AttendParameters) -> u32 {
        let row = thread::thread_idx_x();
        if self.at.has_work() && row < Self::TILE.tile_tokens() && self.work.kv_begin < self.work.kv_end {
            let (page, _) = p.page_size.divide(self.row_token(row));
            // SAFETY: the page table covers the request's keys, by the kernel's contract.
            // An ordered load: a read-only one may be moved down to its use, where its latency shows.
            unsafe { Global::<u32>::new(p.page_indices).add(self.work.page_begin as u64 + page as u64).load() }
        } else {
            0
        }
    }

    /// The key of a row; rows past the range repeat its last key, and are not read.
    #[inline(always)]
    fn row_token(&self, row: u32) -> u32 {
        (self.token + row).min(self.work.kv_end - 1)
    }

    /// Leaves the next tile's addresses in shared memory, where they are read after the next barrier, and moves on.
    #[inline(always)]
    unsafe fn publish(&mut self, p: &AttendParameters, room: Room<HEAD_DIM, HOPPER>, page: u32) {
        if !self.at.has_work() {
            self.ready.rows = u32::MAX;
            return;
        }
        let row = thread::thread_idx_x();
        if row < Self::TILE.tile_tokens() {
            let slot =
                if self.work.kv_begin < self.work.kv_end { p.page_size.divide(self.row_token(row)).1 } else { 0 };
            let k = row_address(&p.k, page, slot, self.work.kv_head);
            let v = row_address(&p.v, page, slot, self.work.kv_head);
            let words = [k as u32, (k >> 32) as u32, v as u32, (v >> 32) as u32];
            // SAFETY: the buffer of this parity was read before the last barrier.
            unsafe { room.row_address(self.parity, row).store(words) };
        }
        self.parity ^= 1;
        self.ready.rows = self.work.kv_end - self.token;
        self.ready.first = self.token == self.work.kv_begin;
        if self.ready.first {
            self.ready.at = self.at;
        }
        self.token += Self::TILE.tile_tokens();
        if self.token >= self.work.kv_end {
            self.at.advance();
            if self.at.has_work() {
                // SAFETY: items of the queue, by the kernel's contract.
                self.work = unsafe { Work::read(p, self.at) };
                self.token = self.work.kv_begin;
            }
        }
    }

    /// Starts the copies of an item's query rows; rows past its end become zero.
    #[inline(always)]
    unsafe fn copy_queries(&self, p: &AttendParameters, room: Room<HEAD_DIM, HOPPER>, at: Cursor) {
        let tile = room.queries(self.slot);
        // SAFETY: an item of the queue, by the kernel's contract.
        let work = unsafe { Work::read_again(p, at) };
        let mut index = thread::thread_idx_x();
        while index < ATTEND_TILE_ROWS * Shape::<HEAD_DIM, HOPPER>::CHUNKS {
            let row = index / Shape::<HEAD_DIM, HOPPER>::CHUNKS;
            let chunk = index % Shape::<HEAD_DIM, HOPPER>::CHUNKS;
            let valid = row < work.rows;
            let source = work.row(&p.q, p.group, if valid { row } else { 0 }).add(16 * chunk as u64);
            // SAFETY: a live query row, by the kernel's contract. `STAGES - 1` tiles ahead is at most as many items
            // ahead, so the slot's item is done.
            unsafe { copy_async_16(tile.chunk(row, chunk), source, if valid { 16 } else { 0 }) };
            index += Self::TILE.threads();
        }
    }
}

/// Rounds of the widest tile.
const MOST_ROUNDS: usize = 8;

#[inline(always)]
fn address(low: u32, high: u32) -> Global<u8> {
    Global::new(low as u64 | (high as u64) << 32)
}

#[inline(always)]
fn row_address(cache: &CacheView, page: u32, slot: u32, kv_head: u32) -> u64 {
    cache
        .address
        .wrapping_add((page as i64 * cache.page_stride_bytes) as u64)
        .wrapping_add((slot as i64 * cache.token_stride_bytes) as u64)
        .wrapping_add((kv_head as i64 * cache.head_stride_bytes) as u64)
}

/// A work item, for one KV head, in registers.
#[derive(Clone, Copy)]
struct Work {
    request: u32,
    query_begin: u32,
    row_begin: u32,
    rows: u32,
    kv_head: u32,
    kv_begin: u32,
    kv_end: u32,
    /// Position of the request's query token 0 among its keys.
    query_position: i32,
    page_begin: u32,
    pieces: u32,
    piece: u32,
    partial_begin: u32,
    group: u32,
}

impl Work {
    #[inline(always)]
    fn none() -> Self {
        // SAFETY: plain integers.
        unsafe { core::mem::zeroed() }
    }

    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    unsafe fn read(p: &AttendParameters, at: Cursor) -> Self {
        let words = Self::words(p, at);
        // SAFETY: an item of the plan, by the kernel's contract.
        unsafe {
            Self::from_words([words.load_constant(), words.add(1).load_constant(), words.add(2).load_constant()], at)
        }
    }

    /// The same once more, where it is needed again: ordered loads, so that nothing is kept in registers meanwhile.
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    unsafe fn read_again(p: &AttendParameters, at: Cursor) -> Self {
        let words = Self::words(p, at);
        // SAFETY: an item of the plan, by the kernel's contract.
        unsafe { Self::from_words([words.load(), words.add(1).load(), words.add(2).load()], at) }
    }

    #[inline(always)]
    fn words(p: &AttendParameters, at: Cursor) -> Global<[u32; 4]> {
        Global::new(p.items).add(at.item as u64 * (size_of::<WorkItem>() as u64 / 16))
    }

    #[inline(always)]
    fn from_words([a, b, c]: [[u32; 4]; 3], at: Cursor) -> Self {
        Work {
            request: a[0],
            query_begin: a[1],
            row_begin: a[2],
            rows: a[3],
            kv_head: at.head,
            kv_begin: b[0],
            kv_end: b[1],
            query_position: b[2] as i32,
            page_begin: b[3],
            pieces: c[0],
            piece: c[1],
            partial_begin: c[2],
            group: c[3],
        }
    }

    /// The item's words again.
    #[inline(always)]
    fn to_words(self) -> [[u32; 4]; 3] {
        [
            [self.request, self.query_begin, self.row_begin, self.rows],
            [self.kv_begin, self.kv_end, self.query_position as u32, self.page_begin],
            [self.pieces, self.piece, self.partial_begin, self.group],
        ]
    }

    /// Partial state of piece 0 of a row of the tile; the other pieces' follow it.
    #[inline(always)]
    fn states(&self, row: u32) -> u64 {
        self.partial_begin as u64 + (self.kv_head as u64 * self.rows as u64 + row as u64) * self.pieces as u64
    }

    /// Query token (in the request) and query head of a row of the tile.
    #[inline(always)]
    fn token_and_head(&self, group: Divisor, row: u32) -> (u32, u32) {
        let (token, head) = group.divide(self.row_begin + row);
        (token, self.kv_head * group.get() + head)
    }

    /// Where a row of the tile lies in `q` or `out`.
    #[inline(always)]
    fn row(&self, view: &RowsView, group: Divisor, row: u32) -> Global<u8> {
        let (token, head) = self.token_and_head(group, row);
        Global::new(view.address)
            .add_bytes((self.query_begin + token) as i64 * view.token_stride_bytes)
            .add_bytes(head as i64 * view.head_stride_bytes)
    }

    /// One past the last key a row sees in this range; negative or below `kv_begin` where it sees none.
    #[inline(always)]
    fn limit(&self, p: &AttendParameters, row: u32) -> i32 {
        let end = self.kv_end as i32;
        if p.causal == 0 {
            return end;
        }
        let (token, _) = p.group.divide(self.row_begin + row);
        (token as i32 + self.query_position + 1).min(end)
    }

    /// The limits of a lane's two rows.
    #[inline(always)]
    fn limits(&self, p: &AttendParameters, row: u32) -> [i32; 2] {
        [self.limit(p, row), self.limit(p, row + 8)]
    }

    /// A row of the tile as variants see it; rows past the last are the last.
    #[inline(always)]
    fn at(&self, p: &AttendParameters, row: u32) -> RowAt {
        let (token, query_head) = self.token_and_head(p.group, row.min(self.rows - 1));
        RowAt { request: self.request, token, query_head, position: token as i32 + self.query_position }
    }
}

/// The warps' states of an item, in shared memory, on their way to one.
#[derive(Clone, Copy)]
struct Fold<const HEAD_DIM: u32, const HOPPER: bool> {
    /// `[kv_warps][16][HEAD_DIM]`.
    outputs: Shared<f32>,
    /// `[kv_warps][16]` pairs of maximum and sum.
    states: Shared<[f32; 2]>,
}

impl<const HEAD_DIM: u32, const HOPPER: bool> Fold<HEAD_DIM, HOPPER> {
    const TILE: AttendTile = Shape::<HEAD_DIM, HOPPER>::TILE;

    #[inline(always)]
    fn state(self, kv_warp: u32, row: u32) -> Shared<[f32; 2]> {
        self.states.add(kv_warp * ATTEND_TILE_ROWS + row)
    }

    /// Two columns of a row (four, where `column` is a multiple of 4). Rows of a multiple of 32 columns start in the
    /// same bank, so there groups of 8 columns trade places by row: a warp's stores then touch every bank once.
    #[inline(always)]
    fn pair(self, kv_warp: u32, row: u32, column: u32) -> Shared<[f32; 2]> {
        let column = if HEAD_DIM.is_multiple_of(32) { column ^ (8 * (row & 3)) } else { column };
        self.outputs.add((kv_warp * ATTEND_TILE_ROWS + row) * HEAD_DIM + column).cast()
    }

    /// Folds the warps' states in order and writes the rows' outputs, or their partial states.
    #[inline(always)]
    unsafe fn write<E: Element + Values>(self, p: &AttendParameters, work: &Work) {
        const COLUMNS: u32 = 4;
        let pieces = HEAD_DIM / COLUMNS;
        let mut index = thread::thread_idx_x();
        while index < work.rows * pieces {
            let (row, column) = (index / pieces, COLUMNS * (index % pieces));
            let mut sum = 0.0;
            let mut output = [0.0; 4];
            let mut maximum = f32::NEG_INFINITY;
            // SAFETY: written before the last barrier; output addresses by the kernel's contract.
            unsafe {
                unroll::<4>(|w| {
                    if (w as u32) < Self::TILE.kv_warps {
                        maximum = math::maximum(maximum, self.state(w as u32, row).load()[0]);
                    }
                });
                let origin = if maximum == f32::NEG_INFINITY { 0.0 } else { maximum };
                unroll::<4>(|w| {
                    if (w as u32) < Self::TILE.kv_warps {
                        let [warp_maximum, warp_sum] = self.state(w as u32, row).load();
                        let weight = math::exp2(warp_maximum - origin);
                        let [a, b, c, d] = self.pair(w as u32, row, column).cast::<[f32; 4]>().load();
                        sum = math::multiply_add(weight, warp_sum, sum);
                        output[0] = math::multiply_add(weight, a, output[0]);
                        output[1] = math::multiply_add(weight, b, output[1]);
                        output[2] = math::multiply_add(weight, c, output[2]);
                        output[3] = math::multiply_add(weight, d, output[3]);
                    }
                });
                let inverse = if sum > 0.0 { math::reciprocal(sum) } else { 0.0 };
                let lse = maximum + math::log2(sum);
                let [a, b, c, d] = [output[0] * inverse, output[1] * inverse, output[2] * inverse, output[3] * inverse];
                if work.pieces == 1 {
                    let target = work.row(&p.out, p.group, row).add(2 * column as u64);
                    target.cast::<[u32; 2]>().store([E::pack(a, b), E::pack(c, d)]);
                    if column == 0 && p.lse.address != 0 {
                        work.row(&p.lse, p.group, row).cast::<f32>().store(lse * p.lse_scale);
                    }
                } else {
                    let state = work.states(row) + work.piece as u64;
                    let target = Global::<f32>::new(p.partial_out).add(state * HEAD_DIM as u64 + column as u64);
                    target.cast::<[f32; 4]>().store([a, b, c, d]);
                    if column == 0 {
                        Global::<f32>::new(p.partial_lse).add(state).store(lse);
                    }
                }
            }
            index += Self::TILE.threads();
        }
    }
}
