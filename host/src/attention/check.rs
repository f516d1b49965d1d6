//! The check of a planned batch's page ids: [`Attention::check_page_ids`].
//!
//! Unsafe: it takes raw addresses; only the caller knows that they are live.

use kernels_gpu::abi::parameters::CheckPageIdsParameters;

use super::{Attention, Planned, Workspace};
use crate::Error;
use crate::device::{Executor, Stream};
use crate::tensor::{PageIndices, address, matches};
use crate::validate::namable;

impl Attention {
    /// Checks on the device that every page id that [`run`](Self::run) would read for this plan is below `pages`, the
    /// pages of the cache; entries that no request's tokens need may hold anything. Once a step is enough: the layers
    /// share the ids. The answer goes to `report`, for [`verdict`](crate::validate::verdict) to read.
    ///
    /// Like a run it neither waits nor allocates, and of an attention made for graphs it may be captured, and then
    /// follows every later plan. Refuses a plan of ragged keys and values, which has no page ids.
    ///
    /// # Safety
    /// `page_indices` is live memory of the device, and `report` is the address of
    /// [`REPORT_BYTES`](crate::validate::REPORT_BYTES) bytes of it, until the launch has run.
    pub unsafe fn check_page_ids(
        &self,
        planned: &Planned,
        page_indices: &PageIndices,
        pages: u64,
        report: u64,
        workspace: &mut Workspace,
        stream: Stream,
    ) -> Result<(), Error> {
        self.check_receipt(planned, workspace)?;
        if self.config.ragged {
            let made = "with AttentionConfig::new";
            return Err(crate::tensor::ArgumentError::UnusedInput { input: "page_indices", made }.into());
        }
        let page_ids = planned.page_index_len;
        if page_indices.len < page_ids {
            matches("page_indices", "len", page_indices.len, page_ids)?;
        }
        let layout = self.path(planned).layout();
        let parameters = CheckPageIdsParameters {
            queue_begin: workspace.address + layout.queue_begin_offset_bytes,
            items: workspace.address + layout.items_offset_bytes,
            page_indices: address("page_indices", page_indices.address, page_ids != 0, 4)?,
            report: address("report", report, true, 8)?,
            pages: namable(pages),
            teams: planned.header.teams,
            keys_after: self.config.keys_after(),
            page_size: self.page_size,
            group: self.group,
        };
        match &*self.device.executor {
            #[cfg(feature = "cpu")]
            Executor::Cpu => {
                let _ = stream;
                // SAFETY: live host memory, by this function's contract and the checks above.
                unsafe { crate::cpu::check_page_ids(&parameters) }
            }
            #[cfg(feature = "cuda")]
            Executor::Cuda(cuda) => {
                cuda.context().bind()?;
                if !self.graphs && stream.is_capturing()? {
                    let (call, remedy) = ("check_page_ids", "make it with Attention::for_graphs");
                    return Err(crate::tensor::ArgumentError::Capturing { call, remedy }.into());
                }
                cuda.check_memory(&[("page_indices", parameters.page_indices), ("report", report)])?;
                let function = cuda.function(format_args!("{SYMBOL}"))?;
                // SAFETY: live memory of the device, by this function's contract.
                unsafe { cuda.launch(&function, stream, 1, &parameters)? };
            }
        }
        Ok(())
    }
}

/// The check's kernel.
#[cfg(feature = "cuda")]
pub(super) const SYMBOL: &str = "check_page_ids";
