//! What a case changes of plain attention, and what that reads on the device.
//!
//! In: a case. Out: its config, its inputs on the device and the oracle's rules for the same. Sinks, slopes and masks
//! are made by formulas that both sides know.

use oxattn::oracle::Rules;
use oxattn::variant::{alibi_slopes, pack_mask};
use oxattn::{AttentionConfig, Buffer, MaskForm, MaskMemory, Values, VariantInputs};

use super::Failure;
use super::case::Case;
use super::lab::Lab;

/// A case's config.
pub fn config(case: &Case) -> AttentionConfig {
    let mut config = AttentionConfig::new(case.query_heads, case.kv_heads, case.head_dim, case.page_size);
    if let Some(value_head_dim) = case.value_head_dim {
        config = config.with_value_head_dim(value_head_dim);
    }
    if case.window_left.is_some() {
        config = config.with_window(case.window_left, None);
    }
    if let Some(cap) = case.soft_cap {
        config = config.with_soft_cap(cap);
    }
    if case.sinks {
        config = config.with_sinks();
    }
    if case.alibi {
        config = config.with_alibi();
    }
    if case.mask {
        config = config.with_mask(MaskForm::Bits);
    }
    config
}

/// Keys that the query tokens of a request see, all together, at most.
pub fn seen(case: &Case, query_len: u32, kv_len: u32) -> u64 {
    case.window_left.map_or(kv_len, |left| kv_len.min(left.saturating_add(query_len))) as u64
}

fn sink(head: usize) -> f32 {
    head as f32 / 8.0 - 2.0
}

/// Every seventh key is hidden, from another one on for each token, but no token's own.
fn may_meet(token: usize, position: usize) -> bool {
    (position + token) % 7 != 3
}

/// What a case reads besides queries and cache.
pub struct Inputs {
    sinks: Option<Buffer>,
    slopes: Option<Buffer>,
    mask: Option<Buffer>,
    slopes_of_heads: Vec<f32>,
}

impl Inputs {
    pub fn new(
        lab: &Lab,
        case: &Case,
        query_lens: &[u32],
        kv_lens: &[u32],
        mask_bytes: u64,
    ) -> Result<Inputs, Failure> {
        let heads = case.query_heads as usize;
        let slopes_of_heads = alibi_slopes(case.query_heads);
        let sinks: Vec<f32> = (0..heads).map(sink).collect();
        let mut mask = Vec::new();
        if case.mask {
            for (&query_len, &kv_len) in query_lens.iter().zip(kv_lens) {
                let places =
                    (0..query_len as usize).flat_map(|token| (0..kv_len as usize).map(move |key| (token, key)));
                mask.extend(pack_mask(&places.map(|(token, key)| may_meet(token, key)).collect::<Vec<_>>()));
            }
            mask.resize(mask_bytes as usize, 0);
        }
        let upload = |wanted: bool, values: &[f32]| if wanted { lab.device.upload(values).map(Some) } else { Ok(None) };
        Ok(Inputs {
            sinks: upload(case.sinks, &sinks)?,
            slopes: upload(case.alibi, &slopes_of_heads)?,
            mask: if case.mask { Some(lab.device.upload(&mask)?) } else { None },
            slopes_of_heads,
        })
    }

    pub fn arguments(&self) -> VariantInputs {
        let values = |buffer: &Option<Buffer>| {
            buffer.as_ref().map(|buffer| Values { address: buffer.address(), len: buffer.bytes() as u64 / 4 })
        };
        VariantInputs {
            sinks: values(&self.sinks),
            alibi_slopes: values(&self.slopes),
            mask: self.mask.as_ref().map(|mask| MaskMemory { address: mask.address(), bytes: mask.bytes() as u64 }),
            ..VariantInputs::default()
        }
    }

    /// The oracle's rules, given to `attend`.
    pub fn with_rules<R>(&self, case: &Case, attend: impl FnOnce(Rules<'_>) -> R) -> R {
        let slope = |head: usize| self.slopes_of_heads[head] as f64;
        let sink = |head: usize| sink(head) as f64;
        attend(Rules {
            window_left: case.window_left.map(|left| left as usize),
            soft_cap: case.soft_cap.map(f64::from),
            mask: case.mask.then_some(&may_meet),
            alibi_slope: case.alibi.then_some(&slope),
            sink: case.sinks.then_some(&sink),
            ..Rules::default()
        })
    }
}
