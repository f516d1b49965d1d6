//! The CUDA driver, loaded at run time: the few calls oxattn makes, each returning a typed error.
//!
//! In: raw handles and addresses. Out: the same. Invariant: nothing outside this folder names `cudarc`, and nothing
//! here is called before [`open`] has found the library (cudarc panics where it is missing). A program that links
//! this crate starts on a machine without a driver.

use std::ffi::{CString, c_void};
use std::sync::OnceLock;

use cudarc::driver::sys;

/// What the driver, or its absence, refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DriverError {
    /// There is no driver library.
    #[error("no CUDA driver is installed: the library libcuda is not there")]
    NotInstalled,
    /// There is a driver, but no GPU it can use.
    #[error("the CUDA driver found no GPU")]
    NoGpu,
    /// The driver is older than the kernels' PTX.
    #[error("the CUDA driver is version {found}; the kernels need {needed} or later")]
    TooOld {
        /// As the driver reports it: 1000 * major + 10 * minor.
        found: i32,
        /// The oldest that works, in the same form.
        needed: i32,
    },
    /// There is no device of that number.
    #[error("device cuda:{got} does not exist; there are {count}")]
    NoSuchDevice {
        /// The number asked for.
        got: u32,
        /// How many there are.
        count: u32,
    },
    /// The device is older than the kernels.
    #[error("device cuda:{device} has compute capability {major}.{minor}; the kernels need 8.0 or later")]
    UnsupportedDevice {
        /// Its number.
        device: u32,
        /// Its capability.
        major: i32,
        /// Its capability.
        minor: i32,
    },
    /// No context is current where the caller's was asked for.
    #[error("no CUDA context is current on this thread")]
    NoContext,
    /// A kernel needs more shared memory than a block of the device can have.
    #[error("kernel {symbol} needs {needed_bytes} bytes of shared memory a block; the device allows {available_bytes}")]
    SharedMemory {
        /// The kernel.
        symbol: String,
        /// What it needs.
        needed_bytes: u32,
        /// What there is.
        available_bytes: u32,
    },
    /// The bundle has no such kernel.
    #[error("the kernel bundle has no {symbol} for {family}")]
    NoSuchKernel {
        /// The kernel.
        symbol: String,
        /// The family looked for.
        family: &'static str,
    },
    /// Any other failing call.
    #[error("{call} failed: {name} ({code})")]
    Call {
        /// The driver function.
        call: &'static str,
        /// Its result.
        code: u32,
        /// The result's name.
        name: &'static str,
    },
}

/// Results whose name helps; the rest show their number.
fn name(code: u32) -> &'static str {
    match code {
        1 => "invalid value",
        2 => "out of memory",
        3 => "not initialized",
        4 => "deinitialized",
        46 => "device unavailable",
        100 => "no device",
        101 => "invalid device",
        200 => "invalid image",
        201 => "invalid context",
        209 => "no binary for this GPU",
        218 => "invalid PTX",
        222 => "unsupported PTX version",
        400 => "invalid handle",
        500 => "not found",
        600 => "not ready",
        700 => "illegal address",
        701 => "launch out of resources",
        715 => "illegal instruction",
        716 => "misaligned address",
        719 => "launch failed",
        900 => "stream capture unsupported",
        901 => "stream capture invalidated",
        _ => "error",
    }
}

fn check(call: &'static str, result: sys::CUresult) -> Result<(), DriverError> {
    match result as u32 {
        0 => Ok(()),
        code => Err(DriverError::Call { call, code, name: name(code) }),
    }
}

macro_rules! call {
    ($function:ident($($argument:expr),* $(,)?)) => {
        // SAFETY: the library is loaded (`open` has run), and the arguments are live for the call.
        check(stringify!($function), unsafe { sys::$function($($argument),*) })
    };
}

// After the macro, which it uses.
mod memory;

pub use memory::{DeviceMemory, PinnedMemory};

/// CUDA 12.0: the first driver that takes PTX 8.0.
pub const OLDEST_DRIVER: i32 = 12_000;

/// Finds and initialises the driver, once a process.
pub fn open() -> Result<(), DriverError> {
    static OPENED: OnceLock<Result<(), DriverError>> = OnceLock::new();
    OPENED.get_or_init(initialise).clone()
}

fn initialise() -> Result<(), DriverError> {
    // SAFETY: asks the dynamic loader only.
    if !unsafe { sys::is_culib_present() } {
        return Err(DriverError::NotInstalled);
    }
    match call!(cuInit(0)) {
        Err(DriverError::Call { code: 100, .. }) => return Err(DriverError::NoGpu),
        other => other?,
    }
    let found = version()?;
    if found < OLDEST_DRIVER {
        return Err(DriverError::TooOld { found, needed: OLDEST_DRIVER });
    }
    if device_count()? == 0 { Err(DriverError::NoGpu) } else { Ok(()) }
}

/// The driver's version, 1000 * major + 10 * minor.
pub fn version() -> Result<i32, DriverError> {
    let mut version = 0;
    call!(cuDriverGetVersion(&mut version))?;
    Ok(version)
}

/// How many devices there are.
pub fn device_count() -> Result<u32, DriverError> {
    let mut count = 0;
    call!(cuDeviceGetCount(&mut count))?;
    Ok(count as u32)
}

/// What the launcher needs to know of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceProperties {
    /// Its number.
    pub ordinal: u32,
    /// Its name.
    pub name: String,
    /// Compute capability.
    pub capability: (i32, i32),
    /// Multiprocessors.
    pub multiprocessors: u32,
    /// Shared memory a block may ask for.
    pub shared_bytes_per_block: u32,
    /// L2 cache.
    pub l2_bytes: u64,
    /// Device memory.
    pub memory_bytes: u64,
    /// What its pins carry, 10^9 bytes a second; 0 where the driver does not say.
    pub memory_gb_per_s: u32,
}

/// Describes a device.
pub fn properties(ordinal: u32) -> Result<DeviceProperties, DriverError> {
    use sys::CUdevice_attribute_enum as Attribute;
    let count = device_count()?;
    if ordinal >= count {
        return Err(DriverError::NoSuchDevice { got: ordinal, count });
    }
    let mut device = 0;
    call!(cuDeviceGet(&mut device, ordinal as i32))?;
    let attribute = |attribute| -> Result<i32, DriverError> {
        let mut value = 0;
        call!(cuDeviceGetAttribute(&mut value, attribute, device))?;
        Ok(value)
    };
    let mut text = [0u8; 128];
    call!(cuDeviceGetName(text.as_mut_ptr().cast(), text.len() as i32, device))?;
    let length = text.iter().position(|byte| *byte == 0).unwrap_or(text.len());
    let mut memory_bytes = 0;
    call!(cuDeviceTotalMem_v2(&mut memory_bytes, device))?;
    Ok(DeviceProperties {
        ordinal,
        name: String::from_utf8_lossy(&text[..length]).into_owned(),
        capability: (
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        ),
        multiprocessors: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)? as u32,
        shared_bytes_per_block: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)? as u32,
        l2_bytes: attribute(Attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)? as u64,
        memory_bytes: memory_bytes as u64,
        memory_gb_per_s: {
            let clock_khz = attribute(Attribute::CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE).unwrap_or(0);
            let width_bits = attribute(Attribute::CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH).unwrap_or(0);
            // Two bits a pin and clock.
            (2 * clock_khz as u64 * (width_bits as u64 / 8) / 1_000_000) as u32
        },
    })
}

/// A context: the device's primary one, or the caller's.
#[derive(Debug)]
pub struct Context {
    handle: sys::CUcontext,
    device: sys::CUdevice,
    primary: bool,
}

// SAFETY: the driver's contexts may be used from any thread.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    /// The primary context of a device, shared with every other library in the process that uses it.
    pub fn primary(ordinal: u32) -> Result<Context, DriverError> {
        let count = device_count()?;
        if ordinal >= count {
            return Err(DriverError::NoSuchDevice { got: ordinal, count });
        }
        let mut device = 0;
        call!(cuDeviceGet(&mut device, ordinal as i32))?;
        let mut handle = std::ptr::null_mut();
        call!(cuDevicePrimaryCtxRetain(&mut handle, device))?;
        Ok(Context { handle, device, primary: true })
    }

    /// The context that is current on this thread. It must outlive what is made from it.
    pub fn current() -> Result<Context, DriverError> {
        let mut handle = std::ptr::null_mut();
        call!(cuCtxGetCurrent(&mut handle))?;
        if handle.is_null() {
            return Err(DriverError::NoContext);
        }
        let mut device = 0;
        call!(cuCtxGetDevice(&mut device))?;
        Ok(Context { handle, device, primary: false })
    }

    /// The device's number.
    pub fn ordinal(&self) -> u32 {
        self.device as u32
    }

    /// Makes the context current on this thread if it is not.
    pub fn bind(&self) -> Result<(), DriverError> {
        let mut current = std::ptr::null_mut();
        call!(cuCtxGetCurrent(&mut current))?;
        if current == self.handle { Ok(()) } else { call!(cuCtxSetCurrent(self.handle)) }
    }

    /// Waits for all work of the context.
    pub fn synchronize(&self) -> Result<(), DriverError> {
        self.bind()?;
        call!(cuCtxSynchronize())
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        if self.primary {
            // The process may be ending and the driver gone; there is nobody to tell.
            let _ = call!(cuDevicePrimaryCtxRelease_v2(self.device));
        }
    }
}

/// A kernel, ready to launch. Its module stays loaded for the context's lifetime.
#[derive(Clone, Copy, Debug)]
pub struct Function {
    handle: sys::CUfunction,
    threads: u32,
    shared_bytes: u32,
}

// SAFETY: function handles may be used from any thread.
unsafe impl Send for Function {}
// SAFETY: as above.
unsafe impl Sync for Function {}

impl Function {
    /// Loads a module (PTX text ending in a zero byte, or a cubin) into the current context and finds its kernel.
    pub fn load(image: &[u8], symbol: &str, threads: u32, shared_bytes: u32) -> Result<Function, DriverError> {
        let mut module = std::ptr::null_mut();
        call!(cuModuleLoadData(&mut module, image.as_ptr().cast::<c_void>()))?;
        let mut handle = std::ptr::null_mut();
        let text = CString::new(symbol).map_err(|_| DriverError::Call {
            call: "cuModuleGetFunction",
            code: 500,
            name: name(500),
        })?;
        call!(cuModuleGetFunction(&mut handle, module, text.as_ptr()))?;
        if shared_bytes > 48 * 1024 {
            use sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES as SHARED;
            call!(cuFuncSetAttribute(handle, SHARED, shared_bytes as i32))?;
        }
        Ok(Function { handle, threads, shared_bytes })
    }

    /// Blocks a multiprocessor holds at once.
    pub fn blocks_per_multiprocessor(&self) -> Result<u32, DriverError> {
        let mut blocks = 0;
        call!(cuOccupancyMaxActiveBlocksPerMultiprocessor(
            &mut blocks,
            self.handle,
            self.threads as i32,
            self.shared_bytes as usize
        ))?;
        Ok(blocks as u32)
    }

    /// Launches `blocks` blocks on `stream`. With `overlap` the kernel may start while the one before it drains
    /// (programmatic dependent launch); it waits by itself before it reads anything that one wrote.
    ///
    /// # Safety
    /// `parameters` point to values of the kernel's parameter types, in order, which describe live memory.
    pub unsafe fn launch(
        &self,
        stream: Stream,
        blocks: u32,
        overlap: bool,
        parameters: &mut [*mut c_void],
    ) -> Result<(), DriverError> {
        // SAFETY: plain data, and all zero is a valid value of each field.
        let mut attribute: sys::CUlaunchAttribute = unsafe { std::mem::zeroed() };
        attribute.id = sys::CUlaunchAttributeID_enum::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
        attribute.value.programmaticStreamSerializationAllowed = 1;
        let config = sys::CUlaunchConfig {
            gridDimX: blocks,
            gridDimY: 1,
            gridDimZ: 1,
            blockDimX: self.threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: self.shared_bytes,
            hStream: stream.handle(),
            attrs: &mut attribute,
            numAttrs: overlap as u32,
        };
        call!(cuLaunchKernelEx(&config, self.handle, parameters.as_mut_ptr(), std::ptr::null_mut()))
    }
}

/// A paged cache's K or V as the hardware copies it: dims head dim, page size, KV heads, pages, of 16-bit elements, in
/// boxes of 64 elements of `box_tokens` tokens, swizzled by 128 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheMapDescription {
    /// Address of page 0, token 0, head 0.
    pub address: u64,
    /// Elements of a row, tokens of a page, KV heads, pages.
    pub dims: [u64; 4],
    /// Bytes from a token, a head and a page to the next.
    pub strides_bytes: [u64; 3],
    /// Tokens of a box.
    pub box_tokens: u32,
    /// Whether elements are bf16, not f16.
    pub is_bf16: bool,
}

impl CacheMapDescription {
    /// Encodes the map.
    pub fn encode(&self) -> Result<[u64; 16], DriverError> {
        use sys::CUtensorMapDataType_enum::{CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, CU_TENSOR_MAP_DATA_TYPE_FLOAT16};
        let dtype = if self.is_bf16 { CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 } else { CU_TENSOR_MAP_DATA_TYPE_FLOAT16 };
        // SAFETY: plain data.
        let mut map: sys::CUtensorMap = unsafe { std::mem::zeroed() };
        let (boxes, steps) = ([64, self.box_tokens, 1, 1], [1u32; 4]);
        call!(cuTensorMapEncodeTiled(
            &mut map,
            dtype,
            4,
            self.address as *mut c_void,
            self.dims.as_ptr(),
            self.strides_bytes.as_ptr(),
            boxes.as_ptr(),
            steps.as_ptr(),
            sys::CUtensorMapInterleave_enum::CU_TENSOR_MAP_INTERLEAVE_NONE,
            sys::CUtensorMapSwizzle_enum::CU_TENSOR_MAP_SWIZZLE_128B,
            sys::CUtensorMapL2promotion_enum::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            sys::CUtensorMapFloatOOBfill_enum::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE
        ))?;
        Ok(map.opaque)
    }
}

/// A stream of the caller's, by its raw handle; the default one is the context's legacy stream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stream(u64);

impl Stream {
    /// Wraps a raw `CUstream`.
    ///
    /// # Safety
    /// The stream belongs to the context of the device it is used with and outlives its use.
    pub unsafe fn from_raw(handle: u64) -> Stream {
        Stream(handle)
    }

    /// Creates a non-blocking stream in the current context. It is never destroyed.
    pub fn create() -> Result<Stream, DriverError> {
        let mut handle = std::ptr::null_mut();
        call!(cuStreamCreate(&mut handle, 1))?;
        Ok(Stream(handle as u64))
    }

    fn handle(self) -> sys::CUstream {
        self.0 as sys::CUstream
    }

    /// Whether the stream is being captured into a graph.
    pub fn is_capturing(self) -> Result<bool, DriverError> {
        let mut status = sys::CUstreamCaptureStatus_enum::CU_STREAM_CAPTURE_STATUS_NONE;
        call!(cuStreamIsCapturing(self.handle(), &mut status))?;
        Ok(status != sys::CUstreamCaptureStatus_enum::CU_STREAM_CAPTURE_STATUS_NONE)
    }

    /// Waits for the stream's work.
    pub fn synchronize(self) -> Result<(), DriverError> {
        call!(cuStreamSynchronize(self.handle()))
    }

    /// Copies host bytes to the device; `source` stays untouched until the copy has run.
    ///
    /// # Safety
    /// `destination` is live device memory of that many bytes, and `source` lives until the stream gets there.
    pub unsafe fn upload(self, destination: u64, source: &[u8]) -> Result<(), DriverError> {
        call!(cuMemcpyHtoDAsync_v2(destination, source.as_ptr().cast(), source.len(), self.handle()))
    }

    /// Copies between two places of device memory.
    ///
    /// # Safety
    /// Both ranges are live and do not overlap.
    pub unsafe fn copy(self, destination: u64, source: u64, bytes: usize) -> Result<(), DriverError> {
        call!(cuMemcpyDtoDAsync_v2(destination, source, bytes, self.handle()))
    }

    /// Starts recording the stream's work into a graph.
    pub fn begin_capture(self) -> Result<(), DriverError> {
        use sys::CUstreamCaptureMode_enum::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL as MODE;
        call!(cuStreamBeginCapture_v2(self.handle(), MODE))
    }

    /// Ends the recording and makes the graph ready to launch.
    pub fn end_capture(self) -> Result<Graph, DriverError> {
        let mut graph = std::ptr::null_mut();
        call!(cuStreamEndCapture(self.handle(), &mut graph))?;
        let mut executable = std::ptr::null_mut();
        let made = call!(cuGraphInstantiateWithFlags(&mut executable, graph, 0));
        call!(cuGraphDestroy(graph))?;
        made?;
        Ok(Graph { handle: executable })
    }
}

/// A recorded sequence of launches.
#[derive(Debug)]
pub struct Graph {
    handle: sys::CUgraphExec,
}

impl Graph {
    /// Launches it on a stream.
    pub fn launch(&self, stream: Stream) -> Result<(), DriverError> {
        call!(cuGraphLaunch(self.handle, stream.handle()))
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        let _ = call!(cuGraphExecDestroy(self.handle));
    }
}

/// A point in a stream's work.
#[derive(Debug)]
pub struct Event {
    handle: sys::CUevent,
}

// SAFETY: events may be used from any thread.
unsafe impl Send for Event {}

impl Event {
    /// An event without timing, which is cheaper.
    pub fn new() -> Result<Event, DriverError> {
        Event::with_flags(2)
    }

    /// An event whose time can be read.
    pub fn timed() -> Result<Event, DriverError> {
        Event::with_flags(0)
    }

    fn with_flags(flags: u32) -> Result<Event, DriverError> {
        let mut handle = std::ptr::null_mut();
        call!(cuEventCreate(&mut handle, flags))?;
        Ok(Event { handle })
    }

    /// Marks the current end of the stream.
    pub fn record(&self, stream: Stream) -> Result<(), DriverError> {
        call!(cuEventRecord(self.handle, stream.handle()))
    }

    /// Whether the stream has passed the mark.
    pub fn is_done(&self) -> Result<bool, DriverError> {
        match call!(cuEventQuery(self.handle)) {
            Err(DriverError::Call { code: 600, .. }) => Ok(false),
            other => other.map(|()| true),
        }
    }

    /// Waits until the stream has passed the mark.
    pub fn synchronize(&self) -> Result<(), DriverError> {
        call!(cuEventSynchronize(self.handle))
    }

    /// Microseconds from `earlier` to this event, both timed and passed.
    pub fn microseconds_since(&self, earlier: &Event) -> Result<f64, DriverError> {
        let mut milliseconds = 0f32;
        call!(cuEventElapsedTime(&mut milliseconds, earlier.handle, self.handle))?;
        Ok(milliseconds as f64 * 1e3)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        let _ = call!(cuEventDestroy_v2(self.handle));
    }
}

/// Whose memory an address is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Owner {
    /// A device's.
    Device(u32),
    /// The host's, known to the driver.
    Host,
    /// Nobody's the driver knows.
    Unknown,
}

/// Asks the driver whose memory `address` is.
pub fn owner(address: u64) -> Result<Owner, DriverError> {
    use sys::CUpointer_attribute_enum as Attribute;
    let (mut kind, mut ordinal) = (0u32, -1i32);
    let mut attributes = [Attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE, Attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL];
    let mut values = [(&raw mut kind).cast::<c_void>(), (&raw mut ordinal).cast::<c_void>()];
    call!(cuPointerGetAttributes(2, attributes.as_mut_ptr(), values.as_mut_ptr(), address))?;
    Ok(match (kind, ordinal) {
        (0, _) => Owner::Unknown,
        (1, _) => Owner::Host,
        (_, ordinal) => Owner::Device(ordinal.max(0) as u32),
    })
}
