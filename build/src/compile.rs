//! One family's PTX: `core` by plain rustc into a sysroot of our own, then the kernels by cargo.
//!
//! In: the toolchain and its library source. Out: the text rustc writes for the whole crate, made again only when
//! something changed. `core` is not taken from `-Zbuild-std`, so the library source may lie anywhere and the
//! toolchain's own sysroot stays as it is. docs/toolchain.md gives the reason for each flag.

use std::{
    fs,
    path::{Path, PathBuf},
};

use kernels_gpu::abi::tile::Family;
use sha2::{Digest, Sha256};

use crate::{
    command::{capture, shown},
    error::BuildError,
    toolchain::Toolchain,
};

/// rustc's name of a GPU.
pub const TARGET: &str = "nvptx64-nvidia-cuda";

/// rustc's flags for a family, the same for `core` and the kernels.
pub fn flags(family: Family) -> Vec<&'static str> {
    let machine = match family {
        Family::Sm80 => ["-Ctarget-cpu=sm_80", "-Ctarget-feature=+ptx75"],
        Family::Sm90a => ["-Ctarget-cpu=sm_90a", "-Ctarget-feature=+ptx80"],
    };
    let common = [
        "-Zunstable-options",
        "-Copt-level=3",
        "-Cdebuginfo=0",
        // A bounds check becomes a trap: no panic message, no call.
        "-Cpanic=immediate-abort",
        // These two keep LLVM from copying a collective into both arms of a branch.
        "-Cllvm-args=-simplifycfg-max-small-block-size=0",
        "-Cllvm-args=-jump-threading-threshold=0",
        // The kernels say what they unroll.
        "-Cllvm-args=-unroll-runtime=false",
        "-Cllvm-args=-unroll-threshold=2000",
        "-Cllvm-args=-fp-contract=fast",
        // A closure that holds register arrays must not become a call, whatever its size.
        "-Cllvm-args=-inline-threshold=100000",
    ];
    machine.into_iter().chain(common).collect()
}

/// The crate to compile.
pub struct Crate<'a> {
    /// Its folder.
    pub folder: &'a Path,
    /// Its name, for messages.
    pub name: &'a str,
    /// The workspace it belongs to, whose path is kept out of the text.
    pub workspace: &'a Path,
    /// Features to switch on.
    pub features: &'a str,
    /// Where everything on the way is kept.
    pub work: &'a Path,
}

/// Compiles a device crate for `family`.
pub fn family(
    device: &Crate<'_>,
    toolchain: &Toolchain,
    family: Family,
    note: &mut dyn FnMut(&str),
) -> Result<String, BuildError> {
    let folder = device.work.join(family.name());
    let sysroot = core_sysroot(device.work, toolchain, family, note)?;
    let ptx = folder.join("kernels.ptx");
    let mut rustflags: Vec<String> = flags(family).into_iter().map(String::from).collect();
    rustflags.push(format!("--sysroot={}", sysroot.display()));
    rustflags.push(format!("--remap-path-prefix={}=oxattn", device.workspace.display()));
    // The backend writes PTX itself; there is nothing to link.
    rustflags.extend(["-Clinker-flavor=llbc", "-Clinker=true"].map(String::from));

    let mut cargo = toolchain.tool("cargo");
    cargo.current_dir(device.folder).env("CARGO_ENCODED_RUSTFLAGS", rustflags.join("\x1f"));
    cargo.args(["rustc", "--no-default-features", "--features", device.features, "--lib", "--crate-type", "cdylib"]);
    cargo.args(["--target", TARGET, "--release", "--quiet", "--target-dir"]).arg(&folder);
    for setting in ["opt-level=3", "lto=\"fat\"", "codegen-units=1", "debug=false", "incremental=false"] {
        cargo.arg("--config").arg(format!("profile.release.{setting}"));
    }
    cargo.arg("--").arg(format!("--emit=asm={}", ptx.display()));
    note(&format!("compiling {} for {}", device.name, family.name()));
    note(&format!("$ {}", shown(&cargo)));
    let printed = capture(&mut cargo)?.stderr;
    if !printed.is_empty() {
        note(printed.trim_end());
    }
    // cargo passes over a crate that has not changed, so a text that someone removed is not written again.
    fs::read_to_string(&ptx).map_err(BuildError::file(&ptx))
}

/// A folder for `--sysroot` that holds `core`, built once for a compiler, a source and a set of flags.
fn core_sysroot(
    work: &Path,
    toolchain: &Toolchain,
    family: Family,
    note: &mut dyn FnMut(&str),
) -> Result<PathBuf, BuildError> {
    let mut key = Sha256::new();
    key.update(format!("{} {} {:?}", toolchain.commit, toolchain.library.display(), flags(family)));
    let key: String = key.finalize()[..6].iter().map(|byte| format!("{byte:02x}")).collect();
    let sysroot = work.join(format!("core-{}-{key}", family.name()));
    let finished = sysroot.join("finished");
    if finished.is_file() {
        return Ok(sysroot);
    }
    let libraries = sysroot.join("lib/rustlib").join(TARGET).join("lib");
    fs::create_dir_all(&libraries).map_err(BuildError::file(&libraries))?;
    // rustc asks for the crate by name; the target needs none of its functions.
    let builtins = sysroot.join("compiler_builtins.rs");
    let text = "#![feature(no_core, compiler_builtins)]\n#![no_core]\n#![compiler_builtins]\n\
                #![allow(internal_features)]\nextern crate core;\n";
    fs::write(&builtins, text).map_err(BuildError::file(&builtins))?;
    note(&format!("compiling core for {} from {}", family.name(), toolchain.library.display()));
    for (library, source) in [("core", toolchain.library.join("core/src/lib.rs")), ("compiler_builtins", builtins)] {
        let mut rustc = toolchain.tool("rustc");
        rustc.args(["--target", TARGET, "--edition", "2024", "--crate-type", "rlib", "--cap-lints", "allow"]);
        rustc.args(flags(family)).args(["-Zforce-unstable-if-unmarked", "--crate-name", library]).arg(source);
        rustc.arg(format!("--remap-path-prefix={}=library", toolchain.library.display()));
        rustc.arg("--sysroot").arg(&sysroot).arg("--out-dir").arg(&libraries);
        // `#![no_core]` with `#![compiler_builtins]` is for the standard library's own build.
        rustc.env("RUSTC_BOOTSTRAP", "1");
        let folder = &toolchain.library;
        capture(&mut rustc).map_err(|source| BuildError::LibrarySource { library, folder: folder.clone(), source })?;
    }
    fs::write(&finished, "").map_err(BuildError::file(&finished))?;
    Ok(sysroot)
}
