"""Which requests are in a micro-batch: what its plan lists, as far as it is open."""

import pytest
import sqlalchemy as sa

from nightjar.jobs.errors import StoreError
from nightjar.jobs.store import Store
from nightjar.jobs.store.membership import open_members, unfinished
from nightjar.jobs.store.tables import micro_batch_tokens
from nightjar.jobs.store.token_ids import pack_token_ids, unpack_ids
from tests.jobs import planned
from tests.outcomes import answers, claim


def test_a_list_is_read_without_the_token_ids_behind_it() -> None:
    packed = pack_token_ids({7: [[1] * 99], 1 << 41: [[2], [70_000]]})
    assert unpack_ids(packed[: 12 + 2 * 8]) == [7, 1 << 41]
    for cut in (0, 11, 12 + 15):
        with pytest.raises(StoreError):
            unpack_ids(packed[:cut])


def test_members_are_those_of_the_plan(store: Store) -> None:
    _, refs = planned(store, 7, each=3)
    with store.database.reading() as connection:
        found = [unfinished(connection, ref) for ref in refs]
        assert [list(one.values()) for one in found] == [[0, 1, 2], [3, 4, 5], [6]]
        assert open_members(connection, [refs[2].id, refs[0].id]) == found[0] | found[2]


def test_given_members_are_looked_up_alone(store: Store) -> None:
    _, (ref, other) = planned(store, 6, each=3)
    with store.database.reading() as connection:
        whole = unfinished(connection, ref)
        drop = sa.delete(micro_batch_tokens)
        connection.execute(drop)  # undone with the transaction
        assert unfinished(connection, ref, list(whole)) == whole
        foreign = [*whole][:2] + [*unfinished(connection, other)][:1]
        assert unfinished(connection, ref, foreign) == whole
        connection.rollback()


def test_foreign_results_are_refused(store: Store) -> None:
    _, (ref, other) = planned(store, 6, each=3)
    claimed, foreign = claim(store, ref), claim(store, other)
    given = [*answers(claimed)[:2], *answers(foreign)[:1]]
    with pytest.raises(StoreError, match="no open requests"):
        store.leases.finish(ref.id, ref.epoch, "worker", given)
    with pytest.raises(StoreError, match="lacks results"):
        store.leases.finish(ref.id, ref.epoch, "worker", answers(claimed)[:2])
    assert store.leases.finish(ref.id, ref.epoch, "worker", answers(claimed))
