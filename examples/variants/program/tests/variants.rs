//! The example's variants under the emulator as both families, and on GPU 0 where there is one and the bundle is built.

use std::io::Write;

use example_variants::{Chunked, DistanceBias};
use example_variants_program::{Case, Which, cases, largest_error, largest_error_of, prefill_cases, tolerance};
use oxattn::custom::Family;
use oxattn::*;

fn emulator(family: Family, seed: u64) -> Device {
    let device = Device::cpu();
    device.emulate::<Chunked>(family, seed).unwrap();
    device.emulate::<DistanceBias>(family, seed).unwrap();
    device
}

fn check(device: &Device, cases: &[Case]) {
    for case in cases {
        let error = largest_error(device, case).unwrap_or_else(|error| panic!("{}: {error}", case.name));
        assert!(error <= tolerance(&case.config), "{}: a row is off by {error:.1e}", case.name);
    }
}

#[test]
fn emulated_on_sm_80() {
    check(&emulator(Family::Sm80, 1), &cases());
}

#[test]
fn emulated_on_sm_90a() {
    check(&emulator(Family::Sm90a, 2), &cases());
}

#[test]
fn emulated_by_the_prefill_kernels() {
    check(&emulator(Family::Sm90a, 3), &prefill_cases());
}

/// Past the harness, which keeps what passing tests print.
fn skipped(reason: &dyn std::fmt::Display) {
    drop(writeln!(std::io::stderr(), "skipped: {reason}"));
}

/// GPU 0 with the bundle.
fn gpu() -> Option<Device> {
    let device = match Device::cuda(0) {
        Ok(device) => device,
        Err(error) => {
            skipped(&error);
            return None;
        }
    };
    let path = std::env::var("OXATTN_USER_BUNDLE").unwrap_or("../../../target/user-variants.bundle".to_owned());
    let bundle = match std::fs::read(&path) {
        Ok(bundle) => bundle,
        Err(error) => {
            skipped(&format!("{path}: {error}; set OXATTN_USER_BUNDLE or run build-user-variants"));
            return None;
        }
    };
    device.load_bundle(&bundle).unwrap();
    assert!(matches!(device.load_bundle(&bundle), Err(Error::CustomVariant(CustomVariantError::AlreadyLoaded { .. }))));
    Some(device)
}

#[test]
fn on_a_gpu() {
    if let Some(device) = gpu() {
        check(&device, &cases());
    }
}

#[test]
fn on_a_gpu_by_the_prefill_kernels() {
    let Some(device) = gpu() else { return };
    match largest_error(&device, &prefill_cases()[0]) {
        Err(Error::Argument(refusal @ ArgumentError::NoPrefillKernel { .. })) => skipped(&refusal),
        _ => check(&device, &prefill_cases()),
    }
}

/// As on a GPU: a batch of prompts gets the prefill kernel where the variant has one for the family and the shape.
#[test]
fn prompts_get_the_prefill_kernel_where_there_is_one() {
    let limits = Limits { max_requests: 1, max_query_tokens: 80, max_kv_len_tokens: 80, max_kv_tokens: 80 };
    let attention = |family, variant, head_dim, page, mode| {
        let config = AttentionConfig::new(1, 1, head_dim, page).with_custom_variant(variant);
        Attention::new(&emulator(family, 0), config, mode, limits).unwrap()
    };
    for (family, variant, head_dim, page, mode, expected) in [
        (Family::Sm90a, "chunked", 64, 16, SplitMode::Balanced, Kernel::Prefill),
        (Family::Sm90a, "chunked", 256, 16, SplitMode::Unsplit, Kernel::Prefill),
        (Family::Sm90a, "distance_bias", 128, 16, SplitMode::Balanced, Kernel::Prefill),
        (Family::Sm80, "chunked", 64, 16, SplitMode::Balanced, Kernel::Attend),
        (Family::Sm90a, "distance_bias", 96, 16, SplitMode::Balanced, Kernel::Prefill),
        (Family::Sm90a, "chunked", 64, 5, SplitMode::Balanced, Kernel::Attend),
        (Family::Sm90a, "chunked", 64, 16, SplitMode::BatchInvariant, Kernel::Attend),
    ] {
        let mut attention = attention(family, variant, head_dim, page, mode);
        let mut suitable = |tokens| {
            let table = PageTable::block_table(page, 80, &[80]).unwrap();
            attention.suitable_kernel(&table, QueryLengths::uniform(tokens)).unwrap()
        };
        assert_eq!((suitable(80), suitable(1)), (expected, Kernel::Attend), "{variant} {head_dim} {page} {mode:?}");
        let refusal = attention.with_kernel(Kernel::Prefill).err();
        let is_refused = matches!(refusal, Some(Error::Argument(ArgumentError::NoPrefillKernel { .. })));
        assert_eq!(is_refused, expected == Kernel::Attend, "{variant} {head_dim} {page} {mode:?}");
    }
}

/// The device's tuning knows the variant by its name, and the attention runs what it says.
#[test]
fn measured_times_choose_between_the_variants_kernels() {
    let limits = Limits { max_requests: 1, max_query_tokens: 80, max_kv_len_tokens: 80, max_kv_tokens: 80 };
    let device = emulator(Family::Sm90a, 0);
    let mut tuning = Tuning::new(device.machine());
    let config = AttentionConfig::new(1, 1, 64, 16).with_custom_variant("chunked");
    let table = PageTable::block_table(16, 5, &[80]).unwrap();
    let [fast, slow] = [3, 4].map(std::time::Duration::from_micros);
    tuning.record(&config, &table, QueryLengths::uniform(80), fast, slow).unwrap();
    tuning.record(&config, &table, QueryLengths::uniform(1), slow, fast).unwrap();
    let suitable = |device: &Device, tokens| {
        let mut attention = Attention::new(device, config, SplitMode::Balanced, limits).unwrap();
        attention.suitable_kernel(&table, QueryLengths::uniform(tokens)).unwrap()
    };
    assert_eq!((suitable(&device, 80), suitable(&device, 1)), (Kernel::Prefill, Kernel::Attend));
    let tuned = device.with_tuning(tuning);
    assert_eq!((suitable(&tuned, 80), suitable(&tuned, 1)), (Kernel::Attend, Kernel::Prefill));
}

fn case(which: Which) -> Case {
    cases().into_iter().find(|case| case.which == which).unwrap()
}

#[test]
fn the_cpu_device_says_that_it_has_no_kernels() {
    let error = largest_error(&Device::cpu(), &case(Which::DistanceBias)).unwrap_err();
    assert!(matches!(error, Error::CustomVariant(CustomVariantError::OnCpu { variant: "distance_bias" })), "{error}");
    let error = Device::cpu().load_bundle(&[]).unwrap_err();
    assert!(matches!(error, Error::CustomVariant(CustomVariantError::BundleOnCpu)), "{error}");
}

#[test]
fn a_shape_that_was_not_built_is_named_with_those_that_were() {
    let mut case = case(Which::DistanceBias);
    (case.config.head_dim, case.config.value_head_dim) = (64, 64);
    let error = largest_error(&emulator(Family::Sm80, 0), &case).unwrap_err().to_string();
    assert_eq!(
        error,
        "custom_variant distance_bias has no kernel attend_distance_bias_bf16_d64 for sm_80; for that there are \
         [\"attend_distance_bias_bf16_d96\", \"attend_distance_bias_bf16_d128\", \"attend_distance_bias_f16_d96\", \
         \"attend_distance_bias_f16_d128\"]"
    );
}

#[test]
fn what_the_variant_would_not_honour_is_refused() {
    let case = case(Which::DistanceBias);
    let refused = Case { config: case.config.with_soft_cap(30.0), ..case };
    let error = largest_error(&emulator(Family::Sm80, 0), &refused).unwrap_err().to_string();
    assert!(error.starts_with("soft_cap is set beside custom_variant distance_bias"), "{error}");
}

#[test]
fn parameters_are_there_and_of_the_variant() {
    let (device, case) = (emulator(Family::Sm90a, 0), case(Which::DistanceBias));
    let refusal = |change: &dyn Fn(Run) -> Run| largest_error_of(&device, &case, change).unwrap_err();

    let error = refusal(&|run| run.with_variant(VariantInputs::default()));
    assert!(matches!(error, Error::Argument(ArgumentError::MissingInput { input: "variant.custom", .. })), "{error}");

    let error = refusal(&|run| run.with_custom_parameters(&[0u8; 12]));
    let (variant, found, wanted) = ("distance_bias", 12, 8);
    assert!(
        matches!(error, Error::CustomVariant(got) if got == CustomVariantError::ParametersSize { variant, found, wanted })
    );

    let sinks = Some(Values { address: 16, len: 6 });
    let error = refusal(&|run| run.with_variant(VariantInputs { sinks, ..run.variant }));
    assert!(matches!(error, Error::Argument(ArgumentError::UnusedInput { input: "variant.sinks", .. })), "{error}");
}

/// The emulator knows the device's buffers and nothing else.
#[test]
fn a_stray_address_among_the_parameters_is_found() {
    let stray = |run: Run| run.with_custom_parameters(&DistanceBias { biases: 4096 });
    let error = largest_error_of(&emulator(Family::Sm90a, 0), &case(Which::DistanceBias), &stray).unwrap_err();
    let Error::Emulator { symbol, fault } = &error else { panic!("{error}") };
    assert_eq!(symbol, "attend_distance_bias_bf16_d128");
    assert!(fault.to_string().contains("distance_bias.rs"), "{fault}");
}
