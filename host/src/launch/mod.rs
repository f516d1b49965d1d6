//! A GPU with its kernels: picks the family, loads a kernel into the context at first need, launches.
//!
//! In: parameter structs whose addresses were checked. Out: launches on the caller's stream. Invariant: after a
//! kernel's first use a launch allocates nothing, waits for nothing and records nothing.
//!
//! Unsafe: a launch hands the driver raw addresses; only the caller knows that they are live.

use std::collections::{HashMap, HashSet};
use std::ffi::c_void;
use std::fmt::{self, Write};
use std::sync::{Mutex, PoisonError, RwLock, RwLockReadGuard};

use kernels_gpu::abi::manifest::LaunchBounds;
use kernels_gpu::abi::parameters::{AttendParameters, CacheMaps, ConfigParameters, StreamParameters};
use kernels_gpu::abi::tile::{AttendTile, Family, STREAM_GROUP_PIECES};

use crate::custom::{CustomParameters, CustomVariantError};
use crate::driver::{self, Context, DeviceProperties, DriverError, Function, Owner, Stream};
use crate::tensor::ArgumentError;
use crate::{Error, config::AttentionConfig};

pub mod bundle;
mod known;

use bundle::Bundle;
use known::KnownAddresses;

/// The kernels that ship with the crate: a [`Bundle`].
pub const EMBEDDED: &[u8] = include_bytes!("../../bundle/kernels.bundle");

/// A GPU, its context and its loaded kernels.
#[derive(Debug)]
pub struct Cuda {
    context: Context,
    properties: DeviceProperties,
    family: Family,
    driver_version: u32,
    /// The crate's own, then those loaded beside it.
    bundles: RwLock<Vec<Bundle>>,
    functions: Mutex<HashMap<String, Function>>,
    known: KnownAddresses,
}

/// What a bundle has of a user-defined variant for a config.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CustomKernels {
    pub parameters_bytes: usize,
    /// Whether there is a prefill kernel beside the attend kernel.
    pub has_prefill: bool,
}

/// A kernel's symbol, without an allocation; the longest are a user-defined variant's, 50 bytes.
struct Spelt {
    bytes: [u8; 64],
    len: usize,
}

impl Spelt {
    fn new() -> Spelt {
        Spelt { bytes: [0; 64], len: 0 }
    }

    fn as_str(&self) -> &str {
        std::str::from_utf8(&self.bytes[..self.len]).unwrap_or_default()
    }
}

impl Write for Spelt {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let room = self.bytes[self.len..].get_mut(..text.len()).ok_or(fmt::Error)?;
        room.copy_from_slice(text.as_bytes());
        self.len += text.len();
        Ok(())
    }
}

impl Cuda {
    /// The device of a context.
    pub(crate) fn new(context: Context) -> Result<Cuda, Error> {
        let properties = driver::properties(context.ordinal())?;
        let family = match properties.capability {
            (9, _) => Family::Sm90a,
            (major, _) if major >= 8 => Family::Sm80,
            (major, minor) => {
                return Err(DriverError::UnsupportedDevice { device: context.ordinal(), major, minor }.into());
            }
        };
        Ok(Cuda {
            context,
            properties,
            family,
            driver_version: u32::try_from(driver::version()?).unwrap_or(0),
            bundles: RwLock::new(vec![Bundle::parse(EMBEDDED)?]),
            functions: Mutex::default(),
            known: KnownAddresses::new(),
        })
    }

    /// The context its work runs in.
    pub fn context(&self) -> &Context {
        &self.context
    }

    /// What the device is.
    pub fn properties(&self) -> &DeviceProperties {
        &self.properties
    }

    /// The kernels built for it.
    pub fn family(&self) -> Family {
        self.family
    }

    /// The driver's CUDA version, 1000 * major + 10 * minor.
    pub fn driver_version(&self) -> u32 {
        self.driver_version
    }

    /// The hash of the source that the crate's own kernels were built from.
    pub(crate) fn source_hash(&self) -> String {
        self.bundles().first().map(|bundle| bundle.manifest().source_hash.clone()).unwrap_or_default()
    }

    /// Whether a kernel may start while the one before it drains.
    fn overlap(&self) -> bool {
        self.family == Family::Sm90a
    }

    /// The kernel of that symbol, loaded into the context at the first call.
    ///
    /// The symbol is spelt on the stack, as calls come once a layer.
    pub(crate) fn function(&self, symbol: fmt::Arguments<'_>) -> Result<Function, Error> {
        let mut spelt = Spelt::new();
        // A symbol that does not fit is cut short and not found.
        let _ = spelt.write_fmt(symbol);
        let symbol = spelt.as_str();
        let mut functions = self.functions.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if let Some(function) = functions.get(symbol) {
            return Ok(*function);
        }
        let bundles = self.bundles();
        let (bundle, record) = bundles
            .iter()
            .find_map(|bundle| Some((bundle, bundle.kernel(symbol, self.family)?)))
            .ok_or_else(|| DriverError::NoSuchKernel { symbol: symbol.to_owned(), family: self.family.name() })?;
        let (threads, shared_bytes) = (record.launch.threads, record.launch.shared_bytes);
        if shared_bytes > self.properties.shared_bytes_per_block {
            return Err(DriverError::SharedMemory {
                symbol: symbol.to_owned(),
                needed_bytes: shared_bytes,
                available_bytes: self.properties.shared_bytes_per_block,
            }
            .into());
        }
        let mut image = bundle.image(record)?;
        // The driver reads PTX up to a zero byte.
        image.push(0);
        self.context.bind()?;
        let function = Function::load(&image, symbol, threads, shared_bytes)?;
        functions.insert(symbol.to_owned(), function);
        Ok(function)
    }

    fn bundles(&self) -> RwLockReadGuard<'_, Vec<Bundle>> {
        self.bundles.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts a bundle's kernels beside those that are there.
    pub(crate) fn load_bundle(&self, bytes: &[u8]) -> Result<(), Error> {
        let bundle = Bundle::parse(bytes.to_vec())?;
        bundle.check_abi()?;
        let mut bundles = self.bundles.write().unwrap_or_else(PoisonError::into_inner);
        add_bundle(&mut bundles, bundle)?;
        Ok(())
    }

    /// What there is of a user-defined variant, if its bundle has the config's attend kernel for this device.
    pub(crate) fn custom_variant(
        &self,
        variant: &'static str,
        config: &AttentionConfig,
    ) -> Result<CustomKernels, CustomVariantError> {
        custom_variant(&self.bundles(), self.family, variant, config)
    }

    /// Launches a kernel of one parameter struct.
    ///
    /// # Safety
    /// The parameters are the kernel's and describe live memory of this device.
    pub(crate) unsafe fn launch<P: Copy>(
        &self,
        function: &Function,
        stream: Stream,
        blocks: u32,
        parameters: &P,
    ) -> Result<(), Error> {
        self.context.bind()?;
        let mut pointers = [(&raw const *parameters).cast_mut().cast::<c_void>()];
        // SAFETY: the caller's contract is this function's own.
        Ok(unsafe { function.launch(stream, blocks, self.overlap(), &mut pointers) }?)
    }

    /// Launches a kernel of two parameter structs.
    ///
    /// # Safety
    /// As [`launch`](Self::launch).
    pub(crate) unsafe fn launch_pair<P: Copy, Q: Copy>(
        &self,
        function: &Function,
        stream: Stream,
        blocks: u32,
        first: &P,
        second: &Q,
    ) -> Result<(), Error> {
        self.context.bind()?;
        let mut pointers =
            [(&raw const *first).cast_mut().cast::<c_void>(), (&raw const *second).cast_mut().cast::<c_void>()];
        // SAFETY: the caller's contract is this function's own.
        Ok(unsafe { function.launch(stream, blocks, self.overlap(), &mut pointers) }?)
    }

    /// Launches a kernel of three parameter structs.
    ///
    /// # Safety
    /// As [`launch`](Self::launch).
    pub(crate) unsafe fn launch_three<P: Copy, Q: Copy, R: Copy>(
        &self,
        function: &Function,
        stream: Stream,
        blocks: u32,
        (first, second, third): (&P, &Q, &R),
    ) -> Result<(), Error> {
        self.context.bind()?;
        let mut pointers = [
            (&raw const *first).cast_mut().cast::<c_void>(),
            (&raw const *second).cast_mut().cast::<c_void>(),
            (&raw const *third).cast_mut().cast::<c_void>(),
        ];
        // SAFETY: the caller's contract is this function's own.
        Ok(unsafe { function.launch(stream, blocks, self.overlap(), &mut pointers) }?)
    }

    /// Launches an attend kernel of a user-defined variant or, with `maps`, a prefill kernel.
    ///
    /// # Safety
    /// As [`launch`](Self::launch); the kernel takes as many bytes as `own` has.
    pub(crate) unsafe fn launch_custom(
        &self,
        function: &Function,
        stream: Stream,
        blocks: u32,
        (parameters, config): (&AttendParameters, &ConfigParameters),
        maps: Option<&CacheMaps>,
        own: &CustomParameters,
    ) -> Result<(), Error> {
        self.context.bind()?;
        // A variant without parameters has a kernel of one less; the driver does not look at the last pointer.
        let own = own.as_bytes().as_ptr().cast_mut().cast::<c_void>();
        let mut pointers = [
            (&raw const *parameters).cast_mut().cast::<c_void>(),
            (&raw const *config).cast_mut().cast::<c_void>(),
            maps.map_or(own, |maps| (&raw const *maps).cast_mut().cast::<c_void>()),
            own,
        ];
        let count = if maps.is_some() { 4 } else { 3 };
        // SAFETY: the caller's contract is this function's own.
        Ok(unsafe { function.launch(stream, blocks, self.overlap(), &mut pointers[..count]) }?)
    }

    /// Reads (or, with `destination`, copies) `bytes` bytes with the plain stream kernels: the ceilings that the GPU
    /// suite compares with. `bytes` is a multiple of 64 KiB.
    ///
    /// # Safety
    /// Both ranges are live memory of this device.
    pub unsafe fn stream(
        &self,
        source: u64,
        destination: Option<u64>,
        bytes: u64,
        stream: Stream,
    ) -> Result<(), Error> {
        let symbol = if destination.is_some() { "stream_copy" } else { "stream_read" };
        let function = self.function(format_args!("{symbol}"))?;
        let pieces = bytes / 16;
        let parameters = StreamParameters { source, destination: destination.unwrap_or(source), pieces };
        let groups = pieces.div_ceil(STREAM_GROUP_PIECES as u64);
        // SAFETY: the caller's contract; whole groups, by the multiple.
        unsafe { self.launch(&function, stream, groups.min(1 << 20) as u32, &parameters) }
    }

    /// Refuses addresses that are not this device's memory. The driver is asked for an address it was not asked for lately.
    pub(crate) fn check_memory(&self, tensors: &[(&'static str, u64)]) -> Result<(), Error> {
        for &(tensor, address) in tensors {
            if address == 0 || self.known.contains(address) {
                continue;
            }
            self.context.bind()?;
            let ordinal = self.properties.ordinal;
            let found = match driver::owner(address) {
                Ok(Owner::Device(found)) if found == ordinal => {
                    self.known.insert(address);
                    continue;
                }
                Ok(Owner::Device(found)) => format!("memory of cuda:{found}"),
                // Pinned host memory is mapped into the device's address space, but reading it a row at a time
                // over the bus is never what was meant.
                Ok(Owner::Host) => "pinned host memory".to_owned(),
                Ok(Owner::Unknown) | Err(_) => "not memory the CUDA driver knows".to_owned(),
            };
            return Err(
                ArgumentError::ForeignMemory { tensor, address, found, wanted: format!("cuda:{ordinal}") }.into()
            );
        }
        Ok(())
    }

    /// Every kernel that the bundles hold for this device, by symbol.
    pub fn kernels(&self) -> Vec<String> {
        let bundles = self.bundles();
        let records = bundles.iter().flat_map(|bundle| &bundle.manifest().kernels);
        records.filter(|record| record.family == self.family).map(|record| record.symbol.clone()).collect()
    }
}

/// Refuses a bundle with a kernel that one of `bundles` has.
fn add_bundle(bundles: &mut Vec<Bundle>, bundle: Bundle) -> Result<(), CustomVariantError> {
    let taken: HashSet<&str> = bundles.iter().flat_map(symbols).collect();
    if let Some(symbol) = symbols(&bundle).find(|symbol| taken.contains(symbol)) {
        return Err(CustomVariantError::AlreadyLoaded { symbol: symbol.to_owned() });
    }
    bundles.push(bundle);
    Ok(())
}

fn symbols(bundle: &Bundle) -> impl Iterator<Item = &str> {
    bundle.manifest().kernels.iter().map(|record| record.symbol.as_str())
}

/// As [`Cuda::custom_variant`], on a device of `family`.
fn custom_variant(
    bundles: &[Bundle],
    family: Family,
    variant: &'static str,
    config: &AttentionConfig,
) -> Result<CustomKernels, CustomVariantError> {
    let named = |bundle: &Bundle| bundle.manifest().variants.iter().find(|record| record.name == variant).cloned();
    let Some((bundle, record)) = bundles.iter().find_map(|bundle| Some((bundle, named(bundle)?))) else {
        let variants = bundles.iter().flat_map(|bundle| &bundle.manifest().variants);
        return Err(CustomVariantError::NotLoaded {
            variant,
            loaded: variants.map(|record| record.name.clone()).collect(),
        });
    };
    let symbol = config.attend_symbol();
    let Some(kernel) = bundle.kernel(&symbol, family) else {
        let prefix = format!("attend_{variant}_");
        let records = bundle.manifest().kernels.iter().filter(|record| record.family == family);
        let built = records.map(|record| record.symbol.clone()).filter(|symbol| symbol.starts_with(&prefix)).collect();
        return Err(CustomVariantError::NotBuilt { variant, symbol, family: family.name(), built });
    };
    let tile = AttendTile::new(config.attend_head_dim(), family).expect("validated head dims have a tile");
    let bounds = |threads, blocks_per_multiprocessor, shared_bytes| LaunchBounds {
        threads,
        blocks_per_multiprocessor,
        shared_bytes,
    };
    check_bounds(&symbol, kernel.launch, bounds(tile.threads(), tile.blocks_per_multiprocessor, tile.shared_bytes()))?;
    let prefill = config.prefill_tile().and_then(|tile| {
        let symbol = config.prefill_symbol(tile);
        Some((tile, bundle.kernel(&symbol, family)?, symbol))
    });
    if let Some((tile, kernel, symbol)) = &prefill {
        check_bounds(symbol, kernel.launch, bounds(tile.threads(), 1, tile.shared_bytes()))?;
    }
    Ok(CustomKernels { parameters_bytes: record.parameters_bytes, has_prefill: prefill.is_some() })
}

/// Refuses a kernel that was built for other tiles than the planner's.
fn check_bounds(symbol: &str, found: LaunchBounds, wanted: LaunchBounds) -> Result<(), CustomVariantError> {
    for (field, found, wanted) in [
        ("threads", found.threads, wanted.threads),
        ("blocks a multiprocessor", found.blocks_per_multiprocessor, wanted.blocks_per_multiprocessor),
        ("shared bytes", found.shared_bytes, wanted.shared_bytes),
    ] {
        if found != wanted {
            return Err(CustomVariantError::LaunchBounds { symbol: symbol.to_owned(), field, found, wanted });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use kernels_gpu::abi::manifest::{Header, Image, KernelRecord, LaunchBounds, Manifest, VariantRecord};
    use kernels_gpu::abi::tile::PrefillTile;

    use super::*;

    /// A bundle whose kernels are all there but for their code: of variant `near`, at head dims 64 and 128.
    fn user_bundle(change: impl FnOnce(&mut Manifest)) -> Bundle {
        let kernel = |head_dim: u32, family: Family| {
            let tile = AttendTile::new(head_dim, family).unwrap();
            KernelRecord {
                symbol: format!("attend_near_bf16_d{head_dim}"),
                family,
                image: Image::Ptx,
                launch: LaunchBounds {
                    threads: tile.threads(),
                    blocks_per_multiprocessor: tile.blocks_per_multiprocessor,
                    shared_bytes: tile.shared_bytes(),
                },
                registers: 0,
                offset_bytes: 0,
                packed_bytes: 0,
                begin_bytes: 0,
                image_bytes: 0,
            }
        };
        let mut manifest = Manifest {
            variants: vec![VariantRecord { name: "near".to_owned(), parameters_bytes: 12 }],
            kernels: vec![kernel(64, Family::Sm80), kernel(64, Family::Sm90a), kernel(128, Family::Sm90a)],
            ..Manifest::default()
        };
        change(&mut manifest);
        let text = manifest.to_string();
        Bundle::parse([&Header::write(text.len() as u32)[..], text.as_bytes()].concat()).unwrap()
    }

    #[test]
    fn a_custom_variant_is_found_where_it_is_built() {
        let bundles = vec![Bundle::parse(EMBEDDED).unwrap(), user_bundle(|_| {})];
        let find = |name, head_dim, family| {
            let config = AttentionConfig::new(8, 8, head_dim, 16).with_custom_variant(name);
            custom_variant(&bundles, family, name, &config)
        };
        let found = Ok(CustomKernels { parameters_bytes: 12, has_prefill: false });
        assert_eq!(find("near", 64, Family::Sm80), found);
        assert_eq!(find("near", 128, Family::Sm90a), found);
        let error = find("near", 128, Family::Sm80).unwrap_err().to_string();
        let expected = "custom_variant near has no kernel attend_near_bf16_d128 for sm_80; for that there are \
                        [\"attend_near_bf16_d64\"]";
        assert_eq!(error, expected);
        let error = find("far", 64, Family::Sm80).unwrap_err().to_string();
        assert_eq!(error, "custom_variant is far; the bundles loaded have [\"near\"]");
    }

    /// `near` with a prefill kernel for head dim 64 beside its attend kernels.
    fn bundle_with_prefill(change: impl FnOnce(&mut LaunchBounds)) -> Bundle {
        user_bundle(|manifest| {
            let tile = PrefillTile::new(64, 64, false).unwrap();
            let (threads, shared_bytes) = (tile.threads(), tile.shared_bytes());
            let mut launch = LaunchBounds { threads, blocks_per_multiprocessor: 1, shared_bytes };
            change(&mut launch);
            let symbol = "prefill_near_bf16_d64".to_owned();
            manifest.kernels.push(KernelRecord { symbol, launch, ..manifest.kernels[1].clone() });
        })
    }

    #[test]
    fn a_custom_variant_s_prefill_kernel_is_found_where_it_is_built() {
        let bundles = [bundle_with_prefill(|_| ())];
        let has_prefill = |head_dim, family| {
            let config = AttentionConfig::new(8, 8, head_dim, 16).with_custom_variant("near");
            custom_variant(&bundles, family, "near", &config).unwrap().has_prefill
        };
        assert!(has_prefill(64, Family::Sm90a));
        assert!(!has_prefill(64, Family::Sm80) && !has_prefill(128, Family::Sm90a));
    }

    #[test]
    fn kernels_of_another_tile_are_not_launched() {
        let other = user_bundle(|manifest| manifest.kernels[0].launch.threads = 64);
        let config = AttentionConfig::new(8, 8, 64, 16).with_custom_variant("near");
        let error = custom_variant(&[other], Family::Sm80, "near", &config).unwrap_err();
        assert!(matches!(error, CustomVariantError::LaunchBounds { field: "threads", found: 64, wanted: 128, .. }));
        let other = bundle_with_prefill(|launch| launch.shared_bytes = 1024);
        let error = custom_variant(&[other], Family::Sm90a, "near", &config).unwrap_err();
        let CustomVariantError::LaunchBounds { symbol, field: "shared bytes", found: 1024, .. } = error else {
            panic!("{error}")
        };
        assert_eq!(symbol, "prefill_near_bf16_d64");
    }

    #[test]
    fn a_bundle_takes_no_name_that_is_taken() {
        let mut bundles = vec![Bundle::parse(EMBEDDED).unwrap()];
        add_bundle(&mut bundles, user_bundle(|_| {})).unwrap();
        let error = add_bundle(&mut bundles, user_bundle(|_| {})).unwrap_err();
        assert_eq!(error, CustomVariantError::AlreadyLoaded { symbol: "attend_near_bf16_d64".to_owned() });
        let mut bundles = vec![Bundle::parse(EMBEDDED).unwrap()];
        let stock = user_bundle(|manifest| manifest.kernels[1].symbol = "attend_bf16_d64".to_owned());
        let error = add_bundle(&mut bundles, stock).unwrap_err();
        assert_eq!(error, CustomVariantError::AlreadyLoaded { symbol: "attend_bf16_d64".to_owned() });
        assert_eq!(bundles.len(), 1);
    }

    #[test]
    fn symbols_fit_and_what_does_not_is_cut() {
        let bundle = Bundle::parse(EMBEDDED).unwrap();
        for kernel in &bundle.manifest().kernels {
            let mut spelt = Spelt::new();
            write!(spelt, "{}", kernel.symbol).unwrap();
            assert_eq!(spelt.as_str(), kernel.symbol);
        }
        let mut spelt = Spelt::new();
        write!(spelt, "prefill_{}_bf16_d256", "x".repeat(kernels_gpu::custom::MOST_NAME_BYTES)).unwrap();
        let mut spelt = Spelt::new();
        assert!(write!(spelt, "attend_{}", "x".repeat(58)).is_err());
        assert_eq!(spelt.as_str(), "attend_");
    }
}
