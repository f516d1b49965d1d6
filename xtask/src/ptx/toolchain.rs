//! The nightly compiler and the library source: found, checked, or named as missing.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail};

use crate::command::capture;

/// The compiler the kernels were written and measured with: 1.97.0-nightly of 2026-05-19, LLVM 22.1.4.
const EXPECTED_COMMIT: &str = "e50aa6fba4e63ab34c72bf9acfd2c307c1155d1a";
/// Names another folder of library source: the one that holds `core/src/lib.rs`.
const SOURCE_VARIABLE: &str = "OXATTN_RUST_SRC";

pub struct Toolchain {
    /// rustup's name.
    pub name: String,
    /// `rustc`'s commit hash.
    pub commit: String,
    /// The folder that holds `core/src/lib.rs`.
    pub library: PathBuf,
}

impl Toolchain {
    /// The toolchain rustup knows by `name`, with its library source.
    pub fn find(name: &str) -> Result<Toolchain> {
        let version = capture(tool("rustc", name).arg("-vV"))
            .with_context(|| format!("device code needs a nightly rustc: `rustup toolchain install {name}`"))?
            .stdout;
        let line = |key: &str| version.lines().find_map(|line| line.strip_prefix(key)).unwrap_or("unknown").trim();
        let commit = line("commit-hash:");
        let release = line("release:");
        if commit != EXPECTED_COMMIT {
            eprintln!(
                "warning: {name} is rustc {release}, commit {commit}; the kernels were measured with commit \
                 {EXPECTED_COMMIT} (2026-05-19). Check registers, spills and the audit with care."
            );
        }
        let sysroot = PathBuf::from(capture(tool("rustc", name).args(["--print", "sysroot"]))?.stdout.trim());
        let library = library(&sysroot, release, name)?;
        Ok(Toolchain { name: name.to_owned(), commit: commit.to_owned(), library })
    }

    /// `rustc` or `cargo` of this toolchain, free of what the outer cargo put into the environment.
    pub fn tool(&self, program: &str) -> Command {
        tool(program, &self.name)
    }
}

fn tool(program: &str, toolchain: &str) -> Command {
    let mut command = Command::new(program);
    command.arg(format!("+{toolchain}")).env("RUST_BACKTRACE", "0");
    for variable in [
        "RUSTC",
        "RUSTC_WRAPPER",
        "RUSTC_WORKSPACE_WRAPPER",
        "RUSTFLAGS",
        "CARGO_ENCODED_RUSTFLAGS",
        "CARGO_TARGET_DIR",
    ] {
        command.env_remove(variable);
    }
    command
}

/// The first folder of library source there is: the named one, rustup's rust-src, Debian's package rust-src.
fn library(sysroot: &Path, release: &str, toolchain: &str) -> Result<PathBuf> {
    if let Some(named) = env::var_os(SOURCE_VARIABLE) {
        let named = PathBuf::from(named);
        return [named.join("library"), named.clone()]
            .into_iter()
            .find(|folder| holds_core(folder))
            .with_context(|| format!("{SOURCE_VARIABLE} is {}, which holds no core/src/lib.rs", named.display()));
    }
    let component = sysroot.join("lib/rustlib/src/rust/library");
    if holds_core(&component) {
        return Ok(component);
    }
    // Only a source of the compiler's own minor version has a chance to build.
    let minor: String = release.split('.').take(2).collect::<Vec<_>>().join(".");
    let packaged = fs::read_dir("/usr/src").into_iter().flatten().flatten().map(|entry| entry.path()).filter(|path| {
        path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(&format!("rustc-{minor}.")))
    });
    if let Some(folder) = packaged.map(|path| path.join("library")).filter(|folder| holds_core(folder)).max() {
        return Ok(folder);
    }
    bail!(
        "no library source for {toolchain} ({release}). Looked for core/src/lib.rs in {}, and in rustc-{minor}.*/library \
         under /usr/src. Run `rustup component add rust-src --toolchain {toolchain}`, or install a package rust-src of \
         that version, or set {SOURCE_VARIABLE} to a folder that holds core/src/lib.rs",
        component.display()
    )
}

fn holds_core(folder: &Path) -> bool {
    folder.join("core/src/lib.rs").is_file()
}
