"""Which devices are used, and by how many processes: decided before JAX is first used."""

import argparse
import os
from typing import Any

import jax

import endings
from strategies import Refused


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


def choose_devices(args: argparse.Namespace) -> None:
    """Must come before JAX is first used. JAX_PLATFORMS and JAX_NUM_CPU_DEVICES work as well."""
    if args.topology:
        jax.config.update("jax_platforms", "cpu")  # the compiler for the others needs no device
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
