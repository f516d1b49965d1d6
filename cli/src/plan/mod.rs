mod draw;
mod kv_lens;
