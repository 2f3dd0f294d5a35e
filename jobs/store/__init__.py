"""The store: every SQL statement of Nightjar, behind one class.

The statements are written by subject in the files beside this one.
A store is safe to share between threads; each process opens its own.
"""

from nightjar.jobs.store.backlog import BacklogStore
from nightjar.jobs.store.database import Database, Synchronous
from nightjar.jobs.store.heartbeats import HeartbeatStore
from nightjar.jobs.store.leading import LeaderStore
from nightjar.jobs.store.leases import LeaseStore
from nightjar.jobs.store.orphans import OrphanStore
from nightjar.jobs.store.paging import PagingStore
from nightjar.jobs.store.planning import PlanningStore
from nightjar.jobs.store.reading import ReadingStore
from nightjar.jobs.store.replanning import ReplanningStore
from nightjar.jobs.store.result_cache import CacheStore
from nightjar.jobs.store.retrying import RetryStore
from nightjar.jobs.store.segmented import LandingStore
from nightjar.jobs.store.stopping import StoppingStore
from nightjar.jobs.store.submission import SubmissionStore
from nightjar.jobs.store.suspects import SuspectStore
from nightjar.jobs.store.vectors import VectorStore
from nightjar.jobs.store.waiting import WaitingStore


class Store(
    SubmissionStore,
    BacklogStore,
    PlanningStore,
    ReplanningStore,
    LeaseStore,
    SuspectStore,
    HeartbeatStore,
    LeaderStore,
    StoppingStore,
    OrphanStore,
    LandingStore,
    RetryStore,
    ReadingStore,
    WaitingStore,
    PagingStore,
    VectorStore,
    CacheStore,
):
    """Jobs, requests, micro-batches and results in SQLite or PostgreSQL."""

    def __init__(self, url: str, *, synchronous: Synchronous = "full") -> None:
        """Open `sqlite:///FILE` or `postgresql://USER@HOST/NAME`; connects at the first use.

        `synchronous` is SQLite's: "normal" is faster, and a power cut may undo
        the last commits. Raises UnusableDatabaseError.
        """
        super().__init__(Database(url, synchronous=synchronous))

    def migrate(self) -> None:
        """Bring the tables to the newest revision; several processes may do so at once."""
        from nightjar.jobs.store.schema import migrate  # Alembic: few processes need it

        migrate(self._database.url)

    def close(self) -> None:
        """Close every connection; the store must not be used afterwards."""
        self._database.close()
