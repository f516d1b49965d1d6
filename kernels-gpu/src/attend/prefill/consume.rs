//! A consumer: a warpgroup with 64 rows of each of the block's items.
//!
//! The scores of a tile are under way while the weights of the one before meet their values; both then wait for this
//! warpgroup's softmax, during which the tensor cores are the other warpgroups'. So it goes from an item's last tile to
//! the next one's first, but with heavy variants and such as change rows. Where an item has no rows for the warpgroup,
//! its tiles only pass by, and the others have the tensor cores to themselves: with requests of few rows memory sets the
//! pace then, not arithmetic.
//!
//! A variant that changes keys has each consumer change half of a tile, while the weights of the tile before meet their
//! values; both then wait for each other, and only then multiply.
use simt::{
    asynchronous::{commit_async_copies, copy_async_16, fence_proxy_async, wait_async_copies},
    block::sync_named_barrier,
    grid,
    mbarrier::Mbarrier,
    registers::{anew, keep_order},
    tensor::Element,
    thread, warp,
    wgmma::{self, commit_group, multiply_registers, multiply_shared, wait_group},
};

use super::room::Room;
use super::write::write;
use crate::abi::parameters::AttendParameters;
use crate::attend::logits::Keys;
use crate::attend::work::{Cursor, Work};
use crate::attend::{Queue, finish, look_at, operand, shrink};
use crate::softmax::{OnlineSoftmax, Raised};
use crate::tile::{Rows, RowsFrom, unroll};
use crate::variant::Variant;

/// Rows of a warpgroup: the height of a `wgmma`.
const ROWS: u32 = 64;
/// Threads of a warpgroup.
const THREADS: u32 = 128;

/// Pieces of 16 bytes of the widest rows that a thread copies of an item.
const MOST_PIECES: usize = 16;

/// The first of the named barriers in which a warpgroup waits for itself alone.
const ALONE: u32 = 1;
/// The one in which both wait for each other's half of changed keys; between lies [`super::DONE`].
const KEYS: u32 = 5;

/// Walks the block's items.
///
/// # Safety
/// [`super::prefill`]'s contract; the threads of the consumers call this.
#[inline(always)]
pub(super) unsafe fn consume<
    E: Element,
    V: Variant,
    const HEAD_DIM: u32,
    const VALUE_DIM: u32,
    const COLUMNS: usize,
    const DEPTH: usize,
    const STEPS: usize,
    const VALUE_STEPS: usize,
    const TILES: usize,
>(
    p: &AttendParameters,
    variant: V,
    room: Room<V, HEAD_DIM, VALUE_DIM>,
) {
    // SAFETY: the caller's contract.
    unsafe {
        let mut at = Queue::read(p).all;
        let tile_tokens = 8 * COLUMNS as u32;
        let mut turn = 0;
        let mut are_queries_coming = false;
        // By way of a shuffle, so that ptxas knows it to be the same in a warp, and descriptors stay in uniform registers.
        let group = warp::shuffle_u32(thread::thread_idx_x() / THREADS - 1, 0);
        grid::wait_for_previous_grid();
        loop {
            while at.has_work() && !has_rows(p, at, group) {
                turn = pass::<V, HEAD_DIM, VALUE_DIM>(p, at, room, turn);
                at.advance();
            }
            if !at.has_work() {
                break;
            }
            let mut outputs: [[f32; 4]; TILES] = core::mem::zeroed();
            let mut scores: [[f32; 4]; COLUMNS] = core::mem::zeroed();
            let mut weights: [[u32; 4]; DEPTH] = core::mem::zeroed();
            let group = if V::IS_LIGHT { group } else { anew(thread::thread_idx_x()) / THREADS - 1 };
            if !are_queries_coming {
                // All of the warpgroup have the scores of the item before.
                sync_named_barrier(ALONE + group, THREADS);
                start_queries::<V, HEAD_DIM, VALUE_DIM>(p, at, group, room);
            }
            let mut item = Item::begin(p, variant, at, group, room);
            item.wait_for_queries::<E, HEAD_DIM, VALUE_DIM>(room);
            item.wait_for_keys::<E, HEAD_DIM, VALUE_DIM>(room, turn);
            start_scores::<E, V, HEAD_DIM, VALUE_DIM, COLUMNS, STEPS>(room, turn, item.first_row(), &mut scores);
            wait_group::<0, COLUMNS>(&mut scores);
            release(room.keys_empty(turn));
            item.start_next_queries(tile_tokens, room);
            let raised = item.raise(&mut scores);
            unroll::<2>(|half| item.weigh(half, raised, &mut scores));
            pack::<E, COLUMNS, DEPTH>(&scores, &mut weights);
            loop {
                while item.token + tile_tokens < item.kv_end {
                    item.token += tile_tokens;
                    let raised = step::<E, V, HEAD_DIM, VALUE_DIM, COLUMNS, DEPTH, STEPS, TILES>(
                        room,
                        turn,
                        &mut item,
                        &mut scores,
                        &mut weights,
                        &mut outputs,
                    );
                    // The barrier keeps the branch one: as selections the products would need as many registers again.
                    if raised.any {
                        warp::sync_warp();
                        let [upper, lower] = raised.shrink;
                        unroll::<TILES>(|n| outputs[n] = shrink(outputs[n], upper, lower));
                    }
                    item.weigh(1, raised, &mut scores);
                    pack::<E, COLUMNS, DEPTH>(&scores, &mut weights);
                    turn += 1;
                }
                finish(p, variant, &Work::read_again(p, item.at), lane_row(), true, &mut item.softmax);
                let softmax = item.softmax;
                at = item.at;
                at.advance();
                are_queries_coming = at.has_work() && has_rows(p, at, group);
                if !goes_on::<V>() || !are_queries_coming {
                    break;
                }
                item = Item::begin(p, variant, at, group, room);
                item.wait_for_queries::<E, HEAD_DIM, VALUE_DIM>(room);
                let raised = step::<E, V, HEAD_DIM, VALUE_DIM, COLUMNS, DEPTH, STEPS, TILES>(
                    room,
                    turn,
                    &mut item,
                    &mut scores,
                    &mut weights,
                    &mut outputs,
                );
                write::<E, V, HEAD_DIM, VALUE_DIM, VALUE_STEPS, TILES>(
                    p,
                    room,
                    at.before(),
                    lane_row(),
                    &softmax,
                    &outputs,
                );
                unroll::<TILES>(|n| outputs[n] = [0.0; 4]);
                item.weigh(1, raised, &mut scores);
                pack::<E, COLUMNS, DEPTH>(&scores, &mut weights);
                turn += 1;
            }
            if !goes_on::<V>() && are_queries_coming {
                sync_named_barrier(ALONE + group, THREADS);
                start_queries::<V, HEAD_DIM, VALUE_DIM>(p, at, group, room);
            }
            room.values_full(turn).wait(room.parity(turn));
            start_outputs::<E, V, HEAD_DIM, VALUE_DIM, DEPTH, TILES>(room, turn, &mut weights, &mut outputs);
            wait_group::<0, TILES>(&mut outputs);
            release(room.values_empty(turn));
            turn += 1;
            write::<E, V, HEAD_DIM, VALUE_DIM, VALUE_STEPS, TILES>(
                p,
                room,
                at.before(),
                lane_row(),
                &item.softmax,
                &outputs,
            );
        }
    }
}

/// Whether a consumer's queries come early enough to go from an item's last tile to the next one's first. Heavy variants
/// have no registers for it, and those that change rows would change the next item's beside the last one's values.
const fn goes_on<V: Variant>() -> bool {
    V::IS_LIGHT && !V::TRANSFORMS
}

/// Whether the item has rows for consumer `group`.
#[inline(always)]
unsafe fn has_rows(p: &AttendParameters, at: Cursor, group: u32) -> bool {
    // SAFETY: an item of the queue, by the kernel's contract.
    ROWS * group < unsafe { Work::read_rows(p, at) }
}

/// Lets the tiles of an item pass that has no rows for the warpgroup; returns the next turn.
#[inline(always)]
unsafe fn pass<V: Variant, const HEAD_DIM: u32, const VALUE_DIM: u32>(
    p: &AttendParameters,
    at: Cursor,
    room: Room<V, HEAD_DIM, VALUE_DIM>,
    mut turn: u32,
) -> u32 {
    let tile_tokens = Room::<V, HEAD_DIM, VALUE_DIM>::TILE.tile_tokens;
    // SAFETY: an item of the queue, by the kernel's contract; what has come is not read.
    unsafe {
        let work = Work::read(p, at);
        let mut token = work.kv_begin;
        loop {
            room.keys_full(turn).wait(room.parity(turn));
            release(room.keys_empty(turn));
            room.values_full(turn).wait(room.parity(turn));
            release(room.values_empty(turn));
            turn += 1;
            token += tile_tokens;
            if token >= work.kv_end {
                return turn;
            }
        }
    }
}

/// The scores of a tile become weights of the lane's first row and logits of its second, while the weights of the tile
/// before meet their values. Where keys are changed, or registers are few, the values' product ends first.
#[inline(always)]
unsafe fn step<
    E: Element,
    V: Variant,
    const HEAD_DIM: u32,
    const VALUE_DIM: u32,
    const COLUMNS: usize,
    const DEPTH: usize,
    const STEPS: usize,
    const TILES: usize,
>(
    room: Room<V, HEAD_DIM, VALUE_DIM>,
    turn: u32,
    item: &mut Item<'_, V>,
    scores: &mut [[f32; 4]; COLUMNS],
    weights: &mut [[u32; 4]; DEPTH],
    outputs: &mut [[f32; 4]; TILES],
) -> Raised {
    let next = turn + 1;
    // Those of the weights before.
    let needs_registers = HEAD_DIM == 256 && !V::IS_LIGHT;
    // SAFETY: the kernel's contract.
    unsafe {
        if V::TRANSFORMS || needs_registers {
            room.values_full(turn).wait(room.parity(turn));
            start_outputs::<E, V, HEAD_DIM, VALUE_DIM, DEPTH, TILES>(room, turn, weights, outputs);
            if needs_registers {
                wait_group::<0, TILES>(outputs);
            }
            item.wait_for_keys::<E, HEAD_DIM, VALUE_DIM>(room, next);
            start_scores::<E, V, HEAD_DIM, VALUE_DIM, COLUMNS, STEPS>(room, next, item.first_row(), scores);
            wait_group::<0, COLUMNS>(scores);
            wait_group::<0, TILES>(outputs);
            release(room.values_empty(turn));
            release(room.keys_empty(next));
            let raised = item.raise(scores);
            item.weigh(0, raised, scores);
            return raised;
        }
        room.keys_full(next).wait(room.parity(next));
        start_scores::<E, V, HEAD_DIM, VALUE_DIM, COLUMNS, STEPS>(room, next, item.first_row(), scores);
        room.values_full(turn).wait(room.parity(turn));
        start_outputs::<E, V, HEAD_DIM, VALUE_DIM, DEPTH, TILES>(room, turn, weights, outputs);
        wait_group::<1, COLUMNS>(scores);
        release(room.keys_empty(next));
        item.start_next_queries(8 * COLUMNS as u32, room);
        let raised = item.raise(scores);
        item.weigh(0, raised, scores);
        // By now the values' product is done or nearly so. Weights can only be packed behind it, as it reads those before;
        // the other row's exponentials then run while the first's weights are packed.
        keep_order(turn);
        wait_group::<0, TILES>(outputs);
        release(room.values_empty(turn));
        raised
    }
}

/// The warpgroup's rows of an item, and where among its keys they are.
struct Item<'a, V: Variant> {
    p: &'a AttendParameters,
    variant: V,
    at: Cursor,
    lane: u32,
    /// The item's rows.
    item_rows: u32,
    /// The first key of the tile whose scores were computed last.
    token: u32,
    /// One past the item's last key.
    kv_end: u32,
    /// One past the last key that the warpgroup's first row sees.
    first_limit: i32,
    /// The warpgroup's first and last row.
    end_rows: [V::Row; 2],
    /// Which of the consumers this is.
    group: u32,
    softmax: OnlineSoftmax,
}

impl<'a, V: Variant> Item<'a, V> {
    /// At the item's first key.
    #[inline(always)]
    unsafe fn begin<const HEAD_DIM: u32, const VALUE_DIM: u32>(
        p: &'a AttendParameters,
        variant: V,
        at: Cursor,
        group: u32,
        room: Room<V, HEAD_DIM, VALUE_DIM>,
    ) -> Self {
        // SAFETY: an item of the queue, by the kernel's contract.
        unsafe {
            let thread = anew(thread::thread_idx_x());
            let first_row = ROWS * group;
            let work = Work::read(p, at);
            if work.is_counted() && thread == THREADS {
                room.split().store(1);
            }
            let last_row = (first_row + ROWS).min(work.rows) - 1;
            Item {
                p,
                variant,
                at,
                lane: thread % 32,
                item_rows: work.rows,
                token: work.kv_begin,
                kv_end: work.kv_end,
                first_limit: work.limit(p, first_row),
                end_rows: [look_at(p, &variant, &work, first_row), look_at(p, &variant, &work, last_row)],
                group,
                softmax: OnlineSoftmax::new(),
            }
        }
    }

    /// The warpgroup's first row.
    #[inline(always)]
    fn first_row(&self) -> u32 {
        ROWS * self.group
    }

    /// Waits for the item's query rows, and changes them if the variant does.
    #[inline(always)]
    unsafe fn wait_for_queries<E: Element, const HEAD_DIM: u32, const VALUE_DIM: u32>(
        &self,
        room: Room<V, HEAD_DIM, VALUE_DIM>,
    ) {
        // SAFETY: the warpgroup comes here as a whole; its rows are its own.
        unsafe {
            wait_async_copies::<0>();
            if V::TRANSFORMS {
                sync_named_barrier(ALONE + self.group, THREADS);
                let first = self.first_row();
                let tile = RowsFrom { tile: room.queries(), first };
                let rows = (self.item_rows - first).min(ROWS);
                let work = Work::read_again(self.p, self.at);
                let at = |row: u32| work.query_at(self.p, first + row);
                self.variant.transform_queries::<E, HEAD_DIM>(tile, rows, THREADS, at);
            }
            fence_proxy_async();
            sync_named_barrier(ALONE + self.group, THREADS);
        }
    }

    /// Waits for the keys of the tile at `token`, which is tile `turn`, and changes them if the variant does: each
    /// warpgroup half of them, or the one that has rows all.
    #[inline(always)]
    unsafe fn wait_for_keys<E: Element, const HEAD_DIM: u32, const VALUE_DIM: u32>(
        &self,
        room: Room<V, HEAD_DIM, VALUE_DIM>,
        turn: u32,
    ) {
        let tile_tokens = Room::<V, HEAD_DIM, VALUE_DIM>::TILE.tile_tokens;
        // SAFETY: the warpgroup comes here as a whole, both where both have rows; nobody reads the keys before.
        unsafe {
            room.keys_full(turn).wait(room.parity(turn));
            if V::TRANSFORMS {
                let is_alone = self.item_rows <= ROWS;
                let rows = if is_alone { tile_tokens } else { tile_tokens / 2 };
                let first = if is_alone { 0 } else { rows * self.group };
                let begin = self.token + first;
                let end = (begin + rows).min(self.kv_end);
                if begin < end {
                    let tile = RowsFrom { tile: room.keys(turn), first };
                    self.variant.transform_keys::<E, HEAD_DIM>(tile, [begin, end], THREADS);
                }
                fence_proxy_async();
                if is_alone {
                    sync_named_barrier(ALONE + self.group, THREADS);
                } else {
                    sync_named_barrier(KEYS, 2 * THREADS);
                }
            }
        }
    }

    /// Where the tile is the item's last, its scores were the last use of the query rows.
    #[inline(always)]
    unsafe fn start_next_queries<const HEAD_DIM: u32, const VALUE_DIM: u32>(
        &self,
        tile_tokens: u32,
        room: Room<V, HEAD_DIM, VALUE_DIM>,
    ) {
        if goes_on::<V>() && self.token + tile_tokens >= self.kv_end {
            // SAFETY: the warpgroup comes here as a whole, and all of it has its scores.
            unsafe {
                sync_named_barrier(ALONE + self.group, THREADS);
                let mut next = self.at;
                next.advance();
                if next.has_work() && has_rows(self.p, next, self.group) {
                    start_queries::<V, HEAD_DIM, VALUE_DIM>(self.p, next, self.group, room);
                }
            }
        }
    }

    /// Turns the tile's scores into logits, but for the variant's factor, and takes them into the rows' maxima.
    #[inline(always)]
    unsafe fn raise<const COLUMNS: usize>(&mut self, scores: &mut [[f32; 4]; COLUMNS]) -> Raised {
        let Item { p, variant, at, lane, item_rows, token: key, kv_end, .. } = *self;
        let tile_end = key + 8 * COLUMNS as u32;
        let may_hide = tile_end as i32 > self.first_limit || variant.may_hide(self.end_rows, [key, tile_end]);
        let keys = Keys { p, variant, at, lane, item_rows, key, kv_end, may_hide };
        // SAFETY: the kernel's contract.
        unsafe {
            keys.to_logits(lane_row() - lane / 4, scores);
            let keys_before = if V::IS_PLAIN { Some(key) } else { None };
            self.softmax.raise_tile(scores, self.factor(), keys_before)
        }
    }

    /// Turns the logits of one of the lane's two rows into weights.
    #[inline(always)]
    fn weigh<const COLUMNS: usize>(&mut self, half: usize, raised: Raised, scores: &mut [[f32; 4]; COLUMNS]) {
        self.softmax.weigh_row(half, raised.shrink, scores, self.factor());
    }

    #[inline(always)]
    fn factor(&self) -> f32 {
        self.variant.factor().unwrap_or(1.0)
    }
}

/// The first of the lane's two rows of an item.
#[inline(always)]
fn lane_row() -> u32 {
    let thread = anew(thread::thread_idx_x()) - THREADS;
    thread / 32 * 16 + thread % 32 / 4
}

/// Starts `S = Q K^T`.
#[inline(always)]
unsafe fn start_scores<
    E: Element,
    V: Variant,
    const HEAD_DIM: u32,
    const VALUE_DIM: u32,
    const COLUMNS: usize,
    const STEPS: usize,
>(
    room: Room<V, HEAD_DIM, VALUE_DIM>,
    turn: u32,
    first_row: u32,
    scores: &mut [[f32; 4]; COLUMNS],
) {
    let (queries, keys) = (room.queries(), room.keys(turn));
    let (query_operand, key_operand) = (queries.k_major::<E>(first_row), keys.k_major::<E>(0));
    // SAFETY: the caller's contract; both are there.
    unsafe {
        wgmma::settle(scores);
        wgmma::fence();
        unroll::<STEPS>(|k| {
            let a = query_operand.advance_bytes(queries.step_bytes(k));
            let b = key_operand.advance_bytes(keys.step_bytes(k));
            multiply_shared(scores, a, b, k > 0);
        });
        commit_group();
    }
}

/// Starts `O += P V`.
#[inline(always)]
unsafe fn start_outputs<
    E: Element,
    V: Variant,
    const HEAD_DIM: u32,
    const VALUE_DIM: u32,
    const DEPTH: usize,
    const TILES: usize,
>(
    room: Room<V, HEAD_DIM, VALUE_DIM>,
    turn: u32,
    weights: &mut [[u32; 4]; DEPTH],
    outputs: &mut [[f32; 4]; TILES],
) {
    let values = room.values(turn).mn_major::<E>(0);
    // SAFETY: the caller's contract; the values are there.
    unsafe {
        wgmma::settle(outputs);
        unroll::<DEPTH>(|k| wgmma::pin(&mut weights[k]));
        wgmma::fence();
        // 16 rows of 128 bytes a step.
        unroll::<DEPTH>(|k| multiply_registers(outputs, weights[k], values.advance_bytes(2048 * k as u32), true));
        commit_group();
    }
}

/// Weights as the products' A: two of their columns of 8 a step.
#[inline(always)]
fn pack<E: Element, const COLUMNS: usize, const DEPTH: usize>(
    scores: &[[f32; 4]; COLUMNS],
    weights: &mut [[u32; 4]; DEPTH],
) {
    unroll::<DEPTH>(|k| {
        weights[k] = operand::<E>([scores[2 * k], scores[2 * k + 1]]);
    });
}

/// This warp has read a stage: one lane says so for all, after all have waited for the product.
#[inline(always)]
unsafe fn release(empty: Mbarrier) {
    // SAFETY: a consumer warp comes here as a whole.
    unsafe {
        warp::sync_warp();
        if thread::lane_idx() == 0 {
            empty.arrive();
        }
    }
}

/// Starts the copies of consumer `group`'s query rows of an item; rows past the item's, and padded ones, become zeros.
#[inline(always)]
unsafe fn start_queries<V: Variant, const HEAD_DIM: u32, const VALUE_DIM: u32>(
    p: &AttendParameters,
    at: Cursor,
    group: u32,
    room: Room<V, HEAD_DIM, VALUE_DIM>,
) {
    let chunks = HEAD_DIM / 8;
    // SAFETY: an item of the queue, by the kernel's contract; the warpgroup has read the rows that were there.
    unsafe {
        let work = Work::read_again(p, at);
        let thread = anew(thread::thread_idx_x()) % THREADS;
        // Side by side, as the loads and divisions behind an address would else wait for those before.
        unroll::<MOST_PIECES>(|i| {
            let index = thread + THREADS * i as u32;
            if i as u32 * THREADS < ROWS * chunks {
                let (row, chunk) = (ROWS * group + index / chunks, index % chunks);
                let valid = row < work.rows && (!V::PADS || chunk < p.key_pieces);
                let source = work.row(&p.q, p.group, if valid { row } else { 0 }).add(16 * chunk as u64);
                copy_async_16(room.queries().chunk(row, chunk), source, if valid { 16 } else { 0 });
            }
        });
        commit_async_copies();
    }
}
