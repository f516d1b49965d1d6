//! Rotary position embedding and append in one launch.
//!
//! In: new queries, keys and values, the positions they are rotated by, and their places in the cache. Out: rotated
//! queries, in place or elsewhere, and in the cache rotated keys and plain values. The new keys themselves are only
//! read: what attends reads the cache.
//!
//! It does what [`Rope::apply`] and then [`append`](crate::operators::append) do, with one difference: keys are rounded
//! once, from f32 to the cache's dtype. That is the same bits unless rows are of the other 16-bit dtype than the cache.
//! It spares a launch, and writing rotated keys only to read them back.
//!
//! ```
//! # use oxattn::*;
//! # use oxattn::operators::{Append, Destination};
//! # fn main() -> Result<(), Error> {
//! # let device = Device::cpu();
//! // Once a model.
//! let config = AttentionConfig::new(32, 8, 128, 16);
//! let rope = Rope::new(&device, RopeConfig::new(128).with_theta(5e5))?;
//!
//! // Once a step: the next tokens of two requests that have 40 and 5, in pages 3, 0, 2 and 1.
//! let (requests, positions) = (device.upload(&[0i32, 1])?, device.upload(&[40i32, 5])?);
//! let (page_begin, pages) = (device.upload(&[0u32, 3, 4])?, device.upload(&[3u32, 0, 2, 1])?);
//! let destination = Destination::Positions {
//!     requests: requests.address(),
//!     positions: positions.address(),
//!     page_begin: page_begin.address(),
//!     page_indices: PageIndices { address: pages.address(), len: 4 },
//! };
//!
//! // Once a layer.
//! # let cache_bytes = 4 * 16 * 8 * 128 * 2;
//! # let (q, k, v) = (device.allocate(2 * 32 * 256)?, device.allocate(2 * 8 * 256)?, device.allocate(2 * 8 * 256)?);
//! # let (k_cache, v_cache) = (device.allocate(cache_bytes)?, device.allocate(cache_bytes)?);
//! let rows = |buffer: &Buffer, heads| Rows::contiguous(buffer.address(), DType::Bf16, 2, heads, 128);
//! let cache = PagedCache::separate(k_cache.address(), v_cache.address(), 4, Layout::Nhd, &config);
//! let append = Append { k: rows(&k, 8), v: rows(&v, 8), cache, destination };
//! // SAFETY: the tensors are live memory of the device.
//! unsafe { rope.apply_and_append(&config, &RopeAppend::in_place(rows(&q, 32), append), Stream::default()) }
//! # }
//! ```
//!
//! Unsafe: the operator takes raw addresses; only the caller knows that they are live.

use kernels_gpu::abi::parameters::RopeAppendParameters;
#[cfg(feature = "cuda")]
use kernels_gpu::abi::tile::{APPEND_PIECES, APPEND_THREADS, ROPE_THREADS};

#[cfg(feature = "cuda")]
use super::rope_memory;
use super::{Rope, RopeError, RopePositions, RopeRun, Rotate};
use crate::Error;
use crate::config::AttentionConfig;
use crate::device::{Executor, Stream};
#[cfg(feature = "cuda")]
use crate::operators::append_memory;
use crate::operators::{Append, Destination, append_parameters};
use crate::tensor::{Rows, matches};

/// One call: queries that are rotated, keys that are rotated into the cache, and values that are copied there.
///
/// [`check_append`](crate::validate::check_append) checks the append's places, here as there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RopeAppend {
    /// Queries, with as many tokens as the keys and of their dtype.
    pub q: Option<Rotate>,
    /// Keys, values, the cache, and where each token goes. A token without a place is not stored; its queries are
    /// rotated all the same.
    pub append: Append,
    /// The position each token is rotated by. A token with a negative one, or one past a table's end, is skipped whole:
    /// its queries stay as they are, or unwritten, and it is not stored. `None` for the positions that the append's
    /// destination names.
    pub positions: Option<RopePositions>,
}

impl RopeAppend {
    /// Queries are overwritten, and tokens rotated by the positions at which they are stored.
    pub fn in_place(q: Rows, append: Append) -> RopeAppend {
        RopeAppend { q: Some(Rotate::in_place(q)), append, positions: None }
    }

    /// The same rotated by positions of their own: with places by slots, or where a cache keeps only some of the tokens
    /// and its places are not the tokens' positions.
    pub fn with_positions(self, positions: RopePositions) -> RopeAppend {
        RopeAppend { positions: Some(positions), ..self }
    }

    /// By what tokens are rotated.
    fn rotated_by(&self) -> Result<RopePositions, RopeError> {
        match (self.positions, self.append.destination) {
            (Some(positions), _) => Ok(positions),
            (None, Destination::Positions { positions, .. }) => Ok(RopePositions::Ids { address: positions }),
            (None, Destination::Slots { .. }) => Err(RopeError::NoPositions),
        }
    }
}

impl Rope {
    /// Rotates queries and keys and writes keys and values into the cache of `config`. It neither allocates nor waits.
    ///
    /// # Safety
    /// As [`apply`](Rope::apply) and [`append`](crate::operators::append): every tensor describes live memory of the
    /// device until the launch has run, places lie in the cache, no two tokens have the same, and rotated queries and
    /// cache overlap nothing else that is read or written, but for queries rotated in place.
    pub unsafe fn apply_and_append(
        &self,
        config: &AttentionConfig,
        run: &RopeAppend,
        stream: Stream,
    ) -> Result<(), Error> {
        let parameters = self.append_parameters(config, run)?;
        if parameters.append.tokens == 0 {
            return Ok(());
        }
        let source = run.append.k.dtype;
        match &*self.device.executor {
            // SAFETY: live host memory, by this function's contract.
            #[cfg(feature = "cpu")]
            Executor::Cpu => unsafe { crate::cpu::rope_append(&parameters, source, config.dtype) },
            #[cfg(feature = "cuda")]
            Executor::Cuda(cuda) => {
                let RopeAppendParameters { rope, append } = &parameters;
                cuda.check_memory(&rope_memory(rope))?;
                cuda.check_memory(&append_memory(append))?;
                let function = cuda.function(format_args!("rope_append_{source}_{}", config.dtype))?;
                let rotating = (rope.tokens * rope.token_units.get()).div_ceil(ROPE_THREADS);
                let copying = (append.tokens * append.token_chunks.get()).div_ceil(APPEND_THREADS * APPEND_PIECES);
                // SAFETY: live memory of the device, by this function's contract.
                unsafe { cuda.launch(&function, stream, rotating + copying, &parameters)? };
            }
        }
        let _ = stream;
        Ok(())
    }

    /// Checks a call and turns it into the kernel's parameters.
    fn append_parameters(&self, config: &AttentionConfig, run: &RopeAppend) -> Result<RopeAppendParameters, Error> {
        let append = append_parameters(config, &run.append)?;
        matches("rope", "head_dim", self.config.head_dim as u64, config.head_dim as u64)?;
        if let Some(Rotate { input, .. }) = run.q {
            matches("q", "heads", input.heads as u64, config.query_heads as u64)?;
        }
        let rotation = RopeRun { q: run.q, k: Some(Rotate::in_place(run.append.k)), positions: run.rotated_by()? };
        let rope = self.parameters(&rotation, run.append.k.tokens, true)?;
        Ok(RopeAppendParameters { rope, append })
    }
}

#[cfg(all(test, feature = "cpu"))]
mod tests {
    use super::*;
    use crate::rope::RopeConfig;
    use crate::{DType, Device, Layout, PagedCache};

    /// The CPU looks at no units; without these the kernels would leave cached keys past `rotary_dim` as they were.
    #[test]
    fn whole_rows_are_done_where_a_part_is_rotated() {
        let config = AttentionConfig::new(4, 2, 128, 16);
        let rows = |heads| Rows::contiguous(4096, DType::Bf16, 3, heads, 128);
        let cache = PagedCache::separate(4096, 8192, 1, Layout::Nhd, &config);
        let append = Append { k: rows(2), v: rows(2), cache, destination: Destination::Slots { address: 4096 } };
        let run = RopeAppend::in_place(rows(4), append).with_positions(RopePositions::Ids { address: 4096 });
        let rope = Rope::new(&Device::cpu(), RopeConfig::new(128).with_rotary_dim(32)).unwrap();
        let parameters = rope.append_parameters(&config, &run).unwrap();
        // Eight units of 16 elements, and six heads in two groups of four.
        assert_eq!((parameters.rope.units.get(), parameters.rope.token_units.get()), (8, 16));
    }
}
