"""Models over HTTP, as OpenAI's clients ask for them."""

from typing import Annotated

from fastapi import APIRouter, Path
from fastapi.responses import JSONResponse

from nightjar.jobs.api import openai_examples as examples
from nightjar.jobs.api.caller import Reader
from nightjar.jobs.api.documenting import documented
from nightjar.jobs.api.model_names import ModelNames
from nightjar.jobs.api.openai_schemas import ModelList, ModelPayload
from nightjar.jobs.models import KnownModel
from nightjar.jobs.store.models import Models


def models_router(models: Models, names: ModelNames) -> APIRouter:
    """`GET /v1/models` and `GET /v1/models/{id}`; models are the same for every tenant."""
    router = APIRouter(prefix="/v1/models", tags=["models"])

    @router.get("", response_model=ModelList, responses=documented(examples.MODEL_LIST))
    def list_models(_: Reader) -> JSONResponse:
        """The models that a planner plans for; those that a GPU worker serves now come first."""
        found = sorted(models.known(), key=lambda one: (not one.is_served, one.name))
        listed: ModelList = {"object": "list", "data": [model_payload(one) for one in found]}
        return JSONResponse(listed)

    @router.get(
        "/{model:path}", response_model=ModelPayload, responses=documented(examples.MODEL, 404)
    )
    def show_model(
        model: Annotated[str, Path(description="The name of a model.", examples=["tiny"])],
        _: Reader,
    ) -> JSONResponse:
        """One model; its name may hold slashes."""
        found = next((one for one in models.known() if one.name == model), None)
        if found is None:
            raise names.read().not_found(model)
        return JSONResponse(model_payload(found))

    return router


def model_payload(model: KnownModel) -> ModelPayload:
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
