//! A place in a queue, and the work item there.
//!
//! In: the plan image's items. Out: an item for one KV head in registers, with the places of its rows.
use simt::{global::Global, registers::anew};

use crate::abi::divisor::Divisor;
use crate::abi::parameters::{AttendParameters, RowsView};
use crate::abi::plan::{NOT_COUNTED, SHARED, WorkItem};
use crate::variant::{Piece, QueryAt, RowAt};

/// A place in the queue: an item and one of this block's heads.
#[derive(Clone, Copy)]
pub(super) struct Cursor {
    pub item: u32,
    pub item_end: u32,
    pub head: u32,
    pub head_begin: u32,
    pub head_end: u32,
}

impl Cursor {
    #[inline(always)]
    pub fn has_work(self) -> bool {
        self.item < self.item_end
    }

    #[inline(always)]
    pub fn advance(&mut self) {
        self.head += 1;
        if self.head >= self.head_end {
            self.head = self.head_begin;
            self.item += 1;
        }
    }

    /// The place that [`advance`](Self::advance) came here from.
    #[inline(always)]
    pub fn before(self) -> Cursor {
        if self.head > self.head_begin {
            Cursor { head: self.head - 1, ..self }
        } else {
            Cursor { item: self.item - 1, head: self.head_end - 1, ..self }
        }
    }
}

/// A work item, for one KV head, in registers.
#[derive(Clone, Copy)]
pub(super) struct Work {
    pub request: u32,
    pub query_begin: u32,
    pub row_begin: u32,
    pub rows: u32,
    pub kv_head: u32,
    pub kv_begin: u32,
    pub kv_end: u32,
    /// Position of the request's query token 0 among its keys.
    pub query_position: i32,
    pub page_begin: u32,
    pub pieces: u32,
    pub piece: u32,
    pub partial_begin: u32,
    pub group: u32,
}

impl Work {
    #[inline(always)]
    pub fn none() -> Self {
        // SAFETY: plain integers.
        unsafe { core::mem::zeroed() }
    }

    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    pub unsafe fn read(p: &AttendParameters, at: Cursor) -> Self {
        let words = Self::words(p, at);
        // SAFETY: an item of the plan, by the kernel's contract.
        unsafe {
            Self::from_words([words.load_constant(), words.add(1).load_constant(), words.add(2).load_constant()], at)
        }
    }

    /// The same once more, where it is needed again: from another address to the compiler, so that nothing is kept in
    /// registers meanwhile, and from the first-level cache.
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    pub unsafe fn read_again(p: &AttendParameters, at: Cursor) -> Self {
        let words = Self::words(p, Cursor { item: anew(at.item), ..at });
        // SAFETY: an item of the plan, by the kernel's contract.
        unsafe {
            Self::from_words([words.load_constant(), words.add(1).load_constant(), words.add(2).load_constant()], at)
        }
    }

    /// What [`limits`](Self::limits) and [`at`](Self::at) need, once more, as far as it is used.
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    pub unsafe fn read_for_rows(p: &AttendParameters, at: Cursor, rows: u32, kv_end: u32) -> Self {
        let words = Self::words(p, Cursor { item: anew(at.item), ..at }).cast::<u32>();
        // SAFETY: an item of the plan, by the kernel's contract.
        let word = |index: u64| unsafe { words.add(index).load_constant() };
        let (request, row_begin, query_position) = (word(0), word(2), word(6) as i32);
        Work { request, row_begin, rows, kv_head: at.head, kv_end, query_position, ..Self::none() }
    }

    /// The part of its rows' keys that it has.
    #[inline(always)]
    pub fn piece(&self) -> Piece {
        Piece { index: self.piece, count: self.pieces, keys: [self.kv_begin, self.kv_end] }
    }

    /// Only how many rows it has.
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    pub unsafe fn read_rows(p: &AttendParameters, at: Cursor) -> u32 {
        // SAFETY: an item of the plan, by the kernel's contract.
        unsafe { Self::words(p, at).cast::<u32>().add(3).load_constant() }
    }

    #[inline(always)]
    pub fn words(p: &AttendParameters, at: Cursor) -> Global<[u32; 4]> {
        Global::new(p.items).add(at.item as u64 * (size_of::<WorkItem>() as u64 / 16))
    }

    #[inline(always)]
    pub fn from_words([a, b, c]: [[u32; 4]; 3], at: Cursor) -> Self {
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
    pub fn to_words(self) -> [[u32; 4]; 3] {
        [
            [self.request, self.query_begin, self.row_begin, self.rows],
            [self.kv_begin, self.kv_end, self.query_position as u32, self.page_begin],
            [self.pieces, self.piece, self.partial_begin, self.group],
        ]
    }

    /// Partial state of piece 0 of a row of the tile; the other pieces' follow it.
    #[inline(always)]
    pub fn states(&self, row: u32) -> u64 {
        self.partial_begin as u64 + (self.kv_head as u64 * self.rows as u64 + row as u64) * self.pieces as u64
    }

    /// Whether it is a piece of a split whose last block folds it.
    #[inline(always)]
    pub fn is_counted(&self) -> bool {
        self.pieces > 1 && self.group != NOT_COUNTED
    }

    /// Whether the rows are those of several requests.
    #[inline(always)]
    pub fn is_shared(&self) -> bool {
        self.pieces & SHARED != 0
    }

    /// The partial state that this piece of a split leaves of a row.
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    pub unsafe fn state(&self, p: &AttendParameters, row: u32) -> u64 {
        let first = if self.is_shared() {
            let places = Global::<[u32; 2]>::new(p.items).add(self.partial_begin as u64);
            // SAFETY: the plan has a place for each row of a shared item, by the kernel's contract.
            let [state, head_states] = unsafe { places.add(row as u64).load() };
            state as u64 + self.kv_head as u64 * head_states as u64
        } else {
            self.states(row)
        };
        first + self.piece as u64
    }

    /// Query token (in the request) and query head of a row of the tile.
    #[inline(always)]
    pub fn token_and_head(&self, group: Divisor, row: u32) -> (u32, u32) {
        let (token, head) = group.divide(self.row_begin + row);
        (token, self.kv_head * group.get() + head)
    }

    /// Where a row of the tile lies in `q` or `out`.
    #[inline(always)]
    pub fn row(&self, view: &RowsView, group: Divisor, row: u32) -> Global<u8> {
        let (token, head) = self.token_and_head(group, row);
        Global::new(view.address)
            .add_bytes((self.query_begin + token) as i64 * view.token_stride_bytes)
            .add_bytes(head as i64 * view.head_stride_bytes)
    }

    /// One past the last key a row sees in this range; negative or below `kv_begin` where it sees none.
    #[inline(always)]
    pub fn limit(&self, p: &AttendParameters, row: u32) -> i32 {
        let end = self.kv_end as i32;
        if p.causal == 0 {
            return end;
        }
        let (token, _) = p.group.divide(self.row_begin + row);
        (token as i32 + self.query_position + 1).min(end)
    }

    /// The limits of a lane's two rows.
    #[inline(always)]
    pub fn limits(&self, p: &AttendParameters, row: u32) -> [i32; 2] {
        [self.limit(p, row), self.limit(p, row + 8)]
    }

    /// A row of the tile as variants see it; rows past the last are the last.
    #[inline(always)]
    pub fn at(&self, p: &AttendParameters, row: u32) -> RowAt {
        let (token, query_head) = self.token_and_head(p.group, row.min(self.rows - 1));
        RowAt { request: self.request, token, query_head, position: token as i32 + self.query_position }
    }
    /// A row of the tile's query.
    #[inline(always)]
    pub fn query_at(&self, p: &AttendParameters, row: u32) -> QueryAt {
        let (token, _) = p.group.divide(self.row_begin + row);
        QueryAt { query: self.query_begin + token, position: token as i32 + self.query_position }
    }
}
