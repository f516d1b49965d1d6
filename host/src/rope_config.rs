//! What a rotary embedding is: which elements pair up, and by what angle each pair turns.
//!
//! In: the model's numbers. Out: a [`RopeConfig`] that [`RopeConfig::validate`] accepted, and the angles as the kernels
//! take them. The angle of pair `i` at position `p` is `p * theta^(-2 i / rotary_dim)` radians, changed by
//! [`RopeScaling`]. Llama 3.1's change is Meta's, as FlashInfer and Transformers compute it.

use std::f64::consts::TAU;

/// Smallest and largest factor by which positions are divided.
const FACTORS: (f64, f64) = (1.0 / 1024.0, 1_048_576.0);
/// Largest row, as for attention.
const MAX_HEAD_DIM: u32 = 512;

/// How frequencies are changed for contexts longer than a model was trained on.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub enum RopeScaling {
    /// Not at all.
    #[default]
    None,
    /// Position interpolation (Chen et al. 2023): positions are divided by `factor`, FlashInfer's `rope_scale`.
    Linear {
        /// From 1/1024 to 2^20.
        factor: f64,
    },
    /// Llama 3.1: pairs that turn more than `high_freq_factor` times in the old context stay as they are, those that
    /// turn less than `low_freq_factor` times are slowed by `factor`, and between the two it is interpolated.
    Llama3 {
        /// From 1/1024 to 2^20; Llama 3.1 has 8.
        factor: f64,
        /// Above 0; Llama 3.1 has 1.
        low_freq_factor: f64,
        /// Above `low_freq_factor`; Llama 3.1 has 4.
        high_freq_factor: f64,
        /// The context the model was trained on first; Llama 3.1 has 8192.
        old_context_tokens: u32,
    },
}

/// Where cosines and sines come from.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum RopeAngles {
    /// Computed for every token from its position.
    Computed {
        /// The base of the frequencies: 1e4, 5e5, ...; finite and at least 1.
        theta: f64,
        /// What is done for long contexts.
        scaling: RopeScaling,
    },
    /// Read from the caller's table on the device.
    Cached {
        /// Device address of `[positions, rotary_dim]` f32, contiguous, 16-byte aligned: the cosines of a position's
        /// pairs, then their sines. vLLM's and FlashInfer's `cos_sin_cache`.
        cos_sin: u64,
        /// Rows of the table.
        positions: u32,
    },
}

/// The rotary embedding of one model, the same for every token of every batch.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct RopeConfig {
    /// Elements of a query and key row: a multiple of 8, at most 512.
    pub head_dim: u32,
    /// First elements of a row that are rotated, a multiple of 16; the others pass as they are.
    pub rotary_dim: u32,
    /// Whether pair `i` is elements `2 i` and `2 i + 1` (GPT-J), and not `i` and `i + rotary_dim / 2` (NeoX, Llama).
    pub interleaved: bool,
    /// Where cosines and sines come from.
    pub angles: RopeAngles,
}

/// A rotary embedding no kernel does.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum RopeError {
    /// Rows are read in pieces of eight elements.
    #[error("head_dim is {got}; supported are multiples of 8 from 16 to {MAX_HEAD_DIM}")]
    HeadDim {
        /// The value found.
        got: u32,
    },
    /// Both halves of what is rotated are read in pieces of eight elements.
    #[error("rotary_dim is {got}; supported are multiples of 16 from 16 to head_dim = {head_dim}")]
    RotaryDim {
        /// The value found.
        got: u32,
        /// Elements of a row.
        head_dim: u32,
    },
    /// The base is no base.
    #[error("theta is {got}; it must be finite and at least 1")]
    Theta {
        /// The value found.
        got: f64,
    },
    /// Positions cannot be divided by this.
    #[error("factor is {got}; supported is from 1/1024 to 2^20")]
    Factor {
        /// The value found.
        got: f64,
    },
    /// There is nothing to interpolate between.
    #[error("low_freq_factor is {low} and high_freq_factor {high}; supported are finite 0 < low < high")]
    FrequencyFactors {
        /// `low_freq_factor`.
        low: f64,
        /// `high_freq_factor`.
        high: f64,
    },
    /// A count that must be positive is zero.
    #[error("{field} is 0; it must be at least 1")]
    Zero {
        /// The field.
        field: &'static str,
    },
    /// Neither queries nor keys.
    #[error("neither q nor k was given; this call needs one of them")]
    NoTensors,
    /// Nothing says by which positions to rotate.
    #[error("positions is None and the destination is by slots; supported with None is a destination by positions")]
    NoPositions,
}

impl RopeConfig {
    /// All of a row in two halves, with theta 1e4 and no scaling.
    pub fn new(head_dim: u32) -> RopeConfig {
        let angles = RopeAngles::Computed { theta: 1e4, scaling: RopeScaling::None };
        RopeConfig { head_dim, rotary_dim: head_dim, interleaved: false, angles }
    }

    /// The same with another base.
    pub fn with_theta(self, theta: f64) -> RopeConfig {
        let scaling = match self.angles {
            RopeAngles::Computed { scaling, .. } => scaling,
            RopeAngles::Cached { .. } => RopeScaling::None,
        };
        RopeConfig { angles: RopeAngles::Computed { theta, scaling }, ..self }
    }

    /// The same with other frequencies for long contexts.
    pub fn with_scaling(self, scaling: RopeScaling) -> RopeConfig {
        let theta = match self.angles {
            RopeAngles::Computed { theta, .. } => theta,
            RopeAngles::Cached { .. } => 1e4,
        };
        RopeConfig { angles: RopeAngles::Computed { theta, scaling }, ..self }
    }

    /// The same with only the first `rotary_dim` elements of a row rotated.
    pub fn with_rotary_dim(self, rotary_dim: u32) -> RopeConfig {
        RopeConfig { rotary_dim, ..self }
    }

    /// The same with neighbours for pairs.
    pub fn interleaved(self) -> RopeConfig {
        RopeConfig { interleaved: true, ..self }
    }

    /// The same with cosines and sines from a table, in place of theta and scaling: see [`RopeAngles::Cached`]. Tokens
    /// at a position past the table are skipped, like those at negative ones.
    pub fn with_cos_sin_cache(self, cos_sin: u64, positions: u32) -> RopeConfig {
        RopeConfig { angles: RopeAngles::Cached { cos_sin, positions }, ..self }
    }

    /// Refuses what no kernel does.
    pub fn validate(&self) -> Result<(), RopeError> {
        let RopeConfig { head_dim, rotary_dim, angles, .. } = *self;
        if !head_dim.is_multiple_of(8) || !(16..=MAX_HEAD_DIM).contains(&head_dim) {
            return Err(RopeError::HeadDim { got: head_dim });
        }
        if !rotary_dim.is_multiple_of(16) || !(16..=head_dim).contains(&rotary_dim) {
            return Err(RopeError::RotaryDim { got: rotary_dim, head_dim });
        }
        match angles {
            RopeAngles::Cached { positions: 0, .. } => Err(RopeError::Zero { field: "positions of the cos_sin cache" }),
            RopeAngles::Cached { .. } => Ok(()),
            RopeAngles::Computed { theta, .. } if !(1.0..=f64::MAX).contains(&theta) => {
                Err(RopeError::Theta { got: theta })
            }
            RopeAngles::Computed { scaling, .. } => scaling.validate(),
        }
    }

    /// For each pair, how far it turns from a position to the next, in 2^-64 of a turn: what the kernels multiply
    /// positions by. Empty for a table's angles.
    ///
    /// Frequencies are computed in f64. Their product with 1 / (2 pi) is kept to twice that, so that at position 2^31
    /// an angle is off by what the frequency's own rounding makes of it: 2.4e-7 for one radian a position, less for
    /// slower pairs.
    pub fn turns(&self) -> Vec<u64> {
        let RopeAngles::Computed { theta, scaling } = self.angles else { return Vec::new() };
        let frequency = |pair: u32| scaling.apply(theta.powf(-2.0 * pair as f64 / self.rotary_dim as f64));
        (0..self.rotary_dim / 2).map(|pair| to_turns(frequency(pair))).collect()
    }

    /// [`turns`](Self::turns), and behind them what attention goes from row to row by: f32 cosines and sines, in the lower
    /// and upper half, of each pair's angle at position 4, then at 8 and at 16.
    pub fn turns_and_steps(&self) -> Vec<u64> {
        let mut table = self.turns();
        let pairs = table.len();
        for positions in [4, 8, 16] {
            for pair in 0..pairs {
                // Overflow is whole turns; what is left of the angle is from -1/2 to 1/2 of a turn.
                let turn = table[pair].wrapping_mul(positions) as i64 as f64 / (1u128 << 64) as f64;
                let [cosine, sine] = [f64::cos, f64::sin].map(|of| of(turn * std::f64::consts::TAU) as f32);
                table.push(cosine.to_bits() as u64 | (sine.to_bits() as u64) << 32);
            }
        }
        table
    }
}

impl RopeScaling {
    fn validate(self) -> Result<(), RopeError> {
        let (RopeScaling::Linear { factor } | RopeScaling::Llama3 { factor, .. }) = self else { return Ok(()) };
        if !(FACTORS.0..=FACTORS.1).contains(&factor) {
            return Err(RopeError::Factor { got: factor });
        }
        let RopeScaling::Llama3 { low_freq_factor: low, high_freq_factor: high, old_context_tokens, .. } = self else {
            return Ok(());
        };
        if !(low > 0.0 && low < high && high.is_finite()) {
            return Err(RopeError::FrequencyFactors { low, high });
        }
        if old_context_tokens == 0 {
            return Err(RopeError::Zero { field: "old_context_tokens" });
        }
        Ok(())
    }

    /// A frequency, in radians a position, as it is used.
    fn apply(self, frequency: f64) -> f64 {
        match self {
            RopeScaling::None => frequency,
            RopeScaling::Linear { factor } => frequency / factor,
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, old_context_tokens } => {
                let turns_in_context = old_context_tokens as f64 * frequency / TAU;
                let kept = (turns_in_context - low_freq_factor) / (high_freq_factor - low_freq_factor);
                let kept = kept.clamp(0.0, 1.0);
                kept * frequency + (1.0 - kept) * frequency / factor
            }
        }
    }
}

/// Radians, not negative, in 2^-64 of a turn; whole turns are dropped.
fn to_turns(radians: f64) -> u64 {
    // 1 / (2 pi) and what f64 leaves of it.
    const TURN: (f64, f64) = (0.159_154_943_091_895_35, -9.839_338_337_591_243e-18);
    let product = radians * TURN.0;
    let rest = radians.mul_add(TURN.0, -product) + radians * TURN.1;
    let of_64_bits = 2f64.powi(64);
    let fraction = (product.fract() * of_64_bits) as u64;
    fraction.wrapping_add((rest * of_64_bits).round() as i64 as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_name_the_field_and_the_value() {
        let plain = RopeConfig::new(128);
        let llama = |factor, low_freq_factor, high_freq_factor, old_context_tokens| {
            let scaling = RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, old_context_tokens };
            plain.with_scaling(scaling)
        };
        let theta = "; it must be finite and at least 1";
        let factor = "; supported is from 1/1024 to 2^20";
        let rotary = "; supported are multiples of 16 from 16 to head_dim = 128";
        let head_dim = "; supported are multiples of 8 from 16 to 512";
        let factors = "; supported are finite 0 < low < high";
        for (config, message) in [
            (RopeConfig::new(100), format!("head_dim is 100{head_dim}")),
            (RopeConfig::new(0), format!("head_dim is 0{head_dim}")),
            (RopeConfig::new(1024), format!("head_dim is 1024{head_dim}")),
            (plain.with_rotary_dim(63), format!("rotary_dim is 63{rotary}")),
            (plain.with_rotary_dim(0), format!("rotary_dim is 0{rotary}")),
            (plain.with_rotary_dim(24), format!("rotary_dim is 24{rotary}")),
            (plain.with_rotary_dim(192), format!("rotary_dim is 192{rotary}")),
            (plain.with_theta(0.0), format!("theta is 0{theta}")),
            (plain.with_theta(-1e4), format!("theta is -10000{theta}")),
            (plain.with_theta(f64::NAN), format!("theta is NaN{theta}")),
            (plain.with_theta(f64::INFINITY), format!("theta is inf{theta}")),
            (plain.with_scaling(RopeScaling::Linear { factor: 0.0 }), format!("factor is 0{factor}")),
            (plain.with_scaling(RopeScaling::Linear { factor: f64::NAN }), format!("factor is NaN{factor}")),
            (llama(-8.0, 1.0, 4.0, 8192), format!("factor is -8{factor}")),
            (llama(8.0, 4.0, 4.0, 8192), format!("low_freq_factor is 4 and high_freq_factor 4{factors}")),
            (llama(8.0, 0.0, 4.0, 8192), format!("low_freq_factor is 0 and high_freq_factor 4{factors}")),
            (llama(8.0, 1.0, 4.0, 0), "old_context_tokens is 0; it must be at least 1".into()),
            (plain.with_cos_sin_cache(256, 0), "positions of the cos_sin cache is 0; it must be at least 1".into()),
        ] {
            assert_eq!(config.validate().unwrap_err().to_string(), message);
        }
        for config in [plain, llama(8.0, 1.0, 4.0, 8192), plain.with_rotary_dim(16), RopeConfig::new(80)] {
            config.validate().unwrap();
        }
    }

    /// The first 64 bits of 1 / (2 pi) and of 10 / (2 pi), from its decimal digits.
    #[test]
    fn turns_have_64_good_bits() {
        assert_eq!(to_turns(0.0), 0);
        for (radians, wanted) in [(1.0, ONE_RADIAN), (10.0, TEN_RADIANS)] {
            let error = to_turns(radians).wrapping_sub(wanted) as i64;
            assert!(error.abs() <= 1, "{radians}: {error}");
        }
    }

    /// The first pair turns by a radian a position, the last by 10^(-3.5).
    #[test]
    fn steps_are_angles_at_positions_4_8_and_16() {
        let config = RopeConfig::new(16).with_theta(1e4);
        let table = config.turns_and_steps();
        assert_eq!((table.len(), &table[..8]), (32, &config.turns()[..]));
        let halves = |word: u64| [f32::from_bits(word as u32), f32::from_bits((word >> 32) as u32)];
        for (step, wanted) in [(8, [-0.653_643_6, -0.756_802_5]), (16, [-0.145_500_03, 0.989_358_25])] {
            assert_eq!(halves(table[step]), wanted);
        }
        assert_eq!(halves(table[31]), [0.999_987_2, 0.005_059_622_7]);
    }

    const ONE_RADIAN: u64 = 0x28be_60db_9391_054a;
    const TEN_RADIANS: u64 = 0x976f_c893_c3aa_34e9;
}
