//! `cargo xtask ptx`: kernels to PTX, PTX to the bundle.
//!
//! In: the sources of `simt` and `kernels-gpu` and the kernels' own table. Each family is compiled once
//! ([`compile`]), cut into a module for each kernel with its launch bounds written in ([`module`]), audited
//! ([`audit`]), assembled where `ptxas` is found ([`ptxas`]) and packed ([`bundle`]). Out: `host/bundle/kernels.bundle`,
//! byte for byte the same for the same input, and nothing at all when any step is surprised.

mod audit;
mod bundle;
mod compile;
mod module;
mod ptxas;
mod source;
mod toolchain;

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail, ensure};
use kernels_gpu::{
    abi::{
        manifest::{Image, KernelEntry, KernelRecord, LaunchBounds},
        tile::Family,
    },
    entries::KERNELS,
};

use self::{bundle::BuiltImage, module::Module, ptxas::Assembler, toolchain::Toolchain};

/// Where the bundle lies, from the workspace's root.
const BUNDLE: &str = "host/bundle/kernels.bundle";
/// The expected `.sync` counts, from the workspace's root.
const AUDIT: &str = "kernels-gpu/audit.txt";

#[derive(clap::Args)]
pub struct Arguments {
    /// rustup's name of the nightly toolchain.
    #[arg(long, default_value = "nightly")]
    toolchain: String,
    /// The PTX assembler; otherwise the one of the Python package nvidia-cuda-nvcc, or of PATH.
    #[arg(long)]
    ptxas: Option<PathBuf>,
    /// Also write target/ptx/kernels.bundle with machine code for this architecture, such as sm_90a.
    #[arg(long, value_name = "ARCH")]
    cubin: Vec<String>,
    /// Take the `.sync` counts of this build as the expected ones.
    #[arg(long)]
    accept_audit: bool,
    /// Write nothing: fail when the committed bundle was made from other sources.
    #[arg(long, conflicts_with_all = ["cubin", "accept_audit"])]
    check: bool,
    /// With --check: also build, and fail when the result differs from the committed bundle.
    #[arg(long, requires = "check")]
    rebuild: bool,
}

/// A kernel on its way into the bundle.
struct Built {
    entry: &'static KernelEntry,
    family: Family,
    launch: LaunchBounds,
    ptx: String,
    registers: u32,
}

pub fn run(root: &Path, arguments: &Arguments) -> Result<()> {
    let source_hash = source::hash(root)?;
    if arguments.check {
        return check(root, arguments, &source_hash);
    }
    let toolchain = Toolchain::find(&arguments.toolchain)?;
    let assembler = Assembler::find(arguments.ptxas.as_deref())?;
    let built = build(root, &toolchain, assembler.as_ref(), arguments.accept_audit)?;

    let images: Vec<BuiltImage> = built.iter().map(Built::ptx_image).collect();
    let bytes = bundle::encode(&source_hash, &toolchain.commit, images)?;
    write(&root.join(BUNDLE), &bytes)?;
    println!("{BUNDLE}: {} kernels, {} bytes, source {}", built.len(), bytes.len(), &source_hash[..16]);

    if !arguments.cubin.is_empty() {
        let assembler =
            assembler.context("--cubin needs ptxas: pip install nvidia-cuda-nvcc, or name it by --ptxas")?;
        let mut images: Vec<BuiltImage> = built.iter().map(Built::ptx_image).collect();
        for architecture in &arguments.cubin {
            images.extend(cubins(root, &built, &assembler, architecture)?);
        }
        let bytes = bundle::encode(&source_hash, &toolchain.commit, images)?;
        write(&root.join("target/ptx/kernels.bundle"), &bytes)?;
        println!("target/ptx/kernels.bundle: with machine code for {:?}, {} bytes", arguments.cubin, bytes.len());
    }
    Ok(())
}

/// Fails when the committed bundle is not what these sources make.
fn check(root: &Path, arguments: &Arguments, source_hash: &str) -> Result<()> {
    let committed = fs::read(root.join(BUNDLE)).with_context(|| format!("{BUNDLE}: run `cargo xtask ptx`"))?;
    let (manifest, committed_images) = bundle::decode(&committed)?;
    ensure!(
        manifest.source_hash == source_hash,
        "{BUNDLE} is stale: it was made from source {}, the sources here are {source_hash}; run `cargo xtask ptx`",
        manifest.source_hash
    );
    println!("{BUNDLE} is fresh: {} kernels, source {}", manifest.kernels.len(), &source_hash[..16]);
    if !arguments.rebuild {
        return Ok(());
    }
    let toolchain = Toolchain::find(&arguments.toolchain)?;
    ensure!(
        manifest.compiler == toolchain.commit,
        "{BUNDLE} was made by rustc {}, {} here is {}: a rebuild says nothing",
        manifest.compiler,
        toolchain.name,
        toolchain.commit
    );
    let assembler = Assembler::find(arguments.ptxas.as_deref())?;
    let built = build(root, &toolchain, assembler.as_ref(), false)?;
    let differing = differences(&built, &manifest.kernels, &committed_images);
    ensure!(differing.is_empty(), "a rebuild differs from {BUNDLE}:\n  {}", differing.join("\n  "));
    println!("a rebuild makes the same {} kernels", built.len());
    Ok(())
}

/// One line for each kernel that only one side has, or that the two sides have otherwise. Registers count only
/// where both sides measured them.
fn differences(built: &[Built], records: &[KernelRecord], images: &[Vec<u8>]) -> Vec<String> {
    let name = |symbol: &str, family: Family| format!("{symbol} ({})", family.name());
    let mut committed: BTreeMap<_, _> = records
        .iter()
        .zip(images)
        .map(|(record, image)| (name(&record.symbol, record.family), (record, image)))
        .collect();
    let mut lines = Vec::new();
    for kernel in built {
        let name = name(kernel.entry.symbol, kernel.family);
        match committed.remove(&name) {
            None => lines.push(format!("{name}: not in the bundle")),
            Some((_, image)) if image != kernel.ptx.as_bytes() => lines.push(format!("{name}: other PTX")),
            Some((record, _)) if record.launch != kernel.launch => lines.push(format!("{name}: other launch bounds")),
            Some((record, _))
                if record.registers != kernel.registers && record.registers != 0 && kernel.registers != 0 =>
            {
                lines.push(format!("{name}: {} registers, bundle says {}", kernel.registers, record.registers))
            }
            Some(_) => {}
        }
    }
    lines.extend(committed.into_keys().map(|name| format!("{name}: only in the bundle")));
    lines
}

/// Compiles, cuts, audits and assembles every kernel of every family.
fn build(root: &Path, toolchain: &Toolchain, assembler: Option<&Assembler>, accept_audit: bool) -> Result<Vec<Built>> {
    let mut built = Vec::new();
    let mut counts = audit::Counts::new();
    let mut problems = Vec::new();
    for family in Family::ALL {
        let ptx = compile::family(root, toolchain, family)?;
        let module = Module::parse(&ptx).with_context(|| format!("the PTX of {}", family.name()))?;
        for (entry, launch) in table(family, &module)? {
            let ptx = module.kernel(entry.symbol, &launch)?;
            let findings = audit::kernel(&ptx, entry.hot);
            problems.extend(
                findings.problems.iter().map(|problem| format!("{} ({}): {problem}", entry.symbol, family.name())),
            );
            counts.insert((family, entry.symbol.to_owned()), findings.sync);
            built.push(Built { entry, family, launch, ptx, registers: 0 });
        }
    }
    audit::compare(&root.join(AUDIT), &counts, accept_audit, &mut problems)?;
    match assembler {
        Some(assembler) => assemble(root, &mut built, assembler, &mut problems)?,
        None => eprintln!(
            "note: no ptxas here, so registers, stack and spills are unchecked \
             (pip install nvidia-cuda-nvcc, or name it by --ptxas)"
        ),
    }
    if !problems.is_empty() {
        bail!("the audit refuses this build:\n  {}", problems.join("\n  "));
    }
    Ok(built)
}

/// The rows of the table that `family` builds, each of which `module` must have, and no other.
fn table(family: Family, module: &Module) -> Result<Vec<(&'static KernelEntry, LaunchBounds)>> {
    let mut rows = Vec::new();
    for entry in KERNELS {
        let Some(launch) = (entry.launch)(family) else { continue };
        ensure!(
            module.has_kernel(entry.symbol),
            "{}: in the table for {}, not in its PTX",
            entry.symbol,
            family.name()
        );
        ensure!(
            (1..=1024).contains(&launch.threads) && launch.blocks_per_multiprocessor >= 1,
            "{} ({}): {launch:?} is no block a GPU can hold",
            entry.symbol,
            family.name()
        );
        rows.push((entry, launch));
    }
    for symbol in module.kernels() {
        ensure!(KERNELS.iter().any(|entry| entry.symbol == symbol), "{symbol}: in the PTX, not in the table");
    }
    rows.sort_by_key(|(entry, _)| entry.symbol);
    if let Some(twice) = rows.windows(2).find(|pair| pair[0].0.symbol == pair[1].0.symbol) {
        bail!("{}: twice in the table", twice[0].0.symbol);
    }
    Ok(rows)
}

/// Fills in the registers and collects what `ptxas` complains of.
fn assemble(root: &Path, built: &mut [Built], assembler: &Assembler, problems: &mut Vec<String>) -> Result<()> {
    eprintln!("assembling {} kernels by {}", built.len(), assembler.path.display());
    let folder = root.join("target/ptx/assembled");
    let jobs =
        built.iter().map(|kernel| ptxas::Job::new(&folder, kernel.entry.symbol, &kernel.ptx, kernel.family.name()));
    let assembled = assembler.run(&jobs.collect::<Vec<_>>())?;
    for (kernel, assembled) in built.iter_mut().zip(assembled) {
        let resources = assembled.resources;
        let name = format!("{} ({})", kernel.entry.symbol, kernel.family.name());
        kernel.registers = resources.registers;
        if kernel.entry.hot && resources.stack_bytes + resources.spill_bytes > 0 {
            problems
                .push(format!("{name}: {} bytes of stack, {} of spills", resources.stack_bytes, resources.spill_bytes));
        }
        problems.extend(resources.warnings.iter().map(|warning| format!("{name}: {warning}")));
        println!(
            "{name}: {} threads x {}, {} registers, {} bytes of stack, {} of spills, {} of PTX",
            kernel.launch.threads,
            kernel.launch.blocks_per_multiprocessor,
            resources.registers,
            resources.stack_bytes,
            resources.spill_bytes,
            kernel.ptx.len()
        );
    }
    Ok(())
}

/// Machine code of every kernel that `architecture` runs.
fn cubins(root: &Path, built: &[Built], assembler: &Assembler, architecture: &str) -> Result<Vec<BuiltImage>> {
    let family = if architecture == Family::Sm90a.name() { Family::Sm90a } else { Family::Sm80 };
    let kernels: Vec<&Built> = built.iter().filter(|kernel| kernel.family == family).collect();
    let folder = root.join("target/ptx/cubin");
    let jobs = kernels.iter().map(|kernel| ptxas::Job::new(&folder, kernel.entry.symbol, &kernel.ptx, architecture));
    let assembled = assembler.run(&jobs.collect::<Vec<_>>())?;
    let images = kernels.iter().zip(assembled).map(|(kernel, assembled)| BuiltImage {
        image: Image::Cubin(architecture.to_owned()),
        registers: assembled.resources.registers,
        bytes: assembled.cubin,
        ..kernel.ptx_image()
    });
    Ok(images.collect())
}

impl Built {
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

fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder)?;
    }
    fs::write(path, bytes).with_context(|| format!("cannot write {}", path.display()))
}
