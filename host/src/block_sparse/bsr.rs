//! A pattern of equal blocks, the same for all heads: block-sparse rows (BSR).
//!
//! In: block sizes, and for each row block its column blocks, as CSR. Out: a [`BlockSparse`] whose pages are column
//! blocks, or equal parts of them. Invariant: no page reaches past the last key, for the page size divides the number
//! of keys too; so the cache is the caller's rows and nothing else, whoever copies whole pages.

use super::{BlockSparse, BlockSparseError, Pattern, RowBlock, check, mask};
use crate::Error;
use crate::config::{AttentionConfig, MAX_PAGE_SIZE_TOKENS};
use crate::page_table::{Indices, check_indptr};

/// Query block `r`, tokens `r * row_block_tokens ..`, meets the keys of blocks `indices[indptr[r] .. indptr[r + 1]]`,
/// block `c` being keys `c * column_block_tokens ..`. The last block of either kind may be short. A row block's column
/// blocks come in any order, none twice.
#[derive(Clone, Copy, Debug)]
pub struct Bsr<'a> {
    /// Queries of the sequence.
    pub query_tokens: u32,
    /// Keys of the sequence.
    pub kv_tokens: u32,
    /// Query tokens of a row block.
    pub row_block_tokens: u32,
    /// Keys of a column block.
    pub column_block_tokens: u32,
    /// First entry of each row block in `indices`, and their total.
    pub indptr: Indices<'a>,
    /// Column blocks.
    pub indices: Indices<'a>,
    /// Which elements of the listed blocks count, `[indices, row_block_tokens, column_block_tokens]`; all where `None`.
    /// Elements of short blocks past the last query or key say nothing.
    pub mask: Option<&'a [bool]>,
}

impl<'a> Bsr<'a> {
    /// A pattern of whole blocks.
    pub fn new(
        query_tokens: u32,
        kv_tokens: u32,
        row_block_tokens: u32,
        column_block_tokens: u32,
        indptr: impl Into<Indices<'a>>,
        indices: impl Into<Indices<'a>>,
    ) -> Bsr<'a> {
        let (indptr, indices) = (indptr.into(), indices.into());
        Bsr { query_tokens, kv_tokens, row_block_tokens, column_block_tokens, indptr, indices, mask: None }
    }

    /// The same with a mask inside the blocks.
    pub fn with_mask(self, mask: &'a [bool]) -> Bsr<'a> {
        Bsr { mask: Some(mask), ..self }
    }
}

impl BlockSparse {
    /// The batch of a pattern of equal blocks. `config` is the attention of the whole sequence, made by
    /// [`AttentionConfig::ragged`], which says whether it is causal.
    ///
    /// A page has the most tokens, up to 1024, that divide both a column block and the keys: a whole block, where the keys
    /// are whole blocks. With an odd number of keys there are many page ids, and Hopper's prefill kernel, which takes pages
    /// of a multiple of 8 tokens, is out.
    ///
    /// # Errors
    /// Refuses blocks of 0 tokens, arrays that disagree, a column block that is out of range or listed twice, more than
    /// 2^32 - 1 page ids, and of a config what [the module](crate::block_sparse) says.
    pub fn bsr(config: AttentionConfig, bsr: &Bsr<'_>) -> Result<BlockSparse, Error> {
        check(&config)?;
        let Bsr { query_tokens, kv_tokens, row_block_tokens, column_block_tokens, mask, .. } = *bsr;
        for (field, value) in [("row_block_tokens", row_block_tokens), ("column_block_tokens", column_block_tokens)] {
            if value == 0 {
                return Err(BlockSparseError::Zero { field }.into());
            }
        }
        let row_blocks = row_blocks(bsr)?;
        if let Some(mask) = mask {
            let block_elements = row_block_tokens as u128 * column_block_tokens as u128;
            let expected = bsr.indices.len() as u128 * block_elements;
            if mask.len() as u128 != expected {
                let expected = u64::try_from(expected).unwrap_or(u64::MAX);
                return Err(BlockSparseError::Length { field: "mask", got: mask.len(), expected }.into());
            }
        }
        let page_size_tokens = page_size_tokens(column_block_tokens, kv_tokens);
        let pattern = Pattern {
            config: AttentionConfig { ragged: false, page_size_tokens, causal: false, ..config },
            query_tokens,
            kv_tokens,
            kv_heads: config.kv_heads,
            rows_as_pages: None,
            is_causal: config.causal,
            inner: mask.map(|elements| mask::Inner {
                elements,
                rows: row_block_tokens as usize,
                columns: column_block_tokens as usize,
            }),
        };
        pattern.assemble(&row_blocks, |_, key| key / page_size_tokens)
    }
}

/// The row blocks and the keys they list.
fn row_blocks(bsr: &Bsr<'_>) -> Result<Vec<RowBlock>, Error> {
    let indptr = bsr.indptr.non_negative("indptr")?;
    let indices = bsr.indices.non_negative("indices")?;
    let row_count = bsr.query_tokens.div_ceil(bsr.row_block_tokens) as usize;
    let column_blocks = bsr.kv_tokens.div_ceil(bsr.column_block_tokens);
    check_indptr("indptr", indptr, row_count)?;
    let listed = indptr[row_count] as usize;
    if indices.len() != listed {
        let (got, expected) = (indices.len(), listed as u64);
        return Err(BlockSparseError::Length { field: "indices", got, expected }.into());
    }
    let mut row_blocks = super::reserved("row blocks", row_count as u64)?;
    // The last row block that listed each column block, plus 1.
    let mut listed_by = super::reserved("column blocks", column_blocks as u64)?;
    listed_by.resize(column_blocks as usize, 0usize);
    let tokens_of = |block: u32, size: u32, tokens: u32| {
        let begin = block * size;
        begin..begin.saturating_add(size).min(tokens)
    };
    for (row_block, range) in indptr.windows(2).enumerate() {
        let mut columns = Vec::with_capacity((range[1] - range[0]) as usize);
        for &column_block in &indices[range[0] as usize..range[1] as usize] {
            match listed_by.get_mut(column_block as usize) {
                None => {
                    let (got, column_blocks) = (column_block, column_blocks);
                    return Err(BlockSparseError::ColumnOutOfRange { row_block, got, column_blocks }.into());
                }
                Some(last) if *last == row_block + 1 => {
                    return Err(BlockSparseError::RepeatedColumn { row_block, column_block }.into());
                }
                Some(last) => *last = row_block + 1,
            }
            columns.push(tokens_of(column_block, bsr.column_block_tokens, bsr.kv_tokens));
        }
        row_blocks
            .push(RowBlock { rows: tokens_of(row_block as u32, bsr.row_block_tokens, bsr.query_tokens), columns });
    }
    Ok(row_blocks)
}

/// The most tokens, up to a page's, that divide a column block and the keys.
fn page_size_tokens(column_block_tokens: u32, kv_tokens: u32) -> u32 {
    let (mut common, mut rest) = (column_block_tokens, kv_tokens);
    while rest != 0 {
        (common, rest) = (rest, common % rest);
    }
    (1..=common.min(MAX_PAGE_SIZE_TOKENS)).rev().find(|&tokens| common.is_multiple_of(tokens)).unwrap_or(1)
}

#[cfg(test)]
mod tests {
    #[test]
    fn pages_divide_blocks_and_keys() {
        for (column_block_tokens, kv_tokens, page) in [
            (64, 128, 64),
            (64, 0, 64),
            (64, 100, 4),
            (64, 101, 1),
            (16, 8, 8),
            (1024, 4096, 1024),
            (2048, 4096, 1024),
            (1536, 4608, 768),
            (1031, 2062, 1),
            (u32::MAX, u32::MAX, 771),
        ] {
            assert_eq!(
                super::page_size_tokens(column_block_tokens, kv_tokens),
                page,
                "{column_block_tokens}, {kv_tokens}"
            );
        }
    }
}
