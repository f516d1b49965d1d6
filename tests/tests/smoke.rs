//! One small batch for each kind of attention kernel: a first look at a new GPU, and what tools can follow that slow a
//! kernel down a thousandfold, as `compute-sanitizer --tool racecheck` does. Each test is a launch or two.
//!
//! Where there is no GPU, the tests say so and pass.

use kernels_gpu::abi::tile::{ATTEND_HEAD_DIMS, Family, PREFILL_HEAD_DIMS, PREFILL_ROTARY_HEAD_DIMS};
use oxattn::{Attention, Device, Kernel, RopeConfig, SplitMode, Stream};
use oxattn_tests::cases::{Case, paged};
use oxattn_tests::fixture::{Fixture, Lse};
use oxattn_tests::layout::Layout;
use oxattn_tests::plans::limits_for;
use oxattn_tests::public_api::Setup;
use std::io::Write;

/// Runs a batch by one kernel and holds it against the oracle.
fn check(case: &Case, kernel: Kernel, mode: SplitMode) {
    let device = match Device::cuda(0) {
        Ok(device) => device,
        Err(error) => return drop(writeln!(std::io::stderr(), "skipped: {error}")),
    };
    let is_hopper = device.as_cuda().is_some_and(|cuda| cuda.family() == Family::Sm90a);
    if kernel == Kernel::Prefill && !is_hopper {
        return drop(writeln!(std::io::stderr(), "skipped: {} has no prefill kernels", device.describe()));
    }
    let fixture = Fixture::new(case);
    let attention = Attention::new(&device, case.config, mode, limits_for(&[case])).unwrap();
    let mut setup = Setup::of(&device, attention.with_kernel(kernel).unwrap());
    let tensors = fixture.tensors(&device, Lse::Two, *case.query_begin().last().unwrap() as usize);
    let planned = setup.plan(&fixture, Stream::default()).unwrap();
    assert_eq!(planned.kernel(), kernel);
    setup.run(&planned, &tensors.run, Stream::default()).unwrap();
    if let Err(difference) = fixture.check(&tensors.download(&fixture)) {
        panic!("{}, {mode:?}: {difference}", case.name);
    }
}

/// A batch with a short request and one whose keys are cut, of `query_len` tokens each.
fn batch(name: &str, head_dims: [u32; 2], query_len: u32) -> Case {
    let mut case = Case {
        name: format!("{name}, head dims {head_dims:?}"),
        query_lens: vec![query_len; 2],
        kv_lens: vec![query_len + 9, 800],
        seeds: vec![0, 1],
        ..paged(16, Layout::Hnd)
    };
    (case.config.query_heads, case.config.kv_heads) = (4, 2);
    [case.config.head_dim, case.config.value_head_dim] = head_dims;
    case.config.softmax_scale = 1.0 / (head_dims[0] as f32).sqrt();
    case
}

fn modified(case: Case) -> Case {
    let name = format!("{}, modified", case.name);
    case.changed(name, |config| config.with_window(Some(300), None).with_soft_cap(20.0).with_sinks())
}

#[test]
fn decode() {
    for head_dim in ATTEND_HEAD_DIMS {
        check(&batch("decode", [head_dim; 2], 1), Kernel::Attend, SplitMode::Balanced);
    }
}

#[test]
fn decode_modified() {
    for head_dim in [64, 128, 256] {
        check(&modified(batch("decode", [head_dim; 2], 1)), Kernel::Attend, SplitMode::Balanced);
    }
}

#[test]
fn tall_items() {
    for head_dim in [64, 80, 128, 256] {
        check(&batch("tall items", [head_dim; 2], 40), Kernel::Attend, SplitMode::Balanced);
    }
}

#[test]
fn tall_items_modified() {
    for head_dim in [64, 80, 128, 256] {
        check(&modified(batch("tall items", [head_dim; 2], 40)), Kernel::Attend, SplitMode::Balanced);
    }
}

#[test]
fn prompts_of_head_dim_64() {
    check(&batch("prompts", [64; 2], 70), Kernel::Prefill, SplitMode::Balanced);
}

#[test]
fn prompts() {
    for head_dims in PREFILL_HEAD_DIMS.into_iter().filter(|&dims| dims != [64; 2]) {
        check(&batch("prompts", head_dims, 70), Kernel::Prefill, SplitMode::Balanced);
    }
}

#[test]
fn prompts_modified() {
    for head_dims in PREFILL_HEAD_DIMS {
        check(&modified(batch("prompts", head_dims, 70)), Kernel::Prefill, SplitMode::Balanced);
    }
}

#[test]
fn prompts_rotary() {
    for head_dim in PREFILL_ROTARY_HEAD_DIMS {
        let case = batch("prompts", [head_dim; 2], 70)
            .changed(format!("prompts rotated, head dim {head_dim}"), |config| {
                config.with_rope(RopeConfig::new(config.head_dim)).with_key_norm(1e-6)
            });
        check(&case, Kernel::Prefill, SplitMode::Balanced);
    }
}

#[test]
fn shared_prefixes() {
    for kernel in [Kernel::Attend, Kernel::Prefill] {
        let mut case = Case {
            query_lens: vec![1; 6],
            kv_lens: (0..6).map(|request| 410 + request).collect(),
            seeds: (0..6).collect(),
            shared_tokens: (0..6).map(|request| if request == 0 { 0 } else { 400 }).collect(),
            ..batch("shared prefixes", [128; 2], 1)
        };
        case.config = case.config.with_shared_prefixes(1).always_sharing();
        check(&case, kernel, SplitMode::Balanced);
    }
}
