"""The seeded bugs fit today's code, and `tests/mutants/run.py` tells found ones from those that got away."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MUTANTS = ROOT / "tests" / "mutants"
PATCHES = sorted(MUTANTS.glob("*.patch"))
PATCH = """\
# what: a failed attempt is tried once more than its policy says
# finds: I15
--- a/model/retry.py
+++ b/model/retry.py
@@ -1,1 +1,1 @@
-        return tries >= self.attempts or any(name in self.never for name in types)
+        return tries > self.attempts or any(name in self.never for name in types)
"""
FINDS = """
import inspect, sys
from understudy.model.retry import Backoff
if "tries > self.attempts" in inspect.getsource(Backoff):
    print("found after {seeds} seeds: I15 one try too many [of 3]")
    sys.exit(1)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with one seeded bug, whose line has moved since it was planted."""
    (tmp_path / "one-try-more.patch").write_text(PATCH, encoding="utf-8")
    return tmp_path


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, MUTANTS / "run.py", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment())


def environment() -> dict[str, str]:
    return {"PATH": "", "PYTHONPATH": ":".join(filter(None, sys.path)), "COLUMNS": "300"}


def hunted(folder: Path, source: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """What comes of a hunt with a hunter of our own, who is a script."""
    script = folder / "hunter.py"
    script.write_text(source.replace("{seeds}", "7"), encoding="utf-8")
    return run("--patches", folder, "--command", f"python {script}", *arguments)


# --- the seeded bugs --------------------------------------------------------------------------------------------------


def test_there_are_enough_seeded_bugs() -> None:
    assert len(PATCHES) >= 25


@pytest.mark.parametrize("patch", PATCHES, ids=[patch.stem for patch in PATCHES])
def test_a_seeded_bug_says_what_is_wrong_and_which_invariant_finds_it(patch: Path) -> None:
    what, finds, *_ = patch.read_text(encoding="utf-8").splitlines()

    assert re.fullmatch(r"# what: \S.{15,}", what)
    assert re.fullmatch(r"# finds: I\d+(, I\d+)*", finds)


@pytest.mark.parametrize("patch", PATCHES, ids=[patch.stem for patch in PATCHES])
def test_a_seeded_bug_is_a_small_change_below_the_programs_that_people_see(patch: Path) -> None:
    lines = patch.read_text(encoding="utf-8").splitlines()
    files = {line.removeprefix("+++ b/").split("/")[0] for line in lines if line.startswith("+++ ")}
    changed = [line for line in lines if line[:1] in "+-" and line[:3] not in ("+++", "---")]

    assert files <= {"model", "store", "actors", "api"}
    assert 1 <= len(changed) <= 6


def test_every_seeded_bug_applies_to_the_code_and_leaves_it_importable() -> None:
    checked = run("--check")

    assert f"{len(PATCHES)} of {len(PATCHES)} mutants apply" in checked.stdout
    assert checked.returncode == 0


# --- checking ---------------------------------------------------------------------------------------------------------


def test_a_patch_of_which_only_the_place_has_changed_still_applies(folder: Path) -> None:
    checked = run("--patches", folder, "--check")

    assert (checked.returncode, checked.stdout) == (0, "1 of 1 mutants apply and can be imported\n")


def test_a_patch_whose_lines_are_no_longer_there_is_shown(folder: Path) -> None:
    (folder / "stray.patch").write_text(PATCH.replace("-        return tries", "-        return attempts"))

    checked = run("--patches", folder, "--check")

    assert "stray: model/retry.py has no such lines any more" in checked.stdout
    assert checked.returncode == 1


def test_a_patch_that_breaks_the_import_is_shown(folder: Path) -> None:
    (folder / "loud.patch").write_text(
        "# what: the module cannot even be imported\n# finds: I1\n--- a/model/retry.py\n+++ b/model/retry.py\n"
        "@@ -1,1 +1,1 @@\n-ONCE = Backoff()\n+ONCE = Backon()\n"
    )

    checked = run("--patches", folder, "--check")

    assert "loud: cannot be imported (NameError" in checked.stdout
    assert checked.returncode == 1


@pytest.mark.parametrize("said", ["# what: ", "# finds: "])
def test_a_patch_without_a_description_is_refused(folder: Path, said: str) -> None:
    (folder / "silent.patch").write_text(PATCH.replace(said, "# "))

    checked = run("--patches", folder, "--check")

    assert "silent: the patch does not say" in checked.stdout
    assert checked.returncode == 2


# --- hunting ----------------------------------------------------------------------------------------------------------


def test_a_bug_that_is_found_is_shown_with_its_seed_and_its_violation(folder: Path) -> None:
    result = hunted(folder, FINDS)

    assert "7: I15 one try too many [of 3]" in result.stdout
    assert "1 found; not as it should be: 0" in result.stdout
    assert result.returncode == 0


def test_the_repository_itself_stays_as_it_is(folder: Path) -> None:
    before = (ROOT / "model" / "retry.py").read_bytes()

    hunted(folder, FINDS)

    assert (ROOT / "model" / "retry.py").read_bytes() == before


def test_a_bug_that_is_not_found_has_survived(folder: Path) -> None:
    result = hunted(folder, "print('500 seeds are clean')")

    assert "0 found; not as it should be: 1 one-try-more" in result.stdout
    assert result.returncode == 1


def test_a_hunter_that_finds_the_same_in_the_unchanged_code_is_not_believed(folder: Path) -> None:
    result = hunted(folder, "print('found after 3 seeds: I1 everywhere'); raise SystemExit(1)")

    assert "void (the unchanged code fails too) 3: I1 everywhere" in result.stdout
    assert "0 found; not as it should be: 2 (unchanged), one-try-more" in result.stdout
    assert result.returncode == 1


def test_what_is_found_by_a_seed_at_which_the_unchanged_code_is_clean_is_believed(folder: Path) -> None:
    everywhere = "print('found after 8 seeds: I1 everywhere'); raise SystemExit(1)"

    result = hunted(folder, FINDS + everywhere)

    assert "7: I15 one try too many [of 3]" in result.stdout
    assert "1 found; not as it should be: 1 (unchanged)" in result.stdout
    assert result.returncode == 1


@pytest.mark.parametrize("source", ["raise RuntimeError('found after 1 seeds: nothing')", "raise SystemExit(2)"])
def test_a_hunter_that_breaks_has_found_nothing(folder: Path, source: str) -> None:
    result = hunted(folder, source, "--only", "one-try-more")

    assert "broken exit code" in result.stdout
    assert result.returncode == 1


def test_a_hunter_that_hangs_is_ended_and_has_found_nothing(folder: Path) -> None:
    source = "import threading; print('found after 1 seeds: I1', flush=True); threading.Event().wait()"

    result = hunted(folder, source, "--only", "one-try-more", "--limit", "0.5")

    assert "hung the hunt had not ended after 0.5 s" in result.stdout
    assert result.returncode == 1


def test_a_patch_that_does_not_apply_stops_everything_before_the_first_hunt(folder: Path) -> None:
    (folder / "stray.patch").write_text(PATCH.replace("-        return tries", "-        return attempts"))

    result = hunted(folder, FINDS)

    assert "found" not in result.stdout
    assert result.returncode == 2


def test_a_name_that_no_seeded_bug_has_is_refused(folder: Path) -> None:
    result = run("--patches", folder, "--only", "nobody")

    assert "there is no mutant 'nobody'" in result.stdout
    assert result.returncode == 2
