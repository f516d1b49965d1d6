//! The part of FlashInfer's grids that the host executor can afford in a few seconds: the points of each up to a limit
//! of [`Point::cost`], some of the masks, and many states of fewer tokens. A GPU runs all of it.

use oxattn::Device;
use oxattn_tests::executors::Cpu;
use oxattn_tests::grid::{Point, batch_append, batch_decode, batch_invariant, mixed, tensor_core_decode};
use oxattn_tests::lab::{check_invariant, check_points};
use oxattn_tests::merge_grid::{check_many_states, pairs};
use oxattn_tests::states;

/// Runs what costs at most `2^limit_log2`, which is `expected` points.
fn check_affordable(mut points: Vec<Point>, limit_log2: u32, expected: usize) {
    points.retain(|point| point.cost() <= 1 << limit_log2);
    assert_eq!(points.len(), expected);
    check_points(&Device::cpu(), &points);
}

#[test]
fn batch_decode_of_450_points() {
    check_affordable(batch_decode(), 22, 84);
}

#[test]
fn tensor_core_decode_of_360_points() {
    check_affordable(tensor_core_decode(), 22, 202);
}

#[test]
fn batch_append_of_2928_points() {
    check_affordable(batch_append(), 23, 54);
}

#[test]
fn mixed_of_648_points() {
    check_affordable(mixed(), 22, 51);
}

#[test]
fn batch_invariant_of_1008_points() {
    let mut points = batch_invariant();
    points.retain(|(point, _)| point.cost() <= 1 << 24);
    assert_eq!(points.len(), 24);
    check_invariant(&Device::cpu(), &points);
}

#[test]
fn merges_of_two_states_under_3_of_50_masks() {
    for case in pairs(3) {
        if let Err(difference) = states::check(&case, &Cpu) {
            panic!("{}: {difference}", case.name);
        }
    }
}

#[test]
fn merges_of_many_states_of_64_tokens_of_2048() {
    check_many_states(&Device::cpu(), 64);
}
