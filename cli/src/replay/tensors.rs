//! The dense tensors of a step: new keys and values for `append`, queries for `run`.

use super::values::{Place, Source, Tensor, Values};
use crate::engine::NewTokens;
use crate::serve::Running;
use oxattn::AttentionConfig;
use std::ops::Range;

/// The tensors of one layer of one step.
pub struct StepTensors<'a> {
    pub config: &'a AttentionConfig,
    pub values: &'a Values,
    pub running: &'a [Running],
    pub layer: u32,
}

impl StepTensors<'_> {
    /// Queries of every running request's newest token, `[requests, query_heads, head_dim]`.
    pub fn queries(&self) -> Vec<u16> {
        self.rows(Tensor::Query, self.config.query_heads, &self.newest())
    }

    /// Keys and values of every running request's newest token.
    pub fn new_tokens(&self) -> NewTokens {
        self.tokens(&self.newest())
    }

    /// Keys and values of a range of positions of the request at `index`.
    pub fn prompt(&self, index: usize, positions: Range<u32>) -> NewTokens {
        let tokens: Vec<(usize, u32)> = positions.map(|position| (index, position)).collect();
        self.tokens(&tokens)
    }

    fn newest(&self) -> Vec<(usize, u32)> {
        self.running.iter().enumerate().map(|(index, running)| (index, running.kv_len_tokens() - 1)).collect()
    }

    fn tokens(&self, tokens: &[(usize, u32)]) -> NewTokens {
        NewTokens {
            requests: tokens.iter().map(|&(index, _)| index as i32).collect(),
            positions: tokens.iter().map(|&(_, position)| position as i32).collect(),
            keys: self.rows(Tensor::Key, self.config.kv_heads, tokens),
            values: self.rows(Tensor::Value, self.config.kv_heads, tokens),
        }
    }

    /// `[tokens, heads, head_dim]` elements of the tokens given as (index of the request, position).
    fn rows(&self, tensor: Tensor, heads: u32, tokens: &[(usize, u32)]) -> Vec<u16> {
        let head_dim = self.config.head_dim as usize;
        let mut elements = vec![0; tokens.len() * heads as usize * head_dim];
        let places = tokens.iter().flat_map(|&(index, position)| {
            let (layer, source) = (self.layer, Source::of(&self.running[index], position));
            (0..heads).map(move |head| Place { layer, source, position, head })
        });
        for (row, place) in elements.chunks_exact_mut(head_dim).zip(places) {
            self.values.fill(tensor, place, row);
        }
        elements
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use oxattn::DType;

    #[test]
    fn rows_are_laid_out_by_token_then_head() {
        let config = AttentionConfig::new(4, 2, 64, 16);
        let values = Values { seed: 1, dtype: DType::Bf16 };
        let request = |request, prompt_tokens| Running {
            request,
            prompt_tokens,
            output_tokens: 9,
            generated_tokens: 2,
            ..Running::default()
        };
        let mut running = [request(8, 10), request(3, 20)];
        let tensors = StepTensors { config: &config, values: &values, running: &running, layer: 6 };
        let row = |tensor, source, position, head| {
            let mut row = vec![0; 64];
            values.fill(tensor, Place { layer: 6, source, position, head }, &mut row);
            row
        };

        let queries = tensors.queries();
        assert_eq!(queries.len(), 2 * 4 * 64);
        assert_eq!(queries[(4 + 2) * 64..][..64], row(Tensor::Query, Source::Request(3), 21, 2));

        let new = tensors.new_tokens();
        assert_eq!((new.requests, new.positions), (vec![0, 1], vec![11, 21]));
        assert_eq!(new.keys[(2 + 1) * 64..], row(Tensor::Key, Source::Request(3), 21, 1));

        let prompt = tensors.prompt(1, 4..7);
        assert_eq!((prompt.requests, prompt.positions), (vec![1, 1, 1], vec![4, 5, 6]));
        assert_eq!(prompt.values[2 * 2 * 64..][..64], row(Tensor::Value, Source::Request(3), 6, 0));

        // A prompt whose block is known is the block's as far as it goes.
        running[1].prompt_blocks = [77].into();
        let tensors = StepTensors { config: &config, values: &values, running: &running, layer: 6 };
        assert_eq!(tensors.prompt(1, 19..20).keys[..64], row(Tensor::Key, Source::Block(77), 19, 0));
        assert_eq!(tensors.new_tokens().keys[(2 + 1) * 64..], row(Tensor::Key, Source::Request(3), 21, 1));
    }
}
