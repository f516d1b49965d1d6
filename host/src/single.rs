//! One request, or one block-sparse sequence, in one call: for tests, tools and first steps, not for a serving loop.
//!
//! In: a config, how many keys the request has, and what a [`Run`] takes. Out: what the run writes, there when the call
//! returns. Invariant: the same bits as of an [`Attention`] with [`SplitMode::Balanced`] and a batch of this one
//! request, or of the pattern's row blocks, for that is what each call makes, with a workspace from the device, uses
//! once and waits for. An engine makes one, plans once a step and runs once a layer.
//!
//! Page ids are those from index 0 of `page_indices` on, ragged rows those from row 0 on.
//!
//! Unsafe: the calls take raw addresses; only the caller knows that they are live.

use crate::Error;
use crate::attention::{Attention, Run, Workspace};
use crate::block_sparse::BlockSparse;
use crate::config::AttentionConfig;
use crate::device::{Device, Stream};
use crate::inputs::{MaskMemory, VariantInputs};
use crate::page_table::{PageTable, QueryLengths};
use crate::plan::{Limits, SplitMode};
use crate::tensor::{ArgumentError, KvMemory, PageIndices, matches};

/// Attention of one new token: `q` and `out` are `[1, query_heads, head_dim]`, and the request has `kv_len_tokens` keys,
/// the new token's among them. The call waits for the device.
///
/// ```
/// use oxattn::*;
///
/// let device = Device::cpu();
/// let config = AttentionConfig::new(4, 2, 64, 16); // query heads, KV heads, head dim, tokens a page
/// // 20 keys in pages 2 and 0 of a pool of 3; every value is 1 in bf16, so any mean of them is.
/// let page_ids = device.upload(&[2u32, 0])?;
/// let (q, k) = (device.allocate(4 * 64 * 2)?, device.allocate(3 * 16 * 2 * 64 * 2)?);
/// let (v, out) = (device.upload(&[0x3f80u16; 3 * 16 * 2 * 64])?, device.allocate(4 * 64 * 2)?);
/// let run = Run::new(
///     Rows::contiguous(q.address(), DType::Bf16, 1, 4, 64),
///     PagedCache::separate(k.address(), v.address(), 3, Layout::Nhd, &config),
///     PageIndices { address: page_ids.address(), len: 2 },
///     Rows::contiguous(out.address(), DType::Bf16, 1, 4, 64),
/// );
/// // SAFETY: the tensors are live memory of the device, and both page ids are below 3.
/// unsafe { single::decode(&device, config, 20, &run, Stream::default())? };
/// assert!(out.download::<u16>()?.iter().all(|&bits| bits == 0x3f80));
/// # Ok::<(), Error>(())
/// ```
///
/// # Errors
/// As [`prefill`], and refuses a `q` of more tokens than one.
///
/// # Safety
/// That of [`Attention::run`].
pub unsafe fn decode(
    device: &Device,
    config: AttentionConfig,
    kv_len_tokens: u32,
    arguments: &Run,
    stream: Stream,
) -> Result<(), Error> {
    matches("q", "tokens", arguments.q.tokens, 1)?;
    // SAFETY: the caller's contract.
    unsafe { run(device, config, kv_len_tokens, arguments, stream, "single::decode") }
}

/// Attention of a prompt, or of a chunk of one: `q` and `out` are `[tokens, query_heads, head_dim]`, the last tokens of
/// the `kv_len_tokens` that the request has keys of. The call waits for the device.
///
/// ```
/// use oxattn::*;
///
/// let device = Device::cpu();
/// let config = AttentionConfig::ragged(4, 2, 64); // query heads, KV heads, head dim
/// // A prompt of 3 tokens; every value is 1 in bf16, so any mean of them is.
/// let (q, k) = (device.allocate(3 * 4 * 64 * 2)?, device.allocate(3 * 2 * 64 * 2)?);
/// let (v, out) = (device.upload(&[0x3f80u16; 3 * 2 * 64])?, device.allocate(3 * 4 * 64 * 2)?);
/// let rows = |memory: &Buffer, heads| Rows::contiguous(memory.address(), DType::Bf16, 3, heads, 64);
/// let run = Run::ragged(rows(&q, 4), rows(&k, 2), rows(&v, 2), rows(&out, 4));
/// // SAFETY: the tensors are live memory of the device.
/// unsafe { single::prefill(&device, config, 3, &run, Stream::default())? };
/// assert!(out.download::<u16>()?.iter().all(|&bits| bits == 0x3f80));
/// # Ok::<(), Error>(())
/// ```
///
/// # Errors
/// Those of [`Attention::new`], [`Attention::plan`] and [`Attention::run`], too little memory, and a stream that is
/// captured.
///
/// # Safety
/// That of [`Attention::run`].
pub unsafe fn prefill(
    device: &Device,
    config: AttentionConfig,
    kv_len_tokens: u32,
    arguments: &Run,
    stream: Stream,
) -> Result<(), Error> {
    // SAFETY: the caller's contract.
    unsafe { run(device, config, kv_len_tokens, arguments, stream, "single::prefill") }
}

/// Block-sparse attention of one sequence: `arguments` is a [`Run::ragged`] over the sequence's rows, whose shapes are
/// those that the pattern says. Page ids and mask are the pattern's, so the run brings neither; it brings sinks and
/// temperatures, where the config has them. The call waits for the device.
///
/// ```
/// use oxattn::*;
///
/// let device = Device::cpu();
/// // 4 queries in blocks of 2 over 6 keys in blocks of 3: the first block sees the last three keys, the second none.
/// let config = AttentionConfig::ragged(4, 2, 64).non_causal(); // query heads, KV heads, head dim
/// let sparse = BlockSparse::bsr(config, &Bsr::new(4, 6, 2, 3, &[0u32, 1, 1], &[1u32]))?;
/// let (q, k) = (device.allocate(4 * 4 * 64 * 2)?, device.allocate(6 * 2 * 64 * 2)?);
/// let (v, out) = (device.upload(&[0x3f80u16; 6 * 2 * 64])?, device.allocate(4 * 4 * 64 * 2)?);
/// let rows = |memory: &Buffer, tokens, heads| Rows::contiguous(memory.address(), DType::Bf16, tokens, heads, 64);
/// let run = Run::ragged(rows(&q, 4, 4), rows(&k, 6, 2), rows(&v, 6, 2), rows(&out, 4, 4));
/// // SAFETY: the tensors are live memory of the device.
/// unsafe { single::block_sparse(&device, &sparse, &run, Stream::default())? };
/// let out = out.download::<u16>()?;
/// assert!(out[..512].iter().all(|&bits| bits == 0x3f80) && out[512..].iter().all(|&bits| bits == 0));
/// # Ok::<(), Error>(())
/// ```
///
/// # Errors
/// As [`prefill`], and refuses a run over a paged cache, rows that [`BlockSparse::cache`] refuses, and a run that brings
/// a mask.
///
/// # Safety
/// That of [`Attention::run`].
pub unsafe fn block_sparse(
    device: &Device,
    sparse: &BlockSparse,
    arguments: &Run,
    stream: Stream,
) -> Result<(), Error> {
    let KvMemory::Ragged { k, v } = arguments.kv else {
        return Err(ArgumentError::UnusedInput { input: "a paged cache", made: "with AttentionConfig::new" }.into());
    };
    if arguments.variant.mask.is_some() {
        return Err(ArgumentError::UnusedInput { input: "variant.mask", made: "with Bsr::with_mask" }.into());
    }
    let cache = sparse.cache(k, v)?;
    can_wait(device, stream, "single::block_sparse")?;
    let page_ids = device.upload(sparse.page_indices())?;
    let bits = device.upload(sparse.mask_bits())?;
    let page_indices = PageIndices { address: page_ids.address(), len: sparse.page_indices().len() as u64 };
    let mask = MaskMemory { address: bits.address(), bytes: sparse.mask_bits().len() as u64 };
    let arguments = Run {
        kv: KvMemory::Paged { cache, page_indices },
        variant: VariantInputs { mask: sparse.config().mask.map(|_| mask), ..arguments.variant },
        ..*arguments
    };
    let batch = (&sparse.page_table()?, sparse.query_lengths());
    // SAFETY: the caller's contract; ids and mask live until the call has waited.
    unsafe { run_batch(device, *sparse.config(), sparse.limits(), batch, &arguments, stream) }
}

/// # Safety
/// That of [`Attention::run`].
unsafe fn run(
    device: &Device,
    config: AttentionConfig,
    kv_len_tokens: u32,
    arguments: &Run,
    stream: Stream,
    call: &'static str,
) -> Result<(), Error> {
    can_wait(device, stream, call)?;
    config.validate()?;
    let query_len = u32::try_from(arguments.q.tokens).map_err(|_| ArgumentError::TooLarge {
        field: "q.tokens",
        got: arguments.q.tokens,
        supported: u32::MAX as u64,
    })?;
    let limits = Limits {
        max_requests: 1,
        max_query_tokens: query_len.max(1),
        max_kv_len_tokens: kv_len_tokens.max(1),
        max_kv_tokens: kv_len_tokens.max(1) as u64,
    };
    let (pages, _) = PageTable::pages_and_last_len(config.page_size_tokens, kv_len_tokens);
    let (indptr, kv_lens) = ([0, pages], [kv_len_tokens]);
    let table = if config.ragged {
        PageTable::ragged(&indptr)?
    } else {
        PageTable::csr(config.page_size_tokens, &indptr, &kv_lens)?
    };
    // SAFETY: the caller's contract.
    unsafe { run_batch(device, config, limits, (&table, QueryLengths::uniform(query_len)), arguments, stream) }
}

/// Refuses a stream that nobody may wait for.
fn can_wait(device: &Device, stream: Stream, call: &'static str) -> Result<(), Error> {
    #[cfg(feature = "cuda")]
    if let Some(cuda) = device.as_cuda() {
        cuda.context().bind()?;
        if stream.is_capturing()? {
            return Err(ArgumentError::Capturing { call, remedy: "use Attention::for_graphs" }.into());
        }
    }
    let _ = (device, stream, call);
    Ok(())
}

/// # Safety
/// That of [`Attention::run`].
unsafe fn run_batch(
    device: &Device,
    config: AttentionConfig,
    limits: Limits,
    (table, queries): (&PageTable<'_>, QueryLengths<'_>),
    arguments: &Run,
    stream: Stream,
) -> Result<(), Error> {
    let mut attention = Attention::new(device, config, SplitMode::Balanced, limits)?;
    let memory = device.allocate(attention.workspace_bytes() as usize)?;
    // SAFETY: the memory outlives the wait below, and is used for nothing else.
    let mut workspace = unsafe { Workspace::new(memory.address(), memory.bytes() as u64) };
    let planned = attention.plan(table, queries, &mut workspace, stream)?;
    // SAFETY: the caller's contract.
    let launched = unsafe { attention.run(&planned, arguments, &mut workspace, stream) };
    // The plan's upload reads the attention's memory also where the run was refused.
    device.synchronize()?;
    launched
}
