"""Train a small language model on any number of devices; kill it, and go on.

    python examples/train.py --cpu-devices 8 --strategy fsdp

Run the same command again after a crash, a kill or a preemption, and training resumes from the newest
complete checkpoint: bit for bit on the same mesh, and up to rounding on another. A folder of
checkpoints belongs to one run at a time, and a second one stops with an error (locks.py).

On several machines a launcher starts it once for each: see examples/launch. Together, the processes
resume where they were stopped, also if their number has changed.

This file is the loop. options.py has the flags, model.py the model, strategies.py the mesh, steps.py
the recipe, dataset.py the rows, checkpoints.py and locks.py what is on disk, reporting.py what people
see, endings.py and processes.py how all processes begin and end together.
"""

import argparse
import contextlib
import faulthandler
import functools
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax.sharding import Mesh
from orbax.checkpoint import v1 as ocp
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

import checkpoints
import dataset
import locks
import meshscope as ms
import model as models
import options
import reporting
import steps
import strategies
from compile_only import compile_only
from endings import (
    FAILED,
    FINISHED,
    INTERRUPTED,
    REFUSED,
    STOPPED,
    Failed,
    StopRequests,
    agreed,
    leave,
    quiet_libraries,
)
from processes import check_processes, choose_devices, counted, meet
from steps import Run
from strategies import Refused

log = logging.getLogger("train")


class Plan(NamedTuple):
    """What is fixed before anything is read or written."""

    args: argparse.Namespace
    config: models.Config
    mesh: Mesh
    training: dataset.Tokens
    test: dataset.Tokens
    settings: dict[str, Any]  # what decides the numbers
    make: Callable[[], Run]


def plan_of(args: argparse.Namespace) -> Plan:
    config, splits = options.config_of(args), options.splits_of(args)
    asked = {axis: getattr(args, axis) for axis in strategies.AXES}
    mesh = strategies.make_mesh(args.strategy, asked, splits, jax.devices())
    reporting.board_module(args.tensorboard)
    training, test, text = dataset.open_tokens(args.text, args.S, args.V)
    tx = steps.optimizer_of(options.recipe_of(args))  # once: JAX compares it by identity
    make = functools.partial(steps.make_run, config, args.strategy, tx, args.seed)
    return Plan(args, config, mesh, training, test, options.settings(args, text), make)


# ---- folders and checkpoints ----------------------------------------------------------------


def place_of(args: argparse.Namespace) -> tuple[str, bool]:
    """The folder of checkpoints, and whether it is a local one."""
    local = "://" not in args.checkpoints
    return (os.path.abspath(args.checkpoints) if local else args.checkpoints), local


def take_folders(plan: Plan, held: list[locks.Lock]) -> tuple[str, Path, list[str]]:
    """Where checkpoints and logs go, and what was done there. Process 0 locks and looks into both.

    Raises Refused for another run's folder, another program's checkpoint and a damaged one. Nothing is
    written before all settings are known to work.
    """
    args, mesh = plan.args, plan.mesh
    directory, local = place_of(args)
    if not (local or args.logs):
        raise Refused(f"{directory} is no local folder: say with --logs where metrics go")
    logs = Path(os.path.abspath(args.logs or f"{directory}-logs"))
    if jax.process_index():
        return directory, logs, []
    if local:
        locks.check_folder(Path(directory), "--checkpoints")
    locks.check_folder(logs, "--logs")
    fixed = bool(checkpoints.newest_first(directory))
    strategies.check_sizes(args.strategy, mesh, options.splits_of(args), fixed)
    if args.init_from and not fixed:
        checkpoints.check_weights(args.init_from, sizes_in(plan.settings))
    if local:
        held.append(locks.Lock(Path(directory), "--checkpoints", args.take_over))
    done = checkpoints.set_aside_damaged(directory) if local and args.skip_damaged else []
    check_settings(plan, directory)
    if not (local and logs.resolve() == Path(directory).resolve()):
        held.append(locks.Lock(logs, "--logs", args.take_over))
    return directory, logs, done


def sizes_in(settings: dict[str, Any]) -> dict[str, Any]:
    return {name: settings[name] for name in options.SIZES}


def check_settings(plan: Plan, directory: str) -> None:
    """Compare a checkpoint's settings, and say on which devices it could be resumed."""
    args, mesh = plan.args, plan.mesh

    def where(theirs: dict[str, Any]) -> str:
        splits = options.splits_of(argparse.Namespace(**vars(args) | theirs))
        if strategies.fits(args.strategy, strategies.sizes_of(mesh), splits):
            return ""
        return f", on {strategies.counts_that_work(args.strategy, mesh.size, splits)},"

    free = frozenset(checkpoints.SCHEDULE if args.new_schedule else ())
    checkpoints.check_settings(directory, plan.settings, free, where)


def abstract(plan: Plan) -> tuple[Any, Any, Run]:
    """The run's structure, its shapes with shardings, and those shardings."""
    graphdef, target = nnx.get_abstract_model(plan.make, plan.mesh)
    return graphdef, target, jax.tree.map(lambda leaf: leaf.sharding, nnx.merge(graphdef, target))


def begin(plan: Plan, saver: ocp.training.Checkpointer) -> tuple[Run, Run, int, int]:
    """The run, its shardings, its step and its position in the data: new, or from a checkpoint.

    Values come from the checkpoint and shardings from the target, so any mesh can read it.
    """
    graphdef, target, places = abstract(plan)
    newest = saver.latest
    if newest is not None:
        state, noted = checkpoints.load(saver, newest, target)
        return nnx.merge(graphdef, state), places, newest.step, noted["position"]
    run = jax.jit(plan.make, out_shardings=places)()
    if path := plan.args.init_from:
        weights = checkpoints.load_weights(path, target["model"])
        nnx.update(run.model, weights)
    return run, places, 0, 0


# ---- the program ----------------------------------------------------------------------------


def train(args: argparse.Namespace) -> int:
    plan = plan_of(args)
    held: list[locks.Lock] = []  # empty but for process 0
    with contextlib.ExitStack() as at_end:
        at_end.callback(locks.release, held)
        at_end.callback(faulthandler.cancel_dump_traceback_later)
        stop_requests = StopRequests()
        at_end.callback(stop_requests.restore)
        directory, logs, done = agreed(lambda: take_folders(plan, held))
        if "://" not in directory:
            agreed(lambda: locks.check_shared(Path(directory)))
        metrics_path = agreed(lambda: reporting.open_log(logs))
        at_end.callback(logging.basicConfig, handlers=[], force=True)
        for sentence in done:
            log.warning(sentence)
        at_end.enter_context(jax.set_mesh(plan.mesh))
        # TPUs and GPUs would round float32 to fewer bits. Products of bfloat16 stay what they are.
        at_end.enter_context(jax.default_matmul_precision("float32"))
        at_end.enter_context(logging_redirect_tqdm())  # lines of the log appear above the bar
        saver = checkpoints.open_checkpoints(directory, args.save_every, args.keep)
        run, places, step, position = begin(plan, saver)
        saves = checkpoints.Saves(saver, held)
        if step >= args.steps:
            saves.close()
            log.info(
                f"nothing left to do: step {step} is saved in {directory}, and {args.steps} were "
                "asked for: to go on, give more --steps"
            )
            return FINISHED
        board = agreed(lambda: reporting.open_board(args.tensorboard, logs))
        metrics = agreed(lambda: reporting.Metrics(metrics_path, step, board))
        log.info(f"{first_line(plan, step)}, {steps.bytes_held(run):,} bytes of state on each")
        bar = at_end.enter_context(
            tqdm(
                total=args.steps, initial=step, unit="step", disable=None if metrics_path else True
            )
        )
        step = loop(plan, run, places, step, position, saves, metrics, stop_requests, bar, logs)
        bar.close()
        watch(args)
        saves.close()
        if step < args.steps:
            by = "Ctrl-C" if stop_requests.interrupted else "SIGTERM"
            log.info(f"stopped by {by}; step {step} is saved: run the same command to resume")
            return INTERRUPTED if stop_requests.interrupted else STOPPED
        log.info(
            f"finished: step {step} is saved in {directory}; for more training, give more --steps"
        )
        return FINISHED


def first_line(plan: Plan, step: int) -> str:
    args, mesh = plan.args, plan.mesh
    axes = " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items() if size > 1)
    return (
        f"{'resuming after' if step else 'a new run from'} step {step} of {args.steps}: "
        f"{args.strategy} on {counted(mesh.size, 'device', 'devices')} of "
        f"{jax.default_backend()}{f' ({axes})' if axes else ''} in "
        f"{counted(jax.process_count(), 'process', 'processes')}"
    )


def watch(args: argparse.Namespace) -> None:
    if args.watchdog:  # it ends the process from a thread of C, wherever Python hangs
        faulthandler.dump_traceback_later(args.watchdog, exit=True)


def loop(
    plan: Plan,
    run: Run,
    places: Run,
    step: int,
    position: int,
    saves: checkpoints.Saves,
    metrics: reporting.Metrics,
    stop_requests: StopRequests,
    bar: tqdm,
    logs: Path,
) -> int:
    """Train from this step to the last, or until a request to stop. Returns the step reached."""
    args, mesh = plan.args, plan.mesh
    train_step = steps.compiled_step(places, mesh, args.accumulate)
    program = train_step.lower(run, steps.batch_shape(mesh, args.batch, args.S)).compile()
    needed, state_bytes = ms.memory(program).bytes_per_device, steps.bytes_held(run)
    test_loss = steps.compiled_test(plan.test, args.test_rows, args.batch, mesh)
    sample = steps.compiled_sample(mesh, args.S)
    rate_at = steps.schedule_of(options.recipe_of(args))
    order = dataset.shuffled(plan.training, args.seed)
    rows = dataset.batches(order, args.batch, mesh, position)
    clock = reporting.Clock(
        args.batch * args.S, models.flops_per_token(plan.config), args.precision
    )
    profile, window = reporting.Profile(args, logs), reporting.Window(step)
    coming, stop = next(rows), False
    clock.start()
    while step < args.steps and not stop:
        watch(args)
        (batch, position), coming = coming, next(rows)  # one is copied while the other is used
        with clock.outside():
            profile.before()
        run, loss, norm = program(run, batch)
        step, clock.steps = step + 1, clock.steps + 1
        window.add(loss, norm)
        bar.update()
        if jax.default_backend() == "cpu":
            loss.block_until_ready()  # simulated devices share threads: a queue can hang
        with clock.outside():
            profile.after(loss)
        if saves.problem():
            stop_requests.ask()
        stop = stop_requests.after(step)
        saving = stop or step == args.steps or saves.saver.should_save(step)
        testing = step == args.steps or (step % args.evaluate_every == 0 and not stop)
        if not (saving or testing or step % args.log_every == 0):
            continue
        try:
            row = {"step": step, "epoch": position // len(plan.training), **window.close()}
        except Failed:
            saves.finish()
            raise
        row |= {"learning_rate": float(rate_at(step - 1)), **clock.speed()}
        row |= {"bytes_per_device": state_bytes, "peak_bytes": reporting.peak_bytes(needed)}
        if testing:
            row["test_loss"] = test_loss(run.model)
        try:
            metrics.write(row)
        except OSError as error:  # on process 0 alone: the next save fails on all
            saves.trouble = saves.failure("metrics.csv", logs, error)
        reporting.report(bar, row)
        if testing and args.sample:
            text = sample(run.model, b"The ", args.sample, seed=step).decode(errors="replace")
            log.info(f"it writes: {text}")
        if saving:  # in the background
            noted = {"settings": plan.settings, "position": position}
            saves.start(step, nnx.state(run), noted)
        clock.start()
    profile.stop()
    return step


def evaluate(args: argparse.Namespace) -> int:
    """Test the newest checkpoint, or other weights. Writes nothing, and needs no lock."""
    plan, (directory, _) = plan_of(args), place_of(args)
    strategies.check_sizes(args.strategy, plan.mesh, options.splits_of(args))
    with jax.set_mesh(plan.mesh), jax.default_matmul_precision("float32"):
        graphdef, target, _ = abstract(plan)
        path = args.init_from or directory
        agreed(lambda: checkpoints.check_weights(path, sizes_in(plan.settings)))
        weights = checkpoints.load_weights(path, target["model"])
        structure, _ = nnx.split(nnx.merge(graphdef, target).model)
        model = nnx.merge(structure, weights)
        test_loss = steps.compiled_test(plan.test, args.test_rows, args.batch, plan.mesh)
        loss, count = test_loss(model), min(len(plan.test), args.test_rows)
    if jax.process_index() == 0:
        print(f"test loss {loss:.4f} over {counted(count, 'row', 'rows')} of {args.S}: {path}")
    return FINISHED


def main(argv: list[str] | None = None) -> int:
    with quiet_libraries():
        try:
            args = options.parse(argv, (__doc__ or "").splitlines()[0])
            check_processes(args)
            choose_devices(args)
            meet(args)
            if args.compile_only:
                return compile_only(args)
            return evaluate(args) if args.eval_only else train(args)
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
