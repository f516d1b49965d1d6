//! What a caller hands to `run`: raw addresses with dtype, shape and strides.
//!
//! In: addresses on the executor's device, strides in elements, signed and 64-bit. Out: the byte views of
//! [`kernels_gpu::abi::parameters`], checked. Invariant: everything a host can check is checked here, before a
//! launch, and refused with the tensor's name, the value found and the value wanted. The last dim of every tensor
//! is contiguous. The stride of a dim of size 1 is never looked at.

use std::marker::PhantomData;

#[cfg(feature = "cuda")]
use kernels_gpu::abi::parameters::CacheMaps;
use kernels_gpu::abi::parameters::{CacheView, RowsView};

use crate::config::{AttentionConfig, DType};

/// An argument that does not fit the plan or the kernels.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ArgumentError {
    /// A tensor's extent, or a count, is not what the plan was made for.
    #[error("{tensor}.{field} is {got}; this call needs {wanted}")]
    Mismatch {
        /// Which tensor or argument.
        tensor: &'static str,
        /// Which of its fields.
        field: &'static str,
        /// The value found.
        got: u64,
        /// The value needed.
        wanted: u64,
    },
    /// A tensor's dtype is not what the plan was made for.
    #[error("{tensor} is {got}; this call needs {wanted}")]
    DTypeMismatch {
        /// Which tensor.
        tensor: &'static str,
        /// Its dtype.
        got: DType,
        /// The dtype needed.
        wanted: DType,
    },
    /// An address or a stride is not a multiple of what a 16-byte access needs.
    #[error("{tensor}.{field} is {got} bytes, which is not a multiple of {alignment}")]
    Misaligned {
        /// Which tensor.
        tensor: &'static str,
        /// Address or stride.
        field: &'static str,
        /// The value found, in bytes.
        got: i64,
        /// What it must be a multiple of.
        alignment: i64,
    },
    /// A stride or offset leaves 64 bits.
    #[error("{tensor}.{field} does not fit 64-bit bytes")]
    Overflow {
        /// Which tensor.
        tensor: &'static str,
        /// Which stride.
        field: &'static str,
    },
    /// A tensor with elements has no address.
    #[error("{tensor} has elements but its address is 0")]
    NullAddress {
        /// Which tensor.
        tensor: &'static str,
    },
    /// An address is not memory of the device that is to read it.
    #[error("{tensor}'s address {address:#x} is {found}; this call needs memory of {wanted}")]
    ForeignMemory {
        /// Which tensor.
        tensor: &'static str,
        /// The address.
        address: u64,
        /// What is there.
        found: String,
        /// Whose memory is needed.
        wanted: String,
    },
    /// A count is past what one call can do.
    #[error("{field} is {got}; supported is at most {supported}")]
    TooLarge {
        /// Which count.
        field: &'static str,
        /// The value found.
        got: u64,
        /// The largest value supported.
        supported: u64,
    },
    /// A cache that the prefill kernel cannot copy from.
    #[error(
        "{tensor}'s {field} is {got} bytes; the prefill kernel needs a multiple of 16 from 16 to below 2^40, an attention \
         made with_kernel(Kernel::Attend) does not"
    )]
    Unmappable {
        /// Which tensor.
        tensor: &'static str,
        /// Which of its fields.
        field: &'static str,
        /// The value found.
        got: i64,
    },
    /// The prefill kernel was asked for where there is none.
    #[error(
        "no prefill kernel for head_dim {head_dim}, value_head_dim {value_head_dim} and page_size_tokens \
         {page_size_tokens} here; it needs a Hopper GPU, head dims up to 256, pages of a multiple of 8 tokens, \
         SplitMode::Balanced or Unsplit, with rope or norms head dim 64, 128 or 256, and of a custom variant a kernel in \
         its bundle"
    )]
    NoPrefillKernel {
        /// The attention's.
        head_dim: u32,
        /// The attention's.
        value_head_dim: u32,
        /// The attention's.
        page_size_tokens: u32,
    },
    /// Run without a plan.
    #[error("run was called before plan")]
    NotPlanned,
    /// The attention reads something at run time that the call does not bring.
    #[error("the attention was made {made}; this call needs {input}")]
    MissingInput {
        /// What is missing.
        input: &'static str,
        /// How the attention was configured.
        made: &'static str,
    },
    /// The call brings something that the attention does not read.
    #[error("this call brings {input}, which the attention does not read; make it {made}")]
    UnusedInput {
        /// What nothing reads.
        input: &'static str,
        /// The configuration that would.
        made: &'static str,
    },
    /// An LSE was asked for where there is none.
    #[error("lse was asked for; an attention made with_sigmoid has none")]
    NoLse,
    /// The plan is not the latest one: its arrays were overwritten.
    #[error("the plan of epoch {got} was replaced by the plan of epoch {latest}")]
    StalePlan {
        /// Epoch of the plan given.
        got: u64,
        /// Epoch of the plan in the workspace.
        latest: u64,
    },
    /// The workspace is not the one the plan was uploaded to.
    #[error("the plan lies in the workspace at {planned:#x}, not in the one at {got:#x}")]
    OtherWorkspace {
        /// Where the plan was uploaded.
        planned: u64,
        /// The workspace given.
        got: u64,
    },
    /// The plan is another attention's.
    #[error("the plan was made by another attention")]
    OtherAttention,
    /// The workspace was planned into by another attention, or described anew, since the plan was uploaded to it.
    #[error("the workspace at {address:#x} no longer holds this plan; plan again")]
    WorkspaceReused {
        /// The workspace.
        address: u64,
    },
    /// A stream is being captured into a graph by an attention that was not made for graphs.
    #[error("{call} was called while its stream is captured into a graph; {remedy}")]
    Capturing {
        /// Which call.
        call: &'static str,
        /// What to do instead.
        remedy: &'static str,
    },
}

/// Bytes of one access of the kernels: addresses and strides are multiples of it.
const ACCESS_BYTES: i64 = 16;

/// `[tokens, heads, head_dim]`: queries, outputs, ragged keys and values, new ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rows {
    /// Address of the first element.
    pub address: u64,
    /// Element type.
    pub dtype: DType,
    /// Tokens.
    pub tokens: u64,
    /// Heads.
    pub heads: u32,
    /// Elements of a row.
    pub head_dim: u32,
    /// Elements from a token to the next.
    pub token_stride: i64,
    /// Elements from a head to the next.
    pub head_stride: i64,
}

impl Rows {
    /// A contiguous tensor.
    pub fn contiguous(address: u64, dtype: DType, tokens: u64, heads: u32, head_dim: u32) -> Rows {
        let head_stride = head_dim as i64;
        Rows { address, dtype, tokens, heads, head_dim, token_stride: heads as i64 * head_stride, head_stride }
    }

    /// The same tensor with other strides, in elements: a view of a fused QKV projection, say.
    pub fn with_strides(self, token_stride: i64, head_stride: i64) -> Rows {
        Rows { token_stride, head_stride, ..self }
    }

    /// Checks shape and alignment and turns strides into bytes.
    pub(crate) fn view(
        &self,
        tensor: &'static str,
        tokens: u64,
        heads: u32,
        head_dim: u32,
    ) -> Result<RowsView, ArgumentError> {
        matches(tensor, "tokens", self.tokens, tokens)?;
        matches(tensor, "heads", self.heads as u64, heads as u64)?;
        matches(tensor, "head_dim", self.head_dim as u64, head_dim as u64)?;
        let bytes = self.dtype.bytes() as i64;
        let elements = tokens != 0 && heads != 0;
        Ok(RowsView {
            address: address(tensor, self.address, elements, ACCESS_BYTES)?,
            token_stride_bytes: stride(tensor, "token_stride", self.token_stride, bytes, tokens, ACCESS_BYTES)?,
            head_stride_bytes: stride(tensor, "head_stride", self.head_stride, bytes, heads as u64, ACCESS_BYTES)?,
        })
    }

    /// Checks ragged keys or values of `head_dim` elements, of which there must be `rows` or more, and turns them into
    /// pages that begin at any row.
    pub(crate) fn ragged_view(
        &self,
        tensor: &'static str,
        rows: u64,
        config: &AttentionConfig,
        head_dim: u32,
    ) -> Result<CacheView, ArgumentError> {
        is_dtype(tensor, self.dtype, config.dtype)?;
        if self.tokens < rows {
            matches(tensor, "tokens", self.tokens, rows)?;
        }
        let view = self.view(tensor, self.tokens, config.kv_heads, head_dim)?;
        i64::try_from(self.tokens)
            .ok()
            .and_then(|tokens| tokens.checked_mul(view.token_stride_bytes))
            .ok_or(ArgumentError::Overflow { tensor, field: "tokens * token_stride" })?;
        Ok(CacheView {
            address: view.address,
            page_stride_bytes: view.token_stride_bytes,
            token_stride_bytes: view.token_stride_bytes,
            head_stride_bytes: view.head_stride_bytes,
        })
    }
}

/// The order of the two middle dims of a cache: `[pages, page, heads, dim]` or `[pages, heads, page, dim]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// Tokens outside heads.
    Nhd,
    /// Heads outside tokens.
    Hnd,
}

/// One of the two halves of a paged cache: `pages * page_size * kv_heads` rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheRows {
    /// Address of page 0, token 0, head 0.
    pub address: u64,
    /// Element type.
    pub dtype: DType,
    /// Pages in the pool.
    pub pages: u64,
    /// Tokens of a page.
    pub page_size_tokens: u32,
    /// KV heads.
    pub kv_heads: u32,
    /// Elements of a row.
    pub head_dim: u32,
    /// Elements from a page to the next.
    pub page_stride: i64,
    /// Elements from a token to the next in its page.
    pub token_stride: i64,
    /// Elements from a head to the next.
    pub head_stride: i64,
}

impl CacheRows {
    /// A contiguous pool of `pages` pages of `config`'s keys, in either layout.
    pub fn contiguous(address: u64, pages: u64, layout: Layout, config: &AttentionConfig) -> CacheRows {
        CacheRows::of_rows(address, pages, layout, config, config.head_dim)
    }

    /// The same of its values.
    pub fn contiguous_values(address: u64, pages: u64, layout: Layout, config: &AttentionConfig) -> CacheRows {
        CacheRows::of_rows(address, pages, layout, config, config.value_head_dim)
    }

    fn of_rows(address: u64, pages: u64, layout: Layout, config: &AttentionConfig, head_dim: u32) -> CacheRows {
        let (dim, heads, page) = (head_dim as i64, config.kv_heads as i64, config.page_size_tokens as i64);
        let (token_stride, head_stride) = match layout {
            Layout::Nhd => (heads * dim, dim),
            Layout::Hnd => (dim, page * dim),
        };
        CacheRows {
            address,
            dtype: config.dtype,
            pages,
            page_size_tokens: config.page_size_tokens,
            kv_heads: config.kv_heads,
            head_dim,
            page_stride: page * heads * dim,
            token_stride,
            head_stride,
        }
    }

    /// The same pool with other strides, in elements.
    pub fn with_strides(self, page_stride: i64, token_stride: i64, head_stride: i64) -> CacheRows {
        CacheRows { page_stride, token_stride, head_stride, ..self }
    }

    /// Bytes from the first to one past the last element, for contiguous pools.
    pub fn contiguous_bytes(&self) -> u64 {
        self.pages
            * self.page_size_tokens as u64
            * self.kv_heads as u64
            * self.head_dim as u64
            * self.dtype.bytes() as u64
    }

    /// Checks the shape, with rows of `head_dim` elements, and alignment, and turns strides into bytes.
    pub(crate) fn view(
        &self,
        tensor: &'static str,
        config: &AttentionConfig,
        head_dim: u32,
    ) -> Result<CacheView, ArgumentError> {
        matches(tensor, "page_size_tokens", self.page_size_tokens as u64, config.page_size_tokens as u64)?;
        matches(tensor, "kv_heads", self.kv_heads as u64, config.kv_heads as u64)?;
        matches(tensor, "head_dim", self.head_dim as u64, head_dim as u64)?;
        let bytes = self.dtype.bytes() as i64;
        let step = |field, value, count| stride(tensor, field, value, bytes, count, ACCESS_BYTES);
        let view = CacheView {
            address: address(tensor, self.address, self.pages != 0, ACCESS_BYTES)?,
            page_stride_bytes: step("page_stride", self.page_stride, self.pages)?,
            token_stride_bytes: step("token_stride", self.token_stride, self.page_size_tokens as u64)?,
            head_stride_bytes: step("head_stride", self.head_stride, self.kv_heads as u64)?,
        };
        (self.pages as i64)
            .checked_mul(view.page_stride_bytes)
            .ok_or(ArgumentError::Overflow { tensor, field: "pages * page_stride" })?;
        Ok(view)
    }
}

/// Keys and values of a paged cache. They may be one tensor's halves or two tensors, with different strides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PagedCache {
    /// Keys.
    pub k: CacheRows,
    /// Values.
    pub v: CacheRows,
}

impl PagedCache {
    /// One tensor `[pages, 2, ...]` whose index 0 is K and 1 is V, as FlashInfer and vLLM lay it out. Where values have
    /// another head dim than keys, a page's keys are followed by its values all the same.
    pub fn interleaved(address: u64, pages: u64, layout: Layout, config: &AttentionConfig) -> PagedCache {
        let k = CacheRows::contiguous(address, pages, layout, config);
        let v = CacheRows::contiguous_values(address, pages, layout, config);
        let (page_stride, offset_bytes) =
            (k.page_stride + v.page_stride, k.page_stride as u64 * k.dtype.bytes() as u64);
        PagedCache {
            k: CacheRows { page_stride, ..k },
            v: CacheRows { address: address.wrapping_add(offset_bytes), page_stride, ..v },
        }
    }

    /// Two contiguous tensors.
    pub fn separate(k: u64, v: u64, pages: u64, layout: Layout, config: &AttentionConfig) -> PagedCache {
        PagedCache {
            k: CacheRows::contiguous(k, pages, layout, config),
            v: CacheRows::contiguous_values(v, pages, layout, config),
        }
    }

    pub(crate) fn views(&self, config: &AttentionConfig) -> Result<(CacheView, CacheView), ArgumentError> {
        if config.ragged {
            return Err(ArgumentError::UnusedInput { input: "a paged cache", made: "with AttentionConfig::new" });
        }
        matches("cache.v", "pages", self.v.pages, self.k.pages)?;
        let k = self.k.view("cache.k", config, config.head_dim)?;
        Ok((k, self.v.view("cache.v", config, config.value_head_dim)?))
    }
}

/// K or V as the prefill kernel copies it: dims head dim, tokens of a page, KV heads, pages (of ragged rows: head dim,
/// rows, KV heads, 1).
#[cfg(any(feature = "cuda", feature = "emulator"))]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mappable {
    pub address: u64,
    pub dims: [u64; 4],
    /// From a token, a head and a page to the next.
    pub strides_bytes: [u64; 3],
}

#[cfg(any(feature = "cuda", feature = "emulator"))]
impl KvMemory {
    /// K and V for tensor maps.
    pub(crate) fn mappable(
        &self,
        config: &AttentionConfig,
        [k, v]: [&CacheView; 2],
    ) -> Result<[Mappable; 2], ArgumentError> {
        let [key_dim, value_dim] = [config.head_dim as u64, config.value_head_dim as u64];
        let heads = config.kv_heads as u64;
        Ok(match self {
            KvMemory::Paged { cache, .. } => {
                let dims = |dim| [dim, config.page_size_tokens as u64, heads, cache.k.pages];
                [
                    mappable("cache.k", k, dims(key_dim), config.dtype)?,
                    mappable("cache.v", v, dims(value_dim), config.dtype)?,
                ]
            }
            KvMemory::Ragged { k: keys, v: values } => [
                mappable("k", k, [key_dim, keys.tokens, heads, 1], config.dtype)?,
                mappable("v", v, [value_dim, values.tokens, heads, 1], config.dtype)?,
            ],
        })
    }

    /// The tensor maps by which the prefill kernel copies from `k` and `v`, in boxes of `box_tokens` tokens.
    #[cfg(feature = "cuda")]
    pub(crate) fn maps(
        &self,
        config: &AttentionConfig,
        views: [&CacheView; 2],
        box_tokens: u32,
    ) -> Result<CacheMaps, crate::Error> {
        let is_bf16 = config.dtype == DType::Bf16;
        let map = |Mappable { address, dims, strides_bytes }| {
            crate::driver::CacheMapDescription { address, dims, strides_bytes, box_tokens, is_bf16 }.encode()
        };
        let [k, v] = self.mappable(config, views)?;
        Ok(CacheMaps { k: map(k)?, v: map(v)? })
    }
}

#[cfg(any(feature = "cuda", feature = "emulator"))]
fn mappable(tensor: &'static str, view: &CacheView, dims: [u64; 4], dtype: DType) -> Result<Mappable, ArgumentError> {
    // A stride that nothing steps by may be anything; the hardware looks at it all the same.
    let stride = |field, got: i64, count: u64| match got {
        _ if count <= 1 => Ok(dims[0] * dtype.bytes() as u64),
        16..0x100_0000_0000 if got % 16 == 0 => Ok(got as u64),
        _ => Err(ArgumentError::Unmappable { tensor, field, got }),
    };
    Ok(Mappable {
        address: view.address,
        dims: dims.map(|count| count.max(1)),
        strides_bytes: [
            stride("token_stride", view.token_stride_bytes, dims[1])?,
            stride("head_stride", view.head_stride_bytes, dims[2])?,
            stride("page_stride", view.page_stride_bytes, dims[3])?,
        ],
    })
}

/// Page ids on the device, `u32`, as the page table's offsets address them.
///
/// On Hopper attention reads them, like the plan, while the kernel launched just before it may still run, if that kernel
/// allows it (programmatic dependent launch). Kernels that do not are safe, as are this crate's own. A kernel of yours
/// that allows it must have waited for its own predecessors first, and must not write page ids.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageIndices {
    /// Address of the first id.
    pub address: u64,
    /// Ids there.
    pub len: u64,
}

/// Where a call's keys and values lie. An attention takes the form that its config was made for and refuses the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvMemory {
    /// In the pages of a cache.
    Paged {
        /// The cache.
        cache: PagedCache,
        /// Page ids on the device.
        page_indices: PageIndices,
    },
    /// In rows, `[rows, kv_heads, head_dim]`, values of their own head dim, with strides of their own, of an attention made with
    /// [`AttentionConfig::ragged`]. Strides are multiples of 16 bytes. `k` and `v` have as many rows as the plan's
    /// [`kv_rows`](crate::Planned::kv_rows) or more, in graphs as the limits' `max_kv_tokens`, and fewer are refused.
    Ragged {
        /// Keys.
        k: Rows,
        /// Values.
        v: Rows,
    },
}

impl KvMemory {
    /// What messages call keys and values.
    #[cfg(feature = "cuda")]
    pub(crate) fn names(&self) -> [&'static str; 2] {
        match self {
            KvMemory::Paged { .. } => ["cache.k", "cache.v"],
            KvMemory::Ragged { .. } => ["k", "v"],
        }
    }
}

/// The base of an LSE's logarithm.
pub trait LogBase: Copy + std::fmt::Debug {
    /// Turns a base-2 LSE into this base.
    const FROM_BASE_2: f32;
}

/// Base 2, what the kernels use inside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Base2;
/// Natural logarithms.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BaseE;

impl LogBase for Base2 {
    const FROM_BASE_2: f32 = 1.0;
}
impl LogBase for BaseE {
    const FROM_BASE_2: f32 = std::f32::consts::LN_2;
}

/// `[tokens, heads]` f32 log-sum-exp values in the base its type names, so that two bases never meet in a merge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lse<B> {
    /// Address of the first value.
    pub address: u64,
    /// Tokens.
    pub tokens: u64,
    /// Heads.
    pub heads: u32,
    /// Values from a token to the next.
    pub token_stride: i64,
    /// Values from a head to the next.
    pub head_stride: i64,
    base: PhantomData<B>,
}

/// LSE in base 2.
pub type Lse2 = Lse<Base2>;
/// LSE in natural logarithms.
pub type LseE = Lse<BaseE>;

impl<B: LogBase> Lse<B> {
    /// A contiguous tensor.
    pub fn contiguous(address: u64, tokens: u64, heads: u32) -> Lse<B> {
        Lse { address, tokens, heads, token_stride: heads as i64, head_stride: 1, base: PhantomData }
    }

    /// The same values with other strides.
    pub fn with_strides(self, token_stride: i64, head_stride: i64) -> Lse<B> {
        Lse { token_stride, head_stride, ..self }
    }

    pub(crate) fn view(&self, tensor: &'static str, tokens: u64, heads: u32) -> Result<RowsView, ArgumentError> {
        matches(tensor, "tokens", self.tokens, tokens)?;
        matches(tensor, "heads", self.heads as u64, heads as u64)?;
        Ok(RowsView {
            address: address(tensor, self.address, tokens * heads as u64 != 0, 4)?,
            token_stride_bytes: stride(tensor, "token_stride", self.token_stride, 4, tokens, 4)?,
            head_stride_bytes: stride(tensor, "head_stride", self.head_stride, 4, heads as u64, 4)?,
        })
    }
}

/// An LSE output in either base.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AnyLse {
    /// Base 2.
    Base2(Lse2),
    /// Natural logarithms.
    Natural(LseE),
}

impl From<Lse2> for AnyLse {
    fn from(lse: Lse2) -> AnyLse {
        AnyLse::Base2(lse)
    }
}
impl From<LseE> for AnyLse {
    fn from(lse: LseE) -> AnyLse {
        AnyLse::Natural(lse)
    }
}

impl AnyLse {
    /// The view, and what a base-2 value is multiplied by on its way out.
    pub(crate) fn view(&self, tokens: u64, heads: u32) -> Result<(RowsView, f32), ArgumentError> {
        Ok(match self {
            AnyLse::Base2(lse) => (lse.view("lse", tokens, heads)?, Base2::FROM_BASE_2),
            AnyLse::Natural(lse) => (lse.view("lse", tokens, heads)?, BaseE::FROM_BASE_2),
        })
    }
}

/// The view of a tensor that is not there.
pub(crate) const ABSENT: RowsView = RowsView { address: 0, token_stride_bytes: 0, head_stride_bytes: 0 };

pub(crate) fn matches(tensor: &'static str, field: &'static str, got: u64, wanted: u64) -> Result<(), ArgumentError> {
    if got == wanted { Ok(()) } else { Err(ArgumentError::Mismatch { tensor, field, got, wanted }) }
}

pub(crate) fn is_dtype(tensor: &'static str, got: DType, wanted: DType) -> Result<(), ArgumentError> {
    if got == wanted { Ok(()) } else { Err(ArgumentError::DTypeMismatch { tensor, got, wanted }) }
}

pub(crate) fn address(
    tensor: &'static str,
    address: u64,
    elements: bool,
    alignment: i64,
) -> Result<u64, ArgumentError> {
    if !elements {
        // What an empty tensor points at does not matter.
        return Ok(0);
    }
    if address == 0 {
        return Err(ArgumentError::NullAddress { tensor });
    }
    if !address.is_multiple_of(alignment as u64) {
        return Err(ArgumentError::Misaligned { tensor, field: "address", got: address as i64, alignment });
    }
    Ok(address)
}

fn stride(
    tensor: &'static str,
    field: &'static str,
    elements: i64,
    element_bytes: i64,
    count: u64,
    alignment: i64,
) -> Result<i64, ArgumentError> {
    if count <= 1 {
        return Ok(0);
    }
    let bytes = elements.checked_mul(element_bytes).ok_or(ArgumentError::Overflow { tensor, field })?;
    if bytes % alignment != 0 {
        return Err(ArgumentError::Misaligned { tensor, field, got: bytes, alignment });
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strides_of_size_one_dims_are_ignored_and_others_checked() {
        let rows = Rows::contiguous(4096, DType::Bf16, 1, 32, 128).with_strides(4609, 128);
        assert_eq!(rows.view("q", 1, 32, 128).unwrap().token_stride_bytes, 0);
        let rows = Rows { tokens: 3, ..rows };
        assert_eq!(
            rows.view("q", 3, 32, 128).unwrap_err().to_string(),
            "q.token_stride is 9218 bytes, which is not a multiple of 16"
        );
        let rows = rows.with_strides(4608, 128);
        assert_eq!(rows.view("q", 3, 32, 128).unwrap().token_stride_bytes, 9216);
        assert_eq!(rows.view("q", 4, 32, 128).unwrap_err().to_string(), "q.tokens is 3; this call needs 4");
        let rows = Rows { address: 4098, ..rows };
        assert!(matches!(rows.view("q", 3, 32, 128), Err(ArgumentError::Misaligned { field: "address", .. })));
        let rows = Rows { address: 0, ..rows };
        assert_eq!(rows.view("q", 3, 32, 128).unwrap_err(), ArgumentError::NullAddress { tensor: "q" });
    }

    #[test]
    fn cache_layouts_have_the_documented_strides() {
        let config = AttentionConfig::new(32, 8, 128, 16);
        let nhd = PagedCache::interleaved(1 << 20, 10, Layout::Nhd, &config);
        assert_eq!((nhd.k.page_stride, nhd.k.token_stride, nhd.k.head_stride), (2 * 16 * 8 * 128, 1024, 128));
        assert_eq!(nhd.v.address - nhd.k.address, 16 * 8 * 128 * 2);
        let hnd = PagedCache::separate(1 << 20, 1 << 21, 10, Layout::Hnd, &config);
        assert_eq!((hnd.v.page_stride, hnd.v.token_stride, hnd.v.head_stride), (16 * 8 * 128, 128, 16 * 128));

        // Keys of 192 and values of 128: a page of keys is 16 * 8 * 192 elements, of both 16 * 8 * 320.
        let config = AttentionConfig::new(32, 8, 192, 16).with_value_head_dim(128);
        let nhd = PagedCache::interleaved(1 << 20, 10, Layout::Nhd, &config);
        assert_eq!((nhd.k.page_stride, nhd.k.token_stride, nhd.k.head_stride), (40_960, 1536, 192));
        assert_eq!((nhd.v.page_stride, nhd.v.token_stride, nhd.v.head_stride), (40_960, 1024, 128));
        assert_eq!(nhd.v.address - nhd.k.address, 2 * 24_576);
        let hnd = PagedCache::separate(1 << 20, 1 << 21, 10, Layout::Hnd, &config);
        assert_eq!((hnd.k.page_stride, hnd.k.token_stride, hnd.k.head_stride), (24_576, 192, 3072));
        assert_eq!((hnd.v.page_stride, hnd.v.token_stride, hnd.v.head_stride), (16_384, 128, 2048));
        assert_eq!([hnd.k, hnd.v].map(|half| half.contiguous_bytes()), [491_520, 327_680]);
        let swapped = PagedCache { k: hnd.v, v: hnd.k };
        assert_eq!(swapped.views(&config).unwrap_err().to_string(), "cache.k.head_dim is 128; this call needs 192");
        let wide = PagedCache { v: hnd.k, ..hnd };
        assert_eq!(wide.views(&config).unwrap_err().to_string(), "cache.v.head_dim is 192; this call needs 128");
    }

    #[test]
    fn ragged_pages_and_tokens_are_a_row_apart() {
        let config = AttentionConfig::ragged(1, 1, 512);
        let rows = Rows::contiguous(1 << 40, DType::Bf16, 1 << 30, 1, 512).with_strides(4096, 512);
        let view = rows.ragged_view("k", 7, &config, 512).unwrap();
        let strides = [view.page_stride_bytes, view.token_stride_bytes, view.head_stride_bytes];
        assert_eq!((view.address, strides), (1 << 40, [8192, 8192, 0]));
        let refused = |rows: Rows| rows.ragged_view("k", 7, &config, 512).unwrap_err().to_string();
        assert_eq!(refused(Rows { tokens: 6, ..rows }), "k.tokens is 6; this call needs 7");
        assert_eq!(refused(Rows { heads: 2, ..rows }), "k.heads is 2; this call needs 1");
        assert_eq!(refused(Rows { head_dim: 256, ..rows }), "k.head_dim is 256; this call needs 512");
        assert_eq!(refused(Rows { dtype: DType::F16, ..rows }), "k is f16; this call needs bf16");
        for tokens in [1 << 52, u64::MAX] {
            assert_eq!(refused(Rows { tokens, ..rows }), "k.tokens * token_stride does not fit 64-bit bytes");
        }
    }

    /// Strides that a tensor map cannot have are refused by name, before the driver is asked.
    #[cfg(any(feature = "cuda", feature = "emulator"))]
    #[test]
    fn caches_that_cannot_be_mapped_are_refused() {
        let config = AttentionConfig::new(2, 2, 64, 16);
        let cache = CacheRows::contiguous(1 << 20, 4, Layout::Nhd, &config);
        for (cache, field, got) in [
            (cache.with_strides(2048, -128, 64), "token_stride", -256),
            (cache.with_strides(2048, 128, 0), "head_stride", 0),
            (cache.with_strides(1 << 39, 128, 64), "page_stride", 1 << 40),
        ] {
            let view = cache.view("cache.k", &config, 64).unwrap();
            let refused = mappable("cache.k", &view, [64, 16, 2, 4], config.dtype).unwrap_err();
            assert_eq!(refused, ArgumentError::Unmappable { tensor: "cache.k", field, got });
        }
    }

    #[test]
    fn page_offsets_past_32_bits_are_exact() {
        let config = AttentionConfig::new(1, 1, 512, 32);
        let rows = CacheRows::contiguous(1 << 40, 1 << 20, Layout::Nhd, &config);
        let view = rows.view("cache.k", &config, 512).unwrap();
        assert_eq!(262_144 * view.page_stride_bytes, 262_144 * 16_384 * 2);
        let huge = CacheRows::contiguous(1 << 40, 1 << 62, Layout::Nhd, &config);
        assert!(matches!(huge.view("cache.k", &config, 512), Err(ArgumentError::Overflow { .. })));
    }
}
