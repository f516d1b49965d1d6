//! The kernels' one table: symbol, instantiation, launch bounds.
//!
//! The same rows become `extern "ptx-kernel"` functions on the GPU, [`KERNELS`] on a host (which `xtask ptx` patches
//! and audits by, and the launcher sizes its launches by), and, with the feature `emulator`, [`body`]: the kernel of
//! a symbol as a closure the emulator can run. But for the list, all of it is behind the feature `entries`.

#[cfg(any(not(target_arch = "nvptx64"), feature = "entries"))]
macro_rules! for_each_kernel {
    ($use:ident) => {
        $use! {
            attend {
                attend_bf16_d64 attend_modified_bf16_d64: Bf16, 64, 4, 4;
                attend_bf16_d80 attend_modified_bf16_d80: Bf16, 80, 5, 5;
                attend_bf16_d96 attend_modified_bf16_d96: Bf16, 96, 6, 6;
                attend_bf16_d112 attend_modified_bf16_d112: Bf16, 112, 7, 7;
                attend_bf16_d128 attend_modified_bf16_d128: Bf16, 128, 8, 8;
                attend_bf16_d160 attend_modified_bf16_d160: Bf16, 160, 10, 5;
                attend_bf16_d192 attend_modified_bf16_d192: Bf16, 192, 12, 6;
                attend_bf16_d224 attend_modified_bf16_d224: Bf16, 224, 14, 7;
                attend_bf16_d256 attend_modified_bf16_d256: Bf16, 256, 16, 8;
                attend_bf16_d512 attend_modified_bf16_d512: Bf16, 512, 32, 8;
                attend_f16_d64 attend_modified_f16_d64: F16, 64, 4, 4;
                attend_f16_d80 attend_modified_f16_d80: F16, 80, 5, 5;
                attend_f16_d96 attend_modified_f16_d96: F16, 96, 6, 6;
                attend_f16_d112 attend_modified_f16_d112: F16, 112, 7, 7;
                attend_f16_d128 attend_modified_f16_d128: F16, 128, 8, 8;
                attend_f16_d160 attend_modified_f16_d160: F16, 160, 10, 5;
                attend_f16_d192 attend_modified_f16_d192: F16, 192, 12, 6;
                attend_f16_d224 attend_modified_f16_d224: F16, 224, 14, 7;
                attend_f16_d256 attend_modified_f16_d256: F16, 256, 16, 8;
                attend_f16_d512 attend_modified_f16_d512: F16, 512, 32, 8;
            }
            rotary {
                attend_rotary_bf16_d64: Bf16, 64, 4, 4;
                attend_rotary_bf16_d96: Bf16, 96, 6, 6;
                attend_rotary_bf16_d128: Bf16, 128, 8, 8;
                attend_rotary_bf16_d256: Bf16, 256, 16, 8;
                attend_rotary_f16_d64: F16, 64, 4, 4;
                attend_rotary_f16_d96: F16, 96, 6, 6;
                attend_rotary_f16_d128: F16, 128, 8, 8;
                attend_rotary_f16_d256: F16, 256, 16, 8;
            }
            prefill {
                prefill_bf16_d64 prefill_padded_bf16_d64 prefill_modified_bf16_d64: Bf16, 64, 64, 16, 8, 4, 4, 8;
                prefill_bf16_d128 prefill_padded_bf16_d128 prefill_modified_bf16_d128: Bf16, 128, 128, 16, 8, 8, 8, 16;
                prefill_bf16_d192_v128 prefill_padded_bf16_d192_v128 prefill_modified_bf16_d192_v128: Bf16, 192, 128, 16, 8, 12, 8, 16;
                prefill_bf16_d256 prefill_padded_bf16_d256 prefill_modified_bf16_d256: Bf16, 256, 256, 8, 4, 16, 16, 32;
                prefill_f16_d64 prefill_padded_f16_d64 prefill_modified_f16_d64: F16, 64, 64, 16, 8, 4, 4, 8;
                prefill_f16_d128 prefill_padded_f16_d128 prefill_modified_f16_d128: F16, 128, 128, 16, 8, 8, 8, 16;
                prefill_f16_d192_v128 prefill_padded_f16_d192_v128 prefill_modified_f16_d192_v128: F16, 192, 128, 16, 8, 12, 8, 16;
                prefill_f16_d256 prefill_padded_f16_d256 prefill_modified_f16_d256: F16, 256, 256, 8, 4, 16, 16, 32;
            }
            prefill_rotary {
                prefill_rotary_bf16_d64: Bf16, 64, 16, 8, 4, 8;
                prefill_rotary_bf16_d128: Bf16, 128, 16, 8, 8, 16;
                prefill_rotary_bf16_d256: Bf16, 256, 8, 4, 16, 32;
                prefill_rotary_f16_d64: F16, 64, 16, 8, 4, 8;
                prefill_rotary_f16_d128: F16, 128, 16, 8, 8, 16;
                prefill_rotary_f16_d256: F16, 256, 8, 4, 16, 32;
            }
            fold {
                fold_bf16: Bf16;
                fold_f16: F16;
            }
            merge_states {
                merge_states_f32: f32;
                merge_states_bf16: Bf16;
                merge_states_f16: F16;
            }
            append {
                append_bf16_bf16: Bf16, Bf16;
                append_f16_bf16: F16, Bf16;
                append_f32_bf16: f32, Bf16;
                append_bf16_f16: Bf16, F16;
                append_f16_f16: F16, F16;
                append_f32_f16: f32, F16;
            }
            rope {
                rope_bf16: Bf16;
                rope_f16: F16;
                rope_f32: f32;
            }
            rope_append {
                rope_append_bf16_bf16: Bf16, Bf16;
                rope_append_f16_bf16: F16, Bf16;
                rope_append_f32_bf16: f32, Bf16;
                rope_append_bf16_f16: Bf16, F16;
                rope_append_f16_f16: F16, F16;
                rope_append_f32_f16: f32, F16;
            }
        }
    };
}

#[cfg(all(target_arch = "nvptx64", feature = "entries"))]
mod device {
    #[cfg(target_feature = "sm_90a")]
    use simt::global::Global;
    use simt::number::{Bf16, F16};

    use crate::abi::parameters::*;
    #[cfg(target_feature = "sm_90a")]
    use crate::attend::prefill::prefill;
    use crate::variant::{Modified, ModifiedParameters, Rotary, RotaryParameters, Standard, StandardParameters};
    use crate::{append, attend, merge, rope, rope_append, stream, validate};

    const HOPPER: bool = cfg!(target_feature = "sm_90a");

    macro_rules! stamp {
        (
            attend { $($attend:ident $modified:ident: $element:ty, $dim:literal, $query:literal, $output:literal;)* }
            rotary { $($rotary:ident: $turned:ty, $rotary_dim:literal, $rotary_query:literal, $rotary_output:literal;)* }
            prefill {
                $($prefill:ident $prefill_padded:ident $prefill_modified:ident: $prefilled:ty, $wide:literal,
                    $value:literal, $columns:literal, $depth:literal, $steps:literal, $value_steps:literal,
                    $tiles:literal;)*
            }
            prefill_rotary {
                $($prefill_rotary:ident: $prefill_turned:ty, $turned_dim:literal, $turned_columns:literal,
                    $turned_depth:literal, $turned_steps:literal, $turned_tiles:literal;)*
            }
            fold { $($fold:ident: $folded:ty;)* }
            merge_states { $($states:ident: $values:ty;)* }
            append { $($append:ident: $source:ty, $cache:ty;)* }
            rope { $($rope:ident: $rotated:ty;)* }
            rope_append { $($rope_append:ident: $new:ty, $stored:ty;)* }
        ) => {
            $(
                #[unsafe(no_mangle)]
                unsafe extern "ptx-kernel" fn $attend(p: AttendParameters, variant: StandardParameters) {
                    // SAFETY: the launcher passes what the body's contract asks for.
                    unsafe { attend::attend::<$element, Standard, $dim, HOPPER, $query, $output>(p, variant) }
                }

                #[unsafe(no_mangle)]
                unsafe extern "ptx-kernel" fn $modified(p: AttendParameters, variant: ModifiedParameters) {
                    // SAFETY: the launcher passes what the body's contract asks for.
                    unsafe { attend::attend::<$element, Modified, $dim, HOPPER, $query, $output>(p, variant) }
                }
            )*
            $(
                #[unsafe(no_mangle)]
                unsafe extern "ptx-kernel" fn $rotary(p: AttendParameters, variant: RotaryParameters) {
                    // SAFETY: the launcher passes what the body's contract asks for.
                    unsafe {
                        attend::attend::<$turned, Rotary, $rotary_dim, HOPPER, $rotary_query, $rotary_output>(p, variant)
                    }
                }
            )*
            $(
                #[cfg(target_feature = "sm_90a")]
                #[unsafe(no_mangle)]
                unsafe extern "ptx-kernel" fn $prefill(p: AttendParameters, variant: StandardParameters, _: CacheMaps) {
                    let maps = Global::new(crate::third_parameter!(stringify!($prefill)));
                    // SAFETY: the launcher passes what the body's contract asks for.
                    unsafe {
                        prefill::<$prefilled, Standard, $wide, $value, $columns, $depth, $steps, $value_steps, $tiles>(
                            p, variant, maps,
                        )
                    }
                }

                #[cfg(target_feature = "sm_90a")]
                #[unsafe(no_mangle)]
                unsafe extern "ptx-kernel" fn $prefill_padded(
                    p: AttendParameters,
                    variant: StandardParameters,
                    _: CacheMaps,
                ) {
                    let maps = Global::new(crate::third_parameter!(stringify!($prefill_padded)));
                    // SAFETY: the launcher passes what the body's contract asks for.
                    unsafe {
                        prefill::<$prefilled, Standard<true>, $wide, $value, $columns, $depth, $steps, $value_steps, $tiles>(
                            p, variant, maps,
                        )
                    }
                }

                #[cfg(target_feature = "sm_90a")]
                #[unsafe(no_mangle)]
                unsafe extern "ptx-kernel" fn $prefill_modified(
                    p: AttendParameters,
                    variant: ModifiedParameters,
                    _: CacheMaps,
                ) {
                    let maps = Global::new(crate::third_parameter!(stringify!($prefill_modified)));
                    // SAFETY: the launcher passes what the body's contract asks for.
                    unsafe {
                        prefill::<$prefilled, Modified, $wide, $value, $columns, $depth, $steps, $value_steps, $tiles>(
                            p, variant, maps,
                        )
                    }
                }
            )*
            $(
                #[cfg(target_feature = "sm_90a")]
                #[unsafe(no_mangle)]
                unsafe extern "ptx-kernel" fn $prefill_rotary(
                    p: AttendParameters,
                    variant: RotaryParameters,
                    _: CacheMaps,
                ) {
                    let maps = Global::new(crate::third_parameter!(stringify!($prefill_rotary)));
                    // SAFETY: the launcher passes what the body's contract asks for.
                    unsafe {
                        prefill::<
                            $prefill_turned, Rotary, $turned_dim, $turned_dim, $turned_columns, $turned_depth,
                            $turned_steps, $turned_steps, $turned_tiles,
                        >(p, variant, maps)
                    }
                }
            )*
            $(
                #[unsafe(no_mangle)]
                unsafe extern "ptx-kernel" fn $fold(p: FoldParameters) {
                    // SAFETY: the launcher passes what the body's contract asks for.
                    unsafe { attend::fold::fold::<$folded>(p) }
                }
            )*
            $(
                #[unsafe(no_mangle)]
                unsafe extern "ptx-kernel" fn $states(p: MergeStatesParameters) {
                    // SAFETY: the launcher passes what the body's contract asks for.
                    unsafe { merge::merge_states::<$values>(p) }
                }
            )*
            $(
                #[unsafe(no_mangle)]
                unsafe extern "ptx-kernel" fn $append(p: AppendParameters) {
                    // SAFETY: the launcher passes what the body's contract asks for.
                    unsafe { append::append::<$source, $cache>(p) }
                }
            )*
            $(
                #[unsafe(no_mangle)]
                unsafe extern "ptx-kernel" fn $rope(p: RopeParameters) {
                    // SAFETY: the launcher passes what the body's contract asks for.
                    unsafe { rope::rope::<$rotated>(p) }
                }
            )*
            $(
                #[unsafe(no_mangle)]
                unsafe extern "ptx-kernel" fn $rope_append(p: RopeAppendParameters) {
                    // SAFETY: the launcher passes what the body's contract asks for.
                    unsafe { rope_append::rope_append::<$new, $stored>(p) }
                }
            )*
        };
    }
    for_each_kernel!(stamp);

    #[unsafe(no_mangle)]
    unsafe extern "ptx-kernel" fn positions(p: PositionsParameters) {
        // SAFETY: the launcher passes what the body's contract asks for.
        unsafe { append::positions(p) }
    }

    #[unsafe(no_mangle)]
    unsafe extern "ptx-kernel" fn check_page_ids(p: CheckPageIdsParameters) {
        // SAFETY: the launcher passes what the body's contract asks for.
        unsafe { validate::check_page_ids(p) }
    }

    #[unsafe(no_mangle)]
    unsafe extern "ptx-kernel" fn check_append(p: CheckAppendParameters) {
        // SAFETY: the launcher passes what the body's contract asks for.
        unsafe { validate::check_append(p) }
    }

    #[unsafe(no_mangle)]
    unsafe extern "ptx-kernel" fn stream_read(p: StreamParameters) {
        // SAFETY: the launcher passes what the body's contract asks for.
        unsafe { stream::read(p) }
    }

    #[unsafe(no_mangle)]
    unsafe extern "ptx-kernel" fn stream_copy(p: StreamParameters) {
        // SAFETY: the launcher passes what the body's contract asks for.
        unsafe { stream::copy(p) }
    }
}

#[cfg(not(target_arch = "nvptx64"))]
pub use host::KERNELS;
#[cfg(not(target_arch = "nvptx64"))]
pub(crate) use host::{attend_bounds, prefill_bounds};

#[cfg(not(target_arch = "nvptx64"))]
mod host {
    use crate::abi::{
        manifest::{KernelEntry, LaunchBounds},
        parameters::{CHECK_SHARED_BYTES, CHECK_THREADS},
        tile::{
            APPEND_THREADS, AttendTile, FOLD_BLOCKS_PER_MULTIPROCESSOR, FOLD_SHARED_BYTES, FOLD_THREADS, Family,
            MERGE_THREADS, PrefillTile, ROPE_THREADS, STREAM_THREADS,
        },
    };

    pub(crate) fn attend_bounds(head_dim: u32, family: Family) -> Option<LaunchBounds> {
        AttendTile::new(head_dim, family).map(|tile| LaunchBounds {
            threads: tile.threads(),
            blocks_per_multiprocessor: tile.blocks_per_multiprocessor,
            shared_bytes: tile.shared_bytes(),
        })
    }

    pub(crate) fn prefill_bounds(
        [query_dim, value_dim]: [u32; 2],
        is_plain: bool,
        family: Family,
    ) -> Option<LaunchBounds> {
        match family {
            Family::Sm80 => None,
            Family::Sm90a => PrefillTile::new(query_dim, value_dim, is_plain).map(|tile| LaunchBounds {
                threads: tile.threads(),
                blocks_per_multiprocessor: 1,
                shared_bytes: tile.shared_bytes(),
            }),
        }
    }

    fn merge_bounds(_: Family) -> Option<LaunchBounds> {
        Some(LaunchBounds { threads: MERGE_THREADS, blocks_per_multiprocessor: 2, shared_bytes: 0 })
    }

    fn fold_bounds(_: Family) -> Option<LaunchBounds> {
        Some(LaunchBounds {
            threads: FOLD_THREADS,
            blocks_per_multiprocessor: FOLD_BLOCKS_PER_MULTIPROCESSOR,
            shared_bytes: FOLD_SHARED_BYTES,
        })
    }

    fn append_bounds(_: Family) -> Option<LaunchBounds> {
        Some(LaunchBounds { threads: APPEND_THREADS, blocks_per_multiprocessor: 3, shared_bytes: 0 })
    }

    /// Two blocks leave a thread 128 registers; the f32 kernels take up to 124.
    fn rope_bounds(_: Family) -> Option<LaunchBounds> {
        Some(LaunchBounds { threads: ROPE_THREADS, blocks_per_multiprocessor: 2, shared_bytes: 0 })
    }

    fn check_bounds(_: Family) -> Option<LaunchBounds> {
        Some(LaunchBounds { threads: CHECK_THREADS, blocks_per_multiprocessor: 1, shared_bytes: CHECK_SHARED_BYTES })
    }

    fn stream_bounds(_: Family) -> Option<LaunchBounds> {
        Some(LaunchBounds { threads: STREAM_THREADS, blocks_per_multiprocessor: 2, shared_bytes: 0 })
    }

    macro_rules! list {
        (
            attend { $($attend:ident $modified:ident: $element:ty, $dim:literal, $query:literal, $output:literal;)* }
            rotary { $($rotary:ident: $turned:ty, $rotary_dim:literal, $rotary_query:literal, $rotary_output:literal;)* }
            prefill {
                $($prefill:ident $prefill_padded:ident $prefill_modified:ident: $prefilled:ty, $wide:literal,
                    $value:literal, $columns:literal, $depth:literal, $steps:literal, $value_steps:literal,
                    $tiles:literal;)*
            }
            prefill_rotary {
                $($prefill_rotary:ident: $prefill_turned:ty, $turned_dim:literal, $turned_columns:literal,
                    $turned_depth:literal, $turned_steps:literal, $turned_tiles:literal;)*
            }
            fold { $($fold:ident: $folded:ty;)* }
            merge_states { $($states:ident: $values:ty;)* }
            append { $($append:ident: $source:ty, $cache:ty;)* }
            rope { $($rope:ident: $rotated:ty;)* }
            rope_append { $($rope_append:ident: $new:ty, $stored:ty;)* }
        ) => {
            /// Every kernel.
            pub const KERNELS: &[KernelEntry] = &[
                $(KernelEntry { symbol: stringify!($attend), launch: |f| attend_bounds($dim, f), hot: true, needed: true },)*
                $(KernelEntry { symbol: stringify!($modified), launch: |f| attend_bounds($dim, f), hot: true, needed: true },)*
                $(KernelEntry { symbol: stringify!($rotary), launch: |f| attend_bounds($rotary_dim, f), hot: true, needed: true },)*
                $(KernelEntry { symbol: stringify!($prefill), launch: |f| prefill_bounds([$wide, $value], true, f), hot: true, needed: true },)*
                $(KernelEntry { symbol: stringify!($prefill_padded), launch: |f| prefill_bounds([$wide, $value], true, f), hot: true, needed: true },)*
                $(KernelEntry { symbol: stringify!($prefill_modified), launch: |f| prefill_bounds([$wide, $value], false, f), hot: true, needed: true },)*
                $(KernelEntry { symbol: stringify!($prefill_rotary), launch: |f| prefill_bounds([$turned_dim; 2], false, f), hot: true, needed: true },)*
                $(KernelEntry { symbol: stringify!($fold), launch: fold_bounds, hot: true, needed: true },)*
                $(KernelEntry { symbol: stringify!($states), launch: merge_bounds, hot: true, needed: true },)*
                $(KernelEntry { symbol: stringify!($append), launch: append_bounds, hot: true, needed: true },)*
                $(KernelEntry { symbol: stringify!($rope), launch: rope_bounds, hot: true, needed: true },)*
                $(KernelEntry { symbol: stringify!($rope_append), launch: rope_bounds, hot: true, needed: true },)*
                KernelEntry { symbol: "positions", launch: append_bounds, hot: false, needed: true },
                KernelEntry { symbol: "check_page_ids", launch: check_bounds, hot: true, needed: true },
                KernelEntry { symbol: "check_append", launch: check_bounds, hot: true, needed: true },
                KernelEntry { symbol: "stream_read", launch: stream_bounds, hot: true, needed: true },
                KernelEntry { symbol: "stream_copy", launch: stream_bounds, hot: true, needed: true },
            ];
        };
    }
    for_each_kernel!(list);
}

#[cfg(all(not(target_arch = "nvptx64"), feature = "emulator", feature = "entries"))]
pub use emulated::*;

#[cfg(all(not(target_arch = "nvptx64"), feature = "emulator", feature = "entries"))]
mod emulated {
    use simt::number::{Bf16, F16};
    use simt::tensor::Element;

    use crate::abi::{parameters::*, tile::Family};
    use crate::variant::{
        Modified, ModifiedParameters, Rotary, RotaryParameters, Standard, StandardParameters, Variant,
    };
    use crate::{append, attend, merge, rope, rope_append, stream, validate};

    /// What a kernel is launched with.
    #[derive(Clone, Copy, Debug)]
    pub enum Parameters {
        /// For `attend_*`.
        Attend(AttendParameters, StandardParameters),
        /// For `attend_modified_*`.
        AttendModified(AttendParameters, ModifiedParameters),
        /// For `attend_rotary_*`.
        AttendRotary(AttendParameters, RotaryParameters),
        /// For `prefill_*` and `prefill_padded_*`, with the address of its [`CacheMaps`].
        Prefill(AttendParameters, StandardParameters, u64),
        /// For `prefill_modified_*`.
        PrefillModified(AttendParameters, ModifiedParameters, u64),
        /// For `prefill_rotary_*`.
        PrefillRotary(AttendParameters, RotaryParameters, u64),
        /// For `fold_*`.
        Fold(FoldParameters),
        /// For `merge_states_*`.
        MergeStates(MergeStatesParameters),
        /// For `append_*`.
        Append(AppendParameters),
        /// For `positions`.
        Positions(PositionsParameters),
        /// For `check_page_ids`.
        CheckPageIds(CheckPageIdsParameters),
        /// For `check_append`.
        CheckAppend(CheckAppendParameters),
        /// For `rope_bf16` and the like.
        Rope(RopeParameters),
        /// For `rope_append_*`.
        RopeAppend(RopeAppendParameters),
        /// For `stream_*`.
        Stream(StreamParameters),
    }

    /// The attend kernel as a function of its own: all of them inlined into one take the compiler minutes.
    ///
    /// # Safety
    /// As [`attend::attend`].
    #[inline(never)]
    unsafe fn attend_alone<
        E: Element + merge::Values,
        V: Variant,
        const HEAD_DIM: u32,
        const HOPPER: bool,
        const QUERY_STEPS: usize,
        const OUTPUT_STEPS: usize,
    >(
        p: AttendParameters,
        variant: V::Parameters,
    ) {
        // SAFETY: the caller's contract is this function's own.
        unsafe { attend::attend::<E, V, HEAD_DIM, HOPPER, QUERY_STEPS, OUTPUT_STEPS>(p, variant) }
    }

    /// A prefill kernel as a function of its own.
    ///
    /// # Safety
    /// As [`attend::prefill::prefill`].
    #[inline(never)]
    unsafe fn prefill_alone<
        E: Element + merge::Values,
        V: Variant,
        const HEAD_DIM: u32,
        const VALUE_DIM: u32,
        const COLUMNS: usize,
        const DEPTH: usize,
        const STEPS: usize,
        const VALUE_STEPS: usize,
        const TILES: usize,
    >(
        p: AttendParameters,
        variant: V::Parameters,
        maps: u64,
    ) {
        let maps = simt::global::Global::new(maps);
        // SAFETY: the caller's contract is this function's own.
        unsafe {
            attend::prefill::prefill::<E, V, HEAD_DIM, VALUE_DIM, COLUMNS, DEPTH, STEPS, VALUE_STEPS, TILES>(
                p, variant, maps,
            )
        }
    }

    macro_rules! bodies {
        (
            attend { $($attend:ident $modified:ident: $element:ty, $dim:literal, $query:literal, $output:literal;)* }
            rotary { $($rotary:ident: $turned:ty, $rotary_dim:literal, $rotary_query:literal, $rotary_output:literal;)* }
            prefill {
                $($prefill:ident $prefill_padded:ident $prefill_modified:ident: $prefilled:ty, $wide:literal,
                    $value:literal, $columns:literal, $depth:literal, $steps:literal, $value_steps:literal,
                    $tiles:literal;)*
            }
            prefill_rotary {
                $($prefill_rotary:ident: $prefill_turned:ty, $turned_dim:literal, $turned_columns:literal,
                    $turned_depth:literal, $turned_steps:literal, $turned_tiles:literal;)*
            }
            fold { $($fold:ident: $folded:ty;)* }
            merge_states { $($states:ident: $values:ty;)* }
            append { $($append:ident: $source:ty, $cache:ty;)* }
            rope { $($rope:ident: $rotated:ty;)* }
            rope_append { $($rope_append:ident: $new:ty, $stored:ty;)* }
        ) => {
            /// Runs one thread of the kernel of that symbol; `None` where there is no such kernel or it takes other
            /// parameters.
            ///
            /// # Safety
            /// Called inside a launch of the emulator with the kernel's launch bounds; the parameters describe live
            /// memory.
            pub unsafe fn body(symbol: &str, family: Family, parameters: Parameters) -> Option<()> {
                // SAFETY: the caller's contract is the bodies' own.
                unsafe {
                    match (symbol, parameters, family) {
                        $(
                            (stringify!($attend), Parameters::Attend(p, v), Family::Sm80) => {
                                attend_alone::<$element, Standard, $dim, false, $query, $output>(p, v)
                            }
                            (stringify!($attend), Parameters::Attend(p, v), Family::Sm90a) => {
                                attend_alone::<$element, Standard, $dim, true, $query, $output>(p, v)
                            }
                            (stringify!($modified), Parameters::AttendModified(p, v), Family::Sm80) => {
                                attend_alone::<$element, Modified, $dim, false, $query, $output>(p, v)
                            }
                            (stringify!($modified), Parameters::AttendModified(p, v), Family::Sm90a) => {
                                attend_alone::<$element, Modified, $dim, true, $query, $output>(p, v)
                            }
                        )*
                        $(
                            (stringify!($rotary), Parameters::AttendRotary(p, v), Family::Sm80) => {
                                attend_alone::<$turned, Rotary, $rotary_dim, false, $rotary_query, $rotary_output>(p, v)
                            }
                            (stringify!($rotary), Parameters::AttendRotary(p, v), Family::Sm90a) => {
                                attend_alone::<$turned, Rotary, $rotary_dim, true, $rotary_query, $rotary_output>(p, v)
                            }
                        )*
                        $(
                            (stringify!($prefill), Parameters::Prefill(p, v, maps), Family::Sm90a) => {
                                prefill_alone::<
                                    $prefilled, Standard, $wide, $value, $columns, $depth, $steps, $value_steps, $tiles,
                                >(p, v, maps)
                            }
                            (stringify!($prefill_padded), Parameters::Prefill(p, v, maps), Family::Sm90a) => {
                                prefill_alone::<
                                    $prefilled, Standard<true>, $wide, $value, $columns, $depth, $steps, $value_steps,
                                    $tiles,
                                >(p, v, maps)
                            }
                            (stringify!($prefill_modified), Parameters::PrefillModified(p, v, maps), Family::Sm90a) => {
                                prefill_alone::<
                                    $prefilled, Modified, $wide, $value, $columns, $depth, $steps, $value_steps, $tiles,
                                >(p, v, maps)
                            }
                        )*
                        $(
                            (stringify!($prefill_rotary), Parameters::PrefillRotary(p, v, maps), Family::Sm90a) => {
                                prefill_alone::<
                                    $prefill_turned, Rotary, $turned_dim, $turned_dim, $turned_columns, $turned_depth,
                                    $turned_steps, $turned_steps, $turned_tiles,
                                >(p, v, maps)
                            }
                        )*
                        $((stringify!($fold), Parameters::Fold(p), _) => attend::fold::fold::<$folded>(p),)*
                        $((stringify!($states), Parameters::MergeStates(p), _) => merge::merge_states::<$values>(p),)*
                        $((stringify!($append), Parameters::Append(p), _) => append::append::<$source, $cache>(p),)*
                        $((stringify!($rope), Parameters::Rope(p), _) => rope::rope::<$rotated>(p),)*
                        $(
                            (stringify!($rope_append), Parameters::RopeAppend(p), _) => {
                                rope_append::rope_append::<$new, $stored>(p)
                            }
                        )*
                        ("positions", Parameters::Positions(p), _) => append::positions(p),
                        ("check_page_ids", Parameters::CheckPageIds(p), _) => validate::check_page_ids(p),
                        ("check_append", Parameters::CheckAppend(p), _) => validate::check_append(p),
                        ("stream_read", Parameters::Stream(p), _) => stream::read(p),
                        ("stream_copy", Parameters::Stream(p), _) => stream::copy(p),
                        _ => return None,
                    }
                }
                Some(())
            }
        };
    }
    for_each_kernel!(bodies);
}
