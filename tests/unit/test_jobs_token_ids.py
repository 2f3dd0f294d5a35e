"""Token ids as bytes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nightjar.jobs.errors import StoreError
from nightjar.jobs.store.packs import decompress
from nightjar.jobs.store.token_ids import pack_token_ids, unpack_token_ids

segments = st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=20), max_size=6)
short = st.lists(st.lists(st.integers(0, 2**16 - 1), max_size=20), max_size=6)


@given(st.dictionaries(st.integers(1, 2**62), segments | short, max_size=5))
def test_what_is_packed_comes_back(requests: dict[int, list[list[int]]]) -> None:
    assert unpack_token_ids(pack_token_ids(requests)) == requests


PLAIN = "0200000001000000010000000500000000000000010000000200000001000201"


def test_the_bytes_are_little_endian_and_narrow() -> None:
    packed = pack_token_ids({5: [[1, 258]]})
    assert packed[:20].hex() == "020100000100000001000000" + "0500000000000000"
    assert decompress(packed[20:]).hex() == PLAIN[40:]
    assert decompress(pack_token_ids({5: [[2**16]]})[20:]).hex().endswith("00000100")


def test_bytes_of_the_version_before_are_read() -> None:
    """They are not compressed."""
    assert unpack_token_ids(bytes.fromhex(PLAIN)) == {5: [[1, 258]]}


@pytest.mark.parametrize("ids", [[-1], [70_000, -1], [2**31], ["a"], [None], [1.5]])
def test_what_is_no_token_id_is_refused(ids: list[int]) -> None:
    with pytest.raises(StoreError, match="token ids"):
        pack_token_ids({1: [ids]})


@given(st.binary(max_size=60))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    try:
        requests = unpack_token_ids(data)
    except StoreError:
        return
    assert unpack_token_ids(pack_token_ids(requests)) == requests


@pytest.mark.parametrize("cut", [1, 12, 20, 24, 30])
def test_cut_bytes_are_refused(cut: int) -> None:
    with pytest.raises(StoreError):
        unpack_token_ids(pack_token_ids({5: [[1, 258]]})[:cut])
