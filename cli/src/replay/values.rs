//! Random queries, keys and values that are a function of their place.
//!
//! In: which tensor, layer, source, position and head. Out: that row, always the same. So a check can ask for any key
//! of a request again without a copy of the cache and without its page table, and a row that was written to a wrong
//! page or slot shows. Prompts that are equal as far as a block have equal rows as far as that.

use crate::serve::Running;
use half::{bf16, f16};
use oxattn::DType;

/// Which tensor a row belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tensor {
    Query,
    Key,
    Value,
}

/// Where a token comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// It is one request's alone, by its row of the trace.
    Request(usize),
    /// It lies in a block of prompts, by its hash.
    Block(u64),
}

impl Source {
    /// Of a position of a request.
    pub fn of(running: &Running, position: u32) -> Source {
        running.block(position).map_or(Source::Request(running.request), Source::Block)
    }
}

/// A row's place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    pub layer: u32,
    pub source: Source,
    /// In the request, from 0.
    pub position: u32,
    pub head: u32,
}

/// The rows of one replay.
#[derive(Clone, Copy, Debug)]
pub struct Values {
    pub seed: u64,
    pub dtype: DType,
}

impl Values {
    /// Writes the row at `place` into `row`, in the bits of the dtype.
    ///
    /// Keys and values are uniform in [-1, 1), queries in [-4, 4): scaled scores then have a standard deviation of
    /// 4/3 at every head dim, so that some keys weigh much more than others, as in a model.
    pub fn fill(&self, tensor: Tensor, place: Place, row: &mut [u16]) {
        let magnitude = if tensor == Tensor::Query { 4.0 } else { 1.0 };
        let mut random = fastrand::Rng::with_seed(self.row_seed(tensor, place));
        for chunk in row.chunks_mut(4) {
            let bits = random.u64(..);
            for (index, element) in chunk.iter_mut().enumerate() {
                let number = (bits >> (16 * index)) as u16 as i16 as f32 * (magnitude / 32768.0);
                *element = match self.dtype {
                    DType::F16 => f16::from_f32(number).to_bits(),
                    _ => bf16::from_f32(number).to_bits(),
                };
            }
        }
    }

    /// The same row as numbers.
    pub fn exact(&self, tensor: Tensor, place: Place, head_dim: usize) -> Vec<f64> {
        let mut row = vec![0; head_dim];
        self.fill(tensor, place, &mut row);
        row.iter().map(|&bits| self.number(bits)).collect()
    }

    /// The number behind an element's bits.
    pub fn number(&self, bits: u16) -> f64 {
        match self.dtype {
            DType::F16 => f16::from_bits(bits).to_f64(),
            _ => bf16::from_bits(bits).to_f64(),
        }
    }

    fn row_seed(&self, tensor: Tensor, place: Place) -> u64 {
        let (kind, source) = match place.source {
            Source::Request(request) => (0, request as u64),
            Source::Block(hash) => (1, hash),
        };
        // Three tensors of each kind of source.
        [tensor as u64 + 3 * kind, place.layer as u64, source, place.position as u64, place.head as u64]
            .into_iter()
            .fold(self.seed, |state, part| mix(state ^ part.wrapping_mul(0x9e37_79b9_7f4a_7c15)))
    }
}

/// The output function of SplitMix64 (Steele, Lea and Flood, 2014): a bijection that spreads every input bit.
fn mix(state: u64) -> u64 {
    let state = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let state = (state ^ (state >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    state ^ (state >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLACE: Place = Place { layer: 0, source: Source::Request(0), position: 0, head: 0 };

    #[test]
    fn a_row_depends_on_every_part_of_its_place_and_on_nothing_else() {
        let values = Values { seed: 1, dtype: DType::Bf16 };
        let row = |values: &Values, tensor, place| values.exact(tensor, place, 64);
        let mut rows = vec![
            row(&values, Tensor::Key, PLACE),
            row(&values, Tensor::Value, PLACE),
            row(&values, Tensor::Query, PLACE),
            row(&Values { seed: 2, ..values }, Tensor::Key, PLACE),
        ];
        for part in 1..40 {
            rows.push(row(&values, Tensor::Key, Place { layer: part, ..PLACE }));
            rows.push(row(&values, Tensor::Key, Place { source: Source::Request(part as usize), ..PLACE }));
            rows.push(row(&values, Tensor::Key, Place { source: Source::Block(part as u64 - 1), ..PLACE }));
            rows.push(row(&values, Tensor::Key, Place { position: part, ..PLACE }));
            rows.push(row(&values, Tensor::Key, Place { head: part, ..PLACE }));
        }
        for (index, a) in rows.iter().enumerate() {
            assert!(rows[..index].iter().all(|b| a != b), "row {index} repeats");
        }
        assert_eq!(rows[0], row(&values, Tensor::Key, PLACE));
    }

    #[test]
    fn rows_fill_their_range_evenly() {
        for (dtype, tensor, magnitude) in
            [(DType::Bf16, Tensor::Key, 1.0), (DType::F16, Tensor::Value, 1.0), (DType::F16, Tensor::Query, 4.0)]
        {
            let numbers: Vec<f64> = (0..200)
                .flat_map(|position| Values { seed: 9, dtype }.exact(tensor, Place { position, ..PLACE }, 80))
                .map(|number| number / magnitude)
                .collect();
            assert!(numbers.iter().all(|number| (-1.0..=1.0).contains(number)));
            let count = numbers.len() as f64;
            let mean = numbers.iter().sum::<f64>() / count;
            let variance = numbers.iter().map(|number| number * number).sum::<f64>() / count;
            // 16,000 draws: the standard errors are 0.0046 and 0.0024.
            assert!(mean.abs() < 0.02 && (variance - 1.0 / 3.0).abs() < 0.01, "mean {mean}, variance {variance}");
        }
    }
}
