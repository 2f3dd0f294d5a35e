"""The `[sink]` table of a task file: one of `jsonl`, `parquet` and `sql`, with its options."""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Compression = Literal["none", "snappy", "gzip", "zstd", "lz4", "brotli"]

SAME = "same"
MAX_ROWS_PER_GROUP = 1_048_576
OBJECT_STORES = ("s3://",)

Name = Annotated[str, Field(min_length=1, max_length=255)]
Path = Annotated[str, Field(min_length=1, max_length=4_096)]


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class SqlTable(_Table):
    """A table of the user's database."""

    url: Path = Field(
        description="`env:NAME`, the environment variable that holds the database's URL; or a URL "
        "without a password."
    )
    table: Name = Field(description="The table, or `schema.table` on PostgreSQL.")
    create: bool = Field(True, description="Create the table where there is none.")
    mirror: bool = Field(
        False, description="Delete the rows whose keys are not among those of the run."
    )


class SinkConfig(_Table):
    """Where the results go."""

    jsonl: Path | None = Field(None, description="A file of JSON lines.")
    parquet: Path | None = Field(
        None, description="A Parquet file, or a folder of them if it ends with `/`."
    )
    sql: SqlTable | None = Field(None, description="A table of a database.")
    errors: Path = Field(
        SAME,
        description="`same`: failed rows are in the same table. Else the path, or the name of the "
        "SQL table, that failed rows go to.",
    )
    overwrite: bool = Field(
        False, description="Replace data that Nightjar has not written; never folders of others."
    )
    partition_by: tuple[Name, ...] = Field(
        (),
        max_length=8,
        description="Key columns: one folder for each of their values (Parquet folders).",
    )
    rows_per_group: int = Field(
        65_536, ge=1, le=MAX_ROWS_PER_GROUP, description="Rows of a Parquet row group, at most."
    )
    rows_per_file: int = Field(
        1_000_000, ge=1, description="Rows of a file, at most (Parquet folders)."
    )
    compression: Compression = Field("zstd", description="Of Parquet files.")

    @model_validator(mode="before")
    @classmethod
    def _lists_for_tuples(cls, data: Any) -> Any:  # noqa: ANN401 - whatever the file holds
        """TOML, YAML and JSON have lists only."""
        if isinstance(data, dict) and isinstance(data.get("partition_by"), list):
            return data | {"partition_by": tuple(data["partition_by"])}
        return data

    @model_validator(mode="after")
    def _one_target(self) -> Self:
        named = [name for name in ("jsonl", "parquet", "sql") if getattr(self, name) is not None]
        if len(named) != 1:
            found = " and ".join(named) or "none"
            raise ValueError(f"give exactly one of jsonl, parquet and sql; found {found}")
        for name in ("partition_by", "rows_per_group", "rows_per_file", "compression"):
            if self.parquet is None and name in self.model_fields_set:
                raise ValueError(f"{name} is an option of parquet; leave it out")
        for name in ("partition_by", "rows_per_file"):
            if name in self.model_fields_set and not self.is_folder:
                raise ValueError(
                    f"{name} needs a folder: write a path that ends with '/', such as 'out/'"
                )
        if len(set(self.partition_by)) != len(self.partition_by):
            raise ValueError("partition_by names a column twice; name each once")
        if self.sql is not None and self.errors == self.sql.table:
            raise ValueError("errors is the sink's own table; write 'same' or another name")
        if self.errors in (self.jsonl, self.parquet):
            raise ValueError("errors is the sink's own path; write 'same' or another path")
        if self.is_folder and self.errors.startswith(str(self.parquet)):
            raise ValueError("errors is within the sink's folder, which is replaced as a whole")
        return self

    @property
    def is_folder(self) -> bool:
        """Whether Parquet files are written into a folder."""
        return self.parquet is not None and self.parquet.endswith("/")

    @property
    def keeps_errors(self) -> bool:
        """Whether failed rows are in the same table as the answers."""
        return self.errors == SAME
