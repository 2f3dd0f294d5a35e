"""The host's memory below the cache: blocks leave by kv_pack and come back by kv_unpack."""

import pytest

from nightjar.gpu_worker.models import KVTensors, load_model
from nightjar.kernels.cuda import launch
from tests.engine_cuda.requests import engine_of, prompt
from tests.engines import assert_nothing_held, drain, generate, load_always


@pytest.fixture
def launched(monkeypatch):
    """The kernels that were started."""
    found, start = [], launch.launch

    def counted(kernel, *rest):
        found.append(kernel.expression)
        start(kernel, *rest)

    monkeypatch.setattr("nightjar.kernels.cuda.kv_transfer.launch", counted)
    return found


@pytest.mark.parametrize("windows", [1, 4])
def test_turns_that_left_the_cache_are_read_and_not_computed(device, family, launched, windows):
    """Two layers, three conversations that do not fit into the cache together."""
    model, texts = load_model(family, "fp32", device), family.tokenizer().token_bytes
    block = KVTensors.block_bytes(model.config, 32, model.cache_dtype)
    turns = [
        generate(3 * turn + seed, prompt(40 + 30 * turn, seed), max_tokens=5)
        for turn in range(2)
        for seed in range(3)
    ]
    limits = {"window_steps": windows}
    plain = engine_of(model, texts, **limits)
    tight = engine_of(model, texts, kv_cache_bytes=3 * block, host_cache_bytes=9 * block, **limits)
    load_always(tight)
    for turn in turns:
        assert drain(tight, turn) == drain(plain, turn)
    assert tight.windows is not None
    assert_nothing_held(tight)
    # Each conversation's second turn loads its first block, in each of the two layers.
    unpacked = [name for name in launched if name.endswith("<false>")]
    assert len(unpacked) == 3 * 2
    assert len(tight.tier) == 5
