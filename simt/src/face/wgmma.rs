//! `wgmma`: the tensor cores of sm_90a, fed by a warpgroup from shared memory, asynchronously.
//!
//! Four warps, of which the first has an index that is a multiple of 4, hand over one 64 x N x 16 product, N = 8
//! `TILES` with `TILES` from 1 to 32. In: A (64 x 16) from a [`Descriptor`] or from registers, B (16 x N) from a
//! [`Descriptor`]. In and out: f32 accumulators, `[[f32; 4]; TILES]` a thread. Warp `w` of the group holds rows `16 w`
//! to `16 w + 16`; tile `t` is columns `8 t` to `8 t + 8` in the layout of C in [`tensor`](crate::tensor), and a warp's
//! A registers are its 16 rows in the layout of A there.
//!
//! The invariant: from the call to the [`wait_group`] that covers it, accumulators and A registers belong to the tensor
//! cores, and so do the operands' bytes. In order:
//!
//! 1. [`fence_proxy_async`](crate::asynchronous::fence_proxy_async) by the threads that wrote operands with ordinary
//!    stores or `copy_async_16`, then a barrier;
//! 2. [`fence`], directly before the first product: after whatever last touched the registers, zeroing included. The
//!    compiler may move arithmetic past it; where `ptxas` complains (C7519), [`settle`] or [`pin`] before the fence;
//! 3. products, then [`commit_group`], in one straight line with the fence: `asm!` is not convergent, those two are;
//! 4. [`wait_group`], and [`settle`] for other accumulators that the same wait finished.
//!
//! Layouts are the canonical ones of the PTX manual's "asynchronous warpgroup level matrix shared memory layout".
use core::marker::PhantomData;

use crate::{body, shared::Shared, tensor::Element};

/// Which way an operand lies in shared memory.
pub trait Major: Copy + 'static {
    /// Whether neighbours lie along M (for A) or N (for B), rather than along K.
    const TRANSPOSED: bool;
}

/// The 16 values of a row of A, or of a column of B, are neighbours. The queries and keys of `Q K^T`.
#[derive(Clone, Copy, Debug)]
pub struct KMajor;

/// The values of a column of A, or of a row of B, are neighbours. The values of `P V`.
#[derive(Clone, Copy, Debug)]
pub struct MnMajor;

impl Major for KMajor {
    const TRANSPOSED: bool = false;
}
impl Major for MnMajor {
    const TRANSPOSED: bool = true;
}

/// How 16-byte pieces of shared memory change places, and how many bytes of neighbours lie together.
///
/// Bits 4 to 6 of the shared address are xored with as many of bits 7 to 9 as the mode has, so a pattern repeats after
/// 8 rows, and must begin at an address that is a multiple of 8 rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Swizzle {
    /// Nothing moves; 16 bytes together.
    None,
    /// Bit 4 is xored; 32 bytes together.
    Bytes32,
    /// Bits 4 and 5 are xored; 64 bytes together.
    Bytes64,
    /// Bits 4 to 6 are xored; 128 bytes together.
    Bytes128,
}

impl Swizzle {
    /// The bytes that lie together: the pitch of the eight rows of a pattern.
    #[inline(always)]
    pub const fn row_bytes(self) -> u32 {
        match self {
            Swizzle::None => 16,
            Swizzle::Bytes32 => 32,
            Swizzle::Bytes64 => 64,
            Swizzle::Bytes128 => 128,
        }
    }

    /// Where the byte that would be at `address` lies.
    #[inline(always)]
    pub const fn apply(self, address: u32) -> u32 {
        address ^ ((address >> 7 & (self.row_bytes() / 16 - 1)) << 4)
    }

    /// Bits 62 and 63 of a descriptor.
    const fn layout(self) -> u32 {
        match self {
            Swizzle::None => 0,
            Swizzle::Bytes128 => 1,
            Swizzle::Bytes64 => 2,
            Swizzle::Bytes32 => 3,
        }
    }
}

/// Where an operand of 16-bit values lies in shared memory. Rows are those of A, or the columns of B.
///
/// ```text
///            leading_bytes                                  stride_bytes
/// K-major    from columns 0..8 to 8..16 where nothing is    from 8 rows to the next 8
///            swizzled; else of no meaning
/// MN-major   from one run of neighbouring rows (64 with     from k 0..8 to 8..16 (nothing swizzled: from
///            128-byte swizzle) to the next; nothing         8 rows to the next 8)
///            swizzled: from k 0..8 to 8..16
/// ```
///
/// The bits: 0 to 13 address, 16 to 29 leading, 32 to 45 stride, each in units of 16 bytes, 62 and 63 swizzle. The base
/// offset (49 to 51) stays 0, because a pattern begins at a multiple of its 8 rows.
pub struct Descriptor<E, M> {
    /// The bits below 32, all that moves when the operand does.
    low: u32,
    high: u32,
    types: PhantomData<(E, M)>,
}

impl<E, M> Clone for Descriptor<E, M> {
    #[inline(always)]
    fn clone(&self) -> Self {
        *self
    }
}
impl<E, M> Copy for Descriptor<E, M> {}

impl<E: Element, M: Major> Descriptor<E, M> {
    /// All three are multiples of 16 bytes.
    #[inline(always)]
    pub fn new(start: Shared<u8>, leading_bytes: u32, stride_bytes: u32, swizzle: Swizzle) -> Self {
        debug_assert!((start.address() | leading_bytes | stride_bytes).is_multiple_of(16), "in units of 16 bytes");
        let field = |bytes: u32| (bytes & 0x3_ffff) >> 4;
        Descriptor {
            low: field(start.address()) | field(leading_bytes) << 16,
            high: field(stride_bytes) | swizzle.layout() << 30,
            types: PhantomData,
        }
    }

    /// The same operand `bytes` further, a multiple of 16. The swizzle goes by the address, so 16 columns further in a
    /// swizzled K-major row is 32 bytes.
    #[inline(always)]
    pub fn advance_bytes(self, bytes: u32) -> Self {
        debug_assert!(bytes.is_multiple_of(16), "in units of 16 bytes");
        Descriptor { low: self.low + (bytes >> 4), ..self }
    }

    /// The 64 bits the instruction takes.
    #[inline(always)]
    pub fn bits(self) -> u64 {
        self.low as u64 | (self.high as u64) << 32
    }
}

/// Orders this warp's accesses to accumulators and A registers before the products that follow.
///
/// # Safety
/// All 32 lanes of the warp reach this call together, and the other warps of the warpgroup come to it too.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub unsafe fn fence() {
    // SAFETY: the caller's contract is this function's own.
    unsafe { body::wgmma_fence() }
}

/// Starts `c += a * b`, or `c = a * b` unless `accumulate`, with A in shared memory.
///
/// # Safety
/// The 128 threads of a warpgroup reach this call together with equal `a`, `b` and `accumulate`. The operands are
/// inside shared memory, written, visible to the async proxy, and stay as they are until the wait; `c` is not touched
/// until then. Built for sm_90a.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub unsafe fn multiply_shared<E: Element, A: Major, B: Major, const TILES: usize>(
    c: &mut [[f32; 4]; TILES],
    a: Descriptor<E, A>,
    b: Descriptor<E, B>,
    accumulate: bool,
) {
    const { assert!(1 <= TILES && TILES <= 32, "wgmma has 8 to 256 columns") }
    // SAFETY: the caller's contract is this function's own.
    unsafe { body::wgmma_shared::<E, A, B, TILES>(c, a.bits(), b.bits(), accumulate) }
}

/// Starts `c += a * b`, or `c = a * b` unless `accumulate`, with A in registers.
///
/// # Safety
/// As [`multiply_shared`].
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub unsafe fn multiply_registers<E: Element, B: Major, const TILES: usize>(
    c: &mut [[f32; 4]; TILES],
    a: [u32; 4],
    b: Descriptor<E, B>,
    accumulate: bool,
) {
    const { assert!(1 <= TILES && TILES <= 32, "wgmma has 8 to 256 columns") }
    // SAFETY: the caller's contract is this function's own.
    unsafe { body::wgmma_registers::<E, B, TILES>(c, a, b.bits(), accumulate) }
}

/// Closes this warp's current group of products.
///
/// # Safety
/// As [`fence`].
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub unsafe fn commit_group() {
    // SAFETY: the caller's contract is this function's own.
    unsafe { body::wgmma_commit_group() }
}

/// Waits until at most `PENDING` of this warp's youngest groups are unfinished, and gives `c`, which an older one
/// wrote, back to the thread.
///
/// # Safety
/// As [`fence`].
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub unsafe fn wait_group<const PENDING: u32, const TILES: usize>(c: &mut [[f32; 4]; TILES]) {
    // SAFETY: the caller's contract is this function's own.
    unsafe { body::wgmma_wait_group::<PENDING>() }
    settle(c);
}

/// Gives further accumulators that the last [`wait_group`] finished back to the thread. No instruction: it keeps the
/// compiler from reading them before the wait.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub fn settle<const TILES: usize>(c: &mut [[f32; 4]; TILES]) {
    const { assert!(1 <= TILES && TILES <= 32, "wgmma has 8 to 256 columns") }
    body::wgmma_settle(c)
}

/// Makes the compiler have `a` ready here: before a [`fence`], so that it computes nothing after it. No instruction.
#[inline(always)]
pub fn pin(a: &mut [u32; 4]) {
    body::wgmma_pin(a)
}

#[cfg(all(test, not(target_arch = "nvptx64")))]
mod tests {
    use super::*;
    use crate::number::Bf16;

    /// The fields measured on hardware for tiles of 128 x 128 values.
    #[test]
    fn descriptor_bits() {
        let start = Shared::<u8>::dynamic().add_bytes(32 << 10);
        let address = start.address() as u64 / 16;
        let keys = Descriptor::<Bf16, KMajor>::new(start, 16, 1024, Swizzle::Bytes128);
        assert_eq!(keys.bits(), address | 1 << 16 | 64 << 32 | 1 << 62);
        let values = Descriptor::<Bf16, MnMajor>::new(start, 16384, 1024, Swizzle::Bytes128);
        assert_eq!(values.bits(), address | 1024 << 16 | 64 << 32 | 1 << 62);
        assert_eq!(values.advance_bytes(2048).bits(), values.bits() + 128);
        let layout = |swizzle| Descriptor::<Bf16, KMajor>::new(start, 0, 0, swizzle).bits() >> 62;
        assert_eq!([Swizzle::None, Swizzle::Bytes64, Swizzle::Bytes32].map(layout), [0, 2, 3]);
    }

    #[test]
    fn the_last_byte_of_shared_memory_fits() {
        let end = Shared::<u8>::dynamic().add_bytes((226 << 10) - 16);
        let descriptor = Descriptor::<Bf16, KMajor>::new(end, 0, 0x3_fff0, Swizzle::None);
        assert_eq!(descriptor.bits() & 0xffff, end.address() as u64 / 16);
        assert_eq!(descriptor.bits() >> 32, 0x3fff);
    }

    #[test]
    fn swizzles_by_address() {
        assert_eq!(Swizzle::Bytes128.apply(0x0b84), 0x0bf4);
        assert_eq!(Swizzle::Bytes64.apply(0x0b84), 0x0bb4);
        assert_eq!(Swizzle::Bytes32.apply(0x0b84), 0x0b94);
        assert_eq!(Swizzle::None.apply(0x0b84), 0x0b84);
    }
}
