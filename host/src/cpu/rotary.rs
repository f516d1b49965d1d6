//! Norms and rotation of query and key rows on their way into attention.
//!
//! In: rows in f32 and the positions they stand at. Out: the same rows, normalised and then rotated. Angles are f64: those
//! of the first position of a run of rows are exact, and each next one is a turn further, which after the 31 rows of a
//! block is 1e-14 off.

use super::memory::read;
use kernels_gpu::variant::RotaryParameters;
use std::f64::consts::TAU;

/// What is done to some rows.
#[derive(Clone, Copy)]
pub struct Transform<'a> {
    parameters: &'a RotaryParameters,
    norm_weights: u64,
    epsilon: f32,
}

/// Cosine and sine of a pair's angle.
type Angle = [f64; 2];

/// Angles of the pairs at a position, and how far they turn to the next.
#[derive(Default)]
pub struct Angles {
    at: Vec<Angle>,
    step: Vec<Angle>,
}

impl<'a> Transform<'a> {
    pub fn of_queries(parameters: &'a RotaryParameters) -> Self {
        let RotaryParameters { query_norm: norm_weights, query_epsilon: epsilon, .. } = *parameters;
        Transform { parameters, norm_weights, epsilon }
    }

    pub fn of_keys(parameters: &'a RotaryParameters) -> Self {
        let RotaryParameters { key_norm: norm_weights, key_epsilon: epsilon, .. } = *parameters;
        Transform { parameters, norm_weights, epsilon }
    }

    /// Changes rows of `head_dim` at `position` and the places after it.
    ///
    /// # Safety
    /// The parameters describe live memory as [the module](super) says.
    pub unsafe fn apply(self, rows: &mut [f32], head_dim: usize, position: i32, angles: &mut Angles) {
        let rotates = self.parameters.turns != 0;
        if self.norm_weights != 0 {
            // SAFETY: the caller's; a weight for each element.
            let weight = |column: usize| unsafe { read::<f32>(self.norm_weights, column) };
            for row in rows.chunks_exact_mut(head_dim) {
                let mean = row.iter().map(|x| x * x).sum::<f32>() / head_dim as f32;
                let scale = 1.0 / (mean + self.epsilon).sqrt();
                row.iter_mut().enumerate().for_each(|(column, x)| *x *= scale * weight(column));
            }
        }
        if rotates {
            // SAFETY: the caller's.
            unsafe { self.start(position, angles) };
            rows.chunks_exact_mut(head_dim).for_each(|row| self.rotate(row, angles));
        }
    }

    /// # Safety
    /// As [`apply`](Self::apply)'s.
    unsafe fn start(self, position: i32, angles: &mut Angles) {
        let angle = |turn: u64| {
            let (sine, cosine) = (turn as f64 * (TAU / 2f64.powi(64))).sin_cos();
            [cosine, sine]
        };
        angles.at.clear();
        angles.step.clear();
        for pair in 0..self.parameters.rotary_dim as usize / 2 {
            // SAFETY: the caller's; an angle for each pair.
            let turn = unsafe { read::<u64>(self.parameters.turns, pair) };
            // Overflow is whole turns.
            angles.at.push(angle(turn.wrapping_mul(position as i64 as u64)));
            angles.step.push(angle(turn));
        }
    }

    /// Rotates a row, and moves on to the next position.
    fn rotate(self, row: &mut [f32], angles: &mut Angles) {
        let half = angles.at.len();
        for (pair, (at, step)) in angles.at.iter_mut().zip(&angles.step).enumerate() {
            let (first, second) =
                if self.parameters.interleaved != 0 { (2 * pair, 2 * pair + 1) } else { (pair, pair + half) };
            let [cosine, sine] = at.map(|x| x as f32);
            let (a, b) = (row[first], row[second]);
            row[first] = a * cosine - b * sine;
            row[second] = b * cosine + a * sine;
            *at = [at[0] * step[0] - at[1] * step[1], at[1] * step[0] + at[0] * step[1]];
        }
    }
}
