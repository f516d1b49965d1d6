//! RoPE inside attention, and before it.
//!
//! In: a case whose keys lie in the cache as they were before their rotation, as streams without end have them: a window
//! that moves leaves every key at another position, so each step rotates all that are kept. Out: a row by the kernel that
//! rotates as it reads (`oxattn`), one by a rotation of queries and the whole kept cache out of place and then plain
//! attention (`oxattn-rope-then-attend`), and one by plain attention alone (`oxattn-plain`), what the others would cost
//! without any rotation. All count the bytes that plain attention must move.
//!
//! Unsafe: the operators take raw device addresses, here of buffers that live until the lab has synchronised.

use oxattn::oracle::{Rotation, Rules};
use oxattn::{AttentionConfig, Buffer, DType, Rope, RopeConfig, RopePositions, RopeRun, Rotate, Rows, SplitMode};

use super::case::Case;
use super::lab::Lab;
use super::sections::{Batch, attention_in};
use super::variants::config;
use super::{Failure, Row};

const THETA: f64 = 5e5;

pub fn run(lab: &Lab, case: &Case) -> Result<Vec<Row>, Failure> {
    let (plain, mode) = (config(case), SplitMode::Balanced);
    [(Rotates::Inside, "oxattn"), (Rotates::Before, "oxattn-rope-then-attend"), (Rotates::Nowhere, "oxattn-plain")]
        .into_iter()
        .map(|(rotates, peer)| attention_in(lab, case, plain, mode, peer, None, rotates))
        .collect()
}

/// Where queries and keys are rotated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rotates {
    Nowhere,
    Inside,
    Before,
}

fn rope(head_dim: u32) -> RopeConfig {
    RopeConfig::new(head_dim).with_theta(THETA)
}

impl Rotates {
    /// The config of the attention.
    pub fn configured(self, config: AttentionConfig) -> AttentionConfig {
        if self == Rotates::Inside { config.with_rope(rope(config.head_dim)) } else { config }
    }

    /// `rules` with the rotation, wherever it is.
    pub fn with_rules<R>(self, head_dim: u32, rules: Rules<'_>, attend: impl FnOnce(Rules<'_>) -> R) -> R {
        let frequency = |pair: usize| THETA.powf(-2.0 * pair as f64 / head_dim as f64);
        let rotation = Rotation { dim: head_dim as usize, interleaved: false, frequency: &frequency };
        attend(Rules { rotation: (self != Rotates::Nowhere).then_some(rotation), ..rules })
    }
}

/// Queries and a cache's keys rotated out of place, by where they are in their requests.
pub struct Before {
    rope: Rope,
    pub q: Buffer,
    pub k: Buffer,
    query_positions: Buffer,
    /// Of every slot of the cache.
    key_positions: Buffer,
    config: AttentionConfig,
}

impl Before {
    pub fn new(lab: &Lab, batch: &Batch, config: AttentionConfig) -> Result<Before, Failure> {
        let page_size = config.page_size_tokens as usize;
        let mut key_positions = vec![-1i32; batch.pages.pool as usize * page_size];
        let mut query_positions = Vec::new();
        for (request, (&kv_len, &query_len)) in batch.kv_lens.iter().zip(&batch.query_lens).enumerate() {
            for position in 0..kv_len as usize {
                let page = batch.pages.ids[batch.pages.begin[request] as usize + position / page_size] as usize;
                key_positions[page * page_size + position % page_size] = position as i32;
            }
            query_positions.extend(kv_len as i32 - query_len as i32..kv_len as i32);
        }
        let bytes = |tokens: usize, heads: u32| 2 * tokens * (heads * config.head_dim) as usize;
        Ok(Before {
            rope: Rope::new(&lab.device, rope(config.head_dim))?,
            q: lab.device.allocate(bytes(query_positions.len(), config.query_heads))?,
            k: lab.device.allocate(bytes(key_positions.len(), config.kv_heads))?,
            query_positions: lab.device.upload(&query_positions)?,
            key_positions: lab.device.upload(&key_positions)?,
            config,
        })
    }

    /// Rotates from `q` and `k` into its own.
    pub fn rotate(&self, lab: &Lab, q: &Buffer, k: &Buffer) -> Result<(), Failure> {
        let rotate = |from: &Buffer, to: &Buffer, positions: &Buffer, heads: u32| {
            let tokens = positions.bytes() as u64 / 4;
            let rows =
                |memory: &Buffer| Rows::contiguous(memory.address(), DType::Bf16, tokens, heads, self.config.head_dim);
            let rotate = Rotate { input: rows(from), output: rows(to) };
            let positions = RopePositions::Ids { address: positions.address() };
            // SAFETY: all tensors are live until the lab has synchronised.
            unsafe { self.rope.apply(&RopeRun { q: Some(rotate), k: None, positions }, lab.stream) }
        };
        rotate(k, &self.k, &self.key_positions, self.config.kv_heads)?;
        rotate(q, &self.q, &self.query_positions, self.config.query_heads).map_err(Failure::from)
    }
}
