"""The fields of a task file. docs/reference/task-file.md describes each of them."""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from nightjar.pipeline.tables.sinks.config import SinkConfig

Text = Annotated[str, Field(min_length=1)]
Clean = Literal["strip", "collapse", "nfc", "nfkc"]
ColumnType = Literal["bool", "int64", "float64", "date", "timestamp"]
Scalar = bool | int | float | str


def _as_list(value: object) -> object:
    return [value] if isinstance(value, dict) else value


def _as_table(value: object) -> object:
    return {"path": value} if isinstance(value, str) else value


class Fields(BaseModel):
    """A table of a task file; unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Column(Fields):
    """The value of a column, as it is."""

    column: Text = Field(description="The column's name.")


class Jinja(Fields):
    """A text made by Jinja, for loops and conditions."""

    jinja: Text = Field(description="A Jinja template; the columns are its variables.")


Template = Text | Jinja


class CsvFiles(Fields):
    """CSV files that need more than a path."""

    path: Text = Field(description="A file, or a folder of files.")
    delimiter: Annotated[str, Field(min_length=1, max_length=1)] = Field(
        ",", description="What stands between two values."
    )
    types: dict[Text, ColumnType] = Field(
        {},
        description="Types of columns that are not texts: `bool`, `int64`, `float64`, `date` or "
        "`timestamp`.",
    )


class SqlQuery(Fields):
    """A query of a database: PostgreSQL or SQLite."""

    url: Text = Field(
        description="`env:NAME`, the environment variable that holds the database's URL; or a URL "
        "without a password."
    )
    query: Text = Field(description="One SELECT. It runs in a transaction that cannot write.")
    timeout_s: Annotated[int, Field(ge=1, le=604_800)] = Field(
        3_600, description="Seconds in which all rows must be read."
    )
    resume: bool = Field(
        True,
        description="Read in the order of the key, so that a lost connection costs nothing. "
        "`false` runs the query as it is written.",
    )


class S3(Fields):
    """How S3 is reached. Keys come from the usual AWS variables and files."""

    endpoint: Text | None = Field(None, description="Another service, such as MinIO.")
    region: Text | None = Field(None, description="The region of the bucket.")


class SourceFields(Fields):
    """Where the rows come from: one of jsonl, csv, parquet and sql."""

    jsonl: Text | None = Field(None, description="JSON lines: a file, or a folder of files.")
    csv: Annotated[CsvFiles | None, BeforeValidator(_as_table)] = Field(
        None, description="CSV: a file, a folder of files, or a table with options."
    )
    parquet: Text | None = Field(None, description="Parquet: a file, or a folder of files.")
    sql: SqlQuery | None = Field(None, description="A query of a database.")
    key: Annotated[list[Text], Field(min_length=1, max_length=16)] = Field(
        description="The columns that tell rows apart; the sink has them, too."
    )
    content: Annotated[list[Text], Field(min_length=1, max_length=64)] | None = Field(
        None,
        description="The columns that say whether a row has changed: as long as they hold the "
        "same, a kept answer is taken, whatever the other columns hold. Without it, the whole "
        "request says so.",
    )
    s3: S3 | None = Field(None, description="How `s3://` places are reached.")

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        given = [name for name in ("jsonl", "csv", "parquet", "sql") if getattr(self, name)]
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise ValueError(f"give exactly one of jsonl, csv, parquet and sql; found {found}")
        if len(set(self.key)) != len(self.key):
            raise ValueError("key names a column twice; name each once")
        if self.content is not None and len(set(self.content)) != len(self.content):
            raise ValueError("content names a column twice; name each once")
        return self


class Crop(Fields):
    """Shortens the text of a column, or each text of a list."""

    column: Text = Field(description="The column whose texts are shortened.")
    keep: Literal["start", "end"] = Field(
        "start", description="Which end of the text stays: `start` or `end`."
    )
    tokens: Annotated[int, Field(ge=1)] | Literal["context"] | None = Field(
        None,
        description="The most tokens of the model that stay. `context`: as many as the model's "
        "context has room for.",
    )
    characters: Annotated[int, Field(ge=1)] | None = Field(
        None, description="The most characters that stay."
    )

    @model_validator(mode="after")
    def _one_size(self) -> Self:
        if (self.tokens is None) == (self.characters is None):
            raise ValueError("give exactly one of tokens and characters")
        return self


class _Request(Fields):
    defaults: dict[Text, Scalar | list[Scalar]] = Field(
        {}, description="Values for nulls, by column."
    )
    clean: dict[Text, list[Clean]] = Field(
        {},
        description="Steps that clean the texts of a column, in order: `strip`, `collapse`, `nfc` "
        "and `nfkc`.",
    )
    crop: Annotated[list[Crop], BeforeValidator(_as_list)] = Field(
        [], description="Columns that are shortened, one or several."
    )


class GenerateFields(_Request):
    """The request of a row that is continued."""

    prompt: Template = Field(description="The text that is continued.")


class Message(Fields):
    """One message of a chat."""

    role: Text = Field(description='Such as "system" or "user".')
    content: Template = Field(description="What is said.")


class ChatFields(_Request):
    """The request of a row that is answered."""

    messages: Annotated[list[Message], Field(min_length=1)] | Column = Field(
        description="The messages; or a column of them, as lists of structs or as JSON."
    )


class Documents(Fields):
    """The documents that a row ranks."""

    column: Text = Field(description="A column of lists of texts or of structs.")
    each: Template | None = Field(
        None,
        description="The text of one document. Its names are the struct's fields; of a list of "
        "texts the one name `text`.",
    )


class RankFields(_Request):
    """The request of a row whose documents are ranked."""

    query: Template = Field(description="What the documents are ranked after.")
    documents: Documents = Field(description="The documents.")


class ScoreFields(_Request):
    """The request of a row whose text is scored."""

    prompt: Template = Field(description="The text before; it is not scored.")
    text: Template = Field(description="The text whose likelihood after the prompt is computed.")


class _Task(Fields):
    source: SourceFields = Field(description="Where the rows come from.")
    model: Text | None = Field(
        None, description="The model's directory; or its name, for a deployment."
    )
    parameters: dict[Text, Any] = Field(
        {},
        description="Fields of the request body, such as `max_tokens`; `{column = ...}` takes a "
        "row's own value.",
    )
    prompt_vector: Text | Column | None = Field(
        None, description="The prompt vectors that the requests name."
    )
    adapter: Text | Column | None = Field(
        None, description="The LoRA adapter that the requests name."
    )
    prompt_vectors: dict[Text, Text] = Field(
        {},
        description="Files of prompt vectors, and directories of LoRA adapters, by name, for "
        "`nightjar run`.",
    )
    reuse_results: Text | None = Field(
        None,
        description="A file in which `nightjar run` keeps answers: a row whose request was "
        "answered before takes its answer from there.",
    )
    sink: SinkConfig | None = Field(None, description="Where the answers go.")


class GenerateTask(_Task):
    """Continues a prompt for each row."""

    kind: Literal["generate"] = Field(description="`generate`, `chat`, `rank` or `score`.")
    request: GenerateFields = Field(description="How a row becomes a request.")


class ChatTask(_Task):
    """Answers messages for each row."""

    kind: Literal["chat"] = Field(description="`generate`, `chat`, `rank` or `score`.")
    request: ChatFields = Field(description="How a row becomes a request.")


class RankTask(_Task):
    """Ranks the documents of each row."""

    kind: Literal["rank"] = Field(description="`generate`, `chat`, `rank` or `score`.")
    request: RankFields = Field(description="How a row becomes a request.")


class ScoreTask(_Task):
    """Scores one text for each row."""

    kind: Literal["score"] = Field(description="`generate`, `chat`, `rank` or `score`.")
    request: ScoreFields = Field(description="How a row becomes a request.")


Task = GenerateTask | ChatTask | RankTask | ScoreTask
