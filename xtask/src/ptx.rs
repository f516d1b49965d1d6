//! `cargo xtask ptx`: oxattn's own kernels to PTX, PTX to the bundle.
//!
//! In: the sources of `simt` and `kernels-gpu` and the kernels' own table. Out: `host/bundle/kernels.bundle`, by
//! [`oxattn_build`], and nothing at all when any step is surprised.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, ensure};
use kernels_gpu::entries::KERNELS;
use oxattn_build::{Assembler, Build, DeviceCrate, Toolchain, bundle, write};

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

pub fn run(root: &Path, arguments: &Arguments) -> Result<()> {
    if arguments.check {
        return check(root, arguments);
    }
    let toolchain = Toolchain::find(&arguments.toolchain)?;
    let assembler = Assembler::find(arguments.ptxas.as_deref())?;
    let built = build(root, &toolchain, assembler.as_ref(), arguments.accept_audit)?;
    let bytes = built.write(&root.join(BUNDLE))?;
    println!("{BUNDLE}: {} kernels, {bytes} bytes, source {}", built.kernels.len(), &built.source_hash[..16]);

    if !arguments.cubin.is_empty() {
        let assembler =
            assembler.context("--cubin needs ptxas: pip install nvidia-cuda-nvcc, or name it by --ptxas")?;
        let bytes = built.bundle_with_cubins(&assembler, &arguments.cubin)?;
        write(&root.join("target/ptx/kernels.bundle"), &bytes)?;
        println!("target/ptx/kernels.bundle: with machine code for {:?}, {} bytes", arguments.cubin, bytes.len());
    }
    Ok(())
}

/// Fails when the committed bundle is not what these sources make.
fn check(root: &Path, arguments: &Arguments) -> Result<()> {
    let source_hash = device_crate(root, false).source_hash()?;
    let committed = fs::read(root.join(BUNDLE)).with_context(|| format!("{BUNDLE}: run `cargo xtask ptx`"))?;
    let (manifest, committed_images) =
        bundle::decode(&committed).with_context(|| format!("{BUNDLE}: run `cargo xtask ptx`"))?;
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
    let differing = built.differences(&manifest, &committed_images);
    ensure!(differing.is_empty(), "a rebuild differs from {BUNDLE}:\n  {}", differing.join("\n  "));
    println!("a rebuild makes the same {} kernels", built.kernels.len());
    Ok(())
}

fn device_crate(root: &Path, accept_audit: bool) -> DeviceCrate {
    let (folder, work) = (root.join("kernels-gpu"), root.join("target/ptx"));
    DeviceCrate::new(folder, work).features("entries").kernels(KERNELS).expected_syncs(root.join(AUDIT), accept_audit)
}

fn build(root: &Path, toolchain: &Toolchain, assembler: Option<&Assembler>, accept_audit: bool) -> Result<Build> {
    Ok(device_crate(root, accept_audit).build(toolchain, assembler, &mut |line| eprintln!("{line}"))?)
}
