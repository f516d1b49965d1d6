//! Where a plan runs: the host, or a GPU.
//!
//! In: a device number, or the caller's current context. Out: a [`Device`] every operator takes, cheap to clone.
//! Invariant: opening one never panics; a machine without driver, GPU or recent enough either gets the error that
//! says so. Kernels are loaded into a context once, at first need.
//!
//! Unsafe: the host's stand-in for device memory, which executors write through raw addresses.

use std::path::Path;
use std::sync::Arc;

use kernels_gpu::abi::tile::{AttendTile, Family};

use crate::Error;
use crate::config::AttentionConfig;
#[cfg(feature = "cuda")]
use crate::launch::Cuda;
use crate::plan::Target;
use crate::tuning::{GivenTuning, Machine, Tuning, TuningError, TuningMismatch};

/// An executor. Clones share it.
#[derive(Clone, Debug)]
pub struct Device {
    pub(crate) executor: Arc<Executor>,
    tuning: Option<Arc<GivenTuning>>,
    /// What it emulates.
    #[cfg(feature = "emulator")]
    pub(crate) emulation: crate::emulate::Emulation,
}

#[derive(Debug)]
#[allow(clippy::large_enum_variant, reason = "one a device, behind an `Arc`")]
pub(crate) enum Executor {
    #[cfg(feature = "cpu")]
    Cpu,
    #[cfg(feature = "cuda")]
    Cuda(Cuda),
}

/// A stream to launch on; the CPU executor ignores it and is done when a call returns.
#[cfg(feature = "cuda")]
pub use crate::driver::Stream;

/// A stream to launch on; the CPU executor is done when a call returns.
#[cfg(not(feature = "cuda"))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stream;

impl Device {
    /// The multi-threaded host executor.
    #[cfg(feature = "cpu")]
    pub fn cpu() -> Device {
        Device::of(Executor::Cpu)
    }

    /// GPU `ordinal`, in its primary context.
    #[cfg(feature = "cuda")]
    pub fn cuda(ordinal: u32) -> Result<Device, Error> {
        crate::driver::open()?;
        Ok(Device::of(Executor::Cuda(Cuda::new(crate::driver::Context::primary(ordinal)?)?)))
    }

    /// The GPU of the context that is current on this thread, for callers with contexts of their own. The context
    /// must outlive the device.
    #[cfg(feature = "cuda")]
    pub fn cuda_current() -> Result<Device, Error> {
        crate::driver::open()?;
        Ok(Device::of(Executor::Cuda(Cuda::new(crate::driver::Context::current()?)?)))
    }

    fn of(executor: Executor) -> Device {
        Device {
            executor: Arc::new(executor),
            tuning: None,
            #[cfg(feature = "emulator")]
            emulation: crate::emulate::Emulation::default(),
        }
    }

    /// What times of kernels on it hold for. The host executor has no kernels, and so no driver.
    pub fn machine(&self) -> Machine {
        match &*self.executor {
            #[cfg(feature = "cpu")]
            Executor::Cpu => Machine::new("cpu", 0, "none"),
            #[cfg(feature = "cuda")]
            Executor::Cuda(cuda) => Machine::new(&cuda.properties().name, cuda.driver_version(), &cuda.source_hash()),
        }
    }

    /// The same whose attentions, made after this, choose kernels by measured times where there are some of batches alike.
    /// Times of another card, driver or kernel bundle are not used, and [`tuning`](Self::tuning) says so.
    pub fn with_tuning(mut self, tuning: Tuning) -> Device {
        let mismatch = tuning.machine().check(&self.machine()).err();
        self.tuning = Some(Arc::new(GivenTuning { tuning, mismatch }));
        self
    }

    /// The same with the tuning of a file, as `oxattn tune` writes it.
    ///
    /// # Errors
    /// Refuses a file that cannot be read, and a damaged one with its line.
    pub fn load_tuning(self, path: impl AsRef<Path>) -> Result<Device, TuningError> {
        let tuning = Tuning::load(path.as_ref())?;
        Ok(self.with_tuning(tuning))
    }

    /// The tuning it chooses by, or why it does not choose by the one it was given; `None` if it was given none.
    pub fn tuning(&self) -> Option<Result<&Tuning, &TuningMismatch>> {
        let given = self.tuning.as_ref()?;
        Some(given.mismatch.as_ref().map_or(Ok(&given.tuning), Err))
    }

    /// Whether this is the host executor.
    pub fn is_cpu(&self) -> bool {
        match &*self.executor {
            #[cfg(feature = "cpu")]
            Executor::Cpu => true,
            #[cfg(feature = "cuda")]
            Executor::Cuda(_) => false,
        }
    }

    /// A line for people: name, capability, multiprocessors.
    pub fn describe(&self) -> String {
        match &*self.executor {
            #[cfg(feature = "cpu")]
            Executor::Cpu => format!("cpu, {} threads", rayon::current_num_threads()),
            #[cfg(feature = "cuda")]
            Executor::Cuda(cuda) => {
                let p = cuda.properties();
                let (major, minor) = p.capability;
                format!("cuda:{}, {}, sm_{major}{minor}, {} multiprocessors", p.ordinal, p.name, p.multiprocessors)
            }
        }
    }

    /// The GPU behind it, where it is one.
    #[cfg(feature = "cuda")]
    pub fn as_cuda(&self) -> Option<&Cuda> {
        match &*self.executor {
            Executor::Cuda(cuda) => Some(cuda),
            #[cfg(feature = "cpu")]
            Executor::Cpu => None,
        }
    }

    /// What the planner needs to know: how many blocks run at once, and how many keys a tile holds. The configuration
    /// has accepted the head dim.
    pub(crate) fn target(&self, config: &AttentionConfig) -> Target {
        let tile = |family| AttendTile::new(config.attend_head_dim(), family).expect("validated head dims have a tile");
        let is_plain = config.is_plain_for_attend();
        match &*self.executor {
            // Four blocks a thread even out threads of different speed. Tiles as on Hopper, so that a plan made without
            // a GPU shows the cuts one would get.
            #[cfg(feature = "cpu")]
            Executor::Cpu => {
                let (tile, blocks) = (tile(Family::Sm90a), 4 * rayon::current_num_threads() as u32);
                Target::new(blocks, tile.tile_tokens())
                    .with_tall_rows(tile.tall_rows(is_plain))
                    .with_state_columns(tile.head_dim)
            }
            #[cfg(feature = "cuda")]
            Executor::Cuda(cuda) => {
                let properties = cuda.properties();
                // Reading alone reached 4706 of the 4917 GB/s of an H200's pins.
                let read_gb_per_s = (properties.memory_gb_per_s as u64 * 957 / 1000) as u32;
                Target::for_tile(properties.multiprocessors, tile(cuda.family()), is_plain)
                    .with_read_gb_per_s(read_gb_per_s)
            }
        }
    }

    /// Multiprocessors, where prefill kernels run.
    pub(crate) fn prefill_multiprocessors(&self) -> Option<u32> {
        match &*self.executor {
            #[cfg(feature = "cpu")]
            Executor::Cpu => None,
            #[cfg(feature = "cuda")]
            Executor::Cuda(cuda) => (cuda.family() == Family::Sm90a).then(|| cuda.properties().multiprocessors),
        }
    }

    /// Waits until everything launched on the device is done.
    pub fn synchronize(&self) -> Result<(), Error> {
        match &*self.executor {
            #[cfg(feature = "cpu")]
            Executor::Cpu => Ok(()),
            #[cfg(feature = "cuda")]
            Executor::Cuda(cuda) => Ok(cuda.context().synchronize()?),
        }
    }

    /// Memory of the device for callers without an allocator of their own, 256-byte aligned, zeroed.
    pub fn allocate(&self, bytes: usize) -> Result<Buffer, Error> {
        match &*self.executor {
            #[cfg(feature = "cpu")]
            Executor::Cpu => {
                let memory = HostMemory::new(bytes).ok_or(Error::OutOfMemory { bytes: bytes as u64 })?;
                #[cfg(feature = "emulator")]
                let memory = memory.registered(&self.emulation);
                Ok(Buffer(Memory::Host(memory)))
            }
            #[cfg(feature = "cuda")]
            Executor::Cuda(cuda) => {
                cuda.context().bind()?;
                let memory = crate::driver::DeviceMemory::new(bytes)?;
                memory.fill(0)?;
                Ok(Buffer(Memory::Device(self.clone(), memory)))
            }
        }
    }

    /// Memory of the device holding `values`.
    pub fn upload<T: bytemuck::NoUninit>(&self, values: &[T]) -> Result<Buffer, Error> {
        let bytes = bytemuck::cast_slice(values);
        let buffer = self.allocate(bytes.len())?;
        buffer.write(0, bytes)?;
        Ok(buffer)
    }
}

/// Memory of a device, freed on drop.
#[derive(Debug)]
pub struct Buffer(Memory);

#[derive(Debug)]
enum Memory {
    #[cfg(feature = "cpu")]
    Host(HostMemory),
    #[cfg(feature = "cuda")]
    Device(Device, crate::driver::DeviceMemory),
}

impl Buffer {
    /// The address to put into tensors.
    pub fn address(&self) -> u64 {
        match &self.0 {
            #[cfg(feature = "cpu")]
            Memory::Host(memory) => memory.address(),
            #[cfg(feature = "cuda")]
            Memory::Device(_, memory) => memory.address(),
        }
    }

    /// Its size.
    pub fn bytes(&self) -> usize {
        match &self.0 {
            #[cfg(feature = "cpu")]
            Memory::Host(memory) => memory.bytes,
            #[cfg(feature = "cuda")]
            Memory::Device(_, memory) => memory.bytes(),
        }
    }

    fn check(&self, offset_bytes: usize, len: usize) -> Result<(), Error> {
        let needed = offset_bytes.saturating_add(len) as u64;
        if needed > self.bytes() as u64 {
            let (field, supported) = ("end of the buffer access", self.bytes() as u64);
            return Err(crate::tensor::ArgumentError::TooLarge { field, got: needed, supported }.into());
        }
        Ok(())
    }

    /// Copies `source` to `offset_bytes` and waits for it.
    pub fn write(&self, offset_bytes: usize, source: &[u8]) -> Result<(), Error> {
        self.check(offset_bytes, source.len())?;
        match &self.0 {
            #[cfg(feature = "cpu")]
            Memory::Host(memory) => memory.write(offset_bytes, source),
            #[cfg(feature = "cuda")]
            Memory::Device(device, memory) => {
                device.synchronize()?;
                memory.write(offset_bytes, source)?;
            }
        }
        Ok(())
    }

    /// Waits for the device, then copies from `offset_bytes` to `target`.
    pub fn read(&self, offset_bytes: usize, target: &mut [u8]) -> Result<(), Error> {
        self.check(offset_bytes, target.len())?;
        match &self.0 {
            #[cfg(feature = "cpu")]
            Memory::Host(memory) => memory.read(offset_bytes, target),
            #[cfg(feature = "cuda")]
            Memory::Device(device, memory) => {
                device.synchronize()?;
                memory.read(offset_bytes, target)?;
            }
        }
        Ok(())
    }

    /// Waits for the device, then copies the whole buffer out.
    pub fn download<T: bytemuck::AnyBitPattern + bytemuck::NoUninit>(&self) -> Result<Vec<T>, Error> {
        let mut values = vec![T::zeroed(); self.bytes() / size_of::<T>()];
        self.read(0, bytemuck::cast_slice_mut(&mut values))?;
        Ok(values)
    }

    /// Sets every byte.
    pub fn fill(&self, byte: u8) -> Result<(), Error> {
        match &self.0 {
            #[cfg(feature = "cpu")]
            Memory::Host(memory) => memory.fill(byte),
            #[cfg(feature = "cuda")]
            Memory::Device(device, memory) => {
                device.synchronize()?;
                memory.fill(byte)?;
            }
        }
        Ok(())
    }
}

#[cfg(feature = "cpu")]
use host_memory::HostMemory;

/// The host's stand-in for device memory.
#[cfg(feature = "cpu")]
mod host_memory {
    use std::alloc::{Layout, alloc_zeroed, dealloc};

    /// A block aligned like the driver's.
    #[derive(Debug)]
    pub struct HostMemory {
        start: *mut u8,
        layout: Layout,
        pub bytes: usize,
        #[cfg(feature = "emulator")]
        registration: Option<crate::emulate::Registration>,
    }

    // SAFETY: the block is owned; accesses through it are the executors', ordered by their callers.
    unsafe impl Send for HostMemory {}
    // SAFETY: as above.
    unsafe impl Sync for HostMemory {}

    impl HostMemory {
        /// `None` where the system has no such block.
        pub fn new(bytes: usize) -> Option<HostMemory> {
            let layout = Layout::from_size_align(bytes.max(1), 256).ok()?;
            // SAFETY: the layout's size is not 0.
            let start = unsafe { alloc_zeroed(layout) };
            let memory = HostMemory {
                start,
                layout,
                bytes,
                #[cfg(feature = "emulator")]
                registration: None,
            };
            (!start.is_null()).then_some(memory)
        }

        /// The same, for kernels under the emulator to touch.
        #[cfg(feature = "emulator")]
        pub fn registered(mut self, emulation: &crate::emulate::Emulation) -> HostMemory {
            self.registration = Some(emulation.register(self.address(), self.bytes));
            self
        }

        pub fn address(&self) -> u64 {
            self.start as u64
        }

        pub fn write(&self, offset_bytes: usize, source: &[u8]) {
            // SAFETY: the range was checked against the block.
            unsafe { self.start.add(offset_bytes).copy_from_nonoverlapping(source.as_ptr(), source.len()) }
        }

        pub fn read(&self, offset_bytes: usize, target: &mut [u8]) {
            // SAFETY: the range was checked against the block.
            unsafe { self.start.add(offset_bytes).copy_to_nonoverlapping(target.as_mut_ptr(), target.len()) }
        }

        pub fn fill(&self, byte: u8) {
            // SAFETY: the whole block.
            unsafe { self.start.write_bytes(byte, self.bytes) }
        }
    }

    impl Drop for HostMemory {
        fn drop(&mut self) {
            #[cfg(feature = "emulator")]
            drop(self.registration.take());
            // SAFETY: allocated with this layout.
            unsafe { dealloc(self.start, self.layout) }
        }
    }
}
