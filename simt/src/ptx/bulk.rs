//! Bulk copies. They are one thread's own, so `asm!` may be copied into any branch.
use core::arch::asm;

macro_rules! load_box {
    ($dimensions:literal, $coordinates:literal, $destination:ident, $map:ident, $c:ident, $barrier:ident,
        $($index:literal)*) => {
        asm!(
            concat!("cp.async.bulk.tensor.", $dimensions,
                ".shared::cluster.global.tile.mbarrier::complete_tx::bytes [{destination}], [{map}, {{",
                $coordinates, "}}], [{barrier}];"),
            $(in(reg32) $c[$index],)*
            destination = in(reg32) $destination, map = in(reg64) $map, barrier = in(reg32) $barrier,
            options(nostack))
    };
}

#[inline(always)]
pub unsafe fn bulk_load_tensor<const RANK: usize>(destination: u32, map: u64, c: [i32; RANK], barrier: u32) {
    // SAFETY: a live map, tile and barrier, by the face's contract.
    unsafe {
        match RANK {
            1 => load_box!("1d", "{}", destination, map, c, barrier, 0),
            2 => load_box!("2d", "{}, {}", destination, map, c, barrier, 0 1),
            3 => load_box!("3d", "{}, {}, {}", destination, map, c, barrier, 0 1 2),
            4 => load_box!("4d", "{}, {}, {}, {}", destination, map, c, barrier, 0 1 2 3),
            _ => load_box!("5d", "{}, {}, {}, {}, {}", destination, map, c, barrier, 0 1 2 3 4),
        }
    }
}
#[inline(always)]
pub unsafe fn prefetch_tensor_map(map: u64) {
    // SAFETY: a live map, by the face's contract.
    unsafe { asm!("prefetch.tensormap [{0}];", in(reg64) map, options(nostack)) }
}
#[inline(always)]
pub unsafe fn bulk_load(destination: u32, source: u64, bytes: u32, barrier: u32) {
    // SAFETY: live, aligned addresses and a live barrier, by the face's contract.
    unsafe {
        asm!("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{0}], [{1}], {2}, [{3}];",
            in(reg32) destination, in(reg64) source, in(reg32) bytes, in(reg32) barrier, options(nostack))
    }
}
#[inline(always)]
pub unsafe fn bulk_store(destination: u64, source: u32, bytes: u32) {
    // SAFETY: live, aligned addresses, by the face's contract.
    unsafe {
        asm!("cp.async.bulk.global.shared::cta.bulk_group [{0}], [{1}], {2};", in(reg64) destination,
            in(reg32) source, in(reg32) bytes, options(nostack))
    }
}
#[inline(always)]
pub fn commit_bulk_stores() {
    // SAFETY: has no precondition.
    unsafe { asm!("cp.async.bulk.commit_group;", options(nostack)) }
}
#[inline(always)]
pub fn wait_bulk_stores<const PENDING: u32>() {
    // SAFETY: has no precondition.
    unsafe { asm!("cp.async.bulk.wait_group {0};", const PENDING, options(nostack)) }
}
#[inline(always)]
pub fn wait_bulk_stores_read<const PENDING: u32>() {
    // SAFETY: has no precondition.
    unsafe { asm!("cp.async.bulk.wait_group.read {0};", const PENDING, options(nostack)) }
}
