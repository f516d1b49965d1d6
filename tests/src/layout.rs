//! Where a paged cache's rows lie, written out independently of the code under test.

use kernels_gpu::abi::parameters::CacheView;

/// How K and V share a pool. Strides are those of `pages x page_size x kv_heads` rows of `head_dim` elements, values of
/// their own head dim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// `[pages, page_size, kv_heads, head_dim]`, V after K.
    Nhd,
    /// `[pages, kv_heads, page_size, head_dim]`, V after K.
    Hnd,
    /// `[pages, 2, page_size, kv_heads, head_dim]`: K and V interleaved page by page.
    Together,
    /// K token-major and V head-major, each row, token and page followed by padding of its own.
    Padded,
}

/// All of them.
pub const LAYOUTS: [Layout; 4] = [Layout::Nhd, Layout::Hnd, Layout::Together, Layout::Padded];

/// The rows of one of K and V, in elements of the pool.
#[derive(Clone, Copy, Debug)]
pub struct Strides {
    /// Of page 0, token 0, head 0.
    pub base: usize,
    /// From a page to the next.
    pub page: usize,
    /// From a token to the next.
    pub token: usize,
    /// From a head to the next.
    pub head: usize,
}

impl Strides {
    /// First element of a row.
    pub fn row(&self, page: usize, token: usize, head: usize) -> usize {
        self.base + page * self.page + token * self.token + head * self.head
    }

    /// The same of a pool of 2-byte elements at `address`, as a launch describes it.
    pub fn view(&self, address: u64) -> CacheView {
        CacheView {
            address: address + 2 * self.base as u64,
            page_stride_bytes: 2 * self.page as i64,
            token_stride_bytes: 2 * self.token as i64,
            head_stride_bytes: 2 * self.head as i64,
        }
    }
}

/// Strides of K and V, and the elements of the pool.
pub fn strides(
    layout: Layout,
    pages: usize,
    page_size: usize,
    kv_heads: usize,
    [head_dim, value_dim]: [usize; 2],
) -> (Strides, Strides, usize) {
    let page_of = |dim: usize| page_size * kv_heads * dim;
    let (k_page, v_page) = (page_of(head_dim), page_of(value_dim));
    let nhd = |base, dim| Strides { base, page: page_of(dim), token: kv_heads * dim, head: dim };
    let elements = pages * (k_page + v_page);
    match layout {
        Layout::Nhd => (nhd(0, head_dim), nhd(pages * k_page, value_dim), elements),
        Layout::Hnd => {
            let hnd = |base, dim| Strides { base, page: page_of(dim), token: dim, head: page_size * dim };
            (hnd(0, head_dim), hnd(pages * k_page, value_dim), elements)
        }
        Layout::Together => {
            let of = |base, dim| Strides { page: k_page + v_page, ..nhd(base, dim) };
            (of(0, head_dim), of(k_page, value_dim), elements)
        }
        Layout::Padded => {
            // Multiples of 8 elements, 16 bytes, as every row must be aligned to.
            let head = head_dim + 8;
            let token = kv_heads * head + 24;
            let k = Strides { base: 8, page: page_size * token + 40, token, head };
            let v_token = value_dim + 16;
            let v_head = page_size * v_token + 8;
            let v = Strides { base: k.row(pages, 0, 0), page: kv_heads * v_head + 56, token: v_token, head: v_head };
            (k, v, v.row(pages, 0, 0))
        }
    }
}
