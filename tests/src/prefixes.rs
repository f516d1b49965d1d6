//! Batches with prefixes in common: what a plan may read once for several requests. Their answers are the oracle's of the
//! same batch without a word about it.

use crate::cases::{Case, Pages, Unused};
use crate::layout::LAYOUTS;
use oxattn::config::AttentionConfig;

/// A request: query tokens, keys, and those in common with the request before it.
type Request = (u32, u32, u32);

/// Most levels of the table.
const LEVELS: u32 = 3;

fn case(name: &str, heads: (u32, u32), page_size: u32, requests: &[Request]) -> Case {
    let column = |of: fn(&Request) -> u32| requests.iter().map(of).collect::<Vec<u32>>();
    let (query_lens, kv_lens) = (column(|request| request.0), column(|request| request.1));
    let mut case = Case::new(format!("prefixes: {name}"), heads, 64, page_size, &query_lens, &kv_lens);
    case.config = case.config.with_shared_prefixes(LEVELS).always_sharing();
    case.shared_tokens = column(|request| request.2);
    case
}

/// `members` requests of one query token with a prefix in common; the suffix of member `r` has `suffix(r)` keys.
fn group(members: u32, prefix: u32, suffix: impl Fn(u32) -> u32) -> Vec<Request> {
    (0..members).map(|member| (1, prefix + suffix(member), if member == 0 { 0 } else { prefix })).collect()
}

/// The table.
pub fn prefix_cases() -> Vec<Case> {
    let mut cases = Vec::new();
    // Members and keys of the prefix: none, less than a tile, a tile, many.
    for (index, (members, prefix)) in
        [(1, 300), (2, 0), (2, 40), (2, 128), (2, 1500), (5, 64), (5, 700), (64, 16), (64, 129), (64, 640)]
            .into_iter()
            .enumerate()
    {
        let page = [16, 8, 64, 24][index % 4];
        let heads = [(4, 1), (8, 2), (7, 1), (2, 2)][index % 4];
        let suffixes: [&dyn Fn(u32) -> u32; 4] = [&|_| 1, &|_| page, &|_| page + 1, &|member| 1 + member * 7 % 90];
        let requests = group(members, prefix, suffixes[(index + 1) % 4]);
        let name = format!("{members} members, {prefix} keys in common, pages of {page}");
        let case = case(&name, heads, page, &requests).layout(LAYOUTS[index % 4]);
        cases.push(if index % 2 == 0 { case } else { case.f16() });
    }
    cases.extend([
        case("equal requests without a suffix", (4, 2), 16, &group(9, 512, |_| 0)),
        case("equal requests that end in a page", (4, 2), 16, &group(9, 525, |_| 0)),
        case("a fork of one whose last page is not full", (4, 1), 16, &[(1, 330, 0), (1, 340, 330), (1, 341, 330)]),
        case("copies of part of a page", (4, 1), 64, &group(6, 459, |member| 3 + member)),
        case(
            "several tokens a request",
            (4, 2),
            16,
            &[(3, 400, 0), (1, 390, 384), (4, 391, 384), (2, 500, 384), (4, 388, 384)],
        ),
        case(
            "tokens that reach into the prefix",
            (4, 1),
            16,
            &[(1, 600, 0), (9, 600, 592), (9, 593, 590), (1, 600, 590)],
        ),
        case(
            "a chunk of a prompt among decodes",
            (4, 1),
            16,
            &[(1, 500, 0), (1, 490, 480), (70, 560, 480), (1, 481, 480), (1, 482, 480), (0, 700, 480), (1, 483, 480)],
        ),
        case(
            "a chunk that is the first of its group",
            (4, 1),
            16,
            &[(40, 520, 0), (1, 490, 480), (1, 500, 480), (1, 485, 480)],
        ),
        case(
            "requests without tokens or keys",
            (4, 2),
            16,
            &[
                (1, 0, 0),
                (0, 300, 0),
                (1, 310, 300),
                (1, 320, 300),
                (0, 0, 0),
                (1, 0, 0),
                (2, 1, 0),
                (1, 320, 0),
                (0, 400, 320),
                (1, 321, 320),
            ],
        ),
        case(
            "more tokens than keys in a group",
            (4, 1),
            16,
            &[(1, 300, 0), (1, 310, 290), (4, 2, 2), (1, 300, 0), (1, 310, 300), (1, 311, 300)],
        ),
        case("two levels", (4, 1), 16, &two_levels(256)),
        case("two levels, groups of 7", (7, 1), 8, &two_levels(200)),
        case("three levels", (4, 2), 16, &three_levels()),
        case(
            "several groups",
            (4, 1),
            16,
            &[group(4, 320, |m| 5 + m), group(7, 777, |_| 1), group(3, 130, |m| 60 * m), group(1, 90, |_| 0)].concat(),
        ),
        case("many short groups", (4, 1), 16, &(0..12).flat_map(|_| group(3, 330, |m| 2 * m)).collect::<Vec<_>>()),
        case("a long prefix of few requests", (2, 1), 16, &group(4, 2300, |member| 1 + 2 * member)),
        case("pages of 7", (4, 2), 7, &group(5, 700, |member| 1 + 3 * member)),
        case("pages of 3, groups of 71", (71, 1), 3, &group(3, 400, |member| 1 + 3 * member)),
        case("pages of 1000", (4, 2), 1000, &group(5, 1000, |m| 1 + 300 * m)),
        case("a prefix of few keys, one long suffix", (4, 1), 16, &group(6, 128, |m| if m == 3 { 2500 } else { 1 })),
    ]);
    for (head_dim, name) in [(128, "heads of 128"), (256, "heads of 256, sinks and a soft cap")] {
        let mut wide = case(name, (4, 1), 16, &group(8, 500, |member| 1 + 9 * member));
        (wide.config.head_dim, wide.config.value_head_dim) = (head_dim, head_dim);
        let changed = |config: AttentionConfig| match head_dim {
            256 => config.with_soft_cap(15.0).with_sinks(),
            _ => config,
        };
        let name = wide.name.clone();
        cases.push(wide.changed(name, changed));
    }
    let all = cases.len();
    for index in 0..all {
        let case = cases[index].clone();
        let unused = [Unused::NanKeys, Unused::NanValues, Unused::Large][index % 3];
        let name = format!("{}, non-causal", case.name);
        if index % 3 == 0 {
            cases.push(Case { name, ..case.non_causal().unused(unused) });
        } else if index % 3 == 1 {
            let capped = |config: AttentionConfig| config.with_soft_cap(15.0).with_sinks();
            cases.push(case.clone().changed(format!("{}, sinks and a soft cap", case.name), capped).unused(unused));
        } else {
            let sinks = |config: AttentionConfig| config.non_causal().with_sinks();
            cases.push(case.clone().changed(format!("{}, sinks, non-causal", case.name), sinks));
        }
    }
    assert!(cases.iter().all(|case| case.pages == Pages::Scattered));
    cases
}

/// A prompt for all, and a document for every four.
fn two_levels(prompt: u32) -> Vec<Request> {
    (0..12)
        .map(|member| {
            let document = 300 + member / 4 * 40;
            let shared = [prompt, prompt + document][usize::from(member % 4 > 0)];
            (1, prompt + document + 1 + member % 5 * 9, if member == 0 { 0 } else { shared })
        })
        .collect()
}

/// A prompt for all, an example for every eight, a document for every two.
fn three_levels() -> Vec<Request> {
    (0..16)
        .map(|member| {
            let shared = match member {
                0 => 0,
                _ if member % 8 == 0 => 320,
                _ if member % 2 == 0 => 640,
                _ => 1500,
            };
            (1 + member % 2, 1510 + member, shared)
        })
        .collect()
}
