//! The example's variants under the emulator as both families, and on GPU 0 where there is one and the bundle is built.

use std::io::Write;

use example_variants::{Chunked, DistanceBias};
use example_variants_program::{Case, Which, cases, largest_error, largest_error_of, tolerance};
use oxattn::custom::Family;
use oxattn::{ArgumentError, CustomVariantError, Device, Error, Run, Values, VariantInputs};

fn emulator(family: Family, seed: u64) -> Device {
    let device = Device::cpu();
    device.emulate::<Chunked>(family, seed).unwrap();
    device.emulate::<DistanceBias>(family, seed).unwrap();
    device
}

fn check(device: &Device) {
    for case in cases() {
        let error = largest_error(device, &case).unwrap_or_else(|error| panic!("{}: {error}", case.name));
        assert!(error <= tolerance(&case.config), "{}: a row is off by {error:.1e}", case.name);
    }
}

#[test]
fn emulated_on_sm_80() {
    check(&emulator(Family::Sm80, 1));
}

#[test]
fn emulated_on_sm_90a() {
    check(&emulator(Family::Sm90a, 2));
}

#[test]
fn on_a_gpu() {
    // Past the harness, which keeps what passing tests print.
    let skipped = |reason: &dyn std::fmt::Display| drop(writeln!(std::io::stderr(), "skipped: {reason}"));
    let device = match Device::cuda(0) {
        Ok(device) => device,
        Err(error) => return skipped(&error),
    };
    let path = std::env::var("OXATTN_USER_BUNDLE").unwrap_or("../../../target/user-variants.bundle".to_owned());
    let bundle = match std::fs::read(&path) {
        Ok(bundle) => bundle,
        Err(error) => return skipped(&format!("{path}: {error}; set OXATTN_USER_BUNDLE or run build-user-variants")),
    };
    device.load_bundle(&bundle).unwrap();
    assert!(matches!(device.load_bundle(&bundle), Err(Error::CustomVariant(CustomVariantError::AlreadyLoaded { .. }))));
    check(&device);
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
    case.config.head_dim = 64;
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
