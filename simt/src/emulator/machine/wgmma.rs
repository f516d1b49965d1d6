//! Warpgroup products. They read their operands and give their results when they are waited for, as late as the rules
//! allow; until then the operands are nobody's to write and the accumulators nobody's to touch.
//!
//! Accumulators are plain arrays of a thread that it may move, so they are known by what they hold: from the first
//! product until they are settled each value is a NaN with a *ticket*, and the numbers lie in a [`Chain`].
use std::collections::VecDeque;

use super::{Machine, Outcome};
use crate::emulator::{
    error::{AccessKind, EmulatorError, Place, Space},
    site::Site,
    tensor::Registers,
    wgmma::{self, DEPTH, Operand, WARP_ROWS},
};

pub const BF16: u32 = 1;
pub const A_SHARED: u32 = 2;
pub const A_TRANSPOSED: u32 = 4;
pub const B_TRANSPOSED: u32 = 8;
pub const ACCUMULATE: u32 = 16;

/// Upper bits of a ticket's NaN; the hardware's and the host's own NaNs are positive, or have no low bits.
const TICKET: u32 = 0xffe0_0000;
/// Tickets are 1 to this, then 1 again.
const TICKETS: u32 = (1 << 21) - 2;

/// What a warp has handed to the tensor cores.
#[derive(Default)]
pub(super) struct Products {
    /// A `wgmma.fence` has come since the last wait.
    fenced: bool,
    /// Oldest first; `groups` counts those of each committed group.
    pending: VecDeque<Product>,
    groups: VecDeque<u32>,
    uncommitted: u32,
    chains: Vec<Chain>,
}

struct Product {
    site: Site,
    a: Left,
    b: Operand,
    is_bf16: bool,
    accumulate: bool,
    ticket: u32,
    /// Offsets of the 16-byte pieces in shared memory: those of A, then those of B.
    pieces: Vec<u32>,
    a_pieces: usize,
    /// The warp's epoch when they were last read.
    epoch: u32,
}

enum Left {
    Shared(Operand),
    Registers(Box<[[u32; 4]; 32]>),
}

/// Accumulators of a warp between their first product and the time when all lanes have settled them.
struct Chain {
    ticket: u32,
    /// 16 rows.
    values: Vec<f32>,
    /// Products that are not finished, and the latest one's line.
    unfinished: u32,
    site: Site,
    /// Lanes that have theirs back.
    settled: u32,
}

impl Machine<'_> {
    /// The running lane hands over its accumulators; the answer is their ticket.
    pub fn stage_accumulators(&mut self, c: &mut [f32], site: Site) -> Outcome<u32> {
        let (warp, lane) = (self.thread as usize / 32, self.thread as usize % 32);
        if let Some(index) = self.held_chain(c, site)? {
            return Ok(self.warps[warp].products.chains[index].ticket);
        }
        let thread = self.running();
        thread.tickets = thread.tickets % TICKETS + 1;
        let ticket = thread.tickets;
        let (chains, columns) = (&mut self.warps[warp].products.chains, c.len() * 2);
        let matches = |chain: &Chain| chain.ticket == ticket && chain.values.len() == WARP_ROWS * columns;
        let index = chains.iter().position(matches).unwrap_or_else(|| {
            chains.push(Chain { ticket, values: vec![0.0; WARP_ROWS * columns], unfinished: 0, site, settled: 0 });
            chains.len() - 1
        });
        for (index_in_lane, value) in c.iter_mut().enumerate() {
            let place = wgmma::accumulator(lane, index_in_lane / 4, index_in_lane % 4, columns);
            chains[index].values[place] = std::mem::replace(value, f32::from_bits(TICKET | ticket));
        }
        Ok(ticket)
    }

    /// Gives the running lane its accumulators back; those that were never handed over stay as they are.
    pub fn settle_accumulators(&mut self, c: &mut [f32], site: Site) -> Outcome<()> {
        let (warp, lane) = (self.thread as usize / 32, self.thread as usize % 32);
        let Some(index) = self.held_chain(c, site)? else { return Ok(()) };
        if self.warps[warp].products.chains[index].unfinished > 0 {
            return Err(self.in_flight(warp, index, site));
        }
        let chain = &mut self.warps[warp].products.chains[index];
        let columns = c.len() * 2;
        for (index_in_lane, value) in c.iter_mut().enumerate() {
            *value = chain.values[wgmma::accumulator(lane, index_in_lane / 4, index_in_lane % 4, columns)];
        }
        chain.settled |= 1 << lane;
        if chain.settled == !0 {
            self.warps[warp].products.chains.swap_remove(index);
        }
        Ok(())
    }

    /// The chain whose ticket the accumulators hold; all of them or none.
    fn held_chain(&self, c: &[f32], site: Site) -> Outcome<Option<usize>> {
        let warp = self.thread as usize / 32;
        let chains = &self.warps[warp].products.chains;
        let holds = |value: &f32, chain: &Chain| value.to_bits() == TICKET | chain.ticket;
        let Some(index) = c.iter().find_map(|value| chains.iter().position(|chain| holds(value, chain))) else {
            return Ok(None);
        };
        let whole = chains[index].values.len() == WARP_ROWS * c.len() * 2;
        match whole && c.iter().all(|value| holds(value, &chains[index])) {
            true => Ok(Some(index)),
            false => Err(self.in_flight(warp, index, site)),
        }
    }

    fn in_flight(&self, warp: usize, chain: usize, site: Site) -> Box<EmulatorError> {
        let product = Place { location: self.warps[warp].products.chains[chain].site, ..self.place(site) };
        Box::new(EmulatorError::AccumulatorsInFlight { product, place: self.place(site) })
    }

    /// A stored value must not be an accumulator that is in flight.
    #[inline]
    pub(super) fn check_stored(&self, value: &[u8], site: Site) -> Outcome<()> {
        let warp = self.thread as usize / 32;
        let chains = &self.warps[warp].products.chains;
        if chains.is_empty() {
            return Ok(());
        }
        let words = value.chunks_exact(4).map(|bytes| u32::from_ne_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]));
        for word in words {
            if let Some(index) = chains.iter().position(|chain| word == TICKET | chain.ticket) {
                return Err(self.in_flight(warp, index, site));
            }
        }
        Ok(())
    }

    /// A whole warpgroup stands at a product, which starts.
    pub(super) fn start_products(&mut self, group: usize, columns: u32, site: Site) -> Outcome<()> {
        let (first, running) = (4 * group, self.thread);
        self.check_uniform(first, site)?;
        for warp in first..first + 4 {
            self.thread = 32 * warp as u32;
            self.start_product(warp, columns, site)?;
        }
        self.thread = running;
        self.counters.wgmma += 1;
        self.counters.wgmma_flops += 2 * 64 * columns as u64 * DEPTH as u64;
        Ok(())
    }

    /// Descriptors and flags are one for all 128 threads.
    fn check_uniform(&mut self, first: usize, site: Site) -> Outcome<()> {
        let wanted = self.warps[first].registers[0];
        let fields = |registers: &Registers| {
            let a = if wanted[6] & A_SHARED != 0 { [registers[0], registers[1]] } else { [0; 2] };
            [("a", a), ("b", [registers[4], registers[5]]), ("accumulate", [registers[6], 0]), ("c", [registers[7], 0])]
        };
        for thread in 0..128 {
            let registers = &self.warps[first + thread / 32].registers[thread % 32];
            let difference = fields(registers).into_iter().zip(fields(&wanted)).find(|(found, wanted)| found != wanted);
            if let Some(((field, _), _)) = difference {
                self.thread = (32 * first + thread) as u32;
                return Err(Box::new(EmulatorError::WgmmaNotUniform { field, place: self.place(site) }));
            }
        }
        Ok(())
    }

    fn start_product(&mut self, warp: usize, columns: u32, site: Site) -> Outcome<()> {
        const KIND: AccessKind = AccessKind::Wgmma;
        if !self.warps[warp].products.fenced {
            return Err(Box::new(EmulatorError::WgmmaNotFenced { place: self.place(site) }));
        }
        let lanes = &self.warps[warp].registers;
        let [a_low, a_high, _, _, b_low, b_high, flags, ticket, ..] = lanes[0];
        let descriptor = |low: u32, high: u32, transposed: u32| {
            Operand::new(low as u64 | (high as u64) << 32, flags & transposed != 0)
        };
        let rows = (warp % 4 * WARP_ROWS) as u32;
        let (a, mut addresses) = match flags & A_SHARED != 0 {
            true => {
                let operand = descriptor(a_low, a_high, A_TRANSPOSED);
                (Left::Shared(operand), operand.pieces(rows..rows + WARP_ROWS as u32).collect::<Vec<_>>())
            }
            false => {
                let registers = std::array::from_fn(|lane| [0, 1, 2, 3].map(|register| lanes[lane][register]));
                (Left::Registers(Box::new(registers)), Vec::new())
            }
        };
        let a_pieces = addresses.len();
        let b = descriptor(b_low, b_high, B_TRANSPOSED);
        addresses.extend(b.pieces(0..columns));
        let mut pieces = addresses;
        for piece in &mut pieces {
            *piece = self.shared_offset(KIND, *piece, 16, site)? as u32;
        }
        let epoch = self.read_pieces(warp, &pieces, site)?;
        pieces.iter().for_each(|piece| self.shared.shadow.hold(*piece as usize));

        let products = &mut self.warps[warp].products;
        for chain in products.chains.iter_mut().filter(|chain| chain.ticket == ticket) {
            chain.unfinished += 1;
            chain.site = site;
        }
        let (is_bf16, accumulate) = (flags & BF16 != 0, flags & ACCUMULATE != 0);
        products.pending.push_back(Product { site, a, b, is_bf16, accumulate, ticket, pieces, a_pieces, epoch });
        products.uncommitted += 1;
        Ok(())
    }

    /// Checks that the warp may read the pieces now; the answer is the epoch in which it does.
    fn read_pieces(&mut self, warp: usize, pieces: &[u32], site: Site) -> Outcome<u32> {
        const KIND: AccessKind = AccessKind::Wgmma;
        let tag = self.sites.tag(KIND, site);
        let accessor = self.clocks.warp_accessor(warp as u32);
        for &piece in pieces {
            if let Err(conflict) = self.shared.shadow.read(piece as usize, 16, tag, &accessor, &self.clocks) {
                let address = self.shared.address(piece as usize);
                return Err(self.conflict(Space::Shared, KIND, address as u64, 16, site, conflict));
            }
        }
        Ok(accessor.epoch)
    }

    pub(super) fn fence_products(&mut self, warp: usize) {
        self.warps[warp].products.fenced = true;
    }

    pub(super) fn commit_products(&mut self, warp: usize) {
        let products = &mut self.warps[warp].products;
        products.groups.push_back(std::mem::take(&mut products.uncommitted));
    }

    /// Finishes the warp's products until at most `pending` groups are left.
    pub(super) fn wait_products(&mut self, warp: usize, pending: u32) -> Outcome<()> {
        self.warps[warp].products.fenced = false;
        while self.warps[warp].products.groups.len() > pending as usize {
            let count = self.warps[warp].products.groups.pop_front().unwrap_or(0);
            for _ in 0..count {
                let Some(product) = self.warps[warp].products.pending.pop_front() else { break };
                self.finish_product(warp, product)?;
            }
        }
        Ok(())
    }

    fn finish_product(&mut self, warp: usize, product: Product) -> Outcome<()> {
        // Where the warp has passed a barrier since, the read of now is a later one.
        if self.clocks.warp_accessor(warp as u32).epoch != product.epoch {
            self.read_pieces(warp, &product.pieces, product.site)?;
        }
        product.pieces.iter().for_each(|piece| self.shared.shadow.let_go(*piece as usize));
        let bytes = |piece: &u32| &self.shared.bytes[*piece as usize..*piece as usize + 16];
        let (a_pieces, b_pieces) = product.pieces.split_at(product.a_pieces);
        let a = match &product.a {
            Left::Shared(operand) => operand.unpack(a_pieces.iter().map(bytes), WARP_ROWS, product.is_bf16),
            Left::Registers(registers) => wgmma::unpack_registers(registers, product.is_bf16),
        };
        let b = product.b.unpack(b_pieces.iter().map(bytes), b_pieces.len() / 2, product.is_bf16);
        let chains = &mut self.warps[warp].products.chains;
        for chain in chains.iter_mut().filter(|chain| chain.ticket == product.ticket) {
            chain.unfinished -= 1;
            if !product.accumulate {
                chain.values.fill(0.0);
            }
            wgmma::multiply_accumulate(&mut chain.values, &a, &b);
        }
        Ok(())
    }

    /// The place of an unfinished product that reads the 16 bytes at `offset`, with its warp's first thread.
    pub(super) fn reader_of(&self, offset: usize) -> Option<Place> {
        let reads = |product: &&Product| product.pieces.contains(&(offset as u32 & !15));
        (0..).step_by(32).zip(&self.warps).find_map(|(thread, warp)| {
            let location = warp.products.pending.iter().find(reads)?.site;
            Some(Place { location, thread, block: self.block })
        })
    }

    /// A warp that exits leaves no product behind.
    pub(super) fn check_waited(&self, warp: usize) -> Outcome<()> {
        match self.warps[warp].products.pending.front() {
            Some(product) => {
                Err(Box::new(EmulatorError::NeverWaited { kind: AccessKind::Wgmma, place: self.place(product.site) }))
            }
            None => Ok(()),
        }
    }
}
