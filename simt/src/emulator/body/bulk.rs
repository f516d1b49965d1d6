//! Bulk copies as questions to the machine.
use std::panic::Location;

use super::with;

#[track_caller]
pub unsafe fn bulk_load_tensor<const RANK: usize>(destination: u32, map: u64, coordinates: [i32; RANK], barrier: u32) {
    let site = Location::caller();
    with(|machine| machine.start_tensor_load(destination, map, &coordinates, barrier, site));
}
#[track_caller]
pub unsafe fn prefetch_tensor_map(map: u64) {
    let site = Location::caller();
    with(|machine| machine.tensor_map(map, site).map(|_| ()));
}
#[track_caller]
pub unsafe fn bulk_load(destination: u32, source: u64, bytes: u32, barrier: u32) {
    let site = Location::caller();
    with(|machine| machine.start_bulk_load(destination, source, bytes, barrier, site));
}
#[track_caller]
pub unsafe fn bulk_store(destination: u64, source: u32, bytes: u32) {
    let site = Location::caller();
    with(|machine| machine.start_bulk_store(destination, source, bytes, site));
}
pub fn commit_bulk_stores() {
    with(|machine| {
        machine.commit_bulk_stores();
        Ok(())
    });
}
pub fn wait_bulk_stores<const PENDING: u32>() {
    with(|machine| machine.wait_bulk_stores(PENDING));
}
pub fn wait_bulk_stores_read<const PENDING: u32>() {
    with(|machine| machine.wait_bulk_stores_read(PENDING));
}
