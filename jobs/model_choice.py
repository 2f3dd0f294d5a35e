"""Which model a job is for: what its submitter named, if it is known."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from nightjar.jobs.errors import ModelNameError
from nightjar.jobs.models import KnownModel
from nightjar.jobs.records import NewRequest, RejectedRow, is_text

MOST_CHARACTERS = 512  # of a name
_LISTED = 20  # models that a message names


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """The model of a job, and whether its submitter has named it."""

    name: str
    is_named: bool


@dataclass(frozen=True, slots=True)
class ConfiguredModels:
    """What the settings say of models.

    accepts_any: Every name is taken, and means the one model that there is.
    """

    names: tuple[str, ...] = ()
    accepts_any: bool = False

    @property
    def default(self) -> str | None:
        """The only name; None where there is another number."""
        return self.names[0] if len(self.names) == 1 else None


class Choices:
    """The known names at one moment.

    Args:
        known: What a planner plans for.
        configured: What the settings say.
        may_wait: Errors tell of `wait_for_model`.

    Attributes:
        default: The model of a job that names none; None where there are several or none.
    """

    def __init__(
        self,
        known: Collection[KnownModel],
        configured: ConfiguredModels,
        *,
        may_wait: bool = False,
    ) -> None:
        registered = [one.name for one in known]
        only = list(configured.names) or registered
        self._served = [one.name for one in known if one.is_served]
        self._names = list(dict.fromkeys((*configured.names, *registered)))
        self.default = only[0] if len(only) == 1 else None
        self._means_default = configured.accepts_any and self.default is not None
        self._may_wait = may_wait

    def has(self, name: str) -> bool:
        """Whether a job may be for this model."""
        return self._means_default or not self._names or name in self._names

    def knows(self, asked: str | None) -> bool:
        """Whether the answer to `asked` is not an error, and not that every name is taken."""
        return self.default is not None if asked is None else asked in self._names

    def choose(
        self, asked: str | None, *, waits: bool = False, param: str = "model"
    ) -> ModelChoice:
        """The model of a job that names `asked`, or none.

        Args:
            asked: The name.
            waits: An unknown model is no error: the job waits until it is planned for and served.
            param: What the error calls the name.

        Raises:
            ModelNameError: The model is unknown, or none is named and there are several.
        """
        if self.default is not None and (asked is None or self._means_default):
            return ModelChoice(self.default, is_named=False)
        if asked is None or not is_text(asked, MOST_CHARACTERS):
            raise _nothing_named(self._names, param)
        if not (waits or self.has(asked)):
            raise self.not_found(asked, param)
        return ModelChoice(asked, is_named=True)

    def not_found(self, asked: str, param: str = "model") -> ModelNameError:
        """The error of a name that is unknown."""
        silent = [name for name in self._names if name not in self._served]
        told = [f"served: {_listed(self._served)}"] if self._served else []
        told += [f"known, but not served now: {_listed(silent)}"] if silent else []
        message = (
            f"there is no model {asked[:80]!r} here ({'; '.join(told) or 'none is known'}); name "
            "one that is known"
        )
        if self._may_wait:
            message += (
                ", or send wait_for_model=true with the job or batch: it then waits until that "
                "model is served"
            )
        return ModelNameError("model_not_found", message, param)


class RowsModel:
    """Finds the model of a job in its rows, where its parameters name none.

    The first row that names a known model decides. Rows that name another model are computed by
    that one, or fail alone if it is unknown. A job whose rows all name unknown models is refused.

    Args:
        choices: The known names.
        waits: The first row that names any model decides, known or not.
    """

    def __init__(self, choices: Choices, *, waits: bool) -> None:
        self._choices = choices
        self._waits = waits
        self._chosen: ModelChoice | None = None
        self._unknown: str | None = None
        self._unnamed = False

    def look(self, rows: Iterable[NewRequest | RejectedRow]) -> None:
        """Look at rows as they arrive, until one decides."""
        if self._chosen is not None:
            return
        for row in rows:
            if not isinstance(row, NewRequest):
                continue
            name = row.body.get("model")
            if name is None:
                self._unnamed = True
            elif self._waits or self._choices.has(name):
                self._chosen = self._choices.choose(name, waits=True, param="body.model")
                return
            else:
                self._unknown = self._unknown or name

    @property
    def has_rows(self) -> bool:
        """Whether any row came that is to be computed."""
        return self._unnamed or self._chosen is not None or self._unknown is not None

    def choice(self) -> ModelChoice:
        """The job's model, when all rows have arrived; raises ModelNameError."""
        if self._chosen is not None:
            return self._chosen
        default = self._choices.default
        if self._unknown is not None and not (self._unnamed and default is not None):
            raise self._choices.not_found(self._unknown, "body.model")
        return self._choices.choose(None)


def _nothing_named(names: Collection[str], param: str) -> ModelNameError:
    there = f"; known: {_listed(names)}" if names else ""
    message = (
        "name the model in `model`, or that of a job in ?model= or in `model` of its lines, with "
        f"at most {MOST_CHARACTERS} characters{there}"
    )
    return ModelNameError("missing_model", message, param)


def _listed(names: Collection[str]) -> str:
    shown = [repr(name[:80]) for name in list(names)[:_LISTED]]
    return ", ".join(shown) + (" and others" if len(names) > _LISTED else "")
