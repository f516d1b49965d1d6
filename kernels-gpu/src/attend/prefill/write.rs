//! The end of an item: a consumer's accumulators become output rows or partial states.
//!
//! Four lanes hold a row two columns at a time. Stores of such pairs touch eight rows for 16 bytes of each, and took a
//! fifth of the time of prompts of 512 tokens, whose items are short. So a warp turns its 16 rows in shared memory, 64
//! columns at a time, and stores 64 bytes of eight rows. Pieces of a row's 16 bytes lie where the row's number says, so
//! that both ways touch each bank once.
use simt::{registers::anew, tensor::Element, thread, warp::sync_warp};

use super::room::Room;
use crate::abi::parameters::AttendParameters;
use crate::attend::tall;
use crate::attend::work::{Cursor, Work};
use crate::softmax::OnlineSoftmax;
use crate::tile::unroll;
use crate::variant::Variant;

/// Columns that are turned at a time: eight tiles of accumulators.
const TURNED: usize = 8;

/// Writes the lane's rows of an item, the first of which is `row`.
///
/// # Safety
/// [`super::prefill`]'s contract; the consumer's warps come here as a whole.
#[inline(always)]
pub(super) unsafe fn write<
    E: Element,
    V: Variant,
    const HEAD_DIM: u32,
    const VALUE_DIM: u32,
    const STEPS: usize,
    const TILES: usize,
>(
    p: &AttendParameters,
    room: Room<V, HEAD_DIM, VALUE_DIM>,
    at: Cursor,
    row: u32,
    softmax: &OnlineSoftmax,
    outputs: &[[f32; 4]; TILES],
) {
    let thread = anew(thread::thread_idx_x());
    let (row_of_eight, quad) = (thread % 32 / 4, thread % 4);
    // SAFETY: an item of the queue, by the kernel's contract; two tiles of 8 columns are a step.
    unsafe {
        let work = Work::read_again(p, at);
        if work.pieces > 1 {
            let columns: &[[[f32; 4]; 2]; STEPS] = &*(&raw const *outputs).cast();
            tall::write_states::<VALUE_DIM, STEPS>(p, &work, row, quad, softmax, columns);
            return;
        }
        let inverse = [softmax.inverse(0), softmax.inverse(1)];
        let target = |half: u32| work.row(&p.out, p.group, row + 8 * half);
        let targets = [target(0), target(1)];
        let is_there = [row < work.rows, row + 8 < work.rows];
        let turned = room.turned(thread / 32).add_bytes(128 * row_of_eight);
        // In an odd row the upper pieces come first, so that two rows together touch each bank once.
        let first = quad + 4 * (row_of_eight & 1);
        unroll::<TILES>(|n| {
            let piece = n % TURNED;
            unroll::<2>(|half| {
                let word = E::pack(outputs[n][2 * half] * inverse[half], outputs[n][2 * half + 1] * inverse[half]);
                let place = 1024 * half as u32 + (16 * (piece as u32 ^ row_of_eight) + 4 * quad);
                turned.add_bytes(place).cast::<u32>().store(word);
            });
            if piece + 1 == TURNED {
                sync_warp();
                unroll::<2>(|half| {
                    unroll::<2>(|i| {
                        let piece = first ^ (4 * i as u32);
                        let place = 1024 * half as u32 + 16 * (piece ^ row_of_eight);
                        let words = turned.add_bytes(place).cast::<[u32; 4]>().load();
                        let in_tile = (8 * (n / TURNED)) as u32 + piece;
                        if is_there[half] && (!V::PADS || in_tile < p.value_pieces) {
                            targets[half].add(16 * in_tile as u64).cast::<[u32; 4]>().store(words);
                        }
                    })
                });
                sync_warp();
            }
        });
        unroll::<2>(|half| {
            if is_there[half] && quad == 0 {
                tall::write_lse(p, &work, row + 8 * half as u32, softmax.lse(half));
            }
        });
    }
}
