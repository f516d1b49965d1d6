//! User-defined variants: kernels of one's own beside oxattn's.
//!
//! In: a bundle that `oxattn-build` made of a crate of variants ([`Device::load_bundle`]), a config that names one
//! ([`AttentionConfig::with_custom_variant`]), and for each run the variant's parameters ([`CustomParameters`]). Out: the
//! attention of that variant; planning, the choice of a kernel, splits, folds and graphs are as ever, but that batches of
//! prompts have the prefill kernel only where the bundle has the variant's. Invariant: a kernel is launched only if it
//! was compiled with this crate's layouts and tiles, and with as many bytes of parameters as it was compiled for.
//!
//! The kernels honour the config's scale, causal rule and windows. Addresses among the parameters are the caller's: what
//! lies there is not checked. The CPU executor has no such kernels and refuses their configs, except where a test, with
//! the feature `emulator`, has it run them thread by thread: `Device::emulate`.
//!
//! docs/user-variants.md walks through a crate of two variants.

#[cfg(any(feature = "cuda", feature = "emulator"))]
use kernels_gpu::abi::parameters::ConfigParameters;
#[cfg(any(feature = "cuda", feature = "emulator"))]
use kernels_gpu::variant::ModifiedParameters;

use crate::config::AttentionConfig;
use crate::device::{Device, Executor};

pub use kernels_gpu::abi::tile::Family;
pub use kernels_gpu::custom::CustomVariant;

/// Most bytes of a variant's parameters; what does not fit goes to device memory, and its address here.
pub const MOST_PARAMETERS_BYTES: usize = 256;

/// The parameters of a user-defined variant, as the kernel takes them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C, align(16))]
pub struct CustomParameters {
    bytes: [u8; MOST_PARAMETERS_BYTES],
    len: usize,
}

impl CustomParameters {
    /// Copies the parameters, which are those of the device crate's variant.
    pub fn new<P: bytemuck::NoUninit>(parameters: &P) -> CustomParameters {
        const { assert!(size_of::<P>() <= MOST_PARAMETERS_BYTES, "more parameters than a launch takes") };
        let mut bytes = [0; MOST_PARAMETERS_BYTES];
        let len = size_of::<P>();
        bytes[..len].copy_from_slice(bytemuck::bytes_of(parameters));
        CustomParameters { bytes, len }
    }

    /// What was copied.
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

/// A user-defined variant that cannot be run.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CustomVariantError {
    /// No bundle has it.
    #[error("custom_variant is {variant}; the bundles loaded have {loaded:?}")]
    NotLoaded {
        /// The config's.
        variant: &'static str,
        /// Those there are.
        loaded: Vec<String>,
    },
    /// It was not built for the config's dtype and head dim, or for the device's family.
    #[error("custom_variant {variant} has no kernel {symbol} for {family}; for that there are {built:?}")]
    NotBuilt {
        /// The variant.
        variant: &'static str,
        /// The kernel looked for.
        symbol: String,
        /// The device's family.
        family: &'static str,
        /// The variant's kernels for it.
        built: Vec<String>,
    },
    /// A kernel of another tile than the planner's.
    #[error("kernel {symbol} has {field} = {found} in its bundle; a launch needs {wanted}")]
    LaunchBounds {
        /// The kernel.
        symbol: String,
        /// What differs.
        field: &'static str,
        /// In the bundle.
        found: u32,
        /// For the plan's tiles.
        wanted: u32,
    },
    /// A bundle has a kernel that is there already.
    #[error("the bundle's kernel {symbol} has the name of one that is loaded already")]
    AlreadyLoaded {
        /// The kernel.
        symbol: String,
    },
    /// Parameters of another size than the kernel was compiled for.
    #[error("variant.custom has {found} bytes; custom_variant {variant} takes {wanted}")]
    ParametersSize {
        /// The variant.
        variant: &'static str,
        /// Bytes given.
        found: usize,
        /// Bytes of the bundle's manifest.
        wanted: usize,
    },
    /// The CPU executor has no kernels.
    #[error(
        "custom_variant is {variant}, which has kernels for GPUs only; a test can have the CPU device run them under the \
         emulator (feature `emulator`, Device::emulate)"
    )]
    OnCpu {
        /// The variant.
        variant: &'static str,
    },
    /// The CPU executor loads no kernels.
    #[error("a bundle of kernels was given to the CPU device; only a GPU runs them")]
    BundleOnCpu,
    /// A GPU runs kernels itself.
    #[error(
        "custom_variant {variant} was to be emulated on a GPU; load its bundle there, and emulate on Device::cpu()"
    )]
    EmulationOnGpu {
        /// The variant.
        variant: &'static str,
    },
}

impl Device {
    /// Loads the kernels of a bundle that `oxattn-build` made, beside oxattn's own. Attentions made from then on find
    /// its variants; the driver gets a kernel when one first needs it.
    ///
    /// # Errors
    /// Refuses what is no bundle, of another version or ABI, with kernels of names that are taken, and any on the CPU.
    #[cfg(feature = "cuda")]
    pub fn load_bundle(&self, bundle: &[u8]) -> Result<(), crate::Error> {
        match &*self.executor {
            #[cfg(feature = "cpu")]
            Executor::Cpu => Err(CustomVariantError::BundleOnCpu.into()),
            Executor::Cuda(cuda) => cuda.load_bundle(bundle),
        }
    }
}

/// What an attention knows of its custom variant.
#[derive(Clone, Debug)]
pub(crate) struct Custom {
    variant: &'static str,
    /// As compiled.
    parameters_bytes: usize,
    /// Multiprocessors for its prefill kernel, where it was built and the device runs such.
    pub prefill_multiprocessors: Option<u32>,
    /// Its kernels for the emulator.
    #[cfg(feature = "emulator")]
    pub emulated: Option<crate::emulate::Kernels>,
}

impl Custom {
    /// Finds the config's custom variant on the device; `None` where it names none.
    pub fn find(device: &Device, config: &AttentionConfig) -> Result<Option<Custom>, CustomVariantError> {
        let Some(variant) = config.custom_variant else { return Ok(None) };
        match &*device.executor {
            #[cfg(feature = "cpu")]
            Executor::Cpu => {
                #[cfg(feature = "emulator")]
                if let Some(kernels) = device.emulation.kernels(variant, config)? {
                    return Ok(Some(Custom {
                        variant,
                        parameters_bytes: kernels.parameters_bytes(),
                        prefill_multiprocessors: kernels.prefill_multiprocessors(),
                        emulated: Some(kernels),
                    }));
                }
                Err(CustomVariantError::OnCpu { variant })
            }
            #[cfg(feature = "cuda")]
            Executor::Cuda(cuda) => {
                let found = cuda.custom_variant(variant, config)?;
                Ok(Some(Custom {
                    variant,
                    parameters_bytes: found.parameters_bytes,
                    prefill_multiprocessors: device.prefill_multiprocessors().filter(|_| found.has_prefill),
                    #[cfg(feature = "emulator")]
                    emulated: None,
                }))
            }
        }
    }

    /// Refuses parameters that are not the variant's.
    pub fn check(&self, parameters: &CustomParameters) -> Result<(), CustomVariantError> {
        let (variant, found, wanted) = (self.variant, parameters.len, self.parameters_bytes);
        if found == wanted { Ok(()) } else { Err(CustomVariantError::ParametersSize { variant, found, wanted }) }
    }
}

/// Of what a config asks for, all that a custom variant's kernel does.
#[cfg(any(feature = "cuda", feature = "emulator"))]
pub(crate) fn config_parameters(variant: &ModifiedParameters) -> ConfigParameters {
    let ModifiedParameters { scale, window_left, window_right, .. } = *variant;
    ConfigParameters { scale_log2: scale, window_left, window_right, padding: 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_are_copied_and_their_size_is_checked() {
        let parameters = CustomParameters::new(&[1u16, 0x0302]);
        assert_eq!(parameters.as_bytes(), [1, 0, 2, 3]);
        let custom = |parameters_bytes| Custom {
            variant: "near",
            parameters_bytes,
            prefill_multiprocessors: None,
            #[cfg(feature = "emulator")]
            emulated: None,
        };
        assert_eq!(custom(4).check(&parameters), Ok(()));
        let error = custom(8).check(&parameters).unwrap_err();
        assert_eq!(error.to_string(), "variant.custom has 4 bytes; custom_variant near takes 8");
    }
}
