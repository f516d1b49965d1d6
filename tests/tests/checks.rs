//! The checks of values on the device: on the host executor, and on the kernels under the emulator.

use kernels_gpu::abi::tile::Family;
use oxattn_tests::checks::{append, append_checks, page_id_cases, page_ids};
use oxattn_tests::executors::{Cpu, Emulator};

#[test]
fn every_page_id_out_of_range_is_counted_and_no_other() {
    for case in page_id_cases() {
        assert_eq!(page_ids(&case, &Cpu), case.expected, "{}", case.name);
    }
}

#[test]
fn every_page_id_out_of_range_is_counted_and_no_other_by_the_kernel() {
    for (index, case) in page_id_cases().iter().enumerate() {
        let family = [Family::Sm80, Family::Sm90a][index % 2];
        assert_eq!(page_ids(case, &Emulator::new(family, index as u64)), case.expected, "{}, {family:?}", case.name);
    }
}

#[test]
fn every_token_without_a_place_is_counted_and_no_other() {
    for case in append_checks() {
        assert_eq!(append(&case, &Cpu), case.expected, "{}", case.name);
    }
}

#[test]
fn every_token_without_a_place_is_counted_and_no_other_by_the_kernel() {
    for (index, case) in append_checks().iter().enumerate() {
        let family = [Family::Sm80, Family::Sm90a][index % 2];
        assert_eq!(append(case, &Emulator::new(family, index as u64)), case.expected, "{}, {family:?}", case.name);
    }
}
