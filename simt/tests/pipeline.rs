//! A whole attention kernel of sm_90a on the emulator, against f64.
#[path = "kernels/attention.rs"]
mod attention;

use attention::{SHARED_BYTES, THREADS, attention};
use half::bf16;
use simt::{
    bulk::TensorMap,
    emulator::{GlobalMemory, Launch, TensorMapDescription},
    global::Global,
    wgmma::Swizzle,
};

const ROWS: usize = 128;
const HEAD: usize = 64;

/// Rows of `HEAD` values between -1 and 1, aligned as tensor maps want it.
fn rows(count: usize, salt: usize) -> (Vec<u128>, Vec<f64>) {
    let number = |index: usize| bf16::from_f32((((index + salt) * 7919 % 2003) as f32 - 1001.0) / 1001.0);
    let bits = |index: usize| (number(index).to_bits() as u128) << (16 * (index % 8));
    let lines = (0..count * HEAD / 8).map(|line| (0..8).map(|within| bits(8 * line + within)).sum());
    (lines.collect(), (0..count * HEAD).map(|index| number(index).to_f64()).collect())
}

#[test]
fn attention_by_tensor_maps_and_wgmma() {
    let scale = 0.125;
    for (tiles, seed) in [(1, 1), (2, 2), (5, 3), (5, 4)] {
        let tokens = 64 * tiles;
        let [queries, keys, values] = [rows(ROWS, 1), rows(tokens, 2), rows(tokens, 3)];
        let mut output = vec![[0f32; 2]; ROWS * HEAD / 2];
        let mut memory = GlobalMemory::new();
        let maps = [(&queries.0, ROWS), (&keys.0, tokens), (&values.0, tokens)].map(|(lines, rows)| {
            let description = TensorMapDescription {
                address: memory.read_only(lines).address(),
                element_bytes: 2,
                extents: &[HEAD as u32, rows as u32],
                strides_bytes: &[2 * HEAD as u64],
                box_extents: &[64, 64],
                element_strides: &[1, 1],
                swizzle: Swizzle::Bytes128,
            };
            description.encode().unwrap()
        });
        let maps: Global<TensorMap> = memory.read_only(&maps);
        let result = memory.uninitialised(&mut output);
        let launch = Launch { grid_blocks: 1, block_threads: THREADS, shared_bytes: SHARED_BYTES, seed };
        let log2_scale = scale * std::f32::consts::LOG2_E;
        // SAFETY: the maps describe the rows above; the launch is the kernel's.
        let kernel = || unsafe { attention(maps, result, tiles as u32, log2_scale) };
        let counters = launch.run(&mut memory, kernel).unwrap().counters;
        assert_eq!(counters.wgmma, 2 * 2 * 4 * tiles as u64);
        assert_eq!(counters.bulk_copy_bytes, (2 + 2 * tiles as u64) * 8192);
        for row in 0..ROWS {
            let query = &queries.1[row * HEAD..][..HEAD];
            let dot = |key: &[f64]| query.iter().zip(key).map(|(q, k)| q * k).sum::<f64>() * scale as f64;
            let weights: Vec<f64> = keys.1.chunks(HEAD).map(|key| dot(key).exp()).collect();
            let total: f64 = weights.iter().sum();
            for column in 0..HEAD {
                let value = |token: usize| values.1[token * HEAD + column];
                let wanted =
                    weights.iter().enumerate().map(|(token, weight)| weight * value(token)).sum::<f64>() / total;
                let found = output[(row * HEAD + column) / 2][column % 2] as f64;
                // Weights are rounded to bf16: 2^-9 of each, and of values up to 1.
                assert!((found - wanted).abs() < 1.0 / 512.0, "row {row}, column {column}: {found}, wanted {wanted}");
            }
        }
    }
}
