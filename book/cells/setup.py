# @title Setup: versions, instruments and eight devices
import importlib.metadata as metadata, importlib.util as util, os, re, subprocess, sys

BOOK = "meshscope @ git+https://github.com/many-devices/one-program@main"
OLDEST = {"jax": "0.10.2", "flax": "0.12.8", "optax": "0.2.8", "orbax-checkpoint": "0.12.4"}
COLAB = ["jax==0.11.2", "jaxlib==0.11.2", "flax==0.12.12", BOOK]  # its numpy fits these


def too_old():
    def number(version):
        return [int(part) for part in re.findall(r"\d+", version)[:4]]
    found = {name: metadata.version(name) for name in OLDEST if util.find_spec(name[:5])}
    return [f"{name} {found.get(name, 'is missing')}, needs {oldest} or later" for name, oldest
            in OLDEST.items() if number(found.get(name, "0")) < number(oldest)]


if "google.colab" in sys.modules and (too_old() or not util.find_spec("meshscope")):
    pip = [sys.executable, "-m", "pip", "-q"]
    subprocess.run(pip + ["install", *COLAB], check=True)
    plugins = [d.name for d in metadata.distributions() if d.name.startswith("jax-cuda")]
    if plugins:  # made for the JAX that was replaced, and not needed on simulated devices
        subprocess.run(pip + ["uninstall", "-y", *plugins], check=True)
if too_old():
    raise RuntimeError(f"Too old for this book: {'; '.join(too_old())}. See the page 'Run it'.")
if "jax" in sys.modules and sys.modules["jax"].__version__ != metadata.version("jax"):
    raise RuntimeError("An older JAX was imported already: restart the runtime, then run all.")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # XLA's notes from C++; errors still show
REAL = os.environ.get("BOOK_DEVICES") == "real"
if not REAL:
    os.environ["JAX_PLATFORMS"] = "cpu"  # eight simulated devices, even beside a GPU
import jax

if not REAL and jax.config.jax_num_cpu_devices != 8:
    jax.config.update("jax_num_cpu_devices", 8)
assert jax.device_count() >= 8, f"need 8 devices, found {jax.device_count()}: restart first"


def on_cpu(claim):
    """Pass a claim about the CPU compiler's own choice; other backends may choose otherwise."""
    return claim if jax.default_backend() == "cpu" else print("CPU only: not checked") or True
