//! `mbarrier`, named-barrier arrival and `setmaxnreg`.
use core::arch::asm;

unsafe extern "C" {
    #[link_name = "llvm.nvvm.barrier.cta.arrive.aligned.count"]
    fn nvvm_barrier_arrive(id: u32, threads: u32);
    #[link_name = "llvm.nvvm.setmaxnreg.inc.sync.aligned.u32"]
    fn nvvm_setmaxnreg_inc(registers: u32);
    #[link_name = "llvm.nvvm.setmaxnreg.dec.sync.aligned.u32"]
    fn nvvm_setmaxnreg_dec(registers: u32);
}

#[inline(always)]
pub unsafe fn arrive_named_barrier(id: u32, threads: u32) {
    // SAFETY: the threads of the phase take part, by the face's contract.
    unsafe { nvvm_barrier_arrive(id, threads) }
}
#[inline(always)]
pub unsafe fn setmaxnreg_inc<const REGISTERS: u32>() {
    // SAFETY: a whole warpgroup, by the face's contract.
    unsafe { nvvm_setmaxnreg_inc(REGISTERS) }
}
#[inline(always)]
pub unsafe fn setmaxnreg_dec<const REGISTERS: u32>() {
    // SAFETY: a whole warpgroup, by the face's contract.
    unsafe { nvvm_setmaxnreg_dec(REGISTERS) }
}

#[inline(always)]
pub unsafe fn mbarrier_init(address: u32, arrivals: u32) {
    // SAFETY: eight aligned bytes of shared memory, by the face's contract.
    unsafe {
        asm!("mbarrier.init.shared::cta.b64 [{0}], {1};", in(reg32) address, in(reg32) arrivals, options(nostack))
    }
}
#[inline(always)]
pub unsafe fn mbarrier_inval(address: u32) {
    // SAFETY: a live barrier, by the face's contract.
    unsafe { asm!("mbarrier.inval.shared::cta.b64 [{0}];", in(reg32) address, options(nostack)) }
}
#[inline(always)]
pub unsafe fn mbarrier_arrive(address: u32) {
    // SAFETY: a live barrier, by the face's contract.
    unsafe { asm!("mbarrier.arrive.shared::cta.b64 _, [{0}];", in(reg32) address, options(nostack)) }
}
#[inline(always)]
pub unsafe fn mbarrier_arrive_expect_tx(address: u32, bytes: u32) {
    // SAFETY: a live barrier, by the face's contract.
    unsafe {
        asm!("mbarrier.arrive.expect_tx.shared::cta.b64 _, [{0}], {1};", in(reg32) address, in(reg32) bytes,
            options(nostack))
    }
}
/// `try_wait` gives up after a while of the hardware's choosing, so it stands in a loop.
#[inline(always)]
#[allow(named_asm_labels)]
pub unsafe fn mbarrier_wait(address: u32, parity: u32) {
    // SAFETY: a live barrier, by the face's contract. A label is local to its braces.
    unsafe {
        asm!(
            "{{ .reg .pred done;",
            "again: mbarrier.try_wait.parity.shared::cta.b64 done, [{0}], {1};",
            "@!done bra again; }}",
            in(reg32) address, in(reg32) parity, options(nostack))
    }
}
#[inline(always)]
pub unsafe fn mbarrier_test_wait(address: u32, parity: u32) -> bool {
    let r: u32;
    // SAFETY: a live barrier, by the face's contract.
    unsafe {
        asm!(
            "{{ .reg .pred done;",
            "mbarrier.test_wait.parity.shared::cta.b64 done, [{1}], {2};",
            "selp.u32 {0}, 1, 0, done; }}",
            out(reg32) r, in(reg32) address, in(reg32) parity, options(nostack))
    }
    r != 0
}
#[inline(always)]
pub fn fence_mbarrier_init() {
    // SAFETY: has no precondition.
    unsafe { asm!("fence.mbarrier_init.release.cluster;", options(nostack)) }
}
