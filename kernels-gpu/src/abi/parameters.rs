//! What a launch passes to a kernel: one `repr(C)` struct by value, addresses as `u64`, strides in bytes.
//!
//! Strides are signed 64-bit bytes, so any view the caller can describe is addressed without overflow.

use super::divisor::Divisor;

/// Where a paged cache's elements lie: byte strides of one of K and V.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(not(target_arch = "nvptx64"), derive(bytemuck::Pod, bytemuck::Zeroable))]
#[repr(C)]
pub struct CacheView {
    /// Address of page 0, token 0, head 0.
    pub address: u64,
    /// From a page to the next.
    pub page_stride_bytes: i64,
    /// From a token to the next in a page.
    pub token_stride_bytes: i64,
    /// From a KV head to the next.
    pub head_stride_bytes: i64,
}

/// A matrix of head rows: `[tokens, heads, head_dim]` with free strides, the last dim contiguous.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(not(target_arch = "nvptx64"), derive(bytemuck::Pod, bytemuck::Zeroable))]
#[repr(C)]
pub struct RowsView {
    /// Address of token 0, head 0; 0 where the tensor is absent.
    pub address: u64,
    /// From a token to the next.
    pub token_stride_bytes: i64,
    /// From a head to the next.
    pub head_stride_bytes: i64,
}

/// The attend kernel's parameters.
#[derive(Clone, Copy, Debug, PartialEq)]
#[cfg_attr(not(target_arch = "nvptx64"), derive(bytemuck::Pod, bytemuck::Zeroable))]
#[repr(C)]
pub struct AttendParameters {
    /// `queue_begin` of the plan image.
    pub queue_begin: u64,
    /// The plan image's work items, with what follows them.
    pub items: u64,
    /// The plan image's arrival counts, zero between launches.
    pub arrivals: u64,
    /// Page ids, `u32`; of ragged keys and values, `first_kv_rows` of the plan image.
    pub page_indices: u64,
    /// `[states, head_dim]` f32 partial outputs, of the kernel's head dim, or that of its values.
    pub partial_out: u64,
    /// `[states]` f32 partial LSE, base 2.
    pub partial_lse: u64,
    /// Queries.
    pub q: RowsView,
    /// Outputs.
    pub out: RowsView,
    /// LSE, f32, in bytes like the others; address 0 where the caller wants none.
    pub lse: RowsView,
    /// Keys.
    pub k: CacheView,
    /// Values.
    pub v: CacheView,
    /// Tokens of a page; of ragged keys and values, [`RAGGED_PAGE_TOKENS`](super::plan::RAGGED_PAGE_TOKENS).
    pub page_size: Divisor,
    /// Query heads that share a KV head.
    pub group: Divisor,
    /// Blocks of a team.
    pub team_blocks: Divisor,
    /// KV heads a block takes one after another.
    pub heads_per_block: u32,
    /// KV heads.
    pub kv_heads: u32,
    /// 1 if key `k` is visible to query `t` only where `k <= t + kv_len - query_len`; 0 if all keys are.
    pub causal: u32,
    /// Multiplies an LSE in base 2 on its way out: 1, or ln 2 for natural logarithms.
    pub lse_scale: f32,
    /// For prefill kernels, tokens of the boxes that the tensor maps copy; else 0.
    pub box_tokens: u32,
    /// 16-byte pieces of a query or key row.
    pub key_pieces: u32,
    /// 16-byte pieces of a value or output row.
    pub value_pieces: u32,
}

/// The fold kernel's parameters.
#[derive(Clone, Copy, Debug, PartialEq)]
#[cfg_attr(not(target_arch = "nvptx64"), derive(bytemuck::Pod, bytemuck::Zeroable))]
#[repr(C)]
pub struct FoldParameters {
    /// Those of the launch before, which left the partial states.
    pub attend: AttendParameters,
    /// The plan image.
    pub plan: u64,
    /// Columns of a partial state: an output row's, or more.
    pub state_columns: u32,
    /// Fills the struct to a multiple of 8 bytes.
    pub padding: u32,
}

/// Tensor maps of K and V, as the driver encodes them: dims head dim of keys or values, page size, KV heads, pages (of ragged
/// rows: head dim, rows, KV heads, 1); boxes of 64 elements of
/// [`box_tokens`](AttendParameters::box_tokens) tokens, swizzled by 128 bytes. Prefill kernels take them as their third
/// parameter, which the build aligns to 64 bytes: the compiler knows no parameters of such an alignment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct CacheMaps {
    /// Of the keys.
    pub k: [u64; 16],
    /// Of the values.
    pub v: [u64; 16],
}

/// The second parameter of a user-defined variant's kernel: what the config asks for beside the variant, whose own
/// parameters are the last.
#[derive(Clone, Copy, Debug, PartialEq)]
#[cfg_attr(not(target_arch = "nvptx64"), derive(bytemuck::Pod, bytemuck::Zeroable))]
#[repr(C)]
pub struct ConfigParameters {
    /// The softmax scale times log2(e): multiplies a score before the variant sees it.
    pub scale_log2: f32,
    /// Keys that a query sees before its own, or `i32::MAX`.
    pub window_left: i32,
    /// Keys that a query sees after its own, or `i32::MAX`.
    pub window_right: i32,
    /// Fills the struct to a multiple of 8 bytes.
    pub padding: u32,
}

/// Parameters of the public merges of attention states.
///
/// State `s` of output row `(token, head)` lies at `values + state * state_stride + token * token_stride + head *
/// head_stride`, where states run from 0 to `states`, or, with `state_begin` set, the states of token `t` are rows
/// `state_begin[t] .. state_begin[t + 1]` of `[total, heads, head_dim]`.
#[derive(Clone, Copy, Debug, PartialEq)]
#[cfg_attr(not(target_arch = "nvptx64"), derive(bytemuck::Pod, bytemuck::Zeroable))]
#[repr(C)]
pub struct MergeStatesParameters {
    /// Partial outputs.
    pub values: RowsView,
    /// Their LSE, f32.
    pub lse: RowsView,
    /// From a state to the next in `values`.
    pub state_stride_bytes: i64,
    /// From a state to the next in `lse`.
    pub lse_state_stride_bytes: i64,
    /// `[tokens + 1]` u32, or 0 for `states` states each.
    pub state_begin: u64,
    /// `[tokens]` u8: rows with 0 keep state 0; or 0 for no mask.
    pub mask: u64,
    /// Outputs.
    pub out: RowsView,
    /// Their LSE; address 0 where the caller wants none.
    pub out_lse: RowsView,
    /// Output tokens.
    pub tokens: u32,
    /// States of each token where `state_begin` is 0.
    pub states: u32,
    /// Heads.
    pub heads: Divisor,
    /// Elements of a row.
    pub head_dim: u32,
    /// Multiplies an incoming LSE: 1 for base 2, log2(e) for natural logarithms.
    pub lse_in_scale: f32,
    /// Multiplies an outgoing LSE: 1 for base 2, ln 2 for natural logarithms.
    pub lse_out_scale: f32,
}

/// The append kernel's parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(not(target_arch = "nvptx64"), derive(bytemuck::Pod, bytemuck::Zeroable))]
#[repr(C)]
pub struct AppendParameters {
    /// New keys, `[tokens, kv_heads, head dim of keys]`.
    pub new_k: RowsView,
    /// New values, in rows of their own head dim.
    pub new_v: RowsView,
    /// Key cache.
    pub k: CacheView,
    /// Value cache.
    pub v: CacheView,
    /// `[tokens]` i64 slots (page * page_size + offset; negative: skip), or 0 to use the next three.
    pub slots: u64,
    /// `[tokens]` i32 request of each token; negative: skip.
    pub requests: u64,
    /// `[tokens]` i32 position of each token in its request; negative: skip.
    pub positions: u64,
    /// `[requests + 1]` u32 first page of each request in `page_indices`.
    pub page_begin: u64,
    /// Page ids, `u32`.
    pub page_indices: u64,
    /// New tokens.
    pub tokens: u32,
    /// KV heads.
    pub kv_heads: u32,
    /// 16-byte pieces of a cache row, of keys or values, whichever has more.
    pub chunks: Divisor,
    /// 16-byte pieces of a token: `kv_heads * chunks`.
    pub token_chunks: Divisor,
    /// Tokens of a page.
    pub page_size: Divisor,
    /// 16-byte pieces of a key row.
    pub key_chunks: u32,
    /// 16-byte pieces of a value row.
    pub value_chunks: u32,
    /// Fills the struct to a multiple of 8 bytes.
    pub padding: u32,
}

/// Parameters of the kernel that spells out (request, position) of each new token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(not(target_arch = "nvptx64"), derive(bytemuck::Pod, bytemuck::Zeroable))]
#[repr(C)]
pub struct PositionsParameters {
    /// `[requests + 1]` u32 first new token of each request.
    pub append_begin: u64,
    /// `[requests]` u32 tokens of each request after the append.
    pub kv_lens: u64,
    /// `[tokens]` i32 out: the request; -1 past the last token.
    pub requests: u64,
    /// `[tokens]` i32 out: the position; -1 past the last token.
    pub positions: u64,
    /// Requests in the batch.
    pub request_count: u32,
    /// Room in the two outputs.
    pub tokens: u32,
}

/// The RoPE kernel's parameters. Queries and keys are one list of heads, queries first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(not(target_arch = "nvptx64"), derive(bytemuck::Pod, bytemuck::Zeroable))]
#[repr(C)]
pub struct RopeParameters {
    /// Queries, `[tokens, query_heads, head_dim]`.
    pub q: RowsView,
    /// Keys, `[tokens, heads - query_heads, head_dim]`.
    pub k: RowsView,
    /// Rotated queries. At the address of `q`, what is not rotated is not copied.
    pub q_out: RowsView,
    /// Rotated keys, in the same way.
    pub k_out: RowsView,
    /// `[tokens]` i32 positions (negative: skip), or 0 to use the next two.
    pub positions: u64,
    /// `[request_count + 1]` u32 first token of each request; tokens past the last are skipped.
    pub query_begin: u64,
    /// `[request_count]` i32 position of each request's first token.
    pub offsets: u64,
    /// `[rotary_dim / 2]` u64 angle of each pair at position 1, in 2^-64 of a turn; or 0 to use the next.
    pub turns: u64,
    /// `[cached_positions, rotary_dim]` f32: cosines of the pairs, then their sines.
    pub cos_sin: u64,
    /// Rows of `cos_sin`; tokens at later positions are skipped. Not read with `turns`.
    pub cached_positions: u32,
    /// Requests.
    pub request_count: u32,
    /// Tokens.
    pub tokens: u32,
    /// Query heads.
    pub query_heads: u32,
    /// Query heads and key heads.
    pub heads: u32,
    /// Elements of a row.
    pub head_dim: u32,
    /// Its first elements, which are rotated: a multiple of 16.
    pub rotary_dim: u32,
    /// 1 if a pair is two neighbours; 0 if it is two elements `rotary_dim / 2` apart.
    pub interleaved: u32,
    /// Threads of a group of heads: one for every 16 elements of a row that are rotated or copied.
    pub units: Divisor,
    /// Threads of a token: `units` for each group of [`ROPE_HEADS`](super::tile::ROPE_HEADS) heads.
    pub token_units: Divisor,
}

/// Parameters of the kernel that rotates queries and keys and appends keys and values.
///
/// Queries and keys are those of `rope`, whose `k_out` is not read: keys go to the cache. Values, cache and places are
/// those of `append`, whose `new_k` is not read. Both have the same tokens and key heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(not(target_arch = "nvptx64"), derive(bytemuck::Pod, bytemuck::Zeroable))]
#[repr(C)]
pub struct RopeAppendParameters {
    /// The rotation, with a unit for every 16 elements of a row, rotated or not; `head_dim` is a multiple of 16.
    pub rope: RopeParameters,
    /// The append.
    pub append: AppendParameters,
}

/// Parameters of the plain streams that measure the ceilings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(not(target_arch = "nvptx64"), derive(bytemuck::Pod, bytemuck::Zeroable))]
#[repr(C)]
pub struct StreamParameters {
    /// What is read.
    pub source: u64,
    /// What is written.
    pub destination: u64,
    /// 16-byte pieces, a multiple of [`STREAM_GROUP_PIECES`](super::tile::STREAM_GROUP_PIECES).
    pub pieces: u64,
}

/// Threads of the one block of a check.
pub const CHECK_THREADS: u32 = 1024;
/// Its shared memory: what each warp found.
pub const CHECK_SHARED_BYTES: u32 = 8 * CHECK_THREADS / 32;

/// Parameters of the check of a planned batch's page ids.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(not(target_arch = "nvptx64"), derive(bytemuck::Pod, bytemuck::Zeroable))]
#[repr(C)]
pub struct CheckPageIdsParameters {
    /// `queue_begin` of the plan image.
    pub queue_begin: u64,
    /// The plan image's work items.
    pub items: u64,
    /// Page ids, `u32`.
    pub page_indices: u64,
    /// A [`Report`].
    pub report: u64,
    /// Pages of the cache.
    pub pages: u64,
    /// Queues of the plan image.
    pub teams: u32,
    /// Keys after its own that a row sees, at most; 0 where attention is causal.
    pub keys_after: u32,
    /// Tokens of a page.
    pub page_size: Divisor,
    /// Query heads that share a KV head.
    pub group: Divisor,
}

/// Parameters of the check of where an append would write. As the append kernel's, but for the last five.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(not(target_arch = "nvptx64"), derive(bytemuck::Pod, bytemuck::Zeroable))]
#[repr(C)]
pub struct CheckAppendParameters {
    /// `[tokens]` i64 slots, or 0 to use the next three.
    pub slots: u64,
    /// `[tokens]` i32 request of each token.
    pub requests: u64,
    /// `[tokens]` i32 position of each token in its request.
    pub positions: u64,
    /// `[request_count]` u32 first page of each request in `page_indices`.
    pub page_begin: u64,
    /// Page ids, `u32`.
    pub page_indices: u64,
    /// Page ids there.
    pub page_index_len: u64,
    /// A [`Report`].
    pub report: u64,
    /// Pages of the cache.
    pub pages: u64,
    /// New tokens.
    pub tokens: u32,
    /// Requests in the batch.
    pub request_count: u32,
    /// Tokens of a page.
    pub page_size: Divisor,
    /// Fills the struct to a multiple of 8 bytes.
    pub padding: u32,
}

/// What a check found, on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(not(target_arch = "nvptx64"), derive(bytemuck::Pod, bytemuck::Zeroable))]
#[repr(C)]
pub struct Report {
    /// One of the constants; anything else is no report.
    pub finding: u32,
    /// Values that are out of range, or tokens with one.
    pub bad: u32,
    /// Where the first of them lies in its array.
    pub index: u64,
    /// What it is: a `u32` or an `i64`.
    pub value: u64,
    /// It had to be below this.
    pub supported: u64,
}

impl Report {
    /// Nothing is out of range; the other fields are 0.
    pub const FINE: u32 = 1;
    /// The first value out of range is one of `page_indices`.
    pub const PAGE_INDICES: u32 = 2;
    /// It is one of `slots`.
    pub const SLOTS: u32 = 3;
    /// It is one of `requests`.
    pub const REQUESTS: u32 = 4;
    /// It is one of `positions`.
    pub const POSITIONS: u32 = 5;
}

const _: () = {
    assert!(size_of::<CacheView>() == 32);
    assert!(size_of::<RowsView>() == 24);
    assert!(size_of::<AttendParameters>() == 6 * 8 + 3 * 24 + 2 * 32 + 3 * 12 + 28);
    assert!(size_of::<FoldParameters>() == size_of::<AttendParameters>() + 16);
    assert!(size_of::<MergeStatesParameters>() == 4 * 24 + 4 * 8 + 8 + 12 + 12);
    assert!(size_of::<AppendParameters>() == 2 * 24 + 2 * 32 + 5 * 8 + 8 + 36 + 12);
    assert!(size_of::<PositionsParameters>() == 40);
    assert!(size_of::<RopeParameters>() == 4 * 24 + 5 * 8 + 8 * 4 + 2 * 12);
    assert!(core::mem::offset_of!(RopeParameters, units) == 168);
    assert!(size_of::<RopeAppendParameters>() == size_of::<RopeParameters>() + size_of::<AppendParameters>());
    assert!(size_of::<StreamParameters>() == 24);
    assert!(size_of::<CheckPageIdsParameters>() == 5 * 8 + 2 * 4 + 2 * 12);
    assert!(size_of::<CheckAppendParameters>() == 8 * 8 + 2 * 4 + 12 + 4);
    assert!(size_of::<Report>() == 32);
    assert!(core::mem::offset_of!(Report, supported) == 24);
};
