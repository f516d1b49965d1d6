//! What variants read at run time: addresses of device memory, checked against the config.
//!
//! In: [`VariantInputs`] of a call. Out: the kernels' [`RotaryParameters`]. Invariant: what the config asks for is
//! there in the lengths it needs, and nothing is there that the config does not ask for.

use std::f32::consts::LOG2_E;

use kernels_gpu::variant::{ModifiedParameters, RotaryParameters};

use crate::config::{AttentionConfig, MaskForm};
use crate::custom::CustomParameters;
use crate::tensor::{ArgumentError, address, matches};

/// f32 values on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Values {
    /// Address of the first.
    pub address: u64,
    /// Values there.
    pub len: u64,
}

/// A mask on the device: elements in the config's [`MaskForm`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MaskMemory {
    /// Address of the first byte.
    pub address: u64,
    /// Bytes there.
    pub bytes: u64,
}

/// Positions of query tokens on the device, i32, counted from their request's first key; they may be negative.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueryPositions {
    /// Address of the first.
    pub address: u64,
    /// Positions there.
    pub len: u64,
}

/// What a config's variants read: for each, what its `with_` method says is read at run time. The default is nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VariantInputs {
    /// Of `with_sinks`: a logit a query head, in natural logarithms and not scaled; -inf for none.
    pub sinks: Option<Values>,
    /// Of `with_alibi`: a slope a query head.
    pub alibi_slopes: Option<Values>,
    /// Of `with_temperatures`: a positive number a request (in graphs, the limits' requests).
    pub temperatures: Option<Values>,
    /// Of `with_mask`: the requests' parts, one after another; in graphs with room for the limits'
    /// [`mask_bytes`](crate::Limits::mask_bytes).
    pub mask: Option<MaskMemory>,
    /// Of `with_rope_positions`: a position a query token (in graphs, the limits' tokens).
    pub rope_positions: Option<QueryPositions>,
    /// Of `with_query_norm`: a weight an element of a row.
    pub query_norm: Option<Values>,
    /// Of `with_key_norm`: the same.
    pub key_norm: Option<Values>,
    /// Of `with_custom_variant`: the variant's own parameters.
    pub custom: Option<CustomParameters>,
}

impl VariantInputs {
    /// Checks the inputs of a call for `requests` requests and `query_tokens` tokens with a mask of `mask_bytes`. `turns` are
    /// the angles of the config's rotary embedding, if any.
    pub(crate) fn parameters(
        &self,
        config: &AttentionConfig,
        [requests, query_tokens]: [u64; 2],
        mask_bytes: u64,
        mask_requests: u64,
        turns: u64,
    ) -> Result<RotaryParameters, ArgumentError> {
        let heads = config.query_heads as u64;
        let sinks = given("variant.sinks", self.sinks, config.sinks, "with_sinks")?;
        let slopes = given("variant.alibi_slopes", self.alibi_slopes, config.alibi, "with_alibi")?;
        let temperatures = given("variant.temperatures", self.temperatures, config.temperatures, "with_temperatures")?;
        let mask = given("variant.mask", self.mask, config.mask.is_some(), "with_mask")?;
        given("variant.custom", self.custom, config.custom_variant.is_some(), "with_custom_variant")?;
        let made = "with_rope_positions";
        let positions = given("variant.rope_positions", self.rope_positions, config.rope_positions, made)?;
        let query_norm = given("variant.query_norm", self.query_norm, config.query_norm.is_some(), "with_query_norm")?;
        let key_norm = given("variant.key_norm", self.key_norm, config.key_norm.is_some(), "with_key_norm")?;
        if let Some(mask) = mask.filter(|mask| mask.bytes < mask_bytes) {
            matches("variant.mask", "bytes", mask.bytes, mask_bytes)?;
        }
        let mask = match mask {
            Some(mask) => address("variant.mask", mask.address, mask_bytes != 0, 1)?,
            None => 0,
        };
        let scale = config.softmax_scale;
        let (scale, cap_log2) = match config.soft_cap {
            Some(cap) => (scale / cap, cap * LOG2_E),
            None => (scale * LOG2_E, 0.0),
        };
        let keys = |side: Option<u32>| side.map_or(i32::MAX, |keys| keys.min(i32::MAX as u32) as i32);
        let modified = ModifiedParameters {
            sinks: values("variant.sinks", sinks, heads, 4)?,
            alibi_slopes: values("variant.alibi_slopes", slopes, heads, 4)?,
            temperatures: values("variant.temperatures", temperatures, requests, 4)?,
            mask,
            mask_requests,
            scale,
            cap_log2,
            window_left: keys(config.window_left),
            window_right: keys(config.window_right),
            mask_shift: if config.mask == Some(MaskForm::Bits) { 3 } else { 0 },
            sigmoid: config.sigmoid_bias.is_some() as u32,
            sigmoid_bias_log2: config.sigmoid_bias.unwrap_or(0.0) * LOG2_E,
            padding: 0,
        };
        let positions = positions.map(|QueryPositions { address, len }| Values { address, len });
        let head_dim = config.head_dim as u64;
        Ok(RotaryParameters {
            modified,
            turns,
            positions: values("variant.rope_positions", positions, query_tokens, 4)?,
            query_norm: values("variant.query_norm", query_norm, head_dim, 16)?,
            key_norm: values("variant.key_norm", key_norm, head_dim, 16)?,
            query_epsilon: config.query_norm.unwrap_or(0.0),
            key_epsilon: config.key_norm.unwrap_or(0.0),
            rotary_dim: config.rope.map_or(0, |rope| rope.rotary_dim),
            interleaved: config.rope.is_some_and(|rope| rope.interleaved) as u32,
        })
    }
}

/// An input that is there if and only if the config reads it.
fn given<T>(
    input: &'static str,
    got: Option<T>,
    is_read: bool,
    made: &'static str,
) -> Result<Option<T>, ArgumentError> {
    match (got, is_read) {
        (None, true) => Err(ArgumentError::MissingInput { input, made }),
        (Some(_), false) => Err(ArgumentError::UnusedInput { input, made }),
        (got, _) => Ok(got),
    }
}

/// The address of values of which there must be `count`, or more.
fn values(tensor: &'static str, values: Option<Values>, count: u64, alignment: i64) -> Result<u64, ArgumentError> {
    let Some(values) = values else { return Ok(0) };
    if values.len < count {
        matches(tensor, "len", values.len, count)?;
    }
    address(tensor, values.address, count != 0, alignment)
}
