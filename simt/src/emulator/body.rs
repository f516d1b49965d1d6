//! The face's host body: the same functions as `ptx/`, each a question to the [`Machine`] that runs the block.
use std::{
    mem::MaybeUninit,
    panic::{Location, resume_unwind},
};

mod bulk;
mod mbarrier;
mod wgmma;

pub use bulk::*;
pub use mbarrier::*;
pub use wgmma::*;

pub use super::arithmetic::{exp2, log2, reciprocal};
use super::{
    arithmetic,
    error::{AccessKind, EmulatorError, Operation},
    machine::{CURRENT, Machine, Order, Stopped},
    tensor::Registers,
};

/// What one load or store instruction moves.
///
/// # Safety
/// The type has no padding, every bit pattern is a value of it, and its size is 1, 2, 4, 8 or 16 bytes.
pub unsafe trait Word: Copy + 'static {}
// SAFETY: plain numbers and arrays of them, without padding.
unsafe impl Word for u8 {}
// SAFETY: as above.
unsafe impl Word for u16 {}
// SAFETY: as above.
unsafe impl Word for u32 {}
// SAFETY: as above.
unsafe impl Word for f32 {}
// SAFETY: as above.
unsafe impl Word for u64 {}
// SAFETY: as above.
unsafe impl Word for [u32; 2] {}
// SAFETY: as above.
unsafe impl Word for [f32; 2] {}
// SAFETY: as above.
unsafe impl Word for [u32; 4] {}
// SAFETY: as above.
unsafe impl Word for [f32; 4] {}

type Site = &'static Location<'static>;

/// Asks the machine; an error stops this thread by unwinding its stack.
#[inline]
fn with<R>(question: impl FnOnce(&mut Machine) -> Result<R, Box<EmulatorError>>) -> R {
    let machine = CURRENT.get();
    assert!(!machine.is_null(), "a simt function was called on the host outside of simt::emulator::Launch::run");
    // SAFETY: the launch set the pointer to its live machine before it resumed this thread, and holds no reference
    // to it meanwhile; this reference ends before the thread suspends.
    match question(unsafe { &mut *machine }) {
        Ok(answer) => answer,
        Err(error) => {
            // SAFETY: as above.
            unsafe { (*machine).fail(error) };
            resume_unwind(Box::new(Stopped))
        }
    }
}

/// Meets the other threads at a rendezvous point and returns this lane's results.
fn meet(operation: Operation, site: Site, operands: Registers) -> Registers {
    if !with(|machine| machine.arrive(operation, site, operands)) {
        suspend();
    }
    with(|machine| Ok(machine.results()))
}

/// Lets other threads go on until the machine picks this one again.
fn suspend() {
    let yielder = with(|machine| Ok(machine.yielder()));
    // SAFETY: the yielder lives on this thread's own stack, below this frame.
    unsafe { (*yielder).suspend(()) }
}

fn operands<const N: usize>(values: [u32; N]) -> Registers {
    let mut registers = [0; 10];
    registers[..N].copy_from_slice(&values);
    registers
}

#[inline]
pub fn thread_idx_x() -> u32 {
    with(|machine| Ok(machine.thread()))
}
#[inline]
pub fn block_idx_x() -> u32 {
    with(|machine| Ok(machine.block()))
}
#[inline]
pub fn block_dim_x() -> u32 {
    with(|machine| Ok(machine.block_threads()))
}
#[inline]
pub fn grid_dim_x() -> u32 {
    with(|machine| Ok(machine.grid_blocks()))
}

#[track_caller]
pub unsafe fn shuffle_xor_f32(value: f32, lane_mask: u32) -> f32 {
    f32::from_bits(meet(Operation::ShuffleXor, Location::caller(), operands([value.to_bits(), lane_mask]))[0])
}
#[track_caller]
pub unsafe fn shuffle_xor_u32(value: u32, lane_mask: u32) -> u32 {
    meet(Operation::ShuffleXor, Location::caller(), operands([value, lane_mask]))[0]
}
#[track_caller]
pub unsafe fn shuffle_u32(value: u32, source_lane: u32) -> u32 {
    meet(Operation::Shuffle, Location::caller(), operands([value, source_lane]))[0]
}
#[track_caller]
pub unsafe fn vote_ballot(predicate: bool) -> u32 {
    meet(Operation::Ballot, Location::caller(), operands([predicate as u32]))[0]
}
#[track_caller]
pub unsafe fn sync_warp() {
    meet(Operation::SyncWarp, Location::caller(), operands([]));
}
#[track_caller]
pub unsafe fn sync_threads() {
    meet(Operation::SyncThreads, Location::caller(), operands([]));
}
#[track_caller]
pub unsafe fn sync_named_barrier(id: u32, threads: u32) {
    let site = Location::caller();
    with(|machine| machine.check_named_barrier(id, threads, site));
    meet(Operation::NamedBarrier { id, threads }, site, operands([]));
}

pub fn wait_for_previous_grid() {}
pub fn allow_next_grid() {}

#[inline]
pub fn multiply_add(a: f32, b: f32, c: f32) -> f32 {
    a.mul_add(b, c)
}
#[inline]
pub fn maximum(a: f32, b: f32) -> f32 {
    a.max(b)
}
#[inline]
pub fn pack_bf16(low: f32, high: f32) -> u32 {
    arithmetic::bf16_from_f32(low) | arithmetic::bf16_from_f32(high) << 16
}
#[inline]
pub fn pack_f16(low: f32, high: f32) -> u32 {
    arithmetic::f16_from_f32(low) | arithmetic::f16_from_f32(high) << 16
}
#[inline]
pub fn unpack_f16(pair: u32) -> (f32, f32) {
    (arithmetic::f32_from_f16(pair & 0xffff), arithmetic::f32_from_f16(pair >> 16))
}

#[inline]
pub fn keep_order(_value: u32) {}

#[inline]
pub fn anew(value: u32) -> u32 {
    value
}

#[inline]
pub fn dynamic_shared_base() -> u32 {
    super::shared::BASE
}

#[inline]
#[track_caller]
pub unsafe fn load_shared<T: Word>(address: u32) -> T {
    let site = Location::caller();
    let mut value = MaybeUninit::<T>::uninit();
    // SAFETY: `value` has room for its own size, which the machine fills or stops; any bits are a `Word`.
    unsafe {
        with(|machine| machine.load_shared(address, value.as_mut_ptr().cast(), size_of::<T>() as u32, site));
        value.assume_init()
    }
}
#[inline]
#[track_caller]
pub unsafe fn store_shared<T: Word>(address: u32, value: T) {
    let site = Location::caller();
    // SAFETY: a `Word` is as many initialised bytes as its size.
    with(|machine| unsafe { machine.store_shared(address, (&raw const value).cast(), size_of::<T>() as u32, site) });
}
#[inline]
#[track_caller]
pub unsafe fn load_global<T: Word>(address: u64) -> T {
    let site = Location::caller();
    let mut value = MaybeUninit::<T>::uninit();
    // SAFETY: as in `load_shared`.
    unsafe {
        with(|machine| {
            machine.load_global(AccessKind::Load, address, value.as_mut_ptr().cast(), size_of::<T>() as u32, site)
        });
        value.assume_init()
    }
}
#[inline]
#[track_caller]
pub unsafe fn load_global_constant<T: Word>(address: u64) -> T {
    let site = Location::caller();
    let mut value = MaybeUninit::<T>::uninit();
    let size = size_of::<T>() as u32;
    // SAFETY: as in `load_shared`.
    unsafe {
        with(|machine| machine.load_global(AccessKind::LoadConstant, address, value.as_mut_ptr().cast(), size, site));
        value.assume_init()
    }
}
#[inline]
#[track_caller]
pub unsafe fn store_global<T: Word>(address: u64, value: T) {
    let site = Location::caller();
    // SAFETY: as in `store_shared`.
    with(|machine| unsafe { machine.store_global(address, (&raw const value).cast(), size_of::<T>() as u32, site) });
}

#[track_caller]
pub unsafe fn atomic_fetch_add(address: u64, value: u32) -> u32 {
    let site = Location::caller();
    with(|machine| machine.atomic(address, site, Order::AcquireRelease, |old| old.wrapping_add(value)))
}
#[track_caller]
pub unsafe fn atomic_fetch_min(address: u64, value: u32) -> u32 {
    let site = Location::caller();
    with(|machine| machine.atomic(address, site, Order::Relaxed, |old| old.min(value)))
}

#[track_caller]
pub unsafe fn copy_async_16(destination: u32, source: u64, source_bytes: u32) {
    let site = Location::caller();
    with(|machine| machine.start_copy(destination, source, source_bytes, site));
}
#[track_caller]
pub fn commit_async_copies() {
    with(|machine| {
        machine.commit_copies();
        Ok(())
    });
}
#[track_caller]
pub fn wait_async_copies<const PENDING: u32>() {
    with(|machine| machine.wait_copies(PENDING));
}
pub fn fence_proxy_async() {
    with(|machine| {
        machine.fence_proxy();
        Ok(())
    });
}

#[track_caller]
pub unsafe fn load_matrix_x4(address: u32) -> [u32; 4] {
    first_four(meet(Operation::LoadMatrix, Location::caller(), operands([address])))
}
#[track_caller]
pub unsafe fn load_matrix_x4_transposed(address: u32) -> [u32; 4] {
    first_four(meet(Operation::LoadMatrixTransposed, Location::caller(), operands([address])))
}
#[track_caller]
pub unsafe fn mma_m16n8k16_bf16(c: &mut [f32; 4], a: [u32; 4], b: [u32; 2]) {
    *c = first_four(meet(Operation::MmaBf16, Location::caller(), mma_operands(c, a, b))).map(f32::from_bits);
}
#[track_caller]
pub unsafe fn mma_m16n8k16_f16(c: &mut [f32; 4], a: [u32; 4], b: [u32; 2]) {
    *c = first_four(meet(Operation::MmaF16, Location::caller(), mma_operands(c, a, b))).map(f32::from_bits);
}

fn mma_operands(c: &[f32; 4], a: [u32; 4], b: [u32; 2]) -> Registers {
    let c = c.map(f32::to_bits);
    operands([a[0], a[1], a[2], a[3], b[0], b[1], c[0], c[1], c[2], c[3]])
}

fn first_four(registers: Registers) -> [u32; 4] {
    [registers[0], registers[1], registers[2], registers[3]]
}
