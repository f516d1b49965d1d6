//! Where each request's part of a custom mask lies.
//!
//! In: lengths and the mask's form. Out: a [`MaskRequest`] for each request, also those without query tokens, and the
//! bytes of the whole. Parts follow each other, each from a byte on.

use kernels_gpu::abi::plan::MaskRequest;

use super::Limits;
use crate::config::MaskForm;
use crate::page_table::{Lengths, QueryLengths};

/// Elements of a byte.
fn elements_of_byte(form: MaskForm) -> u64 {
    match form {
        MaskForm::Bits => 8,
        MaskForm::Bytes => 1,
    }
}

/// Places the parts of a batch; returns the bytes of them all.
pub(super) fn write(form: MaskForm, kv_lens: &[u32], query: QueryLengths<'_>, places: &mut [MaskRequest]) -> u64 {
    let elements_of_byte = elements_of_byte(form);
    let mut bytes = 0;
    for (request, (place, &kv_len)) in places.iter_mut().zip(kv_lens).enumerate() {
        let query_len = match query.0 {
            Lengths::Uniform(query_len) => query_len,
            Lengths::Indptr(indptr) => indptr[request + 1] - indptr[request],
        };
        *place = MaskRequest { begin_elements: bytes * elements_of_byte, kv_len_tokens: kv_len, padding: 0 };
        bytes += (query_len as u64 * kv_len as u64).div_ceil(elements_of_byte);
    }
    bytes
}

impl Limits {
    /// Bytes that hold the mask of every batch within the limits: what a run that is captured into a graph is given.
    pub fn mask_bytes(&self, form: MaskForm) -> u64 {
        let elements = self.max_query_tokens as u64 * self.max_kv_len_tokens as u64;
        elements.div_ceil(elements_of_byte(form)) + self.max_requests as u64
    }
}
