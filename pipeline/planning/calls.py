"""Plans single calls where they come in, so that they wait for no other planning.

The planner works on chunks of thousands of rows. The API knows the models' tokenizers as well, and
a call is one micro-batch by itself. So the API encodes it, with the code that the planner uses.
"""

import logging
import threading
from collections.abc import Callable

from nightjar.checkpoints import CheckpointError
from nightjar.jobs.records import JsonObject, PlannedCall, QueuedRequest, RequestError
from nightjar.jobs.states import RequestKind
from nightjar.pipeline.planning.models import PlanningModels
from nightjar.pipeline.planning.pack import pack
from nightjar.pipeline.planning.planner import packable
from nightjar.pipeline.settings import Settings, SettingsError

logger = logging.getLogger(__name__)


class CallPlanner:
    """Plans single calls for the models of the settings, as soon as their files are read.

    Where results are reused, it plans nothing: the planner knows the kept answers.

    Args:
        settings: What is served.
        open_models: Opens the models' directories; called in a thread, because reading a large
            model's files takes long.
    """

    def __init__(self, settings: Settings, open_models: Callable[[], PlanningModels]) -> None:
        self._settings = settings
        self._open_models = open_models
        self._models: PlanningModels | None = None
        self._thread = threading.Thread(target=self._load, name="call-planner", daemon=True)
        if not settings.reuse_results:
            self._thread.start()

    def wait_ready(self) -> None:
        """Wait until the models' files are read, or cannot be."""
        if self._thread.ident is not None:
            self._thread.join()

    def plan(
        self, job_id: str, model: str, kind: RequestKind, body: JsonObject
    ) -> PlannedCall | RequestError | None:
        """Plan a call.

        Args:
            job_id: Of the call's job.
            model: Of the job.
            kind: What is asked for.
            body: The call's body; it may name the model.

        Returns:
            The plan, why the model cannot compute the call, or None if the planner has to plan it:
            it may plan for models that the settings of this process do not name.
        """
        if self._models is None:
            return None
        request = QueuedRequest(0, job_id, 0, job_id, kind, body)
        groups, _ = self._models.sort(model, [request])
        if not groups:
            return None
        planning = groups[0][0]
        encoded, rejected = planning.encoder.encode([request])
        if rejected:
            return rejected[0][1]
        items = [packable(request, encoded[0])]
        most = self._settings.micro_batch_tokens
        (batch,) = pack(items, most_requests=1, most_tokens=most)
        return PlannedCall(encoded[0], batch, planning.fingerprint)

    def _load(self) -> None:
        try:
            self._models = self._open_models()
        except (CheckpointError, SettingsError, OSError) as error:
            logger.warning(
                "the planner has to plan single calls, because a model cannot be read here: %s",
                error,
                extra={"action": "calls_not_planned"},
            )
