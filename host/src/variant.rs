//! What an attention does beside or instead of plain softmax: how a config says so, and helpers for what it reads.
//!
//! In: a model's numbers. Out: an [`AttentionConfig`] with windows, soft cap and the rest switched on, slopes of ALiBi,
//! packed masks. A query token at position `p = t + kv_len - query_len` sees key `k` where *every* rule of the config
//! lets it: causal (`k <= p`), the window (`p - left <= k <= p + right`) and the mask. Its logit is
//!
//! ```text
//! softcap(score * softmax_scale / temperature) + slope * (k - p)
//! ```
//!
//! where queries and keys were normalised and then rotated first, if the config says so. The sink is a logit as it
//! stands. A row that sees no key is output 0 with LSE -inf, or the sink's.

use crate::config::{AttentionConfig, MaskForm};
use crate::rope_config::RopeConfig;

/// `window_left` of a model whose window of `tokens` counts the query's own: one less; none for 0, which is how models
/// say that they have no window.
pub const fn window_left(tokens: u32) -> Option<u32> {
    tokens.checked_sub(1)
}

impl AttentionConfig {
    /// The same where a query token sees at most `left` keys before its own and `right` after it; see [`window_left`].
    pub fn with_window(self, left: Option<u32>, right: Option<u32>) -> AttentionConfig {
        AttentionConfig { window_left: left, window_right: right, ..self }
    }

    /// The same with a custom mask, or the masks of token trees.
    pub fn with_mask(self, form: MaskForm) -> AttentionConfig {
        AttentionConfig { mask: Some(form), ..self }
    }

    /// The same with a temperature a request.
    pub fn with_temperatures(self) -> AttentionConfig {
        AttentionConfig { temperatures: true, ..self }
    }

    /// The same with scaled scores `s` that become `cap * tanh(s / cap)`.
    pub fn with_soft_cap(self, cap: f32) -> AttentionConfig {
        AttentionConfig { soft_cap: Some(cap), ..self }
    }

    /// The same with ALiBi; see [`alibi_slopes`].
    pub fn with_alibi(self) -> AttentionConfig {
        AttentionConfig { alibi: true, ..self }
    }

    /// The same with attention sinks.
    pub fn with_sinks(self) -> AttentionConfig {
        AttentionConfig { sinks: true, ..self }
    }

    /// The same with weights `sigmoid(logit + bias)` and no softmax; there is no LSE.
    pub fn with_sigmoid(self, bias: f32) -> AttentionConfig {
        AttentionConfig { sigmoid_bias: Some(bias), ..self }
    }

    /// The same with queries and keys rotated inside attention: both come as they are before RoPE, and keys lie in the
    /// cache so. A key is rotated by its place among its request's keys, a query by its token's, `t + kv_len - query_len`.
    /// Only their distances count, so a request may lose keys, say all but the first few and the recent ones
    /// ([`crate::streaming`]), and those that stay need not be rotated again.
    ///
    /// Keys whose positions are not their places, those of draft trees and of prompts with several items, are for
    /// [`Rope`](crate::rope::Rope) before attention.
    ///
    /// Rows are rounded to the config's dtype once they are rotated, as a kernel before attention would leave them.
    /// Supported are head dims 64, 96, 128 and 256, and angles that are computed. There are no prefill kernels with it.
    pub fn with_rope(self, rope: RopeConfig) -> AttentionConfig {
        AttentionConfig { rope: Some(rope), ..self }
    }

    /// The same with the positions of query tokens given at run time, counted from their request's first key, as
    /// [`QueryPositions`](crate::QueryPositions). Causal rule, windows and ALiBi still go by places. Without it plans
    /// share no prefixes, since rows of several requests stand side by side then.
    pub fn with_rope_positions(self) -> AttentionConfig {
        AttentionConfig { rope_positions: true, ..self }
    }

    /// The same with query rows that go through an RMS norm first: `q / sqrt(mean(q^2) + epsilon) * weight`, with a weight
    /// an element given at run time. Before the rotation, where there is one.
    pub fn with_query_norm(self, epsilon: f32) -> AttentionConfig {
        AttentionConfig { query_norm: Some(epsilon), ..self }
    }

    /// The same with key rows that go through an RMS norm first; keys lie in the cache without it.
    pub fn with_key_norm(self, epsilon: f32) -> AttentionConfig {
        AttentionConfig { key_norm: Some(epsilon), ..self }
    }

    /// Whether queries or keys are changed before they meet.
    pub fn changes_rows(&self) -> bool {
        self.rope.is_some() || self.query_norm.is_some() || self.key_norm.is_some()
    }

    /// The same with the kernels of a user-defined variant, from a bundle given to `Device::load_bundle`. They honour
    /// scale, causal rule and windows; with any of the changes above a config is refused, as the variant's kernels would
    /// not make them.
    pub fn with_custom_variant(self, name: &'static str) -> AttentionConfig {
        AttentionConfig { custom_variant: Some(name), ..self }
    }

    /// Keys after its own that a query token sees at most: 0 where the attention is causal, `u32::MAX` for all.
    pub fn keys_after(&self) -> u32 {
        if self.causal { 0 } else { self.window_right.unwrap_or(u32::MAX) }
    }

    /// Whether nothing is switched on: the kernels of plain attention do it.
    pub fn is_plain(&self) -> bool {
        let windowed = self.window_left.is_some() || self.window_right.is_some();
        let scored = self.temperatures || self.soft_cap.is_some() || self.alibi || self.custom_variant.is_some();
        let is_changed = windowed || scored || self.mask.is_some() || self.sinks || self.sigmoid_bias.is_some();
        // The plain kernels take the largest score for the largest logit.
        !is_changed && !self.changes_rows() && self.softmax_scale > 0.0
    }
}

/// Slopes of ALiBi (Press et al., 2021) for `query_heads` heads. Of `n = 2^floor(log2(query_heads))`, the first `n` are
/// `2^(-8 (i + 1) / n)`, the rest `2^(-4 (2 j + 1) / n)`.
pub fn alibi_slopes(query_heads: u32) -> Vec<f32> {
    let power = if query_heads == 0 { 1 } else { 1 << query_heads.ilog2() };
    let slope = |head: u32| {
        let exponent = if head < power { 8.0 * (head as f32 + 1.0) } else { 4.0 * (2.0 * (head - power) as f32 + 1.0) };
        (-exponent / power as f32).exp2()
    };
    (0..query_heads).map(slope).collect()
}

/// Packs elements to bits, the first of eight to the lowest: one request's part of a [`MaskForm::Bits`]. The parts of a
/// batch follow each other.
pub fn pack_mask(elements: &[bool]) -> Vec<u8> {
    let byte = |eight: &[bool]| eight.iter().rev().fold(0, |byte, &element| byte << 1 | u8::from(element));
    elements.chunks(8).map(byte).collect()
}

/// A draft that is no tree: a parent that does not come before its child.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("parent of token {token} is {parent}; parents come before their children")]
pub struct TreeError {
    /// The child.
    pub token: usize,
    /// Its parent.
    pub parent: u32,
}

/// The mask of a tree of draft tokens, the last `parents.len()` keys of a request of `kv_len`: a token sees the keys
/// before the tree, itself and its ancestors. `parents[t]` is the tree's token before token `t`, `None` for a root.
pub fn tree_mask(parents: &[Option<u32>], kv_len: u32) -> Result<Vec<bool>, TreeError> {
    let (tokens, kv_len) = (parents.len(), kv_len as usize);
    let context = kv_len.saturating_sub(tokens);
    let mut mask = vec![false; tokens * kv_len];
    for (token, &parent) in parents.iter().enumerate() {
        let (before, row) = mask.split_at_mut(token * kv_len);
        let row = &mut row[..kv_len];
        match parent {
            Some(parent) if parent as usize >= token => return Err(TreeError { token, parent }),
            Some(parent) => row.copy_from_slice(&before[parent as usize * kv_len..][..kv_len]),
            None => row[..context].fill(true),
        }
        if let Some(own) = (kv_len + token).checked_sub(tokens) {
            row[own] = true;
        }
    }
    Ok(mask)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// C3: a model's window of 2 at position 3 shows keys 2 and 3.
    #[test]
    fn a_model_s_window_counts_the_query_s_own_key() {
        assert_eq!([window_left(2), window_left(1), window_left(0)], [Some(1), Some(0), None]);
    }

    #[test]
    fn slopes_are_geometric_and_the_rest_lie_between() {
        assert_eq!(alibi_slopes(8), [0.5, 0.25, 0.125, 0.0625, 0.03125, 0.015625, 0.0078125, 0.00390625]);
        assert_eq!(alibi_slopes(6), [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125]);
        assert_eq!(alibi_slopes(1), [2f32.powi(-8)]);
        assert_eq!(alibi_slopes(0), []);
    }

    #[test]
    fn bits_are_packed_lowest_first() {
        let mut elements = vec![false; 11];
        for set in [0, 3, 8, 10] {
            elements[set] = true;
        }
        assert_eq!(pack_mask(&elements), [0b1001, 0b101]);
        assert_eq!(pack_mask(&[]), []);
    }

    /// Two keys of context; a root with children 1 and 2, and 3 below 2.
    #[test]
    fn a_token_sees_its_ancestors() {
        let mask = tree_mask(&[None, Some(0), Some(0), Some(2)], 6).unwrap();
        let rows: Vec<String> =
            mask.chunks(6).map(|row| row.iter().map(|&seen| if seen { '1' } else { '.' }).collect()).collect();
        assert_eq!(rows, ["111...", "1111..", "111.1.", "111.11"]);
        let error = tree_mask(&[None, Some(1)], 6).unwrap_err();
        assert_eq!(error.to_string(), "parent of token 1 is 1; parents come before their children");
    }
}
