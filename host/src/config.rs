//! What an attention is: heads, dims, dtype, scale, mask.
//!
//! In: the model's numbers. Out: an [`AttentionConfig`] every later stage can rely on; [`AttentionConfig::validate`]
//! refuses what no kernel does, naming the field, the value and what is supported.

use kernels_gpu::abi::tile::{PrefillTile, ROTARY_HEAD_DIMS, attend_head_dim};

use crate::rope_config::{RopeAngles, RopeConfig, RopeError};

/// Element type of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DType {
    /// bfloat16.
    Bf16,
    /// IEEE binary16.
    F16,
    /// IEEE binary32: append sources, merges and RoPE only.
    F32,
}

impl DType {
    /// Bytes of an element.
    pub const fn bytes(self) -> usize {
        match self {
            DType::Bf16 | DType::F16 => 2,
            DType::F32 => 4,
        }
    }

    /// The name used in kernel symbols and messages.
    pub const fn name(self) -> &'static str {
        match self {
            DType::Bf16 => "bf16",
            DType::F16 => "f16",
            DType::F32 => "f32",
        }
    }
}

impl std::fmt::Display for DType {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(self.name())
    }
}

/// The attention of one layer, the same for every request of a batch.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct AttentionConfig {
    /// Query heads; a multiple of `kv_heads`.
    pub query_heads: u32,
    /// KV heads.
    pub kv_heads: u32,
    /// Elements of a query and key row.
    pub head_dim: u32,
    /// Elements of a value and output row.
    pub value_head_dim: u32,
    /// Tokens of a page, 1 to 1024, any number; 1 where keys and values are ragged.
    pub page_size_tokens: u32,
    /// Whether keys and values lie in rows, one request's after another's, and not in pages.
    pub ragged: bool,
    /// Element type of queries, cache and outputs.
    pub dtype: DType,
    /// Multiplies the raw scores; `1 / sqrt(head_dim)` unless set.
    pub softmax_scale: f32,
    /// Whether query token `t` sees key `k` only where `k <= t + kv_len - query_len` (bottom-right). With one query
    /// token a request it makes no difference.
    pub causal: bool,
    /// Keys before its own that a query token sees; all where `None`.
    pub window_left: Option<u32>,
    /// Keys after its own that a query token sees, unless it is causal; all where `None`.
    pub window_right: Option<u32>,
    /// Which keys a query token sees of those left by the rules above, given at run time.
    pub mask: Option<MaskForm>,
    /// Whether each request's scaled scores are divided by a temperature given at run time.
    pub temperatures: bool,
    /// Scaled scores `s` become `cap * tanh(s / cap)`.
    pub soft_cap: Option<f32>,
    /// Whether `slope * (key - query)`, with positions in the request and a slope a query head given at run time, is
    /// added to the logits.
    pub alibi: bool,
    /// Whether a logit a query head, given at run time, counts in every softmax of the head and has no value.
    pub sinks: bool,
    /// Weights are `sigmoid(logit + bias)`, and not a softmax.
    pub sigmoid_bias: Option<f32>,
    /// The rotary embedding of queries and keys, which come without it; see [`with_rope`](Self::with_rope).
    pub rope: Option<RopeConfig>,
    /// Whether the positions that queries are rotated by are given at run time.
    pub rope_positions: bool,
    /// RMS norm of each query row, with weights given at run time: what is added to the mean square.
    pub query_norm: Option<f32>,
    /// RMS norm of each key row.
    pub key_norm: Option<f32>,
    /// Levels of prefixes that requests of a batch may share, 0 for none.
    pub shared_prefix_levels: u32,
    /// Whether plans share wherever that is less work, even if one block's waiting outweighs it.
    pub always_shares: bool,
    /// Name of a user-defined variant, whose kernels do what the fields from `mask` on would.
    pub custom_variant: Option<&'static str>,
}

/// How a mask says whether a query token and a key may meet. The element of query token `t` and key `k` is number
/// `t * kv_len + k` of its request's part; the parts of a batch follow each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MaskForm {
    /// A bit each, the lowest of a byte first; each part starts with a byte.
    Bits,
    /// A byte each, 0 or 1.
    Bytes,
}

/// A configuration no kernel can run.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// A count that must be positive is zero.
    #[error("{field} is 0; it must be at least 1")]
    Zero {
        /// The field.
        field: &'static str,
    },
    /// A field is past what the plan or kernels can hold.
    #[error("{field} is {got}; supported is at most {supported}")]
    TooLarge {
        /// The field.
        field: &'static str,
        /// The value found.
        got: u64,
        /// The largest value supported.
        supported: u64,
    },
    /// Pages where there are none.
    #[error("page_size_tokens is {got}; ragged keys and values have no pages, so it must be 1")]
    RaggedPages {
        /// The value found.
        got: u32,
    },
    /// Prefixes of pages where there are none.
    #[error("shared_prefix_levels is {got}; ragged keys and values have no pages to share, so it must be 0")]
    RaggedPrefixes {
        /// The value found.
        got: u32,
    },
    /// The query heads cannot be shared out to the KV heads.
    #[error("query_heads is {query_heads}, which is not a multiple of kv_heads = {kv_heads}")]
    HeadsNotDivisible {
        /// Query heads.
        query_heads: u32,
        /// KV heads.
        kv_heads: u32,
    },
    /// Rows that no kernel takes.
    #[error("{field} is {got}; supported are multiples of {HEAD_DIM_STEP} from {HEAD_DIM_STEP} to {MAX_HEAD_DIM}")]
    UnsupportedHeadDim {
        /// Queries' and keys', or values'.
        field: &'static str,
        /// The value found.
        got: u32,
    },
    /// No kernel is built for this dtype.
    #[error("dtype is {got}; supported are bf16 and f16")]
    UnsupportedDType {
        /// The value found.
        got: DType,
    },
    /// The scale is not a finite number.
    #[error("softmax_scale is {got}; it must be finite")]
    ScaleNotFinite {
        /// The value found.
        got: f32,
    },
    /// The soft cap is not a number to divide by.
    #[error("soft_cap is {got}; supported is from {MIN_SOFT_CAP:e} to {MAX_SOFT_CAP:e}")]
    SoftCap {
        /// The value found.
        got: f32,
    },
    /// The sigmoid's bias is not a finite number.
    #[error("sigmoid_bias is {got}; it must be finite")]
    SigmoidBiasNotFinite {
        /// The value found.
        got: f32,
    },
    /// A sink is part of a softmax.
    #[error("sinks are part of a softmax; with sigmoid_bias there is none")]
    SinksWithoutSoftmax,
    /// The rotary embedding is not one we can do.
    #[error("rope: {0}")]
    Rope(#[from] RopeError),
    /// The rotary embedding is for rows of another length.
    #[error("rope.head_dim is {got}; it must be the attention's head_dim = {wanted}")]
    RopeHeadDim {
        /// The rotary embedding's.
        got: u32,
        /// The attention's.
        wanted: u32,
    },
    /// Inside attention angles are computed.
    #[error("rope takes its angles from a table; supported inside attention are computed ones")]
    RopeTable,
    /// Positions of nothing.
    #[error("rope_positions is set without rope")]
    PositionsWithoutRope,
    /// No kernel is built for this head dim that changes queries and keys.
    #[error("head_dim is {got}; supported with {field} are {supported:?}")]
    RotaryHeadDim {
        /// The field that asks for such a kernel.
        field: &'static str,
        /// The value found.
        got: u32,
        /// The values supported.
        supported: &'static [u32],
    },
    /// No kernel is built for values of another head dim that changes queries and keys.
    #[error("value_head_dim is {got}; with {field} it must be head_dim = {wanted}")]
    RotaryValueHeadDim {
        /// The field that asks for such a kernel.
        field: &'static str,
        /// The values'.
        got: u32,
        /// The queries' and keys'.
        wanted: u32,
    },
    /// A norm that might divide by zero.
    #[error("{field} is {got}; supported is from {MIN_NORM_EPSILON:e} to 1")]
    NormEpsilon {
        /// The field.
        field: &'static str,
        /// The value found.
        got: f32,
    },
    /// A user-defined variant's kernels do nothing that it does not do itself.
    #[error(
        "{field} is set beside custom_variant {variant}, whose kernels do what it says and, of a config, scale, causal \
         rule and windows"
    )]
    BesideCustomVariant {
        /// The field that no kernel would honour.
        field: &'static str,
        /// The variant.
        variant: &'static str,
    },
}

/// Head dims are multiples of this, of queries and keys and of values: 16 bytes, which a kernel copies at once.
pub const HEAD_DIM_STEP: u32 = 8;
/// Widest head dim.
pub const MAX_HEAD_DIM: u32 = 512;
/// Smallest soft cap.
pub const MIN_SOFT_CAP: f32 = 1e-6;
/// Smallest number added to a mean square in a norm.
pub const MIN_NORM_EPSILON: f32 = 1e-12;
/// Largest soft cap.
pub const MAX_SOFT_CAP: f32 = 1e9;
/// Query heads a KV head may serve.
pub const MAX_GROUP: u32 = 128;
/// Largest page.
pub const MAX_PAGE_SIZE_TOKENS: u32 = 1024;
/// Levels of prefixes that a batch may share.
pub const MAX_SHARED_PREFIX_LEVELS: u32 = 8;
/// KV heads a work item can name.
pub const MAX_KV_HEADS: u32 = 65_535;

impl AttentionConfig {
    /// A causal bf16 attention over a paged cache, with the usual scale.
    pub fn new(query_heads: u32, kv_heads: u32, head_dim: u32, page_size_tokens: u32) -> AttentionConfig {
        AttentionConfig {
            query_heads,
            kv_heads,
            head_dim,
            value_head_dim: head_dim,
            page_size_tokens,
            ragged: false,
            dtype: DType::Bf16,
            softmax_scale: 1.0 / (head_dim as f32).sqrt(),
            causal: true,
            window_left: None,
            window_right: None,
            mask: None,
            temperatures: false,
            soft_cap: None,
            alibi: false,
            sinks: false,
            sigmoid_bias: None,
            rope: None,
            rope_positions: false,
            query_norm: None,
            key_norm: None,
            shared_prefix_levels: 0,
            always_shares: false,
            custom_variant: None,
        }
    }

    /// The same over ragged keys and values: two tensors `[tokens, kv_heads, head_dim]` in which one request's tokens
    /// follow another's, as a prompt's projections leave them. There are no pages and no page ids; a batch is planned
    /// from a [`PageTable::ragged`](crate::PageTable::ragged).
    pub fn ragged(query_heads: u32, kv_heads: u32, head_dim: u32) -> AttentionConfig {
        AttentionConfig { ragged: true, ..AttentionConfig::new(query_heads, kv_heads, head_dim, 1) }
    }

    /// The same with values, and so outputs, of another head dim than queries and keys: 128 beside 192, say, as in
    /// DeepSeek's models.
    ///
    /// Both head dims are multiples of 8 up to 512. Where there is no kernel of just these, the next wider one does it, at
    /// the speed of its own head dim.
    pub fn with_value_head_dim(self, value_head_dim: u32) -> AttentionConfig {
        AttentionConfig { value_head_dim, ..self }
    }

    /// The same with another dtype.
    pub fn with_dtype(self, dtype: DType) -> AttentionConfig {
        AttentionConfig { dtype, ..self }
    }

    /// The same with another scale.
    pub fn with_softmax_scale(self, softmax_scale: f32) -> AttentionConfig {
        AttentionConfig { softmax_scale, ..self }
    }

    /// The same with every key visible to every query token of its request.
    pub fn non_causal(self) -> AttentionConfig {
        AttentionConfig { causal: false, ..self }
    }

    /// The same with plans that may read the keys which requests have in common once for all of them: at most `levels`
    /// prefixes of a request, one inside the other, say a system prompt and a document. It sizes the workspace; what is
    /// shared, a table says by
    /// [`PageTable::with_shared_prefixes`](crate::PageTable::with_shared_prefixes), and a plan takes it where it saves
    /// time. Results are the same but for rounding.
    pub fn with_shared_prefixes(self, levels: u32) -> AttentionConfig {
        AttentionConfig { shared_prefix_levels: levels, ..self }
    }

    /// The same, but plans share also where a batch is too small for it to save time: for tests and measurements.
    pub fn always_sharing(self) -> AttentionConfig {
        AttentionConfig { always_shares: true, ..self }
    }

    /// Query heads that share a KV head.
    pub fn group(&self) -> u32 {
        self.query_heads / self.kv_heads
    }

    /// Bytes of a key row and a value row.
    pub(crate) fn key_and_value_bytes(&self) -> u64 {
        (self.head_dim as u64 + self.value_head_dim as u64) * self.dtype.bytes() as u64
    }

    /// Head dim of the attend kernel that does it: the least that its rows fit. The config is valid.
    pub fn attend_head_dim(&self) -> u32 {
        attend_head_dim(self.head_dim, self.value_head_dim).unwrap_or(MAX_HEAD_DIM)
    }

    /// The tile of the prefill kernel whose rows its own fit; `None` where there is no such kernel.
    pub fn prefill_tile(&self) -> Option<PrefillTile> {
        PrefillTile::fitting(self.head_dim, self.value_head_dim, self.is_plain())
    }

    /// Whether an attend kernel of plain attention does it. They take rows of their own head dim alone; narrower ones are
    /// padded by the variants' kernels, so that the plain ones need not look. Of prefill kernels there are plain ones that
    /// pad.
    pub fn is_plain_for_attend(&self) -> bool {
        self.is_plain() && [self.head_dim, self.value_head_dim] == [self.attend_head_dim(); 2]
    }

    /// The attend kernel's symbol.
    #[cfg(any(feature = "cuda", feature = "emulator"))]
    pub(crate) fn attend_symbol(&self) -> String {
        let variant = self.variant_symbol(match self.is_plain_for_attend() {
            _ if self.changes_rows() => "rotary_",
            true => "",
            false => "modified_",
        });
        format!("attend_{variant}{}_d{}", self.dtype, self.attend_head_dim())
    }

    /// The symbol of the prefill kernel of `tile`.
    #[cfg(any(feature = "cuda", feature = "emulator"))]
    pub(crate) fn prefill_symbol(&self, tile: PrefillTile) -> String {
        let PrefillTile { query_dim, value_dim, .. } = tile;
        let is_exact = [self.head_dim, self.value_head_dim] == [query_dim, value_dim];
        let variant = self.variant_symbol(match self.is_plain() {
            _ if self.changes_rows() => "rotary_",
            true if is_exact => "",
            true => "padded_",
            false => "modified_",
        });
        let dims = if query_dim == value_dim { format!("d{query_dim}") } else { format!("d{query_dim}_v{value_dim}") };
        format!("prefill_{variant}{}_{dims}", self.dtype)
    }

    #[cfg(any(feature = "cuda", feature = "emulator"))]
    fn variant_symbol(&self, own: &str) -> String {
        self.custom_variant.map_or(own.to_owned(), |name| format!("{name}_"))
    }

    /// Refuses what no kernel does.
    pub fn validate(&self) -> Result<(), ConfigError> {
        for (field, value) in [
            ("query_heads", self.query_heads),
            ("kv_heads", self.kv_heads),
            ("page_size_tokens", self.page_size_tokens),
        ] {
            if value == 0 {
                return Err(ConfigError::Zero { field });
            }
        }
        if self.ragged && self.page_size_tokens != 1 {
            return Err(ConfigError::RaggedPages { got: self.page_size_tokens });
        }
        if self.ragged && self.shared_prefix_levels != 0 {
            return Err(ConfigError::RaggedPrefixes { got: self.shared_prefix_levels });
        }
        if !self.query_heads.is_multiple_of(self.kv_heads) {
            return Err(ConfigError::HeadsNotDivisible { query_heads: self.query_heads, kv_heads: self.kv_heads });
        }
        for (field, got, supported) in [
            ("kv_heads", self.kv_heads, MAX_KV_HEADS),
            ("query_heads / kv_heads", self.group(), MAX_GROUP),
            ("page_size_tokens", self.page_size_tokens, MAX_PAGE_SIZE_TOKENS),
            ("shared_prefix_levels", self.shared_prefix_levels, MAX_SHARED_PREFIX_LEVELS),
        ] {
            if got > supported {
                return Err(ConfigError::TooLarge { field, got: got as u64, supported: supported as u64 });
            }
        }
        for (field, got) in [("head_dim", self.head_dim), ("value_head_dim", self.value_head_dim)] {
            if got == 0 || got > MAX_HEAD_DIM || !got.is_multiple_of(HEAD_DIM_STEP) {
                return Err(ConfigError::UnsupportedHeadDim { field, got });
            }
        }
        if self.dtype == DType::F32 {
            return Err(ConfigError::UnsupportedDType { got: self.dtype });
        }
        if !self.softmax_scale.is_finite() {
            return Err(ConfigError::ScaleNotFinite { got: self.softmax_scale });
        }
        if self.soft_cap.is_some_and(|cap| !(MIN_SOFT_CAP..=MAX_SOFT_CAP).contains(&cap)) {
            return Err(ConfigError::SoftCap { got: self.soft_cap.unwrap_or(f32::NAN) });
        }
        if let Some(variant) = self.custom_variant {
            for (field, is_set) in [
                ("mask", self.mask.is_some()),
                ("temperatures", self.temperatures),
                ("soft_cap", self.soft_cap.is_some()),
                ("alibi", self.alibi),
                ("sinks", self.sinks),
                ("sigmoid_bias", self.sigmoid_bias.is_some()),
                ("rope", self.rope.is_some()),
                ("query_norm", self.query_norm.is_some()),
                ("key_norm", self.key_norm.is_some()),
            ] {
                if is_set {
                    return Err(ConfigError::BesideCustomVariant { field, variant });
                }
            }
        }
        self.validate_rows()?;
        if let Some(got) = self.sigmoid_bias {
            if !got.is_finite() {
                return Err(ConfigError::SigmoidBiasNotFinite { got });
            }
            if self.sinks {
                return Err(ConfigError::SinksWithoutSoftmax);
            }
        }
        Ok(())
    }

    /// Refuses changes of queries and keys that no kernel does.
    fn validate_rows(&self) -> Result<(), ConfigError> {
        let norms = [("query_norm", self.query_norm), ("key_norm", self.key_norm)];
        let norm_fields = norms.iter().filter(|norm| norm.1.is_some()).map(|norm| norm.0);
        for field in self.rope.map(|_| "rope").into_iter().chain(norm_fields) {
            if !ROTARY_HEAD_DIMS.contains(&self.head_dim) {
                return Err(ConfigError::RotaryHeadDim { field, got: self.head_dim, supported: &ROTARY_HEAD_DIMS });
            }
            if self.value_head_dim != self.head_dim {
                return Err(ConfigError::RotaryValueHeadDim { field, got: self.value_head_dim, wanted: self.head_dim });
            }
        }
        for (field, epsilon) in norms {
            if let Some(got) = epsilon.filter(|epsilon| !(MIN_NORM_EPSILON..=1.0).contains(epsilon)) {
                return Err(ConfigError::NormEpsilon { field, got });
            }
        }
        let Some(rope) = self.rope else {
            return if self.rope_positions { Err(ConfigError::PositionsWithoutRope) } else { Ok(()) };
        };
        rope.validate()?;
        if rope.head_dim != self.head_dim {
            return Err(ConfigError::RopeHeadDim { got: rope.head_dim, wanted: self.head_dim });
        }
        match rope.angles {
            RopeAngles::Computed { .. } => Ok(()),
            RopeAngles::Cached { .. } => Err(ConfigError::RopeTable),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_custom_variant_stands_alone() {
        let custom = AttentionConfig::new(8, 8, 128, 16).with_custom_variant("near");
        custom.with_window(Some(9), Some(1)).with_softmax_scale(0.5).non_causal().validate().unwrap();
        for (field, config) in [
            ("mask", custom.with_mask(MaskForm::Bits)),
            ("temperatures", custom.with_temperatures()),
            ("soft_cap", custom.with_soft_cap(9.0)),
            ("alibi", custom.with_alibi()),
            ("sinks", custom.with_sinks()),
            ("sigmoid_bias", custom.with_sigmoid(1.0)),
            ("rope", custom.with_rope(RopeConfig::new(128))),
            ("query_norm", custom.with_query_norm(1e-6)),
            ("key_norm", custom.with_key_norm(1e-6)),
        ] {
            assert_eq!(config.validate(), Err(ConfigError::BesideCustomVariant { field, variant: "near" }));
        }
        assert!(!custom.is_plain());
    }

    #[test]
    fn plain_kernels_take_positive_scales_alone() {
        let plain = AttentionConfig::new(8, 8, 128, 16);
        assert!(plain.is_plain() && plain.with_softmax_scale(1.0).is_plain());
        for scale in [0.0, -0.0, -1.0] {
            let config = plain.with_softmax_scale(scale);
            config.validate().unwrap();
            assert!(!config.is_plain(), "{scale}");
        }
    }

    #[test]
    fn refusals_name_the_field_and_the_value() {
        let plain = AttentionConfig::new(8, 8, 128, 16);
        let cases = [
            (AttentionConfig::new(3, 2, 128, 16), "query_heads is 3, which is not a multiple of kv_heads = 2"),
            (AttentionConfig::new(4, 0, 128, 16), "kv_heads is 0; it must be at least 1"),
            (AttentionConfig::new(129, 1, 128, 16), "query_heads / kv_heads is 129; supported is at most 128"),
            (AttentionConfig::new(8, 8, 12, 16), "head_dim is 12; supported are multiples of 8 from 8 to 512"),
            (AttentionConfig::new(8, 8, 0, 16), "head_dim is 0; supported are multiples of 8 from 8 to 512"),
            (AttentionConfig::new(8, 8, 520, 16), "head_dim is 520; supported are multiples of 8 from 8 to 512"),
            (plain.with_value_head_dim(12), "value_head_dim is 12; supported are multiples of 8 from 8 to 512"),
            (plain.with_value_head_dim(0), "value_head_dim is 0; supported are multiples of 8 from 8 to 512"),
            (plain.with_value_head_dim(520), "value_head_dim is 520; supported are multiples of 8 from 8 to 512"),
            (AttentionConfig::new(8, 8, 128, 1025), "page_size_tokens is 1025; supported is at most 1024"),
            (AttentionConfig::new(8, 8, 128, 0), "page_size_tokens is 0; it must be at least 1"),
            (
                AttentionConfig { ragged: true, ..plain },
                "page_size_tokens is 16; ragged keys and values have no pages, so it must be 1",
            ),
            (AttentionConfig::new(8, 8, 128, 16).with_dtype(DType::F32), "dtype is f32; supported are bf16 and f16"),
            (
                AttentionConfig::new(8, 8, 128, 16).with_softmax_scale(f32::NAN),
                "softmax_scale is NaN; it must be finite",
            ),
            (plain.with_shared_prefixes(9), "shared_prefix_levels is 9; supported is at most 8"),
            (
                AttentionConfig::ragged(8, 8, 128).with_shared_prefixes(1),
                "shared_prefix_levels is 1; ragged keys and values have no pages to share, so it must be 0",
            ),
            (plain.with_soft_cap(0.0), "soft_cap is 0; supported is from 1e-6 to 1e9"),
            (plain.with_soft_cap(-30.0), "soft_cap is -30; supported is from 1e-6 to 1e9"),
            (plain.with_soft_cap(f32::INFINITY), "soft_cap is inf; supported is from 1e-6 to 1e9"),
            (plain.with_soft_cap(f32::NAN), "soft_cap is NaN; supported is from 1e-6 to 1e9"),
            (plain.with_sigmoid(f32::INFINITY), "sigmoid_bias is inf; it must be finite"),
            (
                AttentionConfig::new(8, 8, 80, 16).with_rope(RopeConfig::new(80)),
                "head_dim is 80; supported with rope are [64, 96, 128, 256]",
            ),
            (
                AttentionConfig::new(8, 8, 128, 16).with_value_head_dim(64).with_rope(RopeConfig::new(128)),
                "value_head_dim is 64; with rope it must be head_dim = 128",
            ),
            (
                AttentionConfig::new(8, 8, 512, 16).with_key_norm(1e-6),
                "head_dim is 512; supported with key_norm are [64, 96, 128, 256]",
            ),
            (plain.with_rope(RopeConfig::new(64)), "rope.head_dim is 64; it must be the attention's head_dim = 128"),
            (
                plain.with_rope(RopeConfig::new(128).with_theta(0.0)),
                "rope: theta is 0; it must be finite and at least 1",
            ),
            (
                plain.with_rope(RopeConfig::new(128).with_cos_sin_cache(256, 9)),
                "rope takes its angles from a table; supported inside attention are computed ones",
            ),
            (plain.with_rope_positions(), "rope_positions is set without rope"),
            (plain.with_query_norm(0.0), "query_norm is 0; supported is from 1e-12 to 1"),
            (plain.with_key_norm(f32::NAN), "key_norm is NaN; supported is from 1e-12 to 1"),
            (plain.with_sigmoid(0.0).with_sinks(), "sinks are part of a softmax; with sigmoid_bias there is none"),
        ];
        for (config, message) in cases {
            assert_eq!(config.validate().unwrap_err().to_string(), message);
        }
        for (query_heads, kv_heads) in [(5, 1), (40, 8), (24, 4), (28, 4), (36, 3), (64, 4), (71, 71), (128, 1)] {
            AttentionConfig::new(query_heads, kv_heads, 128, 16).validate().unwrap();
        }
    }
}
