"""What a user sees for a broken data file: every message in full."""

import gzip
import os
import subprocess
import sys

import pytest

from tunekit.data.formats.row_formats import learner_of
from tunekit.data.sources.load import load_data
from tunekit.errors import DataError
from tunekit.recipe.sections.data import DataSection, DataSource

TURN = '{"role":"user","content":"hi"}'
GOOD = '{"messages":[{"role":"user","content":"hi"},{"role":"assistant","content":"ho"}]}'
KNOWN = "supported: .jsonl, .json, .csv, .tsv, .parquet, .arrow, .feather, .txt; text formats also as .gz or .zst"
SFT = "but method sft trains on conversations, prompts with completions, texts or token ids"
DEEP = '{"text":' + "[" * 100_000


def messages(*entries: str) -> str:
    return '{"messages":[' + ",".join(entries) + "]}"


CASES = {
    # Syntax
    "broken_json": (
        "chats.jsonl",
        f'{GOOD}\n{{"messages": [}}\n',
        "chats.jsonl:2:15: invalid JSON: expecting value",
    ),
    "unfinished_json_line": (
        "chats.jsonl",
        f"{GOOD}\n{GOOD[:-2]}\n{GOOD}\n",
        "chats.jsonl:2:80: invalid JSON: expecting ',' delimiter",
    ),
    "json_nested_too_deeply": ("deep.jsonl", DEEP, "deep.jsonl:1: JSON is nested too deeply"),
    "number_too_long": (
        "long.jsonl",
        '{"text":' + "9" * 5000 + "}",
        "long.jsonl:1: invalid JSON: exceeds the limit (4300 digits) for integer string conversion: value has 5000 "
        "digits; use sys.set_int_max_str_digits() to increase the limit",
    ),
    "list_in_a_jsonl_file": (
        "chats.jsonl",
        f"[\n{GOOD}\n]\n",
        "chats.jsonl:1: a JSON value spans several lines; .jsonl needs one object per line; put each "
        "object on one line, or save a JSON list as a .json file",
    ),
    "json_line_cut_short": (
        "chats.jsonl",
        f"{GOOD}\n{GOOD[:30]}",
        "chats.jsonl:2:29: invalid JSON: unterminated string starting at",
    ),
    "json_line_with_a_trailing_comma": (
        "notes.jsonl",
        '{"text":"a"},\n{"text":"b",}\n{"text":["a",]}',
        "notes.jsonl:1:13: invalid JSON: extra data\n"
        "notes.jsonl:2:12: invalid JSON: trailing comma before }\n"
        "notes.jsonl:3:13: invalid JSON: trailing comma before ]",
    ),
    "two_objects_on_a_line": (
        "notes.jsonl",
        '{"text":"a"}{"text":"b"}',
        "notes.jsonl:1:13: invalid JSON: extra data",
    ),
    "byte_order_mark_inside": (
        "notes.jsonl",
        '\ufeff{"text":"a"}\n\ufeff{"text":"b"}\n',
        "notes.jsonl:2:1: byte-order mark (U+FEFF) not at the start of the file",
    ),
    "json_list_with_a_trailing_comma": (
        "notes.json",
        '[{"text":"a"},\n{"text":"b"},\n]',
        "notes.json:2:13: invalid JSON: trailing comma before ]",
    ),
    "json_list_of_lists": (
        "chats.json",
        f"[[{TURN}],\n[{TURN}]]",
        "chats.json:1: a row must be an object, got a list\nchats.json:2: a row must be an object, got a list",
    ),
    "rows_of_several_kinds": (
        "notes.jsonl",
        '{"text":"a"}\n{"text":["a"]}\n{"text":{"a":1}}\n{"text":null}\n{"text":true}\n{"text":1.5}',
        "notes.jsonl:2: text must be a string, got a list\n"
        "notes.jsonl:3: text must be a string, got an object\n"
        "notes.jsonl:4: text must be a string, got null\n"
        "notes.jsonl:5: text must be a string, got the boolean true\n"
        "notes.jsonl:6: text must be a string, got the number 1.5",
    ),
    "json_list_with_a_missing_comma": (
        "chats.json",
        f"[\n {GOOD}\n {GOOD}\n]",
        "chats.json:3:2: invalid JSON: expecting ',' or ']'",
    ),
    "json_list_not_closed": ("chats.json", f"[{GOOD}\n", "chats.json:2:1: invalid JSON: the list is not closed"),
    "json_list_with_text_behind_it": (
        "chats.json",
        f"[{GOOD}]\nend",
        "chats.json:2: invalid JSON: text after the end of the list",
    ),
    "json_with_one_object": (
        "chats.json",
        f'{{\n"version": 2,\n"data": [{GOOD}]}}',
        "chats.json:1: the file holds one object, not a list of objects; save the list under key 'data' as a "
        "separate file",
    ),
    "json_with_a_string": (
        "chats.json",
        '"hello"',
        "chats.json:1: a .json file must hold a list of objects: [{...}, {...}]",
    ),
    "row_is_no_object": (
        "chats.jsonl",
        f'3\n{GOOD}\n["a"]\nnull\n"x"\n',
        "chats.jsonl:1: a row must be an object, got the number 3\n"
        "chats.jsonl:3: a row must be an object, got a list\n"
        "chats.jsonl:4: a row must be an object, got null\n"
        "chats.jsonl:5: a row must be an object, got a string",
    ),
    "many_bad_rows": (
        "notes.jsonl",
        '{"text":"a"}\n' + '{"text":1}\n' * 1207,
        "\n".join(f"notes.jsonl:{line}: text must be a string, got the number 1" for line in range(2, 7))
        + "\nnotes.jsonl: and 1,202 more invalid rows",
    ),
    # Columns
    "missing_column": (
        "chats.jsonl",
        f'{GOOD}\n{{"id":7}}\n',
        "chats.jsonl:2: no column messages; columns: id",
    ),
    "misspelt_column": (
        "chats.jsonl",
        GOOD.replace("messages", "mesages"),
        "chats.jsonl:1: no format matches the columns mesages; rename mesages to messages",
    ),
    "unknown_columns": (
        "chats.jsonl",
        '{"a":1,"b":2}',
        "chats.jsonl:1: no format matches the columns a, b; map them to the columns of a format with data.columns "
        "(messages: messages; sharegpt: conversations; alpaca: instruction, output; prompt_completion: prompt, "
        "completion; captions: image, caption; text: text; tokens: input_ids; preference: chosen, rejected; "
        "ranking: prompt, completions, "
        "scores; unpaired_preference: prompt, completion, label; stepwise_supervision: prompt, completions, labels; "
        "classification: prompt, label; prompts: prompt), or convert the rows by a function "
        "(data.format=module:function)",
    ),
    "ambiguous_columns": (
        "chats.jsonl",
        GOOD[:-1] + ',"text":"hi ho"}',
        "chats.jsonl:1: the columns match messages (messages) or text (text); set data.format=messages or "
        "data.format=text",
    ),
    "sharegpt_without_an_answer": (
        "chats.jsonl",
        '{"conversations":[{"from":"human","value":"hi"}]}',
        "chats.jsonl:1: conversations has no assistant message",
    ),
    "sharegpt_turns": (
        "chats.jsonl",
        "\n".join(
            f'{{"conversations":[{turn}]}}'
            for turn in (
                '"hi"',
                '{"from":"human"}',
                '{"from":7,"value":"hi"}',
                '{"from":"function_cal","value":"hi"}',
                '{"from":"gpt","value":null}',
            )
        ),
        "chats.jsonl:1: conversations[0] must be an object {from, value}, got a string\n"
        "chats.jsonl:2: conversations[0] has no value\n"
        "chats.jsonl:3: conversations[0].from must be a string, got the number 7\n"
        "chats.jsonl:4: conversations[0].from: unknown speaker 'function_cal'; known: system, user, assistant, "
        "tool, human, gpt, chatgpt, bot, chatbot, model, function_call, observation\n"
        "chats.jsonl:5: conversations[0].value must be a string, got null",
    ),
    "sharegpt_turn_said_twice": (
        "chats.jsonl",
        '{"conversations":[{"from":"human","value":"hi","role":"user"}]}',
        "chats.jsonl:1: conversations[0] has both from and role, or both value and content; keep one of each",
    ),
    "sharegpt_with_two_system_turns": (
        "chats.jsonl",
        '{"system":"a","conversations":[{"from":"system","value":"b"},{"from":"gpt","value":"c"}]}',
        "chats.jsonl:1: column system and a first message with role system; keep one of them",
    ),
    "sharegpt_entries": (
        "chats.jsonl",
        '{"messages":[{"from":"human","value":"hi"}]}',
        "chats.jsonl:1: messages[0] has from and value (ShareGPT); set data.columns={conversations: messages}",
    ),
    "alpaca_rows": (
        "alpaca.jsonl",
        '{"instruction":"add","output":""}\n{"instruction":" ","output":"3"}\n'
        '{"instruction":"add","input":7,"output":"3"}\n{"instruction":"add","system":["a"],"output":"3"}',
        "alpaca.jsonl:1: output is empty\n"
        "alpaca.jsonl:2: instruction is empty\n"
        "alpaca.jsonl:3: input must be a string, got the number 7\n"
        "alpaca.jsonl:4: system must be a string, got a list",
    ),
    "alpaca_history": (
        "alpaca.jsonl",
        "\n".join(
            f'{{"instruction":"add","output":"3","history":{history}}}'
            for history in ('"hi"', '["hi"]', '[["hi"]]', '[["hi",""]]')
        ),
        "alpaca.jsonl:1: history must be a list of [question, answer], got a string\n"
        "alpaca.jsonl:2: history[0] must be a list [question, answer], got a string\n"
        "alpaca.jsonl:3: history[0] must be a list [question, answer], got a list of 1\n"
        "alpaca.jsonl:4: history[0][1] is empty",
    ),
    "alpaca_or_text": (
        "alpaca.json",
        '[{"instruction":"add","output":"3","text":"add: 3"}]',
        "alpaca.json:1: the columns match alpaca (instruction, output) or text (text); set data.format=alpaca or "
        "data.format=text",
    ),
    "columns_of_dolly": (
        "dolly.jsonl",
        '{"instruction":"add","response":"3"}',
        "dolly.jsonl:1: no format matches the columns instruction, response; set data.columns={output: response}",
    ),
    "question_and_answer": (
        "qa.jsonl",
        '{"question":"a","answer":"b"}',
        "qa.jsonl:1: no format matches the columns question, answer; set data.columns={prompt: question, "
        "completion: answer}",
    ),
    # Tools
    "tools": (
        "chats.jsonl",
        "\n".join(f'{GOOD[:-1]},"tools":{tools}}}' for tools in ('"[{"', "7", '["add"]', '[{"type":"function"}]')),
        "chats.jsonl:1: tools is a string, but not JSON\n"
        "chats.jsonl:2: tools must be a list of functions, got the number 7\n"
        "chats.jsonl:3: tools[0] must be an object, got a string\n"
        "chats.jsonl:4: tools[0] has no function name; expected {type: function, function: {name, ...}}",
    ),
    "tools_beside_plain_text": (
        "qa.jsonl",
        '{"prompt":"a","completion":"b","tools":[{"name":"add"}]}',
        "qa.jsonl:1: tools are unsupported with a plain-text prompt; make the prompt a list of messages",
    ),
    "tool_calls": (
        "chats.jsonl",
        "\n".join(
            messages(f'{{"role":"assistant","content":null,"tool_calls":{calls}}}')
            for calls in (
                '"add"',
                "[3]",
                '[{"function":"add"}]',
                '[{"function":{"arguments":"{}"}}]',
                '[{"function":{"name":"add","arguments":"{1"}}]',
            )
        ),
        "chats.jsonl:1: messages[0].tool_calls must be a list of calls, got a string\n"
        "chats.jsonl:2: messages[0].tool_calls[0] must be an object {function}, got the number 3\n"
        "chats.jsonl:3: messages[0].tool_calls[0].function must be an object {name, arguments}, got a string\n"
        "chats.jsonl:4: messages[0].tool_calls[0].function.name must be a string, got null\n"
        "chats.jsonl:5: messages[0].tool_calls[0].function.arguments is a string, but not JSON",
    ),
    "tool_call_with_a_list": (
        "chats.jsonl",
        messages('{"role":"assistant","content":"","tool_calls":[{"name":"add","arguments":"[1]"}]}'),
        "chats.jsonl:1: messages[0].tool_calls[0].arguments must hold an object, got a list",
    ),
    "rankings": (
        "ranks.jsonl",
        '{"prompt":"a","completions":["b","c"],"scores":[1,2]}',
        f"data.train: 'ranks.jsonl' holds rankings (prompt, completions, scores), {SFT}; to train on the best "
        "completions, select them by a function (data.format=module:function)",
    ),
    "ratings": (
        "rated.jsonl",
        '{"prompt":"a","completion":"b","label":true}',
        f"data.train: 'rated.jsonl' holds rated completions (prompt, completion, label), {SFT}; to train on all "
        "completions, good and bad, set data.format=prompt_completion",
    ),
    "preferences": (
        "pairs.jsonl",
        '{"prompt":"a","chosen":"b","rejected":"c"}',
        f"data.train: 'pairs.jsonl' holds preference pairs (chosen, rejected), {SFT}; to train on the chosen "
        "answers, set data.columns={completion: chosen}, or {messages: chosen} if it holds complete conversations",
    ),
    "prompt_alone": (
        "qa.jsonl",
        '{"prompt":"a"}',
        f"data.train: 'qa.jsonl' holds prompts without completions (prompt), {SFT}; column prompt requires a "
        "column completion",
    ),
    # Messages
    "messages_not_a_list": (
        "chats.jsonl",
        '{"messages":{"role":"user"}}',
        "chats.jsonl:1: messages must be a list of {role, content}, got an object",
    ),
    "messages_as_a_string": (
        "chats.jsonl",
        '{"messages":"[]"}',
        "chats.jsonl:1: messages must be a list of {role, content}, got a string; use .jsonl or .parquet, where a "
        "column can hold lists",
    ),
    "messages_in_a_list_too_many": (
        "chats.jsonl",
        messages(f"[{TURN}]"),
        "chats.jsonl:1: messages[0] must be an object {role, content}, got a list",
    ),
    "no_messages": ("chats.jsonl", messages(), "chats.jsonl:1: messages is empty"),
    "message_no_object": (
        "chats.jsonl",
        messages(TURN, '"ho"'),
        "chats.jsonl:1: messages[1] must be an object {role, content}, got a string",
    ),
    "message_without_role": ("chats.jsonl", messages('{"content":"hi"}'), "chats.jsonl:1: messages[0] has no role"),
    "message_without_content": (
        "chats.jsonl",
        messages('{"role":"user","contents":"hi"}'),
        "chats.jsonl:1: messages[0] has no content; did you mean 'contents'?",
    ),
    "misspelt_role": (
        "chats.jsonl",
        messages(TURN, '{"role":"asistant","content":"ho"}'),
        "chats.jsonl:1: messages[1].role: unknown role 'asistant'; did you mean 'assistant'?",
    ),
    "foreign_role": (
        "chats.jsonl",
        messages('{"role":"human","content":"hi"}'),
        "chats.jsonl:1: messages[0].role: unknown role 'human'; did you mean 'user'?",
    ),
    "unknown_role": (
        "chats.jsonl",
        messages('{"role":"x","content":"hi"}'),
        "chats.jsonl:1: messages[0].role: unknown role 'x'; roles: system, user, assistant, tool",
    ),
    "role_no_string": (
        "chats.jsonl",
        messages('{"role":true,"content":"hi"}'),
        "chats.jsonl:1: messages[0].role must be a string, got the boolean true",
    ),
    "content_no_string": (
        "chats.jsonl",
        messages(TURN, '{"role":"assistant","content":null}'),
        "chats.jsonl:1: messages[1].content must be a string, got null",
    ),
    "content_in_parts_of_no_text": (
        "chats.jsonl",
        messages('{"role":"user","content":[{"type":"text","text":"hi"},{"type":"refusal","refusal":"no"}]}'),
        "chats.jsonl:1: messages[0].content[1] is of type refusal, but only text, images, audio clips and "
        "videos are supported",
    ),
    "part_without_a_text": (
        "chats.jsonl",
        messages('{"role":"user","content":[{"type":"text"}]}'),
        "chats.jsonl:1: messages[0].content[0].text must be a string, got null",
    ),
    "system_and_developer": (
        "chats.jsonl",
        messages('{"role":"system","content":"be"}', '{"role":"developer","content":"be"}', TURN),
        "chats.jsonl:1: messages has a system and a developer message; merge them into one",
    ),
    "no_assistant_turn": ("chats.jsonl", messages(TURN), "chats.jsonl:1: messages has no assistant message"),
    "empty_assistant_turn": (
        "chats.jsonl",
        messages(TURN, '{"role":"assistant","content":" "}'),
        "chats.jsonl:1: messages: every assistant message is empty",
    ),
    "half_a_surrogate_pair": (
        "chats.jsonl",
        messages('{"role":"user","content":"a\\ud83d"}'),
        "chats.jsonl:1: messages[0].content holds \\ud83d, an unpaired surrogate",
    ),
    # Prompt and completion
    "empty_completion": ("qa.jsonl", '{"prompt":"a","completion":" "}', "qa.jsonl:1: completion is empty"),
    "empty_prompt": ("qa.jsonl", '{"prompt":"","completion":"b"}', "qa.jsonl:1: prompt is empty"),
    "prompt_and_completion_of_two_kinds": (
        "qa.jsonl",
        f'{{"prompt":[{TURN}],"completion":"b"}}',
        "qa.jsonl:1: prompt and completion must both be strings or both be lists of messages, got a list and a string",
    ),
    "prompt_that_ends_with_the_answer": (
        "qa.jsonl",
        '{"prompt":[{"role":"assistant","content":"a"}],"completion":[{"role":"assistant","content":"a"}]}',
        "qa.jsonl:1: prompt ends with an assistant message; move that message to completion",
    ),
    "prompts_of_two_kinds": (
        "qa.jsonl",
        f'{{"prompt":"a","completion":"b"}}\n{{"prompt":[{TURN}],"completion":[{{"role":"assistant","content":"b"}}]}}',
        "qa.jsonl:2: prompt is a list of messages, but a string in the first row",
    ),
    # Hostile
    "names_and_numbers_of_any_length": (
        "wild.jsonl",
        '{"text":' + "1" * 1000 + '}\n{"' + "n" * 1000 + '":1,"\\u001b[31m":2,"\\ud83d":3}',
        "wild.jsonl:1: text must be a string, got the number " + "1" * 37 + "...\n"
        "wild.jsonl:2: no column text; columns: " + "n" * 37 + "..., '\\x1b[31m', '\\ud83d'",
    ),
    "many_columns": (
        "wide.csv",
        ",".join(f"c{i}" for i in range(500)) + "\n",
        "wide.csv:1: no format matches the columns c0, c1, c2, c3, c4, c5, c6, c7, c8, c9, c10, c11, and 488 more; "
        "map them to the columns of a format with data.columns (messages: messages; sharegpt: conversations; "
        "alpaca: instruction, output; prompt_completion: prompt, completion; captions: image, caption; "
        "text: text; tokens: input_ids; "
        "preference: chosen, rejected; ranking: prompt, completions, scores; unpaired_preference: prompt, "
        "completion, label; stepwise_supervision: prompt, completions, labels; classification: prompt, label; "
        "prompts: prompt), or convert the rows by a function (data.format=module:function)",
    ),
    "half_a_surrogate_pair_beside_the_content": (
        "chats.jsonl",
        messages(TURN, '{"role":"assistant","content":"ho","name":"\\ud83d"}'),
        "chats.jsonl:1: messages[1].name holds a value that JSON cannot represent",
    ),
    # CSV
    "csv_empty_and_missing_cells": (
        "qa.csv",
        'prompt,completion\n"a\nb",c\nx,\nnan,y\n',
        "qa.csv:4: completion is empty\nqa.csv:5: prompt is 'nan', a missing value as written by pandas",
    ),
    "csv_number_of_cells": (
        "qa.csv",
        "prompt,completion\r\na,b,c\r\n\r\nd\r\n",
        "qa.csv:2: 3 cells, but the header has 2; quote cells that contain a comma\n"
        "qa.csv:4: 1 cell, but the header has 2",
    ),
    "csv_quote_not_closed": (
        "qa.csv",
        'prompt,completion\na,b\nc,"d\ne,f\n',
        "qa.csv:3: unclosed quote",
    ),
    "csv_text_behind_a_quote": (
        "qa.csv",
        'prompt,completion\n"a"b,c\n',
        "qa.csv:2: invalid CSV: ',' expected after '\"'",
    ),
    "csv_in_single_quotes": (
        "qa.csv",
        "prompt,completion\n'a, b',c\n",
        "qa.csv:2: 3 cells, but the header has 2; quote cells that contain a comma",
    ),
    "csv_quotes_escaped_by_backslashes": (
        "qa.csv",
        'prompt,completion\n"say \\"a\\"",b\n',
        "qa.csv:2: invalid CSV: ',' expected after '\"'",
    ),
    "csv_header_with_a_trailing_comma": (
        "qa.csv",
        "prompt,completion,\na,b\n",
        "qa.csv:2: 2 cells, but the header has 3",
    ),
    "csv_row_with_a_trailing_comma": (
        "qa.csv",
        "prompt,completion\na,b,\n",
        "qa.csv:2: 3 cells, but the header has 2; quote cells that contain a comma",
    ),
    "csv_header_twice": (
        "qa.csv",
        "prompt,completion,prompt\na,b,c\n",
        "qa.csv:1: duplicate columns prompt in the header; rename one of them",
    ),
    "csv_with_semicolons": (
        "qa.csv",
        "prompt;completion\na;b\n",
        "qa.csv:1: columns separated by semicolons; save the file with commas",
    ),
    "csv_space_in_the_header": (
        "qa.csv",
        "prompt, completion\na,b\n",
        f"data.train: 'qa.csv' holds prompts without completions (prompt), {SFT}; rename ' completion' to completion",
    ),
    "csv_without_rows": ("qa.csv", "prompt,completion\n", "qa.csv: no rows"),
    # Files
    "blank_file": ("chats.jsonl", "\n \n", "chats.jsonl: no rows"),
    "blank_csv": ("qa.csv", "\n\n", "qa.csv: no rows"),
    "blank_text": ("tale.txt", "\n\n\n", "tale.txt: no rows"),
    "empty_file": ("chats.jsonl", "", "data.train.path: 'chats.jsonl' is empty"),
    "empty_json_list": ("chats.json", "[]", "chats.json: no rows"),
    "not_utf8": (
        "tale.txt",
        b"one\ntwo caf\xe9s\n",
        "tale.txt:2: not UTF-8 (byte 0xe9 at position 8); save the file as UTF-8",
    ),
    "utf8_cut_in_a_character": (
        "tale.txt",
        "one\ntwo café".encode()[:-1],
        "tale.txt:2: not UTF-8 (byte 0xc3 at position 8); save the file as UTF-8",
    ),
    "utf16": (
        "chats.jsonl",
        GOOD.encode("utf-16"),
        "chats.jsonl: the file is encoded as UTF-16, not UTF-8 text; save it as UTF-8",
    ),
    "nul_byte": (
        "tale.txt",
        b"one\ntw\0o\n",
        "tale.txt:2:3: NUL byte in a text file; check whether it is a binary file, or save it as UTF-8",
    ),
    "gzip": (
        "chats.jsonl",
        b"\x1f\x8b\x08\x00rest",
        "chats.jsonl: the file is compressed with gzip, not UTF-8 text; rename it to end in .gz",
    ),
    "parquet_named_csv": (
        "qa.csv",
        b"PAR1rest",
        "qa.csv: the file is a Parquet file, not UTF-8 text; rename it to .parquet",
    ),
    "text_named_parquet": (
        "qa.parquet",
        b"hello, this is no Parquet file",
        "qa.parquet: not a Parquet file (Parquet magic bytes not found in footer. Either the file is corrupted or "
        "this is not a parquet file)",
    ),
    "unknown_suffix": (
        "chats.xlsx",
        "a",
        "data.train.path: 'chats.xlsx': unsupported suffix '.xlsx'; " + KNOWN,
    ),
    "no_suffix": ("chats", GOOD, "data.train.path: 'chats': the file has no suffix; " + KNOWN),
    "compressed_table": (
        "chats.parquet.gz",
        "a",
        "data.train.path: 'chats.parquet.gz': only text formats may be compressed, with a name ending in .jsonl.gz "
        "or similar; " + KNOWN,
    ),
    "gzip_cut_short": (
        "notes.jsonl.gz",
        gzip.compress(b'{"text":"a"}\n' * 1000)[:30],
        "notes.jsonl.gz: cannot read the whole file (Truncated compressed stream)",
    ),
    "text_named_zstd": (
        "notes.txt.zst",
        b"hello",
        "notes.txt.zst: cannot read the whole file (ZSTD decompress failed: Unknown frame descriptor)",
    ),
    "tsv_with_semicolons": (
        "qa.tsv",
        "prompt;completion\na;b\n",
        "qa.tsv:1: columns separated by semicolons; save the file with tabs",
    ),
    "tsv_number_of_cells": (
        "qa.tsv",
        "prompt\tcompletion\na\tb\tc\n",
        "qa.tsv:2: 3 cells, but the header has 2; quote cells that contain a tab",
    ),
    "csv_with_tabs": (
        "qa.csv",
        "prompt\tcompletion\na\tb\n",
        "qa.csv:1: columns separated by tabs; rename the file to .tsv",
    ),
}


def test_ninety_kinds_of_broken_files_have_a_message_of_their_own():
    assert len({message for _, _, message in CASES.values()}) >= 90


@pytest.mark.parametrize("name", CASES)
def test_a_broken_file_is_told_in_full(name, tmp_path, monkeypatch):
    file, content, message = CASES[name]
    monkeypatch.chdir(tmp_path)
    (tmp_path / file).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError) as caught:
        load_data(DataSection(train=DataSource(path=file)), learner_of("sft"))
    assert str(caught.value) == message


def refusal(**section) -> str:
    with pytest.raises(DataError) as caught:
        load_data(DataSection(**section), learner_of("sft"))
    return str(caught.value)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working directory with one good file."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chats.jsonl").write_text(GOOD)
    return tmp_path


def test_a_misspelt_file_name_is_recognised(here):
    assert refusal(train="chats.jsnl") == (
        "data.train.path: no file 'chats.jsnl' in the working directory or the recipe's folder; "
        "did you mean 'chats.jsonl'?"
    )
    assert refusal(train="./chat.jsonl") == (
        "data.train.path: no file './chat.jsonl' in the working directory or the recipe's folder; "
        "did you mean 'chats.jsonl'?"
    )
    assert refusal(train="org/chats.jsonl") == (
        "data.train.path: no file 'org/chats.jsonl'; folder 'org' does not exist in the working "
        "directory or the recipe's folder"
    )


def test_a_folder_of_several_kinds_is_refused(here):
    (here / "more.csv").write_text("text\na\n")
    several = "files of several formats: chats.jsonl, more.csv; select one format with a pattern: '*.jsonl'"
    assert refusal(train=".") == f"data.train.path: folder '.' has {several}"
    assert refusal(train="*") == f"data.train.path: '*' matches {several}"


def test_a_folder_or_pattern_without_files_is_refused(here):
    (here / "empty").mkdir()
    assert refusal(train="empty") == ("data.train.path: no supported files in folder 'empty'; " + KNOWN)
    assert refusal(train="empty/*.jsonl") == "data.train.path: no file matches 'empty/*.jsonl'"


def test_what_only_a_hub_dataset_has_is_refused_for_a_folder(here):
    assert refusal(train=DataSource(path=".", name="en")) == (
        "data.train.name: only for Hub datasets, but '.' is read from files; remove it"
    )


def test_every_file_of_a_folder_is_checked_and_named(here):
    (here / "more.jsonl").write_text(f'{GOOD}\n{{"text":"a"}}')
    assert refusal(train=".") == (
        "./more.jsonl:2: no column messages; the columns match text (text), not messages (messages)"
    )
    (here / "more.jsonl").write_text("")
    assert refusal(train="*.jsonl") == "data.train.path: 'more.jsonl' is empty"


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"promt": "q"}, "data.columns.promt: no format has a column 'promt'; did you mean 'prompt'?"),
        (
            {"x": "y"},
            "data.columns.x: no format has a column 'x'; columns: messages, conversations, instruction, output, "
            "prompt, completion, image, caption, text, input_ids, chosen, rejected, completions, scores, label, "
            "labels, tools, system, input, history, attention_mask, completion_mask, assistant_masks, images, audios",
        ),
        ({"q": "prompt"}, "data.columns.q: no format has a column 'q'; tunekit's name comes first: {prompt: q}"),
        (
            {"prompt": "q", "completion": "q"},
            "data.columns: prompt, completion all map to column 'q'",
        ),
        (
            {"prompt": "quest", "completion": "answer"},
            "qa.jsonl:1: no column quest (data.columns.prompt); did you mean question?",
        ),
        (
            {"prompt": "question", "completion": "x"},
            "qa.jsonl:1: no column x (data.columns.completion); columns: question, answer",
        ),
        ({"text": "question", "tools": "x"}, "data.columns: 'qa.jsonl' has no row with a column x"),
        (
            {"prompt": "question", "completion": "answer"},
            "qa.jsonl:2: no column answer (data.columns.completion)",
        ),
    ],
)
def test_a_column_that_is_not_there_is_refused(columns, message, here):
    (here / "qa.jsonl").write_text('{"question":"a","answer":"b"}\n{"question":"a"}\n')
    assert refusal(train="qa.jsonl", columns=columns) == message


def test_more_bad_rows_than_allowed_are_told_with_the_cap(here):
    (here / "notes.jsonl").write_text('{"text":"a"}\n' + '{"text":""}\n' * 7)
    lines = [f"notes.jsonl:{line}: text is empty" for line in range(2, 7)]
    assert refusal(train="notes.jsonl", max_bad_rows=6).splitlines() == [
        *lines,
        "notes.jsonl: and 2 more invalid rows",
        "notes.jsonl: 7 invalid rows, more than data.max_bad_rows=6",
    ]
    (here / "notes.jsonl").write_text('{"text":""}\n')
    assert refusal(train="notes.jsonl", max_bad_rows=6) == (
        "notes.jsonl:1: text is empty\nnotes.jsonl: no valid rows left"
    )


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("notes.json", '[{"text":"a"}, {"text"]', "notes.json:1:23: invalid JSON: expecting ':' delimiter"),
        ("notes.csv", 'text\na\n"b\nc\n', "notes.csv:3: unclosed quote"),
    ],
)
def test_a_fault_that_hides_the_rows_behind_it_is_never_left_out(file, content, message, here):
    (here / file).write_text(content)
    assert refusal(train=file, max_bad_rows=9) == (
        f"{message}\n{file}: rows after such an error cannot be read; data.max_bad_rows does not apply"
    )


def test_a_share_that_holds_out_nothing_is_refused(here):
    assert refusal(train="chats.jsonl", eval_size=0.001) == (
        "data.eval_size=0.001: no row of the 1 row of 'chats.jsonl' would be held out for evaluation; set another "
        "share, or set data.eval"
    )


def test_a_file_that_is_no_arrow_file_is_refused(here):
    (here / "notes.arrow").write_bytes(b"ARROW1 and nothing more")
    assert refusal(train="notes.arrow").startswith("notes.arrow: not an Arrow file (")


def test_the_eval_source_is_named_by_its_own_key(here):
    assert refusal(train="chats.jsonl", eval="other.csv") == (
        "data.eval.path: no file 'other.csv' in the working directory or the recipe's folder"
    )


def test_a_forced_format_names_the_missing_column(here):
    assert refusal(train="chats.jsonl", format="text") == (
        "chats.jsonl:1: no column text; the columns match messages (messages), not text (text)"
    )
    (here / "qa.csv").write_text("id,prompt\n1,a\n")
    assert refusal(train="qa.csv", format="prompt_completion") == (
        "qa.csv:1: no column completion; the columns match prompts (prompt), not prompt_completion (prompt, completion)"
    )


def test_what_only_a_hub_dataset_has_is_refused_for_a_file(here):
    assert refusal(train=DataSource(path="chats.jsonl", split="train")) == (
        "data.train.split: only for Hub datasets, but 'chats.jsonl' is a file; remove it"
    )


def test_an_unreadable_file_is_a_data_error(here):
    (here / "chats.jsonl").chmod(0)
    if os.access(here / "chats.jsonl", os.R_OK):
        pytest.skip("this user may read every file")
    assert refusal(train="chats.jsonl") == "data.train.path: cannot read 'chats.jsonl': Permission denied"


def test_parquet_rows_are_named_by_their_number(here):
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"prompt": ["a", None], "completion": ["b", "c"]}), here / "qa.parquet")
    assert refusal(train="qa.parquet") == "qa.parquet row 2: prompt must be a string, got null"
    pq.write_table(pa.table({"prompt": ["a"], "answer": ["b"]}), here / "qa.parquet")
    assert refusal(train="qa.parquet") == (
        f"data.train: 'qa.parquet' holds prompts without completions (prompt), {SFT}; to train on column answer, "
        "set data.columns={completion: answer}"
    )


UNREACHABLE = "http://127.0.0.1:9"  # the discard port: nothing listens there
ASK_THE_HUB = """
import sys
attempts = []
sys.addaudithook(lambda event, args: attempts.append(args[1]) if event == "socket.connect" else None)
from tunekit.data.sources.load import load_data
from tunekit.errors import DataError
from tunekit.recipe.sections.data import DataSection, DataSource
try:
    load_data(DataSection(train=DataSource(path="no-such-owner/chats")))
except DataError as error:
    print(error)
print(len(attempts))
"""


@pytest.mark.slow
@pytest.mark.parametrize("offline", [False, True])
def test_without_a_network_a_hub_name_gets_one_clear_line_at_once(offline, tmp_path):
    environment = {**os.environ, "HF_ENDPOINT": UNREACHABLE, "HF_HOME": str(tmp_path)}
    environment["HF_HUB_OFFLINE"] = "1" if offline else "0"
    done = subprocess.run(
        [sys.executable, "-c", ASK_THE_HUB], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    *told, num_attempts = done.stdout.splitlines(keepends=True)
    if offline:
        assert "".join(told) == (
            "data.train: cannot load the Hub dataset 'no-such-owner/chats': Couldn't reach 'no-such-owner/chats' "
            "on the Hub (OfflineModeIsEnabled)\n"
        )
    else:
        assert "".join(told) == (
            "data.train.path: no file 'no-such-owner/chats', and the Hub is unreachable at http://127.0.0.1:9; "
            "check the name and the network; to use a cached copy, set HF_HUB_OFFLINE=1\n"
        )
    # At once: `datasets` alone would try again and again, for half a minute.
    assert int(num_attempts) <= (0 if offline else 2)
