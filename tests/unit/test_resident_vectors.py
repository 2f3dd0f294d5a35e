"""Which prompt vectors a compute process holds, within a bound of bytes."""

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nightjar.gpu_worker.compute.messages import ForgetVectors, RegisterVectors
from nightjar.gpu_worker.worker.resident_vectors import ResidentVectors, VectorsMissingError
from nightjar.jobs.vector_records import VectorFile


def told(messages: list[RegisterVectors | ForgetVectors]) -> list[str]:
    return [("+" if isinstance(one, RegisterVectors) else "-") + one.key for one in messages]


def test_the_least_recently_used_leave_first() -> None:
    held = ResidentVectors(30)
    data = {key: VectorFile(bytes(10)) for key in "abcdef"}
    assert told(held.use(["a", "b", "c"], data, list)) == ["+a", "+b", "+c"]
    assert told(held.use(["a"], {}, list)) == []
    assert told(held.use(["d"], data, list)) == ["-b", "+d"]
    assert held.missing("abcd") == ["b"]
    assert held.held_bytes == 30
    # Those in flight stay, and may exceed the bound; then they leave.
    assert told(held.use(["e", "f"], data, lambda: ["a", "c", "d"])) == ["+e", "+f"]
    assert held.held_bytes == 50
    assert told(held.use(["f"], {}, list)) == ["-c", "-a"]
    assert held.held_bytes == 30


def test_what_is_missing_must_be_given_and_changes_nothing_otherwise() -> None:
    held = ResidentVectors(30)
    held.use(["a"], {"a": VectorFile(bytes(10))}, list)
    with pytest.raises(VectorsMissingError):
        held.use(["a", "b", "c"], {"b": VectorFile(bytes(10))}, list)
    assert held.missing("abc") == ["b", "c"]
    assert (
        told(held.use(["b"], {"b": VectorFile(b"")}, list)) == []
    )  # a version that does not exist
    assert held.missing("ab") == ["b"]
    held.clear()
    assert (held.missing("a"), held.held_bytes) == (["a"], 0)


@given(
    st.lists(st.tuples(st.sets(st.integers(0, 9), min_size=1, max_size=4), st.integers(0, 3))),
    st.integers(1, 60),
)
def test_the_process_holds_what_is_noted(steps: list[tuple[set[int], int]], most: int) -> None:
    held, process = ResidentVectors(most), dict[str, int]()
    flights: list[set[str]] = []
    for numbers, ended in steps:
        del flights[:ended]
        keys = {str(number) for number in numbers}
        data = {key: VectorFile(bytes(5 + int(key))) for key in held.missing(keys)}
        in_flight = set().union(*flights)
        for message in held.use(keys, data, partial(set, in_flight)):
            if isinstance(message, RegisterVectors):
                assert message.key not in process
                process[message.key] = len(message.data)
            else:
                del process[message.key]
        flights.append(keys)
        assert process.keys() >= keys | in_flight
        assert held.missing(map(str, range(10))) == [
            key for key in map(str, range(10)) if key not in process
        ]
        assert held.held_bytes == sum(process.values())
        assert held.held_bytes <= max(most, sum(5 + int(key) for key in keys | in_flight))
