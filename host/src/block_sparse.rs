//! Block-sparse attention: which blocks of queries meet which blocks of keys, as a batch for the paged operator.
//!
//! In: the attention of one sequence over ragged rows, and a pattern: [`Bsr`], the same for all heads, or
//! [`VariableBlocks`], with sizes and choices a KV head. Out: a [`BlockSparse`], which owns a batch's index arrays and
//! lends what [`Attention`](crate::Attention) takes. Invariant: a row block is a request, and its pages are the keys of
//! the column blocks that it lists, in the order listed; keys that no block lists are never read.
//!
//! A request's positions are not the sequence's. So what reads positions, windows, ALiBi and RoPE, is refused, and the causal
//! rule, query `i` sees key `j` only where `j <= i + kv_tokens - query_tokens`, becomes a custom mask where it cuts a
//! block, as a mask of the pattern's own does; blocks that lie wholly in the future are read and masked. Where it comes
//! to the causal rule of each request, it stays one, which is faster: where column blocks divide row blocks, say, and
//! every row block lists last, in order, the column blocks that its own queries are in.
//!
//! Temperatures, one a request, are one a row block. A row block without column blocks is a request without keys.
//!
//! Source: FlashInfer's block-sparse wrappers, which do the same with pages of a column block, or of 1 token.

mod bsr;
mod mask;
mod variable;

pub use bsr::Bsr;
pub use variable::VariableBlocks;

use std::ops::Range;

use crate::Error;
use crate::config::{AttentionConfig, MaskForm};
use crate::page_table::{Lengths, PageTable, PageTableError, QueryLengths};
use crate::plan::Limits;
use crate::tensor::{CacheRows, Layout, PagedCache, Rows, is_dtype, matches};
use mask::Mask;

/// A pattern that contradicts itself, or an attention that it cannot be part of.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum BlockSparseError {
    /// A block of no tokens.
    #[error("{field} is 0; it must be at least 1")]
    Zero {
        /// The field.
        field: &'static str,
    },
    /// An array is shorter or longer than the others imply.
    #[error("{field} has {got} entries; expected {expected}")]
    Length {
        /// The array.
        field: &'static str,
        /// Entries found.
        got: usize,
        /// Entries expected.
        expected: u64,
    },
    /// An array whose entries cannot be shared out to the KV heads.
    #[error("{field} has {got} entries, which is not a multiple of kv_heads = {kv_heads}")]
    NotPerHead {
        /// The array.
        field: &'static str,
        /// Entries found.
        got: usize,
        /// KV heads.
        kv_heads: u32,
    },
    /// A column block that the keys do not reach.
    #[error("row block {row_block} lists column block {got}; there are {column_blocks}")]
    ColumnOutOfRange {
        /// The row block.
        row_block: usize,
        /// The column block found.
        got: u32,
        /// Column blocks.
        column_blocks: u32,
    },
    /// A column block whose keys would count twice.
    #[error("row block {row_block} lists column block {column_block} twice")]
    RepeatedColumn {
        /// The row block.
        row_block: usize,
        /// The column block.
        column_block: u32,
    },
    /// Blocks that do not make up the sequence.
    #[error("{field} of KV head {head} add up to {got}; there are {expected} tokens")]
    Sum {
        /// The array.
        field: &'static str,
        /// The KV head.
        head: usize,
        /// The sum found.
        got: u64,
        /// Tokens of the sequence.
        expected: u32,
    },
    /// A count past what a plan can name.
    #[error("{field} is {got}; supported is at most {supported}")]
    TooLarge {
        /// Which count.
        field: &'static str,
        /// The value found.
        got: u64,
        /// The largest value supported.
        supported: u64,
    },
    /// The host has no room for an array.
    #[error("{bytes} bytes are needed for {field}; the system has no such block")]
    OutOfMemory {
        /// The array.
        field: &'static str,
        /// Bytes asked for.
        bytes: u64,
    },
    /// An attention over pages.
    #[error("the attention has pages of {page_size_tokens} tokens; block-sparse patterns take AttentionConfig::ragged")]
    Pages {
        /// The config's.
        page_size_tokens: u32,
    },
    /// Part of the attention that a pattern's requests would not do.
    #[error("{field} is set; {reason}")]
    Unsupported {
        /// The config's field.
        field: &'static str,
        /// Why not.
        reason: &'static str,
    },
    /// Keys or values that are not a fixed step apart from row to row.
    #[error("{tensor}.{field} is {got}; with {layout:?} rows of {heads} heads it must be {wanted}")]
    Stride {
        /// Which tensor.
        tensor: &'static str,
        /// Which stride.
        field: &'static str,
        /// The value found, in elements.
        got: i64,
        /// The value needed, in elements.
        wanted: i64,
        /// The order of the rows.
        layout: Layout,
        /// Heads.
        heads: u32,
    },
}

/// A pattern of blocks as a batch: its index arrays, whose requests are the row blocks.
///
/// ```
/// use oxattn::*;
///
/// // 70 queries in blocks of 32, 128 keys in blocks of 64. The first block of rows sees all keys, the next none, the last
/// // the second half.
/// let config = AttentionConfig::ragged(4, 2, 64).non_causal(); // query heads, KV heads, head dim
/// let sparse = BlockSparse::bsr(config, &Bsr::new(70, 128, 32, 64, &[0u32, 2, 2, 3], &[0u32, 1, 1]))?;
///
/// let device = Device::cpu();
/// let (q, k) = (device.allocate(70 * 4 * 64 * 2)?, device.allocate(128 * 2 * 64 * 2)?);
/// // In bf16, values of the first half are 1, of the second 2.
/// let (v, out) = ([0x3f80u16, 0x4000].map(|bits| [bits; 64 * 2 * 64]).concat(), device.allocate(70 * 4 * 64 * 2)?);
/// let v = device.upload(&v)?;
/// let rows = |memory: &Buffer, tokens, heads| Rows::contiguous(memory.address(), DType::Bf16, tokens, heads, 64);
/// let (q, out_rows, k, v) = (rows(&q, 70, 4), rows(&out, 70, 4), rows(&k, 128, 2), rows(&v, 128, 2));
///
/// // Once a pattern.
/// let mut attention = Attention::new(&device, *sparse.config(), SplitMode::Balanced, sparse.limits())?;
/// let memory = device.allocate(attention.workspace_bytes() as usize)?;
/// // SAFETY: the device's memory, used for nothing else while `workspace` lives.
/// let mut workspace = unsafe { Workspace::new(memory.address(), memory.bytes() as u64) };
/// let page_ids = device.upload(sparse.page_indices())?;
/// let page_indices = PageIndices { address: page_ids.address(), len: sparse.page_indices().len() as u64 };
/// let planned = attention.plan(&sparse.page_table()?, sparse.query_lengths(), &mut workspace, Stream::default())?;
///
/// // Once a layer; `single::block_sparse` is all of it in one call.
/// let layer = Run::new(q, sparse.cache(k, v)?, page_indices, out_rows);
/// // SAFETY: the tensors are live memory of the device.
/// unsafe { attention.run(&planned, &layer, &mut workspace, Stream::default())? };
/// let first_of = |row: usize| out.download::<u16>().map(|out| out[row * 4 * 64]);
/// assert_eq!([first_of(0)?, first_of(32)?, first_of(69)?], [0x3fc0, 0, 0x4000]);
/// # Ok::<(), Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct BlockSparse {
    config: AttentionConfig,
    /// First query token of each request, and their total.
    query_indptr: Vec<u32>,
    page_indptr: Vec<u32>,
    page_indices: Vec<u32>,
    kv_lens: Vec<u32>,
    mask_bits: Option<Vec<u8>>,
    /// Keys and values as the caller has them.
    kv_tokens: u32,
    kv_heads: u32,
    /// The order of rows where each is a page.
    rows_as_pages: Option<Layout>,
}

/// A row block: its query tokens, and the keys of each column block it lists, along the sequence.
struct RowBlock {
    rows: Range<u32>,
    columns: Vec<Range<u32>>,
}

impl RowBlock {
    fn keys(&self) -> u64 {
        self.columns.iter().map(|columns| columns.len() as u64).sum()
    }
}

/// What a pattern is besides its row blocks.
struct Pattern<'a> {
    /// The operator's, but for its mask.
    config: AttentionConfig,
    query_tokens: u32,
    kv_tokens: u32,
    /// KV heads of the keys and values.
    kv_heads: u32,
    rows_as_pages: Option<Layout>,
    is_causal: bool,
    inner: Option<mask::Inner<'a>>,
}

impl BlockSparse {
    /// The attention as the operator does it: over pages, causal or with a mask where a block is cut. A pattern whose
    /// config came with [`MaskForm::Bits`] has a mask in any case and is not causal, so that one attention serves all
    /// patterns of its page size.
    pub fn config(&self) -> &AttentionConfig {
        &self.config
    }

    /// The least limits that hold the pattern.
    pub fn limits(&self) -> Limits {
        let largest_kv_len = self.kv_lens.iter().copied().max().unwrap_or(0);
        Limits {
            max_requests: (self.kv_lens.len() as u32).max(1),
            max_query_tokens: self.query_indptr[self.query_indptr.len() - 1].max(1),
            max_kv_len_tokens: largest_kv_len.max(1),
            max_kv_tokens: self.kv_lens.iter().map(|&len| len as u64).sum::<u64>().max(1),
        }
    }

    /// For [`Attention::plan`](crate::Attention::plan).
    ///
    /// # Errors
    /// None for a pattern that was made.
    pub fn page_table(&self) -> Result<PageTable<'_>, PageTableError> {
        PageTable::csr(self.config.page_size_tokens, &self.page_indptr, &self.kv_lens)
    }

    /// For [`Attention::plan`](crate::Attention::plan).
    pub fn query_lengths(&self) -> QueryLengths<'_> {
        QueryLengths(Lengths::Indptr(&self.query_indptr))
    }

    /// The page ids, for the caller to upload.
    pub fn page_indices(&self) -> &[u32] {
        &self.page_indices
    }

    /// The mask of the batch, for the caller to upload where the [`config`](Self::config) has one; else nothing.
    pub fn mask_bits(&self) -> &[u8] {
        self.mask_bits.as_deref().unwrap_or_default()
    }

    /// Keys and values `[kv_tokens, kv_heads, head_dim]`, as the pages that the page ids name.
    ///
    /// # Errors
    /// Refuses rows of another shape or dtype, and, for [`VariableBlocks`], rows that do not lie a fixed step apart in
    /// the order that the pattern was made for.
    pub fn cache(&self, k: Rows, v: Rows) -> Result<PagedCache, Error> {
        let AttentionConfig { head_dim, value_head_dim, .. } = self.config;
        Ok(PagedCache { k: self.pages("k", &k, head_dim)?, v: self.pages("v", &v, value_head_dim)? })
    }

    fn pages(&self, tensor: &'static str, rows: &Rows, head_dim: u32) -> Result<CacheRows, Error> {
        is_dtype(tensor, rows.dtype, self.config.dtype)?;
        matches(tensor, "tokens", rows.tokens, self.kv_tokens as u64)?;
        matches(tensor, "heads", rows.heads as u64, self.kv_heads as u64)?;
        matches(tensor, "head_dim", rows.head_dim as u64, head_dim as u64)?;
        let page_size_tokens = self.config.page_size_tokens;
        let (pages, page_stride) = match self.rows_as_pages {
            // A stride past 64 bits is refused where it becomes bytes.
            None => (rows.tokens / page_size_tokens as u64, rows.token_stride.saturating_mul(page_size_tokens as i64)),
            Some(layout) => (rows.tokens * rows.heads as u64, row_stride(tensor, rows, layout)?),
        };
        Ok(CacheRows {
            address: rows.address,
            dtype: rows.dtype,
            pages,
            page_size_tokens,
            kv_heads: self.config.kv_heads,
            head_dim: rows.head_dim,
            page_stride,
            token_stride: rows.token_stride,
            head_stride: rows.head_stride,
        })
    }
}

/// Elements from a row to the next in the order of `layout`.
fn row_stride(tensor: &'static str, rows: &Rows, layout: Layout) -> Result<i64, BlockSparseError> {
    let [tokens, heads] = [(rows.tokens, rows.token_stride), (rows.heads as u64, rows.head_stride)];
    let (field, (outer, got), (inner, step)) = match layout {
        Layout::Nhd => ("token_stride", tokens, heads),
        Layout::Hnd => ("head_stride", heads, tokens),
    };
    let wanted = step.saturating_mul(inner as i64);
    match () {
        _ if inner <= 1 => Ok(got),
        _ if outer <= 1 || got == wanted => Ok(step),
        _ => Err(BlockSparseError::Stride { tensor, field, got, wanted, layout, heads: rows.heads }),
    }
}

/// Refuses what the requests of a pattern would not do as the attention says.
fn check(config: &AttentionConfig) -> Result<(), Error> {
    config.validate()?;
    if !config.ragged {
        return Err(BlockSparseError::Pages { page_size_tokens: config.page_size_tokens }.into());
    }
    let positions = "it reads positions, which blocks that are listed do not keep";
    for (field, is_set, reason) in [
        ("window_left", config.window_left.is_some(), positions),
        ("window_right", config.window_right.is_some(), positions),
        ("alibi", config.alibi, positions),
        ("rope", config.rope.is_some(), positions),
        ("custom_variant", config.custom_variant.is_some(), positions),
        ("mask", config.mask == Some(MaskForm::Bytes), "masks of block-sparse patterns are MaskForm::Bits"),
    ] {
        if is_set {
            return Err(BlockSparseError::Unsupported { field, reason }.into());
        }
    }
    Ok(())
}

/// Largest page id array.
const MAX_PAGE_IDS: u64 = u32::MAX as u64;

impl Pattern<'_> {
    /// The arrays of the requests that `row_blocks` are. `page_of` is the page that begins at a request's key.
    fn assemble(self, row_blocks: &[RowBlock], page_of: impl Fn(usize, u32) -> u32) -> Result<BlockSparse, Error> {
        let page_size_tokens = self.config.page_size_tokens;
        let page_ids: u64 = row_blocks.iter().map(|block| block.keys() / page_size_tokens as u64).sum();
        let query_tokens: u64 = row_blocks.iter().map(|block| block.rows.len() as u64).sum();
        for (field, got) in
            [("page ids", page_ids), ("query tokens", query_tokens), ("row blocks", row_blocks.len() as u64)]
        {
            if got > MAX_PAGE_IDS {
                return Err(BlockSparseError::TooLarge { field, got, supported: MAX_PAGE_IDS }.into());
            }
        }
        let mut page_indices = reserved("page ids", page_ids)?;
        let (mut query_indptr, mut page_indptr, mut kv_lens) = (vec![0], vec![0], Vec::new());
        let mut query_begin = 0;
        for (request, block) in row_blocks.iter().enumerate() {
            for columns in &block.columns {
                page_indices
                    .extend(columns.clone().step_by(page_size_tokens as usize).map(|key| page_of(request, key)));
            }
            query_begin += block.rows.len() as u32;
            query_indptr.push(query_begin);
            page_indptr.push(page_indices.len() as u32);
            kv_lens.push(block.keys() as u32);
        }
        let diagonal = self.is_causal.then_some(self.kv_tokens as i64 - self.query_tokens as i64);
        let mask = Mask { diagonal, inner: self.inner };
        let is_cut = mask.cuts(row_blocks);
        let causal = is_cut && self.config.mask.is_none() && mask.is_causal_in_requests(row_blocks);
        let is_masked = self.config.mask.is_some() || is_cut && !causal;
        let sparse = BlockSparse {
            config: AttentionConfig { causal, mask: is_masked.then_some(MaskForm::Bits), ..self.config },
            query_indptr,
            page_indptr,
            page_indices,
            kv_lens,
            mask_bits: if is_masked { Some(mask.bits(row_blocks)?) } else { None },
            kv_tokens: self.kv_tokens,
            kv_heads: self.kv_heads,
            rows_as_pages: self.rows_as_pages,
        };
        sparse.page_table()?;
        Ok(sparse)
    }
}

/// Room for `count` elements.
fn reserved<T>(field: &'static str, count: u64) -> Result<Vec<T>, BlockSparseError> {
    let out_of_memory = || BlockSparseError::OutOfMemory { field, bytes: count.saturating_mul(size_of::<T>() as u64) };
    let mut array = Vec::new();
    let elements = usize::try_from(count).map_err(|_| out_of_memory())?;
    array.try_reserve_exact(elements).map_err(|_| out_of_memory())?;
    Ok(array)
}

#[cfg(test)]
mod tests;
