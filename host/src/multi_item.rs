//! Multi-item scoring: one prompt asks about several items, none of which sees another.
//!
//! In: lengths of a prefix and of the items; the prompt is `prefix, delimiter, item, delimiter, ... item, delimiter`.
//! Out: the custom mask of the request, and the positions by which its tokens are rotated. Invariant: an item's rows are
//! those of a prompt of its own, `prefix, item`.
//!
//! A token of the prefix sees those before it and itself. A token of an item sees the prefix and its item's tokens
//! up to itself. A delimiter sees the prefix and not even itself, and no other token sees a delimiter; without a prefix
//! its row sees no key. Source: FlashInfer's multi-item mask, whose `token_pos_in_items` is a token's place in its item
//! counted from 1, and 0 for a delimiter.

use std::ops::Range;

use crate::page_table::MAX_KV_LEN_TOKENS;

/// A prompt of several items.
///
/// ```
/// use oxattn::*;
///
/// // Three tokens that all items see, items of 2 and 1, and three delimiters.
/// let prompt = MultiItem::new(9, 3, &[2, 1])?;
/// // For an attention with_mask(MaskForm::Bits); the prefix is in the cache, so that 6 tokens are new.
/// let bits = pack_mask(&prompt.mask(6)?);
/// assert_eq!(prompt.positions(6)?, [3, 3, 4, 3, 3, 3]);
/// # assert_eq!(bits.len(), (6 * 9usize).div_ceil(8));
/// # Ok::<(), MultiItemError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MultiItem {
    prefix_len_tokens: u32,
    /// Of each token after the prefix.
    places: Vec<Place>,
}

/// Where a token after the prefix is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Delimiter,
    /// So many tokens of its item come before it.
    Item(u32),
}

/// Lengths that make no prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MultiItemError {
    /// Prefix, items and delimiters are not all of the prompt.
    #[error("kv_len is {kv_len}; prefix, items and delimiters are {expected} tokens")]
    KvLen {
        /// Tokens of the prompt.
        kv_len: u32,
        /// Tokens of its parts.
        expected: u64,
    },
    /// More tokens than positions can count.
    #[error("kv_len is {kv_len}; supported is at most {MAX_KV_LEN_TOKENS}")]
    TooLong {
        /// Tokens of the prompt.
        kv_len: u32,
    },
    /// More queries than the prompt has tokens.
    #[error("query_len is {query_len}; the prompt has {kv_len} tokens")]
    QueryLen {
        /// Queries asked for.
        query_len: u32,
        /// Tokens of the prompt.
        kv_len: u32,
    },
}

impl MultiItem {
    /// A prompt of `kv_len_tokens` tokens in all: prefix, items, and a delimiter before the first item and after each.
    ///
    /// # Errors
    /// Refuses lengths that do not add up, and more tokens than [`MAX_KV_LEN_TOKENS`].
    pub fn new(
        kv_len_tokens: u32,
        prefix_len_tokens: u32,
        item_lens_tokens: &[u32],
    ) -> Result<MultiItem, MultiItemError> {
        let items: u64 = item_lens_tokens.iter().map(|&len| len as u64 + 1).sum();
        let expected = prefix_len_tokens as u64 + 1 + items;
        if kv_len_tokens as u64 != expected {
            return Err(MultiItemError::KvLen { kv_len: kv_len_tokens, expected });
        }
        if kv_len_tokens > MAX_KV_LEN_TOKENS {
            return Err(MultiItemError::TooLong { kv_len: kv_len_tokens });
        }
        let mut places = vec![Place::Delimiter];
        for &len in item_lens_tokens {
            places.extend((0..len).map(Place::Item));
            places.push(Place::Delimiter);
        }
        Ok(MultiItem { prefix_len_tokens, places })
    }

    /// Tokens of the prompt.
    pub fn kv_len_tokens(&self) -> u32 {
        self.prefix_len_tokens + self.places.len() as u32
    }

    /// The mask of the last `query_len_tokens` tokens, `[query_len_tokens, kv_len_tokens]`, for
    /// [`pack_mask`](crate::pack_mask). Better for a causal attention, which plans no keys that the mask hides as future;
    /// the result is the same without.
    ///
    /// # Errors
    /// Refuses more tokens than the prompt has.
    pub fn mask(&self, query_len_tokens: u32) -> Result<Vec<bool>, MultiItemError> {
        let (kv_len, prefix_len) = (self.kv_len_tokens() as usize, self.prefix_len_tokens as usize);
        let queries = self.queries(query_len_tokens)?;
        let mut mask = vec![false; queries.len() * kv_len];
        for (token, row) in queries.zip(mask.chunks_exact_mut(kv_len)) {
            match self.place(token) {
                None => row[..=token].fill(true),
                Some(place) => {
                    row[..prefix_len].fill(true);
                    if let Place::Item(before) = place {
                        row[token - before as usize..=token].fill(true);
                    }
                }
            }
        }
        Ok(mask)
    }

    /// Positions of the last `query_len_tokens` tokens, for `RopePositions::Ids`: every item's go on from the prefix, as
    /// does a delimiter's.
    ///
    /// # Errors
    /// Refuses more tokens than the prompt has.
    pub fn positions(&self, query_len_tokens: u32) -> Result<Vec<i32>, MultiItemError> {
        let position = |token: usize| match self.place(token) {
            None => token as u32,
            Some(Place::Delimiter) => self.prefix_len_tokens,
            Some(Place::Item(before)) => self.prefix_len_tokens + before,
        };
        // `new` bounds the prompt, so that positions are i32.
        Ok(self.queries(query_len_tokens)?.map(|token| position(token) as i32).collect())
    }

    /// The last tokens of the prompt.
    fn queries(&self, query_len: u32) -> Result<Range<usize>, MultiItemError> {
        let kv_len = self.kv_len_tokens();
        match kv_len.checked_sub(query_len) {
            Some(first) => Ok(first as usize..kv_len as usize),
            None => Err(MultiItemError::QueryLen { query_len, kv_len }),
        }
    }

    /// `None` in the prefix.
    fn place(&self, token: usize) -> Option<Place> {
        token.checked_sub(self.prefix_len_tokens as usize).map(|after| self.places[after])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Prefix of 2, items of 2, 0 and 1, by hand.
    #[test]
    fn items_see_the_prefix_and_themselves() {
        let prompt = MultiItem::new(9, 2, &[2, 0, 1]).unwrap();
        assert_eq!(prompt.kv_len_tokens(), 9);
        let rows = |query_len| {
            let mask = prompt.mask(query_len).unwrap();
            let text = |row: &[bool]| row.iter().map(|&seen| if seen { '1' } else { '.' }).collect::<String>();
            mask.chunks(9).map(text).collect::<Vec<_>>()
        };
        let expected = [
            "1........",
            "11.......",
            "11.......",
            "11.1.....",
            "11.11....",
            "11.......",
            "11.......",
            "11.....1.",
            "11.......",
        ];
        assert_eq!(rows(9), expected);
        assert_eq!(rows(4), expected[5..]);
        assert_eq!(rows(0), [""; 0]);
        assert_eq!(prompt.positions(9).unwrap(), [0, 1, 2, 2, 3, 2, 2, 2, 2]);
        assert_eq!(prompt.positions(5).unwrap(), [3, 2, 2, 2, 2]);
    }

    #[test]
    fn without_a_prefix_a_delimiter_sees_nothing() {
        let prompt = MultiItem::new(3, 0, &[1]).unwrap();
        assert_eq!(prompt.mask(3).unwrap(), [false, false, false, false, true, false, false, false, false]);
        assert_eq!(MultiItem::new(1, 0, &[]).unwrap().mask(1).unwrap(), [false]);
    }

    #[test]
    fn lengths_that_do_not_add_up_are_refused() {
        let error = MultiItem::new(10, 3, &[2, 1]).unwrap_err();
        assert_eq!(error.to_string(), "kv_len is 10; prefix, items and delimiters are 9 tokens");
        let error = MultiItem::new(7, u32::MAX, &[u32::MAX]).unwrap_err();
        assert_eq!(error, MultiItemError::KvLen { kv_len: 7, expected: 2 * (1 << 32) });
        let error = MultiItem::new(1 << 31, (1 << 31) - 1, &[]).unwrap_err();
        assert_eq!(error.to_string(), "kv_len is 2147483648; supported is at most 2147483647");
        let prompt = MultiItem::new(9, 3, &[2, 1]).unwrap();
        for error in [prompt.mask(10).unwrap_err(), prompt.positions(10).unwrap_err()] {
            assert_eq!(error.to_string(), "query_len is 10; the prompt has 9 tokens");
        }
    }
}
