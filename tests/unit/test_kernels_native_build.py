"""Compiling the CPU kernels: once, kept, and never in the way of who has no compiler."""

import os
import platform
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from nightjar.kernels.cache_folder import cache_folder
from nightjar.kernels.native import build
from tests.backends import NARROW_COMPILER, STRICT_COMPILER, require_compiler

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def fake_compiler(tmp_path, monkeypatch):
    """A compiler that writes down each call, then does `body`: by default a library of one
    function, in no time."""
    require_compiler()
    source = tmp_path / "one.cpp"
    source.write_text('extern "C" int answer() { return 42; }')

    def make(body=f'for out; do :; done; exec c++ -shared -fPIC {source} -o "$out"'):
        script = tmp_path / "compiler"
        version = '[ "$1" = --version ] && echo 1 && exit'
        script.write_text("\n".join(("#!/bin/sh", version, f"echo x >> {tmp_path}/calls", body)))
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("CXX", str(script))
        return lambda: len((tmp_path / "calls").read_text().split())

    return make


@pytest.fixture
def fresh():
    """`library` as in a new process."""
    build.library.cache_clear()
    yield
    build.library.cache_clear()


def test_compiled_once_and_found_again(tmp_path, fake_compiler):
    calls = fake_compiler()
    folder = tmp_path / "cache"
    assert build.load(folder).answer() == 42
    assert build.load(folder).answer() == 42
    assert calls() == 1
    assert [path.suffix for path in folder.iterdir()] == [".so"]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_the_real_kernels_compile_without_a_warning(monkeypatch):
    """A library is kept by the compiler, flags and sources that it was made with, and only when
    the compiler was content: one that is there already is proof enough."""
    require_compiler()
    monkeypatch.setenv("CXX", STRICT_COMPILER)
    assert build.load(cache_folder()).attention_tile_rows() in (16, 32)


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="another processor's registers")
def test_the_kernels_of_a_processor_without_avx512(monkeypatch):
    """Registers half as wide, and half as many: the kernels' own tests, compiled for them."""
    require_compiler()
    monkeypatch.setenv("CXX", NARROW_COMPILER)
    build.load(cache_folder())
    environment = os.environ | {"CXX": NARROW_COMPILER, build.SWITCH: "native"}
    parts = "attention", "attend", "float", "layers", "logits", "ops", "sampling", "team"
    tests = [f"tests/unit/test_kernels_{part}.py" for part in parts]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-k",
            "not torch and not int8 and not bfloat16",
            *tests,
        ],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-2000:]
    assert "skipped" not in done.stdout


def test_a_warning_of_the_strict_compiler_is_an_error(tmp_path, monkeypatch):
    require_compiler()
    (tmp_path / "warned.cpp").write_text('extern "C" int answer(int unused) { return 42; }')
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    monkeypatch.setenv("CXX", STRICT_COMPILER)
    with pytest.raises(build.NativeBuildError, match="unused"):
        build.load(tmp_path / "cache")
    monkeypatch.setenv("CXX", "c++")
    assert build.load(tmp_path / "cache").answer(1) == 42


def test_a_library_that_cannot_be_read_is_compiled_again(tmp_path, fake_compiler, caplog):
    calls = fake_compiler()
    build.load(tmp_path / "first")
    (library,) = (tmp_path / "first").iterdir()
    folder = tmp_path / "cache"
    folder.mkdir()
    (folder / library.name).write_bytes(b"not a library")
    assert build.load(folder).answer() == 42
    assert calls() == 2
    assert "compiling" in caplog.text


def test_other_flags_are_another_library(tmp_path, fake_compiler, monkeypatch):
    calls = fake_compiler()
    build.load(tmp_path / "cache")
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-g0"))
    build.load(tmp_path / "cache")
    assert calls() == 2


def test_a_compiler_that_fails_says_why(tmp_path, fake_compiler):
    fake_compiler("echo 'no room' >&2; exit 3")
    with pytest.raises(build.NativeBuildError, match="compiler failed: no room"):
        build.load(tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_no_compiler(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler --fast")
    with pytest.raises(build.NativeBuildError, match=r"no-such-compiler --fast.*install g\+\+"):
        build.load(tmp_path)


def test_where_compiled_kernels_are_kept(tmp_path, monkeypatch):
    monkeypatch.delenv("NIGHTJAR_KERNEL_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder() == tmp_path / "home" / ".cache" / "nightjar" / "kernels"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    assert cache_folder() == tmp_path / "caches" / "nightjar" / "kernels"
    monkeypatch.setenv("NIGHTJAR_KERNEL_CACHE", str(tmp_path / "named"))
    assert cache_folder() == tmp_path / "named"


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(build.NativeBuildError, match="file"):
        build.load(tmp_path / "file" / "cache")


@pytest.mark.usefixtures("fresh")
def test_without_a_compiler_torch_serves_and_a_warning_says_so(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(build.SWITCH, raising=False)
    assert build.library() is None
    assert "no C++ compiler (no-such-compiler)" in caplog.text
    assert "computing with torch, which is slower" in caplog.text


@pytest.mark.usefixtures("fresh")
def test_asked_for_by_name_they_must_be_there(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv(build.SWITCH, "native")
    with pytest.raises(build.NativeBuildError):
        build.library()


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(("value", "refused"), [("torch", False), ("fast", True)])
def test_the_switch(value, refused, monkeypatch):
    monkeypatch.setenv(build.SWITCH, value)
    if refused:
        with pytest.raises(build.NativeBuildError, match="NIGHTJAR_CPU_KERNELS='fast'"):
            build.library()
    else:
        assert build.library() is None


def test_processes_that_start_together_all_get_it(tmp_path, fake_compiler):
    calls = fake_compiler()
    code = (
        "from pathlib import Path; from nightjar.kernels.native.build import load\n"
        f"print(load(Path({str(tmp_path / 'cache')!r})).answer())"
    )
    command = [sys.executable, "-c", code]
    starts = [
        subprocess.Popen(command, cwd=ROOT, env=os.environ, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    found = [process.communicate(timeout=200)[0].strip() for process in starts]
    assert found == ["42", "42"]
    assert calls() >= 1
    assert len(list((tmp_path / "cache").iterdir())) == 1
