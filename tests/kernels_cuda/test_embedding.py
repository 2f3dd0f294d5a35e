import pytest
import torch

from nightjar.kernels import cuda, reference
from tests.kernels_cuda.devices import assert_near, random, storages

VOCAB, POSITIONS = 40, 16


def lookup(device, ids, table, positions=None, position_table=None, **rest):
    ids = torch.tensor(ids)
    positions = torch.arange(len(ids)) if positions is None else torch.tensor(positions)
    moved = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in rest.items()}
    if position_table is not None:
        position_table = position_table.to(device)
    given = ids.to(device), positions.to(device), table.to(device), position_table
    return cuda.embedding.embed(*given, **moved).cpu()


@pytest.mark.parametrize("storage", storages)
@pytest.mark.parametrize("columns", [1, 111, 512, 1540])
def test_tokens_and_positions_as_the_reference(device, storage, columns):
    dtype = storages[storage]
    table, places = (random((n, columns), dtype, seed=n).contiguous() for n in (VOCAB, POSITIONS))
    ids = [0, VOCAB - 1, 7, 7]
    got = lookup(device, ids, table, position_table=places, scale=1.5)
    wanted = reference.embedding.embed(
        torch.tensor(ids), torch.arange(4), table.double(), places.double(), scale=1.5
    )
    assert_near(got, wanted)


def test_without_a_position_table_positions_are_not_read(device):
    table = random((VOCAB, 64), torch.float16)
    got = lookup(device, [3, 4], table, positions=[10**12, -5])
    assert torch.equal(got, table[[3, 4]].float())


def test_ids_past_the_vocabulary_read_their_own_prompt_vectors(device):
    table, vectors = random((VOCAB, 96), torch.float16), random((7, 96), seed=1)
    bases = torch.tensor([0, 0, 4, 4])
    ids = [5, VOCAB + 2, VOCAB, VOCAB + 2]
    got = lookup(device, ids, table, prompt_vectors=vectors, vector_bases=bases, scale=2.0)
    wanted = torch.stack([table[5].float(), vectors[2], vectors[4], vectors[6]]) * 2.0
    assert torch.equal(got, wanted)


def test_an_id_past_the_vocabulary_without_vectors_reads_the_last_row(device):
    """As the reference does: nothing beyond the table is read."""
    table = random((VOCAB, 64), torch.bfloat16)
    assert torch.equal(lookup(device, [VOCAB + 5], table)[0], table[-1].float())


@pytest.mark.parametrize("ids", [[2, -1, 3], [2, VOCAB + 7, 3]])
def test_a_row_that_reads_outside_its_table_is_nan_and_its_neighbours_are_not(device, ids):
    table, vectors = random((VOCAB, 64), torch.float16), random((7, 64), seed=1)
    bases = torch.zeros(3, dtype=torch.int64)
    got = lookup(device, ids, table, prompt_vectors=vectors, vector_bases=bases)
    assert got[1].isnan().all()
    assert torch.equal(got[[0, 2]], table[[2, 3]].float())


@pytest.mark.parametrize("position", [-1, POSITIONS])
def test_a_position_outside_its_table_is_nan(device, position):
    table, places = random((VOCAB, 64)), random((POSITIONS, 64), seed=1)
    got = lookup(device, [1, 1], table, positions=[position, 3], position_table=places)
    assert got[0].isnan().all()
    assert torch.equal(got[1], table[1] + places[3])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ids": torch.tensor([1], dtype=torch.int32)}, "ids is int32"),
        ({"positions": torch.tensor([1, 2])}, "positions has shape"),
        ({"table": torch.ones(4, 8).double()}, "table is float64"),
        ({"position_table": torch.ones(4, 8).half()}, "position_table is float16"),
        ({"prompt_vectors": torch.ones(4, 8)}, "need vector_bases"),
    ],
)
def test_bad_arguments_are_named(change, message):
    given = {
        "ids": torch.tensor([1]),
        "positions": torch.tensor([0]),
        "table": torch.ones(4, 8),
        "position_table": None,
    }
    with pytest.raises(ValueError, match=message):
        cuda.embedding.embed(**(given | change))
