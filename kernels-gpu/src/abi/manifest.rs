//! The kernels' table and the bundle they ship in: what `cargo xtask ptx` writes and the launcher reads.
//!
//! In, from the kernels' own table: one [`KernelEntry`] a symbol. Out, in the bundle's manifest: one
//! [`KernelRecord`] for each image. The invariant: launch bounds, shared memory and registers are written once,
//! at the kernel, and reach the PTX, the manifest and the launch from there. Host only.
//!
//! ```text
//! bundle:    BUNDLE_MAGIC | u32 BUNDLE_VERSION | u32 manifest bytes | manifest | zstd frames of images
//! manifest:  source <hex>                             hash of sources and flags
//!            compiler <hex>                           commit hash of the rustc that made the PTX
//!            abi <hex>                                the ABI that the kernels were compiled with
//!            variant <name> <parameter bytes>         of each user-defined variant
//!            kernel <symbol> <family> <image> <threads> <blocks> <shared> <registers> <offset> <packed> <begin> <bytes>
//! ```
//!
//! Numbers of the header are little endian; offsets count from the end of the manifest. Kernels that differ in dtypes alone
//! share a frame, which takes little more than one of them would; an image begins `begin` bytes into its frame, unpacked.
//! Kernel lines are sorted by family, then symbol, then image.

use std::{fmt, str::FromStr};

use super::tile::Family;

impl Family {
    /// Every family, in the bundle's order.
    pub const ALL: [Family; 2] = [Family::Sm80, Family::Sm90a];

    /// The compiler's name of the family's architecture.
    pub const fn name(self) -> &'static str {
        match self {
            Family::Sm80 => "sm_80",
            Family::Sm90a => "sm_90a",
        }
    }

    /// The family of that name.
    pub fn from_name(name: &str) -> Option<Family> {
        Family::ALL.into_iter().find(|family| family.name() == name)
    }
}

/// A row of the kernels' table.
#[derive(Clone, Copy, Debug)]
pub struct KernelEntry {
    /// The `extern "ptx-kernel"` function's name.
    pub symbol: &'static str,
    /// How the kernel is launched on a family; `None` where it is not built.
    pub launch: fn(Family) -> Option<LaunchBounds>,
    /// Whether the build refuses generic loads, stack and spills in it.
    pub hot: bool,
    /// Whether what is refused fails the build; else the kernel is left out, and the launcher does without it.
    pub needed: bool,
}

/// What a launch of a kernel must keep to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaunchBounds {
    /// Threads of a block, at most 1024.
    pub threads: u32,
    /// Blocks a multiprocessor must be able to hold: the compiler's register budget.
    pub blocks_per_multiprocessor: u32,
    /// Dynamic shared memory of a block, where it is the same for every launch; 0 where there is none.
    pub shared_bytes: u32,
}

/// First bytes of a bundle.
pub const BUNDLE_MAGIC: [u8; 8] = *b"oxattnKB";

/// Layout of the bundle this code reads and writes.
pub const BUNDLE_VERSION: u32 = 3;

/// Tells apart what host and kernels may understand differently: a hash of the sources of the plan image, the
/// parameters, the divisors and the tiles. A kernel of another one must not be launched. It also changes with a comment,
/// which costs a rebuild; a number kept by hand costs wrong memory accesses when it is forgotten.
pub const ABI: u64 = {
    let hash = fnv_1a(0xcbf2_9ce4_8422_2325, include_bytes!("plan.rs"));
    let hash = fnv_1a(hash, include_bytes!("parameters.rs"));
    let hash = fnv_1a(hash, include_bytes!("divisor.rs"));
    fnv_1a(hash, include_bytes!("tile.rs"))
};

/// Goes on with a hash (Fowler, Noll and Vo), past the line ends that one system has and another has not.
const fn fnv_1a(mut hash: u64, bytes: &[u8]) -> u64 {
    let mut i = 0;
    while i < bytes.len() {
        if bytes[i] != b'\r' {
            hash = (hash ^ bytes[i] as u64).wrapping_mul(0x100_0000_01b3);
        }
        i += 1;
    }
    hash
}

/// Bytes before the manifest.
pub const BUNDLE_HEADER_BYTES: usize = 16;

/// What form a kernel's code has.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Image {
    /// PTX text, compiled by the driver when it is loaded.
    Ptx,
    /// Machine code for the named architecture, such as `sm_90a`.
    Cubin(String),
}

impl fmt::Display for Image {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Image::Ptx => formatter.write_str("ptx"),
            Image::Cubin(architecture) => formatter.write_str(architecture),
        }
    }
}

/// One image of one kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelRecord {
    /// The function to look up in the loaded module.
    pub symbol: String,
    /// The family it was built for.
    pub family: Family,
    /// Form of the code.
    pub image: Image,
    /// How to launch it.
    pub launch: LaunchBounds,
    /// Registers a thread, as the assembler counted them; 0 where no assembler was there.
    pub registers: u32,
    /// Where the compressed frame begins, counted from the end of the manifest.
    pub offset_bytes: usize,
    /// Bytes of the compressed frame.
    pub packed_bytes: usize,
    /// Where the image begins in the frame, unpacked.
    pub begin_bytes: usize,
    /// Bytes of the image.
    pub image_bytes: usize,
}

/// A user-defined variant of a bundle.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VariantRecord {
    /// What a config calls it by; kernel `attend_<name>_<dtype>_d<head dim>` is one of its kernels.
    pub name: String,
    /// Size of its parameters.
    pub parameters_bytes: usize,
}

/// The bundle's table of contents.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Manifest {
    /// Hash of the kernels' sources and the compiler flags, hexadecimal.
    pub source_hash: String,
    /// Commit hash of the compiler.
    pub compiler: String,
    /// The [`ABI`] that the kernels were compiled with.
    pub abi: u64,
    /// The user-defined variants; none in oxattn's own bundle.
    pub variants: Vec<VariantRecord>,
    /// The images, sorted by family, symbol and image.
    pub kernels: Vec<KernelRecord>,
}

impl fmt::Display for Manifest {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(formatter, "source {}\ncompiler {}\nabi {:016x}", self.source_hash, self.compiler, self.abi)?;
        for VariantRecord { name, parameters_bytes } in &self.variants {
            writeln!(formatter, "variant {name} {parameters_bytes}")?;
        }
        for record in &self.kernels {
            let LaunchBounds { threads, blocks_per_multiprocessor, shared_bytes } = record.launch;
            writeln!(
                formatter,
                "kernel {} {} {} {threads} {blocks_per_multiprocessor} {shared_bytes} {} {} {} {} {}",
                record.symbol,
                record.family.name(),
                record.image,
                record.registers,
                record.offset_bytes,
                record.packed_bytes,
                record.begin_bytes,
                record.image_bytes,
            )?;
        }
        Ok(())
    }
}

/// A manifest line that is not one; the text is the line itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ManifestError(pub String);

impl fmt::Display for ManifestError {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "not a line of a kernel manifest: {:?}", self.0)
    }
}
impl std::error::Error for ManifestError {}

impl FromStr for Manifest {
    type Err = ManifestError;

    fn from_str(text: &str) -> Result<Manifest, ManifestError> {
        let mut manifest = Manifest::default();
        for line in text.lines() {
            let unread = || ManifestError(line.to_owned());
            let fields: Vec<&str> = line.split(' ').collect();
            match fields[..] {
                ["source", hash] => manifest.source_hash = hash.to_owned(),
                ["compiler", hash] => manifest.compiler = hash.to_owned(),
                ["abi", hash] => manifest.abi = u64::from_str_radix(hash, 16).map_err(|_| unread())?,
                ["variant", name, bytes] => {
                    let parameters_bytes = bytes.parse().map_err(|_| unread())?;
                    manifest.variants.push(VariantRecord { name: name.to_owned(), parameters_bytes })
                }
                ["kernel", ref fields @ ..] => manifest.kernels.push(record(fields).ok_or_else(unread)?),
                _ => return Err(unread()),
            }
        }
        Ok(manifest)
    }
}

fn record(fields: &[&str]) -> Option<KernelRecord> {
    let &[symbol, family, image, threads, blocks, shared, registers, offset, packed, begin, bytes] = fields else {
        return None;
    };
    Some(KernelRecord {
        symbol: symbol.to_owned(),
        family: Family::from_name(family)?,
        image: if image == "ptx" { Image::Ptx } else { Image::Cubin(image.to_owned()) },
        launch: LaunchBounds {
            threads: threads.parse().ok()?,
            blocks_per_multiprocessor: blocks.parse().ok()?,
            shared_bytes: shared.parse().ok()?,
        },
        registers: registers.parse().ok()?,
        offset_bytes: offset.parse().ok()?,
        packed_bytes: packed.parse().ok()?,
        begin_bytes: begin.parse().ok()?,
        image_bytes: bytes.parse().ok()?,
    })
}

/// What a bundle's first bytes say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Header {
    /// The manifest fills this many bytes after the header.
    Manifest {
        /// Its length.
        bytes: usize,
    },
    /// A bundle of another layout.
    OtherVersion(u32),
    /// Not a bundle.
    Foreign,
}

impl Header {
    /// Reads the header of `bundle`.
    pub fn read(bundle: &[u8]) -> Header {
        let Some((header, _)) = bundle.split_first_chunk::<BUNDLE_HEADER_BYTES>() else {
            return Header::Foreign;
        };
        let word = |at: usize| u32::from_le_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
        match (header.starts_with(&BUNDLE_MAGIC), word(8)) {
            (false, _) => Header::Foreign,
            (true, BUNDLE_VERSION) => Header::Manifest { bytes: word(12) as usize },
            (true, other) => Header::OtherVersion(other),
        }
    }

    /// The header of a bundle whose manifest has that length.
    pub fn write(manifest_bytes: u32) -> [u8; BUNDLE_HEADER_BYTES] {
        let mut header = [0; BUNDLE_HEADER_BYTES];
        header[..8].copy_from_slice(&BUNDLE_MAGIC);
        header[8..12].copy_from_slice(&BUNDLE_VERSION.to_le_bytes());
        header[12..].copy_from_slice(&manifest_bytes.to_le_bytes());
        header
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Manifest {
        let record = KernelRecord {
            symbol: "attend_bf16_d128".to_owned(),
            family: Family::Sm90a,
            image: Image::Ptx,
            launch: LaunchBounds { threads: 128, blocks_per_multiprocessor: 2, shared_bytes: 110_592 },
            registers: 168,
            offset_bytes: 0,
            packed_bytes: 900,
            begin_bytes: 0,
            image_bytes: 9000,
        };
        let cubin = KernelRecord {
            image: Image::Cubin("sm_90a".to_owned()),
            offset_bytes: 900,
            begin_bytes: 70,
            ..record.clone()
        };
        Manifest {
            source_hash: "ab12".to_owned(),
            compiler: "e50a".to_owned(),
            abi: 0x0c0f_fee0,
            variants: vec![VariantRecord { name: "near".to_owned(), parameters_bytes: 16 }],
            kernels: vec![record, cubin],
        }
    }

    #[test]
    fn manifest_text_is_as_documented() {
        let expected = "source ab12\ncompiler e50a\nabi 000000000c0ffee0\nvariant near 16\n\
            kernel attend_bf16_d128 sm_90a ptx 128 2 110592 168 0 900 0 9000\n\
            kernel attend_bf16_d128 sm_90a sm_90a 128 2 110592 168 900 900 70 9000\n";
        assert_eq!(sample().to_string(), expected);
        assert_eq!(expected.parse(), Ok(sample()));
    }

    #[test]
    fn damaged_lines_are_refused_by_name() {
        for line in [
            "",
            "kernel",
            "kernel a sm_70 ptx 1 1 1 1 1 1 1 1",
            "kernel a sm_80 ptx 1 1 1 1 1 1 1",
            "kernel a sm_80 ptx 1 1 -1 1 1 1 1 1",
            "kernal a sm_80 ptx 1 1 1 1 1 1 1 1",
            "abi g",
            "variant near",
            "variant near -1",
        ] {
            let text = format!("source ab\n{line}\n");
            assert_eq!(text.parse::<Manifest>(), Err(ManifestError(line.to_owned())));
        }
    }

    #[test]
    fn header_tells_versions_and_strangers_apart() {
        let header = Header::write(77);
        assert_eq!(Header::read(&header), Header::Manifest { bytes: 77 });
        assert_eq!(Header::read(&header[..15]), Header::Foreign);
        let mut newer = header;
        newer[8] = 9;
        assert_eq!(Header::read(&newer), Header::OtherVersion(9));
        let mut foreign = header;
        foreign[0] = b'O';
        assert_eq!(Header::read(&foreign), Header::Foreign);
    }
}
