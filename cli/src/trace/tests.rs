//! The three formats, and what is refused.

use super::*;

fn request(arrival_ms: Option<u64>, prompt_tokens: u32, output_tokens: u32) -> Request {
    Request { arrival_ms, prompt_tokens, output_tokens, ..Request::default() }
}

fn with_blocks(request: Request, blocks: &[u64]) -> Request {
    Request { prompt_blocks: blocks.into(), ..request }
}

#[test]
fn the_first_line_decides_the_format() {
    let cases: [(&str, Vec<Request>); 8] = [
        (
            "arrival_ms,context_tokens,generated_tokens\n0,374,44\n4315,396,109\n",
            vec![request(Some(0), 374, 44), request(Some(4315), 396, 109)],
        ),
        // Columns by name: another order, one more column, spaces, Windows line ends, no newline at the end.
        (
            "user, generated_tokens ,context_tokens,arrival_ms\r\nx,2, 1,3\r\ny,5,4,6",
            vec![request(Some(3), 1, 2), request(Some(6), 4, 5)],
        ),
        ("\u{feff}arrival_ms,context_tokens,generated_tokens\n0,1,1\n", vec![request(Some(0), 1, 1)]),
        ("arrival_ms,context_tokens,generated_tokens\n\n0,1,1\n\n", vec![request(Some(0), 1, 1)]),
        ("arrival_ms,context_tokens,generated_tokens\n0,16777216,16777216\n", vec![request(Some(0), 1 << 24, 1 << 24)]),
        (
            "conversation,history_tokens,prompt_tokens,output_tokens\n0,0,74,918\n0,992,1000,5\n",
            vec![request(None, 74, 918), request(None, 1000, 5)],
        ),
        (
            "{\"timestamp\":0,\"input_length\":1025,\"output_length\":6,\"hash_ids\":[0,1,9]}\n{\"timestamp\":7,\"input_length\":1,\"output_length\":2,\"hash_ids\":[5]}\n",
            vec![with_blocks(request(Some(0), 1025, 6), &[0, 1, 9]), with_blocks(request(Some(7), 1, 2), &[5])],
        ),
        // Keys in any order, others read past, blank lines too.
        (
            "{\"output_length\": 6, \"model\": \"m\", \"input_length\": 9, \"timestamp\": 1}\n\n",
            vec![request(Some(1), 9, 6)],
        ),
    ];
    for (text, requests) in cases {
        assert_eq!(parse(text.as_bytes()).unwrap(), requests, "{text:?}");
    }
}

#[test]
fn refusals_name_the_line_the_column_and_the_reason() {
    let azure = |rows: &str| format!("arrival_ms,context_tokens,generated_tokens\n{rows}");
    let sharegpt = |rows: &str| format!("conversation,history_tokens,prompt_tokens,output_tokens\n{rows}");
    let cases: &[(String, &str)] = &[
        ("".into(), "there is no request: the file is empty"),
        (" \n\n".into(), "there is no request: the file is empty"),
        (azure(""), "there is no request: there is a header and no row"),
        (sharegpt("\n"), "there is no request: there is a header and no row"),
        ("0,374,44\n".into(), "line 1: `0,374,44` starts no known trace format"),
        ("[{\"timestamp\":0}]\n".into(), "line 1: `[{\"timestamp\":0}]` starts no known trace format"),
        ("prompt_tokens,output_tokens\n1,2\n".into(), "line 1: `prompt_tokens,output_tokens` starts no known"),
        ("arrival_ms,context_tokens\n0,1\n".into(), "line 1: column `generated_tokens` of the Azure format is missing"),
        ("context_tokens,generated_tokens\n1,2\n".into(), "line 1: column `arrival_ms` of the Azure format is missing"),
        (
            "conversation,prompt_tokens,output_tokens\n0,1,2\n".into(),
            "line 1: column `history_tokens` of the ShareGPT turns format is missing",
        ),
        (azure("0,1,1\n5,6\n"), "line 3: 2 fields where the header has 3"),
        (azure("0,1,1\n5,6,7,8\n"), "line 3: 4 fields where the header has 3"),
        (azure("0,1,1\n\n5,6"), "line 4: 2 fields where the header has 3"),
        (azure("0,1,1\n5,-6,7\n"), "line 3, column `context_tokens`: `-6` is negative"),
        (azure("-1,6,7\n"), "line 2, column `arrival_ms`: `-1` is negative"),
        (azure("0,6,1.5\n"), "line 2, column `generated_tokens`: `1.5` is not a whole number of at most 64 bits"),
        (azure("0,6,-1.5\n"), "line 2, column `generated_tokens`: `-1.5` is negative"),
        (azure("0,6,many\n"), "line 2, column `generated_tokens`: `many` is not a whole number"),
        (azure("0,,1\n"), "line 2, column `context_tokens`: `` is empty"),
        (azure("0,6,0\n"), "line 2, column `generated_tokens`: `0` is zero; a request has at least 1 token"),
        (azure("0,0,6\n"), "line 2, column `context_tokens`: `0` is zero; a request has at least 1 token"),
        (
            azure("0,16777217,1\n"),
            "line 2, column `context_tokens`: `16777217` is more than 16777216 tokens, the longest supported",
        ),
        (
            azure("0,1,99999999999999999999999\n"),
            "line 2, column `generated_tokens`: `99999999999999999999999` is not a whole number of at most 64 bits",
        ),
        (azure("0,1,\"2\n"), "line 2, column `generated_tokens`: `\"2` is not a whole number"),
        (azure("0,1,1\r\n\r\n5,6,x\r\n"), "line 4, column `generated_tokens`: `x` is not a whole number"),
        (azure("0,1,1\r\n5,6,7\r\n8,9\r\n"), "line 4: 2 fields where the header has 3"),
        (sharegpt("0,9,8,1\n"), "line 2, column `history_tokens`: `9` is more than the prompt_tokens of the row"),
        (sharegpt("x,0,8,1\n"), "line 2, column `conversation`: `x` is not a whole number"),
        (sharegpt("0,-4,8,1\n"), "line 2, column `history_tokens`: `-4` is negative"),
        (
            "{\"timestamp\":0,\"input_length\":5}\n".into(),
            "line 1: column `output_length` of the Mooncake format is missing",
        ),
        (
            "{\"timestamp\":0,\"input_length\":5,\"output_length\":1}\n{\"timestamp\":0,\"inp".into(),
            "line 2, character 19: EOF while parsing a string",
        ),
        (
            "{\"timestamp\":0,\"input_length\":5,\"output_length\":1}\n{\"timestamp\" 0}".into(),
            "line 2, character 14: expected `:`",
        ),
        (
            "{\"timestamp\":0,\"input_length\":5,\"output_length\":1} 7\n".into(),
            "line 1, character 52: trailing characters",
        ),
        (
            "{\"timestamp\":0,\"input_length\":-5,\"output_length\":1}\n".into(),
            "line 1, column `input_length`: `-5` is negative",
        ),
        (
            "{\"timestamp\":0,\"input_length\":\"5\",\"output_length\":1}\n".into(),
            "line 1, column `input_length`: `\"5\"` is not a whole number",
        ),
        (
            "{\"timestamp\":0,\"input_length\":5,\"output_length\":33554432}\n".into(),
            "line 1, column `output_length`: `33554432` is more than 16777216 tokens",
        ),
        (
            "{\"timestamp\":0,\"input_length\":null,\"output_length\":1}\n".into(),
            "line 1: column `input_length` of the Mooncake format is missing",
        ),
        (
            "{\"timestamp\":0,\"input_length\":513,\"output_length\":1,\"hash_ids\":[7]}\n".into(),
            "line 1, column `hash_ids`: `[7]` has 1 hashes; a prompt of 513 tokens has 2 blocks of 512",
        ),
        (
            "{\"timestamp\":0,\"input_length\":5,\"output_length\":1,\"hash_ids\":[]}\n".into(),
            "line 1, column `hash_ids`: `[]` has 0 hashes; a prompt of 5 tokens has 1 blocks of 512",
        ),
        (
            "{\"timestamp\":0,\"input_length\":5,\"output_length\":1,\"hash_ids\":[-1]}\n".into(),
            "line 1, column `hash_ids`: `[-1]` is not an array of whole numbers of at most 64 bits",
        ),
        ("{\"timestamp\":0}\n[1,2,3]\n".into(), "line 1: column `input_length` of the Mooncake format is missing"),
    ];
    for (text, message) in cases {
        let found = parse(text.as_bytes()).unwrap_err().to_string();
        assert!(found.starts_with(message), "{text:?}\nfound  {found}\nwanted {message}");
    }
}

#[test]
fn bytes_that_are_not_text_are_refused_with_their_line() {
    let error = parse(b"arrival_ms,context_tokens,generated_tokens\n0,1,1\n0,\xff,1\n").unwrap_err();
    assert!(matches!(error, TraceError::NotText { line: 3 }), "{error}");
}

#[test]
fn a_long_first_line_is_cut_in_the_message() {
    let error = parse("x".repeat(10_000).as_bytes()).unwrap_err();
    assert!(matches!(&error, TraceError::UnknownFormat { found } if found.len() == 80), "{error}");
}

#[test]
fn a_missing_file_is_refused() {
    let error = read(Path::new("no/such/trace.csv")).unwrap_err();
    assert!(error.to_string().starts_with("trace no/such/trace.csv: the file cannot be read: "), "{error}");
}

#[test]
fn the_sample_of_the_project_reads_whole() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../data/traces/azure_conversation_sample.csv");
    let requests = read(&path).unwrap();
    assert_eq!(requests.len(), 400);
    assert_eq!(requests[0], request(Some(0), 374, 44));
    assert_eq!(requests.iter().map(|request| request.prompt_tokens).max(), Some(4107));
}
