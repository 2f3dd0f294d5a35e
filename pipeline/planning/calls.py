"""Plans single calls where they come in, so that they wait for no other planning.

The planner works on chunks of thousands of rows. The API knows the model's tokenizer as well, and a
call is one micro-batch by itself. So the API encodes it, with the code that the planner uses.
"""

import logging
import threading
from collections.abc import Callable

from nightjar.checkpoints import CheckpointError, ModelDirectory
from nightjar.jobs.records import JsonObject, PlannedCall, QueuedRequest, RequestError
from nightjar.jobs.states import RequestKind
from nightjar.jobs.store import Store
from nightjar.pipeline.planning.encode import Encoder
from nightjar.pipeline.planning.pack import pack
from nightjar.pipeline.planning.planner import open_encoder, packable
from nightjar.pipeline.settings import Settings

logger = logging.getLogger(__name__)


class CallPlanner:
    """Plans single calls for the served model, as soon as the model's files are read.

    Where results are reused, it plans nothing: the planner knows the kept answers.

    Args:
        settings: What is served.
        store: Holds the prompt vectors.
        open_model: Opens the model's directory; called in a thread, because reading a large model's
            files takes long.
    """

    def __init__(
        self, settings: Settings, store: Store, open_model: Callable[[], ModelDirectory]
    ) -> None:
        self._settings = settings
        self._store = store
        self._open_model = open_model
        self._ready: tuple[Encoder, str] | None = None
        self._thread = threading.Thread(target=self._load, name="call-planner", daemon=True)
        if not settings.reuse_results:
            self._thread.start()

    def wait_ready(self) -> None:
        """Wait until the model's files are read, or cannot be."""
        if self._thread.ident is not None:
            self._thread.join()

    def plan(
        self, job_id: str, kind: RequestKind, body: JsonObject
    ) -> PlannedCall | RequestError | None:
        """Plan a call.

        Returns:
            The plan, why the model cannot compute the call, or None if the planner has to plan it.
        """
        if self._ready is None:
            return None
        encoder, fingerprint = self._ready
        request = QueuedRequest(0, job_id, 0, job_id, kind, body)
        encoded, rejected = encoder.encode([request])
        if rejected:
            return rejected[0][1]
        items = [packable(request, encoded[0])]
        most = self._settings.micro_batch_tokens
        (batch,) = pack(items, most_requests=1, most_tokens=most)
        return PlannedCall(encoded[0], batch, fingerprint)

    def _load(self) -> None:
        try:
            model = self._open_model()
            self._ready = open_encoder(self._settings, self._store, model), model.fingerprint
        except (CheckpointError, OSError) as error:
            logger.warning(
                "the planner has to plan single calls, because the model cannot be read here: %s",
                error,
                extra={"action": "calls_not_planned"},
            )
