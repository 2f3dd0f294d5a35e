"""Parts of the CUDA path that are switched off: the same texts, by other launches."""

from collections import Counter

import pytest

from nightjar.gpu_worker.models import load_model
from nightjar.kernels.cuda import launch
from nightjar.kernels.cuda.switches import Switches, current, using
from tests.engine_cuda.requests import CACHE, prompt
from tests.engines import generate, run
from tests.kernels_cuda.devices import run_on_host


def requests():
    return [generate(i, prompt(5 + 18 * i, i), max_tokens=4) for i in range(2)]


def test_all_is_on_unless_told():
    assert current() == Switches()
    with using(Switches(prefetch=False)):
        assert current() == Switches(prefetch=False)
    assert current() == Switches()


@pytest.fixture
def launched(device):
    """Names of the kernels that were launched on the host, with the arguments of each launch."""
    if device == "cuda":
        yield None
        return
    found = []

    def watched(kernel, grid, block, args, shared_bytes):
        found.append((kernel.entry, args))
        run_on_host(kernel, grid, block, args, shared_bytes)

    with launch.using(watched):
        yield found


@pytest.mark.parametrize(
    ("name", "switches"),
    [
        ("gpt", ("prefetch", "small_products")),
        ("family", ("fused_heads",)),
        pytest.param("family", ("prefetch", "fused_heads"), marks=pytest.mark.slow),
    ],
)
def test_what_is_off_is_not_launched_and_texts_stay(device, launched, request, name, switches):
    directory = request.getfixturevalue(name)
    texts = directory.tokenizer().token_bytes

    def answers(switches):
        with using(switches):
            model = load_model(directory, "fp16", device)
            return run(model, texts, requests(), window_steps=3, **CACHE)

    wanted = answers(Switches())
    with_all = list(launched or ())
    if launched is not None:
        launched.clear()
    for off in switches:
        found = answers(Switches(**{off: False}))
        assert {i: one.token_ids for i, one in found.items()} == {
            i: one.token_ids for i, one in wanted.items()
        }
        if launched is not None:
            assert_off(off, with_all, launched)
            launched.clear()


def assert_off(off, with_all, launched):
    """Compare the launches of an engine with everything on and of one with a part off."""
    before, after = (Counter(entry for entry, _ in calls) for calls in (with_all, launched))
    if off == "small_products":
        assert before["linear"] > 0
        assert after["linear"] == 0
    elif off == "fused_heads":
        assert after["qkv_post"] > before["qkv_post"]
        assert after["decode_attention"] == before["decode_attention"]
    else:
        assert after == before
        assert any(prefetches(*call) for call in with_all)
        assert not any(prefetches(*call) for call in launched)


def prefetches(entry, args):
    """Whether a launch brings something into the cache ahead: the next weight of a product, or the
    number of blocks that attention takes for resident."""
    if entry == "linear":
        return args[-4] is not None
    return entry == "decode_attention" and int(args[-6]) > 0
