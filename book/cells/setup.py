# @title Setup: versions, instruments, eight devices
import importlib, importlib.metadata as metadata, os, re, subprocess, sys

BOOK = "meshscope @ git+https://github.com/many-devices/one-program@main"
COLAB = ["jax==0.11.2", "jaxlib==0.11.2", "flax==0.12.12", BOOK]  # keep its numpy
OLDEST = {"jax": "0.10.2", "flax": "0.12.8", "optax": "0.2.8",
          "orbax-checkpoint": "0.12.4", "meshscope": "0.1"}

def too_old():
    def found(name):
        hits = [d.version for d in metadata.distributions(name=name)]
        return hits[0] if hits else "none"
    def number(version):
        return [int(part) for part in re.findall(r"\d+", version)]
    return [f"{name} {found(name)} (needs {oldest})" for name, oldest in OLDEST.items()
            if number(found(name)) < number(oldest)]

if "google.colab" in sys.modules and too_old():
    pip = [sys.executable, "-m", "pip", "-q"]
    subprocess.run([*pip, "install", *COLAB], check=True)
    names = [str(package.name) for package in metadata.distributions()]
    if gpu := [name for name in names if name.startswith("jax-cuda")]:
        subprocess.run([*pip, "uninstall", "-y", *gpu], check=True)  # fit the old JAX
    importlib.invalidate_caches()
assert not too_old(), f"Install, then restart: {', '.join(too_old())}"
REAL = os.environ.get("BOOK_DEVICES") == "real"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # C++ notes; errors still show
CPU = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8", "NPROC": "16"}
os.environ.update({} if REAL else CPU)  # 16 threads: 8 to 12 can deadlock on jax 0.10
import jax
clean = jax.__version__ == metadata.version("jax")  # not imported before the install
assert clean, f"JAX {jax.__version__} is loaded: restart the runtime, then run all"
found = f"{len(jax.devices())} {jax.default_backend()} devices"
assert REAL or found == "8 cpu devices", f"{found}: restart the runtime, then run all"
assert len(jax.devices()) >= 8, f"this book needs 8 devices, BOOK_DEVICES=real: {found}"

def on_cpu(claim):
    """A claim about the CPU compiler's own choice: elsewhere, printed as unchecked."""
    return claim if jax.default_backend() == "cpu" else print("not checked") is None
print(f"jax {jax.__version__}, flax {metadata.version('flax')}, {found}")
