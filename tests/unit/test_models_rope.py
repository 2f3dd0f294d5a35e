"""Rotary frequencies and tables against transformers'."""

import pytest
import torch
from transformers import AutoConfig, AutoModel

from nightjar.checkpoints import read_config
from nightjar.gpu_worker.models.rope import RopeTable, inverse_frequencies
from tests.families import CASES, LLAMA3, SIZES, YARN, Case

FULL = {"head_dim": 128, "num_key_value_heads": 4, "max_position_embeddings": 40_000}
ROTATED = CASES | {
    "llama 3.1": Case("llama", FULL | {"rope_parameters": LLAMA3 | {"rope_theta": 5e5}}),
    "long yarn": Case(
        "qwen3", FULL | {"rope_parameters": YARN | {"rope_theta": 1e6, "truncate": False}}
    ),
}


@pytest.fixture(params=ROTATED)
def both(request, tmp_path):
    case = ROTATED[request.param]
    config = AutoConfig.for_model(
        case.model_type, **(SIZES | case.changes | {"num_hidden_layers": 1})
    )
    config.save_pretrained(tmp_path)
    reference = AutoModel.from_config(config).rotary_emb
    return reference, read_config(tmp_path)


def test_frequencies_are_transformers_own(both):
    reference, config = both
    assert torch.equal(inverse_frequencies(config.rope), reference.inv_freq)


def test_tables(both):
    reference, config = both
    positions = config.context_length
    table = RopeTable.build(config.rope, positions, "cpu")
    cosines, sines = reference(torch.empty(0), torch.arange(positions).unsqueeze(0))
    n = config.rope.dims // 2
    assert table.cosines.shape == (positions, n)
    torch.testing.assert_close(table.cosines, cosines[0, :, :n], atol=2e-7, rtol=0)
    torch.testing.assert_close(table.sines, sines[0, :, :n], atol=2e-7, rtol=0)


def test_a_row_is_the_same_in_a_table_of_any_size(both):
    _, config = both
    long = RopeTable.build(config.rope, 5000, "cpu")
    for positions in (1, 7, 4096, 4097):
        short = RopeTable.build(config.rope, positions, "cpu")
        assert torch.equal(short.cosines, long.cosines[:positions])
    chosen = torch.tensor([4999, 0, 17, 17])
    cosines, sines = long.at(chosen).angles
    assert torch.equal(cosines, long.cosines[chosen])
    assert torch.equal(sines, long.sines[chosen])
