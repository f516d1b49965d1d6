//! Kernels of user-defined variants: what a crate of them is made with.
//!
//! In: a type that is a [`Variant`], a name, element types and head dims, by
//! [`attend_kernels!`](crate::attend_kernels). Out: on the GPU, an attend and, on Hopper, a prefill kernel for each
//! element type and head dim; on a host (with the feature `emulator`), [`CustomVariant`]: the table of those entries for
//! the build and the bundle, and the kernels themselves for the emulator. Invariant: a kernel does what the config says
//! besides the variant, its scale, causal rule and window, in the same way as oxattn's own.

use crate::abi::tile::PrefillTile;
#[cfg(not(target_arch = "nvptx64"))]
use crate::{
    abi::{
        manifest::{KernelEntry, LaunchBounds},
        tile::Family,
    },
    variant::Variant,
};

#[cfg(any(target_arch = "nvptx64", feature = "emulator"))]
pub use device::*;

/// Longest name of a variant.
pub const MOST_NAME_BYTES: usize = 32;

/// A variant with kernels of its own, as [`attend_kernels!`](crate::attend_kernels) makes them.
#[cfg(not(target_arch = "nvptx64"))]
pub trait CustomVariant: Variant<Parameters: bytemuck::Pod> {
    /// What a config calls it by.
    const NAME: &'static str;
    /// The kernels, those of an element type and a kind together. `attend_<name>_<dtype>_d<head dim>` is one of them, and
    /// `prefill_<name>_<dtype>_d<head dim>` may be.
    const KERNELS: &'static [&'static [KernelEntry]];

    /// Runs one thread of the attend kernel of that symbol; `None` where there is no such kernel.
    ///
    /// # Safety
    /// Called inside a launch of the emulator with the kernel's launch bounds; the parameters describe live memory.
    #[cfg(feature = "emulator")]
    unsafe fn emulate(
        symbol: &str,
        family: Family,
        p: crate::abi::parameters::AttendParameters,
        config: crate::abi::parameters::ConfigParameters,
        own: Self::Parameters,
    ) -> Option<()>;

    /// The same of a prefill kernel. `maps` is the address of its
    /// [`CacheMaps`](crate::abi::parameters::CacheMaps), at a multiple of 64 bytes.
    ///
    /// # Safety
    /// As [`emulate`](Self::emulate).
    #[cfg(feature = "emulator")]
    unsafe fn emulate_prefill(
        symbol: &str,
        p: crate::abi::parameters::AttendParameters,
        config: crate::abi::parameters::ConfigParameters,
        maps: u64,
        own: Self::Parameters,
    ) -> Option<()>;
}

/// The launch bounds of an attend kernel.
#[doc(hidden)]
#[cfg(not(target_arch = "nvptx64"))]
pub fn bounds(head_dim: u32, family: Family) -> Option<LaunchBounds> {
    crate::entries::attend_bounds(head_dim, family)
}

/// The launch bounds of a prefill kernel; `None` where there is none for the head dim.
#[doc(hidden)]
#[cfg(not(target_arch = "nvptx64"))]
pub fn prefill_bounds(head_dim: u32, family: Family) -> Option<LaunchBounds> {
    crate::entries::prefill_bounds([head_dim, head_dim], false, family)
}

/// Refuses, as a constant that does not compile, head dims of prefill kernels that would never be launched.
#[doc(hidden)]
pub const fn check_prefill_head_dims(head_dims: &[u32], prefill_head_dims: &[u32]) {
    let mut i = 0;
    while i < prefill_head_dims.len() {
        let (head_dim, mut at) = (prefill_head_dims[i], 0);
        assert!(
            PrefillTile::new(head_dim, head_dim, false).is_some(),
            "prefill kernels are for head dims 64, 128 and 256"
        );
        while at < head_dims.len() && head_dims[at] != head_dim {
            at += 1;
        }
        assert!(at < head_dims.len(), "a prefill kernel's head dim is one of the attend kernels' too");
        i += 1;
    }
}

/// `name`, if it can be part of a symbol; a constant of it does not compile otherwise.
#[doc(hidden)]
pub const fn checked_name(name: &str) -> &str {
    let (bytes, mut i) = (name.as_bytes(), 0);
    assert!(!bytes.is_empty() && bytes.len() <= MOST_NAME_BYTES, "a variant's name has 1 to 32 characters");
    while i < bytes.len() {
        let fits = bytes[i].is_ascii_lowercase() || bytes[i].is_ascii_digit() || bytes[i] == b'_';
        assert!(fits, "a variant's name is of lower-case letters, digits and underscores");
        i += 1;
    }
    name
}

#[cfg(any(target_arch = "nvptx64", feature = "emulator"))]
mod device {
    use simt::tensor::Element;

    use crate::abi::parameters::{AttendParameters, ConfigParameters};
    use crate::abi::tile::{AttendTile, Family, PrefillTile};
    use crate::merge::Values;
    use crate::tile::Rows;
    use crate::variant::{Piece, QueryAt, RowAt, Variant, Window};

    /// Element types by the names that kernel symbols have.
    #[doc(hidden)]
    #[allow(non_camel_case_types, reason = "as in symbols")]
    pub mod elements {
        pub type bf16 = simt::number::Bf16;
        pub type f16 = simt::number::F16;
    }

    /// Whether this build is the one for Hopper.
    #[doc(hidden)]
    #[cfg(target_arch = "nvptx64")]
    pub const HOPPER: bool = cfg!(target_feature = "sm_90a");

    /// 16-column steps of a warp's share of the output, the same on both families.
    #[doc(hidden)]
    pub const fn output_steps(head_dim: u32) -> usize {
        match AttendTile::new(head_dim, Family::Sm90a) {
            Some(tile) => (head_dim / 16 / tile.output_warps) as usize,
            None => panic!("no kernel is made for this head dim"),
        }
    }

    /// 8-column steps of a prefill kernel's scores.
    #[doc(hidden)]
    pub const fn prefill_columns(head_dim: u32) -> usize {
        match PrefillTile::new(head_dim, head_dim, false) {
            Some(tile) => (tile.tile_tokens / 8) as usize,
            None => panic!("no prefill kernel is made for this head dim"),
        }
    }

    /// A variant and what the config asks for beside it, in an attend or a prefill kernel.
    #[derive(Clone, Copy)]
    struct Configured<V> {
        variant: V,
        scale_log2: f32,
        window: Window,
    }

    /// A query row of one.
    #[derive(Clone, Copy)]
    struct Row<R> {
        own: R,
        position: i32,
    }

    impl<V: Variant> Variant for Configured<V> {
        type Parameters = (ConfigParameters, V::Parameters);
        type Row = Row<V::Row>;
        const IS_LIGHT: bool = V::IS_LIGHT;
        const TRANSFORMS: bool = V::TRANSFORMS;

        #[inline(always)]
        fn bind((config, own): (ConfigParameters, V::Parameters)) -> Self {
            let window = Window { left: config.window_left, right: config.window_right };
            Configured { variant: V::bind(own), scale_log2: config.scale_log2, window }
        }

        #[inline(always)]
        #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
        unsafe fn transform_queries<E: Element, const HEAD_DIM: u32>(
            &self,
            tile: impl Rows,
            rows: u32,
            threads: u32,
            at: impl Fn(u32) -> QueryAt,
        ) {
            // SAFETY: the trait's contract.
            unsafe { self.variant.transform_queries::<E, HEAD_DIM>(tile, rows, threads, at) }
        }

        #[inline(always)]
        #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
        unsafe fn transform_keys<E: Element, const HEAD_DIM: u32>(
            &self,
            tile: impl Rows,
            keys: [u32; 2],
            threads: u32,
        ) {
            // SAFETY: the trait's contract.
            unsafe { self.variant.transform_keys::<E, HEAD_DIM>(tile, keys, threads) }
        }

        #[inline(always)]
        #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
        unsafe fn row(&self, at: impl FnOnce() -> RowAt) -> Row<V::Row> {
            let at = at();
            // SAFETY: the trait's contract.
            Row { own: unsafe { self.variant.row(|| at) }, position: at.position }
        }

        #[inline(always)]
        fn logit(&self, row: Row<V::Row>, score: f32, key: u32) -> f32 {
            self.variant.logit(row.own, score * self.scale_log2, key)
        }

        #[inline(always)]
        fn may_hide(&self, rows: [Row<V::Row>; 2], keys: [u32; 2]) -> bool {
            let [first, last] = rows;
            self.window.may_hide([first.position, last.position], keys)
                || self.variant.may_hide([first.own, last.own], keys)
        }

        #[inline(always)]
        #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
        unsafe fn hides(&self, row: Row<V::Row>, key: u32) -> bool {
            // SAFETY: the trait's contract.
            self.window.hides(row.position, key) || unsafe { self.variant.hides(row.own, key) }
        }

        #[inline(always)]
        #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
        unsafe fn start(&self, row: Row<V::Row>, piece: Piece) -> [f32; 2] {
            // SAFETY: the trait's contract.
            unsafe { self.variant.start(row.own, piece) }
        }

        #[inline(always)]
        fn is_softmax(&self) -> bool {
            self.variant.is_softmax()
        }
    }

    /// The attend kernel of a variant: the one place that all of [`attend_kernels!`](crate::attend_kernels) calls.
    ///
    /// # Safety
    /// As [`attend::attend`](crate::attend::attend).
    #[doc(hidden)]
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    // On a host a function of its own: all of them inlined into one take the compiler minutes.
    #[cfg_attr(not(target_arch = "nvptx64"), inline(never))]
    pub unsafe fn attend<
        E: Element + Values,
        V: Variant,
        const HEAD_DIM: u32,
        const HOPPER: bool,
        const QUERY_STEPS: usize,
        const OUTPUT_STEPS: usize,
    >(
        p: AttendParameters,
        config: ConfigParameters,
        own: V::Parameters,
    ) {
        // SAFETY: the caller's contract is this function's own.
        unsafe {
            crate::attend::attend::<E, Configured<V>, HEAD_DIM, HOPPER, QUERY_STEPS, OUTPUT_STEPS>(p, (config, own))
        }
    }

    /// The prefill kernel of a variant.
    ///
    /// # Safety
    /// As [`attend::prefill::prefill`](crate::attend::prefill::prefill).
    #[doc(hidden)]
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    #[cfg_attr(not(target_arch = "nvptx64"), inline(never))]
    pub unsafe fn prefill<
        E: Element + Values,
        V: Variant,
        const HEAD_DIM: u32,
        const COLUMNS: usize,
        const DEPTH: usize,
        const STEPS: usize,
        const TILES: usize,
    >(
        p: AttendParameters,
        config: ConfigParameters,
        maps: u64,
        own: V::Parameters,
    ) {
        let maps = simt::global::Global::new(maps);
        // SAFETY: the caller's contract is this function's own.
        unsafe {
            crate::attend::prefill::prefill::<E, Configured<V>, HEAD_DIM, HEAD_DIM, COLUMNS, DEPTH, STEPS, STEPS, TILES>(
                p,
                (config, own),
                maps,
            )
        }
    }
}

/// The address of the third parameter of the kernel whose symbol's parts are given: the hardware reads tensor maps where
/// they are, and a reference would be to a copy. The compiler calls parameter `i` of kernel `k` `k_param_i`.
#[doc(hidden)]
#[cfg(target_arch = "nvptx64")]
#[macro_export]
macro_rules! third_parameter {
    ($($part:expr),+) => {{
        let address: u64;
        // SAFETY: takes an address.
        unsafe {
            core::arch::asm!(
                concat!("mov.b64 {0}, ", $($part,)+ "_param_2; cvta.param.u64 {0}, {0};"),
                out(reg64) address, options(pure, nomem, nostack, preserves_flags))
        }
        address
    }};
}

/// Makes the kernels of a [`Variant`](crate::variant::Variant), for each element type (`bf16`, `f16`) and head dim
/// `attend_<name>_<dtype>_d<head dim>` and, where oxattn has prefill kernels (64, 128 and 256, on Hopper),
/// `prefill_<name>_<dtype>_d<head dim>`.
///
/// ```ignore
/// kernels_gpu::attend_kernels! { variant: MyVariant, name: "my_variant", elements: [bf16, f16], head_dims: [64, 128] }
/// ```
///
/// The name is of lower-case letters, digits and underscores, at most 32. `prefill_head_dims: [128]` behind the head dims
/// makes prefill kernels for these alone, and `[]` makes none. On a host the variant becomes a `CustomVariant`.
#[cfg(any(target_arch = "nvptx64", feature = "emulator"))]
#[macro_export]
macro_rules! attend_kernels {
    (
        variant: $variant:ty,
        name: $name:literal,
        elements: [$($element:ident),+ $(,)?],
        head_dims: $dims:tt $(,)?
    ) => {
        $crate::attend_kernels! { @all $variant, $name, [$($element)+], $dims, $dims }
    };
    (
        variant: $variant:ty,
        name: $name:literal,
        elements: [$($element:ident),+ $(,)?],
        head_dims: $dims:tt,
        prefill_head_dims: $prefill_dims:tt $(,)?
    ) => {
        const _: () = $crate::custom::check_prefill_head_dims(&$dims, &$prefill_dims);
        $crate::attend_kernels! { @all $variant, $name, [$($element)+], $dims, $prefill_dims }
    };

    (@all $variant:ty, $name:literal, [$($element:ident)+], $dims:tt, $prefill_dims:tt) => {
        const _: &str = $crate::custom::checked_name($name);

        #[cfg(target_arch = "nvptx64")]
        $crate::attend_kernels! { @entries $variant, $name, [$($element)+], $dims, $prefill_dims }

        #[cfg(not(target_arch = "nvptx64"))]
        impl $crate::custom::CustomVariant for $variant {
            const NAME: &'static str = $name;
            const KERNELS: &'static [&'static [$crate::abi::manifest::KernelEntry]] =
                &[$(
                    $crate::attend_kernels!(@table $name, $element, $dims),
                    $crate::attend_kernels!(@prefill_table $name, $element, $prefill_dims),
                )+];

            unsafe fn emulate(
                symbol: &str,
                family: $crate::abi::tile::Family,
                p: $crate::abi::parameters::AttendParameters,
                config: $crate::abi::parameters::ConfigParameters,
                own: <$variant as $crate::variant::Variant>::Parameters,
            ) -> Option<()> {
                // SAFETY: the caller's contract is the kernels' own.
                unsafe {
                    $($crate::attend_kernels! {
                        @emulate $variant, $name, $element, $dims, symbol family p config own
                    })+
                }
                None
            }

            #[allow(unused_variables, reason = "there may be no prefill kernels")]
            unsafe fn emulate_prefill(
                symbol: &str,
                p: $crate::abi::parameters::AttendParameters,
                config: $crate::abi::parameters::ConfigParameters,
                maps: u64,
                own: <$variant as $crate::variant::Variant>::Parameters,
            ) -> Option<()> {
                $($crate::attend_kernels! {
                    @emulate_prefill $variant, $name, $element, $prefill_dims, symbol p config maps own
                })+
                None
            }
        }
    };

    // What follows a head dim that oxattn has prefill kernels for.
    (@where_prefill 64 $($body:tt)*) => { $($body)* };
    (@where_prefill 128 $($body:tt)*) => { $($body)* };
    (@where_prefill 256 $($body:tt)*) => { $($body)* };
    (@where_prefill $other:tt $($body:tt)*) => {};

    (@entries $variant:ty, $name:literal, [$($element:ident)+], $dims:tt, $prefill_dims:tt) => {
        $(
            $crate::attend_kernels! { @entries_of $variant, $name, $element, $dims }
            $crate::attend_kernels! { @prefill_entries_of $variant, $name, $element, $prefill_dims }
        )+
    };
    (@entries_of $variant:ty, $name:literal, $element:ident, [$($dim:literal),+ $(,)?]) => {
        $(const _: () = {
            #[unsafe(export_name = concat!("attend_", $name, "_", stringify!($element), "_d", $dim))]
            unsafe extern "ptx-kernel" fn kernel(
                p: $crate::abi::parameters::AttendParameters,
                config: $crate::abi::parameters::ConfigParameters,
                own: <$variant as $crate::variant::Variant>::Parameters,
            ) {
                // SAFETY: the launcher passes what the body's contract asks for.
                unsafe {
                    $crate::custom::attend::<
                        $crate::custom::elements::$element,
                        $variant,
                        $dim,
                        { $crate::custom::HOPPER },
                        { $dim / 16 },
                        { $crate::custom::output_steps($dim) },
                    >(p, config, own)
                }
            }
        };)+
    };
    (@prefill_entries_of $variant:ty, $name:literal, $element:ident, [$($dim:tt),* $(,)?]) => {
        $($crate::attend_kernels! { @where_prefill $dim
            const _: () = {
                #[cfg(target_feature = "sm_90a")]
                #[unsafe(export_name = concat!("prefill_", $name, "_", stringify!($element), "_d", $dim))]
                unsafe extern "ptx-kernel" fn kernel(
                    p: $crate::abi::parameters::AttendParameters,
                    config: $crate::abi::parameters::ConfigParameters,
                    _: $crate::abi::parameters::CacheMaps,
                    own: <$variant as $crate::variant::Variant>::Parameters,
                ) {
                    let maps = $crate::third_parameter!("prefill_", $name, "_", stringify!($element), "_d", $dim);
                    // SAFETY: the launcher passes what the body's contract asks for.
                    unsafe {
                        $crate::custom::prefill::<
                            $crate::custom::elements::$element,
                            $variant,
                            $dim,
                            { $crate::custom::prefill_columns($dim) },
                            { $crate::custom::prefill_columns($dim) / 2 },
                            { $dim / 16 },
                            { $dim / 8 },
                        >(p, config, maps, own)
                    }
                }
            };
        })*
    };

    (@table $name:literal, $element:ident, [$($dim:literal),+ $(,)?]) => {
        &[$($crate::abi::manifest::KernelEntry {
            symbol: concat!("attend_", $name, "_", stringify!($element), "_d", $dim),
            launch: |family| $crate::custom::bounds($dim, family),
            hot: true,
            needed: true,
        }),+]
    };
    (@prefill_table $name:literal, $element:ident, [$($dim:literal),* $(,)?]) => {
        &[$($crate::abi::manifest::KernelEntry {
            symbol: concat!("prefill_", $name, "_", stringify!($element), "_d", $dim),
            launch: |family| $crate::custom::prefill_bounds($dim, family),
            hot: true,
            needed: false,
        }),*]
    };

    (
        @emulate $variant:ty, $name:literal, $element:ident, [$($dim:literal),+ $(,)?],
        $symbol:ident $family:ident $p:ident $config:ident $own:ident
    ) => {
        $(if $symbol == concat!("attend_", $name, "_", stringify!($element), "_d", $dim) {
            type Element = $crate::custom::elements::$element;
            const QUERY_STEPS: usize = $dim / 16;
            const OUTPUT_STEPS: usize = $crate::custom::output_steps($dim);
            match $family {
                $crate::abi::tile::Family::Sm80 => {
                    $crate::custom::attend::<Element, $variant, $dim, false, QUERY_STEPS, OUTPUT_STEPS>($p, $config, $own)
                }
                $crate::abi::tile::Family::Sm90a => {
                    $crate::custom::attend::<Element, $variant, $dim, true, QUERY_STEPS, OUTPUT_STEPS>($p, $config, $own)
                }
            }
            return Some(());
        })+
    };
    (
        @emulate_prefill $variant:ty, $name:literal, $element:ident, [$($dim:tt),* $(,)?],
        $symbol:ident $p:ident $config:ident $maps:ident $own:ident
    ) => {
        $($crate::attend_kernels! { @where_prefill $dim
            if $symbol == concat!("prefill_", $name, "_", stringify!($element), "_d", $dim) {
                const COLUMNS: usize = $crate::custom::prefill_columns($dim);
                // SAFETY: the caller's contract is the kernel's own.
                unsafe {
                    $crate::custom::prefill::<
                        $crate::custom::elements::$element,
                        $variant,
                        $dim,
                        COLUMNS,
                        { COLUMNS / 2 },
                        { $dim / 16 },
                        { $dim / 8 },
                    >($p, $config, $maps, $own)
                }
                return Some(());
            }
        })*
    };
}
