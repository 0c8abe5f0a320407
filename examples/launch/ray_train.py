"""examples/train.py under Ray Train: Ray starts one worker for each machine, or for each GPU.

    python examples/launch/ray_train.py --workers 2 --gpus 4 -- --strategy fsdp
    python examples/launch/ray_train.py --workers 2 --cpu-devices 4 \\
        --coordinator HOST:8476 -- --strategy fsdp

What stands after -- goes to train.py. With GPUs (or TPUs), Ray's JaxTrainer calls
jax.distributed.initialize in each worker before it calls `worker`. On CPUs it does not, and says
nothing: each worker would train alone. So `worker` does it there, and train.py's first assertion,
--processes and --devices, would notice if neither had.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from ray import train as ray_train
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.v2.jax import JaxTrainer

EXAMPLES = Path(__file__).resolve().parents[1]


def worker(config: dict[str, Any]) -> None:
    """Runs in each worker, a process of its own."""
    if config["cpu_devices"]:
        os.environ["JAX_PLATFORMS"] = "cpu"
        os.environ["JAX_NUM_CPU_DEVICES"] = str(config["cpu_devices"])
        os.environ["NPROC"] = "16"
    sys.path.insert(0, str(EXAMPLES))
    import train  # not before: it imports JAX, which reads the variables above

    context, more = ray_train.get_context(), []
    if config["cpu_devices"]:
        more = ["--coordinator", config["coordinator"], "--process", str(context.get_world_rank())]
    count, each = context.get_world_size(), config["cpu_devices"] or config["gpus"]
    asked = ["--processes", str(count), "--devices", str(count * each)]
    status = train.main([*asked, *more, *config["arguments"]])
    if status != train.FINISHED:
        # Not sys.exit: `worker` runs in a thread, and Ray would wait. After an exception Ray starts all
        # workers again, as often as FailureConfig says.
        raise RuntimeError(f"train.py ended with exit status {status}, and said why above")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--gpus", type=int, default=1, help="of each worker")
    parser.add_argument("--cpu-devices", type=int, default=0, help="simulated, of each worker")
    parser.add_argument("--coordinator", metavar="HOST:PORT", help="with --cpu-devices")
    parser.add_argument("--storage", default="runs/ray", help="where Ray keeps its own records")
    parser.add_argument("--restarts", type=int, default=3, help="after the death of a worker")
    parser.add_argument("arguments", nargs="*", help="for train.py, after --")
    args = parser.parse_args(argv)
    if args.cpu_devices and not args.coordinator:
        parser.error("--cpu-devices needs --coordinator HOST:PORT, where worker 0 will listen")
    on_gpus = not args.cpu_devices
    JaxTrainer(
        worker,
        train_loop_config=vars(args),
        scaling_config=ScalingConfig(
            num_workers=args.workers,
            use_gpu=on_gpus,
            resources_per_worker={"GPU": args.gpus} if on_gpus else {"CPU": 1},
        ),
        run_config=RunConfig(
            storage_path=os.path.abspath(args.storage),
            failure_config=FailureConfig(max_failures=args.restarts),
        ),
    ).fit()


if __name__ == "__main__":
    main()
