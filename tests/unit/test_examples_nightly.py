"""The nightly example: its data, its task files and the commands of its schedulers."""

import ast
import sqlite3
from contextlib import closing
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import typer.main

from examples.nightly import make_data
from nightjar.pipeline.front.cli import app

FOLDER = Path(make_data.__file__).parent


def test_the_second_night_differs_by_a_few_rows(tmp_path: Path) -> None:
    first, second = make_data.make_products(1), make_data.make_products(2)
    changed = {one[0] for one in {*first} ^ {*second}}
    assert changed == {*make_data.CHANGING}
    before, after = make_data.make_users(first, 1), make_data.make_users(second, 2)
    assert after[: len(before)] == before
    assert len(after) == len(before) + 1
    recommended = {one["sku"] for user in after for one in user["candidates"]}
    assert recommended <= {one[0] for one in second}
    for night, (products, users) in enumerate([(first, before), (second, after)], 1):
        make_data.write_shop(tmp_path / "shop.db", products, users)
        with closing(sqlite3.connect(tmp_path / "shop.db")) as shop:
            counts = [
                shop.execute(f"SELECT count(*) FROM {table}").fetchone()[0]  # noqa: S608
                for table in ("products", "candidates")
            ]
        assert counts == [33 - night, 8 * (199 + night)]


def test_the_ending_follows_the_last_consonant() -> None:
    assert make_data.said("비빔밥") == "비빔밥이야"
    assert make_data.said("된장찌개") == "된장찌개야"


@pytest.mark.parametrize("name", ["airflow_dag.py", "dagster_assets.py"])
def test_a_scheduler_runs_commands_and_files_that_exist(name: str) -> None:
    tree = ast.parse((FOLDER / name).read_text(encoding="utf-8"))
    lists = [node for node in ast.walk(tree) if isinstance(node, ast.List)]
    texts = [[one.value for one in node.elts if isinstance(one, ast.Constant)] for node in lists]
    (command,) = [one for one in texts if one[:1] == ["nightjar"]]
    options = typer.main.get_group(app).commands[str(command[1])].params
    assert {one for one in command if str(one).startswith("--")} <= {
        option for param in options for option in param.opts
    }
    named = {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and str(node.value).endswith(".toml")
    }
    assert named == {"describe.toml", "rank.toml"}


@pytest.mark.parametrize("name", ["describe.toml", "rank.toml"])
def test_the_guide_shows_the_task_files(name: str) -> None:
    guide = (FOLDER.parents[1] / "docs/guides/recommendations.md").read_text(encoding="utf-8")
    shown = [block.partition("```")[0] for block in guide.split("```toml\n")[1:]]
    text = (FOLDER / name).read_text(encoding="utf-8")
    assert sum(block in text for block in shown) == 1
    assert (FOLDER / "show.sql").read_text().partition("\n")[2] in guide


def test_users_have_lists_of_candidates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["make_data.py", "--folder", str(tmp_path / "data")])
    make_data.main()
    table = pq.read_table(tmp_path / "data" / "users.parquet")
    assert table.schema.names == ["user", "cuisine", "candidates"]
    assert {len(one) for one in table["candidates"].to_pylist()} == {make_data.CANDIDATES}
