//! Kernels of user-defined variants: what a crate of them is made with.
//!
//! In: a type that is a [`Variant`], a name, element types and head dims, by
//! [`attend_kernels!`](crate::attend_kernels). Out: on the GPU, an entry for each element type and head dim; on a host
//! (with the feature `emulator`), [`CustomVariant`]: the table of those entries for the build and the bundle, and the
//! kernels themselves for the emulator. Invariant: a kernel does what the config says besides the variant, its scale,
//! causal rule and window, in the same way as oxattn's own.

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
    /// The kernels, those of an element type together. Kernel `attend_<name>_<dtype>_d<head dim>` is one of them.
    const KERNELS: &'static [&'static [KernelEntry]];

    /// Runs one thread of the kernel of that symbol; `None` where there is no such kernel.
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
}

/// The launch bounds of an attend kernel.
#[doc(hidden)]
#[cfg(not(target_arch = "nvptx64"))]
pub fn bounds(head_dim: u32, family: Family) -> Option<LaunchBounds> {
    crate::entries::attend_bounds(head_dim, family)
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
    use crate::abi::tile::{AttendTile, Family};
    use crate::merge::Values;
    use crate::variant::{Piece, RowAt, Variant, Window};

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

    /// A variant and what the config asks for beside it.
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

        #[inline(always)]
        fn bind((config, own): (ConfigParameters, V::Parameters)) -> Self {
            let window = Window { left: config.window_left, right: config.window_right };
            Configured { variant: V::bind(own), scale_log2: config.scale_log2, window }
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

        #[inline(always)]
        fn weight(&self, logit: f32) -> f32 {
            self.variant.weight(logit)
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
}

/// Makes the attend kernels of a [`Variant`](crate::variant::Variant), one for each element type (`bf16`, `f16`) and
/// head dim: `attend_<name>_<dtype>_d<head dim>`.
///
/// ```ignore
/// kernels_gpu::attend_kernels! { variant: MyVariant, name: "my_variant", elements: [bf16, f16], head_dims: [64, 128] }
/// ```
///
/// The name is of lower-case letters, digits and underscores, at most 32. On a host the variant becomes a
/// `CustomVariant`.
#[cfg(any(target_arch = "nvptx64", feature = "emulator"))]
#[macro_export]
macro_rules! attend_kernels {
    (
        variant: $variant:ty,
        name: $name:literal,
        elements: [$($element:ident),+ $(,)?],
        head_dims: $dims:tt $(,)?
    ) => {
        const _: &str = $crate::custom::checked_name($name);

        #[cfg(target_arch = "nvptx64")]
        $crate::attend_kernels! { @entries $variant, $name, [$($element)+], $dims }

        #[cfg(not(target_arch = "nvptx64"))]
        impl $crate::custom::CustomVariant for $variant {
            const NAME: &'static str = $name;
            const KERNELS: &'static [&'static [$crate::abi::manifest::KernelEntry]] =
                &[$($crate::attend_kernels!(@table $name, $element, $dims)),+];

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
        }
    };

    (@entries $variant:ty, $name:literal, [$($element:ident)+], $dims:tt) => {
        $($crate::attend_kernels! { @entries_of $variant, $name, $element, $dims })+
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

    (@table $name:literal, $element:ident, [$($dim:literal),+ $(,)?]) => {
        &[$($crate::abi::manifest::KernelEntry {
            symbol: concat!("attend_", $name, "_", stringify!($element), "_d", $dim),
            launch: |family| $crate::custom::bounds($dim, family),
            hot: true,
        }),+]
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
}
