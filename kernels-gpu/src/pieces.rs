//! Rows of queries, keys and values, eight elements at a time.
//!
//! In: an address and a format. Out: a piece of eight elements as it lies in memory, as f32, or as the 16 bytes that it
//! takes in a cache. Invariant: numbers are rounded to nearest even, once; a piece whose format the cache has passes
//! bit for bit.
use simt::{
    global::Global,
    number::{Bf16, F16},
    tensor::Element,
};

/// A format rows come in; a piece is eight elements.
pub trait Pieces: Copy + 'static {
    /// A piece as it lies in memory.
    type Piece: Copy;
    /// Its bytes.
    const PIECE_BYTES: u64;
    /// A piece of zeros.
    const ZERO: Self::Piece;

    /// Reads a piece.
    ///
    /// # Safety
    /// `at` is live and 16-byte aligned.
    unsafe fn load(at: Global<u8>) -> Self::Piece;

    /// Reads a piece that nothing writes while the kernel runs.
    ///
    /// # Safety
    /// As [`load`](Self::load), and no thread writes it.
    unsafe fn load_constant(at: Global<u8>) -> Self::Piece;

    /// Writes a piece.
    ///
    /// # Safety
    /// As [`load`](Self::load), and no other thread uses it.
    unsafe fn store(at: Global<u8>, piece: Self::Piece);

    /// Its elements.
    fn unpack(piece: Self::Piece) -> [f32; 8];

    /// Eight elements.
    fn pack(values: [f32; 8]) -> Self::Piece;

    /// The piece in a cache's format.
    fn to_cache<Cache: Element>(piece: Self::Piece) -> [u32; 4];
}

/// Eight elements in a cache's format.
#[inline(always)]
pub fn pack_cache<Cache: Element>([a, b, c, d, e, f, g, h]: [f32; 8]) -> [u32; 4] {
    [Cache::pack(a, b), Cache::pack(c, d), Cache::pack(e, f), Cache::pack(g, h)]
}

impl Pieces for f32 {
    type Piece = [[u32; 4]; 2];
    const PIECE_BYTES: u64 = 32;
    const ZERO: [[u32; 4]; 2] = [[0; 4]; 2];

    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    unsafe fn load(at: Global<u8>) -> [[u32; 4]; 2] {
        let at = at.cast::<[u32; 4]>();
        // SAFETY: the caller's contract is this function's own.
        unsafe { [at.load(), at.add(1).load()] }
    }
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    unsafe fn load_constant(at: Global<u8>) -> [[u32; 4]; 2] {
        let at = at.cast::<[u32; 4]>();
        // SAFETY: the caller's contract is this function's own.
        unsafe { [at.load_constant(), at.add(1).load_constant()] }
    }
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    unsafe fn store(at: Global<u8>, piece: [[u32; 4]; 2]) {
        let at = at.cast::<[u32; 4]>();
        // SAFETY: the caller's contract is this function's own.
        unsafe {
            at.store(piece[0]);
            at.add(1).store(piece[1]);
        }
    }
    #[inline(always)]
    fn unpack([a, b]: [[u32; 4]; 2]) -> [f32; 8] {
        [a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3]].map(f32::from_bits)
    }
    #[inline(always)]
    fn pack(values: [f32; 8]) -> [[u32; 4]; 2] {
        let [a, b, c, d, e, f, g, h] = values.map(f32::to_bits);
        [[a, b, c, d], [e, f, g, h]]
    }
    #[inline(always)]
    fn to_cache<Cache: Element>(piece: [[u32; 4]; 2]) -> [u32; 4] {
        pack_cache::<Cache>(Self::unpack(piece))
    }
}

macro_rules! sixteen_bit {
    ($type:ty) => {
        impl Pieces for $type {
            type Piece = [u32; 4];
            const PIECE_BYTES: u64 = 16;
            const ZERO: [u32; 4] = [0; 4];

            #[inline(always)]
            #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
            unsafe fn load(at: Global<u8>) -> [u32; 4] {
                // SAFETY: the caller's contract is this function's own.
                unsafe { at.cast::<[u32; 4]>().load() }
            }
            #[inline(always)]
            #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
            unsafe fn load_constant(at: Global<u8>) -> [u32; 4] {
                // SAFETY: the caller's contract is this function's own.
                unsafe { at.cast::<[u32; 4]>().load_constant() }
            }
            #[inline(always)]
            #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
            unsafe fn store(at: Global<u8>, piece: [u32; 4]) {
                // SAFETY: the caller's contract is this function's own.
                unsafe { at.cast::<[u32; 4]>().store(piece) }
            }
            #[inline(always)]
            fn unpack(piece: [u32; 4]) -> [f32; 8] {
                let [(a, b), (c, d), (e, f), (g, h)] = piece.map(<$type as Element>::unpack);
                [a, b, c, d, e, f, g, h]
            }
            #[inline(always)]
            fn pack(values: [f32; 8]) -> [u32; 4] {
                pack_cache::<$type>(values)
            }
            #[inline(always)]
            fn to_cache<Cache: Element>(piece: [u32; 4]) -> [u32; 4] {
                if <$type>::IS_BF16 == Cache::IS_BF16 {
                    piece
                } else {
                    pack_cache::<Cache>(<$type as Pieces>::unpack(piece))
                }
            }
        }
    };
}
sixteen_bit!(Bf16);
sixteen_bit!(F16);
