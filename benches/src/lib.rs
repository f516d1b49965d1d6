//! Measurements of the host code and of the GPU.
//!
//! `benches/` times the planner with criterion. `definitions/serving.jsonl` holds the cases of the GPU suite, which
//! `oxattn bench` runs, `definitions/rope_append.jsonl` those of rotating and appending, `definitions/prefix.jsonl` those
//! of prefixes that requests share (two of them the requests of a trace in flight together), `definitions/variants.jsonl`
//! those of windows, caps, sinks, ALiBi and masks, and `record/` what they took, by date and card.
