"""What people see of a run: progress bar, log, metrics.csv, TensorBoard, and a profile."""

import argparse
import contextlib
import csv
import importlib
import logging
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from endings import LIBRARIES, Failed
from locks import writing_to
from strategies import Refused

log = logging.getLogger("train")

# Dense bfloat16 FLOP/s of one device, by a part of its name in JAX. From the data sheets:
# https://cloud.google.com/tpu/docs/system-architecture-tpu-vm and https://www.nvidia.com/data-center
PEAKS = {
    "TPU v4": 275e12, "TPU v5 lite": 197e12, "TPU v5e": 197e12, "TPU v5p": 459e12,
    "TPU v5": 459e12, "TPU v6": 918e12, "A100": 312e12, "H100 PCIe": 756e12, "H100": 989e12,
    "H200": 989e12, "B200": 2250e12,
}  # fmt: skip


def peak_flops(device: Any) -> float | None:
    """FLOP/s that this device can reach in bfloat16; None where nobody has written it down."""
    found = [flops for name, flops in PEAKS.items() if name in device.device_kind]
    return found[0] if found else None


class Clock:
    """Tokens per second while it trains: not while it compiles, tests or saves."""

    def __init__(self, tokens_per_step: int, flops_per_token: float, precision: str):
        self.tokens_per_step, self.flops_per_token = tokens_per_step, flops_per_token
        peak = peak_flops(jax.devices()[0]) if precision == "bfloat16" else None
        self.peak = peak * jax.device_count() if peak else None
        self.start()

    def start(self) -> None:
        """Begin a new window."""
        self.steps, self.since = 0, time.perf_counter()

    @contextlib.contextmanager
    def outside(self) -> Iterator[None]:
        """What happens inside of this does not count."""
        began = time.perf_counter()
        yield
        self.since += time.perf_counter() - began

    def speed(self) -> dict[str, float]:
        """Of the window so far. All its steps must have ended."""
        seconds = time.perf_counter() - self.since
        tokens = self.steps * self.tokens_per_step / max(seconds, 1e-9)
        row = {"tokens_per_second": round(tokens, 1)}
        if self.peak:
            row["mfu"] = round(tokens * self.flops_per_token / self.peak, 4)
        return row


class Window:
    """Losses and norms since the last row of metrics, on the devices until somebody asks."""

    def __init__(self, step: int):
        self.step = step
        self.values: list[tuple[Any, Any]] = []  # a loss and a norm of each step

    def add(self, loss: Any, norm: Any) -> None:
        self.values.append((loss, norm))

    def close(self) -> dict[str, float]:
        """The mean loss, and the last norm. Fails at the first step that has no finite loss."""
        losses, norms = np.asarray(jax.device_get(self.values), "float64").T
        bad = ~np.isfinite(losses + norms)
        if bad.any():
            first = int(bad.argmax())
            what, value = "loss", losses[first]
            if math.isfinite(value):
                what, value = "gradient's norm", norms[first]
            raise Failed(
                f"the {what} is {value} at step {self.step + first + 1}, which was not saved: "
                "start over, in other --checkpoints, with a smaller --learning-rate or more "
                "--warm-up"
            )
        self.step += len(self.values)
        self.values.clear()
        return {"loss": float(losses.mean()), "gradient_norm": float(norms[-1])}


def peak_bytes(compiled: int) -> int:
    """The most that this process's fullest device has held; of a CPU, what the step asks for."""
    known = [device.memory_stats() for device in jax.local_devices()]
    return (
        max((stats.get("peak_bytes_in_use", 0) for stats in known if stats), default=0) or compiled
    )


class Metrics:
    """metrics.csv: a row for each step that is logged, once and in order, whatever was killed."""

    FIELDS = ("step", "epoch", "loss", "gradient_norm", "learning_rate", "tokens_per_second",
              "mfu", "bytes_per_device", "peak_bytes", "test_loss")  # fmt: skip

    def __init__(self, path: Path | None, step: int, board: Any = None):
        """Rows of later steps are dropped: those steps are taken again. None writes nothing."""
        self.path, self.board = path, board
        if path is None:
            return
        with writing_to(path, "--logs"):
            rows = list(csv.DictReader(path.read_text().splitlines())) if path.exists() else []
            whole = [row for row in rows if None not in row.values() and None not in row]
            fresh = path.with_suffix(".new")
            with fresh.open("w", newline="") as file:
                writer = csv.DictWriter(file, self.FIELDS, extrasaction="ignore")
                writer.writeheader()
                writer.writerows(row for row in whole if int(row["step"]) <= step)
            os.replace(fresh, path)

    def write(self, row: dict[str, Any]) -> None:
        """Before the step is saved, so that a saved step never lacks its row."""
        if self.path is not None:
            with self.path.open("a", newline="") as file:
                csv.DictWriter(file, self.FIELDS).writerow(row)
            if self.board:
                for name in row.keys() - {"step"}:
                    self.board.add_scalar(name, row[name], row["step"])


def board_module(asked: bool) -> Any:
    """What writes for TensorBoard, if it is asked for and installed."""
    for name in ("tensorboardX", "torch.utils.tensorboard") if asked else ():
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    if asked:
        raise Refused("--tensorboard needs tensorboardX: install it, or leave the flag out")
    return None


def open_board(asked: bool, folder: Path) -> Any:
    """A writer for TensorBoard, on process 0."""
    module = board_module(asked and jax.process_index() == 0)
    return module.SummaryWriter(str(folder / "tensorboard")) if module else None


def report(bar: tqdm, row: dict[str, Any]) -> None:
    """In the progress bar; as a line of the log where there is no bar, and after each test."""
    shown = f"loss {row['loss']:.3f}, norm {row['gradient_norm']:.2f}, "
    shown += f"{row['tokens_per_second']:,.0f} tokens/s, "
    shown += f"MFU {row['mfu']:.1%}, " if "mfu" in row else ""
    shown += f"{row['bytes_per_device'] / 1e6:.2f} MB per device"
    shown += f", peak {row['peak_bytes'] / 1e6:,.0f} MB"
    bar.set_postfix_str(shown)
    if "test_loss" in row:
        shown += f"; test loss {row['test_loss']:.3f}"
    if "test_loss" in row or bar.disable:
        log.info(f"step {row['step']} of {bar.total}: {shown}")


def open_log(folder: Path) -> Path | None:
    """Log to the terminal and train.log. Returns where metrics go: None but for process 0."""
    handlers: list[logging.Handler] = [logging.StreamHandler()]
    if jax.process_index() == 0:
        with writing_to(folder, "--logs"):
            handlers.append(logging.FileHandler(folder / "train.log"))
        log.setLevel(logging.INFO)  # other loggers, and other processes, say warnings only
        for name in LIBRARIES:
            logging.getLogger(name).addHandler(handlers[-1])
    logging.basicConfig(format="%(asctime)s %(message)s", handlers=handlers, force=True)
    return folder / "metrics.csv" if jax.process_index() == 0 else None


class Profile:
    """A trace of some steps, on one process: the fifth of this start is the first of them."""

    def __init__(self, args: argparse.Namespace, folder: Path):
        mine = args.profile and jax.process_index() == args.profile_process
        self.left, self.wait, self.folder = (args.profile if mine else 0), 4, folder / "profile"
        self.running = False

    def before(self) -> None:
        """Before a step."""
        if self.left and self.wait == 0 and not self.running:
            jax.profiler.start_trace(str(self.folder))
            self.running = True
        self.wait = max(self.wait - 1, 0)

    def after(self, result: jax.Array) -> None:
        """After a step, which the trace must not lose."""
        if self.running:
            self.left -= 1
            if self.left == 0:
                result.block_until_ready()
                self.stop()

    def stop(self) -> None:
        if self.running:
            jax.profiler.stop_trace()
            self.running = False
            log.warning(f"a trace is in {self.folder}: examples/README.md says how to read it")
