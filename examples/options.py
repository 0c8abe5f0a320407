"""What is asked for: a file of settings, and flags that count more."""

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
        self.exit(endings.REFUSED, f"{self.prog}: {message}; --help lists what there is\n")


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
        raise argparse.ArgumentTypeError("the name is empty, as of a variable that is not set")
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
        "No checkpoint is lost in any of these ways, nor if the process is killed.",
    )
    # fmt: off
    parser.add_argument("--config", default="tiny", metavar="FILE",
        help="settings in TOML, or a name in examples/configs; flags count more (%(default)s)")
    add = parser.add_argument_group("where it runs: may differ at each start").add_argument
    add("--strategy", choices=strategies.STRATEGIES, default="fsdp", metavar="NAME",
        help="see below (%(default)s)")
    add("--data", type=positive, metavar="N", help="devices that repeat weights and split rows")
    add("--fsdp", type=positive, metavar="N", help="devices that split weights and rows")
    add("--model", type=positive, metavar="N", help="devices that split heads and hidden units")
    add("--cpu-devices", type=positive, metavar="N", help="simulate N devices on the CPU")
    add("--accumulate", type=positive, default=1, metavar="N",
        help="microbatches of a step, one after another (%(default)s)")
    add("--remat", choices=REMAT, nargs="?", const="full", default="none", metavar="NAME",
        help="what backward computes again: none, products (all but those with weights), full")
    add("--attention", choices=["xla", "cudnn"], default="xla",
        help="cudnn: on NVIDIA GPUs, in bfloat16, with less memory (%(default)s)")

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
    for letter, says in {
        "L": "layers", "D": "model width", "F": "hidden width", "H": "heads",
        "K": "heads of keys and values", "C": "size of a head", "V": "vocabulary",
        "S": "positions of a row",
    }.items():
        add(f"--{letter}", type=positive, metavar="N", help=says)
    add("--theta", type=float, metavar="X", help="base of RoPE's wavelengths")
    add("--batch", type=positive, metavar="ROWS", help="of a step, over all devices")
    add("--precision", choices=DTYPES,
        help="of products; weights and moments stay float32. float32 is not rounded to TF32 on GPUs "
             "or to bfloat16 on TPUs, as JAX would by default: several times as slow")
    add("--reduction", choices=DTYPES, help="in which devices add up gradients of weights")
    add("--text", type=folder, default=str(HERE / "data" / "book.txt"), metavar="PATH",
        help="a file or folder of .txt, .md (bytes) or .npy (tokens); without it, this book's prose")
    add("--seed", type=int, default=0, metavar="N", help="of weights and order (%(default)s)")
    add("--learning-rate", type=not_negative, metavar="X", help="of AdamW, after the warm-up")
    add("--warm-up", type=int, metavar="STEPS", help="from 0 to that rate")
    add("--decay-steps", type=positive, metavar="STEPS", help="from the first to the cosine's end")
    add("--final-rate", type=not_negative, metavar="X", help="what is left then, as a part")
    add("--new-schedule", action="store_true",
        help="this time these four may differ from the checkpoint's")
    add("--weight-decay", type=not_negative, metavar="X", help="of matrices, not of norms")
    add("--beta2", type=not_negative, metavar="X", help="of AdamW")
    add("--clip", type=not_negative, metavar="X", help="largest norm of the gradient; 0: any")

    add = parser.add_argument_group("how long, and what is written").add_argument
    add("--steps", type=positive, metavar="N", help="from the very first to the last")
    add("--checkpoints", type=folder, metavar="DIR",
        help="a folder, or gs://…, where nothing keeps a second run out (runs/CONFIG)")
    add("--save-every", type=positive, metavar="STEPS",
        help="from one checkpoint to the next; the end is saved as well")
    add("--keep", type=positive, default=3, metavar="N",
        help="newest checkpoints that stay (%(default)s)")
    add("--init-from", type=folder, metavar="DIR",
        help="begin with the weights of another run, as long as nothing is in --checkpoints")
    add("--skip-damaged", action="store_true",
        help="rename damaged checkpoints, and go on from the newest that is whole")
    add("--take-over", metavar="HOST",
        help="use the folder although a run on that host, which has ended, left its lock there")
    add("--logs", type=folder, metavar="DIR",
        help="for metrics.csv, train.log and profile (CHECKPOINTS-logs)")
    add("--log-every", type=positive, metavar="STEPS", help="from row to row of metrics.csv")
    add("--evaluate-every", type=positive, metavar="STEPS", help="from test to test")
    add("--test-rows", type=positive, metavar="N", help="of those held out, at most")
    add("--sample", type=positive, metavar="N", help="write N bytes of text after each test")
    add("--tensorboard", action="store_true", help="the metrics for TensorBoard as well")
    add("--profile", type=positive, metavar="STEPS", help="trace so many, from the fifth on")
    add("--profile-process", type=int, default=0, metavar="I", help="which one (%(default)s)")

    add = parser.add_argument_group("without training").add_argument
    add("--eval-only", action="store_true", help="test the newest checkpoint; write nothing")
    add("--compile-only", action="store_true",
        help="say what each device would hold and send, from shapes; train nothing")
    add("--topology", metavar="NAME",
        help="with --compile-only: compile for TPUs that are not here, as in v5e:4x4 (needs libtpu)")
    # fmt: on
    return parser


def parse(argv: list[str] | None, description: str) -> argparse.Namespace:
    """Settings of the file first, then those of the command line."""
    first = Parser(prog="train.py", add_help=False, allow_abbrev=False)
    first.add_argument("--config", default="tiny")
    known, rest = first.parse_known_args(argv)
    parser = parser_of(description)
    args = parser.parse_args([*flags_in(config_file(known.config), parser), *rest])
    args.config = known.config
    args.checkpoints = args.checkpoints or f"runs/{Path(known.config).stem}"
    if missing := [name for name in NEEDED if getattr(args, name) is None]:
        flag = "--" + missing[0].replace("_", "-")
        parser.error(f"{flag} is not in {known.config}, and not given")
    if args.C % 2:
        parser.error(f"--C {args.C} is odd, and RoPE turns pairs: use an even number")
    if args.batch % args.accumulate:
        parser.error(f"--batch {args.batch} does not divide into --accumulate {args.accumulate}")
    if args.H % args.K:
        parser.error(f"--H {args.H} heads cannot share --K {args.K}: use a divisor of {args.H}")
    if args.topology and not args.compile_only:
        parser.error("--topology has devices that are not here: add --compile-only")
    return args


def config_file(name: str) -> Path:
    for path in (Path(name), HERE / "configs" / f"{name}.toml"):
        if path.is_file():
            return path
    names = sorted(path.stem for path in (HERE / "configs").glob("*.toml"))
    raise Refused(f"--config {name} is no file: give one, or {strategies.either(names)}")


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
            hint = f": is it {near[0]}?" if near else "; --help lists what there is"
            raise Refused(f"{path} has `{name}`, which is no setting{hint}")
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
