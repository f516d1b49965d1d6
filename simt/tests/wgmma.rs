//! `wgmma` in every width, format and layout that kernels use, against a naive f64 product.
use simt::{
    asynchronous::fence_proxy_async,
    block::sync_threads,
    emulator::{Counters, GlobalMemory, Launch},
    number::{Bf16, F16},
    shared::Shared,
    tensor::Element,
    thread::{lane_idx, thread_idx_x, warp_idx},
    wgmma::{self, Descriptor, KMajor, Major, MnMajor, Swizzle, multiply_registers, multiply_shared},
};

const DEPTH: u32 = 64;
const B_OFFSET: u32 = 8 << 10;

/// Small whole numbers with a pattern that repeats late: exact in both formats, and so are their sums in f32.
fn pattern(row: u32, k: u32, salt: u32) -> f32 {
    ((row * 37 + k * 23 + salt) % 19) as f32 - 9.0
}

/// How an operand of up to 256 rows and `DEPTH` values of K lies in shared memory.
struct Tile {
    swizzle: Swizzle,
    transposed: bool,
}

impl Tile {
    fn offset(&self, row: u32, k: u32) -> u32 {
        let run_bytes = self.swizzle.row_bytes();
        // Along the run, and across it.
        let (along, across, across_extent) = if self.transposed { (row, k, DEPTH) } else { (k, row, 256) };
        let run = 2 * along / run_bytes;
        run * run_bytes * across_extent + across * run_bytes + 2 * along % run_bytes
    }

    fn leading_stride_bytes(&self) -> (u32, u32) {
        let eight = 8 * self.swizzle.row_bytes();
        match (self.transposed, self.swizzle) {
            (true, Swizzle::None) => (eight, self.offset(8, 0)),
            (true, _) => (self.offset(self.swizzle.row_bytes() / 2, 0), eight),
            (false, Swizzle::None) => (self.offset(0, 8), eight),
            (false, _) => (0, eight),
        }
    }

    fn descriptor<E: Element, M: Major>(&self, base: Shared<u8>) -> Descriptor<E, M> {
        let (leading, stride) = self.leading_stride_bytes();
        Descriptor::new(base, leading, stride, self.swizzle)
    }

    /// Writes `rows` rows, the threads of the block taking turns.
    unsafe fn fill<E: Element>(&self, base: Shared<u8>, rows: u32, salt: u32) {
        for index in (thread_idx_x()..rows * DEPTH).step_by(128) {
            let (row, k) = (index / DEPTH, index % DEPTH);
            let address = self.swizzle.apply(base.address() + self.offset(row, k));
            let value = E::pack(pattern(row, k, salt), 0.0) as u16;
            // SAFETY: inside the launch's shared memory, and nobody else's.
            unsafe { base.add_bytes(address - base.address()).cast::<u16>().store(value) };
        }
    }
}

/// Multiplies 64 x 64 by 64 x 8 `TILES` onto ones, or over rubbish, and compares.
fn check<E: Element, A: Major, B: Major, const TILES: usize>(swizzle: Swizzle, a_in_registers: bool, onto_ones: bool) {
    let columns = 8 * TILES;
    let (a_tile, b_tile) = (Tile { swizzle, transposed: A::TRANSPOSED }, Tile { swizzle, transposed: B::TRANSPOSED });
    let mut output = vec![0f32; 64 * columns];
    let mut memory = GlobalMemory::new();
    let result = memory.uninitialised(&mut output);
    // 32 KiB is 256 rows of A.
    let (b_offset, shared_bytes) =
        if swizzle == Swizzle::Bytes128 { (B_OFFSET, 48 << 10) } else { (32 << 10, 96 << 10) };
    // SAFETY: one warpgroup; operands and output are as large as the tiles say.
    let kernel = || unsafe {
        let (base, row, quad) = (Shared::<u8>::dynamic(), 16 * warp_idx() + lane_idx() / 4, lane_idx() % 4);
        a_tile.fill::<E>(base, 64, 3);
        b_tile.fill::<E>(base.add_bytes(b_offset), columns as u32, 11);
        fence_proxy_async();
        sync_threads();
        let a: Descriptor<E, A> = a_tile.descriptor(base);
        let b: Descriptor<E, B> = b_tile.descriptor(base.add_bytes(b_offset));
        let mut c = [[if onto_ones { 1.0 } else { 7.5 }; 4]; TILES];
        wgmma::fence();
        for step in 0..DEPTH / 16 {
            let accumulate = onto_ones || step > 0;
            let b = b.advance_bytes(b_tile.offset(0, 16 * step));
            if a_in_registers {
                let pair = |row, k| E::pack(pattern(row, k, 3), pattern(row, k + 1, 3));
                let k = 16 * step + 2 * quad;
                let a = [pair(row, k), pair(row + 8, k), pair(row, k + 8), pair(row + 8, k + 8)];
                multiply_registers(&mut c, a, b, accumulate);
            } else {
                multiply_shared(&mut c, a.advance_bytes(a_tile.offset(0, 16 * step)), b, accumulate);
            }
        }
        wgmma::commit_group();
        wgmma::wait_group::<0, _>(&mut c);
        for (tile, values) in c.into_iter().enumerate() {
            for (index, value) in values.into_iter().enumerate() {
                let (row, column) = (row as usize + index / 2 * 8, 8 * tile + 2 * quad as usize + index % 2);
                result.add((row * columns + column) as u64).store(value);
            }
        }
    };
    let launch = Launch { grid_blocks: 1, block_threads: 128, shared_bytes, seed: TILES as u64 };
    let counters = launch.run(&mut memory, kernel).unwrap().counters;
    assert_eq!((counters.wgmma, counters.mma), (4, 0));
    assert_eq!(counters.wgmma_flops, 4 * 2 * 64 * 16 * columns as u64);
    for (index, found) in output.into_iter().enumerate() {
        let (row, column) = ((index / columns) as u32, (index % columns) as u32);
        let product = (0..DEPTH).map(|k| pattern(row, k, 3) as f64 * pattern(column, k, 11) as f64).sum::<f64>();
        let wanted = product + if onto_ones { 1.0 } else { 0.0 };
        assert_eq!(found as f64, wanted, "row {row}, column {column}, of {columns}, {swizzle:?}");
    }
}

fn check_width<E: Element, const TILES: usize>() {
    const SWIZZLE: Swizzle = Swizzle::Bytes128;
    check::<E, KMajor, KMajor, TILES>(SWIZZLE, true, false);
    check::<E, KMajor, MnMajor, TILES>(SWIZZLE, true, true);
    check::<E, KMajor, KMajor, TILES>(SWIZZLE, false, true);
    check::<E, KMajor, MnMajor, TILES>(SWIZZLE, false, false);
    check::<E, MnMajor, KMajor, TILES>(SWIZZLE, false, false);
    check::<E, MnMajor, MnMajor, TILES>(SWIZZLE, false, true);
}

fn check_widths<E: Element>() {
    check_width::<E, 2>();
    check_width::<E, 8>();
    check_width::<E, 10>();
    check_width::<E, 16>();
    check_width::<E, 32>();
}

#[test]
fn bf16_in_every_width() {
    check_widths::<Bf16>();
}

#[test]
fn f16_in_every_width() {
    check_widths::<F16>();
}

#[test]
fn other_swizzles() {
    for swizzle in [Swizzle::None, Swizzle::Bytes32, Swizzle::Bytes64] {
        check::<Bf16, KMajor, KMajor, 8>(swizzle, false, false);
        check::<Bf16, KMajor, MnMajor, 10>(swizzle, false, false);
        check::<Bf16, MnMajor, KMajor, 8>(swizzle, false, false);
        check::<Bf16, MnMajor, MnMajor, 12>(swizzle, false, false);
    }
}

/// Two products in flight: the older group's accumulators are read while the younger one runs.
#[test]
fn groups_finish_in_order() {
    let overlapped = || -> Counters {
        // SAFETY: one warpgroup and one tile.
        let kernel = || unsafe {
            let base = Shared::<u8>::dynamic();
            let tile = Tile { swizzle: Swizzle::Bytes128, transposed: false };
            tile.fill::<F16>(base, 64, 5);
            fence_proxy_async();
            sync_threads();
            let operand: Descriptor<F16, KMajor> = tile.descriptor(base);
            let (mut older, mut younger) = ([[0f32; 4]; 8], [[0f32; 4]; 8]);
            wgmma::fence();
            multiply_shared(&mut older, operand, operand, false);
            wgmma::commit_group();
            multiply_shared(&mut younger, operand, operand, false);
            wgmma::commit_group();
            wgmma::wait_group::<1, _>(&mut older);
            // Moving accumulators that are in flight is no access.
            let mut younger = Box::new(younger);
            let sum = older.as_flattened().iter().sum::<f32>();
            wgmma::wait_group::<0, _>(&mut younger);
            assert_eq!(sum, younger.as_flattened().iter().sum::<f32>());
        };
        let launch = Launch { grid_blocks: 1, block_threads: 128, shared_bytes: 8 << 10, seed: 1 };
        launch.run(&mut GlobalMemory::new(), kernel).unwrap().counters
    };
    assert_eq!(overlapped().wgmma, 2);
}

/// Two warpgroups multiply on their own, neither waiting for the other.
#[test]
fn warpgroups_are_independent() {
    // SAFETY: two whole warpgroups and one tile.
    let kernel = || unsafe {
        let base = Shared::<u8>::dynamic();
        let tile = Tile { swizzle: Swizzle::Bytes128, transposed: false };
        if thread_idx_x() < 128 {
            tile.fill::<Bf16>(base, 64, 5);
        }
        fence_proxy_async();
        sync_threads();
        let operand: Descriptor<Bf16, KMajor> = tile.descriptor(base);
        for _ in 0..1 + warp_idx() / 4 {
            let mut c = [[0f32; 4]; 8];
            wgmma::fence();
            multiply_shared(&mut c, operand, operand, true);
            wgmma::commit_group();
            wgmma::wait_group::<0, _>(&mut c);
        }
    };
    let launch = Launch { grid_blocks: 1, block_threads: 256, shared_bytes: 8 << 10, seed: 1 };
    assert_eq!(launch.run(&mut GlobalMemory::new(), kernel).unwrap().counters.wgmma, 3);
}
