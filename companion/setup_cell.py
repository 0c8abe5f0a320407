# @title Setup: eight simulated devices
import importlib.util, os, subprocess, sys

SITE = "https://many-devices.github.io/one-program/"
SHA256 = "ac70b1a457a034fa194af3680e7e662aa9068ece0fdc584a2ccf9ce707bafe07"
wheel = f"{SITE}wheels/{SHA256}/many_devices-0.1.0-py3-none-any.whl#sha256={SHA256}"
if "google.colab" in sys.modules or "KAGGLE_KERNEL_RUN_TYPE" in os.environ:
    pip = [sys.executable, "-m", "pip", "install", "-q"]
    subprocess.run([*pip, f"many_devices[hosted] @ {wheel}"])
if not importlib.util.find_spec("many_devices"):
    how = f'run pip install "many_devices[instruments] @ {wheel}"'
    raise ImportError(f"many_devices is not installed: open this page anew from {SITE}, or {how}")
import many_devices
many_devices.setup()
