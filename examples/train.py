"""Train the book's model on handwritten digits, on any number of devices; kill it, and go on.

    python examples/train.py --cpu-devices 8 --strategy fsdp

Run the same command again after a crash, a kill or a preemption: it goes on from the newest
complete checkpoint, with the same bits on the same mesh, to rounding on another. One run at a time
uses a folder of checkpoints: a second one is refused (examples/checkpoints.py).

On several machines a launcher starts it once for each: see examples/launch. All processes together
go on where they were stopped, also with another number of processes.

--help lists the exit statuses.
"""

import argparse
import contextlib
import csv
import faulthandler
import functools
import itertools
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh
from orbax.checkpoint import v1 as ocp
from sklearn import datasets
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

import checkpoints
import endings
import model as models
from endings import (
    FAILED,
    FINISHED,
    INTERRUPTED,
    LIBRARIES,
    REFUSED,
    STOPPED,
    Failed,
    StopRequests,
    agreed,
    leave,
    quiet_libraries,
)
from model import Batch, P, Refused, Run

TRAIN_ROWS = 1437  # of 1,797; the other 360 are the test
log = logging.getLogger("train")

# ---- what is asked for ----------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(REFUSED, f"{self.prog}: {message}; --help lists what there is\n")


def positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return int(text)


def folder(text: str) -> str:
    if not text.strip():
        raise argparse.ArgumentTypeError("the name is empty, as of a variable that is not set")
    return text


def parse(argv: list[str] | None) -> argparse.Namespace:
    strategies = "\n".join(f"  {key:15}{it.says}" for key, it in models.STRATEGIES.items())
    statuses = "\n".join(f"  {status:<5}{says}" for status, says in endings.STATUSES.items())
    parser = Parser(
        prog="train.py",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=(__doc__ or "").splitlines()[0],
        epilog=f"strategies:\n{strategies}\n\nexit status:\n{statuses}\n\n"
        "No checkpoint is lost in any of these ways, nor if the process is killed.",
    )
    # fmt: off
    add = parser.add_argument_group("where it runs: may differ at each start").add_argument
    add("--strategy", choices=models.STRATEGIES, default="data-parallel", metavar="NAME",
        help="see below (%(default)s)")
    add("--data", type=positive, metavar="N", help="devices that split the batch (the rest)")
    add("--model", type=positive, metavar="N", help="devices that split weights (by strategy)")
    add("--cpu-devices", type=positive, metavar="N", help="simulate N devices on the CPU")
    add("--remat", action="store_true", help="less memory: compute layers again in backward")

    add = parser.add_argument_group("several processes: each is started with this").add_argument
    add("--processes", type=positive, metavar="N",
        help="refuse to train with any other number of processes (1)")
    add("--devices", type=positive, metavar="N", help="the same, of devices in all processes")
    add("--coordinator", metavar="HOST:PORT",
        help="where process 0 listens; without it JAX asks SLURM, MPI, Kubernetes or the TPU")
    add("--process", type=int, metavar="I", help="which of them this is, with --coordinator")
    add("--heartbeat", type=positive, default=100, metavar="SECONDS",
        help="without one for so long, a process counts as dead, and all end (%(default)s)")
    add("--watchdog", type=positive, metavar="SECONDS",
        help="if a step takes longer, say where it hangs and end")

    add = parser.add_argument_group("what it computes: the same at each start").add_argument
    add("--L", type=positive, default=4, metavar="N", help="layers (%(default)s)")
    add("--D", type=positive, default=96, metavar="N", help="model width (%(default)s)")
    add("--F", type=positive, default=384, metavar="N", help="hidden width (%(default)s)")
    add("--batch", type=positive, default=64, metavar="ROWS", help="over all devices (%(default)s)")
    add("--precision", choices=["float32", "bfloat16"], default="float32",
        help="of the computation; weights and moments stay float32 (%(default)s)")
    add("--learning-rate", type=float, default=1e-3, metavar="X", help="of AdamW (%(default)s)")
    add("--noise", type=float, default=0.1, metavar="X",
        help="added to each training image (%(default)s)")
    add("--seed", type=int, default=0, metavar="N",
        help="of weights, order and noise (%(default)s)")

    add = parser.add_argument_group("how long, and what is written").add_argument
    add("--epochs", type=positive, default=8, metavar="N",
        help="times through the training images (%(default)s)")
    add("--steps", type=positive, metavar="N", help="instead of --epochs")
    add("--checkpoints", type=folder, default="runs/digits", metavar="DIR",
        help="a folder, or gs://…, where nothing keeps a second run out (%(default)s)")
    add("--save-every", type=positive, default=50, metavar="STEPS",
        help="from one checkpoint to the next (%(default)s); the end is saved as well")
    add("--keep", type=positive, default=3, metavar="N",
        help="newest checkpoints that stay (%(default)s)")
    add("--skip-damaged", action="store_true",
        help="rename damaged checkpoints, and go on from the newest that is whole")
    add("--take-over", metavar="HOST",
        help="use the folder although a run on that host, which has ended, left its lock there")
    add("--logs", type=folder, metavar="DIR",
        help="for metrics.csv and train.log (CHECKPOINTS-logs)")
    add("--log-every", type=positive, default=10, metavar="STEPS",
        help="from row to row of metrics.csv (%(default)s)")
    add("--evaluate-every", type=positive, metavar="STEPS",
        help="from test to test (an epoch)")
    # fmt: on
    return parser.parse_args(argv)


def check_processes(args: argparse.Namespace) -> None:
    """Refuse what would train alone: several such runs would do the same, in one folder."""
    if args.coordinator is not None or args.process is not None:
        if args.processes is None:
            given = "--process" if args.coordinator is None else "--coordinator"
            raise Refused(
                f"{given} without --processes would train alone: say with --processes how many "
                "there are"
            )
        if args.coordinator is None:
            raise Refused(f"--process {args.process} needs --coordinator HOST:PORT, of process 0")
        host, _, port = args.coordinator.rpartition(":")
        if not (host and port.isdecimal() and 0 < int(port) < 65536):
            raise Refused(
                f"--coordinator {args.coordinator} is not HOST:PORT: give both, as in gpu1:8476"
            )
        if args.process is not None and not 0 <= args.process < args.processes:
            raise Refused(
                f"--process {args.process} is not one of {args.processes}: count from 0 to "
                f"{args.processes - 1}"
            )


def config_of(args: argparse.Namespace) -> models.Config:
    return models.Config(args.L, args.D, args.F, compute=args.precision, remat=args.remat)


def settings(args: argparse.Namespace) -> dict[str, Any]:
    """What decides the numbers. Stored with each checkpoint, and compared before going on."""
    names = ("L", "D", "F", "batch", "precision", "learning_rate", "noise", "seed")
    return {name: getattr(args, name) for name in names}


def choose_devices(args: argparse.Namespace) -> None:
    """Must come before JAX is first used. JAX_PLATFORMS and JAX_NUM_CPU_DEVICES work as well."""
    if args.cpu_devices:
        os.environ.setdefault("NPROC", str(max(16, 2 * args.cpu_devices)))  # threads: few can hang
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", args.cpu_devices)


def meet(args: argparse.Namespace) -> None:
    """Wait for the other processes, and refuse a machine that was not asked for.

    Must come before JAX touches a device. A program that forgets this trains once on each machine,
    alone, and says nothing. Who already called jax.distributed.initialize, as some launchers do, is
    only checked.
    """
    processes = args.processes or 1
    if processes > 1 and not jax.distributed.is_initialized():
        told: dict[str, Any] = {"heartbeat_timeout_seconds": args.heartbeat}
        if args.coordinator:
            told |= {"num_processes": processes, "process_id": args.process}
        try:
            jax.distributed.initialize(args.coordinator, **told)
        except (ValueError, TypeError) as error:
            raise Refused(
                f"--processes {processes}: {error} Nothing that JAX knows has started this "
                "program: give --coordinator HOST:PORT, and --process 0, 1, … to each"
            ) from error
    try:
        found = {"processes": jax.process_count(), "devices": jax.device_count()}
    except (RuntimeError, AssertionError) as error:  # the second, and no word, for cuda without GPU
        platforms = jax.config.jax_platforms
        raise Refused(
            f"JAX finds no device of the platform {platforms} ({endings.reason(error)}): install "
            "jax for it, look whether the driver sees it, or unset JAX_PLATFORMS"
        ) from error
    asked = {"processes": processes, "devices": args.devices or found["devices"]}
    if found != asked:
        raise Refused(
            f"asked for {counted(asked['processes'], 'process', 'processes')} with "
            f"{counted(asked['devices'], 'device', 'devices')} together, found "
            f"{found['processes']} with {found['devices']}: look at what the launcher starts, and "
            "at what each process can see"
        )


def counted(count: int, one: str, several: str) -> str:
    return f"{count} {one if count == 1 else several}"


# ---- data -----------------------------------------------------------------------------------


class Digits(NamedTuple):
    images_BI: np.ndarray  # 64 pixels, 0 to 1
    labels_B: np.ndarray


class Position(NamedTuple):
    """Where in the data a run is. A checkpoint keeps it beside the model."""

    epoch: int = 0
    row: int = 0  # of the epoch's order


def load_digits() -> tuple[Digits, Digits]:
    """To train with, and to test. They come with scikit-learn: nothing is downloaded."""
    found = datasets.load_digits()
    order = np.random.default_rng(0).permutation(len(found.target))
    images_BI = (found.data[order] / 16).astype("float32")
    labels_B = found.target[order].astype("int32")
    first, rest = slice(TRAIN_ROWS), slice(TRAIN_ROWS, None)
    return Digits(images_BI[first], labels_B[first]), Digits(images_BI[rest], labels_B[rest])


def shuffled(count: int, size: int, seed: int, at: Position) -> Iterator[tuple[Any, Position]]:
    """Endless rows of batches from a position on, each with the position after it."""
    for epoch in itertools.count(at.epoch):
        order = np.random.default_rng((seed, epoch)).permutation(count)
        for row in range(at.row if epoch == at.epoch else 0, count, size):
            end = row + size
            yield order[row:end], Position(epoch, end) if end < count else Position(epoch + 1)


def on_devices(digits: Digits, rows: np.ndarray, size: int, mesh: Mesh) -> Batch:
    """A global batch, split over `data`. A short one is filled up with rows of weight 0.

    Each process reads the rows that its own devices hold. The host arrays are new each time: a
    buffer that is used again may change the batch while it is still on its way.
    """
    sharding = jax.NamedSharding(mesh, P("data"))
    here = models.rows_here(sharding, size)
    picked_B = np.pad(rows, (0, size - len(rows)))[here]
    weights_B = (here < len(rows)).astype("float32")

    def place(part: np.ndarray) -> jax.Array:
        whole = (size, *part.shape[1:])  # said outright: a wrong share must not change the batch
        return jax.make_array_from_process_local_data(sharding, part, whole)

    return Batch(
        place(digits.images_BI[picked_B]), place(digits.labels_B[picked_B]), place(weights_B)
    )


# ---- one step, one evaluation ---------------------------------------------------------------


def compiled_step(places: Run, mesh: Mesh, noise: float) -> Callable[[Run, Batch], Any]:
    """Donated, so that old and new state share memory; pinned, so that no sharding drifts."""

    def step(run: Run, batch: Batch) -> tuple[Run, jax.Array]:
        noise_BI = noise * jax.random.normal(run.rngs(), batch.images_BI.shape)
        noisy = batch._replace(images_BI=batch.images_BI + noise_BI)
        loss, gradients = nnx.value_and_grad(models.loss_of)(run.model, noisy)
        run.optimizer.update(run.model, gradients)
        return run, loss

    everywhere = jax.NamedSharding(mesh, P())  # so that every process can read the loss
    return jax.jit(step, donate_argnums=0, out_shardings=(places, everywhere))


def compiled_test(test: Digits, size: int, mesh: Mesh) -> Callable[[Run], tuple[float, float]]:
    """Mean loss and accuracy over the test rows: sums over uneven batches, one division."""
    sums_of = jax.jit(models.sums_of, out_shardings=jax.NamedSharding(mesh, P()))
    rows = np.array_split(np.arange(len(test.labels_B)), range(size, len(test.labels_B), size))
    batches = [on_devices(test, some, size, mesh) for some in rows]

    def evaluate(run: Run) -> tuple[float, float]:
        sums = [np.asarray(sums_of(run.model, batch), "float64") for batch in batches]
        loss, right, count = np.sum(sums, axis=0)
        assert count == len(test.labels_B), f"{count} of {len(test.labels_B)} rows were tested"
        return loss / count, right / count

    return evaluate


def bytes_held(run: Run) -> int:
    """Bytes of weights, moments and keys on each device."""
    leaves = jax.tree.leaves(run)
    shares = [math.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in leaves]
    return sum(share * leaf.dtype.itemsize for share, leaf in zip(shares, leaves))


# ---- checkpoints ----------------------------------------------------------------------------


def take_folders(
    args: argparse.Namespace, mesh: Mesh, locks: list[checkpoints.Lock]
) -> tuple[str, Path, list[str]]:
    """Where checkpoints and logs go, and what was done there. Process 0 locks and looks into both.

    Refuses another run's folder, another program's checkpoint and a damaged one. Nothing is written
    until all settings are known to work.
    """
    local = "://" not in args.checkpoints
    directory = os.path.abspath(args.checkpoints) if local else args.checkpoints
    if not (local or args.logs):
        raise Refused(f"{directory} is no local folder: say with --logs where metrics go")
    logs = Path(os.path.abspath(args.logs or f"{directory}-logs"))
    if jax.process_index():
        return directory, logs, []
    if local:
        checkpoints.check_folder(Path(directory), "--checkpoints")
    checkpoints.check_folder(logs, "--logs")
    models.check_sizes(
        config_of(args), args.strategy, mesh, args.batch, bool(checkpoints.newest_first(directory))
    )
    if local:
        locks.append(checkpoints.Lock(Path(directory), "--checkpoints", args.take_over))
    done = checkpoints.set_aside_damaged(directory) if local and args.skip_damaged else []

    def where(theirs: dict[str, Any]) -> str:
        """On which devices settings run that differ from ours, if not on those that are here."""
        sizes = config_of(argparse.Namespace(**vars(args) | theirs)), theirs["batch"]
        fits = functools.partial(models.fits, *sizes)
        if fits(args.strategy, mesh.shape["data"], mesh.shape["model"]):
            return ""
        return f", on {models.counts_that_work(args.strategy, mesh.size, fits)},"

    checkpoints.check_settings(directory, settings(args), where)
    if not (local and logs.resolve() == Path(directory).resolve()):
        locks.append(checkpoints.Lock(logs, "--logs", args.take_over))
    return directory, logs, done


def begin(
    saver: ocp.training.Checkpointer, make: Callable[[], Run], mesh: Mesh
) -> tuple[Run, Run, int, Position]:
    """The run, where its arrays are, its step and its position: new, or from a checkpoint.

    The checkpoint knows the values, the target the places: so any mesh can read it.
    """
    graphdef, target = nnx.get_abstract_model(make, mesh)
    places = jax.tree.map(lambda leaf: leaf.sharding, nnx.merge(graphdef, target))
    newest = saver.latest
    if newest is None:
        return jax.jit(make, out_shardings=places)(), places, 0, Position()
    state, noted = checkpoints.load(saver, newest, target)
    return nnx.merge(graphdef, state), places, newest.step, Position(**noted["position"])


# ---- what people see ------------------------------------------------------------------------


class Metrics:
    """metrics.csv: a row for each step that is logged, once and in order, whatever was killed."""

    FIELDS = ("step", "epoch", "loss", "images_per_second", "bytes_per_device",
              "test_loss", "test_accuracy")  # fmt: skip

    def __init__(self, path: Path | None, step: int):
        """Rows of later steps are dropped: those steps are taken again. None writes nothing."""
        self.path = path
        if path is None:
            return
        with checkpoints.writing_to(path, "--logs"):
            rows = list(csv.DictReader(path.read_text().splitlines())) if path.exists() else []
            whole = [row for row in rows if None not in row.values()]
            fresh = path.with_suffix(".new")
            with fresh.open("w", newline="") as file:
                writer = csv.DictWriter(file, self.FIELDS)
                writer.writeheader()
                writer.writerows(row for row in whole if int(row["step"]) <= step)
            os.replace(fresh, path)

    def write(self, row: dict[str, Any]) -> None:
        """Before the step is saved, so that a saved step never lacks its row."""
        if self.path is not None:
            with self.path.open("a", newline="") as file:
                csv.DictWriter(file, self.FIELDS).writerow(row)


def report(bar: tqdm, row: dict[str, Any]) -> None:
    """In the progress bar; as a line of the log where there is no bar, and after each test."""
    shown = f"loss {row['loss']:.4f}, {row['images_per_second']:,.0f} images/s, "
    shown += f"{row['bytes_per_device'] / 1e6:.2f} MB per device"
    bar.set_postfix_str(shown)
    if "test_loss" in row:
        shown += f"; test: loss {row['test_loss']:.4f}, {row['test_accuracy']:.1%} right"
    if "test_loss" in row or bar.disable:
        log.info(f"step {row['step']} of {bar.total}: {shown}")


def open_log(folder: Path) -> Path | None:
    """Log to the terminal and train.log. Returns where metrics go: None but for process 0."""
    handlers: list[logging.Handler] = [logging.StreamHandler()]
    if jax.process_index() == 0:
        with checkpoints.writing_to(folder, "--logs"):
            handlers.append(logging.FileHandler(folder / "train.log"))
        log.setLevel(logging.INFO)  # other loggers, and other processes, say warnings only
        for name in LIBRARIES:
            logging.getLogger(name).addHandler(handlers[-1])
    logging.basicConfig(format="%(asctime)s %(message)s", handlers=handlers, force=True)
    return folder / "metrics.csv" if jax.process_index() == 0 else None


# ---- the program ----------------------------------------------------------------------------


def train(args: argparse.Namespace) -> int:
    config = config_of(args)
    fits = functools.partial(models.fits, config, args.batch)
    mesh = models.make_mesh(args.strategy, args.data, args.model, fits)
    locks: list[checkpoints.Lock] = []  # empty but for process 0
    with contextlib.ExitStack() as at_end:
        at_end.callback(checkpoints.release, locks)
        at_end.callback(faulthandler.cancel_dump_traceback_later)
        stop_requests = StopRequests()
        at_end.callback(stop_requests.restore)
        directory, logs, done = agreed(lambda: take_folders(args, mesh, locks))
        if "://" not in directory:
            agreed(lambda: checkpoints.check_shared(Path(directory)))
        metrics_path = agreed(lambda: open_log(logs))
        at_end.callback(logging.basicConfig, handlers=[], force=True)
        for sentence in done:
            log.warning(sentence)
        at_end.enter_context(jax.set_mesh(mesh))
        # TPUs and GPUs would round to fewer bits.
        at_end.enter_context(jax.default_matmul_precision("float32"))
        at_end.enter_context(logging_redirect_tqdm())  # lines of the log appear above the bar
        saver = checkpoints.open_checkpoints(directory, args.save_every, args.keep)
        adamw = optax.adamw(args.learning_rate)
        make = functools.partial(models.make_run, config, args.strategy, adamw, args.seed)
        run, places, step, position = begin(saver, make, mesh)
        saves = checkpoints.Saves(saver, locks)
        training, test = load_digits()
        epoch = -(-TRAIN_ROWS // args.batch)  # steps of one
        last = args.steps or args.epochs * epoch
        if step >= last:
            saves.close()
            log.info(
                f"nothing left to do: step {step} is saved in {directory}, and {last} were asked "
                "for: to go on, give more --epochs or --steps"
            )
            return FINISHED
        held, metrics = bytes_held(run), agreed(lambda: Metrics(metrics_path, step))
        log.info(
            f"{'going on after' if step else 'a new run from'} step {step} of {last}: "
            f"{args.strategy} on {mesh.shape['data']} x {mesh.shape['model']} "
            f"{jax.default_backend()} {'device' if mesh.size == 1 else 'devices'} of "
            f"{counted(jax.process_count(), 'process', 'processes')}, "
            f"{held:,} bytes of state on each"
        )
        train_step = compiled_step(places, mesh, args.noise)
        evaluate = compiled_test(test, args.batch, mesh)
        batches = (
            (on_devices(training, rows, args.batch, mesh), len(rows), after)
            for rows, after in shuffled(TRAIN_ROWS, args.batch, args.seed, position)
        )
        ahead = itertools.pairwise(batches)  # the next one is on its way while one is in use
        bar = at_end.enter_context(
            tqdm(total=last, initial=step, unit="step", disable=None if metrics_path else True)
        )
        stop, images, since = False, 0, None

        def watch() -> None:
            if args.watchdog:  # it ends the process from a thread of C, wherever Python hangs
                faulthandler.dump_traceback_later(args.watchdog, exit=True)

        while step < last and not stop:
            watch()
            (batch, count, position), _ = next(ahead)
            run, loss = train_step(run, batch)
            step, images = step + 1, images + count
            bar.update()
            if since is None or jax.default_backend() == "cpu":
                loss.block_until_ready()  # simulated devices share threads: a queue can hang
            if since is None:  # the first step was compiled as well: the clock starts after it
                images, since = 0, time.perf_counter()
            if saves.problem():
                stop_requests.ask()
            stop = stop_requests.after(step)
            saving = stop or step == last or saver.should_save(step)
            testing = step == last or (step % (args.evaluate_every or epoch) == 0 and not stop)
            if saving or testing or step % args.log_every == 0:
                row = {"step": step, "epoch": position.epoch, "loss": float(loss)}
                if not math.isfinite(row["loss"]):
                    saves.finish()
                    raise Failed(
                        f"the loss is {row['loss']} at step {step}, which was not saved: begin "
                        "anew, in other --checkpoints, with a smaller --learning-rate"
                    )
                speed = images / (time.perf_counter() - since)
                row |= {"images_per_second": round(speed, 1), "bytes_per_device": held}
                if testing:
                    row["test_loss"], row["test_accuracy"] = evaluate(run)
                try:
                    metrics.write(row)
                except OSError as error:  # on process 0 alone: the next save fails on all
                    saves.trouble = saves.failure("metrics.csv", logs, error)
                report(bar, row)
                images, since = 0, time.perf_counter()
            if saving:  # in the background
                noted = {"settings": settings(args), "position": position._asdict()}
                saves.start(step, nnx.state(run), noted)
        bar.close()
        watch()
        saves.close()
        if step < last:
            by = "Ctrl-C" if stop_requests.interrupted else "SIGTERM"
            log.info(f"stopped by {by}; step {step} is saved: the same command goes on from it")
            return INTERRUPTED if stop_requests.interrupted else STOPPED
        log.info(
            f"finished: step {step} is saved in {directory}; to train on, give more --epochs or "
            "--steps"
        )
        return FINISHED


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    with quiet_libraries():
        try:
            check_processes(args)
            choose_devices(args)
            meet(args)
            return train(args)
        except Refused as refusal:
            print(f"train.py: {refusal}", file=sys.stderr)
            return REFUSED
        except Failed as failure:
            print(f"train.py: {failure}", file=sys.stderr)
            return FAILED
        except KeyboardInterrupt:
            print("train.py: interrupted before the first step", file=sys.stderr)
            return INTERRUPTED


if __name__ == "__main__":
    with quiet_libraries():
        leave(main())
