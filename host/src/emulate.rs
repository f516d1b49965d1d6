//! Kernels of user-defined variants under `simt`'s emulator, on the CPU executor: for tests.
//!
//! In: variants of a device crate, by [`Device::emulate`], and launches whose addresses lie in buffers of the device. Out:
//! what the kernels write, or the first rule that one breaks. Invariant: a launch touches no memory but the device's
//! buffers and its own tensor maps, since nothing else is registered with the emulator.
//!
//! Unsafe: a launch takes addresses; that they are live is the caller's promise, as for any run.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kernels_gpu::abi::manifest::{KernelEntry, LaunchBounds};
use kernels_gpu::abi::parameters::{AttendParameters, ConfigParameters};
use kernels_gpu::abi::tile::Family;
use kernels_gpu::custom::CustomVariant;
use simt::bulk::TensorMap;
use simt::emulator::{GlobalMemory, Launch, RawAccess, TensorMapDescription};
use simt::wgmma::Swizzle;

use crate::Error;
use crate::config::AttentionConfig;
use crate::custom::{CustomParameters, CustomVariantError};
use crate::device::Device;
use crate::tensor::Mappable;

/// For prefill kernels: few, so that a block has several items to go through.
const MULTIPROCESSORS: u32 = 6;

impl Device {
    /// Has this CPU device run the kernels of a user-defined variant under the emulator, thread by thread, as `family`
    /// would: some 10,000 times slower than a GPU, and reporting data races, missing barriers and stray addresses.
    /// `seed` picks the order of blocks, warps and lanes. A second call for a variant replaces the first.
    ///
    /// All tensors, and what the variant's parameters point at, must then be [`Buffer`](crate::Buffer)s of this device.
    pub fn emulate<V: CustomVariant>(&self, family: Family, seed: u64) -> Result<(), CustomVariantError> {
        if !self.is_cpu() {
            return Err(CustomVariantError::EmulationOnGpu { variant: V::NAME });
        }
        let variant = Variant {
            family,
            seed,
            kernels: V::KERNELS,
            parameters_bytes: size_of::<V::Parameters>(),
            thread: thread::<V>,
            prefill_thread: prefill_thread::<V>,
        };
        self.emulation.lock().variants.insert(V::NAME, variant);
        Ok(())
    }
}

/// Runs one thread of a kernel.
type Thread = unsafe fn(&str, Family, AttendParameters, ConfigParameters, &[u8]) -> Option<()>;

/// # Safety
/// As [`CustomVariant::emulate`]'s.
unsafe fn thread<V: CustomVariant>(
    symbol: &str,
    family: Family,
    p: AttendParameters,
    config: ConfigParameters,
    own: &[u8],
) -> Option<()> {
    // SAFETY: the caller's.
    unsafe { V::emulate(symbol, family, p, config, bytemuck::pod_read_unaligned(own)) }
}

/// Runs one thread of a prefill kernel, of tensor maps at an address.
type PrefillThread = unsafe fn(&str, AttendParameters, ConfigParameters, u64, &[u8]) -> Option<()>;

/// # Safety
/// As [`CustomVariant::emulate_prefill`]'s.
unsafe fn prefill_thread<V: CustomVariant>(
    symbol: &str,
    p: AttendParameters,
    config: ConfigParameters,
    maps: u64,
    own: &[u8],
) -> Option<()> {
    // SAFETY: the caller's.
    unsafe { V::emulate_prefill(symbol, p, config, maps, bytemuck::pod_read_unaligned(own)) }
}

/// What a CPU device emulates, and the memory that its buffers are.
#[derive(Clone, Debug, Default)]
pub(crate) struct Emulation(Arc<Mutex<State>>);

#[derive(Debug, Default)]
struct State {
    variants: BTreeMap<&'static str, Variant>,
    /// Bytes of each live buffer, by address.
    buffers: BTreeMap<u64, usize>,
}

#[derive(Clone, Copy, Debug)]
struct Variant {
    family: Family,
    seed: u64,
    kernels: &'static [&'static [KernelEntry]],
    parameters_bytes: usize,
    thread: Thread,
    prefill_thread: PrefillThread,
}

/// The kernels of an emulated variant for a config.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Kernels {
    attend: (&'static str, LaunchBounds),
    prefill: Option<(&'static str, LaunchBounds)>,
    variant: Variant,
}

impl Kernels {
    pub fn parameters_bytes(&self) -> usize {
        self.variant.parameters_bytes
    }

    pub fn prefill_multiprocessors(&self) -> Option<u32> {
        self.prefill.map(|_| MULTIPROCESSORS)
    }
}

/// A buffer's entry, gone with it.
#[derive(Debug)]
pub(crate) struct Registration(Emulation, u64);

impl Drop for Registration {
    fn drop(&mut self) {
        self.0.lock().buffers.remove(&self.1);
    }
}

impl Emulation {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets launches touch a buffer.
    pub fn register(&self, address: u64, bytes: usize) -> Registration {
        self.lock().buffers.insert(address, bytes);
        Registration(self.clone(), address)
    }

    /// The kernels of a config; `None` where its variant is not emulated.
    pub fn kernels(&self, name: &'static str, config: &AttentionConfig) -> Result<Option<Kernels>, CustomVariantError> {
        let Some(variant) = self.lock().variants.get(name).copied() else { return Ok(None) };
        let (wanted, family) = (config.attend_symbol(), variant.family);
        let built = variant.kernels.iter().copied().flatten();
        let mut built = built.filter_map(|kernel| Some((kernel.symbol, (kernel.launch)(family)?)));
        match built.clone().find(|(symbol, _)| *symbol == wanted) {
            Some(attend) => {
                let tile = config.prefill_tile();
                let prefill = tile.and_then(|tile| {
                    let wanted = config.prefill_symbol(tile);
                    built.find(|(symbol, _)| *symbol == wanted)
                });
                Ok(Some(Kernels { attend, prefill, variant }))
            }
            None => {
                let built = built.map(|(symbol, _)| symbol.to_owned());
                let built = built.filter(|symbol| symbol.starts_with("attend_")).collect();
                Err(CustomVariantError::NotBuilt { variant: name, symbol: wanted, family: family.name(), built })
            }
        }
    }

    /// Launches the attend kernel or, with what to map, the prefill kernel, and waits for it.
    ///
    /// # Safety
    /// The parameters describe live memory, which nobody else uses meanwhile. What is to be mapped comes for an attention
    /// that has a prefill kernel.
    pub unsafe fn launch(
        &self,
        kernels: &Kernels,
        blocks: u32,
        p: &AttendParameters,
        config: &ConfigParameters,
        mappable: Option<[Mappable; 2]>,
        own: &CustomParameters,
    ) -> Result<(), Error> {
        let Kernels { attend, prefill, variant } = *kernels;
        let prefill = mappable.and(prefill);
        let (symbol, bounds) = prefill.unwrap_or(attend);
        let maps =
            mappable.map(|[k, v]| Ok::<_, Error>([map(&k, p.box_tokens)?, map(&v, p.box_tokens)?])).transpose()?;
        let maps_address = maps.as_ref().map_or(0, |maps| maps.as_ptr() as u64);
        let buffers: Vec<(u64, usize)> =
            self.lock().buffers.iter().map(|(&address, &bytes)| (address, bytes)).collect();
        let mut memory = GlobalMemory::new();
        for (address, bytes) in buffers {
            // SAFETY: a buffer's memory, zeroed when it was made. What of it the kernel touches is live by the caller's
            // contract, and the rest is never looked at.
            unsafe { memory.register_raw(address, bytes, RawAccess::Writable) };
        }
        if let Some(maps) = &maps {
            // SAFETY: they outlive the launch.
            unsafe { memory.register_raw(maps_address, size_of_val(maps), RawAccess::ReadOnly) };
        }
        let LaunchBounds { threads, shared_bytes, .. } = bounds;
        let launch = Launch { grid_blocks: blocks, block_threads: threads, shared_bytes, seed: variant.seed };
        let run = || {
            // SAFETY: inside a launch with the kernel's bounds; a stray access is the emulator's to find. The symbol is one
            // of the variant's, so there is something to run.
            let _ = unsafe {
                match prefill {
                    Some(_) => (variant.prefill_thread)(symbol, *p, *config, maps_address, own.as_bytes()),
                    None => (variant.thread)(symbol, variant.family, *p, *config, own.as_bytes()),
                }
            };
        };
        launch.run(&mut memory, run).map_err(|fault| Error::Emulator { symbol: symbol.to_owned(), fault })?;
        Ok(())
    }
}

/// The tensor map of one of K and V.
fn map(of: &Mappable, box_tokens: u32) -> Result<TensorMap, Error> {
    let description = TensorMapDescription {
        address: of.address,
        element_bytes: 2,
        // More than a kernel can index is as good as what it can.
        extents: &of.dims.map(|extent| u32::try_from(extent).unwrap_or(u32::MAX)),
        strides_bytes: &of.strides_bytes,
        box_extents: &[64, box_tokens, 1, 1],
        element_strides: &[1; 4],
        swizzle: Swizzle::Bytes128,
    };
    Ok(description.encode()?)
}
