//! Streams without end: which pages of a request stay when only its first keys and its recent ones do.
//!
//! In: how many sinks, how long a window, and the keys a request has in the cache. Out: the pages that go. Invariant: the
//! first `sink_tokens` keys and the last `window_tokens` stay; beside them at most a page less one key on either side.
//!
//! A page goes or stays as a whole, since a key's position is its place among the keys that the page table lists. So where
//! the sinks end inside a page, the rest of that page counts as sinks, and **a window that begins inside a page begins with
//! that page**: a request attends to up to a page less one key more than its window. Pages of one token keep both exact.
//!
//! What goes is taken out of the request's list of pages; those behind it move up, and their keys with them. With
//! [`AttentionConfig::with_rope`](crate::AttentionConfig::with_rope) the keys lie in the cache before their rotation, and
//! each is rotated by where it now stands: Xiao et al., "Efficient streaming language models with attention sinks" (2023),
//! section 3.2. The model never meets a distance longer than what is kept.
//!
//! ```
//! use oxattn::streaming::Streaming;
//!
//! // 4 sinks and the last 20 keys, in pages of 16.
//! let streaming = Streaming::new(4, 20, 16)?;
//! let (mut pages, mut kv_len) = (vec![7u32, 3, 9, 1, 5], 70); // token 70 was just appended
//! let gone = streaming.pages_to_drop(kv_len);
//! kv_len -= 16 * gone.len() as u32;
//! let freed: Vec<u32> = pages.drain(gone).collect();
//! // Keys 50 to 69 stay, and with them 48 and 49, which share a page with 50.
//! assert_eq!((freed, pages, kv_len), (vec![3, 9], vec![7, 1, 5], 38));
//! # Ok::<(), oxattn::streaming::StreamingError>(())
//! ```

use std::ops::Range;

/// A request's first keys and its recent ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Streaming {
    sink_tokens: u32,
    window_tokens: u32,
    page_size_tokens: u32,
}

/// Numbers that keep nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field} is 0; it must be at least 1")]
pub struct StreamingError {
    /// The field.
    pub field: &'static str,
}

impl Streaming {
    /// The first `sink_tokens` keys and the last `window_tokens`, the newest token's own among them, in pages of
    /// `page_size_tokens`.
    ///
    /// # Errors
    /// Refuses a window or pages of no tokens.
    pub fn new(sink_tokens: u32, window_tokens: u32, page_size_tokens: u32) -> Result<Streaming, StreamingError> {
        for (field, value) in [("window_tokens", window_tokens), ("page_size_tokens", page_size_tokens)] {
            if value == 0 {
                return Err(StreamingError { field });
            }
        }
        Ok(Streaming { sink_tokens, window_tokens, page_size_tokens })
    }

    /// The pages that go, as a range of the list of a request with `kv_len_tokens` keys in the cache; often none. With
    /// several new tokens, ask for the first one's sake: with as many keys as there are up to it.
    pub fn pages_to_drop(&self, kv_len_tokens: u32) -> Range<usize> {
        let sink_pages = self.sink_tokens.div_ceil(self.page_size_tokens) as usize;
        let window_page = (kv_len_tokens.saturating_sub(self.window_tokens) / self.page_size_tokens) as usize;
        sink_pages.min(window_page)..window_page
    }

    /// Keys that a request has at most once its pages were dropped: what limits and page pools are sized by.
    pub fn most_kv_len_tokens(&self) -> u64 {
        let page = self.page_size_tokens as u64;
        let sinks = (self.sink_tokens as u64).next_multiple_of(page);
        sinks + self.window_tokens as u64 + page - 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Token by token: what stays are the sinks and the window, whole pages of them, and never more than was said.
    #[test]
    fn sinks_and_window_stay_and_little_else() {
        for (sink_tokens, window_tokens, page) in
            [(4, 20, 16), (4, 256, 16), (0, 1, 1), (4, 7, 1), (5, 5, 5), (6, 9, 5), (1, 1, 64), (33, 2, 16)]
        {
            let streaming = Streaming::new(sink_tokens, window_tokens, page).unwrap();
            // The original positions of the keys in the cache.
            let mut kept: Vec<u32> = Vec::new();
            for token in 0..1000 {
                kept.push(token);
                let gone = streaming.pages_to_drop(kept.len() as u32);
                kept.drain(gone.start * page as usize..gone.end * page as usize);
                assert!(streaming.pages_to_drop(kept.len() as u32).is_empty());
                assert!(kept.len() as u64 <= streaming.most_kv_len_tokens(), "{streaming:?}, token {token}");
                let stays = |&position: &u32| position < sink_tokens || position + window_tokens > token;
                assert!((0..=token).filter(stays).all(|position| kept.binary_search(&position).is_ok()));
                let beside = kept.iter().filter(|position| !stays(position)).count();
                assert!(beside <= 2 * (page as usize - 1), "{streaming:?}, token {token}: {beside}");
                // Places in pages do not change.
                assert!(kept.iter().enumerate().all(|(place, &position)| place as u32 % page == position % page));
            }
        }
    }

    #[test]
    fn a_window_that_begins_inside_a_page_begins_with_the_page() {
        let streaming = Streaming::new(4, 20, 16).unwrap();
        // 52 keys: the window begins with key 32, the first of page 2; 53: with key 33, and page 2 stays; 68: page 3.
        assert_eq!([52, 53, 67, 68].map(|keys| streaming.pages_to_drop(keys)), [1..2, 1..2, 1..2, 1..3]);
        assert_eq!([0, 1, 20, 36, 51].map(|keys| streaming.pages_to_drop(keys).len()), [0, 0, 0, 0, 0]);
    }

    #[test]
    fn nothing_is_no_window() {
        let message = |window, page| Streaming::new(4, window, page).unwrap_err().to_string();
        assert_eq!(message(0, 16), "window_tokens is 0; it must be at least 1");
        assert_eq!(message(9, 0), "page_size_tokens is 0; it must be at least 1");
        assert_eq!(Streaming::new(u32::MAX, u32::MAX, 1024).unwrap().pages_to_drop(u32::MAX).len(), 0);
    }
}
