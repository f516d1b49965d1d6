//! Rotary position embedding: queries and keys turned by their positions.
//!
//! In: rows of queries and keys on a device and where each token stands. Out: the rotated rows, in place or elsewhere.
//! Invariant: everything a host can check is refused before a launch; with no tokens nothing is launched; a token at a
//! negative position is skipped: in place its rows stay as they are, elsewhere its output rows are not written.
//!
//! One launch does queries and keys. It is bound by memory: it reads and writes each element once, in 16-byte pieces,
//! `2 * tokens * (query_heads + kv_heads) * head_dim` elements in all (`rotary_dim` elements a row in place). Positions
//! and angles add at most a few hundred bytes a token.
//!
//! Cosines and sines are within 1e-6 of exact ones at any position below 2^31 where frequencies are at most a radian a
//! position, as they are unless a scaling's factor is below 1. Rows are rotated in f32 and rounded to their dtype.
//!
//! ```
//! # use oxattn::*;
//! # fn main() -> Result<(), Error> {
//! # let device = Device::cpu();
//! // Once a model.
//! let rope = Rope::new(&device, RopeConfig::new(128).with_theta(5e5))?;
//!
//! // Once a layer: the next tokens of two requests that have 40 and 5.
//! let positions = device.upload(&[40i32, 5])?;
//! let (q, k) = (device.allocate(2 * 32 * 128 * 2)?, device.allocate(2 * 8 * 128 * 2)?);
//! let run = RopeRun::in_place(
//!     Rows::contiguous(q.address(), DType::Bf16, 2, 32, 128),
//!     Rows::contiguous(k.address(), DType::Bf16, 2, 8, 128),
//!     RopePositions::Ids { address: positions.address() },
//! );
//! // SAFETY: the tensors are live memory of the device.
//! unsafe { rope.apply(&run, Stream::default()) }
//! # }
//! ```
//!
//! Unsafe: the operator takes raw addresses; only the caller knows that they are live.

mod append;

pub use crate::rope_config::{RopeAngles, RopeConfig, RopeError, RopeScaling};
pub use append::RopeAppend;

use kernels_gpu::abi::divisor::Divisor;
use kernels_gpu::abi::parameters::{RopeParameters, RowsView};
use kernels_gpu::abi::tile::ROPE_HEADS;
#[cfg(feature = "cuda")]
use kernels_gpu::abi::tile::ROPE_THREADS;

use crate::Error;
use crate::device::{Buffer, Device, Executor, Stream};
use crate::tensor::{ABSENT, ArgumentError, Rows, address, is_dtype, matches};

/// A rotary embedding on a device. It owns a table of a few hundred bytes there, so it has to outlive its launches and
/// the graphs they were captured into.
#[derive(Debug)]
pub struct Rope {
    device: Device,
    config: RopeConfig,
    turns: Option<Buffer>,
}

/// Where each token stands in its request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RopePositions {
    /// A position for each token.
    Ids {
        /// Device address of `[tokens]` i32; tokens with a negative one are skipped.
        address: u64,
    },
    /// Tokens of a request follow each other: the position is the request's offset and the token's index in it.
    Offsets {
        /// Requests of the batch.
        request_count: u32,
        /// Device address of `[request_count + 1]` u32, from 0 upwards: first token of each request. Tokens past the
        /// last request are skipped.
        query_begin: u64,
        /// Device address of `[request_count]` i32: position of each request's first token.
        offsets: u64,
    },
}

/// Rows to rotate and where they go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rotate {
    /// `[tokens, heads, head_dim]`, bf16, f16 or f32.
    pub input: Rows,
    /// Shaped and typed like `input`; strides may differ. At the input's address it is the input, with its strides.
    pub output: Rows,
}

impl Rotate {
    /// Rows that are overwritten.
    pub fn in_place(rows: Rows) -> Rotate {
        Rotate { input: rows, output: rows }
    }

    /// Rows that are written elsewhere.
    pub fn into(input: Rows, output: Rows) -> Rotate {
        Rotate { input, output }
    }
}

/// One call: queries, keys, or both.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RopeRun {
    /// Queries.
    pub q: Option<Rotate>,
    /// Keys, with as many tokens as the queries and of their dtype; the number of heads is their own.
    pub k: Option<Rotate>,
    /// Where each token stands.
    pub positions: RopePositions,
}

impl RopeRun {
    /// Queries and keys, both overwritten.
    pub fn in_place(q: Rows, k: Rows, positions: RopePositions) -> RopeRun {
        RopeRun { q: Some(Rotate::in_place(q)), k: Some(Rotate::in_place(k)), positions }
    }
}

impl Rope {
    /// Prepares `config` on `device`.
    pub fn new(device: &Device, config: RopeConfig) -> Result<Rope, Error> {
        config.validate()?;
        let turns = match config.angles {
            RopeAngles::Computed { .. } => Some(device.upload(&config.turns())?),
            RopeAngles::Cached { .. } => None,
        };
        Ok(Rope { device: device.clone(), config, turns })
    }

    /// What was prepared.
    pub fn config(&self) -> &RopeConfig {
        &self.config
    }

    /// Rotates. It neither allocates nor waits.
    ///
    /// # Safety
    /// Every tensor describes live memory of the device until the launch has run; an output overlaps nothing else that
    /// is read or written, unless it is its own input; the table of a config with one is live too.
    pub unsafe fn apply(&self, run: &RopeRun, stream: Stream) -> Result<(), Error> {
        let Some(Rotate { input: Rows { tokens, dtype, .. }, .. }) = run.q.or(run.k) else {
            return Err(RopeError::NoTensors.into());
        };
        let parameters = self.parameters(run, tokens, false)?;
        if tokens == 0 || parameters.heads == 0 {
            return Ok(());
        }
        match &*self.device.executor {
            // SAFETY: live host memory, by this function's contract.
            #[cfg(feature = "cpu")]
            Executor::Cpu => unsafe { crate::cpu::rope(&parameters, dtype) },
            #[cfg(feature = "cuda")]
            Executor::Cuda(cuda) => {
                cuda.check_memory(&rope_memory(&parameters))?;
                let function = cuda.function(format_args!("rope_{dtype}"))?;
                let blocks = (parameters.tokens * parameters.token_units.get()).div_ceil(ROPE_THREADS);
                // SAFETY: live memory of the device, by this function's contract.
                unsafe { cuda.launch(&function, stream, blocks, &parameters)? };
            }
        }
        let _ = stream;
        Ok(())
    }

    /// Checks a call and turns it into the kernel's parameters. With `whole_rows` there is a unit for every 16 elements
    /// of a row, even where all rows stay in place.
    fn parameters(&self, run: &RopeRun, tokens: u64, whole_rows: bool) -> Result<RopeParameters, Error> {
        let RopeConfig { head_dim, rotary_dim, interleaved, angles } = self.config;
        let (q, q_out) = self.views(run.q, ["q", "q_out"], tokens)?;
        let (k, k_out) = self.views(run.k, ["k", "k_out"], tokens)?;
        if let (Some(q), Some(k)) = (run.q, run.k) {
            is_dtype("k", k.input.dtype, q.input.dtype)?;
        }
        let heads_of = |rotate: Option<Rotate>| rotate.map_or(0, |rotate| rotate.input.heads);
        let query_heads = heads_of(run.q);
        let heads = query_heads as u64 + heads_of(run.k) as u64;

        let copies = whole_rows || q.address != q_out.address || k.address != k_out.address;
        let units = if copies { head_dim.div_ceil(16) } else { rotary_dim / 16 };
        // A thread's index and the grid's stride past the last one stay below 2^32.
        const MOST_THREADS: u64 = (1 << 31) - 1;
        let token_units = heads.div_ceil(ROPE_HEADS as u64) * units as u64;
        if token_units > MOST_THREADS {
            let supported = MOST_THREADS / units as u64;
            return Err(ArgumentError::TooLarge { field: "heads of q and k", got: heads, supported }.into());
        }
        if tokens.saturating_mul(token_units.max(1)) > MOST_THREADS {
            let (field, supported) = ("tokens", MOST_THREADS / token_units.max(1));
            return Err(ArgumentError::TooLarge { field, got: tokens, supported }.into());
        }
        let divisor = |field, value| Divisor::new(value).ok_or(RopeError::Zero { field });

        let present = tokens != 0 && heads != 0;
        let (positions, query_begin, offsets, request_count) = match run.positions {
            RopePositions::Ids { address: positions } => (address("positions", positions, present, 4)?, 0, 0, 0),
            RopePositions::Offsets { request_count, query_begin, offsets } => (
                0,
                address("query_begin", query_begin, present, 4)?,
                address("offsets", offsets, present && request_count != 0, 4)?,
                request_count,
            ),
        };
        let (cos_sin, cached_positions) = match angles {
            RopeAngles::Cached { cos_sin, positions } => (address("cos_sin", cos_sin, present, 16)?, positions),
            RopeAngles::Computed { .. } => (0, 0),
        };
        Ok(RopeParameters {
            q,
            k,
            q_out,
            k_out,
            positions,
            query_begin,
            offsets,
            turns: self.turns.as_ref().map_or(0, Buffer::address),
            cos_sin,
            cached_positions,
            request_count,
            tokens: tokens as u32,
            query_heads,
            heads: heads as u32,
            head_dim,
            rotary_dim,
            interleaved: interleaved as u32,
            units: divisor("head_dim", units)?,
            token_units: divisor("heads", (token_units as u32).max(1))?,
        })
    }

    fn views(
        &self,
        rotate: Option<Rotate>,
        [input_name, output_name]: [&'static str; 2],
        tokens: u64,
    ) -> Result<(RowsView, RowsView), ArgumentError> {
        let Some(Rotate { input, output }) = rotate else { return Ok((ABSENT, ABSENT)) };
        is_dtype(output_name, output.dtype, input.dtype)?;
        let from = input.view(input_name, tokens, input.heads, self.config.head_dim)?;
        let to = output.view(output_name, tokens, input.heads, self.config.head_dim)?;
        if to.address == from.address && to.address != 0 {
            for (field, got, wanted) in [
                ("token_stride (bytes)", to.token_stride_bytes, from.token_stride_bytes),
                ("head_stride (bytes)", to.head_stride_bytes, from.head_stride_bytes),
            ] {
                matches(output_name, field, got as u64, wanted as u64)?;
            }
        }
        Ok((from, to))
    }
}

/// Every address of a rotation, with the name of what lies there.
#[cfg(feature = "cuda")]
fn rope_memory(parameters: &RopeParameters) -> [(&'static str, u64); 8] {
    [
        ("q", parameters.q.address),
        ("k", parameters.k.address),
        ("q_out", parameters.q_out.address),
        ("k_out", parameters.k_out.address),
        ("positions", parameters.positions),
        ("query_begin", parameters.query_begin),
        ("offsets", parameters.offsets),
        ("cos_sin", parameters.cos_sin),
    ]
}
