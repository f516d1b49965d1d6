//! The emulator's own encoding of a tensor map. The driver's is opaque; the arguments and their limits are those of
//! `cuTensorMapEncodeTiled`, without interleaving and with zeros outside of the tensor.
use bytemuck::{Pod, Zeroable};

use crate::{bulk::TensorMap, wgmma::Swizzle};

/// What a tensor map says. Lists begin with the innermost dimension and are as long as there are dimensions, 1 to 5.
#[derive(Clone, Debug)]
pub struct TensorMapDescription<'a> {
    /// Address of the first element: a multiple of 16.
    pub address: u64,
    /// Bytes of an element: 1, 2, 4 or 8.
    pub element_bytes: u32,
    /// Elements of each dimension.
    pub extents: &'a [u32],
    /// Bytes from one index to the next, from the second dimension on: multiples of 16.
    pub strides_bytes: &'a [u64],
    /// Elements that a box spans in each dimension, 1 to 256.
    pub box_extents: &'a [u32],
    /// Every how many-th of these is copied, 1 to 8; of no meaning for the innermost dimension.
    pub element_strides: &'a [u32],
    /// How the box lies in shared memory. A swizzled box's rows are as long as the pattern's: 32, 64 or 128 bytes.
    pub swizzle: Swizzle,
}

/// A field that no tensor map can have.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("tensor map: {field} is {found}, supported is {supported}")]
pub struct TensorMapError {
    /// Name of the [`TensorMapDescription`] field.
    pub field: &'static str,
    /// Its value.
    pub found: u64,
    /// What is supported.
    pub supported: &'static str,
}

/// What the 128 bytes hold.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Image {
    /// Tells a map from other bytes.
    magic: u64,
    pub address: u64,
    strides_bytes: [u64; 4],
    extents: [u32; 5],
    box_extents: [u16; 5],
    element_strides: [u8; 5],
    dimensions: u8,
    element_bytes: u8,
    swizzle: u8,
    reserved: [u16; 21],
}

const MAGIC: u64 = u64::from_le_bytes(*b"emulated");
const SWIZZLES: [Swizzle; 4] = [Swizzle::None, Swizzle::Bytes32, Swizzle::Bytes64, Swizzle::Bytes128];

// SAFETY: sixteen words without padding.
unsafe impl Zeroable for TensorMap {}
// SAFETY: as above, and every bit pattern is a value.
unsafe impl Pod for TensorMap {}

/// A run of neighbouring bytes of a box, inside of the tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Segment {
    /// Global address.
    pub source: u64,
    /// Offset in the dense box.
    pub offset: u32,
    pub bytes: u32,
}

impl TensorMapDescription<'_> {
    /// The map, to be put into memory that a launch may read.
    ///
    /// # Errors
    /// The first field that the driver would refuse, or that the emulator does not know.
    pub fn encode(&self) -> Result<TensorMap, TensorMapError> {
        self.check()?;
        let dimensions = self.extents.len();
        let mut image = Image {
            magic: MAGIC,
            address: self.address,
            dimensions: dimensions as u8,
            element_bytes: self.element_bytes as u8,
            swizzle: SWIZZLES.iter().position(|swizzle| *swizzle == self.swizzle).unwrap_or(0) as u8,
            ..Image::zeroed()
        };
        image.strides_bytes[..dimensions - 1].copy_from_slice(self.strides_bytes);
        image.extents[..dimensions].copy_from_slice(self.extents);
        for dimension in 0..dimensions {
            image.box_extents[dimension] = self.box_extents[dimension] as u16;
            image.element_strides[dimension] = if dimension == 0 { 1 } else { self.element_strides[dimension] as u8 };
        }
        Ok(bytemuck::cast(image))
    }

    fn check(&self) -> Result<(), TensorMapError> {
        let wrong = |field, found, supported| Err(TensorMapError { field, found, supported });
        let dimensions = self.extents.len();
        if !(1..=5).contains(&dimensions) {
            return wrong("extents", dimensions as u64, "1 to 5 dimensions");
        }
        let per_dimension = "one for each dimension; strides from the second on";
        if self.strides_bytes.len() + 1 != dimensions {
            return wrong("strides_bytes", self.strides_bytes.len() as u64, per_dimension);
        }
        if self.box_extents.len() != dimensions {
            return wrong("box_extents", self.box_extents.len() as u64, per_dimension);
        }
        if self.element_strides.len() != dimensions {
            return wrong("element_strides", self.element_strides.len() as u64, per_dimension);
        }
        if !self.address.is_multiple_of(16) {
            return wrong("address", self.address, "a multiple of 16");
        }
        if ![1, 2, 4, 8].contains(&self.element_bytes) {
            return wrong("element_bytes", self.element_bytes as u64, "1, 2, 4 or 8");
        }
        if self.extents.contains(&0) {
            return wrong("extents", 0, "1 to 2^32 - 1");
        }
        if let Some(stride) = self.strides_bytes.iter().find(|stride| **stride % 16 != 0 || **stride >= 1 << 40) {
            return wrong("strides_bytes", *stride, "multiples of 16 below 2^40");
        }
        if let Some(extent) = self.box_extents.iter().find(|extent| !(1..=256).contains(*extent)) {
            return wrong("box_extents", *extent as u64, "1 to 256");
        }
        if let Some(stride) = self.element_strides.iter().find(|stride| !(1..=8).contains(*stride)) {
            return wrong("element_strides", *stride as u64, "1 to 8");
        }
        let row_bytes = self.box_extents[0] * self.element_bytes;
        if !row_bytes.is_multiple_of(16) {
            return wrong("box_extents", self.box_extents[0] as u64, "rows of a multiple of 16 bytes");
        }
        if self.swizzle != Swizzle::None && row_bytes != self.swizzle.row_bytes() {
            return wrong("box_extents", self.box_extents[0] as u64, "rows as long as the swizzle's");
        }
        Ok(())
    }
}

impl Image {
    /// The image in these bytes, if it is one.
    pub fn read(map: TensorMap) -> Option<Image> {
        let image: Image = bytemuck::cast(map);
        (image.magic == MAGIC).then_some(image)
    }

    pub fn dimensions(&self) -> usize {
        self.dimensions as usize
    }

    pub fn swizzle(&self) -> Swizzle {
        SWIZZLES[self.swizzle as usize % 4]
    }

    /// Elements copied in a dimension.
    fn count(&self, dimension: usize) -> u32 {
        (self.box_extents[dimension] as u32).div_ceil(self.element_strides[dimension] as u32)
    }

    fn row_bytes(&self) -> u32 {
        self.count(0) * self.element_bytes as u32
    }

    /// Bytes of a whole box.
    pub fn bytes(&self) -> u32 {
        (1..self.dimensions()).map(|dimension| self.count(dimension)).product::<u32>() * self.row_bytes()
    }

    /// What of the box at `coordinates` lies inside of the tensor.
    pub fn segments(&self, coordinates: &[i32]) -> Vec<Segment> {
        let rows = self.bytes() / self.row_bytes();
        (0..rows).filter_map(|row| self.row(row, coordinates)).collect()
    }

    fn row(&self, row: u32, coordinates: &[i32]) -> Option<Segment> {
        let mut source = self.address;
        let mut rest = row;
        for (dimension, coordinate) in (0..).zip(coordinates).skip(1) {
            let index = rest % self.count(dimension) * self.element_strides[dimension] as u32;
            rest /= self.count(dimension);
            let at = u32::try_from(*coordinate as i64 + index as i64).ok()?;
            if at >= self.extents[dimension] {
                return None;
            }
            source += at as u64 * self.strides_bytes[dimension - 1];
        }
        let start = coordinates[0] as i64;
        let first = start.max(0);
        let end = (start + self.count(0) as i64).min(self.extents[0] as i64);
        let element_bytes = self.element_bytes as i64;
        (first < end).then(|| Segment {
            source: source + (first * element_bytes) as u64,
            offset: row * self.row_bytes() + ((first - start) * element_bytes) as u32,
            bytes: ((end - first) * element_bytes) as u32,
        })
    }
}
