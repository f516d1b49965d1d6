//! `wgmma` as questions to the machine.
use std::panic::Location;

use super::{Operation, meet, operands, with};
use crate::{
    emulator::machine::{A_SHARED, A_TRANSPOSED, ACCUMULATE, B_TRANSPOSED, BF16},
    face::wgmma::Major,
    tensor::Element,
};

#[track_caller]
pub unsafe fn wgmma_fence() {
    meet(Operation::WgmmaFence, Location::caller(), operands([]));
}
#[track_caller]
pub unsafe fn wgmma_commit_group() {
    meet(Operation::WgmmaCommit, Location::caller(), operands([]));
}
#[track_caller]
pub unsafe fn wgmma_wait_group<const PENDING: u32>() {
    meet(Operation::WgmmaWait { pending: PENDING }, Location::caller(), operands([]));
}

#[track_caller]
pub unsafe fn wgmma_shared<E: Element, A: Major, B: Major, const TILES: usize>(
    c: &mut [[f32; 4]; TILES],
    a: u64,
    b: u64,
    accumulate: bool,
) {
    let a_flags = flag(A_SHARED, true) | flag(A_TRANSPOSED, A::TRANSPOSED);
    multiply::<E, B>(c.as_flattened_mut(), [a as u32, (a >> 32) as u32, 0, 0], b, a_flags, accumulate);
}
#[track_caller]
pub unsafe fn wgmma_registers<E: Element, B: Major, const TILES: usize>(
    c: &mut [[f32; 4]; TILES],
    a: [u32; 4],
    b: u64,
    accumulate: bool,
) {
    multiply::<E, B>(c.as_flattened_mut(), a, b, 0, accumulate);
}

#[track_caller]
fn multiply<E: Element, B: Major>(c: &mut [f32], a: [u32; 4], b: u64, a_flags: u32, accumulate: bool) {
    let site = Location::caller();
    let ticket = with(|machine| machine.stage_accumulators(c, site));
    let flags = a_flags | flag(BF16, E::IS_BF16) | flag(B_TRANSPOSED, B::TRANSPOSED) | flag(ACCUMULATE, accumulate);
    let operation = Operation::Wgmma { columns: c.len() as u32 * 2 };
    meet(operation, site, operands([a[0], a[1], a[2], a[3], b as u32, (b >> 32) as u32, flags, ticket]));
}

fn flag(bit: u32, set: bool) -> u32 {
    if set { bit } else { 0 }
}

#[track_caller]
pub fn wgmma_settle<const TILES: usize>(c: &mut [[f32; 4]; TILES]) {
    let site = Location::caller();
    with(|machine| machine.settle_accumulators(c.as_flattened_mut(), site));
}
pub fn wgmma_pin(_: &mut [u32; 4]) {}
