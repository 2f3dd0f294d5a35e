"""Token ids as bytes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nightjar.jobs.errors import StoreError
from nightjar.jobs.store.segments import pack_segments, unpack_segments

token_ids = st.lists(st.integers(0, 2**31 - 1), max_size=20)


@given(st.lists(token_ids, max_size=6))
def test_what_is_packed_comes_back(segments: list[list[int]]) -> None:
    assert unpack_segments(pack_segments(segments)) == segments


def test_the_bytes_are_little_endian_int32() -> None:
    assert pack_segments([[1], [258]]).hex() == "0200000001000000010000000100000002010000"


@pytest.mark.parametrize("ids", [[-1], [2**31], ["a"], [None]])
def test_what_is_no_token_id_is_refused(ids: list[int]) -> None:
    with pytest.raises(StoreError, match="token ids"):
        pack_segments([ids])


@pytest.mark.parametrize("data", [b"", b"abc", b"\x01\x00\x00\x00", b"\xff\xff\xff\xff"])
def test_damaged_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(StoreError):
        unpack_segments(data)
