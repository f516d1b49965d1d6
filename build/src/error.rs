//! What a build can miss, refuse or stumble over; each says what to do about it.

use std::path::{Path, PathBuf};

use kernels_gpu::abi::{manifest::BUNDLE_VERSION, manifest::ManifestError, tile::Family};

use crate::command::CommandError;

/// Why there is no bundle.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BuildError {
    /// rustup knows no such toolchain.
    #[error("device code needs a nightly rustc: `rustup toolchain install {toolchain}`; {source}")]
    NoToolchain {
        /// The name looked for.
        toolchain: String,
        /// What rustup says.
        source: CommandError,
    },
    /// The toolchain is a stable or beta one.
    #[error("{toolchain} is rustc {release}; device code needs a nightly: `rustup toolchain install nightly`")]
    NotNightly {
        /// rustup's name.
        toolchain: String,
        /// Its release.
        release: String,
    },
    /// There is no source to build `core` from.
    #[error(
        "no library source for {toolchain} ({release}). Looked for core/src/lib.rs in {}, and in \
         rustc-{minor}.*/library under /usr/src. Run `rustup component add rust-src --toolchain {toolchain}`, or \
         install a package rust-src of that version, or set {variable} to a folder that holds core/src/lib.rs",
        component.display()
    )]
    NoLibrarySource {
        /// rustup's name.
        toolchain: String,
        /// The compiler's release.
        release: String,
        /// The part of it that a packaged source must share.
        minor: String,
        /// Where rustup puts its component.
        component: PathBuf,
        /// Names another folder.
        variable: &'static str,
    },
    /// The named folder of library source is none.
    #[error("{variable} is {}, which holds no core/src/lib.rs", folder.display())]
    NotLibrarySource {
        /// The environment variable that names it.
        variable: &'static str,
        /// The folder.
        folder: PathBuf,
    },
    /// The library source does not fit the compiler.
    #[error("{library} does not build from {}; a source of the compiler's own version does: {source}", folder.display())]
    LibrarySource {
        /// `core`, or what stands beside it.
        library: &'static str,
        /// The folder of library source.
        folder: PathBuf,
        /// What rustc says.
        source: CommandError,
    },
    /// The named assembler does not run.
    #[error("{} is no ptxas: {source}", path.display())]
    NotAssembler {
        /// Its path.
        path: PathBuf,
        /// What happened.
        source: CommandError,
    },
    /// The assembler does not say what a kernel takes.
    #[error("ptxas says nothing of {}", file.display())]
    AssemblerSilent {
        /// The kernel's text.
        file: PathBuf,
    },
    /// A program failed: cargo, where the device crate does not compile.
    #[error(transparent)]
    Command(#[from] CommandError),
    /// A file cannot be read or written.
    #[error("{}: {source}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What the system says.
        source: std::io::Error,
    },
    /// What cargo says of the device crate has another form than expected.
    #[error("cargo metadata of {}: no {missing}", manifest.display())]
    Metadata {
        /// The crate's Cargo.toml.
        manifest: PathBuf,
        /// What was looked for.
        missing: &'static str,
    },
    /// rustc's text is not what LLVM used to print.
    #[error("the PTX of {}: {reason}", family.name())]
    Ptx {
        /// The family.
        family: Family,
        /// What is odd.
        reason: String,
    },
    /// The table of kernels and the compiled kernels differ.
    #[error("{symbol} ({}): {reason}", family.name())]
    Table {
        /// The kernel.
        symbol: String,
        /// The family.
        family: Family,
        /// How they differ.
        reason: String,
    },
    /// The audit or the assembler found what no kernel may have.
    #[error("the audit refuses this build:\n  {}", problems.join("\n  "))]
    Refused {
        /// One a line.
        problems: Vec<String>,
    },
    /// A bundle of another layout.
    #[error("kernel bundle of version {found}; version {BUNDLE_VERSION} is supported")]
    BundleVersion {
        /// The bundle's.
        found: u32,
    },
    /// A bundle that is none, or damaged.
    #[error("kernel bundle: {reason}")]
    Bundle {
        /// What is wrong.
        reason: String,
    },
    /// A line of a bundle's manifest cannot be read.
    #[error("kernel bundle: {0}")]
    Manifest(#[from] ManifestError),
}

impl BuildError {
    /// Whether the compiler or its library source is missing, and not something wrong with the crate.
    pub fn is_missing_toolchain(&self) -> bool {
        use BuildError::{NoLibrarySource, NoToolchain, NotLibrarySource, NotNightly};
        matches!(self, NoToolchain { .. } | NotNightly { .. } | NoLibrarySource { .. } | NotLibrarySource { .. })
    }

    /// Of an operation on `path`.
    pub(crate) fn file(path: &Path) -> impl FnOnce(std::io::Error) -> BuildError {
        let path = path.to_owned();
        move |source| BuildError::File { path, source }
    }

    pub(crate) fn bundle(reason: impl Into<String>) -> BuildError {
        BuildError::Bundle { reason: reason.into() }
    }
}
