//! The custom mask of a pattern, in the order in which its requests list their keys.
//!
//! In: row blocks, the causal rule and the mask inside the blocks. Out: bits in the form of
//! [`MaskForm::Bits`](crate::MaskForm::Bits). Invariant: a request's part begins with a byte, and a listed block's
//! elements lie where its keys do.

use std::ops::Range;

use super::{BlockSparseError, RowBlock};

/// Which elements of the listed blocks count.
pub(super) struct Mask<'a> {
    /// The causal rule: query `i` sees keys up to `i + diagonal`.
    pub diagonal: Option<i64>,
    /// The pattern's own mask.
    pub inner: Option<Inner<'a>>,
}

/// Elements `[listed blocks, rows, columns]`.
pub(super) struct Inner<'a> {
    pub elements: &'a [bool],
    pub rows: usize,
    pub columns: usize,
}

impl Mask<'_> {
    /// Whether a listed block may not count whole.
    pub fn cuts(&self, row_blocks: &[RowBlock]) -> bool {
        let is_cut = |block: &RowBlock| {
            let mut listed = block.columns.iter().filter(|columns| !columns.is_empty() && !block.rows.is_empty());
            listed.any(|columns| self.visible(block.rows.start, columns) < columns.len())
        };
        self.inner.is_some() || row_blocks.iter().any(is_cut)
    }

    /// Whether each request's own causal rule, its last query sees its last key, shows what this mask does.
    pub fn is_causal_in_requests(&self, row_blocks: &[RowBlock]) -> bool {
        let holds = |block: &RowBlock| {
            let (keys, queries) = (block.keys() as i64, block.rows.len() as i64);
            block.rows.clone().zip(keys - queries + 1..).all(|(row, shown)| {
                let mut left = shown.clamp(0, keys) as usize;
                block.columns.iter().all(|columns| {
                    let expected = left.min(columns.len());
                    left -= expected;
                    self.visible(row, columns) == expected
                })
            })
        };
        self.diagonal.is_some() && self.inner.is_none() && row_blocks.iter().all(holds)
    }

    /// The first keys of `columns` that the causal rule shows query `row`.
    fn visible(&self, row: u32, columns: &Range<u32>) -> usize {
        let keys = columns.len() as i64;
        let visible = self.diagonal.map_or(keys, |diagonal| row as i64 + diagonal + 1 - columns.start as i64);
        visible.clamp(0, keys) as usize
    }

    /// The bits of a batch.
    pub fn bits(&self, row_blocks: &[RowBlock]) -> Result<Vec<u8>, BlockSparseError> {
        let bytes_of = |block: &RowBlock| (block.rows.len() as u64 * block.keys()).div_ceil(8);
        let bytes = row_blocks.iter().fold(0u64, |bytes, block| bytes.saturating_add(bytes_of(block)));
        let mut bits = super::reserved("mask", bytes)?;
        bits.resize(bytes as usize, 0);
        let (mut element, mut listed) = (0, 0);
        for block in row_blocks {
            for (row, token) in block.rows.clone().enumerate() {
                for (number, columns) in (listed..).zip(&block.columns) {
                    let visible = self.visible(token, columns);
                    match &self.inner {
                        None => set(&mut bits, element..element + visible),
                        Some(inner) => {
                            let elements = &inner.elements[(number * inner.rows + row) * inner.columns..][..visible];
                            for column in (0..visible).filter(|&column| elements[column]) {
                                set(&mut bits, element + column..element + column + 1);
                            }
                        }
                    }
                    element += columns.len();
                }
            }
            listed += block.columns.len();
            element = element.next_multiple_of(8);
        }
        Ok(bits)
    }
}

/// Sets a range of bits, whole bytes at once.
fn set(bits: &mut [u8], range: Range<usize>) {
    let (first, last) = (range.start.next_multiple_of(8).min(range.end), range.end / 8 * 8);
    (range.start..first).for_each(|bit| bits[bit / 8] |= 1 << (bit % 8));
    if first < last {
        bits[first / 8..last / 8].fill(0xff);
    }
    (first.max(last)..range.end).for_each(|bit| bits[bit / 8] |= 1 << (bit % 8));
}

#[cfg(test)]
mod tests {
    #[test]
    fn every_range_of_bits_is_set_and_no_other() {
        for begin in 0..25 {
            for end in begin..25 {
                let mut bits = [0; 4];
                super::set(&mut bits, begin..end);
                let expected: u32 = (begin..end).map(|bit| 1 << bit).sum();
                assert_eq!(u32::from_le_bytes(bits), expected, "{begin}..{end}");
            }
        }
    }
}
