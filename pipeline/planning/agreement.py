"""What plans follow from: planners share jobs only if it is the same for all of them."""

import json
import logging
from collections.abc import Mapping

from nightjar.jobs.store.planners import Planners
from nightjar.pipeline.planning.models import PlanningModels
from nightjar.pipeline.settings import Settings

logger = logging.getLogger(__name__)

_SETTINGS = (
    "micro_batch_requests",
    "micro_batch_tokens",
    "accept_any_model",
    "dtype",
    "kv_cache_dtype",
    "shard_count",
    "engine",
    "reuse_results",
    "result_cache_days",
)
_MODEL = "fingerprint of the model "


def plans_with(settings: Settings, models: PlanningModels) -> str:
    """Return the settings and models, as text that equals that of planners that plan alike."""
    said: dict[str, object] = {name: getattr(settings, name) for name in _SETTINGS}
    said |= {_MODEL + model.name: model.fingerprint for model in models}
    return json.dumps(said, sort_keys=True, default=str)


def differences(own: str, other: str) -> str:
    """Name what differs between two planners, for people."""
    ours, theirs = _said(own), _said(other)
    return "; ".join(
        f"{name} is {ours.get(name, 'not set')} here and {theirs.get(name, 'not set')} there"
        for name in sorted(ours.keys() | theirs.keys())
        if ours.get(name) != theirs.get(name)
    )


class Agreement:
    """Whether this planner plans as the leader does; only then it plans beside it.

    Args:
        planners: What planners say of themselves.
        own: What this planner's plans follow from.
    """

    def __init__(self, planners: Planners, own: str) -> None:
        self._planners = planners
        self._own = own
        self._told = ""
        self.holds = False

    def look(self, leader: str | None) -> None:
        """Compare with the leader of this name; None: no other one is known to live."""
        theirs = None if leader is None else self._planners.plans_with(leader)
        self.holds = theirs == self._own
        if theirs is None or self.holds or theirs == self._told:
            return
        self._told = theirs
        logger.error(
            "this planner does not plan beside %s, because their settings differ: %s; "
            "start both with the same settings and models",
            leader,
            differences(self._own, theirs),
            extra={"action": "planners_differ"},
        )


def _said(text: str) -> Mapping[str, object]:
    found = json.loads(text)
    return found if isinstance(found, dict) else {}
