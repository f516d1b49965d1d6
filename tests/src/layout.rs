//! Where a paged cache's rows lie, written out independently of the code under test.

use kernels_gpu::abi::parameters::CacheView;

/// How K and V share a pool. Strides are those of `pages x page_size x kv_heads` rows of `head_dim` elements.
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
    head_dim: usize,
) -> (Strides, Strides, usize) {
    let token = kv_heads * head_dim;
    let page = page_size * token;
    match layout {
        Layout::Nhd => {
            let k = Strides { base: 0, page, token, head: head_dim };
            (k, Strides { base: pages * page, ..k }, 2 * pages * page)
        }
        Layout::Hnd => {
            let k = Strides { base: 0, page, token: head_dim, head: page_size * head_dim };
            (k, Strides { base: pages * page, ..k }, 2 * pages * page)
        }
        Layout::Together => {
            let k = Strides { base: 0, page: 2 * page, token, head: head_dim };
            (k, Strides { base: page, ..k }, 2 * pages * page)
        }
        Layout::Padded => {
            // Multiples of 8 elements, 16 bytes, as every row must be aligned to.
            let head = head_dim + 8;
            let token = kv_heads * head + 24;
            let k = Strides { base: 8, page: page_size * token + 40, token, head };
            let v_token = head_dim + 16;
            let v_head = page_size * v_token + 8;
            let v = Strides { base: k.row(pages, 0, 0), page: kv_heads * v_head + 56, token: v_token, head: v_head };
            (k, v, v.row(pages, 0, 0))
        }
    }
}
