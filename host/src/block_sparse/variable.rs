//! A pattern with block sizes and choices a KV head.
//!
//! In: sizes of the row and column blocks of each KV head, and which of them meet. Out: a [`BlockSparse`] for an
//! attention of 1 KV head whose requests are the row blocks of all heads, one head's after another's. Pages are rows,
//! the row of (token, head): a head's blocks begin at any token, so no larger page fits them all.

use std::ops::Range;

use super::{BlockSparse, BlockSparseError, Pattern, RowBlock, check};
use crate::Error;
use crate::config::AttentionConfig;
use crate::tensor::Layout;

/// Of each KV head, row blocks follow each other along the queries, column blocks along the keys; sizes may be 0.
///
/// Queries and outputs are head-major, `[kv_heads, query_tokens, query heads of a KV head, head_dim]`: as
/// [`Rows`](crate::Rows), `kv_heads * query_tokens` tokens of [`AttentionConfig::group`] heads. So is an LSE. With one
/// query head a KV head that is the usual `[heads, tokens, head_dim]`.
#[derive(Clone, Copy, Debug)]
pub struct VariableBlocks<'a> {
    /// Queries of the sequence.
    pub query_tokens: u32,
    /// Keys of the sequence.
    pub kv_tokens: u32,
    /// Query tokens of each row block, `[kv_heads, row blocks]`.
    pub row_block_tokens: &'a [u32],
    /// Keys of each column block, `[kv_heads, column blocks]`.
    pub column_block_tokens: &'a [u32],
    /// Whether a row block meets a column block, `[kv_heads, row blocks, column blocks]`.
    pub block_map: &'a [bool],
    /// The order of the rows of keys and values: [`Layout::Nhd`] is `[kv_tokens, kv_heads, head_dim]`, [`Layout::Hnd`]
    /// `[kv_heads, kv_tokens, head_dim]`. Each row a fixed step from the one before.
    pub layout: Layout,
}

impl BlockSparse {
    /// The batch of a pattern with blocks of its own for each KV head. `config` is the attention of the whole sequence,
    /// made by [`AttentionConfig::ragged`], which says whether it is causal; the operator's has 1 KV head.
    ///
    /// # Errors
    /// Refuses arrays that disagree, sizes that do not add up to the tokens, more than 2^32 - 1 page ids or query tokens,
    /// of a config what [the module](crate::block_sparse) says, and sinks, of which KV heads could not have their own.
    pub fn variable(config: AttentionConfig, blocks: &VariableBlocks<'_>) -> Result<BlockSparse, Error> {
        check(&config)?;
        if config.sinks {
            let reason = "the KV heads of variable blocks are requests, which share their sinks";
            return Err(BlockSparseError::Unsupported { field: "sinks", reason }.into());
        }
        let VariableBlocks { query_tokens, kv_tokens, layout, block_map, .. } = *blocks;
        let (group, kv_heads) = (config.group(), config.kv_heads);
        let rows = ranges("row_block_tokens", blocks.row_block_tokens, kv_heads, query_tokens)?;
        let columns = ranges("column_block_tokens", blocks.column_block_tokens, kv_heads, kv_tokens)?;
        let [row_count, column_count] = [&rows, &columns].map(|ranges| ranges.len() / kv_heads as usize);
        let expected = rows.len() as u128 * column_count as u128;
        if block_map.len() as u128 != expected {
            let expected = u64::try_from(expected).unwrap_or(u64::MAX);
            return Err(BlockSparseError::Length { field: "block_map", got: block_map.len(), expected }.into());
        }
        let rows_of_keys = kv_tokens as u64 * kv_heads as u64;
        if rows_of_keys > super::MAX_PAGE_IDS {
            let (field, supported) = ("kv_tokens * kv_heads", super::MAX_PAGE_IDS);
            return Err(BlockSparseError::TooLarge { field, got: rows_of_keys, supported }.into());
        }
        let head_of = |request: usize| request / row_count;
        let row_blocks = rows.into_iter().enumerate().map(|(request, rows)| {
            let meets = &block_map[request * column_count..][..column_count];
            let columns = columns[head_of(request) * column_count..].iter().zip(meets);
            RowBlock {
                rows,
                columns: columns.filter(|(_, meets)| **meets).map(|(columns, _)| columns.clone()).collect(),
            }
        });
        let row_blocks: Vec<RowBlock> = row_blocks.collect();
        let pattern = Pattern {
            config: AttentionConfig { query_heads: group, kv_heads: 1, ragged: false, causal: false, ..config },
            query_tokens,
            kv_tokens,
            kv_heads,
            rows_as_pages: Some(layout),
            is_causal: config.causal,
            inner: None,
        };
        pattern.assemble(&row_blocks, |request, key| match layout {
            Layout::Nhd => key * kv_heads + head_of(request) as u32,
            Layout::Hnd => head_of(request) as u32 * kv_tokens + key,
        })
    }
}

/// The tokens of each block, along the sequence, head by head.
fn ranges(field: &'static str, sizes: &[u32], kv_heads: u32, tokens: u32) -> Result<Vec<Range<u32>>, BlockSparseError> {
    if !sizes.len().is_multiple_of(kv_heads as usize) {
        return Err(BlockSparseError::NotPerHead { field, got: sizes.len(), kv_heads });
    }
    let blocks = sizes.len() / kv_heads as usize;
    let mut ranges = Vec::with_capacity(sizes.len());
    for head in 0..kv_heads as usize {
        let sizes = &sizes[head * blocks..][..blocks];
        let got = sizes.iter().map(|&size| size as u64).sum();
        if got != tokens as u64 {
            return Err(BlockSparseError::Sum { field, head, got, expected: tokens });
        }
        let mut begin = 0;
        ranges.extend(sizes.iter().map(|&size| {
            begin += size;
            begin - size..begin
        }));
    }
    Ok(ranges)
}
