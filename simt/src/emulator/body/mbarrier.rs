//! `mbarrier`, named-barrier arrival and `setmaxnreg` as questions to the machine.
use std::panic::Location;

use super::{Operation, meet, operands, suspend, with};

#[track_caller]
pub unsafe fn arrive_named_barrier(id: u32, threads: u32) {
    let site = Location::caller();
    with(|machine| machine.check_named_barrier(id, threads, site));
    meet(Operation::NamedBarrierArrive { id, threads }, site, operands([]));
}
#[track_caller]
pub unsafe fn setmaxnreg_inc<const REGISTERS: u32>() {
    meet(Operation::RaiseRegisterLimit { registers: REGISTERS }, Location::caller(), operands([]));
}
#[track_caller]
pub unsafe fn setmaxnreg_dec<const REGISTERS: u32>() {
    meet(Operation::LowerRegisterLimit { registers: REGISTERS }, Location::caller(), operands([]));
}

#[track_caller]
pub unsafe fn mbarrier_init(address: u32, arrivals: u32) {
    let site = Location::caller();
    with(|machine| machine.init_mbarrier(address, arrivals, site));
}
#[track_caller]
pub unsafe fn mbarrier_inval(address: u32) {
    let site = Location::caller();
    with(|machine| machine.invalidate_mbarrier(address, site));
}
#[track_caller]
pub unsafe fn mbarrier_arrive(address: u32) {
    let site = Location::caller();
    with(|machine| machine.arrive_mbarrier(address, 0, site));
}
#[track_caller]
pub unsafe fn mbarrier_arrive_expect_tx(address: u32, bytes: u32) {
    let site = Location::caller();
    with(|machine| machine.arrive_mbarrier(address, bytes, site));
}
#[track_caller]
pub unsafe fn mbarrier_wait(address: u32, parity: u32) {
    let site = Location::caller();
    if !with(|machine| machine.wait_mbarrier(address, parity, site)) {
        suspend();
    }
}
#[track_caller]
pub unsafe fn mbarrier_test_wait(address: u32, parity: u32) -> bool {
    let site = Location::caller();
    let complete = with(|machine| machine.test_mbarrier(address, parity, site));
    if !complete {
        // Others may be what it asks for.
        suspend();
    }
    complete
}
pub fn fence_mbarrier_init() {
    with(|machine| {
        machine.fence_mbarriers();
        Ok(())
    });
}
