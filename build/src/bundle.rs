//! Images into the bundle file and out of it; the layout is `kernels_gpu::abi::manifest`'s.

use std::collections::BTreeMap;

use kernels_gpu::abi::{
    manifest::{ABI, BUNDLE_HEADER_BYTES, Header, Image, KernelRecord, LaunchBounds, Manifest, VariantRecord},
    tile::Family,
};

use crate::error::BuildError;

/// Slow to write once, small for ever.
const COMPRESSION_LEVEL: i32 = 19;

/// One image before it is packed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BuiltImage {
    /// The kernel.
    pub symbol: String,
    /// What it was built for.
    pub family: Family,
    /// Form of its code.
    pub image: Image,
    /// How it is launched.
    pub launch: LaunchBounds,
    /// Registers a thread, 0 where nobody counted.
    pub registers: u32,
    /// The code.
    pub bytes: Vec<u8>,
}

/// Packs `images`, in the bundle's order whatever theirs is.
pub fn encode(
    source_hash: &str,
    compiler: &str,
    variants: &[VariantRecord],
    mut images: Vec<BuiltImage>,
) -> Result<Vec<u8>, BuildError> {
    images.sort_by(|a, b| (a.family, &a.symbol, &a.image).cmp(&(b.family, &b.symbol, &b.image)));
    let mut frames: BTreeMap<_, Vec<BuiltImage>> = BTreeMap::new();
    for image in images {
        frames.entry((image.family, without_dtypes(&image.symbol), image.image.clone())).or_default().push(image);
    }
    let mut packed = Vec::new();
    let mut kernels = Vec::new();
    for images in frames.into_values() {
        let bytes = images.iter().flat_map(|image| &image.bytes).copied().collect::<Vec<u8>>();
        let frame = zstd::bulk::compress(&bytes, COMPRESSION_LEVEL).map_err(damaged(&images[0].symbol))?;
        let mut begin_bytes = 0;
        for image in images {
            kernels.push(KernelRecord {
                symbol: image.symbol,
                family: image.family,
                image: image.image,
                launch: image.launch,
                registers: image.registers,
                offset_bytes: packed.len(),
                packed_bytes: frame.len(),
                begin_bytes,
                image_bytes: image.bytes.len(),
            });
            begin_bytes += image.bytes.len();
        }
        packed.extend(frame);
    }
    kernels.sort_by(|a, b| (a.family, &a.symbol, &a.image).cmp(&(b.family, &b.symbol, &b.image)));
    let (source_hash, compiler, variants) = (source_hash.to_owned(), compiler.to_owned(), variants.to_vec());
    let manifest = Manifest { source_hash, compiler, abi: ABI, variants, kernels }.to_string();
    let header = Header::write(manifest.len() as u32);
    Ok([&header[..], manifest.as_bytes(), &packed].concat())
}

/// The symbol, with one word for all dtypes.
fn without_dtypes(symbol: &str) -> String {
    let words = symbol.split('_').map(|word| if matches!(word, "bf16" | "f16" | "f32") { "*" } else { word });
    words.collect::<Vec<_>>().join("_")
}

/// The manifest and, record by record, the images.
pub fn decode(bundle: &[u8]) -> Result<(Manifest, Vec<Vec<u8>>), BuildError> {
    let manifest_bytes = match Header::read(bundle) {
        Header::Manifest { bytes } => bytes,
        Header::OtherVersion(found) => return Err(BuildError::BundleVersion { found }),
        Header::Foreign => return Err(BuildError::bundle("other bytes altogether")),
    };
    let (manifest, packed) = bundle[BUNDLE_HEADER_BYTES..]
        .split_at_checked(manifest_bytes)
        .ok_or_else(|| BuildError::bundle("it ends inside its manifest"))?;
    let manifest = std::str::from_utf8(manifest).map_err(|_| BuildError::bundle("its manifest is not UTF-8"))?;
    let manifest: Manifest = manifest.parse()?;
    let mut images = Vec::new();
    for record in &manifest.kernels {
        let frame = packed.get(record.offset_bytes..).and_then(|rest| rest.get(..record.packed_bytes));
        let frame = frame.ok_or_else(|| BuildError::bundle(format!("it ends inside {}", record.symbol)))?;
        let unpacked = zstd::stream::decode_all(frame).map_err(damaged(&record.symbol))?;
        let image = unpacked.get(record.begin_bytes..).and_then(|rest| rest.get(..record.image_bytes));
        let image = image.ok_or_else(|| {
            let (symbol, found, expected) = (&record.symbol, unpacked.len(), record.begin_bytes + record.image_bytes);
            BuildError::bundle(format!("{symbol}: its frame has {found} bytes, the manifest asks for {expected}"))
        })?;
        images.push(image.to_vec());
    }
    Ok((manifest, images))
}

fn damaged(symbol: &str) -> impl FnOnce(std::io::Error) -> BuildError {
    let symbol = symbol.to_owned();
    move |error| BuildError::bundle(format!("{symbol}: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image(symbol: &str, family: Family, bytes: &[u8]) -> BuiltImage {
        let launch = LaunchBounds { threads: 128, blocks_per_multiprocessor: 2, shared_bytes: 64 };
        BuiltImage { symbol: symbol.to_owned(), family, image: Image::Ptx, launch, registers: 9, bytes: bytes.to_vec() }
    }

    #[test]
    fn what_goes_in_comes_out_sorted() {
        let images = vec![
            image("b", Family::Sm80, b"bbbb"),
            image("a", Family::Sm90a, &[b'x'; 5000]),
            image("a", Family::Sm80, b""),
        ];
        let variants = [VariantRecord { name: "near".to_owned(), parameters_bytes: 4 }];
        let bytes = encode("00ff", "c0de", &variants, images.clone()).unwrap();
        let (manifest, unpacked) = decode(&bytes).unwrap();
        let order: Vec<_> = manifest.kernels.iter().map(|record| (record.family, record.symbol.as_str())).collect();
        assert_eq!(order, [(Family::Sm80, "a"), (Family::Sm80, "b"), (Family::Sm90a, "a")]);
        assert_eq!(unpacked, [b"".to_vec(), b"bbbb".to_vec(), vec![b'x'; 5000]]);
        assert_eq!((manifest.source_hash.as_str(), manifest.compiler.as_str()), ("00ff", "c0de"));
        assert_eq!((manifest.kernels[0].registers, manifest.abi), (9, ABI));
        assert_eq!(manifest.variants, variants);
        let begin = |index: usize| manifest.kernels[index].begin_bytes;
        assert_eq!([begin(0), begin(1), begin(2)], [0; 3]);
        let reversed = images.into_iter().rev().collect();
        assert_eq!(encode("00ff", "c0de", &variants, reversed).unwrap(), bytes);
    }

    #[test]
    fn kernels_that_differ_in_dtypes_share_a_frame() {
        let text = |dtype: &str| (0..400).map(|i| format!("mul.{dtype} {};", i * i % 777)).collect::<String>();
        let [bf16, f16] = ["bf16", "f16"].map(text);
        let images = vec![
            image("attend_bf16_d64", Family::Sm80, bf16.as_bytes()),
            image("attend_f16_d64", Family::Sm80, f16.as_bytes()),
            image("attend_f16_d64", Family::Sm90a, f16.as_bytes()),
        ];
        let (manifest, unpacked) = decode(&encode("00ff", "c0de", &[], images).unwrap()).unwrap();
        assert_eq!(unpacked, [bf16.as_bytes(), f16.as_bytes(), f16.as_bytes()]);
        let places = manifest.kernels.iter().map(|record| (record.offset_bytes, record.begin_bytes));
        let other = manifest.kernels[0].packed_bytes;
        assert!(places.eq([(0, 0), (0, bf16.len()), (other, 0)]));
    }

    #[test]
    fn cut_bundles_are_refused() {
        let bytes = encode("00ff", "c0de", &[], vec![image("a", Family::Sm80, &[7; 900])]).unwrap();
        for length in [0, 15, 20, bytes.len() - 1] {
            assert!(decode(&bytes[..length]).is_err(), "{length}");
        }
    }
}
