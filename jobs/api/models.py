"""Models over HTTP, as OpenAI's clients ask for them."""

from typing import Annotated

from fastapi import APIRouter, Depends

from nightjar.jobs.api.caller import Caller, needs
from nightjar.jobs.api.model_names import ModelNames
from nightjar.jobs.models import KnownModel
from nightjar.jobs.records import JsonObject
from nightjar.jobs.states import Scope
from nightjar.jobs.store.models import Models


def models_router(models: Models, names: ModelNames) -> APIRouter:
    """`GET /v1/models` and `GET /v1/models/{id}`; models are the same for every tenant."""
    router = APIRouter(prefix="/v1/models")
    reads = Depends(needs(Scope.READ))

    @router.get("")
    def list_models(caller: Annotated[Caller, reads]) -> JsonObject:
        """The models that a planner plans for; those that a GPU worker serves now come first."""
        found = sorted(models.known(), key=lambda one: (not one.is_served, one.name))
        return {"object": "list", "data": [model_payload(one) for one in found]}

    @router.get("/{model:path}")
    def show_model(model: str, caller: Annotated[Caller, reads]) -> JsonObject:
        """One model; its name may hold slashes."""
        found = next((one for one in models.known() if one.name == model), None)
        if found is None:
            raise names.read().not_found(model)
        return model_payload(found)

    return router


def model_payload(model: KnownModel) -> JsonObject:
    """A model in OpenAI's shape, and who serves it."""
    return {
        "id": model.name,
        "object": "model",
        "created": int(model.created_at.timestamp()),
        "owned_by": "nightjar",
        "context_length": model.context_length,
        "fingerprint": model.fingerprint,
        "served": model.is_served,
        "workers": model.workers,
    }
