//! The table of appends on the host executor.

use oxattn_tests::executors::Cpu;
use oxattn_tests::new_tokens::{append_cases, check};

#[test]
fn every_append_writes_its_cells_and_nothing_else() {
    for case in append_cases() {
        if let Err(difference) = check(&case, &Cpu) {
            panic!("{}: {difference}", case.name);
        }
    }
}
