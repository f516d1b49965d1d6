//! Checks of values that lie on the device: page ids and slots. On request, for engines that would rather be told than
//! read through a stray id.
//!
//! In: what a run or an append is given. Out: a report on the device of [`REPORT_BYTES`] bytes, which [`verdict`] reads
//! once the engine has copied it to the host. Invariant: a check looks at exactly what the call it stands before would
//! read, launches one small kernel, and neither waits nor allocates; so it can be captured with the call.
//! [`Attention::check_page_ids`](crate::Attention::check_page_ids) is the other check.
//!
//! Unsafe: a check takes raw addresses; only the caller knows that they are live.

use kernels_gpu::abi::divisor::Divisor;
use kernels_gpu::abi::parameters::{CheckAppendParameters, Report};

use crate::Error;
use crate::config::{AttentionConfig, ConfigError};
use crate::device::{Device, Executor, Stream};
use crate::operators::{Append, Destination};
use crate::tensor::{ArgumentError, address};

/// Bytes of a report; its address is a multiple of 8.
pub const REPORT_BYTES: usize = size_of::<Report>();

/// What a check found on the device.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceValueError {
    /// A value names no page, slot or request.
    #[error("{field}[{index}] is {value}; supported are values below {supported}; {bad} in all are out of range")]
    OutOfRange {
        /// The array: `page_indices`, `slots`, `requests` or `positions`.
        field: &'static str,
        /// Where in it: of a batch's page ids the first; of an append's the one that the first bad token leads to.
        index: u64,
        /// The value found.
        value: i64,
        /// Pages or slots of the cache, requests of the batch, or tokens that the request's pages hold.
        supported: u64,
        /// Page ids of a batch, or tokens of an append, that are out of range.
        bad: u32,
    },
    /// The bytes are not what a check writes.
    #[error("the report's first word is {found}, which no check writes; has the check run?")]
    NoReport {
        /// The word.
        found: u32,
    },
}

/// What a report says, copied from the device after the check.
pub fn verdict(report: &[u8; REPORT_BYTES]) -> Result<(), DeviceValueError> {
    let Report { finding, bad, index, value, supported } = bytemuck::pod_read_unaligned(report);
    let field = match finding {
        Report::FINE => return Ok(()),
        Report::PAGE_INDICES => "page_indices",
        Report::SLOTS => "slots",
        Report::REQUESTS => "requests",
        Report::POSITIONS => "positions",
        found => return Err(DeviceValueError::NoReport { found }),
    };
    Err(DeviceValueError::OutOfRange { field, index, value: value as i64, supported, bad })
}

/// Pages that 32 bits can name.
pub(crate) fn namable(pages: u64) -> u64 {
    pages.min(1 << 32)
}

/// Checks on the device where [`append`](crate::operators::append) would write with the same arguments: that each slot
/// lies in the cache, or that each request is one of `request_count`, each position lies in its request's pages, and
/// their ids lie in the cache. A request's pages end where the next one's begin, the last one's with `page_indices`.
///
/// # Safety
/// The destination's arrays are live memory of the device, `page_begin` of `request_count` entries, and `report` is
/// the address of [`REPORT_BYTES`] bytes of it, until the launch has run.
pub unsafe fn check_append(
    device: &Device,
    config: &AttentionConfig,
    arguments: &Append,
    request_count: u32,
    report: u64,
    stream: Stream,
) -> Result<(), Error> {
    config.validate()?;
    let tokens = arguments.k.tokens;
    const MOST_TOKENS: u64 = i32::MAX as u64;
    if tokens > MOST_TOKENS {
        return Err(ArgumentError::TooLarge { field: "k.tokens", got: tokens, supported: MOST_TOKENS }.into());
    }
    arguments.cache.views(config)?;
    let pages = namable(arguments.cache.k.pages);
    let present = tokens != 0;
    let words = |tensor, at, elements| address(tensor, at, elements, 4);
    let none = CheckAppendParameters {
        slots: 0,
        requests: 0,
        positions: 0,
        page_begin: 0,
        page_indices: 0,
        page_index_len: 0,
        report: address("report", report, true, 8)?,
        pages,
        tokens: tokens as u32,
        request_count,
        page_size: Divisor::new(config.page_size_tokens).ok_or(ConfigError::Zero { field: "page_size_tokens" })?,
        padding: 0,
    };
    let parameters = match arguments.destination {
        Destination::Slots { address: slots } => {
            CheckAppendParameters { slots: address("slots", slots, present, 8)?, ..none }
        }
        Destination::Positions { requests, positions, page_begin, page_indices } => CheckAppendParameters {
            requests: words("requests", requests, present)?,
            positions: words("positions", positions, present)?,
            page_begin: words("page_begin", page_begin, present && request_count != 0)?,
            page_indices: words("page_indices", page_indices.address, present && page_indices.len != 0)?,
            page_index_len: page_indices.len,
            ..none
        },
    };
    match &*device.executor {
        // SAFETY: live host memory, by this function's contract.
        #[cfg(feature = "cpu")]
        Executor::Cpu => unsafe { crate::cpu::check_append(&parameters) },
        #[cfg(feature = "cuda")]
        Executor::Cuda(cuda) => {
            cuda.check_memory(&[
                ("slots", parameters.slots),
                ("requests", parameters.requests),
                ("positions", parameters.positions),
                ("page_begin", parameters.page_begin),
                ("page_indices", parameters.page_indices),
                ("report", report),
            ])?;
            let function = cuda.function(format_args!("check_append"))?;
            // SAFETY: live memory of the device, by this function's contract.
            unsafe { cuda.launch(&function, stream, 1, &parameters)? };
        }
    }
    let _ = stream;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(finding: u32) -> [u8; REPORT_BYTES] {
        let report = Report { finding, bad: 3, index: 7, value: 90, supported: 80 };
        bytemuck::bytes_of(&report).try_into().unwrap()
    }

    #[test]
    fn verdicts_name_the_array_the_place_the_value_and_what_is_supported() {
        for (finding, field) in [
            (Report::PAGE_INDICES, "page_indices"),
            (Report::SLOTS, "slots"),
            (Report::REQUESTS, "requests"),
            (Report::POSITIONS, "positions"),
        ] {
            let message = verdict(&report(finding)).unwrap_err().to_string();
            let expected = "[7] is 90; supported are values below 80; 3 in all are out of range";
            assert_eq!(message, format!("{field}{expected}"));
        }
        assert_eq!(verdict(&report(Report::FINE)), Ok(()));
        for found in [0, 6, u32::MAX] {
            assert_eq!(verdict(&report(found)), Err(DeviceValueError::NoReport { found }));
        }
    }
}
