//! Rows of logits through the softmax of tiles, against sums in f64: what raises a row's maximum, what does not, rows whose
//! logits, as integers, are in the wrong order, and what rows start with.
//!
//! Unsafe: the kernel takes addresses; the test owns the memory behind them.
use kernels_gpu::softmax::OnlineSoftmax;
use simt::{
    emulator::{GlobalMemory, Launch},
    global::Global,
    thread::lane_idx,
    warp::shuffle_xor_f32,
};

const TILES: usize = 6;
const COLUMNS: usize = 4;
const TILE_KEYS: usize = 8 * COLUMNS;
const KEYS: usize = TILES * TILE_KEYS;
const ROWS: usize = 16;
const SEEDS: [u64; 2] = [1, 0xdead_beef];

/// The value that key `key` brings.
fn value(key: usize) -> f32 {
    (key * 37 % 19) as f32 - 9.0
}

/// How tiles are taken.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Way {
    Whole,
    Raised,
    WithSlack,
}

/// LSE (base 2) and output of 16 rows of `KEYS` scores, each tile in the layout of `mma`'s C.
unsafe fn kernel(scores: Global<f32>, factor: f32, way: Way, results: Global<[f32; 2]>) {
    // SAFETY: the launch below registers what is touched; the warp stays together.
    unsafe {
        let (row, column) = (lane_idx() as usize / 4, 2 * (lane_idx() as usize % 4));
        let mut softmax = OnlineSoftmax::new();
        let mut outputs = [0f32; 2];
        for tile in 0..TILES {
            let key = |n: usize, i: usize| tile * TILE_KEYS + 8 * n + column + i;
            let mut weights = [[0f32; 4]; COLUMNS];
            for (n, of_column) in weights.iter_mut().enumerate() {
                for half in 0..2 {
                    for i in 0..2 {
                        let at = (row + 8 * half) * KEYS + key(n, i);
                        of_column[2 * half + i] = scores.add(at as u64).load();
                    }
                }
            }
            let keys_before = (tile * TILE_KEYS) as u32;
            let mut before = softmax.sum;
            for sum in &mut before {
                *sum += shuffle_xor_f32(*sum, 1);
                *sum += shuffle_xor_f32(*sum, 2);
            }
            let shrink = if way == Way::Whole {
                softmax.update_tile(&mut weights, factor)
            } else {
                let raised = softmax.raise_tile(&weights, factor, (way == Way::WithSlack).then_some(keys_before));
                for half in 0..2 {
                    softmax.weigh_row(half, raised.shrink, &mut weights, factor);
                    assert!(raised.any || raised.shrink[half] == 1.0, "a factor that nobody is told of");
                }
                raised.shrink
            };
            for half in 0..2 {
                outputs[half] *= shrink[half];
                let weights = weights.map(|weights| [weights[2 * half], weights[2 * half + 1]]);
                let mut top = weights.iter().flatten().fold(0.0, |top: f32, &weight| top.max(weight));
                top = top.max(shuffle_xor_f32(top, 1));
                top = top.max(shuffle_xor_f32(top, 2));
                // What bf16 rounds of it is small beside the others, or not the worst, or nothing.
                let is_small = way == Way::WithSlack && top <= before[half] * (2.0 / keys_before as f32).sqrt() * 1.001;
                let above = top.log2();
                let rounds_well =
                    way == Way::WithSlack && above <= 8.0 && (above.fract() > 0.187 || above.fract() == 0.0);
                assert!(top <= 1.001 || is_small || rounds_well, "a weight of {top} after {keys_before} keys");
                for (n, of_row) in weights.iter().enumerate() {
                    for (i, weight) in of_row.iter().enumerate() {
                        outputs[half] += weight * value(key(n, i));
                    }
                }
            }
        }
        softmax.finish([starts(row), starts(row + 8)], true);
        for (half, output) in outputs.iter_mut().enumerate() {
            *output += shuffle_xor_f32(*output, 1);
            *output += shuffle_xor_f32(*output, 2);
            if lane_idx().is_multiple_of(4) {
                let result = [softmax.lse(half), *output * softmax.inverse(half)];
                results.add((row + 8 * half) as u64).store(result);
            }
        }
    }
}

/// What row `row` starts with.
fn starts(row: usize) -> [f32; 2] {
    const STARTS: [[f32; 2]; 7] = [
        [f32::NEG_INFINITY, 0.0],
        [0.3, 1.0],
        [f32::NEG_INFINITY, 0.0],
        [-400.0, 1.0],
        [31.5, 1.0],
        [0.0, 3.0],
        [900.0, 1.0],
    ];
    STARTS[row % STARTS.len()]
}

/// LSE (base 2) and output of a row, in f64.
fn oracle(scores: &[f32], factor: f32, [start, start_sum]: [f32; 2]) -> [f64; 2] {
    let logits: Vec<f64> = scores.iter().map(|&score| score as f64 * factor as f64).collect();
    let largest = logits.iter().copied().fold(start as f64, f64::max);
    if largest == f64::NEG_INFINITY {
        return [f64::NEG_INFINITY, 0.0];
    }
    let sum: f64 = logits.iter().map(|logit| (logit - largest).exp2()).sum();
    let sum = sum + start_sum as f64 * (start as f64 - largest).exp2();
    let output: f64 = logits.iter().enumerate().map(|(key, logit)| (logit - largest).exp2() * value(key) as f64).sum();
    [largest + sum.log2(), output / sum]
}

/// A name, and a logit by its key.
type Pattern = (&'static str, fn(usize) -> f32);

/// What rows of `KEYS` logits look like, by what they are to find.
const PATTERNS: [Pattern; 21] =
    [
        ("all alike", |_| 0.0),
        ("noise", |key| (key * 53 % 31) as f32 / 4.0 - 4.0),
        ("steps of 5 a tile", |key| 5.0 * (key / TILE_KEYS) as f32 + (key % 3) as f32),
        ("steps of 9 a tile", |key| 9.0 * (key / TILE_KEYS) as f32),
        ("steps down", |key| -20.0 * (key / TILE_KEYS) as f32),
        ("all negative, in the order of integers the wrong way round", |key| -200.0 + (key * 53 % 31) as f32 * 6.0),
        ("all negative and rising", |key| -300.0 + 45.0 * (key / TILE_KEYS) as f32 - (key % 7) as f32),
        ("one far above in the last tile", |key| if key == KEYS - 5 { 300.0 } else { -1.0 }),
        ("one far above in the first tile", |key| if key == 3 { 300.0 } else { 0.5 }),
        ("none seen", |_| f32::NEG_INFINITY),
        ("one seen, in the last tile", |key| if key == KEYS - 1 { -77.0 } else { f32::NEG_INFINITY }),
        ("none of the first tile", |key| if key < TILE_KEYS { f32::NEG_INFINITY } else { -9.0 - (key % 5) as f32 }),
        ("one lane's alone", |key| if key % 8 < 2 { -12.0 - (key % 11) as f32 } else { f32::NEG_INFINITY }),
        ("negative zeros", |key| if key < KEYS / 2 { -50.0 } else { -0.0 }),
        ("one nearer zero among others farther", |key| match key / TILE_KEYS {
            0 => -50.0,
            tile if key % TILE_KEYS == 5 => -40.0 + tile as f32,
            _ => -90.0,
        }),
        ("one a tile, a little above the last", |key| {
            if key % TILE_KEYS == 7 { 1.07 * (key / TILE_KEYS) as f32 } else { -20.0 }
        }),
        ("one a tile, far above the last, but not too far", |key| {
            if key % TILE_KEYS == 7 { 1.4 * (key / TILE_KEYS) as f32 } else { -20.0 }
        }),
        ("eight alike, then one above by two", |key| match key {
            37 => 2.05,
            0..TILE_KEYS if key.is_multiple_of(4) => 0.0,
            _ => -20.0,
        }),
        ("many alike, then a little more", |key| 0.6 * (key / TILE_KEYS) as f32),
        ("negative, then nearer zero", |key| if key < KEYS / 2 { -9.0 } else { -0.5 }),
        ("a tile of negative ones, then nearer zero", |key| {
            if key < TILE_KEYS { -8.5 } else { -0.25 - (key % 2) as f32 * 6.0 }
        }),
    ];

#[test]
fn rows_of_logits_whatever_raises_them() {
    for factor in [1.0f32, 0.127_517] {
        for shift in 0..PATTERNS.len() {
            // Neighbouring rows find other things, so that one row's way is not its warp's.
            let pattern = |row: usize| PATTERNS[(row * 5 + shift) % PATTERNS.len()];
            let rows: Vec<Vec<f32>> =
                (0..ROWS).map(|row| (0..KEYS).map(|key| pattern(row).1(key) / factor).collect()).collect();
            let scores = rows.concat();
            for (way, seed) in
                [Way::Whole, Way::Raised, Way::WithSlack].into_iter().flat_map(|way| SEEDS.map(|seed| (way, seed)))
            {
                let mut results = vec![[f32::NAN; 2]; ROWS];
                let mut memory = GlobalMemory::new();
                let (scores, out) = (memory.read_only(&scores), memory.uninitialised(&mut results));
                let launch = Launch { grid_blocks: 1, block_threads: 32, shared_bytes: 0, seed };
                // SAFETY: the kernel's own contract.
                launch.run(&mut memory, || unsafe { kernel(scores, factor, way, out) }).unwrap();
                drop(memory);
                for (row, got) in results.iter().enumerate() {
                    let name = pattern(row).0;
                    let wanted = oracle(&rows[row], factor, starts(row));
                    if wanted[0] == f64::NEG_INFINITY {
                        assert_eq!(*got, [f32::NEG_INFINITY, 0.0], "{name}, {way:?}");
                        continue;
                    }
                    let off = [0, 1].map(|i| (got[i] as f64 - wanted[i]).abs());
                    assert!(
                        off[0] < 1e-4 && off[1] < 1e-4,
                        "{name}, {way:?}, factor {factor}: {got:?}, and {wanted:?} is right"
                    );
                }
            }
        }
    }
}
