"""many_devices.setup() makes eight devices, or says in one sentence what to do."""

import os
import subprocess
import sys
import textwrap

import pytest

from many_devices import _setup


def run(program, **environment):
    """(exit status, what it printed) of a program in a process of its own."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("JAX", "XLA", "TF_", "BOOK_"))
    }
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        env=kept | environment,
        timeout=120,
    )
    return done.returncode, done.stdout + done.stderr


SETUP = "import many_devices; many_devices.setup()\n"


def test_eight_simulated_devices_beside_any_other_settings():
    """A GPU's settings, or another number of devices, do not change what the book shows."""
    status, printed = run(SETUP, JAX_PLATFORMS="cuda,cpu", JAX_NUM_CPU_DEVICES="3")
    assert status == 0 and "8 cpu devices" in printed and "Warning" not in printed


def test_it_runs_twice():
    status, printed = run(SETUP + SETUP)
    assert status == 0 and printed.count("8 cpu devices") == 2


def test_jax_may_have_been_imported_but_not_used():
    status, printed = run("import jax\n" + SETUP)
    assert status == 0 and "8 cpu devices" in printed


def test_jax_was_used_before():
    status, printed = run("import jax; jax.devices()\n" + SETUP)
    assert status == 1
    assert printed.splitlines()[-1] == (
        "RuntimeError: 1 cpu devices, not 8 cpu devices: restart the runtime, then run all cells"
    )


def test_jax_was_imported_before_another_release_was_installed():
    status, printed = run("import jax; jax.__version__ = '0.7.2'\n" + SETUP)
    assert status == 1
    assert printed.splitlines()[-1].startswith(
        "RuntimeError: JAX 0.7.2 was imported before the installation of "
    )
    assert printed.splitlines()[-1].endswith("restart the runtime, then run all cells")


def test_real_devices_are_those_of_this_machine():
    program = (
        SETUP + "import jax; print(len(jax.devices()), jax.config.jax_default_matmul_precision)"
    )
    status, printed = run(
        program, BOOK_DEVICES="real", JAX_PLATFORMS="cpu", JAX_NUM_CPU_DEVICES="9"
    )
    assert status == 0 and "9 highest" in printed
    status, printed = run(
        program, BOOK_DEVICES="real", JAX_PLATFORMS="cpu", JAX_NUM_CPU_DEVICES="2"
    )
    assert status == 1 and printed.splitlines()[-1] == (
        "RuntimeError: 2 cpu devices, not 8: only the quick start and train.py run on fewer"
    )


class Installed:
    """Stands for importlib.metadata: what seems to be installed."""

    def __init__(self, **versions):
        self.versions = {name.replace("_", "-"): number for name, number in versions.items()}

    def distributions(self, name=None):
        for known, number in self.versions.items():
            if name in (None, known):
                yield type("Distribution", (), {"version": number, "name": known})


FINE = {name.replace("-", "_"): oldest for name, oldest in _setup.OLDEST.items()}


@pytest.mark.parametrize(
    "name, version", [("jax", "0.7.2"), ("flax", "0.11.2"), ("flax", "0.12.7"), ("jax", "0.10.1")]
)
def test_releases_that_ignore_out_sharding_are_too_old(monkeypatch, name, version):
    """The sentence names the package, its version and the oldest that will do."""
    monkeypatch.setattr(_setup, "metadata", Installed(**FINE | {name: version}))
    oldest = _setup.OLDEST[name]
    with pytest.raises(RuntimeError) as refused:
        _setup.setup()
    assert str(refused.value) == f"Install, then restart: {name} {version} (needs {oldest})"


def test_numbers_of_releases_are_compared_as_numbers(monkeypatch):
    monkeypatch.setattr(_setup, "metadata", Installed(**FINE | {"flax": "0.13.0", "optax": "0.10"}))
    assert _setup.too_old() == []


def test_a_missing_package_is_named(monkeypatch):
    versions = {name: number for name, number in FINE.items() if name != "meshscope"}
    monkeypatch.setattr(_setup, "metadata", Installed(**versions))
    assert _setup.too_old() == ["meshscope none (needs 0.1)"]


def test_gpu_plugins_that_no_longer_fit_are_uninstalled(monkeypatch):
    """They fit the JAX that Colab came with, and would break another."""
    monkeypatch.setattr(
        _setup, "metadata", Installed(jax_cuda12_plugin="0.7.2", jax_cuda12_pjrt="0.7.2", numpy="2")
    )
    commands = []
    monkeypatch.setattr(_setup.subprocess, "run", lambda command, check: commands.append(command))
    _setup.remove_gpu_plugins()
    assert [command[-2:] for command in commands] == [["jax-cuda12-plugin", "jax-cuda12-pjrt"]]
    assert "uninstall" in commands[0]
