"""The GPU benchmark on the CPU: its sums by hand, its runner with processes that fail, hang and
die, its pages; and single figures at tiny size."""

import json
import logging
import time
from inspect import signature
from types import SimpleNamespace

import pytest
import torch
import transformers

from benchmarks.answers import answers
from benchmarks.gpu import __main__ as command
from benchmarks.gpu import engine_figures, kernel_figures, mixed_steps, peer_figures
from benchmarks.gpu.engine_figures import WARM, kv_cache, later_turn_crowd, timed_step
from benchmarks.gpu.kernel_figures import backend, machine_speed
from benchmarks.gpu.lab import Lab, MeasuringError, Timing, generate, random_decoder
from benchmarks.gpu.launches import Launches, launch_overhead
from benchmarks.gpu.mixed_steps import MixedSteps
from benchmarks.gpu.runner import Worker, measured, run
from benchmarks.gpu.scale import SCALES
from benchmarks.gpu.targets import FIGURES, TARGETS, Figure
from nightjar.gpu_worker.engine.load_costs import LoadCosts
from nightjar.gpu_worker.engine.windows import DecodeWindows
from nightjar.gpu_worker.models import Decoder
from nightjar.kernels import cuda
from nightjar.requests import GenerateRequest, SamplingParams
from tests import measuring
from tests.cuda_host import require_tools
from tests.kernels_cuda import devices

FULL, TINY = SCALES["full"], SCALES["tiny"]

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def lab():
    return Lab("cpu", TINY)


def test_the_floor_of_a_step_by_hand():
    """1.3B GPT in FP16 on 4.3 TB/s: 0.63, 0.80, 2.11 and 6.60 ms at context 512."""
    floors = [FULL.floor_bytes(batch, 2) / 4.3e12 * 1e3 for batch in FULL.batches]
    assert [round(floor, 2) for floor in floors] == [0.63, 0.8, 2.11, 6.6]
    assert FULL.kv_bytes(1024, 2) == pytest.approx(201e6, rel=0.01)


def test_operations_of_a_small_model_by_hand():
    """One layer of width 128: 12 * 128^2 weights, 9 of them behind the attention."""
    weights, after, head = 12 * 128**2, 9 * 128**2, 128 * 256
    wanted = 2 * 5 * (weights - after) + 2 * (after + head) + 4 * 128 * (1 + 2 + 3 + 4 + 5)
    assert TINY.prefill_operations([5]) == wanted


def test_every_target_is_of_a_figure():
    assert {target.figure for target in TARGETS} == FIGURES.keys()
    assert len({target.point for target in TARGETS}) == len(TARGETS)


def test_pinned_memory_may_be_as_slow_to_find_as_the_documents_say():
    """Up to 4 s a GiB; 8 prompts lie in the host's memory."""
    pinned = FULL.kv_bytes(8 * (FULL.cached_tokens + FULL.turn_tokens), 2)
    assert 4 * pinned / 2**30 + 20 < FIGURES["kv_cache"].budget_s


def test_figures_go_on_after_one_fails_hangs_or_dies():
    worker, written = Worker("cpu", "tiny", measuring.prepare, measuring.measure), []
    names = [
        ("first", 20),
        ("fails", 20),
        ("second", 20),
        ("hangs", 0.5),
        ("dies", 20),
        ("last", 20),
    ]
    results = run(worker, names, 600, lambda _, r: written.append(list(r)))
    assert worker.machine["name"] == "cpu tiny"
    status = {name: one["status"] for name, one in results.items()}
    assert status == {
        "first": "measured",
        "fails": "failed",
        "second": "measured",
        "hangs": "failed",
        "dies": "failed",
        "last": "measured",
    }
    assert "not finished after 0" in results["hangs"]["reason"]
    assert "terminated abruptly" in results["dies"]["reason"]
    processes = [results[name]["process"] for name in ("first", "fails", "second", "last")]
    assert processes[0] == processes[1]
    assert len(set(processes)) == 3
    assert written[-1] == [name for name, _ in names]
    assert len(written) == len(names)


def test_a_trial_never_lands_in_the_results(capsys):
    for given in (["--device", "cpu"], ["--scale", "tiny"], ["--only", "speed"]):
        with pytest.raises(SystemExit):
            command.arguments(given)
    said = capsys.readouterr().err
    assert said.count("a trial is not written to the results") == 2
    assert "speed: not among machine" in said
    assert command.arguments([]).out == command.RESULTS


def test_nothing_is_written_where_there_is_no_gpu(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command.main(["--out", str(tmp_path / "results")]) == 2
    assert "torch sees no CUDA device" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def result():
    timing = Timing((0.1, 0.12, 0.11)).figures()
    figures = {
        "prefill": {"status": "measured", "points": {"prefill_tflop_s": 512.0}, "details": timing},
        "ranking": {"status": "failed", "reason": "OutOfMemoryError: 9 GiB"},
        "step_growth": {"status": "measured", "points": {"step_1_to_8": 1.4}, "details": {}},
    }
    machine = {"name": "made up", "versions": {"torch": "2", "cupy-cuda13x": None}}
    about = {"date": "2026-11-21", "command": "c", "commit": "abc", "took_s": 100.0}
    return about | {"trial": False, "machine": machine, "figures": figures}


def test_the_page_has_figures_and_failures(result):
    page = command.page(result)
    asked = "| prefill, 8k tokens in flight | 400 TFLOP/s | 550 TFLOP/s |"
    for line in (
        f"{asked} 512 TFLOP/s | least | 18.2% |",
        "| ranking, against no sharing | 6x | 9x | failed |  |  |",
        "| step of 8 over step of 1 | <= 1.35x | <= 1.26x | 1.4x | below |  |",
        "OutOfMemoryError: 9 GiB",
        "made up,  torch 2.",
    ):
        assert line in page.splitlines()
    assert command.TRIAL not in page
    trial = command.page(result | {"trial": True})
    assert command.TRIAL in trial
    assert "| 512 TFLOP/s |  | 18.2% |" in trial


def test_the_random_model_answers(lab):
    """In the engine, with as many tokens as were asked for, the same at every call."""
    model = random_decoder(TINY.config(), torch.float32, "cpu")
    again = random_decoder(TINY.config(), torch.float32, "cpu")
    assert torch.equal(model.weights.tokens, again.weights.tokens)
    engine = lab.engine(torch.float32, 2, 12)
    generate(engine, lab.prompts([4, 8]), 4)
    with pytest.raises(RuntimeError, match="a request failed"):
        generate(engine, [[TINY.vocab_size + 5]], 4)


def test_steps_that_noise_hides_are_no_figure(lab, monkeypatch):
    monkeypatch.setattr(Lab, "wall_s", lambda self, run: 1.0)
    with pytest.raises(MeasuringError, match="lost in noise"):
        timed_step(lab.engine(torch.float32, 1, 96), lab, lab.prompts([8]))


class Mark:
    """An event on a device whose clock stands at `now`, in milliseconds."""

    now = 0.0

    def record(self):
        self.at = Mark.now

    def elapsed_time(self, end):
        return end.at - self.at


def test_spans_of_windows_are_the_devices_and_the_hosts_seconds_its_own(monkeypatch):
    """Two launches of 3 ms on the device, 1 ms apart: the wait between them is in no span."""
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: Mark())

    def launch(steps):
        assert steps == 8
        Mark.now += 3.0
        time.sleep(0.01)

    assert list(signature(DecodeWindows.launch).parameters) == ["self", "window"]
    engine = SimpleNamespace(windows=SimpleNamespace(launch=launch), _executor=None)
    found = Launches(engine, "cuda")
    for _ in range(2):
        engine.windows.launch(8)
        Mark.now += 1.0
    host, span = found.take()
    assert span == pytest.approx(0.006)
    assert host >= 0.02
    with pytest.raises(MeasuringError, match="no window of steps was launched"):
        found.take()
    with pytest.raises(MeasuringError, match="single steps"):
        Launches(SimpleNamespace(windows=None), "cuda")


@pytest.mark.slow
def test_an_engines_own_windows_are_watched(lab, monkeypatch):
    """On the CUDA host an engine has windows: one of the 3 steps after a prompt's."""
    require_tools()
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: Mark())
    with backend(lab):
        engine = lab.engine(lab.half, 1, 12)
        found = Launches(engine, "cuda")
        generate(engine, lab.prompts([4]), 4)
    host, span = found.take()
    assert host > 0
    assert span == 0.0


def test_launch_overhead_is_what_lies_between_spans(lab, monkeypatch, result):
    """Steps of 2 ms by the wall, 1.9 ms of them in spans."""
    taken = iter([one for _ in range(TINY.rounds) for one in ((0.020, 0.040), (0.004, 0.0096))])
    walls = iter([0.042, 0.010] * TINY.rounds)
    monkeypatch.setattr(Launches, "take", lambda self: next(taken))
    monkeypatch.setattr(Lab, "wall_s", lambda self, run: next(walls))
    assert (TINY.long - TINY.short) == 16
    found = launch_overhead(lab)
    assert found["points"]["launch_overhead"] == pytest.approx(0.05)
    assert found["details"]["host"]["median_s"] == 0.001
    assert "launches a step in 1000 us, the device takes 1900 us" in found["details"]["warning"]
    page = command.page(result | {"figures": {"launch_overhead": {"status": "measured"} | found}})
    assert "launch_overhead: the host launches a step in 1000 us" in page


def stands_for(ms):
    """What takes so long on a clock that the host and the device share."""

    def run(*_):
        Mark.now += ms

    return run


def test_the_hosts_share_of_steps_with_prompts_and_running_sequences(monkeypatch):
    """4 ms of a forward pass, 1 ms of choosing tokens, and 3 ms until the next launch."""
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: Mark())
    monkeypatch.setattr(time, "perf_counter", lambda: Mark.now / 1e3)
    steps = SimpleNamespace(forward=stands_for(4))
    windows = SimpleNamespace(launch=stands_for(1), steps=steps)
    executor = SimpleNamespace(run=lambda _: (steps.forward(None), stands_for(1)()))
    watched = MixedSteps(SimpleNamespace(executor=executor, windows=windows), "cuda")
    mixed = SimpleNamespace(prompts=[1], decodes=[1])
    for plan in (mixed, SimpleNamespace(prompts=[1], decodes=[]), mixed, mixed):
        executor.run(plan)
        stands_for(3)()
    windows.launch(None)
    assert watched.take() == tuple(map(pytest.approx, (0.024, 0.012, 0.012)))
    executor.run(mixed)  # nothing is launched behind it
    with pytest.raises(MeasuringError, match="0 steps had prompts and running sequences"):
        watched.take()
    with pytest.raises(MeasuringError, match="one by one"):
        MixedSteps(SimpleNamespace(executor=executor, windows=None), "cuda")


@pytest.mark.slow
def test_an_engines_own_mixed_steps_are_watched(lab, monkeypatch):
    require_tools()
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: Mark())
    with backend(lab):
        engine = lab.engine(lab.half, 2, 16)
        watched = MixedSteps(engine, "cuda")
        requests = [
            GenerateRequest(i, prompt, SamplingParams(2 + i % 2, ignore_eos=True))
            for i, prompt in enumerate(lab.prompts([4] * 8))
        ]
        answers(engine, requests)
    took, _, host = watched.take()
    assert took > host > 0


def test_a_host_that_launches_slowly_is_named(lab, monkeypatch, result):
    """Else the device's waits within a forward pass would pass for its work."""
    monkeypatch.setattr(MixedSteps, "take", lambda self: (0.010, 0.008, 0.005))
    monkeypatch.setattr(mixed_steps, "answers", lambda *_: None)
    found = mixed_steps.mixed_steps(lab)
    assert found["points"]["mixed_host_share"] == pytest.approx(0.2)
    page = command.page(result | {"figures": {"mixed_steps": {"status": "measured"} | found}})
    assert "mixed_steps: the host takes more than half of a forward pass's time" in page
    monkeypatch.setattr(MixedSteps, "take", lambda self: (0.010, 0.008, 0.003))
    assert "warning" not in mixed_steps.mixed_steps(lab)["details"]


@pytest.mark.slow
def test_a_hit_and_a_miss_are_timed_with_and_without_the_hosts_memory(lab, monkeypatch):
    """What is timed is what the figure says: the known beginning has left the cache, and is found
    in the host's memory in one of the engines."""
    monkeypatch.setattr(LoadCosts, "loading_pays", lambda *_: True)
    fresh, wall_s = [], Lab.wall_s

    def watched(self, run, whole):
        assert not whole
        rows = []
        with monkeypatch.context() as patch:
            patch.setattr(Decoder, "forward", counting(Decoder.forward, rows))
            seconds = wall_s(self, run, whole=whole)
        fresh.append(sum(rows))
        return seconds

    monkeypatch.setattr(Lab, "wall_s", watched)
    found = kv_cache(lab)
    assert set(found["points"]) == {"kv_hit", "kv_miss"}
    rounds, turn, cached = WARM + TINY.rounds, TINY.turn_tokens, TINY.cached_tokens
    # Each round: hit and miss with the host's memory, then without.
    assert fresh == [turn, *[cached + turn] * 3] * rounds
    details = found["details"]
    assert details["computing_a_token_s"] > 0
    assert details["loading_a_byte_s"] > 0


def test_an_answer_is_timed_without_what_the_device_does_behind_it(lab, monkeypatch):
    order = []

    def sync(self):
        order.append("sync")
        time.sleep(0.05)

    monkeypatch.setattr(Lab, "sync", sync)
    assert lab.wall_s(lambda: order.append("run"), whole=False) < 0.04
    assert order == ["sync", "run", "sync"]


def test_prompts_of_later_turns_fit_one_step_and_their_memory_the_host():
    """The prompt beside a sample, and pinned memory below 16 GB."""
    length = FULL.cached_tokens + FULL.turn_tokens
    assert length <= 8192
    assert FULL.kv_bytes((2 * later_turn_crowd(Lab("cpu", FULL)) + 4) * length, 2) < 16e9


def counting(forward, rows):
    def counted(self, batch, cache):
        rows.append(int((batch.write_blocks >= 0).sum()))  # other rows fill the shape up
        return forward(self, batch, cache)

    return counted


def test_what_the_engine_complains_of_stands_beside_its_figure(lab, monkeypatch, result):
    """It goes on without graphs where they fail: a figure of that is not what it says."""

    def slower(lab):
        logging.getLogger("nightjar.gpu_worker.engine.loop").warning("going on %s", "slowly")
        return {"points": {}}

    def silent(lab):
        return {"points": {}}

    monkeypatch.setitem(FIGURES, "prefill", Figure(1, slower))
    found = measured(lab, "prefill")
    assert found["said"] == ["going on slowly"]
    monkeypatch.setitem(FIGURES, "prefill", Figure(1, silent))
    assert "said" not in measured(lab, "prefill")
    page = command.page(result | {"figures": {"prefill": found}})
    assert "prefill, the engine: going on slowly" in page


@pytest.mark.slow
@pytest.mark.parametrize(("cache", "group"), [("", 1), ("", 4), ("", 8), ("fp8_", 1), ("fp8_", 4)])
def test_decode_attention_computes_what_is_timed(lab, monkeypatch, cache, group):
    """The figure's call, run on the CUDA host: right shapes, and no length 0."""
    require_tools()
    seen = []
    compute = cuda.decode_attention.decode_attention

    def watched(q, keys, values, tables, lengths, scale, scales):
        seen.append((q.shape[:2], int(lengths[0]), keys.shape[1]))
        out = compute(q, keys, values, tables, lengths, scale, scales=scales)
        assert out.isfinite().all()
        return out

    monkeypatch.setattr(cuda.decode_attention, "decode_attention", watched)
    with backend(lab):
        found = FIGURES[f"decode_attention_{cache}{group}"].measure(lab)
    heads = TINY.heads
    assert set(seen) == {((b, group * heads), context, heads) for b, context in TINY.attention}
    assert found["points"] == {
        f"attention_share_{cache}{group}": min(one["share"] for one in found["details"].values())
    }


@pytest.mark.slow
@pytest.mark.parametrize("fp8", [False, True])
def test_products_compute_what_is_timed(lab, monkeypatch, fp8):
    """Few rows by the kernel, with all weights; many rows in FP8."""
    require_tools()
    seen = []
    run = devices.run_on_host

    def watched(kernel, grid, block, args, shared_bytes):
        seen.append(kernel.entry)
        run(kernel, grid, block, args, shared_bytes)

    monkeypatch.setattr(devices, "run_on_host", watched)
    names = [f"product_share_{'fp8_' if fp8 else ''}{rows}" for rows in (1, 8)]
    found = FIGURES["products_fp8" if fp8 else "products"].measure(lab)
    assert list(found["points"]) == names
    assert set(seen) == {"linear"}
    weight = TINY.hidden * TINY.hidden * 4
    assert found["details"][names[0]]["bytes"] == weight * (1 if fp8 else 2)
    if fp8:
        seen.clear()
        assert FIGURES["many_rows_fp8"].measure(lab)["points"]["product_fp8_tflop_s"] > 0
        assert set(seen) == {"round_rows"}


@pytest.mark.slow
def test_a_capture_that_failed_fails_the_figure(lab, monkeypatch):
    """The engine goes on with single steps, which are no figure."""

    def broken(step):
        raise RuntimeError("operation failed during capture")

    def stepped(lab):
        with backend(lab):
            engine = lab.engine(torch.float16, 1, 8)
            engine.windows.steps.record = broken
            generate(engine, lab.prompts([4]), 4)
        return {"points": {"prefill_tflop_s": 1.0}}

    require_tools()
    monkeypatch.setitem(FIGURES, "prefill", Figure(1, stepped))
    found = measured(lab, "prefill")
    assert found["status"] == "failed"
    assert "gave its windows up" in found["reason"]
    assert "failed during capture" in found["said"][0]


def test_baselines_move_random_bytes(lab, monkeypatch):
    """Zeros would flatter them, and the shares that are taken of them."""
    filled = []
    monkeypatch.setattr(Lab, "device_s", lambda self, run: filled.append(run) or Timing((1.0,)))
    made = kernel_figures.random_bytes(lab)
    assert made.numel() == TINY.copy_bytes
    assert len(made.unique()) > 200
    monkeypatch.setattr(kernel_figures, "random_bytes", lambda _: filled.append("random") or made)
    kernel_figures.copy(lab)
    kernel_figures.reads(lab)
    assert filled.count("random") == 2


@pytest.mark.slow
def test_no_text_of_transformers_ends_early_and_none_pays_for_that(lab, monkeypatch):
    """Scores that are all equal choose token 0, which ends texts by the model's own settings."""
    make = peer_figures.random_gpt2

    def all_equal(lab):
        model = make(lab)
        with torch.no_grad():
            for weight in model.parameters():
                weight.zero_()
        return model

    def refused(*_):
        raise AssertionError("scores were processed")

    monkeypatch.setattr(peer_figures, "random_gpt2", all_equal)
    monkeypatch.setattr(transformers.MinNewTokensLengthLogitsProcessor, "__call__", refused)
    found = peer_figures.over_static_cache(lab)
    assert found["points"]["over_static_cache"] > 0
    assert found["details"]["settings"]["attention"] == "sdpa"


@pytest.mark.slow
@pytest.mark.parametrize("graphs", [None, True])
def test_continuous_batching_is_timed_as_it_was_asked_for(lab, monkeypatch, result, graphs):
    """On a CPU transformers records no graph, whatever it is told."""
    asked, make = [], transformers.ContinuousBatchingConfig

    def watched(**given):
        asked.append(given)
        return make(**given)

    monkeypatch.setattr(transformers, "ContinuousBatchingConfig", watched)
    monkeypatch.setattr(peer_figures, "_timed", lambda lab, run: Timing((2.0,)))
    found = peer_figures.over_continuous_batching(lab, graphs=graphs)
    point = "over_batching_with_graphs" if graphs else "over_continuous_batching"
    ours = found["details"]["nightjar"]["median_s"]
    assert found["points"] == {point: pytest.approx(2 / ours, rel=1e-3)}
    assert asked == [{"use_cuda_graph": graphs}]
    name = "transformers_graphs" if graphs else "transformers_continuous"
    page = command.page(result | {"figures": {name: {"status": "measured"} | found}})
    assert f"{name}: without flash-attn" in page


@pytest.mark.parametrize(
    ("reads", "speed"),
    [({"a": 1.0}, 2 * TINY.copy_bytes), ({"a": 0.25, "b": 0.5}, 4 * TINY.copy_bytes)],
    ids=["copying", "reading"],
)
def test_floors_are_taken_at_the_faster_of_copying_and_reading(lab, monkeypatch, reads, speed):
    """A copy takes 1 s and moves its bytes twice."""
    monkeypatch.setattr(engine_figures, "step_s", lambda *_: Timing((0.5,)))
    lab.kept("copy", lambda: Timing((1.0,)))
    lab.kept("reads", lambda: {name: Timing((seconds,)) for name, seconds in reads.items()})
    floor = TINY.floor_bytes(1, 2)
    found = engine_figures.decode_share(1)(lab)
    assert found["points"]["decode_share_1"] == pytest.approx(floor / speed / 0.5)
    assert found["details"]["read_b_s"] == TINY.copy_bytes / reads["a"]


def test_every_way_of_reading_is_timed(lab):
    found = machine_speed(lab)
    ways = [name for name in found["details"] if name.startswith("read: ")]
    assert len(ways) == 3
    fastest = min(found["details"][name]["median_s"] for name in ways)
    speed = TINY.copy_bytes / fastest / 1e12
    assert found["points"]["read_tb_s"] == pytest.approx(speed, rel=1e-3)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_whole_command_at_tiny_size(tmp_path):
    """Every figure is measured; transformers' part among them."""
    given = ["--device", "cpu", "--scale", "tiny", "--out", str(tmp_path), "--limit-s", "1500"]
    assert command.main(given) == 0
    (path,) = tmp_path.glob("*.json")
    found = json.loads(path.read_text())
    assert found["trial"]
    status = {name: one["status"] for name, one in found["figures"].items()}
    assert status == dict.fromkeys(FIGURES, "measured")
    assert command.TRIAL in path.with_suffix(".md").read_text()


def test_some_figures_of_the_command_at_tiny_size(tmp_path):
    names = "machine,decode_1,prefill,ranking"
    given = ["--device", "cpu", "--scale", "tiny", "--out", str(tmp_path), "--only", names]
    assert command.main(given) == 0
    (path,) = tmp_path.glob("*.json")
    found = json.loads(path.read_text())
    assert list(found["figures"]) == names.split(",")
    assert all(one["status"] == "measured" for one in found["figures"].values())
    assert found["figures"]["prefill"]["points"]["prefill_tflop_s"] > 0
