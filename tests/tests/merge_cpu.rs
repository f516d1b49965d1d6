//! The table of merges on the host executor.

use oxattn_tests::executors::Cpu;
use oxattn_tests::states::{check, merge_cases};

#[test]
fn every_merge_is_the_oracle_s() {
    for case in merge_cases() {
        if let Err(difference) = check(&case, &Cpu) {
            panic!("{}: {difference}", case.name);
        }
    }
}
