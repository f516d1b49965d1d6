//! Which tokens live in which pages: the host half of a paged KV cache, and the query lengths that go with it.
//!
//! In: borrowed host metadata, as CSR (`page_indptr`), as a padded block table, or as the older `last_page_len`
//! form; or, for keys and values that lie in rows without pages, as CSR of the rows (`kv_indptr`). Out: a [`PageTable`]
//! whose lengths agree with each other, so that the planner need not look again.
//! `kv_len` is the truth: a request may list more pages than its tokens need, and the spare ones are never read.
//! Page ids stay on the device; [`PageTable::validate_pages`] and [`PageTable::validate_append`] check a host
//! copy where there is one.

use std::borrow::Cow;

use crate::config::MAX_PAGE_SIZE_TOKENS;

/// Keys one request may have: positions are signed 32-bit on the device.
pub const MAX_KV_LEN_TOKENS: u32 = i32::MAX as u32;

/// Index metadata as engines hold it, 32 bits wide, signed or not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Indices<'a> {
    /// Unsigned.
    U32(&'a [u32]),
    /// Signed; negative values are refused where they would be read.
    I32(&'a [i32]),
}

impl<'a> Indices<'a> {
    /// Number of values.
    pub const fn len(&self) -> usize {
        match self {
            Indices::U32(values) => values.len(),
            Indices::I32(values) => values.len(),
        }
    }

    /// Whether there are no values.
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn get(&self, index: usize) -> i64 {
        match self {
            Indices::U32(values) => values[index] as i64,
            Indices::I32(values) => values[index] as i64,
        }
    }

    /// The values as unsigned ones; refuses the first negative one.
    pub(crate) fn non_negative(self, field: &'static str) -> Result<&'a [u32], PageTableError> {
        match self {
            Indices::U32(values) => Ok(values),
            Indices::I32(values) => match values.iter().position(|&value| value < 0) {
                Some(index) => Err(PageTableError::Negative { field, index, value: values[index] }),
                None => Ok(bytemuck::cast_slice(values)),
            },
        }
    }
}

macro_rules! indices_from {
    ($($variant:ident($element:ty)),*) => {$(
        impl<'a> From<&'a [$element]> for Indices<'a> {
            fn from(values: &'a [$element]) -> Self {
                Indices::$variant(values)
            }
        }
        impl<'a, const N: usize> From<&'a [$element; N]> for Indices<'a> {
            fn from(values: &'a [$element; N]) -> Self {
                Indices::$variant(values)
            }
        }
        impl<'a> From<&'a Vec<$element>> for Indices<'a> {
            fn from(values: &'a Vec<$element>) -> Self {
                Indices::$variant(values)
            }
        }
    )*};
}
indices_from!(U32(u32), I32(i32));

/// Page metadata that contradicts itself, or page ids that do not fit the pool.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PageTableError {
    /// A page holds no tokens, or more than any kernel supports.
    #[error("page_size_tokens is {got}; supported are 1 to {MAX_PAGE_SIZE_TOKENS}")]
    PageSize {
        /// The value found.
        got: u32,
    },
    /// A signed array holds a negative value.
    #[error("{field}[{index}] is {value}; it must not be negative")]
    Negative {
        /// The array.
        field: &'static str,
        /// Where in it.
        index: usize,
        /// The value found.
        value: i32,
    },
    /// An array is shorter or longer than the others imply.
    #[error("{field} has {got} entries; expected {expected}")]
    Length {
        /// The array.
        field: &'static str,
        /// Entries found.
        got: usize,
        /// Entries expected.
        expected: usize,
    },
    /// An indptr array does not start at 0.
    #[error("{field}[0] is {got}; it must be 0")]
    FirstNotZero {
        /// The array.
        field: &'static str,
        /// The value found.
        got: u32,
    },
    /// An indptr array falls.
    #[error("{field} falls from {begin} to {end} at request {request}; it must not decrease")]
    NotMonotone {
        /// The array.
        field: &'static str,
        /// The request whose range would be negative.
        request: usize,
        /// Where its range starts.
        begin: u32,
        /// Where it ends.
        end: u32,
    },
    /// A request has more keys than positions can count.
    #[error("kv_len of request {request} is {got}; supported is at most {MAX_KV_LEN_TOKENS}")]
    KvLenTooLarge {
        /// The request.
        request: usize,
        /// Its keys.
        got: u64,
    },
    /// A request lists fewer pages than its tokens fill.
    #[error("request {request} has {pages} pages, but its kv_len of {kv_len} needs {needed}")]
    TooFewPages {
        /// The request.
        request: usize,
        /// Its keys.
        kv_len: u32,
        /// Pages it lists.
        pages: u32,
        /// Pages its keys fill.
        needed: u32,
    },
    /// A request owns fewer rows of keys than it has keys.
    #[error("request {request} has {rows} rows of keys, but its kv_len is {kv_len}")]
    TooFewRows {
        /// The request.
        request: usize,
        /// Its keys.
        kv_len: u32,
        /// Rows it owns.
        rows: u32,
    },
    /// A check of page ids where there are none.
    #[error("a ragged table has no page ids to check")]
    NoPageIds,
    /// Prefixes of pages where there are none.
    #[error("a ragged table has no pages to share")]
    RaggedPrefixes,
    /// More keys in common than there are.
    #[error(
        "shared_tokens[{request}] is {got}; requests {before} and {request} have {supported} keys to share at most",
        before = request - 1
    )]
    SharedTooLong {
        /// The request.
        request: usize,
        /// The value found.
        got: u32,
        /// The keys of the shorter of the two requests.
        supported: u32,
    },
    /// A last page that is empty, overfull, or not there.
    #[error(
        "last_page_len of request {request} is {got} with {pages} pages; it must be 1 to {page_size_tokens} with \
         pages and 0 without"
    )]
    LastPageLen {
        /// The request.
        request: usize,
        /// The value found.
        got: u32,
        /// Pages the request lists.
        pages: u32,
        /// Tokens of a page.
        page_size_tokens: u32,
    },
    /// Positions in the page id array would pass 32 bits.
    #[error("block table of {requests} rows with {pages_per_row} pages each has more than 2^32 - 1 entries")]
    BlockTableTooLarge {
        /// Rows.
        requests: usize,
        /// Entries from a row to the next.
        pages_per_row: u32,
    },
    /// A page id that the pool does not hold.
    #[error("page {position} of request {request} is {page}; the pool has {pool_pages} pages")]
    PageOutOfRange {
        /// The request.
        request: usize,
        /// Which of its pages.
        position: u32,
        /// The id found.
        page: i64,
        /// Pages of the pool.
        pool_pages: u32,
    },
    /// Two requests would write to one page.
    #[error("requests {first} and {second} both append to page {page}")]
    SharedAppendPage {
        /// The page.
        page: u32,
        /// One request.
        first: usize,
        /// The other.
        second: usize,
    },
    /// More tokens are appended than the request has afterwards.
    #[error("request {request} appends {appended} tokens, but its kv_len after the append is {kv_len}")]
    AppendTooLong {
        /// The request.
        request: usize,
        /// Tokens appended.
        appended: u32,
        /// Keys after the append.
        kv_len: u32,
    },
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Pages<'a> {
    /// Request `r` owns ids `indptr[r] .. indptr[r + 1]`.
    Csr(&'a [u32]),
    /// Request `r` owns ids `r * stride .. (r + 1) * stride`.
    Rows(u32),
    /// There are none: the tokens of request `r` are the first of rows `indptr[r] .. indptr[r + 1]`.
    Ragged(&'a [u32]),
}

/// Page metadata of a batch. Host only; holds no page ids.
#[derive(Clone, Debug)]
pub struct PageTable<'a> {
    page_size_tokens: u32,
    kv_lens: Cow<'a, [u32]>,
    pages: Pages<'a>,
    /// Leading keys in common with the request before; empty where nothing is said.
    shared_tokens: &'a [u32],
}

impl<'a> PageTable<'a> {
    /// A CSR table: the page ids of request `r` are `page_indptr[r] .. page_indptr[r + 1]` of one flat array, and
    /// it has `kv_lens[r]` tokens. `page_indptr` has one entry more than `kv_lens`.
    ///
    /// # Errors
    /// Refuses arrays that disagree, an indptr that does not start at 0 or falls, and too few pages.
    pub fn csr(
        page_size_tokens: u32,
        page_indptr: impl Into<Indices<'a>>,
        kv_lens: impl Into<Indices<'a>>,
    ) -> Result<PageTable<'a>, PageTableError> {
        check_page_size(page_size_tokens)?;
        let kv_lens = kv_lens.into().non_negative("kv_lens")?;
        let indptr = page_indptr.into().non_negative("page_indptr")?;
        check_indptr("page_indptr", indptr, kv_lens.len())?;
        for (request, (&kv_len, range)) in kv_lens.iter().zip(indptr.windows(2)).enumerate() {
            check_pages(page_size_tokens, request, kv_len, range[1] - range[0])?;
        }
        Ok(PageTable {
            page_size_tokens,
            kv_lens: Cow::Borrowed(kv_lens),
            pages: Pages::Csr(indptr),
            shared_tokens: &[],
        })
    }

    /// A padded block table, `[requests, pages_per_row]`: `pages_per_row` is the distance from a row to the next
    /// in entries. Entries past a request's tokens are never read.
    ///
    /// # Errors
    /// Refuses rows too short for their request and tables of more than 2^32 - 1 entries.
    pub fn block_table(
        page_size_tokens: u32,
        pages_per_row: u32,
        kv_lens: impl Into<Indices<'a>>,
    ) -> Result<PageTable<'a>, PageTableError> {
        check_page_size(page_size_tokens)?;
        let kv_lens = kv_lens.into().non_negative("kv_lens")?;
        if kv_lens.len() as u128 * pages_per_row as u128 > u32::MAX as u128 {
            return Err(PageTableError::BlockTableTooLarge { requests: kv_lens.len(), pages_per_row });
        }
        for (request, &kv_len) in kv_lens.iter().enumerate() {
            check_pages(page_size_tokens, request, kv_len, pages_per_row)?;
        }
        Ok(PageTable {
            page_size_tokens,
            kv_lens: Cow::Borrowed(kv_lens),
            pages: Pages::Rows(pages_per_row),
            shared_tokens: &[],
        })
    }

    /// A CSR table from the tokens in each request's last page. Here every page listed holds tokens.
    ///
    /// # Errors
    /// As [`csr`](Self::csr), and refuses a `last_page_len` of 0 with pages, of more than a page, or without pages.
    pub fn from_last_page_len(
        page_size_tokens: u32,
        page_indptr: impl Into<Indices<'a>>,
        last_page_len: impl Into<Indices<'a>>,
    ) -> Result<PageTable<'a>, PageTableError> {
        check_page_size(page_size_tokens)?;
        let last_page_len = last_page_len.into().non_negative("last_page_len")?;
        let indptr = page_indptr.into().non_negative("page_indptr")?;
        check_indptr("page_indptr", indptr, last_page_len.len())?;
        let mut kv_lens = Vec::with_capacity(last_page_len.len());
        for (request, (&last, range)) in last_page_len.iter().zip(indptr.windows(2)).enumerate() {
            let pages = range[1] - range[0];
            if last > page_size_tokens || (last == 0) != (pages == 0) {
                return Err(PageTableError::LastPageLen { request, got: last, pages, page_size_tokens });
            }
            let kv_len = pages.saturating_sub(1) as u64 * page_size_tokens as u64 + last as u64;
            if kv_len > MAX_KV_LEN_TOKENS as u64 {
                return Err(PageTableError::KvLenTooLarge { request, got: kv_len });
            }
            kv_lens.push(kv_len as u32);
        }
        Ok(PageTable { page_size_tokens, kv_lens: Cow::Owned(kv_lens), pages: Pages::Csr(indptr), shared_tokens: &[] })
    }

    /// Keys and values without pages, `[rows, kv_heads, head_dim]`: the tokens of request `r` are rows
    /// `kv_indptr[r] .. kv_indptr[r + 1]`. An empty range is a request without keys. For an attention made with
    /// [`AttentionConfig::ragged`](crate::AttentionConfig::ragged).
    ///
    /// ```
    /// let table = oxattn::PageTable::ragged(&[0u32, 40, 40, 45])?;
    /// assert_eq!((table.kv_lens(), table.kv_rows()), (&[40, 0, 5][..], 45));
    /// # Ok::<(), oxattn::PageTableError>(())
    /// ```
    ///
    /// # Errors
    /// Refuses an indptr that is empty, does not start at 0, or falls, and a request of more than
    /// [`MAX_KV_LEN_TOKENS`] keys.
    pub fn ragged(kv_indptr: impl Into<Indices<'a>>) -> Result<PageTable<'a>, PageTableError> {
        let indptr = kv_indptr.into().non_negative("kv_indptr")?;
        check_monotone("kv_indptr", indptr)?;
        let kv_lens: Vec<u32> = indptr.windows(2).map(|range| range[1] - range[0]).collect();
        PageTable::of_rows(indptr, Cow::Owned(kv_lens))
    }

    /// The same with rows to spare: request `r` has `kv_lens[r]` tokens, the first of its rows. The others are never
    /// read: padding between requests, or room to grow.
    ///
    /// # Errors
    /// As [`ragged`](Self::ragged), and refuses arrays that disagree and a request with more tokens than rows.
    pub fn ragged_with_lens(
        kv_indptr: impl Into<Indices<'a>>,
        kv_lens: impl Into<Indices<'a>>,
    ) -> Result<PageTable<'a>, PageTableError> {
        let kv_lens = kv_lens.into().non_negative("kv_lens")?;
        let indptr = kv_indptr.into().non_negative("kv_indptr")?;
        check_indptr("kv_indptr", indptr, kv_lens.len())?;
        PageTable::of_rows(indptr, Cow::Borrowed(kv_lens))
    }

    fn of_rows(indptr: &'a [u32], kv_lens: Cow<'a, [u32]>) -> Result<PageTable<'a>, PageTableError> {
        for (request, (&kv_len, range)) in kv_lens.iter().zip(indptr.windows(2)).enumerate() {
            let rows = range[1] - range[0];
            if kv_len > MAX_KV_LEN_TOKENS {
                return Err(PageTableError::KvLenTooLarge { request, got: kv_len as u64 });
            }
            if kv_len > rows {
                return Err(PageTableError::TooFewRows { request, kv_len, rows });
            }
        }
        Ok(PageTable { page_size_tokens: 1, kv_lens, pages: Pages::Ragged(indptr), shared_tokens: &[] })
    }

    /// Pages that `kv_len` tokens fill, and how many of the tokens lie in the last one. A full last page counts
    /// `page_size_tokens`, not 0; `page_size_tokens` must not be 0.
    pub const fn pages_and_last_len(page_size_tokens: u32, kv_len: u32) -> (u32, u32) {
        let pages = kv_len.div_ceil(page_size_tokens);
        (pages, if pages == 0 { 0 } else { kv_len - (pages - 1) * page_size_tokens })
    }

    /// The same with prefixes in common: the first `shared_tokens[r]` keys of request `r` lie in the same pages as those
    /// of request `r - 1`; of the first request it is 0. So it says a tree of prefixes, whose requests stand side by
    /// side. Plans of an attention made
    /// [with levels](crate::AttentionConfig::with_shared_prefixes) then read such keys once for several requests, where
    /// that saves time; results stay the same but for rounding, and [`Plan::sharing`](crate::Plan::sharing) says what
    /// became of it.
    ///
    /// ```
    /// // Two requests with a prompt of 64 tokens in pages 7, 3, 8, 2, and a page of their own each.
    /// let page_ids = [7u32, 3, 8, 2, 5, 7, 3, 8, 2, 0];
    /// let table = oxattn::PageTable::csr(16, &[0u32, 5, 10], &[70u32, 66])?;
    /// let shared_tokens = table.shared_tokens_of_pages(&page_ids)?;
    /// assert_eq!(shared_tokens, [0, 64]);
    /// let table = table.with_shared_prefixes(&shared_tokens)?;
    /// # Ok::<(), oxattn::PageTableError>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a ragged table, an array that is not one entry a request, a first entry other than 0, and entries past
    /// the keys of either request.
    pub fn with_shared_prefixes(self, shared_tokens: impl Into<Indices<'a>>) -> Result<PageTable<'a>, PageTableError> {
        const FIELD: &str = "shared_tokens";
        if self.is_ragged() {
            return Err(PageTableError::RaggedPrefixes);
        }
        let shared_tokens = shared_tokens.into().non_negative(FIELD)?;
        if shared_tokens.len() != self.requests() {
            let (got, expected) = (shared_tokens.len(), self.requests());
            return Err(PageTableError::Length { field: FIELD, got, expected });
        }
        if let Some(&got @ 1..) = shared_tokens.first() {
            return Err(PageTableError::FirstNotZero { field: FIELD, got });
        }
        for (before, (&got, kv_lens)) in
            shared_tokens[1.min(shared_tokens.len())..].iter().zip(self.kv_lens.windows(2)).enumerate()
        {
            let supported = kv_lens[0].min(kv_lens[1]);
            if got > supported {
                return Err(PageTableError::SharedTooLong { request: before + 1, got, supported });
            }
        }
        Ok(PageTable { shared_tokens, ..self })
    }

    /// What [`with_shared_prefixes`](Self::with_shared_prefixes) takes, from a host copy of the page ids: the keys in the
    /// leading pages that a request has in common with the one before it.
    ///
    /// # Errors
    /// Refuses an array that is too short, and a ragged table, which has no page ids.
    pub fn shared_tokens_of_pages<'b>(&self, page_indices: impl Into<Indices<'b>>) -> Result<Vec<u32>, PageTableError> {
        let page_indices = page_indices.into();
        self.check_page_ids(&page_indices)?;
        let in_common = |request: usize| {
            let supported = self.kv_lens[request - 1].min(self.kv_lens[request]);
            let [before, own] = [request - 1, request].map(|request| self.page_begin(request) as usize);
            let pages = supported.div_ceil(self.page_size_tokens) as usize;
            let equal = (0..pages).take_while(|page| page_indices.get(before + page) == page_indices.get(own + page));
            (equal.count() as u64 * self.page_size_tokens as u64).min(supported as u64) as u32
        };
        Ok((0..self.requests()).map(|request| if request == 0 { 0 } else { in_common(request) }).collect())
    }

    /// Leading keys that each request has in common with the one before it; empty where the table does not say.
    pub fn shared_tokens(&self) -> &[u32] {
        self.shared_tokens
    }

    /// Requests in the batch.
    pub fn requests(&self) -> usize {
        self.kv_lens.len()
    }

    /// Tokens of a page.
    pub fn page_size_tokens(&self) -> u32 {
        self.page_size_tokens
    }

    /// Keys of each request.
    pub fn kv_lens(&self) -> &[u32] {
        &self.kv_lens
    }

    /// Whether keys and values lie in rows, without pages.
    pub fn is_ragged(&self) -> bool {
        matches!(self.pages, Pages::Ragged(_))
    }

    /// Where the page ids of `request` start in the page id array; without pages, its first row.
    pub fn page_begin(&self, request: usize) -> u32 {
        match self.pages {
            Pages::Csr(indptr) | Pages::Ragged(indptr) => indptr[request],
            Pages::Rows(stride) => request as u32 * stride,
        }
    }

    /// Rows that keys and values must have; 0 where they lie in pages.
    pub fn kv_rows(&self) -> u64 {
        match self.pages {
            Pages::Ragged(indptr) => indptr[indptr.len() - 1] as u64,
            Pages::Csr(_) | Pages::Rows(_) => 0,
        }
    }

    /// Entries the page id array must have; 0 where there are no pages.
    pub fn page_index_len(&self) -> usize {
        match self.pages {
            Pages::Csr(indptr) => indptr[indptr.len() - 1] as usize,
            Pages::Rows(stride) => self.requests() * stride as usize,
            Pages::Ragged(_) => 0,
        }
    }

    pub(crate) fn pages(&self) -> Pages<'a> {
        self.pages
    }

    fn check_page_ids(&self, page_indices: &Indices<'_>) -> Result<(), PageTableError> {
        if self.is_ragged() {
            return Err(PageTableError::NoPageIds);
        }
        if page_indices.len() < self.page_index_len() {
            let (got, expected) = (page_indices.len(), self.page_index_len());
            return Err(PageTableError::Length { field: "page_indices", got, expected });
        }
        Ok(())
    }

    /// Checks a host copy of the page ids against the pool. Entries past a request's tokens may hold anything.
    ///
    /// # Errors
    /// Refuses an array that is too short, an id that is negative or not below `pool_pages`, and a ragged table, which
    /// has no page ids.
    pub fn validate_pages<'b>(
        &self,
        page_indices: impl Into<Indices<'b>>,
        pool_pages: u32,
    ) -> Result<(), PageTableError> {
        let page_indices = page_indices.into();
        self.check_page_ids(&page_indices)?;
        for (request, &kv_len) in self.kv_lens.iter().enumerate() {
            let begin = self.page_begin(request) as usize;
            for position in 0..kv_len.div_ceil(self.page_size_tokens) {
                let page = page_indices.get(begin + position as usize);
                if page < 0 || page >= pool_pages as i64 {
                    return Err(PageTableError::PageOutOfRange { request, position, page, pool_pages });
                }
            }
        }
        Ok(())
    }

    /// [`validate_pages`](Self::validate_pages), and also that no page is written by two requests when the last
    /// `appended` tokens of each request are written. `kv_lens` are the lengths after the append. Pages that
    /// requests only read may be shared.
    ///
    /// # Errors
    /// Those of `validate_pages`; two requests that write one page; an append longer than its request.
    pub fn validate_append<'b>(
        &self,
        page_indices: impl Into<Indices<'b>>,
        pool_pages: u32,
        appended: QueryLengths<'_>,
    ) -> Result<(), PageTableError> {
        let page_indices = page_indices.into();
        self.validate_pages(page_indices, pool_pages)?;
        appended.check_requests(self.requests())?;
        let mut written = Vec::new();
        for (request, &kv_len) in self.kv_lens.iter().enumerate() {
            let appended = appended.len_of(request);
            if appended > kv_len {
                return Err(PageTableError::AppendTooLong { request, appended, kv_len });
            }
            let begin = self.page_begin(request) as usize;
            let first = (kv_len - appended) / self.page_size_tokens;
            let pages = if appended == 0 { first..first } else { first..kv_len.div_ceil(self.page_size_tokens) };
            written.extend(pages.map(|position| (page_indices.get(begin + position as usize) as u32, request)));
        }
        written.sort_unstable();
        match written.windows(2).find(|pair| pair[0].0 == pair[1].0 && pair[0].1 != pair[1].1) {
            Some(pair) => {
                Err(PageTableError::SharedAppendPage { page: pair[0].0, first: pair[0].1, second: pair[1].1 })
            }
            None => Ok(()),
        }
    }
}

fn check_page_size(page_size_tokens: u32) -> Result<(), PageTableError> {
    match page_size_tokens {
        1..=MAX_PAGE_SIZE_TOKENS => Ok(()),
        got => Err(PageTableError::PageSize { got }),
    }
}

pub(crate) fn check_indptr(field: &'static str, indptr: &[u32], requests: usize) -> Result<(), PageTableError> {
    if indptr.len() != requests + 1 {
        return Err(PageTableError::Length { field, got: indptr.len(), expected: requests + 1 });
    }
    check_monotone(field, indptr)
}

fn check_monotone(field: &'static str, indptr: &[u32]) -> Result<(), PageTableError> {
    match indptr.first() {
        None => return Err(PageTableError::Length { field, got: 0, expected: 1 }),
        Some(&got) if got != 0 => return Err(PageTableError::FirstNotZero { field, got }),
        _ => {}
    }
    match indptr.windows(2).position(|range| range[1] < range[0]) {
        Some(request) => {
            Err(PageTableError::NotMonotone { field, request, begin: indptr[request], end: indptr[request + 1] })
        }
        None => Ok(()),
    }
}

fn check_pages(page_size_tokens: u32, request: usize, kv_len: u32, pages: u32) -> Result<(), PageTableError> {
    if kv_len > MAX_KV_LEN_TOKENS {
        return Err(PageTableError::KvLenTooLarge { request, got: kv_len as u64 });
    }
    if kv_len as u64 > pages as u64 * page_size_tokens as u64 {
        let needed = kv_len.div_ceil(page_size_tokens);
        return Err(PageTableError::TooFewPages { request, kv_len, pages, needed });
    }
    Ok(())
}

/// Query tokens of each request: all alike, or the ranges of a packed `[tokens, ...]` tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueryLengths<'a>(pub(crate) Lengths<'a>);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lengths<'a> {
    Uniform(u32),
    Indptr(&'a [u32]),
}

impl<'a> QueryLengths<'a> {
    /// `query_len` tokens for every request; 1 is plain decode.
    pub const fn uniform(query_len: u32) -> QueryLengths<'a> {
        QueryLengths(Lengths::Uniform(query_len))
    }

    /// Request `r` owns tokens `query_indptr[r] .. query_indptr[r + 1]`. An empty range is a request without queries.
    ///
    /// # Errors
    /// Refuses an array that is empty, does not start at 0, or falls.
    pub fn indptr(query_indptr: impl Into<Indices<'a>>) -> Result<QueryLengths<'a>, PageTableError> {
        let indptr = query_indptr.into().non_negative("query_indptr")?;
        check_monotone("query_indptr", indptr)?;
        Ok(QueryLengths(Lengths::Indptr(indptr)))
    }

    /// Query tokens of `request`.
    pub fn len_of(&self, request: usize) -> u32 {
        match self.0 {
            Lengths::Uniform(query_len) => query_len,
            Lengths::Indptr(indptr) => indptr[request + 1] - indptr[request],
        }
    }

    /// Refuses an indptr made for another number of requests.
    pub(crate) fn check_requests(&self, requests: usize) -> Result<(), PageTableError> {
        match self.0 {
            Lengths::Indptr(indptr) if indptr.len() != requests + 1 => {
                Err(PageTableError::Length { field: "query_indptr", got: indptr.len(), expected: requests + 1 })
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_last_page_counts_as_full() {
        for (kv_len, expected) in [(16, (1, 16)), (17, (2, 1)), (100, (7, 4)), (0, (0, 0)), (15, (1, 15)), (1, (1, 1))]
        {
            assert_eq!(PageTable::pages_and_last_len(16, kv_len), expected, "kv_len {kv_len}");
        }
        assert_eq!(PageTable::pages_and_last_len(1, MAX_KV_LEN_TOKENS), (MAX_KV_LEN_TOKENS, 1));
    }

    #[test]
    fn the_three_forms_agree() {
        let csr = PageTable::csr(16, &[0u32, 1, 1, 3], &[5u32, 0, 17]).unwrap();
        let signed = PageTable::csr(16, &[0i32, 1, 1, 3], &[5i32, 0, 17]).unwrap();
        let last = PageTable::from_last_page_len(16, &[0i32, 1, 1, 3], &[5i32, 0, 1]).unwrap();
        for table in [&csr, &signed, &last] {
            assert_eq!(table.kv_lens(), [5, 0, 17]);
            assert_eq!((0..3).map(|request| table.page_begin(request)).collect::<Vec<_>>(), [0, 1, 1]);
            assert_eq!(table.page_index_len(), 3);
        }
        let rows = PageTable::block_table(16, 4, &[5u32, 0, 64]).unwrap();
        assert_eq!((0..3).map(|request| rows.page_begin(request)).collect::<Vec<_>>(), [0, 4, 8]);
        assert_eq!(rows.page_index_len(), 12);
    }

    #[test]
    fn rows_are_lengths_without_page_ids() {
        let table = PageTable::ragged(&[0i32, 3, 3, 10]).unwrap();
        assert_eq!((table.kv_lens(), table.page_size_tokens(), table.is_ragged()), (&[3, 0, 7][..], 1, true));
        let padded = PageTable::ragged_with_lens(&[0u32, 3, 3, 10], &[1u32, 0, 7]).unwrap();
        assert_eq!(padded.kv_lens(), [1, 0, 7]);
        for table in [&table, &padded] {
            assert_eq!((0..3).map(|request| table.page_begin(request)).collect::<Vec<_>>(), [0, 3, 3]);
            assert_eq!((table.kv_rows(), table.page_index_len()), (10, 0));
            assert_eq!(table.validate_pages(&[0u32; 10], 10), Err(PageTableError::NoPageIds));
        }
        assert_eq!(PageTable::ragged(&[0u32]).unwrap().requests(), 0);
        let paged = PageTable::csr(1, &[0u32, 3], &[3u32]).unwrap();
        assert_eq!((paged.kv_rows(), paged.page_index_len(), paged.is_ragged()), (0, 3, false));
    }

    #[test]
    fn a_spare_page_is_ignored() {
        let table = PageTable::csr(16, &[0u32, 2], &[16u32]).unwrap();
        assert_eq!(table.kv_lens(), [16]);
        // The spare id is out of range, and nobody looks.
        table.validate_pages(&[3u32, 900], 10).unwrap();
    }

    #[test]
    fn refusals_name_the_request_and_the_value() {
        let max = MAX_KV_LEN_TOKENS;
        let cases: Vec<(Result<PageTable, PageTableError>, &str)> = vec![
            (PageTable::csr(0, &[0u32], &[] as &[u32; 0]), "page_size_tokens is 0; supported are 1 to 1024"),
            (PageTable::csr(16, &[1u32, 2], &[3u32]), "page_indptr[0] is 1; it must be 0"),
            (
                PageTable::csr(16, &[0u32, 3, 2], &[3u32, 0]),
                "page_indptr falls from 3 to 2 at request 1; it must not decrease",
            ),
            (PageTable::csr(16, &[0u32, 1], &[1u32, 1]), "page_indptr has 2 entries; expected 3"),
            (PageTable::csr(16, &[] as &[u32; 0], &[] as &[u32; 0]), "page_indptr has 0 entries; expected 1"),
            (PageTable::csr(16, &[0i32, -1], &[1i32]), "page_indptr[1] is -1; it must not be negative"),
            (PageTable::csr(16, &[0i32, 1, 2], &[1i32, -7]), "kv_lens[1] is -7; it must not be negative"),
            (PageTable::csr(16, &[0u32, 1, 3], &[16u32, 33]), "request 1 has 2 pages, but its kv_len of 33 needs 3"),
            (PageTable::block_table(16, 2, &[32u32, 33]), "request 1 has 2 pages, but its kv_len of 33 needs 3"),
            (
                PageTable::block_table(16, u32::MAX, &[1u32, 1]),
                "block table of 2 rows with 4294967295 pages each has more than 2^32 - 1 entries",
            ),
            (
                PageTable::csr(1024, &[0u32, u32::MAX], &[1u32 << 31]),
                "kv_len of request 0 is 2147483648; supported is at most 2147483647",
            ),
            (
                PageTable::from_last_page_len(1024, &[0u32, 2097152], &[1024u32]),
                "kv_len of request 0 is 2147483648; supported is at most 2147483647",
            ),
            (
                PageTable::from_last_page_len(16, &[0u32, 1, 2], &[1u32, 0]),
                "last_page_len of request 1 is 0 with 1 pages; it must be 1 to 16 with pages and 0 without",
            ),
            (
                PageTable::from_last_page_len(16, &[0u32, 1], &[17u32]),
                "last_page_len of request 0 is 17 with 1 pages; it must be 1 to 16 with pages and 0 without",
            ),
            (
                PageTable::from_last_page_len(16, &[0u32, 0], &[3u32]),
                "last_page_len of request 0 is 3 with 0 pages; it must be 1 to 16 with pages and 0 without",
            ),
            (PageTable::ragged(&[] as &[u32; 0]), "kv_indptr has 0 entries; expected 1"),
            (PageTable::ragged(&[2u32, 3]), "kv_indptr[0] is 2; it must be 0"),
            (PageTable::ragged(&[0u32, 3, 1]), "kv_indptr falls from 3 to 1 at request 1; it must not decrease"),
            (PageTable::ragged(&[0i32, -3]), "kv_indptr[1] is -3; it must not be negative"),
            (
                PageTable::ragged(&[0u32, 1, 1 + (1 << 31)]),
                "kv_len of request 1 is 2147483648; supported is at most 2147483647",
            ),
            (PageTable::ragged_with_lens(&[0u32, 3], &[3u32, 0]), "kv_indptr has 2 entries; expected 3"),
            (
                PageTable::ragged_with_lens(&[0u32, 3, 5], &[3u32, 3]),
                "request 1 has 2 rows of keys, but its kv_len is 3",
            ),
            (
                PageTable::ragged_with_lens(&[0u32, 1, u32::MAX], &[1u32, 1 << 31]),
                "kv_len of request 1 is 2147483648; supported is at most 2147483647",
            ),
        ];
        for (result, message) in cases {
            assert_eq!(result.unwrap_err().to_string(), message);
        }
        PageTable::csr(1024, &[0u32, u32::MAX], &[max]).unwrap();
    }

    #[test]
    fn page_ids_are_checked_against_the_pool() {
        let table = PageTable::block_table(4, 3, &[5u32, 0, 4]).unwrap();
        table.validate_pages(&[7i32, 2, -1, -1, -1, -1, 9, -1, -1], 10).unwrap();
        for (ids, message) in [
            ([7i32, 10, 0, 0, 0, 0, 9, 0, 0], "page 1 of request 0 is 10; the pool has 10 pages"),
            ([7, 2, 0, 0, 0, 0, -1, 0, 0], "page 0 of request 2 is -1; the pool has 10 pages"),
        ] {
            assert_eq!(table.validate_pages(&ids, 10).unwrap_err().to_string(), message);
        }
        assert_eq!(
            table.validate_pages(&[1u32, 2], 10).unwrap_err().to_string(),
            "page_indices has 2 entries; expected 9"
        );
    }

    #[test]
    fn two_appends_to_one_page_are_reported() {
        // Both requests had 3 tokens in page 7 and append the fourth.
        let shared = PageTable::csr(16, &[0u32, 1, 2], &[4u32, 4]).unwrap();
        let error = shared.validate_append(&[7u32, 7], 8, QueryLengths::uniform(1)).unwrap_err();
        assert_eq!(error.to_string(), "requests 0 and 1 both append to page 7");
        // A shared prefix page that only one of them writes is fine, and so is one nobody writes.
        let one = QueryLengths::indptr(&[0u32, 1, 1]).unwrap();
        shared.validate_append(&[7u32, 7], 8, one).unwrap();
        let prefix = PageTable::csr(4, &[0u32, 2, 4], &[6u32, 5]).unwrap();
        prefix.validate_append(&[7u32, 1, 7, 2], 8, QueryLengths::uniform(1)).unwrap();
        // Three tokens reach back over the page edge into the prefix.
        let error = prefix.validate_append(&[7u32, 1, 7, 2], 8, QueryLengths::uniform(3)).unwrap_err();
        assert_eq!(error.to_string(), "requests 0 and 1 both append to page 7");
        let error = prefix.validate_append(&[7u32, 1, 7, 2], 8, QueryLengths::uniform(6)).unwrap_err();
        assert_eq!(error.to_string(), "request 1 appends 6 tokens, but its kv_len after the append is 5");
    }

    #[test]
    fn query_lengths_come_from_differences() {
        let lengths = QueryLengths::indptr(&[0i32, 3, 3, 5]).unwrap();
        assert_eq!((0..3).map(|request| lengths.len_of(request)).collect::<Vec<_>>(), [3, 0, 2]);
        for (indptr, message) in [
            (&[] as &[i32], "query_indptr has 0 entries; expected 1"),
            (&[2, 3], "query_indptr[0] is 2; it must be 0"),
            (&[0, 3, 1], "query_indptr falls from 3 to 1 at request 1; it must not decrease"),
            (&[0, -3], "query_indptr[1] is -3; it must not be negative"),
        ] {
            assert_eq!(QueryLengths::indptr(indptr).unwrap_err().to_string(), message);
        }
    }
}
