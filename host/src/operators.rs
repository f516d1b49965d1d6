//! The small operators around attention: append to the cache, merge states.
//!
//! In: tensors on a device. Out: the cache's new rows, or merged states. Invariant: everything a host can check is
//! refused before a launch; with no tokens nothing is launched.
//!
//! Unsafe: the operators take raw addresses; only the caller knows that they are live.

use kernels_gpu::abi::divisor::Divisor;
use kernels_gpu::abi::parameters::{AppendParameters, MergeStatesParameters, PositionsParameters, RowsView};
#[cfg(feature = "cuda")]
use kernels_gpu::abi::tile::{APPEND_PIECES, APPEND_THREADS, MERGE_THREADS};

use crate::Error;
use crate::config::{AttentionConfig, ConfigError, DType, HEAD_DIM_STEP};
use crate::device::{Device, Executor, Stream};
use crate::tensor::{ABSENT, ArgumentError, LogBase, Lse, PageIndices, PagedCache, Rows, address, is_dtype, matches};

/// Where new tokens go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Destination {
    /// `[tokens]` i64 slots: page * page_size + offset; negative ones are skipped.
    Slots {
        /// Device address.
        address: u64,
    },
    /// Request and position of each token.
    Positions {
        /// Device address of `[tokens]` i32 requests; negative ones are skipped.
        requests: u64,
        /// Device address of `[tokens]` i32 positions; negative ones are skipped.
        positions: u64,
        /// Device address of `[requests]` u32: where each request's page ids begin.
        page_begin: u64,
        /// Page ids on the device.
        page_indices: PageIndices,
    },
}

/// New keys and values for a paged cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Append {
    /// `[tokens, kv_heads, head_dim]`, bf16, f16 or f32.
    pub k: Rows,
    /// Shaped and typed like `k`; strides may differ.
    pub v: Rows,
    /// The cache, bf16 or f16; values are rounded to its dtype.
    pub cache: PagedCache,
    /// Where each token goes.
    pub destination: Destination,
}

/// Writes new keys and values into the cache. Two tokens with the same destination are the caller's error: one of
/// them remains.
///
/// # Safety
/// Every tensor describes live memory of the device until the launch has run, destinations lie in the pool, and the
/// cache overlaps nothing that is read.
pub unsafe fn append(
    device: &Device,
    config: &AttentionConfig,
    arguments: &Append,
    stream: Stream,
) -> Result<(), Error> {
    let parameters = append_parameters(config, arguments)?;
    if parameters.tokens == 0 {
        return Ok(());
    }
    match &*device.executor {
        // SAFETY: live host memory, by this function's contract.
        #[cfg(feature = "cpu")]
        Executor::Cpu => unsafe { crate::cpu::append(&parameters, arguments.k.dtype, config.dtype) },
        #[cfg(feature = "cuda")]
        Executor::Cuda(cuda) => {
            cuda.check_memory(&append_memory(&parameters))?;
            let function = cuda.function(format_args!("append_{}_{}", arguments.k.dtype, config.dtype))?;
            let pieces = parameters.tokens * parameters.token_chunks.get();
            let blocks = pieces.div_ceil(APPEND_THREADS * APPEND_PIECES);
            // SAFETY: live memory of the device, by this function's contract.
            unsafe { cuda.launch(&function, stream, blocks, &parameters)? };
        }
    }
    let _ = stream;
    Ok(())
}

/// Checks an append and turns it into the kernel's parameters.
pub(crate) fn append_parameters(config: &AttentionConfig, arguments: &Append) -> Result<AppendParameters, Error> {
    config.validate()?;
    let Append { k, v, cache, destination } = arguments;
    is_dtype("v", v.dtype, k.dtype)?;
    is_dtype("cache.k", cache.k.dtype, config.dtype)?;
    is_dtype("cache.v", cache.v.dtype, config.dtype)?;
    let tokens = k.tokens;
    let (k_cache, v_cache) = cache.views(config)?;
    let [key_chunks, value_chunks] = [config.head_dim, config.value_head_dim].map(|dim| dim / HEAD_DIM_STEP);
    let chunks = key_chunks.max(value_chunks);
    let pieces = tokens.saturating_mul(config.kv_heads as u64).saturating_mul(chunks as u64);
    // A thread's index and the grid's stride past the last piece stay below 2^32.
    const MOST_PIECES: u64 = (1 << 31) - 1;
    if pieces > MOST_PIECES {
        let supported = MOST_PIECES / (config.kv_heads as u64 * chunks as u64);
        return Err(ArgumentError::TooLarge { field: "k.tokens", got: tokens, supported }.into());
    }
    let present = tokens != 0;
    let (slots, requests, positions, page_begin, page_indices) = match *destination {
        Destination::Slots { address: slots } => (address("slots", slots, present, 8)?, 0, 0, 0, 0),
        Destination::Positions { requests, positions, page_begin, page_indices } => (
            0,
            address("requests", requests, present, 4)?,
            address("positions", positions, present, 4)?,
            address("page_begin", page_begin, present, 4)?,
            address("page_indices", page_indices.address, present && page_indices.len != 0, 4)?,
        ),
    };
    let divisor = |field, value| Divisor::new(value).ok_or(ConfigError::Zero { field });
    Ok(AppendParameters {
        new_k: k.view("k", tokens, config.kv_heads, config.head_dim)?,
        new_v: v.view("v", tokens, config.kv_heads, config.value_head_dim)?,
        k: k_cache,
        v: v_cache,
        slots,
        requests,
        positions,
        page_begin,
        page_indices,
        tokens: tokens as u32,
        kv_heads: config.kv_heads,
        chunks: divisor("head_dim", chunks)?,
        token_chunks: divisor("kv_heads * head_dim", config.kv_heads * chunks)?,
        page_size: divisor("page_size_tokens", config.page_size_tokens)?,
        key_chunks,
        value_chunks,
        padding: 0,
    })
}

/// Every address of an append, with the name of what lies there.
#[cfg(feature = "cuda")]
pub(crate) fn append_memory(parameters: &AppendParameters) -> [(&'static str, u64); 9] {
    [
        ("k", parameters.new_k.address),
        ("v", parameters.new_v.address),
        ("cache.k", parameters.k.address),
        ("cache.v", parameters.v.address),
        ("slots", parameters.slots),
        ("requests", parameters.requests),
        ("positions", parameters.positions),
        ("page_begin", parameters.page_begin),
        ("page_indices", parameters.page_indices),
    ]
}

/// Request and position of every token of an append: what [`Destination::Positions`] reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Positions {
    /// Requests of the batch.
    pub request_count: u32,
    /// Device address of `[requests + 1]` u32: first new token of each request.
    pub append_begin: u64,
    /// Device address of `[requests]` u32: tokens of each request after the append.
    pub kv_lens: u64,
    /// Room in the outputs; entries past the last new token become -1.
    pub tokens: u32,
    /// Device address of `[tokens]` i32: the requests.
    pub requests: u64,
    /// Device address of `[tokens]` i32: the positions.
    pub positions: u64,
}

/// Spells out request and position of each new token.
///
/// # Safety
/// Every address is live memory of the device, of the size its field states, until the launch has run.
pub unsafe fn positions(device: &Device, arguments: &Positions, stream: Stream) -> Result<(), Error> {
    let Positions { request_count, append_begin, kv_lens, tokens, requests, positions } = *arguments;
    if tokens >= 1 << 31 {
        let supported = (1 << 31) - 1;
        return Err(ArgumentError::TooLarge { field: "tokens", got: tokens as u64, supported }.into());
    }
    let parameters = PositionsParameters {
        append_begin: address("append_begin", append_begin, tokens != 0, 4)?,
        kv_lens: address("kv_lens", kv_lens, tokens != 0 && request_count != 0, 4)?,
        requests: address("requests", requests, tokens != 0, 4)?,
        positions: address("positions", positions, tokens != 0, 4)?,
        request_count,
        tokens,
    };
    if tokens == 0 {
        return Ok(());
    }
    match &*device.executor {
        // SAFETY: live host memory, by this function's contract.
        #[cfg(feature = "cpu")]
        Executor::Cpu => unsafe { crate::cpu::positions(&parameters) },
        #[cfg(feature = "cuda")]
        Executor::Cuda(cuda) => {
            cuda.check_memory(&[
                ("append_begin", append_begin),
                ("kv_lens", kv_lens),
                ("requests", requests),
                ("positions", positions),
            ])?;
            let function = cuda.function(format_args!("positions"))?;
            // SAFETY: live memory of the device, by this function's contract.
            unsafe { cuda.launch(&function, stream, tokens.div_ceil(APPEND_THREADS), &parameters)? };
        }
    }
    let _ = stream;
    Ok(())
}

/// Attention states: outputs over some keys and the LSE of those keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct State<B> {
    /// `[tokens, heads, head_dim]`, f32, bf16 or f16.
    pub out: Rows,
    /// `[tokens, heads]`; -inf where no key was seen.
    pub lse: Lse<B>,
}

/// Many states of the same rows, one after another in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct States<B> {
    /// `[states, heads, head_dim]` rows (the `tokens` of the tensor count states).
    pub out: Rows,
    /// `[states, heads]`.
    pub lse: Lse<B>,
    /// How states belong to output tokens.
    pub order: StateOrder,
}

/// Which states belong to which output token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StateOrder {
    /// States `t * per_token .. (t + 1) * per_token` belong to token `t`.
    Uniform {
        /// States of each token.
        per_token: u32,
    },
    /// States `begin[t] .. begin[t + 1]` belong to token `t`.
    Csr {
        /// Device address of `[tokens + 1]` u32.
        begin: u64,
    },
}

/// Merges two states of the same rows into `merged`.
///
/// # Safety
/// Every tensor describes live memory of the device until the launch has run; `merged` may be `a`, and overlaps
/// nothing else.
pub unsafe fn merge_state<B: LogBase>(
    device: &Device,
    a: &State<B>,
    b: &State<B>,
    merged: &State<B>,
    stream: Stream,
) -> Result<(), Error> {
    // SAFETY: the caller's contract is this function's own.
    unsafe { merge_two(device, a, b, merged, 0, stream) }
}

/// Merges state `b` into state `a`. `mask` is the device address of `[tokens]` bytes (0 keeps `a`), or 0.
///
/// # Safety
/// As [`merge_state`].
pub unsafe fn merge_state_in_place<B: LogBase>(
    device: &Device,
    a: &State<B>,
    b: &State<B>,
    mask: u64,
    stream: Stream,
) -> Result<(), Error> {
    // SAFETY: the caller's contract is this function's own.
    unsafe { merge_two(device, a, b, a, mask, stream) }
}

/// Two states are two states at a distance: of addresses, in bytes.
///
/// # Safety
/// As [`merge_state`].
unsafe fn merge_two<B: LogBase>(
    device: &Device,
    a: &State<B>,
    b: &State<B>,
    merged: &State<B>,
    mask: u64,
    stream: Stream,
) -> Result<(), Error> {
    let (tokens, heads, head_dim) = (a.out.tokens, a.out.heads, a.out.head_dim);
    let values = a.out.view("a.out", tokens, heads, head_dim)?;
    let other = b.out.view("b.out", tokens, heads, head_dim)?;
    is_dtype("b.out", b.out.dtype, a.out.dtype)?;
    let lse = a.lse.view("a.lse", tokens, heads)?;
    let other_lse = b.lse.view("b.lse", tokens, heads)?;
    for (tensor, got, wanted) in [("b.out", &other, &values), ("b.lse", &other_lse, &lse)] {
        matches(tensor, "token_stride (bytes)", got.token_stride_bytes as u64, wanted.token_stride_bytes as u64)?;
        matches(tensor, "head_stride (bytes)", got.head_stride_bytes as u64, wanted.head_stride_bytes as u64)?;
    }
    let parameters = MergeStatesParameters {
        values,
        lse,
        state_stride_bytes: other.address.wrapping_sub(values.address) as i64,
        lse_state_stride_bytes: other_lse.address.wrapping_sub(lse.address) as i64,
        state_begin: 0,
        mask,
        ..merged_into(merged, tokens, heads, head_dim, a.out.dtype, 2)?
    };
    // SAFETY: the caller's contract is this function's own.
    unsafe { launch_merge(device, &parameters, a.out.dtype, stream) }
}

/// Merges the states of each output token of `merged`.
///
/// # Safety
/// Every tensor describes live memory of the device until the launch has run; `merged` overlaps nothing that is
/// read.
pub unsafe fn merge_states<B: LogBase>(
    device: &Device,
    states: &States<B>,
    merged: &State<B>,
    stream: Stream,
) -> Result<(), Error> {
    let Rows { tokens: count, heads, head_dim, dtype, .. } = states.out;
    let tokens = merged.out.tokens;
    let values = states.out.view("states.out", count, heads, head_dim)?;
    let lse = states.lse.view("states.lse", count, heads)?;
    let (per_token, state_begin) = match states.order {
        StateOrder::Uniform { per_token } => {
            matches("states.out", "tokens", count, tokens.saturating_mul(per_token as u64))?;
            (per_token, 0)
        }
        StateOrder::Csr { begin } => (0, address("begin", begin, true, 4)?),
    };
    let step = |view: &RowsView, count: u64| RowsView {
        token_stride_bytes: if state_begin == 0 { view.token_stride_bytes * count as i64 } else { 0 },
        ..*view
    };
    let parameters = MergeStatesParameters {
        values: step(&values, per_token as u64),
        lse: step(&lse, per_token as u64),
        state_stride_bytes: values.token_stride_bytes,
        lse_state_stride_bytes: lse.token_stride_bytes,
        state_begin,
        mask: 0,
        ..merged_into(merged, tokens, heads, head_dim, dtype, per_token)?
    };
    // SAFETY: the caller's contract is this function's own.
    unsafe { launch_merge(device, &parameters, dtype, stream) }
}

/// The output's half of a merge's parameters.
fn merged_into<B: LogBase>(
    merged: &State<B>,
    tokens: u64,
    heads: u32,
    head_dim: u32,
    dtype: DType,
    states: u32,
) -> Result<MergeStatesParameters, Error> {
    is_dtype("merged.out", merged.out.dtype, dtype)?;
    const MOST_ROWS: u64 = (1 << 31) - 1;
    let rows = tokens.saturating_mul(heads as u64);
    if rows > MOST_ROWS {
        let supported = MOST_ROWS / (heads as u64).max(1);
        return Err(ArgumentError::TooLarge { field: "merged.out.tokens", got: tokens, supported }.into());
    }
    const WIDEST: u64 = 512;
    if head_dim as u64 > WIDEST {
        return Err(ArgumentError::TooLarge { field: "out.head_dim", got: head_dim as u64, supported: WIDEST }.into());
    }
    if !head_dim.is_multiple_of(8) {
        let got = head_dim as i64;
        return Err(ArgumentError::Misaligned { tensor: "out", field: "head_dim", got, alignment: 8 }.into());
    }
    let heads_divisor = Divisor::new(heads).ok_or(ConfigError::Zero { field: "heads" })?;
    Ok(MergeStatesParameters {
        values: ABSENT,
        lse: ABSENT,
        state_stride_bytes: 0,
        lse_state_stride_bytes: 0,
        state_begin: 0,
        mask: 0,
        out: merged.out.view("merged.out", tokens, heads, head_dim)?,
        out_lse: merged.lse.view("merged.lse", tokens, heads)?,
        tokens: tokens as u32,
        states,
        heads: heads_divisor,
        head_dim,
        lse_in_scale: 1.0 / B::FROM_BASE_2,
        lse_out_scale: B::FROM_BASE_2,
    })
}

/// # Safety
/// The parameters describe live memory of the device.
unsafe fn launch_merge(
    device: &Device,
    parameters: &MergeStatesParameters,
    dtype: DType,
    stream: Stream,
) -> Result<(), Error> {
    let rows = parameters.tokens * parameters.heads.get();
    if rows == 0 {
        return Ok(());
    }
    match &*device.executor {
        // SAFETY: live host memory, by this function's contract.
        #[cfg(feature = "cpu")]
        Executor::Cpu => unsafe { crate::cpu::merge_states(parameters, dtype) },
        #[cfg(feature = "cuda")]
        Executor::Cuda(cuda) => {
            cuda.check_memory(&[
                ("values", parameters.values.address),
                ("lse", parameters.lse.address),
                ("merged.out", parameters.out.address),
                ("merged.lse", parameters.out_lse.address),
                ("begin", parameters.state_begin),
                ("mask", parameters.mask),
            ])?;
            let function = cuda.function(format_args!("merge_states_{dtype}"))?;
            // A warp a row; past sixteen blocks a multiprocessor they take rows in turn.
            let blocks = rows.div_ceil(MERGE_THREADS / 32).min(16 * cuda.properties().multiprocessors);
            // SAFETY: live memory of the device, by this function's contract.
            unsafe { cuda.launch(&function, stream, blocks, parameters)? };
        }
    }
    let _ = stream;
    Ok(())
}
