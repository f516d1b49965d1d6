//! The face's PTX body. Each function is the instruction it is named after.
//!
//! Collectives are convergent LLVM intrinsics; `mma` and `ldmatrix.trans` are volatile `asm!` anchored by
//! `bar.warp.sync` in the same basic block (a NOP in SASS), because LLVM may copy bare `asm!` into both arms of a
//! divergent branch.
use core::arch::{asm, global_asm, nvptx};

mod bulk;
mod mbarrier;
mod wgmma;

pub use bulk::*;
pub use mbarrier::*;
pub use wgmma::*;

unsafe extern "C" {
    #[link_name = "llvm.nvvm.shfl.sync.bfly.f32"]
    fn nvvm_shfl_bfly_f32(mask: u32, value: f32, lane_mask: u32, clamp: u32) -> f32;
    #[link_name = "llvm.nvvm.shfl.sync.bfly.i32"]
    fn nvvm_shfl_bfly_i32(mask: u32, value: u32, lane_mask: u32, clamp: u32) -> u32;
    #[link_name = "llvm.nvvm.shfl.sync.idx.i32"]
    fn nvvm_shfl_idx_i32(mask: u32, value: u32, lane: u32, clamp: u32) -> u32;
    #[link_name = "llvm.nvvm.vote.ballot.sync"]
    fn nvvm_ballot(mask: u32, predicate: bool) -> u32;
    #[link_name = "llvm.nvvm.bar.warp.sync"]
    fn nvvm_bar_warp_sync(mask: u32);
    #[link_name = "llvm.nvvm.barrier.cta.sync.aligned.count"]
    fn nvvm_barrier_sync(id: u32, threads: u32);
    #[link_name = "llvm.nvvm.ex2.approx.ftz.f"]
    fn nvvm_ex2(x: f32) -> f32;
    #[link_name = "llvm.nvvm.lg2.approx.ftz.f"]
    fn nvvm_lg2(x: f32) -> f32;
    #[link_name = "llvm.nvvm.rcp.approx.ftz.f"]
    fn nvvm_rcp(x: f32) -> f32;
    #[link_name = "llvm.nvvm.cp.async.commit.group"]
    fn nvvm_cp_async_commit();
    #[link_name = "llvm.nvvm.griddepcontrol.wait"]
    #[cfg(target_feature = "sm_90")]
    fn nvvm_griddep_wait();
    #[link_name = "llvm.nvvm.griddepcontrol.launch.dependents"]
    #[cfg(target_feature = "sm_90")]
    fn nvvm_griddep_launch();
}

#[inline(always)]
pub fn keep_order(value: u32) {
    // SAFETY: sleeps for no time, if at all.
    unsafe {
        asm!(
            "{{ .reg .pred p; setp.eq.u32 p, {0}, 0xffffffff; @p nanosleep.u32 0; }}",
            in(reg32) value,
            options(nostack)
        )
    }
}
#[inline(always)]
pub fn thread_idx_x() -> u32 {
    // SAFETY: reads a special register.
    unsafe { nvptx::_thread_idx_x() as u32 }
}
#[inline(always)]
pub fn block_idx_x() -> u32 {
    // SAFETY: reads a special register.
    unsafe { nvptx::_block_idx_x() as u32 }
}
#[inline(always)]
pub fn block_dim_x() -> u32 {
    // SAFETY: reads a special register.
    unsafe { nvptx::_block_dim_x() as u32 }
}
#[inline(always)]
pub fn grid_dim_x() -> u32 {
    // SAFETY: reads a special register.
    unsafe { nvptx::_grid_dim_x() as u32 }
}

#[inline(always)]
pub unsafe fn shuffle_xor_f32(value: f32, lane_mask: u32) -> f32 {
    // SAFETY: all lanes take part, by the face's contract.
    unsafe { nvvm_shfl_bfly_f32(!0, value, lane_mask, 31) }
}
#[inline(always)]
pub unsafe fn shuffle_xor_u32(value: u32, lane_mask: u32) -> u32 {
    // SAFETY: all lanes take part, by the face's contract.
    unsafe { nvvm_shfl_bfly_i32(!0, value, lane_mask, 31) }
}
#[inline(always)]
pub unsafe fn shuffle_u32(value: u32, source_lane: u32) -> u32 {
    // SAFETY: all lanes take part, by the face's contract.
    unsafe { nvvm_shfl_idx_i32(!0, value, source_lane, 31) }
}
#[inline(always)]
pub unsafe fn vote_ballot(predicate: bool) -> u32 {
    // SAFETY: all lanes take part, by the face's contract.
    unsafe { nvvm_ballot(!0, predicate) }
}
#[inline(always)]
pub unsafe fn sync_warp() {
    // SAFETY: all lanes take part, by the face's contract.
    unsafe { nvvm_bar_warp_sync(!0) }
}
#[inline(always)]
pub unsafe fn sync_threads() {
    // SAFETY: every live thread of the block takes part, by the face's contract.
    unsafe { nvptx::_syncthreads() }
}
#[inline(always)]
pub unsafe fn sync_named_barrier(id: u32, threads: u32) {
    // SAFETY: the threads of the phase take part, by the face's contract.
    unsafe { nvvm_barrier_sync(id, threads) }
}

#[inline(always)]
pub fn wait_for_previous_grid() {
    #[cfg(target_feature = "sm_90")]
    // SAFETY: has no precondition.
    unsafe {
        nvvm_griddep_wait()
    }
}
#[inline(always)]
pub fn allow_next_grid() {
    #[cfg(target_feature = "sm_90")]
    // SAFETY: has no precondition.
    unsafe {
        nvvm_griddep_launch()
    }
}

#[inline(always)]
pub fn exp2(x: f32) -> f32 {
    // SAFETY: pure arithmetic.
    unsafe { nvvm_ex2(x) }
}
#[inline(always)]
pub fn log2(x: f32) -> f32 {
    // SAFETY: pure arithmetic.
    unsafe { nvvm_lg2(x) }
}
#[inline(always)]
pub fn reciprocal(x: f32) -> f32 {
    // SAFETY: pure arithmetic.
    unsafe { nvvm_rcp(x) }
}
#[inline(always)]
pub fn multiply_add(a: f32, b: f32, c: f32) -> f32 {
    let r: f32;
    // SAFETY: pure arithmetic.
    unsafe {
        asm!("fma.rn.f32 {0}, {1}, {2}, {3};", out(reg32) r, in(reg32) a, in(reg32) b, in(reg32) c,
            options(pure, nomem, nostack))
    }
    r
}
#[inline(always)]
pub fn maximum(a: f32, b: f32) -> f32 {
    a.max(b)
}
#[inline(always)]
pub fn pack_bf16(low: f32, high: f32) -> u32 {
    let r: u32;
    // SAFETY: pure arithmetic.
    unsafe {
        asm!("cvt.rn.bf16x2.f32 {0}, {1}, {2};", out(reg32) r, in(reg32) high, in(reg32) low,
            options(pure, nomem, nostack))
    }
    r
}
#[inline(always)]
pub fn pack_f16(low: f32, high: f32) -> u32 {
    let r: u32;
    // SAFETY: pure arithmetic.
    unsafe {
        asm!("cvt.rn.f16x2.f32 {0}, {1}, {2};", out(reg32) r, in(reg32) high, in(reg32) low,
            options(pure, nomem, nostack))
    }
    r
}
#[inline(always)]
pub fn unpack_f16(pair: u32) -> (f32, f32) {
    let (low, high): (f32, f32);
    // SAFETY: pure arithmetic.
    unsafe {
        asm!("{{ .reg .b16 l, h; mov.b32 {{l, h}}, {2}; cvt.f32.f16 {0}, l; cvt.f32.f16 {1}, h; }}",
            out(reg32) low, out(reg32) high, in(reg32) pair, options(pure, nomem, nostack))
    }
    (low, high)
}

global_asm!(".extern .shared .align 1024 .b8 dynamic_shared[];");

#[inline(always)]
pub fn anew(mut value: u32) -> u32 {
    // SAFETY: no instruction. Volatile, or it would be moved out of loops.
    unsafe { asm!("// {0}", inout(reg32) value, options(nomem, nostack, preserves_flags)) };
    value
}

#[inline(always)]
pub fn dynamic_shared_base() -> u32 {
    let r: u32;
    // SAFETY: the address of a symbol.
    unsafe { asm!("mov.u32 {0}, dynamic_shared;", out(reg32) r, options(pure, nomem, nostack)) }
    r
}

/// What one load or store instruction moves.
///
/// # Safety
/// The four functions move exactly `size_of::<Self>()` bytes.
pub unsafe trait Word: Copy + 'static {
    #[doc(hidden)]
    unsafe fn load_shared(address: u32) -> Self;
    #[doc(hidden)]
    unsafe fn store_shared(address: u32, value: Self);
    #[doc(hidden)]
    unsafe fn load_global(address: u64) -> Self;
    #[doc(hidden)]
    unsafe fn load_global_constant(address: u64) -> Self;
    #[doc(hidden)]
    unsafe fn store_global(address: u64, value: Self);
}

macro_rules! scalar_word {
    ($type:ty, $class:ident, $suffix:literal) => {
        // SAFETY: the suffix names the type's own size.
        unsafe impl Word for $type {
            #[inline(always)]
            unsafe fn load_shared(address: u32) -> Self {
                let r: $type;
                // SAFETY: a live, aligned shared address, by the face's contract.
                unsafe {
                    asm!(concat!("ld.shared.", $suffix, " {0}, [{1}];"), out($class) r, in(reg32) address,
                        options(nostack))
                }
                r
            }
            #[inline(always)]
            unsafe fn store_shared(address: u32, value: Self) {
                // SAFETY: a live, aligned shared address, by the face's contract.
                unsafe {
                    asm!(concat!("st.shared.", $suffix, " [{0}], {1};"), in(reg32) address, in($class) value,
                        options(nostack))
                }
            }
            #[inline(always)]
            unsafe fn load_global(address: u64) -> Self {
                let r: $type;
                // SAFETY: a live, aligned global address, by the face's contract.
                unsafe {
                    asm!(concat!("ld.global.", $suffix, " {0}, [{1}];"), out($class) r, in(reg64) address,
                        options(nostack))
                }
                r
            }
            #[inline(always)]
            unsafe fn load_global_constant(address: u64) -> Self {
                let r: $type;
                // SAFETY: a live, aligned, read-only global address, by the face's contract.
                unsafe {
                    asm!(concat!("ld.global.nc.", $suffix, " {0}, [{1}];"), out($class) r, in(reg64) address,
                        options(pure, readonly, nostack))
                }
                r
            }
            #[inline(always)]
            unsafe fn store_global(address: u64, value: Self) {
                // SAFETY: a live, aligned global address, by the face's contract.
                unsafe {
                    asm!(concat!("st.global.", $suffix, " [{0}], {1};"), in(reg64) address, in($class) value,
                        options(nostack))
                }
            }
        }
    };
}
scalar_word!(u8, reg16, "b8");
scalar_word!(u16, reg16, "b16");
scalar_word!(u32, reg32, "b32");
scalar_word!(f32, reg32, "b32");
scalar_word!(u64, reg64, "b64");

macro_rules! vector_word {
    ($type:ty, $element:ty, $count:tt, $suffix:literal) => {
        // SAFETY: the suffix and count name the type's own size.
        unsafe impl Word for $type {
            #[inline(always)]
            unsafe fn load_shared(address: u32) -> Self {
                vector_word!(@load "ld.shared.", $element, $count, $suffix, reg32, address, (nostack))
            }
            #[inline(always)]
            unsafe fn store_shared(address: u32, value: Self) {
                vector_word!(@store "st.shared.", $count, $suffix, reg32, address, value)
            }
            #[inline(always)]
            unsafe fn load_global(address: u64) -> Self {
                vector_word!(@load "ld.global.", $element, $count, $suffix, reg64, address, (nostack))
            }
            #[inline(always)]
            unsafe fn load_global_constant(address: u64) -> Self {
                vector_word!(@load "ld.global.nc.", $element, $count, $suffix, reg64, address,
                    (pure, readonly, nostack))
            }
            #[inline(always)]
            unsafe fn store_global(address: u64, value: Self) {
                vector_word!(@store "st.global.", $count, $suffix, reg64, address, value)
            }
        }
    };
    (@load $op:literal, $element:ty, 2, $suffix:literal, $class:ident, $address:ident, ($($option:ident),*)) => {{
        let (r0, r1): ($element, $element);
        // SAFETY: a live, aligned address, by the face's contract.
        unsafe {
            asm!(concat!($op, "v2.", $suffix, " {{{0}, {1}}}, [{2}];"), out(reg32) r0, out(reg32) r1,
                in($class) $address, options($($option),*))
        }
        [r0, r1]
    }};
    (@load $op:literal, $element:ty, 4, $suffix:literal, $class:ident, $address:ident, ($($option:ident),*)) => {{
        let (r0, r1, r2, r3): ($element, $element, $element, $element);
        // SAFETY: a live, aligned address, by the face's contract.
        unsafe {
            asm!(concat!($op, "v4.", $suffix, " {{{0}, {1}, {2}, {3}}}, [{4}];"), out(reg32) r0, out(reg32) r1,
                out(reg32) r2, out(reg32) r3, in($class) $address, options($($option),*))
        }
        [r0, r1, r2, r3]
    }};
    (@store $op:literal, 2, $suffix:literal, $class:ident, $address:ident, $value:ident) => {{
        // SAFETY: a live, aligned address, by the face's contract.
        unsafe {
            asm!(concat!($op, "v2.", $suffix, " [{0}], {{{1}, {2}}};"), in($class) $address, in(reg32) $value[0],
                in(reg32) $value[1], options(nostack))
        }
    }};
    (@store $op:literal, 4, $suffix:literal, $class:ident, $address:ident, $value:ident) => {{
        // SAFETY: a live, aligned address, by the face's contract.
        unsafe {
            asm!(concat!($op, "v4.", $suffix, " [{0}], {{{1}, {2}, {3}, {4}}};"), in($class) $address,
                in(reg32) $value[0], in(reg32) $value[1], in(reg32) $value[2], in(reg32) $value[3],
                options(nostack))
        }
    }};
}
vector_word!([u32; 2], u32, 2, "b32");
vector_word!([f32; 2], f32, 2, "b32");
vector_word!([u32; 4], u32, 4, "b32");
vector_word!([f32; 4], f32, 4, "b32");

#[inline(always)]
pub unsafe fn load_shared<T: Word>(address: u32) -> T {
    // SAFETY: the face's contract.
    unsafe { T::load_shared(address) }
}
#[inline(always)]
pub unsafe fn store_shared<T: Word>(address: u32, value: T) {
    // SAFETY: the face's contract.
    unsafe { T::store_shared(address, value) }
}
#[inline(always)]
pub unsafe fn load_global<T: Word>(address: u64) -> T {
    // SAFETY: the face's contract.
    unsafe { T::load_global(address) }
}
#[inline(always)]
pub unsafe fn load_global_constant<T: Word>(address: u64) -> T {
    // SAFETY: the face's contract.
    unsafe { T::load_global_constant(address) }
}
#[inline(always)]
pub unsafe fn store_global<T: Word>(address: u64, value: T) {
    // SAFETY: the face's contract.
    unsafe { T::store_global(address, value) }
}

#[inline(always)]
pub unsafe fn atomic_fetch_add(address: u64, value: u32) -> u32 {
    let r: u32;
    // SAFETY: a live, aligned global address, by the face's contract.
    unsafe {
        asm!("atom.acq_rel.gpu.global.add.u32 {0}, [{1}], {2};", out(reg32) r, in(reg64) address, in(reg32) value,
            options(nostack))
    }
    r
}
#[inline(always)]
pub unsafe fn atomic_fetch_min(address: u64, value: u32) -> u32 {
    let r: u32;
    // SAFETY: a live, aligned global address, by the face's contract.
    unsafe {
        asm!("atom.relaxed.gpu.global.min.u32 {0}, [{1}], {2};", out(reg32) r, in(reg64) address, in(reg32) value,
            options(nostack))
    }
    r
}

#[inline(always)]
pub unsafe fn copy_async_16(destination: u32, source: u64, source_bytes: u32) {
    // SAFETY: live, aligned addresses, by the face's contract.
    unsafe {
        asm!("cp.async.cg.shared.global.L2::128B [{0}], [{1}], 16, {2};", in(reg32) destination, in(reg64) source,
            in(reg32) source_bytes, options(nostack))
    }
}
#[inline(always)]
pub fn commit_async_copies() {
    // SAFETY: has no precondition.
    unsafe { nvvm_cp_async_commit() }
}
#[inline(always)]
pub fn wait_async_copies<const PENDING: u32>() {
    // SAFETY: has no precondition.
    unsafe { asm!("cp.async.wait_group {0};", const PENDING, options(nostack)) }
}
#[inline(always)]
pub fn fence_proxy_async() {
    // SAFETY: has no precondition.
    unsafe { asm!("fence.proxy.async.shared::cta;", options(nostack)) }
}

#[inline(always)]
pub unsafe fn load_matrix_x4(address: u32) -> [u32; 4] {
    let (r0, r1, r2, r3): (u32, u32, u32, u32);
    // SAFETY: live, aligned shared addresses and a full warp, by the face's contract.
    unsafe {
        nvvm_bar_warp_sync(!0);
        asm!("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{{0}, {1}, {2}, {3}}}, [{4}];", out(reg32) r0,
            out(reg32) r1, out(reg32) r2, out(reg32) r3, in(reg32) address, options(nostack))
    }
    [r0, r1, r2, r3]
}
#[inline(always)]
pub unsafe fn load_matrix_x4_transposed(address: u32) -> [u32; 4] {
    let (r0, r1, r2, r3): (u32, u32, u32, u32);
    // SAFETY: live, aligned shared addresses and a full warp, by the face's contract.
    unsafe {
        nvvm_bar_warp_sync(!0);
        asm!("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {{{0}, {1}, {2}, {3}}}, [{4}];", out(reg32) r0,
            out(reg32) r1, out(reg32) r2, out(reg32) r3, in(reg32) address, options(nostack))
    }
    [r0, r1, r2, r3]
}

macro_rules! mma {
    ($name:ident, $types:literal) => {
        #[inline(always)]
        pub unsafe fn $name(c: &mut [f32; 4], a: [u32; 4], b: [u32; 2]) {
            // SAFETY: a full warp, by the face's contract.
            unsafe {
                nvvm_bar_warp_sync(!0);
                asm!(concat!("mma.sync.aligned.m16n8k16.row.col.f32.", $types,
                    ".f32 {{{0}, {1}, {2}, {3}}}, {{{4}, {5}, {6}, {7}}}, {{{8}, {9}}}, {{{0}, {1}, {2}, {3}}};"),
                    inout(reg32) c[0], inout(reg32) c[1], inout(reg32) c[2], inout(reg32) c[3],
                    in(reg32) a[0], in(reg32) a[1], in(reg32) a[2], in(reg32) a[3],
                    in(reg32) b[0], in(reg32) b[1], options(nomem, nostack))
            }
        }
    };
}
mma!(mma_m16n8k16_bf16, "bf16.bf16");
mma!(mma_m16n8k16_f16, "f16.f16");
