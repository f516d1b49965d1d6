//! From a crate of kernels to the bundle that oxattn loads, for `build.rs`, an xtask or a program of your own.
//!
//! In: a device crate, which is oxattn's own `kernels-gpu` or a crate of user-defined variants, and its table of
//! kernels. Each family is compiled once (`compile`), cut into a module for each kernel with its launch bounds written
//! in (`module`), audited ([`audit`]), assembled where `ptxas` is found ([`ptxas`]) and packed ([`bundle`]). Out: a
//! [`Build`], byte for byte the same for the same input, or a [`BuildError`] that says what is missing and how to get
//! it. Nothing is printed; what is going on is told to the caller's `note`.
//!
//! docs/user-variants.md walks through a crate of variants, docs/toolchain.md says what is installed and why.

pub mod audit;
pub mod bundle;
pub mod command;
mod compile;
mod error;
mod module;
pub mod ptxas;
mod source;
pub mod toolchain;

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use kernels_gpu::abi::{
    manifest::{Image, KernelEntry, KernelRecord, LaunchBounds, Manifest, VariantRecord},
    tile::Family,
};
use kernels_gpu::custom::CustomVariant;

use bundle::BuiltImage;
use module::Module;

pub use error::BuildError;
pub use ptxas::Assembler;
pub use toolchain::Toolchain;

/// A crate of kernels, and what it has.
#[derive(Clone, Debug)]
pub struct DeviceCrate {
    folder: PathBuf,
    work: PathBuf,
    features: String,
    kernels: Vec<KernelEntry>,
    variants: Vec<VariantRecord>,
    /// The file of expected `.sync` counts, and whether to write it.
    audit: Option<(PathBuf, bool)>,
}

/// Compiled kernels.
#[derive(Clone, Debug)]
pub struct Build {
    /// Hash of the sources and flags.
    pub source_hash: String,
    /// The compiler's commit hash.
    pub compiler: String,
    /// A kernel for each family it is built for.
    pub kernels: Vec<BuiltKernel>,
    /// Why kernels that oxattn does without were left out, one a line.
    pub left_out: Vec<String>,
    /// The user-defined variants that they are of.
    pub variants: Vec<VariantRecord>,
    work: PathBuf,
}

/// A kernel on its way into the bundle.
#[derive(Clone, Debug)]
pub struct BuiltKernel {
    /// Its row of the table.
    pub entry: KernelEntry,
    /// What it was built for.
    pub family: Family,
    /// How it is launched there.
    pub launch: LaunchBounds,
    /// Its module.
    pub ptx: String,
    /// Registers a thread; 0 where there was no assembler.
    pub registers: u32,
}

impl DeviceCrate {
    /// The crate in `folder`, which has a Cargo.toml. `work` is for all that is made on the way, `core` among it, and
    /// makes the next build quick: a folder under the target folder, or a build script's `OUT_DIR`.
    pub fn new(folder: impl Into<PathBuf>, work: impl Into<PathBuf>) -> DeviceCrate {
        let (folder, work) = (folder.into(), work.into());
        DeviceCrate { folder, work, features: String::new(), kernels: Vec::new(), variants: Vec::new(), audit: None }
    }

    /// The same with the kernels of a table.
    pub fn kernels(mut self, kernels: &[KernelEntry]) -> DeviceCrate {
        self.kernels.extend_from_slice(kernels);
        self
    }

    /// The same with a variant that the crate makes kernels of.
    pub fn variant<V: CustomVariant>(mut self) -> DeviceCrate {
        self.variants.push(VariantRecord { name: V::NAME.to_owned(), parameters_bytes: size_of::<V::Parameters>() });
        V::KERNELS.iter().fold(self, |device, kernels| device.kernels(kernels))
    }

    /// The same with features of the crate switched on, by a comma apart. Its default features are always off.
    pub fn features(self, features: impl Into<String>) -> DeviceCrate {
        DeviceCrate { features: features.into(), ..self }
    }

    /// The same with a file of the `.sync` counts that a build must have, or, with `accept`, that it writes.
    pub fn expected_syncs(self, file: impl Into<PathBuf>, accept: bool) -> DeviceCrate {
        DeviceCrate { audit: Some((file.into(), accept)), ..self }
    }

    /// Every file that the kernels are made from: a build script prints a `cargo::rerun-if-changed` for each.
    pub fn source_files(&self) -> Result<Vec<PathBuf>, BuildError> {
        Ok(self.sources()?.files()?.into_iter().map(|(_, path)| path).collect())
    }

    /// Hash of those files and of the compiler's flags. It needs no nightly.
    pub fn source_hash(&self) -> Result<String, BuildError> {
        self.sources()?.hash()
    }

    fn sources(&self) -> Result<source::Sources, BuildError> {
        source::Sources::find(&self.folder.join("Cargo.toml"))
    }

    /// Compiles, cuts, audits and assembles every kernel for every family; `note` gets a line for each step and for each
    /// kernel that was assembled. A prefill kernel of a user-defined variant that is refused, as the variant takes more
    /// registers than there are, is left out: its batches then have the attend kernel.
    pub fn build(
        &self,
        toolchain: &Toolchain,
        assembler: Option<&Assembler>,
        note: &mut dyn FnMut(&str),
    ) -> Result<Build, BuildError> {
        if let Some(warning) = toolchain.warning() {
            note(&warning);
        }
        let sources = self.sources()?;
        let folder = fs::canonicalize(&self.folder).map_err(BuildError::file(&self.folder))?;
        fs::create_dir_all(&self.work).map_err(BuildError::file(&self.work))?;
        let work = fs::canonicalize(&self.work).map_err(BuildError::file(&self.work))?;
        let name = sources.packages.iter().find(|(_, of)| fs::canonicalize(of).is_ok_and(|of| of == folder));
        let name = name.map_or_else(|| folder.display().to_string(), |(name, _)| name.clone());
        let (workspace, features) = (sources.workspace.as_path(), self.features.as_str());
        let device = compile::Crate { folder: &folder, name: &name, workspace, features, work: &work };

        let mut built = Vec::new();
        let mut counts = audit::Counts::new();
        let mut problems = Vec::new();
        for family in Family::ALL {
            let ptx = compile::family(&device, toolchain, family, note)?;
            let odd = |reason| BuildError::Ptx { family, reason };
            let module = Module::parse(&ptx).map_err(odd)?;
            for (entry, launch) in table(&self.kernels, family, &module)? {
                let ptx = module.kernel(entry.symbol, &launch).map_err(odd)?;
                let findings = audit::kernel(&ptx, entry.hot);
                counts.insert((family, entry.symbol.to_owned()), findings.sync);
                built.push((BuiltKernel { entry, family, launch, ptx, registers: 0 }, findings.problems));
            }
        }
        if let Some((file, accept)) = &self.audit {
            audit::compare(file, &counts, *accept, &mut problems)?;
        }
        match assembler {
            Some(assembler) => assemble(&work, &mut built, assembler, note)?,
            None => note(
                "note: no ptxas here, so registers, stack and spills are unchecked \
                 (pip install nvidia-cuda-nvcc, or name one)",
            ),
        }
        let (kernels, left_out) = judge(built, &mut problems);
        if !problems.is_empty() {
            return Err(BuildError::Refused { problems });
        }
        left_out.iter().for_each(|reason| note(&format!("left out: {reason}")));
        let (source_hash, compiler) = (sources.hash()?, toolchain.commit.clone());
        Ok(Build { source_hash, compiler, kernels, left_out, variants: self.variants.clone(), work })
    }
}

/// The rows of the table that `family` builds, sorted, each of which `module` must have, and no other.
fn table(
    kernels: &[KernelEntry],
    family: Family,
    module: &Module,
) -> Result<Vec<(KernelEntry, LaunchBounds)>, BuildError> {
    let odd = |symbol: &str, reason: String| BuildError::Table { symbol: symbol.to_owned(), family, reason };
    let mut rows = Vec::new();
    for entry in kernels {
        let Some(launch) = (entry.launch)(family) else { continue };
        if !module.has_kernel(entry.symbol) {
            return Err(odd(entry.symbol, "in the table, not in the PTX".to_owned()));
        }
        if !(1..=1024).contains(&launch.threads) || launch.blocks_per_multiprocessor == 0 {
            return Err(odd(entry.symbol, format!("{launch:?} is no block a GPU can hold")));
        }
        rows.push((*entry, launch));
    }
    if let Some(symbol) = module.kernels().find(|symbol| kernels.iter().all(|entry| entry.symbol != *symbol)) {
        return Err(odd(symbol, "in the PTX, not in the table".to_owned()));
    }
    rows.sort_by_key(|(entry, _)| entry.symbol);
    if let Some(twice) = rows.windows(2).find(|pair| pair[0].0.symbol == pair[1].0.symbol) {
        return Err(odd(twice[0].0.symbol, "twice in the table".to_owned()));
    }
    Ok(rows)
}

/// Fills in the registers and adds what `ptxas` complains of to each kernel's complaints.
fn assemble(
    work: &Path,
    built: &mut [(BuiltKernel, Vec<String>)],
    assembler: &Assembler,
    note: &mut dyn FnMut(&str),
) -> Result<(), BuildError> {
    note(&format!("assembling {} kernels by {}", built.len(), assembler.path.display()));
    let folder = work.join("assembled");
    let jobs = built
        .iter()
        .map(|(kernel, _)| ptxas::Job::new(&folder, kernel.entry.symbol, &kernel.ptx, kernel.family.name()));
    let assembled = assembler.run(&jobs.collect::<Vec<_>>())?;
    for ((kernel, complaints), assembled) in built.iter_mut().zip(assembled) {
        let resources = assembled.resources;
        kernel.registers = resources.registers;
        if kernel.entry.hot && resources.stack_bytes + resources.spill_bytes > 0 {
            complaints.push(format!("{} bytes of stack, {} of spills", resources.stack_bytes, resources.spill_bytes));
        }
        complaints.extend(resources.warnings);
        note(&format!(
            "{} ({}): {} threads x {}, {} registers, {} bytes of stack, {} of spills, {} of PTX",
            kernel.entry.symbol,
            kernel.family.name(),
            kernel.launch.threads,
            kernel.launch.blocks_per_multiprocessor,
            resources.registers,
            resources.stack_bytes,
            resources.spill_bytes,
            kernel.ptx.len()
        ));
    }
    Ok(())
}

/// The kernels to keep, and why others are left out; what needed kernels are refused for is added to `problems`.
fn judge(built: Vec<(BuiltKernel, Vec<String>)>, problems: &mut Vec<String>) -> (Vec<BuiltKernel>, Vec<String>) {
    let (mut kept, mut left_out) = (Vec::new(), Vec::new());
    for (kernel, complaints) in built {
        let name = format!("{} ({})", kernel.entry.symbol, kernel.family.name());
        let complaints = complaints.into_iter().map(|complaint| format!("{name}: {complaint}"));
        let before = left_out.len();
        if kernel.entry.needed { &mut *problems } else { &mut left_out }.extend(complaints);
        if left_out.len() == before {
            kept.push(kernel);
        }
    }
    (kept, left_out)
}

impl Build {
    /// The bundle's bytes.
    pub fn bundle(&self) -> Result<Vec<u8>, BuildError> {
        self.encode(self.images())
    }

    /// The same with machine code for `architectures`, such as `sm_90a`, beside the PTX.
    pub fn bundle_with_cubins(&self, assembler: &Assembler, architectures: &[String]) -> Result<Vec<u8>, BuildError> {
        let mut images = self.images();
        for architecture in architectures {
            images.extend(self.cubins(assembler, architecture)?);
        }
        self.encode(images)
    }

    /// Writes the bundle, and its folder where there is none. Returns its length in bytes.
    pub fn write(&self, path: &Path) -> Result<usize, BuildError> {
        let bytes = self.bundle()?;
        write(path, &bytes)?;
        Ok(bytes.len())
    }

    /// One line for each kernel that only one side has, or that the two sides have otherwise. Registers count only
    /// where both sides measured them.
    pub fn differences(&self, other: &Manifest, images: &[Vec<u8>]) -> Vec<String> {
        let name = |symbol: &str, family: Family| format!("{symbol} ({})", family.name());
        let mut others: BTreeMap<String, (&KernelRecord, &Vec<u8>)> = other
            .kernels
            .iter()
            .zip(images)
            .map(|(record, image)| (name(&record.symbol, record.family), (record, image)))
            .collect();
        let mut lines = Vec::new();
        for kernel in &self.kernels {
            let name = name(kernel.entry.symbol, kernel.family);
            match others.remove(&name) {
                None => lines.push(format!("{name}: not in the bundle")),
                Some((_, image)) if image != kernel.ptx.as_bytes() => lines.push(format!("{name}: other PTX")),
                Some((record, _)) if record.launch != kernel.launch => {
                    lines.push(format!("{name}: other launch bounds"))
                }
                Some((record, _))
                    if record.registers != kernel.registers && record.registers != 0 && kernel.registers != 0 =>
                {
                    lines.push(format!("{name}: {} registers, bundle says {}", kernel.registers, record.registers))
                }
                Some(_) => {}
            }
        }
        lines.extend(others.into_keys().map(|name| format!("{name}: only in the bundle")));
        lines
    }

    fn images(&self) -> Vec<BuiltImage> {
        self.kernels.iter().map(BuiltKernel::ptx_image).collect()
    }

    fn encode(&self, images: Vec<BuiltImage>) -> Result<Vec<u8>, BuildError> {
        bundle::encode(&self.source_hash, &self.compiler, &self.variants, images)
    }

    /// Machine code of every kernel that `architecture` runs.
    fn cubins(&self, assembler: &Assembler, architecture: &str) -> Result<Vec<BuiltImage>, BuildError> {
        let family = if architecture == Family::Sm90a.name() { Family::Sm90a } else { Family::Sm80 };
        let kernels: Vec<&BuiltKernel> = self.kernels.iter().filter(|kernel| kernel.family == family).collect();
        let folder = self.work.join("cubin");
        let jobs =
            kernels.iter().map(|kernel| ptxas::Job::new(&folder, kernel.entry.symbol, &kernel.ptx, architecture));
        let assembled = assembler.run(&jobs.collect::<Vec<_>>())?;
        let images = kernels.iter().zip(assembled).map(|(kernel, assembled)| BuiltImage {
            image: Image::Cubin(architecture.to_owned()),
            registers: assembled.resources.registers,
            bytes: assembled.cubin,
            ..kernel.ptx_image()
        });
        Ok(images.collect())
    }
}

impl BuiltKernel {
    fn ptx_image(&self) -> BuiltImage {
        BuiltImage {
            symbol: self.entry.symbol.to_owned(),
            family: self.family,
            image: Image::Ptx,
            launch: self.launch,
            registers: self.registers,
            bytes: self.ptx.clone().into_bytes(),
        }
    }
}

/// Writes a file, and its folder where there is none.
pub fn write(path: &Path, bytes: &[u8]) -> Result<(), BuildError> {
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder).map_err(BuildError::file(folder))?;
    }
    fs::write(path, bytes).map_err(BuildError::file(path))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn built(symbol: &'static str, needed: bool, complaints: &[&str]) -> (BuiltKernel, Vec<String>) {
        let entry = KernelEntry { symbol, launch: |_| None, hot: true, needed };
        let launch = LaunchBounds { threads: 96, blocks_per_multiprocessor: 3, shared_bytes: 0 };
        let kernel = BuiltKernel { entry, family: Family::Sm90a, launch, ptx: String::new(), registers: 0 };
        (kernel, complaints.iter().map(|&complaint| complaint.to_owned()).collect())
    }

    #[test]
    fn a_refused_kernel_fails_the_build_only_where_it_is_needed() {
        let table = vec![
            built("attend_near", true, &["2 calls"]),
            built("prefill_far", false, &["1 calls", "8 bytes of spills"]),
            built("attend_far", true, &[]),
            built("prefill_near", false, &[]),
        ];
        let mut problems = vec!["before".to_owned()];
        let (kept, left_out) = judge(table, &mut problems);
        assert_eq!(problems, ["before", "attend_near (sm_90a): 2 calls"]);
        assert_eq!(left_out, ["prefill_far (sm_90a): 1 calls", "prefill_far (sm_90a): 8 bytes of spills"]);
        let kept: Vec<&str> = kept.iter().map(|kernel| kernel.entry.symbol).collect();
        assert_eq!(kept, ["attend_near", "attend_far", "prefill_near"]);
    }
}
