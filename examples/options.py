"""The settings of a run: a TOML file, and flags that override it."""

import argparse
import difflib
import functools
import tomllib
from pathlib import Path
from typing import Any, NoReturn

import endings
import strategies
from checkpoints import SCHEDULE
from model import REMAT, Config
from steps import Recipe
from strategies import Refused, Splits

HERE = Path(__file__).parent
DTYPES = ["float32", "bfloat16"]


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(endings.REFUSED, f"{self.prog}: {message}; --help lists the flags\n")


def positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return int(text)


def not_negative(text: str) -> float:
    if not float(text) >= 0:
        raise argparse.ArgumentTypeError(f"{text} is not 0 or more")
    return float(text)


def folder(text: str) -> str:
    if not text.strip():
        what = "the name is empty, perhaps because a shell variable is not set"
        raise argparse.ArgumentTypeError(what)
    return text


def parser_of(description: str) -> Parser:
    names = "\n".join(f"  {key:15}{it.says}" for key, it in strategies.STRATEGIES.items())
    statuses = "\n".join(f"  {status:<5}{says}" for status, says in endings.STATUSES.items())
    parser = Parser(
        prog="train.py",
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=description,
        epilog=f"strategies:\n{names}\n\nexit status:\n{statuses}\n\n"
        "However a run ends, also when it is killed, no finished checkpoint is lost.",
    )
    # fmt: off
    parser.add_argument("--config", default="tiny", metavar="FILE",
        help="a TOML file of settings, or a name in examples/configs; flags override it (%(default)s)")
    add = parser.add_argument_group("where it runs (may change when a run resumes)").add_argument
    add("--strategy", choices=strategies.STRATEGIES, default="fsdp", metavar="NAME",
        help="one of those below (%(default)s)")
    add("--data", type=positive, metavar="N",
        help="size of the axis that replicates weights and shards rows")
    add("--fsdp", type=positive, metavar="N", help="size of the axis that shards weights and rows")
    add("--model", type=positive, metavar="N",
        help="size of the axis that shards heads and hidden units")
    add("--cpu-devices", type=positive, metavar="N", help="simulate N devices on the CPU")
    add("--accumulate", type=positive, default=1, metavar="N",
        help="number of microbatches in a step (%(default)s)")
    add("--remat", choices=REMAT, nargs="?", const="full", default="none", metavar="NAME",
        help="what the backward pass recomputes: none, products (all but matmuls with weights), full")
    add("--attention", choices=["xla", "cudnn"], default="xla",
        help="cudnn needs less memory, on NVIDIA GPUs and in bfloat16 only (%(default)s)")

    add = parser.add_argument_group("several processes (start each of them with these)").add_argument
    add("--processes", type=positive, metavar="N",
        help="stop unless the run has this many processes (1)")
    add("--devices", type=positive, metavar="N",
        help="stop unless all processes together have N devices")
    add("--coordinator", metavar="HOST:PORT",
        help="where process 0 listens; by default JAX asks SLURM, MPI, Kubernetes or the TPU")
    add("--process", type=int, metavar="I", help="the number of this process, with --coordinator")
    add("--heartbeat", type=positive, default=100, metavar="SECONDS",
        help="a process that is silent for this long counts as dead, and all stop (%(default)s)")
    add("--watchdog", type=positive, metavar="SECONDS",
        help="if a step takes longer, print where it hangs and stop")

    what = "what it computes (must stay the same when a run resumes)"
    add = parser.add_argument_group(what).add_argument
    for letter, says in {
        "L": "layers", "D": "model width", "F": "hidden width", "H": "heads",
        "K": "key and value heads", "C": "head size", "V": "vocabulary size",
        "S": "sequence length",
    }.items():
        add(f"--{letter}", type=positive, metavar="N", help=says)
    add("--theta", type=float, metavar="X", help="base of the RoPE frequencies")
    add("--batch", type=positive, metavar="ROWS", help="rows per step, over all devices")
    add("--precision", choices=DTYPES,
        help="dtype of matmuls; weights and moments stay float32. With float32, GPUs do not round to "
             "TF32 and TPUs not to bfloat16, as JAX's defaults would: several times as slow")
    add("--reduction", choices=DTYPES, help="dtype in which gradients are summed over devices")
    add("--text", type=folder, default=str(HERE / "data" / "book.txt"), metavar="PATH",
        help="a file or folder of .txt or .md (bytes) or .npy (tokens); by default this book's prose")
    add("--seed", type=int, default=0, metavar="N",
        help="seed of the weights and of the order of rows (%(default)s)")
    add("--learning-rate", type=not_negative, metavar="X", help="peak learning rate of AdamW")
    add("--warm-up", type=int, metavar="STEPS", help="steps in which the rate rises from 0")
    add("--decay-steps", type=positive, metavar="STEPS", help="steps until the cosine decay ends")
    add("--final-rate", type=not_negative, metavar="X",
        help="final learning rate, as a fraction of the peak")
    add("--new-schedule", action="store_true",
        help="allow these four to differ from the checkpoint's")
    add("--weight-decay", type=not_negative, metavar="X",
        help="weight decay of matrices (norms have none)")
    add("--beta2", type=not_negative, metavar="X", help="beta2 of AdamW")
    add("--clip", type=not_negative, metavar="X",
        help="clip the gradient to this global norm; 0: no clipping")

    add = parser.add_argument_group("how long it runs, and what it writes").add_argument
    add("--steps", type=positive, metavar="N", help="steps in total, counted from the first run")
    add("--checkpoints", type=folder, metavar="DIR",
        help="a folder, or gs://… (which cannot be locked against a second run) (runs/CONFIG)")
    add("--save-every", type=positive, metavar="STEPS",
        help="steps between checkpoints; the last step is always saved")
    add("--keep", type=positive, default=3, metavar="N",
        help="checkpoints to keep (%(default)s)")
    add("--init-from", type=folder, metavar="DIR",
        help="start from the weights of another run, if --checkpoints is still empty")
    add("--skip-damaged", action="store_true",
        help="rename damaged checkpoints, and resume from the newest intact one")
    add("--take-over", metavar="HOST",
        help="take over the lock that a run on HOST, now dead, left in the folder")
    add("--logs", type=folder, metavar="DIR",
        help="folder for metrics.csv, train.log and profiles (CHECKPOINTS-logs)")
    add("--log-every", type=positive, metavar="STEPS", help="steps between rows of metrics.csv")
    add("--evaluate-every", type=positive, metavar="STEPS", help="steps between tests")
    add("--test-rows", type=positive, metavar="N", help="use at most N of the held-out rows")
    add("--sample", type=positive, metavar="N", help="generate N bytes of text after each test")
    add("--tensorboard", action="store_true", help="write the metrics for TensorBoard too")
    add("--profile", type=positive, metavar="STEPS",
        help="trace this many steps, from the fifth on")
    add("--profile-process", type=int, default=0, metavar="I",
        help="the process that is traced (%(default)s)")

    add = parser.add_argument_group("without training").add_argument
    add("--eval-only", action="store_true", help="test the newest checkpoint and write nothing")
    add("--compile-only", action="store_true",
        help="compile from shapes, and print what each device would hold and send")
    add("--topology", metavar="NAME",
        help="with --compile-only: compile for TPUs you do not have, for example v5e:4x4 (needs libtpu)")
    # fmt: on
    return parser


def parse(argv: list[str] | None, description: str) -> argparse.Namespace:
    """Read the settings of the file, then those of the command line."""
    first = Parser(prog="train.py", add_help=False, allow_abbrev=False)
    first.add_argument("--config", default="tiny")
    known, rest = first.parse_known_args(argv)
    parser = parser_of(description)
    args = parser.parse_args([*flags_in(config_file(known.config), parser), *rest])
    args.config = known.config
    args.checkpoints = args.checkpoints or f"runs/{Path(known.config).stem}"
    if missing := [name for name in NEEDED if getattr(args, name) is None]:
        flag = "--" + missing[0].replace("_", "-")
        parser.error(f"{flag} is not in {known.config}, and was not given")
    if args.C % 2:
        parser.error(f"--C {args.C} is odd, but RoPE rotates pairs: use an even number")
    if args.batch % args.accumulate:
        parser.error(f"--batch {args.batch} does not divide into --accumulate {args.accumulate}")
    if args.H % args.K:
        parser.error(f"--H {args.H} heads cannot share --K {args.K}: use a divisor of {args.H}")
    if args.topology and not args.compile_only:
        parser.error("--topology names devices that are not here: add --compile-only")
    return args


def config_file(name: str) -> Path:
    for path in (Path(name), HERE / "configs" / f"{name}.toml"):
        if path.is_file():
            return path
    names = sorted(path.stem for path in (HERE / "configs").glob("*.toml"))
    raise Refused(f"--config {name} is not a file: give one, or {strategies.either(names)}")


def flags_in(path: Path, parser: Parser) -> list[str]:
    """The settings of a file, as they would be given on the command line."""
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise Refused(f"{path} is not TOML that can be read ({error})") from error
    flags: list[str] = []
    known = {action.dest: action for action in parser._actions if action.option_strings}
    for name, value in found.items():
        if name not in known or name in ("config", "help"):
            near = difflib.get_close_matches(name, known, 1)
            hint = f": is it {near[0]}?" if near else "; --help lists all"
            raise Refused(f"{path} has `{name}`, which is not a setting{hint}")
        if isinstance(value, (dict, list)):
            raise Refused(f"{path} gives `{name}` more than one value")
        flag = known[name].option_strings[0]
        if known[name].nargs == 0:
            flags += [flag] if value else []
        else:
            flags.append(f"{flag}={value}")
    return flags


# ---- what the other files need of it --------------------------------------------------------

SIZES = ("L", "D", "F", "H", "K", "C", "V", "S", "theta")
RECIPE = (*SCHEDULE, "weight_decay", "beta2", "clip", "seed")
NEEDED = (*SIZES, *RECIPE, "batch", "precision", "reduction", "steps",
          "save_every", "log_every", "evaluate_every", "test_rows")  # fmt: skip


def config_of(args: argparse.Namespace) -> Config:
    how = {"compute": args.precision, "reduce": args.reduction}
    sizes = {name: getattr(args, name) for name in SIZES}
    return Config(**sizes, **how, remat=args.remat, attention=args.attention)


def recipe_of(args: argparse.Namespace) -> Recipe:
    return Recipe(**{name: getattr(args, name) for name in RECIPE})


def splits_of(args: argparse.Namespace) -> Splits:
    sizes = {letter: getattr(args, letter) for letter in ("D", "H", "K", "F", "V")}
    accumulate = args.accumulate
    return functools.partial(
        strategies.splits_of, dimensions=sizes, batch=args.batch, accumulate=accumulate
    )


def settings(args: argparse.Namespace, text: str) -> dict[str, Any]:
    """What decides the numbers. Stored with each checkpoint, and compared before going on."""
    names = (*SIZES, "batch", "precision", "reduction", *RECIPE)
    return {name: getattr(args, name) for name in names} | {"text": text}
