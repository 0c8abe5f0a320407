# @title Setup: eight simulated devices
import importlib.util, os, subprocess, sys

SITE = "https://many-devices.github.io/one-program/"
SHA256 = "a820c07dd13b52d310d4f13dd20f56e779bd9c4174112d2718d0ddd06cf01e8a"
wheel = f"{SITE}wheels/{SHA256}/many_devices-0.1.0-py3-none-any.whl#sha256={SHA256}"
if "google.colab" in sys.modules or "KAGGLE_KERNEL_RUN_TYPE" in os.environ:
    pip = [sys.executable, "-m", "pip", "install", "-q"]
    subprocess.run([*pip, f"many_devices[hosted] @ {wheel}"])
if not importlib.util.find_spec("many_devices"):
    how = f'run pip install "many_devices[instruments] @ {wheel}"'
    raise ImportError(f"many_devices is not installed: open this page anew from {SITE}, or {how}")
import many_devices
many_devices.setup()
