//! The format, the lookups and the refusals.

use super::*;
use crate::page_table::PageTableError;

fn machine() -> Machine {
    Machine::new("NVIDIA H200", 13000, "5eed")
}

fn config() -> AttentionConfig {
    AttentionConfig::new(32, 8, 128, 16)
}

/// A batch: query tokens and keys of each request.
fn with_batch<R>(requests: &[(u32, u32)], with: impl FnOnce(&PageTable<'_>, QueryLengths<'_>) -> R) -> R {
    let kv_lens: Vec<u32> = requests.iter().map(|request| request.1).collect();
    let mut begin = vec![0];
    requests.iter().for_each(|request| begin.push(begin[begin.len() - 1] + request.0));
    let table = PageTable::block_table(16, 1 << 16, &kv_lens).unwrap();
    with(&table, QueryLengths::indptr(&begin).unwrap())
}

fn record(tuning: &mut Tuning, config: &AttentionConfig, requests: &[(u32, u32)], us: [u64; 2]) {
    let [attend, prefill] = us.map(Duration::from_micros);
    with_batch(requests, |table, queries| tuning.record(config, table, queries, attend, prefill)).unwrap();
}

fn times(tuning: &Tuning, config: &AttentionConfig, requests: &[(u32, u32)]) -> Option<Times> {
    with_batch(requests, |table, queries| tuning.times(config, table, queries)).unwrap()
}

/// An attention, a batch, and its microseconds by the attend kernel and the prefill kernel.
type Measurement = (AttentionConfig, Vec<(u32, u32)>, [u64; 2]);

/// Ten batches of several attentions.
fn measurements() -> Vec<Measurement> {
    vec![
        (config(), vec![(8, 1024); 64], [72, 69]),
        (config(), vec![(8, 1100); 64], [80, 81]),
        (config(), vec![(1, 8192); 64], [495, 700]),
        (config(), vec![(1, 8192); 65], [500, 710]),
        (config(), [vec![(1, 4096); 128], vec![(512, 4096)]].concat(), [641, 551]),
        (config(), vec![], [1, 1]),
        (config().with_dtype(DType::F16), vec![(8, 1024); 64], [73, 70]),
        (config().with_soft_cap(30.0), vec![(8, 1024); 64], [90, 99]),
        (AttentionConfig { custom_variant: Some("near"), ..config() }, vec![(8, 1024); 64], [91, 98]),
        (AttentionConfig::new(8, 8, 64, 32), vec![(100, 1000)], [10, 5]),
    ]
}

fn tuning() -> Tuning {
    let mut tuning = Tuning::new(machine());
    measurements().iter().for_each(|(config, requests, us)| record(&mut tuning, config, requests, *us));
    tuning
}

#[test]
fn a_file_says_what_was_measured() {
    let text = tuning().to_string();
    let head = "oxattn tuning 1\ncard NVIDIA H200\ndriver 13000\nbundle 5eed\nentries 8\n";
    assert!(text.starts_with(head), "{text}");
    // Two batches of one kind are one entry.
    for line in [
        "dtype bf16 head_dim 128 kv_heads 8 group 4 variant plain page 16 requests 64 rows 2048 keys 65536 prompts 1/1 \
         attend_ns 152000 prefill_ns 150000 batches 2",
        "dtype bf16 head_dim 128 kv_heads 8 group 4 variant plain page 16 requests 64 rows 256 keys 524288 prompts 0/1 \
         attend_ns 995000 prefill_ns 1410000 batches 2",
        "dtype bf16 head_dim 128 kv_heads 8 group 4 variant plain page 16 requests 128 rows 2048 keys 524288 prompts 1/16 \
         attend_ns 641000 prefill_ns 551000 batches 1",
        "dtype bf16 head_dim 128 kv_heads 8 group 4 variant plain page 16 requests 0 rows 0 keys 0 prompts 0/1 \
         attend_ns 1000 prefill_ns 1000 batches 1",
        "dtype bf16 head_dim 128 kv_heads 8 group 4 variant custom.near page 16 requests 64 rows 2048 keys 65536 \
         prompts 1/1 attend_ns 91000 prefill_ns 98000 batches 1",
        "dtype bf16 head_dim 64 kv_heads 8 group 1 variant plain page 32 requests 1 rows 64 keys 512 prompts 1/1 \
         attend_ns 10000 prefill_ns 5000 batches 1",
    ] {
        assert!(text.lines().any(|found| found == line), "{line}\nis not in\n{text}");
    }
    assert_eq!(text.lines().count(), 5 + 8);
}

#[test]
fn equal_measurements_in_any_order_are_equal_bytes() {
    let text = tuning().to_string();
    let mut backwards = Tuning::new(machine());
    for (config, requests, us) in measurements().iter().rev() {
        record(&mut backwards, config, requests, *us);
    }
    assert_eq!(backwards.to_string(), text);
    let read: Tuning = text.parse().unwrap();
    assert_eq!((read.clone(), read.to_string()), (tuning(), text));
    assert_eq!((read.len(), read.is_empty(), Tuning::new(machine()).is_empty()), (8, false, true));
}

#[test]
fn batches_alike_are_found_and_others_are_not() {
    let tuning = tuning();
    let faster = |config: &AttentionConfig, requests: &[(u32, u32)]| {
        times(&tuning, config, requests).map(|times| times.faster())
    };
    let (attend, prefill) = (Some(Kernel::Attend), Some(Kernel::Prefill));
    // 64 requests of 8 tokens, or up to twice as many of each.
    assert_eq!(faster(&config(), &[(8, 1024); 64]), prefill);
    assert_eq!(faster(&config(), &[(15, 2047); 64]), prefill);
    assert_eq!(faster(&config(), &[(7, 1024); 64]), None);
    assert_eq!(faster(&config(), &[(8, 1023); 64]), None);
    assert_eq!(faster(&config(), &[(8, 1024); 63]), None);
    assert_eq!(faster(&config(), &[(8, 2048); 64]), None);
    assert_eq!(faster(&config(), &[(1, 8192); 64]), attend);
    // Another config, unless it says the same of kernels.
    assert_eq!(faster(&config().with_softmax_scale(0.5).non_causal(), &[(8, 1024); 64]), prefill);
    assert_eq!(faster(&config().with_dtype(DType::F16), &[(8, 1024); 64]), prefill);
    assert_eq!(faster(&config().with_soft_cap(30.0), &[(8, 1024); 64]), attend);
    assert_eq!(faster(&config().with_sinks(), &[(8, 1024); 64]), attend);
    for other in [
        AttentionConfig::new(32, 8, 64, 16),
        AttentionConfig::new(32, 8, 128, 32),
        AttentionConfig { ragged: true, page_size_tokens: 1, ..config() },
        AttentionConfig::new(16, 4, 128, 16),
        AttentionConfig::new(64, 8, 128, 16),
        AttentionConfig { custom_variant: Some("far"), ..config() },
    ] {
        assert_eq!(faster(&other, &[(8, 1024); 64]), None, "{other:?}");
    }
    // A tie is the attend kernel's, and means are of one batch.
    let tie = times(&tuning, &config(), &[]).unwrap();
    assert_eq!(tie.faster(), Kernel::Attend);
    let two = times(&tuning, &config(), &[(8, 1024); 64]).unwrap();
    assert_eq!((two.mean_us(Kernel::Attend), two.mean_us(Kernel::Prefill)), (76.0, 75.0));
}

#[test]
fn an_attentions_own_times_are_those_of_the_whole() {
    let tuning = tuning();
    for (config, requests, _) in measurements() {
        let lengths = with_batch(&requests, |table, queries| BatchLengths::new(table, queries, &config));
        let own = tuning.of(&config).get(Bucket::new(&lengths));
        assert!(own.is_some() && own == times(&tuning, &config, &requests), "{requests:?}");
    }
    assert_eq!(tuning.of(&AttentionConfig::new(16, 4, 128, 16)).0, []);
}

#[test]
fn prompts_parts_are_powers_of_two() {
    let parts =
        |prompt_work, work| Bucket::new(&BatchLengths { prompt_work, work, ..BatchLengths::default() }).prompt_parts;
    for (prompt_work, work, expected) in
        [(0, 9, 0), (9, 9, 1), (8, 9, 2), (5, 10, 2), (4, 10, 4), (1, 10, 16), (1, 16, 16), (1, 1 << 40, 1024)]
    {
        assert_eq!(parts(prompt_work, work), expected, "{prompt_work} of {work}");
    }
}

#[test]
fn damaged_files_are_refused_with_their_line() {
    let good = tuning().to_string();
    let changed = |from: &str, to: &str| {
        assert!(good.contains(from), "{from}");
        good.replacen(from, to, 1)
    };
    let without_last_line = good.trim_end().rsplit_once('\n').unwrap().0.to_owned();
    let last_line = good.lines().last().unwrap();
    for (text, message) in [
        (String::new(), "line 1: `` begins no tuning; `oxattn tuning 1` does"),
        ("{\"times\": []}".to_owned(), "line 1: `{\"times\": []}` begins no tuning"),
        (changed("tuning 1", "tuning 2"), "line 1: format version 2; version 1 is supported"),
        (changed("tuning 1", "tuning 01"), "line 1: format version 01; version 1 is supported"),
        ("oxattn tuning 1\n".to_owned(), "line 2: `` where `card` must stand"),
        (changed("card NVIDIA", "bard NVIDIA"), "line 2: `bard NVIDIA H200` where `card` must stand"),
        (changed("driver 13000", "driver x"), "line 3: driver is `x`; it must be a whole number of at most 32 bits"),
        (changed("driver 13000", "driver 4294967296"), "line 3: driver is `4294967296`; it must be"),
        (changed("bundle 5eed\n", ""), "line 4: `entries 8` where `bundle` must stand"),
        (changed("entries 8", "entries 9"), "line 13: the file ends after 8 entries; it says it has 9"),
        (without_last_line + "\n", "line 12: the file ends after 7 entries; it says it has 8"),
        (format!("{good}{last_line}\n"), "line 14: the same batches as on an earlier line"),
        (good[..good.len() - 1].to_owned(), "line 13: the line has no end"),
        (good[..good.len() - 4].to_owned() + "\n", "line 13: `batche` where `batches` must stand"),
        (changed("dtype bf16", "dtype f32"), "line 6: dtype is `f32`; it must be bf16 or f16"),
        (changed("head_dim 64", "head_dim -64"), "line 6: head_dim is `-64`; it must be a whole number in range"),
        (changed("head_dim 64", "head_dim  64"), "line 6: head_dim is ``; it must be a whole number in range"),
        (changed("head_dim", "dim"), "line 6: `dim` where `head_dim` must stand"),
        (changed("variant plain", "variant plan"), "line 6: variant is `plan`; it must be plain, modified, or custom."),
        (changed("custom.near", "custom."), "line 7: variant is `custom.`; it must be"),
        (changed("rows 64", "rows 65"), "line 6: rows is `65`; it must be a power of two, or 0"),
        (changed("keys 512", "keys 0512"), "line 6: keys is `0512`; it must be a power of two, or 0"),
        (changed("prompts 1/1", "prompts 1/3"), "line 6: prompts is `1/3`; it must be 0/1, or 1/1, 1/2 and so on"),
        (changed("prompts 1/1", "prompts 1/2048"), "line 6: prompts is `1/2048`; it must be"),
        (changed("attend_ns 10000", "attend_ns 1e4"), "line 6: attend_ns is `1e4`; it must be a whole number in range"),
        (changed("batches 1\n", "batches 0\n"), "line 6: batches is `0`; it must be at least 1"),
        (changed("batches 1\n", "batches 1 or so\n"), "line 6: `or so` after the end of the line"),
        (changed("entries 8\n", "entries 8\n\n"), "line 6: `` where `dtype` must stand"),
    ] {
        let found = text.parse::<Tuning>().err().map(|error| error.to_string()).unwrap_or_default();
        assert!(found.starts_with(message), "{text}\nfound  {found}\nwanted {message}");
    }
    // Without any one byte it is refused, or says no more than what it then says.
    let lines = |text: &str| text.lines().map(str::to_owned).collect::<std::collections::BTreeSet<_>>();
    for index in 0..good.len() {
        let shorter = [&good[..index], &good[index + 1..]].concat();
        if let Ok(read) = shorter.parse::<Tuning>() {
            assert_eq!(lines(&read.to_string()), lines(&shorter));
        }
        assert!(good[..index].parse::<Tuning>().is_err(), "cut after {index} bytes");
    }
}

#[test]
fn files_that_cannot_be_read_and_names_that_cannot_be_written_are_refused() {
    let path = std::path::Path::new("no/such/tuning");
    let error = Tuning::load(path).unwrap_err().to_string();
    assert!(error.starts_with("tuning no/such/tuning: "), "{error}");
    let mut tuning = Tuning::new(machine());
    let config = AttentionConfig { custom_variant: Some("near it"), ..config() };
    let error = with_batch(&[(1, 1)], |table, queries| {
        tuning.record(&config, table, queries, Duration::ZERO, Duration::ZERO).unwrap_err().to_string()
    });
    assert_eq!(error, "variant \"custom.near it\" cannot be written to a tuning; names without blanks can");
    assert!(tuning.is_empty());
    let table = PageTable::block_table(16, 1, &[5u32, 5]).unwrap();
    let error = tuning.times(&config, &table, QueryLengths::indptr(&[0u32, 1]).unwrap()).unwrap_err();
    assert!(matches!(error, TuningError::PageTable(PageTableError::Length { .. })), "{error}");
}

#[test]
fn times_of_another_machine_are_not_those_here() {
    let measured = machine();
    assert_eq!(measured.check(&machine()), Ok(()));
    for (here, message) in [
        (Machine::new("NVIDIA H100", 12000, "0"), "its times are of the card NVIDIA H200; this is NVIDIA H100"),
        (Machine::new("NVIDIA H200", 12080, "0"), "its times are of CUDA driver version 13000; this is 12080"),
        (Machine::new("NVIDIA  H200\n", 13000, "0"), "its times are of the kernels 5eed; these are 0"),
    ] {
        assert_eq!(measured.check(&here).unwrap_err().to_string(), message);
    }
}
