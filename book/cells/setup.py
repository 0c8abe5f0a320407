# @title Setup: versions, instruments, eight devices
import importlib, importlib.metadata as metadata, os, re, subprocess, sys
SITE = "https://many-devices.github.io/one-program/"
WHEEL = SITE + "wheels/meshscope-0.1.0-py3-none-any.whl"
SHA256 = "6b19dea17487f9f940fd0ad6b481adecb7bc0415b3dad45ec5b5caa112734f59"
COLAB = ["jax==0.11.2", "jaxlib==0.11.2", "flax==0.12.12",  # keep its numpy
         f"meshscope @ {WHEEL}#sha256={SHA256}"]  # and no other
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
    done = subprocess.run([*pip, "install", *COLAB], capture_output=True, text=True)
    print(f"meshscope comes from {WHEEL}\n{done.stderr}".strip())
    assert done.returncode == 0, "Nothing was installed: " + (
        f"{WHEEL} is not the wheel that this notebook was made with. Open it anew from "
        f"{SITE}, an hour later if the site was just changing, or report it."
        if "HASHES" in done.stderr else "mend what pip says above, then run all again.")
    names = [str(package.name) for package in metadata.distributions()]
    if gpu := [name for name in names if name.startswith("jax-cuda")]:
        subprocess.run([*pip, "uninstall", "-y", *gpu], check=True)  # fit the old JAX
    importlib.invalidate_caches()
assert not too_old(), f"Install, then restart: {', '.join(too_old())}"
REAL = os.environ.get("BOOK_DEVICES") == "real"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # C++ notes; errors still show
CPU = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8",
       "NPROC": "16"}  # 16 threads: 8 to 12 can deadlock on jax 0.10
os.environ.update({"JAX_DEFAULT_MATMUL_PRECISION": "highest"} if REAL else CPU)
import jax
clean = jax.__version__ == metadata.version("jax")  # not imported before the install
assert clean, f"JAX {jax.__version__} is loaded: restart the runtime, then run all"
found = f"{len(jax.devices())} {jax.default_backend()} devices"
assert REAL or found == "8 cpu devices", f"{found}: restart the runtime, then run all"
assert len(jax.devices()) >= 8, f"{found}, not 8: only the quick start and train.py run"

def on_cpu(claim):
    """A claim about the CPU compiler's own choice: elsewhere, printed as unchecked."""
    return claim if jax.default_backend() == "cpu" else print("not checked") is None
print(f"jax {jax.__version__}, flax {metadata.version('flax')}, {found}")
