//! The bench's instruments: random device data, graph timing, ceilings.
//!
//! A timing is the median over replays of one CUDA graph that holds at least 16 calls, about 2 ms of work, over
//! rotating inputs, divided by the calls; a cold timing is the median of single-call graphs, each after 256 MiB were
//! read to push everything else out of the L2 cache. Data is random: a period of 2^23 + 7816 elements, repeated, so
//! that the host can tell any element.
//!
//! Unsafe: copies and streams take raw device addresses, here of buffers that the lab owns.

use half::bf16;
use oxattn::driver::{Event, Graph};
use oxattn::launch::Cuda;
use oxattn::{Buffer, Device, Stream};

use super::{Failure, Row};

/// Elements after which a tensor's values repeat: a multiple of 8, so that copies stay aligned, and of no power of two
/// beyond, so that rows do not.
const PERIOD: usize = (1 << 23) + 7816;

/// Bytes read to empty the L2 cache.
const FLUSH_BYTES: u64 = 256 << 20;

pub struct Lab {
    pub device: Device,
    pub stream: Stream,
    pub read_gbps: f64,
    pub copy_gbps: f64,
    periods: [Vec<bf16>; 2],
    period_buffers: [Buffer; 2],
    flush: Buffer,
}

/// Microseconds of a call.
pub struct Timing {
    pub median: f64,
    pub low: f64,
    pub high: f64,
}

/// Splitmix64: one step gives 64 random bits.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Roughly normal: the sum of four uniform numbers, variance 1.
    fn normal(&mut self) -> f32 {
        let bits = self.next();
        let sum: f32 = (0..4).map(|i| ((bits >> (16 * i)) & 0xffff) as f32 / 65_536.0 - 0.5).sum();
        sum * 3f32.sqrt()
    }

    pub fn shuffled(&mut self, count: u32) -> Vec<u32> {
        let mut values: Vec<u32> = (0..count).collect();
        for i in (1..values.len()).rev() {
            values.swap(i, (self.next() % (i as u64 + 1)) as usize);
        }
        values
    }
}

impl Lab {
    pub fn new(device: Device) -> Result<Lab, Failure> {
        let cuda = device.as_cuda().ok_or("the GPU suite needs a GPU")?;
        cuda.context().bind()?;
        let stream = Stream::create()?;
        let period = |seed| {
            let mut random = Random(seed);
            (0..PERIOD).map(|_| bf16::from_f32(random.normal())).collect::<Vec<_>>()
        };
        let periods = [period(1), period(2)];
        let period_buffers = [device.upload(&periods[0])?, device.upload(&periods[1])?];
        let flush = device.allocate(FLUSH_BYTES as usize)?;
        let mut lab = Lab { device, stream, read_gbps: 0.0, copy_gbps: 0.0, periods, period_buffers, flush };
        lab.measure_ceilings()?;
        Ok(lab)
    }

    pub fn cuda(&self) -> &Cuda {
        self.device.as_cuda().expect("a lab's device is a GPU")
    }

    /// A tensor of random bf16 values, of the period numbered `which`.
    pub fn random(&self, elements: u64, which: usize) -> Result<Buffer, Failure> {
        let bytes = elements * 2;
        let buffer = self.device.allocate(bytes as usize)?;
        let mut filled = (PERIOD as u64 * 2).min(bytes);
        // SAFETY: both buffers are live and at least that long.
        unsafe { self.stream.copy(buffer.address(), self.period_buffers[which].address(), filled as usize)? };
        while filled < bytes {
            let more = filled.min(bytes - filled);
            // SAFETY: the second range begins where the first ends.
            unsafe { self.stream.copy(buffer.address() + filled, buffer.address(), more as usize)? };
            filled += more;
        }
        self.stream.synchronize()?;
        Ok(buffer)
    }

    /// Element `index` of a tensor made by [`random`](Self::random).
    pub fn value(&self, index: u64, which: usize) -> f64 {
        self.periods[which][(index % PERIOD as u64) as usize].to_f64()
    }

    fn capture(&self, calls: usize, call: &dyn Fn(usize) -> Result<(), Failure>) -> Result<Graph, Failure> {
        self.stream.begin_capture()?;
        let recorded = (0..calls).try_for_each(call);
        let graph = self.stream.end_capture();
        recorded?;
        Ok(graph?)
    }

    fn time_launch(&self, graph: &Graph) -> Result<f64, Failure> {
        let (begin, end) = (Event::timed()?, Event::timed()?);
        begin.record(self.stream)?;
        graph.launch(self.stream)?;
        end.record(self.stream)?;
        end.synchronize()?;
        Ok(end.microseconds_since(&begin)?)
    }

    /// Times `call(set)` for sets `0..sets` in turn.
    pub fn time(&self, sets: usize, call: &dyn Fn(usize) -> Result<(), Failure>) -> Result<Timing, Failure> {
        call(0)?;
        self.stream.synchronize()?;
        let probe = self.capture(sets, call)?;
        self.time_launch(&probe)?;
        let one = self.time_launch(&probe)? / sets as f64;
        let calls = ((2000.0 / one).ceil() as usize).max(16).next_multiple_of(sets);
        let graph = self.capture(calls, &|i| call(i % sets))?;
        let replays = ((200_000.0 / (one * calls as f64)) as usize).clamp(9, 60);
        self.time_launch(&graph)?;
        let mut times = (0..replays).map(|_| self.time_launch(&graph)).collect::<Result<Vec<_>, _>>()?;
        times.sort_by(f64::total_cmp);
        let at = |quantile: f64| times[((times.len() - 1) as f64 * quantile).round() as usize] / calls as f64;
        Ok(Timing { median: at(0.5), low: at(0.1), high: at(0.9) })
    }

    /// Times single calls, each with an empty L2 cache.
    pub fn time_cold(&self, sets: usize, call: &dyn Fn(usize) -> Result<(), Failure>) -> Result<f64, Failure> {
        let graphs = (0..sets.min(4)).map(|set| self.capture(1, &|_| call(set))).collect::<Result<Vec<_>, _>>()?;
        let mut times = Vec::new();
        for i in 0..20 {
            // SAFETY: the flush buffer is live.
            unsafe { self.cuda().stream(self.flush.address(), None, FLUSH_BYTES, self.stream)? };
            times.push(self.time_launch(&graphs[i % graphs.len()])?);
        }
        times.sort_by(f64::total_cmp);
        Ok(times[times.len() / 2])
    }

    fn measure_ceilings(&mut self) -> Result<(), Failure> {
        let bytes = 8u64 << 30;
        let buffer = self.random(bytes / 2, 0)?;
        let (address, half) = (buffer.address(), bytes / 2);
        let read = self.time(1, &|_| {
            // SAFETY: the buffer is live.
            unsafe { self.cuda().stream(address, None, bytes, self.stream) }.map_err(Failure::from)
        })?;
        let copy = self.time(1, &|_| {
            // SAFETY: the buffer's halves.
            unsafe { self.cuda().stream(address, Some(address + half), half, self.stream) }.map_err(Failure::from)
        })?;
        self.read_gbps = bytes as f64 / read.median / 1e3;
        self.copy_gbps = bytes as f64 / copy.median / 1e3;
        Ok(())
    }

    pub fn ceiling_rows(&self) -> [Row; 2] {
        let row = |case: &str, gbps: f64| Row {
            section: "ceiling".to_owned(),
            case: case.to_owned(),
            peer: "oxattn".to_owned(),
            us: Some((8u64 << 30) as f64 / gbps / 1e3),
            bytes: Some(8 << 30),
            gbps: Some(gbps),
            ok: true,
            ..Row::default()
        };
        [row("read only", self.read_gbps), row("copy, read + write", self.copy_gbps)]
    }
}
