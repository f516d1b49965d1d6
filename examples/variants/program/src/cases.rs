//! What is checked: both variants, alone and with all of a config that they compose with.

use oxattn::{AttentionConfig, DType, Kernel, SplitMode};

/// A variant of the example.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Which {
    /// In chunks of so many tokens.
    Chunked {
        /// Their log2.
        chunk_tokens_log2: u32,
    },
    /// With random biases.
    DistanceBias,
}

/// A batch of a variant.
#[derive(Clone, Debug)]
pub struct Case {
    /// What it is for.
    pub name: &'static str,
    /// The variant.
    pub which: Which,
    /// All but the variant's name.
    pub config: AttentionConfig,
    /// How it is cut.
    pub mode: SplitMode,
    /// By which kernel.
    pub kernel: Kernel,
    /// Query tokens and keys of each request.
    pub lens: &'static [(u32, u32)],
}

/// Decodes, prompts (one longer than its keys, one whose rows cross from chunk to chunk inside a tile), no keys, and
/// enough keys for every distance and several tiles.
const MIXED: &[(u32, u32)] = &[(1, 450), (5, 71), (3, 2), (1, 0), (0, 9), (60, 90)];

/// What every GPU does.
pub fn cases() -> Vec<Case> {
    let config = |heads: (u32, u32), head_dim, page| AttentionConfig::new(heads.0, heads.1, head_dim, page);
    let chunked = |log2| Which::Chunked { chunk_tokens_log2: log2 };
    let kernel = Kernel::Attend;
    let case = |name, which, config, mode| Case { name, which, config, mode, kernel, lens: MIXED };
    let cut = SplitMode::FixedSplit { tokens: 64 };
    let (wide, narrow) = (config((6, 2), 128, 16), config((4, 4), 64, 5));
    let biased = config((4, 4), 96, 5);
    vec![
        case("chunks of 64", chunked(6), wide, SplitMode::Unsplit),
        case("chunks of 32, cut", chunked(5), narrow.with_dtype(DType::F16), cut),
        case("chunks of 1", chunked(0), narrow, SplitMode::Balanced),
        case("one chunk", chunked(30), wide.with_dtype(DType::F16), SplitMode::BatchInvariant),
        case("chunks of 32 both ways", chunked(5), wide.non_causal(), cut),
        case("chunks of 64 in a window of 64", chunked(6), narrow.with_window(Some(63), None), cut),
        case("biases", Which::DistanceBias, wide, SplitMode::Unsplit),
        case("biases, cut", Which::DistanceBias, biased.with_dtype(DType::F16), cut),
        case("biases both ways", Which::DistanceBias, wide.non_causal().with_dtype(DType::F16), SplitMode::Balanced),
        case("biases, a scale", Which::DistanceBias, wide.with_softmax_scale(0.2), SplitMode::BatchInvariant),
        case(
            "biases in a window",
            Which::DistanceBias,
            biased.non_causal().with_window(Some(40), Some(7)),
            SplitMode::Balanced,
        ),
    ]
}

/// What the prefill kernels do, on Hopper: two row tiles of a prompt, and enough keys for a ring of tiles to turn.
pub fn prefill_cases() -> Vec<Case> {
    const PROMPTS: &[(u32, u32)] = &[(90, 330), (1, 450), (3, 2), (1, 0), (0, 9), (60, 71)];
    let config = |heads: (u32, u32), head_dim, page| AttentionConfig::new(heads.0, heads.1, head_dim, page);
    let chunked = |log2| Which::Chunked { chunk_tokens_log2: log2 };
    let kernel = Kernel::Prefill;
    let case = |name, which, config, mode| Case { name, which, config, mode, kernel, lens: PROMPTS };
    let (narrow, middle, wide) = (config((4, 4), 64, 8), config((6, 2), 128, 16), config((2, 1), 256, 48));
    vec![
        case("prefill, chunks of 64", chunked(6), middle, SplitMode::Unsplit),
        case("prefill, chunks of 32", chunked(5), narrow.with_dtype(DType::F16), SplitMode::Balanced),
        case("prefill, chunks of 1", chunked(0), wide, SplitMode::Balanced),
        case("prefill, one chunk", chunked(30), wide.with_dtype(DType::F16), SplitMode::Unsplit),
        case("prefill, chunks of 128 both ways", chunked(7), narrow.non_causal(), SplitMode::Balanced),
        case(
            "prefill, chunks of 64 in a window of 64",
            chunked(6),
            middle.with_dtype(DType::F16).with_window(Some(63), None),
            SplitMode::Balanced,
        ),
        case("prefill, biases", Which::DistanceBias, middle, SplitMode::Balanced),
        case("prefill, biases, padded", Which::DistanceBias, config((6, 2), 96, 16), SplitMode::Balanced),
        case(
            "prefill, biases in a window, a scale",
            Which::DistanceBias,
            middle.with_dtype(DType::F16).non_causal().with_window(Some(140), Some(7)).with_softmax_scale(0.2),
            SplitMode::Unsplit,
        ),
    ]
}
