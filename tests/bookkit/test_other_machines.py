"""What the book does on machines that are not ours: their CI, containers, scheduled checks."""

import json
import os
import re
import shutil
import subprocess
import sys

import nbformat
import pytest
import yaml

from bookkit.__main__ import VERBS
from toy import ROOT

# Of the book, two pages; the rest is workflows and scripts.

WORKFLOWS = sorted(
    path
    for folder in ("workflows", "examples")
    for path in (ROOT / ".github" / folder).glob("*.yml")
)
PREPARE = ROOT / ".github" / "actions" / "prepare" / "action.yml"
OWN = "./"  # actions and workflows of this repository: the commit is the one that runs


# `pytest --nbmake notebooks/` says what failed, and on what.


def notebook(path, *cells):
    made = [nbformat.v4.new_markdown_cell("# A page"), *map(nbformat.v4.new_code_cell, cells)]
    path.parent.mkdir(exist_ok=True)
    nbformat.write(nbformat.v4.new_notebook(cells=made), path)


def nbmake(folder, *arguments, **environment):
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--nbmake", *arguments],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        encoding="utf-8",
    )
    return done.returncode, done.stdout.split("the chapters on this installation")[-1]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    notebook(tmp_path / "notebooks" / "01-good.ipynb", "x = 1")
    shutil.copyfile(ROOT / "notebooks" / "conftest.py", tmp_path / "notebooks" / "conftest.py")
    return tmp_path


def test_a_failing_chapter_is_told_in_one_line_with_the_versions(folder):
    notebook(folder / "notebooks" / "02-bad.ipynb", "x = 1", "y = 2\nassert x == y, 'not equal'")
    notebook(folder / "notebooks" / "zh-TW" / "02-bad.ipynb", "assert False")
    status, said = nbmake(folder, "notebooks/", GITHUB_ACTIONS="true")
    assert status == 1
    assert "FAILED 02-bad.ipynb, cell 3: AssertionError: not equal\n    assert x == y, 'not" in said
    assert "1 of 2 notebooks passed" in said and "zh-TW" not in said
    assert re.search(r"^Python 3\.\d+\.\d+ \(", said, re.M)
    assert re.search(r"^jax \d.*, jaxlib \d.*, flax \d.*, numpy \d", said, re.M)
    assert re.search(r"^8 cpu devices", said, re.M)
    assert "::error title=chapter failed::02-bad.ipynb, cell 3: AssertionError" in said


def test_a_broken_jax_is_named(folder):
    notebook(folder / "notebooks" / "02-bad.ipynb", "import jax")
    (folder / "broken" / "jax").mkdir(parents=True)
    (folder / "broken" / "jax" / "__init__.py").write_text("raise ImportError('no libxla')\n")
    status, said = nbmake(folder, "notebooks/", PYTHONPATH=str(folder / "broken"))
    assert status == 1 and "02-bad.ipynb, cell 2: ImportError: no libxla\n    import jax" in said
    assert "`import jax` and asking for devices failed: ImportError: no libxla" in said


def test_another_language_runs_when_its_folder_is_named(folder):
    notebook(folder / "notebooks" / "zh-TW" / "02-bad.ipynb", "1 / 0")
    status, said = nbmake(folder, "notebooks/zh-TW")
    assert status == 1 and "FAILED zh-TW/02-bad.ipynb, cell 2: ZeroDivisionError" in said
    status, said = nbmake(folder, "notebooks/")
    assert status == 0 and "1 of 1 notebooks passed" in said


# One issue for each scheduled check.

GH = """#!/bin/sh
echo "gh $*" >> "$LOG"
case "$2" in list) [ -z "$OPEN" ] || echo "$OPEN" ;; create | edit) cat "$(echo "$*" | sed 's/.*--body-file //')" >> "$LOG" ;; esac
"""


@pytest.fixture
def issue(tmp_path):
    (tmp_path / "gh").write_text(GH)
    (tmp_path / "gh").chmod(0o755)
    (tmp_path / "report.txt").write_text("book/reference/run.md:9: https://example.org\n    broken: 404\n")

    def run(outcome, number):
        (tmp_path / "log").write_text("")
        environment = {
            **os.environ,
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "OPEN": number,
            "LOG": str(tmp_path / "log"),
        }
        command = [ROOT / ".ci" / "issue", outcome, "Some links", tmp_path / "report.txt"]
        subprocess.run(command, env=environment, check=True)
        return (tmp_path / "log").read_text()

    return run


def test_a_first_failure_opens_an_issue_with_the_report(issue):
    log = issue("failure", "")
    assert "gh issue create --title Some links" in log and "broken: 404" in log


def test_a_second_failure_rewrites_the_open_issue(issue):
    log = issue("failure", "17")
    assert "gh issue edit 17" in log and "broken: 404" in log and "create" not in log


def test_a_pass_closes_the_open_issue_and_otherwise_does_nothing(issue):
    assert "gh issue close 17" in issue("success", "17")
    assert len(issue("success", "").splitlines()) == 1  # it only looked


# Settings that other programs read.


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_pin_every_action_by_commit_and_ask_for_little(path):
    flow = yaml.safe_load(path.read_text("utf-8"))
    assert flow["permissions"] in ({}, {"contents": "read"})  # a job may ask for more, by name
    for name, job in flow["jobs"].items():
        assert job.get("uses", "").startswith(OWN) or job["timeout-minutes"] > 0, name
    verify_uses(path)


def test_the_preamble_of_jobs_pins_its_actions_and_is_used_everywhere():
    verify_uses(PREPARE)
    for path in WORKFLOWS:
        text = path.read_text("utf-8")
        if path.parent.name == "workflows" and "setup-python" in text:
            assert path.name == "release.yml", (
                f"{path.name}: begin with {PREPARE.relative_to(ROOT)}"
            )


def verify_uses(path):
    uses = re.findall(r"uses: (\S+)(.*)", path.read_text("utf-8"))
    for action, comment in uses:
        if action.startswith(OWN):
            there = ROOT / action
            assert there.exists(), f"{path.name}: {action}"
            continue
        assert re.fullmatch(r"[\w.-]+(?:/[\w.-]+)+@[0-9a-f]{40}", action), action
        assert re.match(r" # v\d+\.\d+\.\d+(?:\s|$)", comment), f"{action}: say which release it is"


def test_each_action_has_one_version_everywhere():
    pins = {}
    for path in [*WORKFLOWS, PREPARE]:
        for action, commit in re.findall(r"uses: ([\w./-]+)@(\w+)", path.read_text("utf-8")):
            pins.setdefault(action, {})[commit] = path.name
    assert {action: names for action, names in pins.items() if len(names) > 1} == {}


def test_what_workflows_call_is_there():
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.M)
    for path in WORKFLOWS:
        if path.parent.name == "examples":
            continue
        text = path.read_text("utf-8")
        for target in re.findall(r"run: make (?:--[a-z-]+ )*([a-z-]+)", text):
            assert target in targets, f"{path.name}: make {target}"
        for script in re.findall(r"(?<![\w/.-])(?:\.ci|bookkit|tests)/[\w./-]+", text):
            assert (ROOT / script).exists(), f"{path.name}: {script}"


def steps_called(name):
    """The steps of .ci/run that a workflow calls, by job."""
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / name).read_text("utf-8"))["jobs"]
    return {
        job: [
            word
            for step in about.get("steps", ())
            for line in re.findall(r"\.ci/run ([a-z -]+)", step.get("run", ""))
            for word in line.split()
        ]
        for job, about in jobs.items()
    }


def steps_of(*which):
    done = subprocess.run(
        [ROOT / ".ci" / "run", "--list", *which], capture_output=True, text=True, check=True
    )
    return done.stdout.split()


def test_there_is_one_ci():
    """The pull-request workflow calls every step of .ci/run, in its order; every night the longer ones run."""
    called = steps_called("ci.yml")
    assert [step for job in called.values() for step in job] == steps_of()
    nightly = {step for job in steps_called("nightly.yml").values() for step in job}
    nightly |= {step for job in steps_called("links.yml").values() for step in job}  # every week
    assert set(steps_of("nightly")) <= nightly <= {*steps_of(), *steps_of("nightly")}


def test_a_step_that_is_not_there_is_refused():
    done = subprocess.run([ROOT / ".ci" / "run", "lint", "tset"], capture_output=True, text=True)
    assert (
        done.returncode == 2
        and "no step tset" in done.stderr
        and "lint" in done.stderr
        and not done.stdout
    )


def test_what_is_published_is_what_ci_built():
    flows = {
        name: yaml.safe_load((ROOT / ".github" / "workflows" / name).read_text("utf-8"))
        for name in ("ci.yml", "publish.yml")
    }
    publish = flows["ci.yml"]["jobs"]["publish"]
    assert publish["uses"] == "./.github/workflows/publish.yml" and set(publish["needs"]) == {
        "book",
        "oldest",
    }
    assert "github.ref == 'refs/heads/main'" in publish["if"] and "push" in publish["if"]
    assert list(flows["publish.yml"][True]) == ["workflow_call"]  # YAML reads `on` as true
    words = json.dumps(flows["publish.yml"])
    assert "make " not in words and "bookkit site" not in words and "deploy-pages" in words


@pytest.mark.skipif(not shutil.which("sh"), reason="no sh")
def test_a_missing_program_is_named_with_its_package(tmp_path):
    """As anybody but root; apt-get is a stand-in that is never to be called."""
    for name, text in {"id": "echo 1000", "apt-get": "touch called"}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    need = [ROOT / ".ci" / "need", "no-such-program", "some-package"]
    done = subprocess.run(
        need,
        cwd=tmp_path,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )
    assert (
        done.returncode == 1
        and "no-such-program was not found" in done.stderr
        and "some-package" in done.stderr
    )
    assert not (tmp_path / "called").exists()
    assert subprocess.run([ROOT / ".ci" / "need", "sh", "none"]).returncode == 0


@pytest.mark.parametrize("works", [True, False])
def test_root_installs_what_is_missing(tmp_path, works):
    install = (
        f"printf '#!/bin/sh\\n' > {tmp_path}/no-such-program && chmod +x {tmp_path}/no-such-program"
        if works
        else "exit 3"
    )
    for name, text in {
        "id": "echo 0",
        "apt-get": f'echo "$*" >> {tmp_path}/log\n[ "$1" = update ] || {{ {install}; }}',
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    need = [ROOT / ".ci" / "need", "no-such-program", "some-package"]
    done = subprocess.run(
        need, env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, capture_output=True, text=True
    )
    assert (done.returncode == 0) == works, done.stderr
    assert "install -qy --no-install-recommends some-package" in (tmp_path / "log").read_text()
    assert works or "could not install the package some-package" in done.stderr


def test_the_hook_checks_what_is_staged_and_fetches_nothing(tmp_path):
    """In a repository whose commands are stand-ins that say how they were called."""
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    hook = [ROOT / ".githooks" / "pre-commit"]
    done = subprocess.run(hook, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1 and "run make venv-test" in done.stderr
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    for name in ("ruff", "codespell", "bookkit"):
        program = tmp_path / ".venv" / "bin" / name
        program.write_text('#!/bin/sh\necho "${0##*/} $*" >> calls\n')
        program.chmod(0o755)
    (tmp_path / "book").mkdir()
    for name, called in (
        ("code.py", []),
        ("book/01-a.md", ["bookkit sync --check", "bookkit lint book/01-a.md"]),
    ):
        (tmp_path / name).write_text("text")
        subprocess.run(["git", "add", name], cwd=tmp_path, check=True)
        (tmp_path / "calls").unlink(missing_ok=True)
        assert subprocess.run(hook, cwd=tmp_path).returncode == 0
        calls = (tmp_path / "calls").read_text().splitlines()
        assert [
            call for call in calls if call.startswith("bookkit")
        ] == called and "codespell " in calls
    (tmp_path / ".venv" / "bin" / "codespell").write_text("#!/bin/sh\nexit 65\n")
    assert subprocess.run(hook, cwd=tmp_path).returncode == 65


def test_containers_and_binder_use_the_pinned_python():
    python = (ROOT / ".python-version").read_text().strip()
    assert (ROOT / "runtime.txt").read_text().strip() == f"python-{python}"
    container = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text("utf-8"))
    assert container["image"].endswith(f":{python}")
    for command in re.findall(r"make ([a-z-]+)", json.dumps(container)):
        assert re.search(rf"^{command}:", (ROOT / "Makefile").read_text("utf-8"), re.M), command
    own = [".", "./bookkit", "./companion"]  # Binder, too
    assert (ROOT / "requirements.txt").read_text().splitlines()[-3:] == own


def test_no_tool_that_runs_on_windows_imports_what_only_posix_has():
    """mypy checks calls; an import at the top of a module would fail before any message."""
    for path in [*ROOT.glob("src/**/*.py"), *ROOT.glob("bookkit/src/**/*.py")]:
        found = re.findall(
            r"^(?:import|from) (?:fcntl|resource|pwd|grp|pty|termios)\b",
            path.read_text("utf-8"),
            re.M,
        )
        assert not found, f"{path.relative_to(ROOT)}: {found}"


def test_what_the_run_page_tells_of_make_and_bookkit_is_there():
    """For Windows, and for machines without make."""
    targets = set(re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text("utf-8"), re.M))
    page = (ROOT / "book" / "reference" / "run.md").read_text("utf-8")
    assert set(re.findall(r"`make ([a-z-]+)`", page)) <= targets
    assert set(re.findall(r"`python -m bookkit ([\w-]+)", page)) <= set(VERBS)


def test_the_page_shows_the_workflow_that_is_checked():
    page = (ROOT / "book" / "reference" / "how-it-is-tested.md").read_text("utf-8")
    [shown] = re.findall(r"```\{literalinclude\} (\S+)", page)
    assert (ROOT / "book" / "reference" / shown).resolve() in WORKFLOWS
