"""The command line. Nothing heavy is imported before the command is known."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from grupo._version import __version__
from grupo.errors import ConfigError, DataError, GrupoError

DONE, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130
OUTPUT = "training.output_dir"
RECIPE_HELP = "a YAML file or the name of a built-in recipe (default: quickstart)"


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of `grupo`. Exit codes: 0 done, 1 the run failed, 2 wrong usage or recipe, 130 stopped by Ctrl-C, 143
    stopped by SIGTERM."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.command is None:
        parser.print_help(sys.stderr)
        parser.exit(USAGE)
    warnings.filterwarnings("ignore", category=FutureWarning)  # from libraries, about their own next versions
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # complains about optional kernels when imported
    logging.getLogger("grupo").setLevel(logging.INFO if getattr(options, "verbose", False) else logging.WARNING)
    try:
        with _short_warnings():
            return int(options.command(options))
    except (ConfigError, DataError) as error:
        print(f"error{_rank_suffix()}: {error}", file=sys.stderr)
        return USAGE
    except GrupoError as error:
        print(f"the run stopped{_rank_suffix()}: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


@contextmanager
def _short_warnings() -> Iterator[None]:
    """Prints warnings without the line of code that raised them: they are sentences for users."""
    usual = warnings.formatwarning
    warnings.formatwarning = lambda message, *about, **more: f"{message}\n"
    try:
        yield
    finally:
        warnings.formatwarning = usual


def _rank_suffix() -> str:
    """Names the process with an error, as it is not always all of them."""
    rank = os.environ.get("RANK", "0")
    return "" if rank == "0" else f" (process {rank})"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="grupo", description="Teach language models to reason with Group Relative Policy Optimization."
    )
    parser.add_argument("--version", action="version", version=f"grupo {__version__}")
    parser.set_defaults(command=None)
    commands = parser.add_subparsers(metavar="COMMAND")

    train = commands.add_parser("train", help="train with a recipe; without one, run the quickstart")
    train.add_argument("recipe", nargs="?", help=RECIPE_HELP)
    _add_set(train, "for example --set training.max_steps=6")
    train.add_argument("--resume", action="store_true", help="continue from the last checkpoint in training.output_dir")
    train.add_argument("--accept-changes", default="", metavar="NAMES",
                       help="with --resume: settings that may have changed, such as steps,rewards")  # fmt: skip
    _add_run_flags(train)
    train.set_defaults(command=_train)

    sft = commands.add_parser("sft", help="run only the supervised phase of a recipe: show it answers in a format")
    sft.add_argument("recipe", nargs="?", help=RECIPE_HELP)
    _add_set(sft, "for example --set sft.rows=50")
    _add_run_flags(sft)
    sft.set_defaults(command=_sft)

    export = commands.add_parser("export", help="convert a run's model for other programs, or upload it")
    export.add_argument("run", help="folder of a run, a checkpoint, an adapter or a model")
    export.add_argument(
        "--to", required=True, choices=("adapter", "merged", "gguf", "hub"),
        help="only the adapter; adapter and base in one model; a file for llama.cpp; an upload of the folder",
    )  # fmt: skip
    export.add_argument("--output", help="target; nothing is overwritten (default: next to the run, as in RUN-merged)")
    export.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), help="of merged weights (default: that of the base)"
    )
    export.add_argument("--quantization", choices=("q8_0", "f16"), help="of a GGUF file (default: q8_0)")
    export.add_argument("--base", help="name or path of the base model, if it has moved since training")
    export.add_argument(
        "--base-weights", choices=("dequantised", "original"),
        help="of a base that was quantised for training: as used in training (default), or as before quantisation",
    )  # fmt: skip
    export.add_argument("--repo", help="for --to hub: NAME or OWNER/NAME; created if it does not exist")
    export.add_argument("--private", action="store_true", default=None, help="make a new repository private")
    export.add_argument("--revision", help="branch of the repository")
    export.add_argument("--verbose", action="store_true", help="print more details")
    export.set_defaults(command=_export)

    commands.add_parser("tasks", help="list the built-in tasks").set_defaults(command=_tasks)
    commands.add_parser("env", help="show versions and accelerators").set_defaults(command=_env)

    rewards = commands.add_parser("rewards", help="list the built-in rewards, or check rewards before training")
    rewards.set_defaults(command=_rewards)
    check = rewards.add_subparsers(metavar="COMMAND").add_parser("check", help="find faults of rewards")
    check.add_argument("sources", nargs="+", metavar="RECIPE_OR_NAME", help="one recipe, or names of rewards")
    check.add_argument("--task", help="task whose prompts are used for rewards given by name (default: times-tables)")
    check.add_argument("--completions", help="JSON lines with sampled completions, such as a run's completions.jsonl")
    check.add_argument("--gold-form", help="format of a correct completion, with {answer} and {reasoning} in it")
    check.add_argument("--timeout", type=float, default=10.0, help="time limit of one call in seconds (default: 10)")
    _add_set(check, "if rewards are given by a recipe")
    check.set_defaults(command=_check_rewards)

    recipes = commands.add_parser("recipes", help="list the built-in recipes, or show one of them")
    recipes.set_defaults(command=_recipes)
    show = recipes.add_subparsers(metavar="COMMAND").add_parser("show", help="print a recipe as a starting point")
    show.add_argument("name", help="of a built-in recipe")
    show.set_defaults(command=_show_recipe)
    return parser


def _add_set(parser: argparse.ArgumentParser, example: str) -> None:
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides",
                        help=f"change a value of the recipe, {example}")  # fmt: skip


def _add_run_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dry-run", action="store_true", help="check everything and show what the run would do")
    parser.add_argument("--verbose", action="store_true", help="print more details")


def _train(options: argparse.Namespace) -> int:
    from grupo.recipes.yaml_io import load_recipe

    # A mistake in the recipe is found before anything slow is imported.
    recipe = load_recipe(options.recipe, options.overrides)

    from rich.console import Console
    from transformers.utils.logging import disable_progress_bar

    from grupo.cli.train import train

    disable_progress_bar()  # of loading and saving; training has its own
    if options.resume and not any(text.partition("=")[0].strip() == OUTPUT for text in options.overrides):
        _check_run_not_moved(options.recipe, recipe.training.get("output_dir"))
    if options.accept_changes and not options.resume:
        raise ConfigError("--accept-changes is about differences from a checkpoint: it needs --resume.")
    return train(
        recipe, Console(), resume=options.resume, accept_changes=options.accept_changes, dry_run=options.dry_run
    )


def _check_run_not_moved(recipe: str | None, output_dir: str | None) -> None:
    """Checks that a recipe in a run folder resumes this run: its output_dir may be outdated, or relative to elsewhere.

    Raises:
        ConfigError: output_dir is another folder.
    """
    folder = Path(recipe or "").parent
    if recipe is None or output_dir is None or not (Path(recipe).is_file() and (folder / "manifest.json").is_file()):
        return
    if folder.resolve() != Path(output_dir).resolve():
        raise ConfigError(
            f"--resume: {recipe} is in a run folder, but its {OUTPUT}={output_dir!r} is a different folder from here. "
            f"To continue the run that it is in, add --set {OUTPUT}={str(folder)!r}."
        )


def _sft(options: argparse.Namespace) -> int:
    from grupo.recipes.yaml_io import load_recipe

    recipe = load_recipe(options.recipe, options.overrides)

    from rich.console import Console
    from transformers.utils.logging import disable_progress_bar

    from grupo.cli.sft import sft

    disable_progress_bar()
    return sft(recipe, Console(), dry_run=options.dry_run)


def _export(options: argparse.Namespace) -> int:
    from dataclasses import fields

    from transformers.utils.logging import disable_progress_bar

    from grupo.cli.export import ExportOptions, export

    disable_progress_bar()
    return export(
        options.run, options.to, ExportOptions(**{f.name: getattr(options, f.name) for f in fields(ExportOptions)})
    )


def _print_list(lines: Iterable[str]) -> None:
    try:
        print("\n".join(lines), flush=True)
    except BrokenPipeError:  # a reader such as `head` has stopped reading; Python would complain again when it exits
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _tasks(options: argparse.Namespace) -> int:
    from grupo.tasks.registry import describe_tasks

    _print_list(describe_tasks())
    return DONE


def _rewards(options: argparse.Namespace) -> int:
    import inspect

    from grupo.rewards.registry import REWARDS, value_range

    lines = []
    for name, factory in REWARDS.items():
        summary = (inspect.getdoc(factory) or "").partition("\n\n")[0].replace("\n", " ")
        parameters = [one.replace(annotation=one.empty) for one in inspect.signature(factory).parameters.values()]
        lines.append(f"{name}{inspect.Signature(parameters)}\n    {summary}\n    range: {value_range(factory)}")
    _print_list(lines)
    return DONE


def _check_rewards(options: argparse.Namespace) -> int:
    from grupo.cli.check_rewards import check

    report = check(
        options.sources,
        task=options.task,
        overrides=options.overrides,
        completions=options.completions,
        gold_form=options.gold_form,
        timeout=options.timeout,
    )
    print(report)
    return FAILED if report.faults else DONE


def _recipes(options: argparse.Namespace) -> int:
    from grupo.recipes.yaml_io import built_in_recipes, description

    _print_list(f"{name}: {description(name)}" for name in built_in_recipes())
    return DONE


def _show_recipe(options: argparse.Namespace) -> int:
    from grupo.recipes.yaml_io import built_in_text

    print(built_in_text(options.name), end="")
    return DONE


def _env(options: argparse.Namespace) -> int:
    import platform

    import torch

    from grupo.runs.manifest import PACKAGES, installed_version

    print(f"grupo {__version__}, Python {platform.python_version()}, {platform.platform()}, {os.cpu_count()} CPU cores")
    for package in PACKAGES:
        print(f"{package} {installed_version(package) or 'not installed'}")
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None:
        print("accelerator: none found, training runs on the CPU in float32")
    else:
        for index in range(torch.accelerator.device_count()):
            name = torch.cuda.get_device_name(index) if accelerator.type == "cuda" else accelerator.type
            print(f"accelerator {index}: {name}")
    return DONE
