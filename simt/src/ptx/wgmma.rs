//! `wgmma`, sm_90a only: fence, commit and wait are convergent intrinsics, the products volatile `asm!` between them.
//!
//! A product has up to 128 accumulator operands. One macro writes the `asm!` for a list of tiles and another walks the
//! list 0 to 31 until its length is `TILES`; the other arms are never compiled, because `TILES` is a constant.
use core::arch::asm;

use crate::{face::wgmma::Major, tensor::Element};

unsafe extern "C" {
    #[link_name = "llvm.nvvm.wgmma.fence.sync.aligned"]
    fn nvvm_wgmma_fence();
    #[link_name = "llvm.nvvm.wgmma.commit_group.sync.aligned"]
    fn nvvm_wgmma_commit_group();
    #[link_name = "llvm.nvvm.wgmma.wait_group.sync.aligned"]
    fn nvvm_wgmma_wait_group(pending: u64);
}

#[inline(always)]
pub unsafe fn wgmma_fence() {
    // SAFETY: all lanes take part, by the face's contract.
    unsafe { nvvm_wgmma_fence() }
}
#[inline(always)]
pub unsafe fn wgmma_commit_group() {
    // SAFETY: all lanes take part, by the face's contract.
    unsafe { nvvm_wgmma_commit_group() }
}
#[inline(always)]
pub unsafe fn wgmma_wait_group<const PENDING: u32>() {
    // SAFETY: all lanes take part, by the face's contract.
    unsafe { nvvm_wgmma_wait_group(const { PENDING as u64 }) }
}

/// Calls `$product!(arguments; tiles)` with the list of `TILES` tiles.
macro_rules! with_tiles {
    ($product:ident $arguments:tt) => {
        with_tiles!($product $arguments; []
            0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31)
    };
    ($product:ident $arguments:tt; [$($tile:tt)*]) => { () };
    ($product:ident $arguments:tt; [$($tile:tt)*] $next:tt $($rest:tt)*) => {
        match TILES - 1 {
            $next => $product!($arguments $($tile)* $next),
            _ => with_tiles!($product $arguments; [$($tile)* $next] $($rest)*),
        }
    };
}

/// Four placeholders for a tile's registers.
macro_rules! registers_of {
    (0) => {
        "{}, {}, {}, {}"
    };
    ($tile:tt) => {
        ", {}, {}, {}, {}"
    };
}

/// `c` as an array of the length that `TILES` is; only the arm for `TILES` itself ever runs.
macro_rules! sized {
    ($c:ident, $($tile:tt)*) => {{
        const COUNT: usize = [$($tile),*].len();
        // SAFETY: TILES is COUNT in this arm, so the type is the same.
        unsafe { &mut *(&raw mut *$c).cast::<[[f32; 4]; COUNT]>() }
    }};
}

macro_rules! multiply_shared {
    (($c:ident, $types:literal, $a:ident, $b:ident, $accumulate:ident, $ta:expr, $tb:expr) $($tile:tt)*) => {{
        let c = sized!($c, $($tile)*);
        // SAFETY: a warpgroup and live operands, by the face's contract.
        unsafe {
            asm!(
                "{{ .reg .pred p; setp.ne.b32 p, {accumulate}, 0;",
                concat!("wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.", $types, " {{"),
                $(registers_of!($tile),)*
                "}}, {a}, {b}, p, 1, 1, {ta}, {tb}; }}",
                $(inout(reg32) c[$tile][0], inout(reg32) c[$tile][1],
                    inout(reg32) c[$tile][2], inout(reg32) c[$tile][3],)*
                columns = const 8 * TILES, a = in(reg64) $a, b = in(reg64) $b,
                accumulate = in(reg32) $accumulate as u32, ta = const $ta as u32, tb = const $tb as u32,
                options(nostack))
        }
    }};
}

macro_rules! multiply_registers {
    (($c:ident, $types:literal, $a:ident, $b:ident, $accumulate:ident, $tb:expr) $($tile:tt)*) => {{
        let c = sized!($c, $($tile)*);
        // SAFETY: a warpgroup and a live operand, by the face's contract.
        unsafe {
            asm!(
                "{{ .reg .pred p; setp.ne.b32 p, {accumulate}, 0;",
                concat!("wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.", $types, " {{"),
                $(registers_of!($tile),)*
                "}}, {{{a0}, {a1}, {a2}, {a3}}}, {b}, p, 1, 1, {tb}; }}",
                $(inout(reg32) c[$tile][0], inout(reg32) c[$tile][1],
                    inout(reg32) c[$tile][2], inout(reg32) c[$tile][3],)*
                columns = const 8 * TILES, a0 = in(reg32) $a[0], a1 = in(reg32) $a[1], a2 = in(reg32) $a[2],
                a3 = in(reg32) $a[3], b = in(reg64) $b, accumulate = in(reg32) $accumulate as u32,
                tb = const $tb as u32, options(nostack))
        }
    }};
}

/// An empty instruction that takes the accumulators in and gives them out.
macro_rules! settle {
    (($c:ident) $($tile:tt)*) => {{
        let c = sized!($c, $($tile)*);
        // SAFETY: a comment.
        unsafe {
            asm!(
                "//",
                $(concat!("// ", registers_of!($tile)),)*
                $(inout(reg32) c[$tile][0], inout(reg32) c[$tile][1],
                    inout(reg32) c[$tile][2], inout(reg32) c[$tile][3],)*
                options(nomem, nostack))
        }
    }};
}

#[inline(always)]
pub unsafe fn wgmma_shared<E: Element, A: Major, B: Major, const TILES: usize>(
    c: &mut [[f32; 4]; TILES],
    a: u64,
    b: u64,
    accumulate: bool,
) {
    if E::IS_BF16 {
        with_tiles!(multiply_shared(c, "bf16.bf16", a, b, accumulate, A::TRANSPOSED, B::TRANSPOSED))
    } else {
        with_tiles!(multiply_shared(c, "f16.f16", a, b, accumulate, A::TRANSPOSED, B::TRANSPOSED))
    }
}
#[inline(always)]
pub unsafe fn wgmma_registers<E: Element, B: Major, const TILES: usize>(
    c: &mut [[f32; 4]; TILES],
    a: [u32; 4],
    b: u64,
    accumulate: bool,
) {
    if E::IS_BF16 {
        with_tiles!(multiply_registers(c, "bf16.bf16", a, b, accumulate, B::TRANSPOSED))
    } else {
        with_tiles!(multiply_registers(c, "f16.f16", a, b, accumulate, B::TRANSPOSED))
    }
}
#[inline(always)]
pub fn wgmma_settle<const TILES: usize>(c: &mut [[f32; 4]; TILES]) {
    with_tiles!(settle(c))
}
#[inline(always)]
pub fn wgmma_pin(a: &mut [u32; 4]) {
    // SAFETY: a comment.
    unsafe {
        asm!("// {} {} {} {}", inout(reg32) a[0], inout(reg32) a[1], inout(reg32) a[2], inout(reg32) a[3],
            options(nomem, nostack))
    }
}
