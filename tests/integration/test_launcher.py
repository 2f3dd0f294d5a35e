"""The launcher over a real compute process: answers, deaths, stalls, and what survives them."""

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from safetensors.numpy import save

from nightjar.checkpoints import ModelDirectory
from nightjar.checkpoints.adapters import read_adapter
from nightjar.compute_config import ComputeConfig
from nightjar.gpu_worker.compute import messages
from nightjar.gpu_worker.compute.fake_engine import FakeEngine
from nightjar.gpu_worker.engine import GenerateRequest, GenerateResult, SamplingParams
from nightjar.gpu_worker.worker.launcher import (
    RESTARTS,
    ComputeLostError,
    InFlight,
    Launcher,
    LauncherError,
)
from nightjar.gpu_worker.worker.resident_vectors import VectorsMissingError
from nightjar.jobs.vector_records import LORA, VectorFile
from nightjar.requests import RankRequest
from tests.adapters import gpt2_sizes, save_adapter
from tests.models import save_gpt2
from tests.processes import wait_until

PATIENCE_S = 60


@pytest.fixture(scope="module")
def launcher(tiny_model: Path) -> Iterator[Launcher]:
    """One for all: when a test ends its process, the next test meets the next process."""
    yield from running(tiny_model)


@pytest.fixture(scope="module")
def fake_launcher(tiny_model: Path) -> Iterator[Launcher]:
    """One whose processes load no model, and whose steps are long enough to be met in flight."""
    yield from running(tiny_model, engine="fake", fake_step_s=0.5)


@pytest.fixture
def new_launcher(tiny_model: Path) -> Iterator[Launcher]:
    """One whose process has computed nothing yet, and which may be spoiled."""
    yield from running(tiny_model)


def running(model: Path, **given: Any) -> Iterator[Launcher]:
    config = ComputeConfig(model, dtype="fp32", threads=1, stalled_after_s=2.0, **given)
    started = Launcher(config, on_failure=print)
    started.wait_ready()
    yield started
    started.close()


def generate(
    ticket: int, ids: list[int], max_tokens: int, vectors: str | None = None
) -> messages.Generate:
    sampling = SamplingParams(max_tokens, ignore_eos=True)
    return messages.Generate(GenerateRequest(ticket, ids, sampling, vectors))


def adapted(ticket: int, adapter: str | None) -> messages.Generate:
    sampling = SamplingParams(8, ignore_eos=True)
    return messages.Generate(GenerateRequest(ticket, [5, 6, 7], sampling, adapter=adapter))


def send(
    launcher: Launcher,
    makers: Sequence[Callable[[int], messages.Generate | messages.Rank]],
    keys: Collection[str] = (),
    vectors: Mapping[str, VectorFile] | None = None,
) -> InFlight:
    """Submit what the makers make of a ticket each."""
    return launcher.submit([make(launcher.next_ticket()) for make in makers], keys, vectors)


def ask(launcher: Launcher, *, count: int = 1, max_tokens: int = 4) -> InFlight:
    return send(
        launcher,
        [partial(generate, ids=[5 + n, 6, 7], max_tokens=max_tokens) for n in range(count)],
    )


def text(flight: InFlight) -> bytes:
    (answer,) = answers(flight)
    assert isinstance(answer, messages.Generated)
    return answer.outputs[0].text


def answers(flight: InFlight) -> list[messages.Answer]:
    """All of them, in order; raises what they were lost by."""
    assert flight.done.wait(PATIENCE_S)
    if flight.lost is not None:
        raise flight.lost
    return [flight.answers[ticket] for ticket in flight.tickets]


def test_the_fake_engine_is_what_was_asked_for(tiny_model: Path) -> None:
    engine = FakeEngine(ModelDirectory.open(tiny_model).tokenizer().token_bytes)
    engine.submit(GenerateRequest(1, [5, 6, 7], SamplingParams(30, ignore_eos=True)))
    (expected,) = engine.step()
    assert isinstance(expected, GenerateResult)
    config = ComputeConfig(tiny_model, engine="fake", fake_step_s=0.2)
    started = Launcher(config, on_failure=print)
    try:
        started.wait_ready()
        began = time.monotonic()
        assert text(ask(started, max_tokens=30)) == expected.text
        assert time.monotonic() - began >= 0.2
    finally:
        started.close()


def test_answers_come_in_the_order_of_the_requests(launcher: Launcher) -> None:
    flight = send(
        launcher,
        [
            partial(generate, ids=[5, 6], max_tokens=3),
            lambda ticket: messages.Rank(RankRequest(ticket, [5, 6], [[7], [8, 9]])),
            partial(generate, ids=[], max_tokens=3),
        ],
    )
    generated, ranked, failed = answers(flight)
    assert isinstance(generated, messages.Generated)
    assert generated.outputs[0].completion_tokens == 3
    assert isinstance(ranked, messages.Ranked)
    assert ranked.token_counts == [1, 2]
    assert isinstance(failed, messages.Failed)


def test_sampling_crosses_the_pipe(launcher: Launcher, tiny_model: Path) -> None:
    """Bad words as texts on the way there, tokens as bytes on the way back."""

    def answer(*bad_words: str, **fields: Any) -> messages.Output:
        sampling = SamplingParams(max_tokens=9, ignore_eos=True, logprobs=2, **fields)

        def message(ticket: int) -> messages.Generate:
            return messages.Generate(GenerateRequest(ticket, [5, 6, 7], sampling), list(bad_words))

        flight = send(launcher, [message])
        (generated,) = answers(flight)
        assert isinstance(generated, messages.Generated)
        (output,) = generated.outputs
        assert output.reports is not None
        assert b"".join(report.token for report in output.reports) == output.text
        assert all(report.top[0][1] >= report.logprob for report in output.reports)
        return output

    (x,) = ModelDirectory.open(tiny_model).tokenizer().encode("x")
    assert answer(logit_bias={x: 100.0}).text == b"x" * 9
    banned = answer("x", logit_bias={x: 100.0})
    assert b"x" not in [report.token for report in banned.reports or ()]
    drawn = [answer(temperature=1.5, min_p=0.01, seed=seed).text for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_a_death_fails_what_is_in_flight_and_nothing_later(fake_launcher: Launcher) -> None:
    launcher = fake_launcher
    before = text(ask(launcher))
    flight = ask(launcher, count=200, max_tokens=100)
    pid = launcher.pid
    os.kill(pid, signal.SIGKILL)
    assert flight.done.wait(PATIENCE_S)
    assert type(flight.lost) is ComputeLostError
    assert len(flight.answers) < 200
    wait_until("the next process", lambda: launcher.pid != pid)
    assert text(ask(launcher)) == before


def test_seconds_add_up_over_processes(new_launcher: Launcher) -> None:
    """The first process works long and the second shortly, so that its own seconds are fewer."""
    launcher = new_launcher
    loaded = launcher.totals.seconds
    assert loaded.engine_s == 0
    assert loaded.load_s > 0
    assert ask(launcher, count=64, max_tokens=100).done.wait(PATIENCE_S)
    wait_until("the steps to be told", lambda: launcher.totals.seconds.engine_s > 0)
    first = launcher.totals.seconds
    assert first.load_s == loaded.load_s
    pid = launcher.pid
    os.kill(pid, signal.SIGKILL)
    wait_until("the next process", lambda: launcher.pid != pid)
    assert launcher.totals.seconds.engine_s == first.engine_s
    text(ask(launcher, max_tokens=1))
    wait_until("more steps to be told", lambda: launcher.totals.seconds.engine_s != first.engine_s)
    assert launcher.totals.seconds.engine_s > first.engine_s
    assert launcher.totals.seconds.load_s > first.load_s


def test_a_stalled_process_is_replaced(fake_launcher: Launcher) -> None:
    launcher = fake_launcher
    text(ask(launcher))
    os.kill(launcher.pid, signal.SIGSTOP)
    flight = ask(launcher)
    with pytest.raises(ComputeLostError):
        text(flight)
    assert text(ask(launcher))


def test_a_model_that_loaded_once_is_tried_as_often_as_a_new_one(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The processes after the first end while they load; what is counted starts at none again."""
    starts, program = tmp_path / "starts", tmp_path / "python"
    program.write_text(f"#!/bin/sh\necho start >> '{starts}'\nexit 9\n")
    program.chmod(0o755)
    failures: list[str] = []
    launcher = Launcher(ComputeConfig(tiny_model, engine="fake"), on_failure=failures.append)
    try:
        launcher.wait_ready()
        monkeypatch.setattr(sys, "executable", str(program))
        os.kill(launcher.pid, signal.SIGKILL)
        wait_until("the failure", lambda: failures)
        with pytest.raises(LauncherError, match="ended with status 9 while it loaded the model, 3"):
            launcher.wait_ready()
    finally:
        launcher.close()
    assert len(failures) == 1
    assert len(starts.read_text().split()) == RESTARTS.most_failures == 3


def test_a_process_is_told_the_prompt_vectors_that_it_lacks(launcher: Launcher) -> None:
    asked = partial(generate, ids=[512, 513, 9], max_tokens=5, vectors="v@1")
    data = {"v@1": VectorFile(save({"v": np.ones((2, 32), np.float32)}))}
    assert launcher.missing_vectors(["v@1"]) == ["v@1"]
    before = text(send(launcher, [asked], ["v@1"], data))
    assert launcher.missing_vectors(["v@1"]) == []
    assert text(send(launcher, [asked], ["v@1"])) == before
    pid = launcher.pid
    os.kill(pid, signal.SIGKILL)
    wait_until("the next process", lambda: launcher.pid != pid)
    assert launcher.missing_vectors(["v@1"]) == ["v@1"]
    with pytest.raises(VectorsMissingError):
        send(launcher, [asked], ["v@1"])
    assert text(send(launcher, [asked], ["v@1"], data)) == before
    (unknown,) = answers(
        send(launcher, [partial(asked, vectors="w@1")], ["w@1"], {"w@1": VectorFile(b"")})
    )
    assert isinstance(unknown, messages.Failed)
    assert unknown.code == "unknown_prompt_vectors"


def test_a_process_is_told_the_adapters_that_it_lacks(
    launcher: Launcher, tiny_model: Path, tmp_path: Path
) -> None:
    """They travel as prompt vectors do; two of them and none answer one prompt differently."""
    config, sizes = ModelDirectory.open(tiny_model).config, gpt2_sizes(2, 32, 128)
    data = {
        f"a@{seed}": VectorFile(
            save(read_adapter(save_adapter(tmp_path / str(seed), sizes, seed=seed), config)), LORA
        )
        for seed in (1, 2)
    }
    asked = [partial(adapted, adapter=key) for key in (None, "a@1", "a@2", "a@1", "b@1")]
    keys = [*data, "b@1"]
    assert launcher.missing_vectors(keys) == keys
    found = answers(send(launcher, asked, keys, data | {"b@1": VectorFile(b"")}))
    *texts, unknown = found
    assert isinstance(unknown, messages.Failed)
    assert (unknown.code, "not registered" in unknown.message) == ("unknown_adapter", True)
    plain, first, second, again = (
        one.outputs[0].text for one in texts if isinstance(one, messages.Generated)
    )
    assert len({plain, first, second}) == 3
    assert first == again
    assert launcher.missing_vectors(data) == []


@pytest.mark.slow
def test_ten_thousand_versions_leave_memory_flat(tiny_model: Path) -> None:
    """Each version comes once, within a bound of a hundred of them."""
    vectors = np.zeros((64, 32), np.float32)
    config = ComputeConfig(tiny_model, dtype="fp32", threads=1, prompt_vector_bytes=850_000)
    started = Launcher(config, on_failure=print)
    sizes: list[int] = []
    try:
        started.wait_ready()
        for first in range(0, 10_000, 50):
            keys = [f"v@{first + n}" for n in range(50)]
            data = {}
            for number, key in enumerate(keys):
                vectors[0, 0] = first + number
                data[key] = VectorFile(save({"v": vectors}))
            ask_all = [partial(generate, ids=[512, 7], max_tokens=1, vectors=key) for key in keys]
            found = answers(send(started, ask_all, keys, data))
            assert all(isinstance(one, messages.Generated) for one in found)
            held = first + 50 - len(started.missing_vectors(f"v@{n}" for n in range(first + 50)))
            assert held == min(first + 50, 102)  # of 8,280 bytes each
            sizes.append(psutil.Process(started.pid).memory_info().rss)
    finally:
        started.close()
    # All of them take 80 MB; the first thousand fill the caches.
    assert sizes[-1] - sizes[19] < 16 << 20


def test_cancelled_requests_end_and_the_rest_goes_on(launcher: Launcher) -> None:
    flight = ask(launcher, count=64, max_tokens=120)
    launcher.cancel(flight)
    assert flight.done.is_set()
    assert len(flight.answers) < 64
    assert flight.lost is None
    assert text(ask(launcher))


def test_a_flight_of_no_requests_is_over_at_once(launcher: Launcher) -> None:
    assert launcher.submit([]).done.is_set()


def test_a_flight_is_over_with_its_last_answer() -> None:
    flight = InFlight([1, 2, 3])
    flight.end(3, messages.Failed(3, "code", "message"))
    flight.end(1, None)
    assert not flight.done.is_set()
    flight.end(2, messages.Failed(2, "code", "message"))
    assert flight.done.is_set()
    assert flight.answers.keys() == {2, 3}


def test_a_model_that_cannot_be_loaded_is_told(tiny_model: Path, tmp_path: Path) -> None:
    broken = Path(shutil.copytree(tiny_model, tmp_path / "broken"))
    config = (broken / "config.json").read_text().replace('"n_embd": 32', '"n_embd": 64')
    (broken / "config.json").write_text(config)
    failures: list[str] = []
    launcher = Launcher(ComputeConfig(broken), on_failure=failures.append)
    with pytest.raises(LauncherError, match="shape"):
        launcher.wait_ready()
    with pytest.raises(LauncherError):
        ask(launcher)
    launcher.close()
    assert len(failures) == 1


def test_a_cache_that_cannot_fit_into_memory_is_refused_with_the_numbers(tiny_model: Path) -> None:
    launcher = Launcher(ComputeConfig(tiny_model, kv_cache_bytes=1 << 50), on_failure=print)
    with pytest.raises(LauncherError, match=r"1125899906842624 bytes, .*lower NIGHTJAR_KV_CACHE_B"):
        launcher.wait_ready()
    launcher.close()


def test_a_request_that_can_never_fit_names_the_setting(tiny_model: Path) -> None:
    launcher = Launcher(
        ComputeConfig(tiny_model, dtype="fp32", threads=1, kv_cache_bytes=16384), on_failure=print
    )
    launcher.wait_ready()
    flight = ask(launcher, count=1, max_tokens=120)
    assert flight.done.wait(PATIENCE_S)
    (answer,) = flight.answers.values()
    launcher.close()
    assert isinstance(answer, messages.Failed)
    assert (answer.code, "NIGHTJAR_KV_CACHE_BYTES" in answer.message) == ("cache_exceeded", True)


def test_a_reader_that_fails_is_told_to_everybody(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ComputeConfig(tiny_model, engine="fake", fake_step_s=5.0)
    with closing(Launcher(config, on_failure=print)) as launcher:
        launcher.wait_ready()
        flight = ask(launcher, count=64, max_tokens=120)

        def no_memory(*_: object) -> None:
            raise MemoryError

        monkeypatch.setattr(launcher, "_spawn", no_memory)
        os.kill(launcher.pid, signal.SIGKILL)
        assert flight.done.wait(PATIENCE_S)
        assert flight.lost is not None
        wait_until("the failure to be told", lambda: launcher_fails(launcher))


def launcher_fails(launcher: Launcher) -> bool:
    try:
        ask(launcher)
    except LauncherError:
        return True
    return False


def test_a_process_that_finds_other_files_does_not_compute(tmp_path: Path) -> None:
    """The worker's queues and claims name the model that it began with."""
    model = save_gpt2(tmp_path / "model")
    config = ComputeConfig(model, engine="fake", stamp=ModelDirectory.open(model).stamp)
    said: list[str] = []
    started = Launcher(config, on_failure=said.append)
    try:
        started.wait_ready()
        save_gpt2(model, seed=1)
        os.kill(started.pid, signal.SIGKILL)
        wait_until("the refusal", lambda: said)
        assert "the files have changed" in said[0]
    finally:
        started.close()
