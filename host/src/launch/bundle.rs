//! The kernels' code: reads the bundle that `cargo xtask ptx` writes.
//!
//! In: the bundle's bytes. Out: for a symbol and a family, its [`KernelRecord`] and the image the driver loads. The
//! manifest is parsed once, when the bundle is opened; an image is unpacked only when it is asked for. The layout
//! is [`kernels_gpu::abi::manifest`]'s.

use std::{borrow::Cow, io::Read};

use kernels_gpu::abi::{
    manifest::{ABI, BUNDLE_HEADER_BYTES, BUNDLE_VERSION, Header, Image, KernelRecord, Manifest, ManifestError},
    tile::Family,
};
use ruzstd::decoding::{FrameDecoder, StreamingDecoder, errors::FrameDecoderError};

/// Why kernels cannot be had from a bundle.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BundleError {
    /// Other bytes altogether.
    #[error("not a kernel bundle: {bytes} bytes that do not begin with its mark")]
    Foreign {
        /// How many there are.
        bytes: usize,
    },
    /// A layout this code does not read.
    #[error("kernel bundle of version {found}; version {BUNDLE_VERSION} is supported")]
    Version {
        /// The bundle's.
        found: u32,
    },
    /// Kernels that were compiled with other layouts of what host and kernels share.
    #[error("kernel bundle's abi is {found:016x}; {ABI:016x} is supported: build it with this oxattn's oxattn-build")]
    Abi {
        /// The bundle's.
        found: u64,
    },
    /// The file is shorter than its own manifest says.
    #[error("kernel bundle cut short in {part}: {needed} bytes needed, {available} there")]
    Truncated {
        /// `the manifest`, or the kernel whose image is cut.
        part: String,
        /// Length of the part.
        needed: usize,
        /// What there is of it.
        available: usize,
    },
    /// The manifest is not text.
    #[error("kernel bundle's manifest is not UTF-8")]
    ManifestText,
    /// A line of the manifest cannot be read.
    #[error("kernel bundle: {0}")]
    Manifest(#[from] ManifestError),
    /// An image's frame is damaged.
    #[error("kernel {symbol}: damaged image: {source}")]
    Frame {
        /// The kernel.
        symbol: String,
        /// What the decompressor says.
        source: FrameDecoderError,
    },
    /// An image's contents are damaged.
    #[error("kernel {symbol}: damaged image: {source}")]
    Contents {
        /// The kernel.
        symbol: String,
        /// What the decompressor says.
        source: std::io::Error,
    },
    /// An image of another length than the manifest says.
    #[error("kernel {symbol}: image of {found} bytes, the manifest says {expected}")]
    Length {
        /// The kernel.
        symbol: String,
        /// After unpacking.
        found: usize,
        /// In the manifest.
        expected: usize,
    },
}

/// An opened bundle.
#[derive(Clone, Debug)]
pub struct Bundle {
    manifest: Manifest,
    bytes: Cow<'static, [u8]>,
    /// Where the images begin.
    images_begin: usize,
}

impl Bundle {
    /// Opens a bundle: the one inside the program, or one read from a file.
    pub fn parse(bytes: impl Into<Cow<'static, [u8]>>) -> Result<Bundle, BundleError> {
        let bytes = bytes.into();
        let needed = match Header::read(&bytes) {
            Header::Manifest { bytes } => bytes,
            Header::OtherVersion(found) => return Err(BundleError::Version { found }),
            Header::Foreign => return Err(BundleError::Foreign { bytes: bytes.len() }),
        };
        let after_header = &bytes[BUNDLE_HEADER_BYTES..];
        let text = part(after_header, 0, needed, "the manifest")?;
        let manifest = std::str::from_utf8(text).map_err(|_| BundleError::ManifestText)?.parse()?;
        Ok(Bundle { manifest, bytes, images_begin: BUNDLE_HEADER_BYTES + needed })
    }

    /// Refuses kernels that this code must not launch.
    pub fn check_abi(&self) -> Result<(), BundleError> {
        let found = self.manifest.abi;
        if found == ABI { Ok(()) } else { Err(BundleError::Abi { found }) }
    }

    /// The table of contents.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// The kernel's PTX for a family; `None` where it is not built.
    pub fn kernel(&self, symbol: &str, family: Family) -> Option<&KernelRecord> {
        self.manifest
            .kernels
            .iter()
            .find(|record| record.symbol == symbol && record.family == family && record.image == Image::Ptx)
    }

    /// The kernel's machine code for an architecture such as `sm_90a`; `None` where the bundle was made without.
    pub fn cubin(&self, symbol: &str, architecture: &str) -> Option<&KernelRecord> {
        self.manifest.kernels.iter().find(|record| {
            record.symbol == symbol && matches!(&record.image, Image::Cubin(name) if name == architecture)
        })
    }

    /// Unpacks a record's image. The driver's loader wants a NUL after PTX text, which is not part of the image.
    pub fn image(&self, record: &KernelRecord) -> Result<Vec<u8>, BundleError> {
        let symbol = || record.symbol.clone();
        let images = &self.bytes[self.images_begin..];
        let frame = part(images, record.offset_bytes, record.packed_bytes, &record.symbol)?;
        let mut decoder: StreamingDecoder<_, FrameDecoder> =
            StreamingDecoder::new(frame).map_err(|source| BundleError::Frame { symbol: symbol(), source })?;
        let contents = |source| BundleError::Contents { symbol: symbol(), source };
        // What other kernels of the frame have before this one.
        let before = std::io::copy(&mut decoder.by_ref().take(record.begin_bytes as u64), &mut std::io::sink());
        let mut image = Vec::with_capacity(record.image_bytes.min(frame.len() * 64));
        if before.map_err(contents)? == record.begin_bytes as u64 {
            // Up to the next one, or the frame's end.
            let of_frame = self.manifest.kernels.iter().filter(|other| other.offset_bytes == record.offset_bytes);
            let begins = of_frame.map(|other| other.begin_bytes).filter(|begin| *begin > record.begin_bytes);
            let room = begins.min().map_or(record.image_bytes as u64 + 1, |next| (next - record.begin_bytes) as u64);
            decoder.by_ref().take(room).read_to_end(&mut image).map_err(contents)?;
        }
        if image.len() != record.image_bytes {
            return Err(BundleError::Length { symbol: symbol(), found: image.len(), expected: record.image_bytes });
        }
        Ok(image)
    }
}

/// `length` bytes of `bytes` from `offset`.
fn part<'a>(bytes: &'a [u8], offset: usize, length: usize, name: &str) -> Result<&'a [u8], BundleError> {
    let rest = bytes.get(offset..).unwrap_or_default();
    rest.get(..length).ok_or_else(|| BundleError::Truncated {
        part: name.to_owned(),
        needed: length,
        available: rest.len(),
    })
}

#[cfg(test)]
mod tests {
    use kernels_gpu::abi::manifest::LaunchBounds;
    use ruzstd::encoding::{CompressionLevel, compress_to_vec};

    use super::*;

    const PTX: &[u8] = b".version 8.0\n.target sm_90a\n";

    fn record(symbol: &str, family: Family, image: Image, offset: usize, packed: usize) -> KernelRecord {
        KernelRecord {
            symbol: symbol.to_owned(),
            family,
            image,
            launch: LaunchBounds { threads: 128, blocks_per_multiprocessor: 2, shared_bytes: 1024 },
            registers: 40,
            offset_bytes: offset,
            packed_bytes: packed,
            begin_bytes: 0,
            image_bytes: PTX.len(),
        }
    }

    /// Three images: PTX for both families and machine code.
    fn sample(change: impl FnOnce(&mut Manifest)) -> Vec<u8> {
        let frame = compress_to_vec(PTX, CompressionLevel::Uncompressed);
        let length = frame.len();
        let mut manifest = Manifest {
            source_hash: "ab".to_owned(),
            compiler: "cd".to_owned(),
            abi: ABI,
            variants: Vec::new(),
            kernels: vec![
                record("merge", Family::Sm80, Image::Ptx, 0, length),
                record("merge", Family::Sm90a, Image::Ptx, length, length),
                record("merge", Family::Sm90a, Image::Cubin("sm_90a".to_owned()), 2 * length, length),
            ],
        };
        change(&mut manifest);
        let text = manifest.to_string();
        [&Header::write(text.len() as u32)[..], text.as_bytes(), &frame, &frame, &frame].concat()
    }

    #[test]
    fn a_kernel_is_found_by_symbol_and_family() {
        let bundle = Bundle::parse(sample(|_| {})).unwrap();
        let record = bundle.kernel("merge", Family::Sm90a).unwrap();
        assert_eq!((record.family, &record.image), (Family::Sm90a, &Image::Ptx));
        assert_eq!(bundle.image(record).unwrap(), PTX);
        assert_eq!(bundle.cubin("merge", "sm_90a").unwrap().image, Image::Cubin("sm_90a".to_owned()));
        assert!(bundle.cubin("merge", "sm_80").is_none());
        assert!(bundle.kernel("attend", Family::Sm80).is_none());
        assert_eq!(bundle.manifest().source_hash, "ab");
    }

    #[test]
    fn kernels_of_a_frame_are_told_apart() {
        let sample = |lengths: [usize; 2]| {
            let frame = compress_to_vec(&[PTX, PTX, b"\n"].concat()[..], CompressionLevel::Uncompressed);
            let mut begin = 0;
            let kernels = ["fold_bf16", "fold_f16"].iter().zip(lengths).map(|(symbol, image_bytes)| {
                let record = record(symbol, Family::Sm80, Image::Ptx, 0, frame.len());
                let record = KernelRecord { begin_bytes: begin, image_bytes, ..record };
                begin += PTX.len();
                record
            });
            let manifest = Manifest { abi: ABI, kernels: kernels.collect(), ..Manifest::default() };
            let text = manifest.to_string();
            let bytes = [&Header::write(text.len() as u32)[..], text.as_bytes(), &frame].concat();
            Bundle::parse(bytes).unwrap()
        };
        let image = |bundle: &Bundle, symbol| bundle.image(bundle.kernel(symbol, Family::Sm80).unwrap());
        let bundle = sample([PTX.len(), PTX.len() + 1]);
        assert_eq!(image(&bundle, "fold_bf16").unwrap(), PTX);
        assert_eq!(image(&bundle, "fold_f16").unwrap(), [PTX, b"\n"].concat());
        for lengths in [[PTX.len() - 1, PTX.len()], [PTX.len() + 1, PTX.len() + 2]] {
            let bundle = sample(lengths);
            for symbol in ["fold_bf16", "fold_f16"] {
                assert!(matches!(image(&bundle, symbol), Err(BundleError::Length { .. })), "{lengths:?}: {symbol}");
            }
        }
    }

    #[test]
    fn foreign_and_newer_files_are_told_apart() {
        assert!(matches!(Bundle::parse(&b"\x7fELF"[..]), Err(BundleError::Foreign { bytes: 4 })));
        let mut newer = sample(|_| {});
        newer[8] = 9;
        let error = Bundle::parse(newer).unwrap_err();
        assert_eq!(error.to_string(), "kernel bundle of version 9; version 3 is supported");
    }

    #[test]
    fn kernels_of_another_abi_are_refused() {
        Bundle::parse(sample(|_| {})).unwrap().check_abi().unwrap();
        let other = Bundle::parse(sample(|manifest| manifest.abi = 0xfeed)).unwrap().check_abi().unwrap_err();
        assert!(matches!(other, BundleError::Abi { found: 0xfeed }));
        let message = other.to_string();
        assert!(message.starts_with("kernel bundle's abi is 000000000000feed; "), "{message}");
    }

    #[test]
    fn a_cut_file_is_refused_where_it_is_cut() {
        let whole = sample(|_| {});
        assert!(matches!(Bundle::parse(whole[..40].to_vec()), Err(BundleError::Truncated { available: 24, .. })));
        let bundle = Bundle::parse(whole[..whole.len() - 1].to_vec()).unwrap();
        assert!(bundle.image(bundle.kernel("merge", Family::Sm90a).unwrap()).is_ok());
        let cut = bundle.image(bundle.cubin("merge", "sm_90a").unwrap()).unwrap_err();
        assert!(matches!(cut, BundleError::Truncated { needed, available, .. } if available == needed - 1));
    }

    #[test]
    fn damaged_images_are_refused() {
        let lies = |image_bytes: usize| {
            let bundle = Bundle::parse(sample(|manifest| manifest.kernels[0].image_bytes = image_bytes)).unwrap();
            bundle.image(bundle.kernel("merge", Family::Sm80).unwrap()).unwrap_err()
        };
        assert!(matches!(lies(PTX.len() + 1), BundleError::Length { found, .. } if found == PTX.len()));
        assert!(matches!(lies(3), BundleError::Length { found: 4, expected: 3, .. }));
        let bundle = Bundle::parse(sample(|manifest| manifest.kernels[1].offset_bytes += 1)).unwrap();
        let shifted = bundle.image(bundle.kernel("merge", Family::Sm90a).unwrap()).unwrap_err();
        assert!(matches!(shifted, BundleError::Frame { .. }), "{shifted}");
        let beyond = Bundle::parse(sample(|manifest| manifest.kernels[1].offset_bytes = usize::MAX)).unwrap();
        let beyond = beyond.image(beyond.kernel("merge", Family::Sm90a).unwrap()).unwrap_err();
        assert!(matches!(beyond, BundleError::Truncated { available: 0, .. }));
    }

    #[test]
    fn a_damaged_manifest_names_its_line() {
        let text = "source ab\nkernel merge sm_75\n";
        let bytes = [&Header::write(text.len() as u32)[..], text.as_bytes()].concat();
        let error = Bundle::parse(bytes).unwrap_err();
        assert_eq!(error.to_string(), "kernel bundle: not a line of a kernel manifest: \"kernel merge sm_75\"");
    }
}
