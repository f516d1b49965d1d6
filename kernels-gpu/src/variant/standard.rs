//! Plain softmax attention: the score times a scale.

use super::{RowAt, Variant};

/// Plain softmax attention, in kernels that take rows of their own head dim alone or, with `PADS`, narrower ones too.
#[derive(Clone, Copy)]
pub struct Standard<const PADS: bool = false> {
    scale_log2: f32,
}

/// [`Standard`]'s parameters.
#[derive(Clone, Copy, Debug, PartialEq)]
#[cfg_attr(not(target_arch = "nvptx64"), derive(bytemuck::Pod, bytemuck::Zeroable))]
#[repr(C)]
pub struct StandardParameters {
    /// The softmax scale times log2(e), positive.
    pub scale_log2: f32,
}

impl<const PADS: bool> Variant for Standard<PADS> {
    type Parameters = StandardParameters;
    type Row = ();
    const IS_LIGHT: bool = true;
    const IS_PLAIN: bool = true;
    const PADS: bool = PADS;

    #[inline(always)]
    fn bind(parameters: StandardParameters) -> Self {
        Standard { scale_log2: parameters.scale_log2 }
    }

    #[inline(always)]
    unsafe fn row(&self, _at: impl FnOnce() -> RowAt) {}

    #[inline(always)]
    fn logit(&self, (): (), score: f32, _key: u32) -> f32 {
        score * self.scale_log2
    }

    #[inline(always)]
    fn factor(&self) -> Option<f32> {
        Some(self.scale_log2)
    }
}
