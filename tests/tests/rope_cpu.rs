//! The table of rotations on the host executor.

use oxattn_tests::executors::Cpu;
use oxattn_tests::rope::{check, check_by_hand, rope_cases};

#[test]
fn every_rotation_is_the_oracle_s() {
    for case in rope_cases() {
        if let Err(difference) = check(&case, &Cpu) {
            panic!("{}: {difference}", case.name);
        }
    }
}

#[test]
fn f11_pairs_turn_as_worked_by_hand() {
    check_by_hand(&Cpu);
}
