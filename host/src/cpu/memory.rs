//! The only place where the host executor turns addresses into values.
//!
//! In: addresses and byte strides of the launch parameters. Out: elements, rows as f32 and rows written in a dtype.
//! Offsets are 64-bit and wrap, as they do on the device, so a view may begin outside the memory it is used on.

use crate::config::DType;
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use kernels_gpu::abi::parameters::{CacheView, RowsView};

/// The address of a row of `view`.
#[inline(always)]
pub fn row_address(view: &RowsView, token: u32, head: u32) -> u64 {
    offset(offset(view.address, token as i64, view.token_stride_bytes), head as i64, view.head_stride_bytes)
}

/// The address of a cache row: token `token` of page `page`.
#[inline(always)]
pub fn cache_address(view: &CacheView, page: u32, token: u32, head: u32) -> u64 {
    let page = offset(view.address, page as i64, view.page_stride_bytes);
    offset(offset(page, token as i64, view.token_stride_bytes), head as i64, view.head_stride_bytes)
}

/// `address + index * stride_bytes`.
#[inline(always)]
pub fn offset(address: u64, index: i64, stride_bytes: i64) -> u64 {
    address.wrapping_add_signed(index.wrapping_mul(stride_bytes))
}

/// Element `index` of the array at `address`.
///
/// # Safety
/// The element is live and initialised.
#[inline(always)]
pub unsafe fn read<T: Copy>(address: u64, index: usize) -> T {
    // SAFETY: the caller's.
    unsafe { *(address as *const T).add(index) }
}

/// Writes element `index` of the array at `address`.
///
/// # Safety
/// The element is live and no other thread uses it.
#[inline(always)]
pub unsafe fn write<T: Copy>(address: u64, index: usize, value: T) {
    // SAFETY: the caller's.
    unsafe { (address as *mut T).add(index).write(value) }
}

/// The elements at `address`, for as long as the caller makes sure that nobody writes them.
///
/// # Safety
/// They are live, initialised and aligned, and nobody writes them while the slice is used.
#[inline(always)]
unsafe fn row<'a, T>(address: u64, elements: usize) -> &'a [T] {
    // SAFETY: the caller's.
    unsafe { std::slice::from_raw_parts(address as *const T, elements) }
}

/// # Safety
/// The elements are live, initialised and aligned, and nobody else uses them while the slice is used.
#[inline(always)]
unsafe fn row_mut<'a, T>(address: u64, elements: usize) -> &'a mut [T] {
    // SAFETY: the caller's.
    unsafe { std::slice::from_raw_parts_mut(address as *mut T, elements) }
}

/// Asks for the cache lines of a row that will be read soon. Any address will do.
#[inline(always)]
pub fn prefetch(address: u64, bytes: usize) {
    #[cfg(target_arch = "x86_64")]
    for line in (address..address + bytes as u64).step_by(64) {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a prefetch reads nothing the program can see.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(line as *const i8) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (address, bytes);
}

/// Reads a row of `to.len()` elements of `dtype` as f32.
///
/// # Safety
/// The row is live and nobody writes it meanwhile.
#[inline(always)]
pub unsafe fn load_row(address: u64, dtype: DType, to: &mut [f32]) {
    // SAFETY: the caller's; each slice ends with its statement.
    unsafe {
        match dtype {
            DType::Bf16 => row::<bf16>(address, to.len()).convert_to_f32_slice(to),
            DType::F16 => row::<f16>(address, to.len()).convert_to_f32_slice(to),
            DType::F32 => to.copy_from_slice(row(address, to.len())),
        }
    }
}

/// Writes a row of `from.len()` elements in `dtype`, rounded to nearest, ties to even.
///
/// # Safety
/// The row is live and nobody else uses it meanwhile.
#[inline(always)]
pub unsafe fn store_row(address: u64, dtype: DType, from: &[f32]) {
    // SAFETY: the caller's; each slice ends with its statement.
    unsafe {
        match dtype {
            DType::Bf16 => row_mut::<bf16>(address, from.len()).convert_from_f32_slice(from),
            DType::F16 => row_mut::<f16>(address, from.len()).convert_from_f32_slice(from),
            DType::F32 => row_mut(address, from.len()).copy_from_slice(from),
        }
    }
}

/// Copies a row of `bytes` bytes.
///
/// # Safety
/// Both rows are live, do not overlap, and nobody else uses the second.
#[inline(always)]
pub unsafe fn copy_row(from: u64, to: u64, bytes: usize) {
    // SAFETY: the caller's.
    unsafe { std::ptr::copy_nonoverlapping(from as *const u8, to as *mut u8, bytes) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Products past 2^31 and 2^32 elements, and a view that runs backwards.
    #[test]
    fn offsets_are_64_bit() {
        let view = |page_stride_bytes| CacheView {
            address: 0,
            page_stride_bytes,
            token_stride_bytes: 1024,
            head_stride_bytes: 256,
        };
        assert_eq!(cache_address(&view(2 * 16_384), 262_144, 0, 0), 1 << 33);
        assert_eq!(cache_address(&view(2 << 30), 4, 3, 2), (8 << 30) + 3 * 1024 + 2 * 256);
        assert_eq!(cache_address(&CacheView { address: 1 << 40, ..view(-(1 << 31)) }, 4, 0, 0), (1 << 40) - (1 << 33));
        let rows = RowsView { address: 16, token_stride_bytes: 256 * 128 * 2, head_stride_bytes: 256 };
        assert_eq!(row_address(&rows, 65_535, 255), 16 + (1u64 << 32) - 256);
    }
}
