"""The wheel holds exactly the source folders, and works without anything else of this repository."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from collections.abc import Sequence
from importlib.metadata import distributions
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
SETUPTOOLS = PROJECT["tool"]["setuptools"]
FOLDERS: dict[str, str] = SETUPTOOLS["package-dir"]

# Whoever imports understudy pays for these only when they are used.
LAZY = ("apsw", "hypothesis", "peewee", "pykka")


def test_every_listed_package_has_its_folder() -> None:
    folders = [ROOT / folder for folder in FOLDERS.values()]

    assert sorted(SETUPTOOLS["packages"]) == sorted(FOLDERS)
    assert [str(folder) for folder in folders if not (folder / "__init__.py").is_file()] == []


def test_every_folder_with_modules_is_a_listed_package(sources: Sequence[PurePosixPath]) -> None:
    with_modules = {str(source.parent) for source in packaged(sources) if source.suffix == ".py"}

    assert sorted(with_modules) == sorted(FOLDERS.values())


def test_a_build_without_isolation_finds_its_requirements_among_the_development_ones() -> None:
    development = PROJECT["project"]["optional-dependencies"]["dev"]

    assert [needed for needed in PROJECT["build-system"]["requires"] if needed not in development] == []


@pytest.mark.slow
def test_the_wheel_holds_exactly_the_files_of_the_source_folders(wheel: Path, sources: Sequence[PurePosixPath]) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = [name for name in archive.namelist() if ".dist-info/" not in name]

    assert sorted(held) == sorted(installed_name(source) for source in packaged(sources))


@pytest.mark.slow
@pytest.mark.parametrize("group", ["package", "pytest11"])
def test_an_import_loads_neither_the_store_nor_the_actors(installed: Path, tmp_path: Path, group: str) -> None:
    module = "understudy" if group == "package" else entry_point(installed, group)
    script = f"import sys, {module}; print({module}.__file__, *[name for name in {LAZY} if name in sys.modules])"

    origin, *loaded = python(installed, "-c", script, cwd=tmp_path).split()

    assert Path(origin).is_relative_to(installed)
    assert loaded == []


@pytest.mark.slow
def test_the_command_explains_itself(installed: Path, tmp_path: Path) -> None:
    printed = python(installed, str(installed / "bin" / "understudy"), "--help", cwd=tmp_path)

    assert "demo" in printed


@pytest.mark.slow
def test_a_users_test_gets_the_rehearsal_fixture_by_its_name(installed: Path, tmp_path: Path) -> None:
    user_test = tmp_path / "test_of_a_user.py"
    user_test.write_text("def test_it(rehearsal): assert type(rehearsal).__module__.startswith('understudy.')\n")

    printed = python(installed, "-m", "pytest", "-p", "no:cacheprovider", str(user_test), cwd=tmp_path)

    assert "1 passed" in printed


@pytest.fixture(scope="module")
def sources() -> list[PurePosixPath]:
    """What a commit of this moment would hold: tracked or new, not ignored, and not deleted."""
    listed = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT)
    return [PurePosixPath(name) for name in listed.split("\0") if name and (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def wheel(sources: Sequence[PurePosixPath], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a clean copy, because deleted modules live on in a `build` folder and would be packed again."""
    copy = tmp_path_factory.mktemp("copy")
    for source in sources:
        (copy / source).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / source, copy / source)
    run(sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", "dist", cwd=copy)
    (built,) = (copy / "dist").glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("installed")
    pip = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index", "--no-deps")
    run(sys.executable, *pip, "--target", str(target), str(wheel), cwd=target)
    return target


def packaged(sources: Sequence[PurePosixPath]) -> list[PurePosixPath]:
    tops = {PurePosixPath(folder).parts[0] for folder in FOLDERS.values()}
    return [source for source in sources if source.parts[0] in tops]


def installed_name(source: PurePosixPath) -> str:
    tops = {folder: package for package, folder in FOLDERS.items() if "/" not in folder}
    return "/".join([*tops[source.parts[0]].split("."), *source.parts[1:]])


def entry_point(installed: Path, group: str) -> str:
    (distribution,) = distributions(path=[str(installed)])
    (found,) = distribution.entry_points.select(group=group)
    return found.module


def python(installed: Path, *arguments: str, cwd: Path) -> str:
    """Run Python with the wheel and its dependencies but without this repository.

    `-S` leaves out the finder of the editable install, which would lend the wheel every subpackage that it lacks.
    """
    search = [str(installed), *{sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}]
    return run(sys.executable, "-S", *arguments, cwd=cwd, PYTHONPATH=os.pathsep.join(search))


def run(*command: str, cwd: Path, **variables: str) -> str:
    # Git's own variables, set inside hooks, would point to another repository; Python's would bring this checkout back.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("GIT_", "PYTHON", "PYTEST"))}
    ran = subprocess.run(command, cwd=cwd, env=inherited | variables, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, f"{' '.join(command)}\n{ran.stdout}\n{ran.stderr}"
    return ran.stdout
