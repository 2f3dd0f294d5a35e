"""`nightjar convert` as a user calls it."""

import json

import pytest
from typer.testing import CliRunner

from nightjar.pipeline.front.cli import app
from tests.megatron_models import VOCABULARY, gpt2, save_whole_tokenizer
from tests.megatron_writer import Layout, write_checkpoint

runner = CliRunner()


@pytest.fixture(name="checkpoint")
def two_ranks(tmp_path):
    return write_checkpoint(gpt2(), tmp_path / "checkpoint", Layout(tp=2))


@pytest.fixture(name="tokenizer")
def whole_tokenizer(tmp_path):
    (tmp_path / "tokenizer").mkdir()
    return save_whole_tokenizer(tmp_path / "tokenizer")


def nightjar(*arguments):
    return runner.invoke(app, ["convert", *map(str, arguments)])


def test_it_says_what_it_made(checkpoint, tokenizer, tmp_path):
    done = nightjar(checkpoint, "--tokenizer", tokenizer, "--out", tmp_path / "model")
    assert done.exit_code == 0, done.output
    assert "Megatron-LM, rows of version 3.0, 2 x 1 shards: gpt2" in done.output
    assert "11 rows that padded the vocabulary were left out" in done.output


def test_for_programs(checkpoint, tokenizer, tmp_path):
    out = tmp_path / "model"
    done = nightjar(checkpoint, "--tokenizer", tokenizer, "--out", out, "--json")
    found = json.loads(done.stdout)
    assert (found["family"], found["vocab_size"], found["files"]) == ("gpt2", VOCABULARY, 1)


@pytest.mark.parametrize(
    ("options", "code", "reason"),
    [
        (["--dtype", "int4"], 2, "--dtype int4: expected one of fp32, fp16, bf16"),
        (["--argument", "hidden_size"], 2, "write NAME=VALUE"),
        (["--eos", "<|nothing|>"], 1, "no token '<|nothing|>'"),
        (["--checkpoint-version", "7"], 1, "checkpoint_version 7.0 is unknown"),
    ],
)
def test_wrong_options(options, code, reason, checkpoint, tokenizer, tmp_path):
    done = nightjar(checkpoint, "--tokenizer", tokenizer, "--out", tmp_path / "model", *options)
    assert done.exit_code == code
    assert reason in done.output


def test_the_vocabulary_of_a_byte_level_bpe(checkpoint, tokenizer, tmp_path):
    model = json.loads((tokenizer / "tokenizer.json").read_text())["model"]
    folder = tmp_path / "vocabulary"
    folder.mkdir()
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = "\n".join(" ".join(pair) for pair in model["merges"])
    (folder / "merges.txt").write_text(f"#version: 0.2\n{merges}\n")
    done = nightjar(checkpoint, "--tokenizer", folder, "--out", tmp_path / "model")
    assert done.exit_code == 0, done.output
    config = json.loads((tmp_path / "model/config.json").read_text())
    assert config["eos_token_id"] == model["vocab"]["<|endoftext|>"]


@pytest.mark.slow
def test_the_model_is_served(checkpoint, tokenizer, tmp_path):
    nightjar(checkpoint, "--tokenizer", tokenizer, "--out", tmp_path / "model")
    lines = tmp_path / "in.jsonl"
    body = {"prompt": "사용자: ", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    lines.write_text(
        json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body})
    )
    out = tmp_path / "out.jsonl"
    run = ["run", lines, "--model", tmp_path / "model", "--out", out, "--dtype", "fp32"]
    done = runner.invoke(app, [str(word) for word in run])
    assert done.exit_code == 0, done.output
    answer = json.loads(out.read_text())["response"]["body"]
    assert answer["usage"]["completion_tokens"] == 4
