//! The nightly compiler and the library source: found, checked, or named as missing.

use std::{
    env,
    ffi::OsString,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use crate::{command::capture, error::BuildError};

/// The compiler the kernels were written and measured with: 1.97.0-nightly of 2026-05-19, LLVM 22.1.4.
const EXPECTED_COMMIT: &str = "e50aa6fba4e63ab34c72bf9acfd2c307c1155d1a";
/// Names another folder of library source: the one that holds `core/src/lib.rs`.
const SOURCE_VARIABLE: &str = "OXATTN_RUST_SRC";

/// A nightly compiler with its library source.
#[derive(Clone, Debug)]
pub struct Toolchain {
    /// rustup's name.
    pub name: String,
    /// `rustc`'s release, such as `1.97.0-nightly`.
    pub release: String,
    /// `rustc`'s commit hash.
    pub commit: String,
    /// The folder that holds `core/src/lib.rs`.
    pub library: PathBuf,
}

impl Toolchain {
    /// The toolchain rustup knows by `name`, with its library source.
    pub fn find(name: &str) -> Result<Toolchain, BuildError> {
        let version = capture(tool("rustc", name).arg("-vV"))
            .map_err(|source| BuildError::NoToolchain { toolchain: name.to_owned(), source })?
            .stdout;
        let line = |key: &str| version.lines().find_map(|line| line.strip_prefix(key)).unwrap_or("unknown").trim();
        let commit = line("commit-hash:");
        let release = line("release:");
        if !release.contains("nightly") && !release.contains("dev") {
            return Err(BuildError::NotNightly { toolchain: name.to_owned(), release: release.to_owned() });
        }
        let sysroot = PathBuf::from(capture(tool("rustc", name).args(["--print", "sysroot"]))?.stdout.trim());
        let library = library(env::var_os(SOURCE_VARIABLE), &sysroot, release, name)?;
        Ok(Toolchain { name: name.to_owned(), release: release.to_owned(), commit: commit.to_owned(), library })
    }

    /// What to be careful about, where the compiler is another one than the kernels were measured with.
    pub fn warning(&self) -> Option<String> {
        let Toolchain { name, release, commit, .. } = self;
        (commit != EXPECTED_COMMIT).then(|| {
            format!(
                "warning: {name} is rustc {release}, commit {commit}; the kernels were measured with commit \
                 {EXPECTED_COMMIT} (2026-05-19). Check registers, spills and the audit with care."
            )
        })
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
fn library(named: Option<OsString>, sysroot: &Path, release: &str, toolchain: &str) -> Result<PathBuf, BuildError> {
    if let Some(named) = named {
        let named = PathBuf::from(named);
        return [named.join("library"), named.clone()]
            .into_iter()
            .find(|folder| holds_core(folder))
            .ok_or(BuildError::NotLibrarySource { variable: SOURCE_VARIABLE, folder: named });
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
    Err(BuildError::NoLibrarySource {
        toolchain: toolchain.to_owned(),
        release: release.to_owned(),
        minor,
        component,
        variable: SOURCE_VARIABLE,
    })
}

fn holds_core(folder: &Path) -> bool {
    folder.join("core/src/lib.rs").is_file()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_is_named_with_its_remedy() {
        let missing = Toolchain::find("oxattn-no-such-toolchain").unwrap_err();
        assert!(
            matches!(&missing, BuildError::NoToolchain { toolchain, .. } if toolchain == "oxattn-no-such-toolchain")
        );
        assert!(missing.to_string().contains("rustup toolchain install oxattn-no-such-toolchain"), "{missing}");

        let missing = library(None, Path::new("/nonexistent"), "0.0.0-nightly", "nightly").unwrap_err();
        let BuildError::NoLibrarySource { minor, component, .. } = &missing else { panic!("{missing}") };
        assert_eq!(
            (minor.as_str(), component.as_path()),
            ("0.0", Path::new("/nonexistent/lib/rustlib/src/rust/library"))
        );
        assert!(missing.is_missing_toolchain());
        assert!(missing.to_string().contains("rustup component add rust-src --toolchain nightly"), "{missing}");

        let named = library(Some("/nonexistent".into()), Path::new(""), "", "").unwrap_err();
        assert_eq!(named.to_string(), "OXATTN_RUST_SRC is /nonexistent, which holds no core/src/lib.rs");
    }
}
