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

DONE, FAILED, USAGE = 0, 1, 2
OUTPUT = "training.output_dir"


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of `grupo`. Exit codes: 0 done, 1 the run failed, 2 wrong usage or recipe, 130
    interrupted by Ctrl-C, 143 ended by SIGTERM."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.command is None:
        parser.print_help(sys.stderr)
        parser.exit(USAGE)
    warnings.filterwarnings("ignore", category=FutureWarning)  # of the libraries below, about their own next versions
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # complains about optional kernels when it is imported
    logging.getLogger("grupo").setLevel(logging.INFO if getattr(options, "verbose", False) else logging.WARNING)
    try:
        with _plain_warnings():
            return int(options.command(options))
    except (ConfigError, DataError) as error:
        print(f"error{_of_process()}: {error}", file=sys.stderr)
        return USAGE
    except GrupoError as error:
        print(f"the run stopped{_of_process()}: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


@contextmanager
def _plain_warnings() -> Iterator[None]:
    """Warnings are sentences for the person: the line of code that gives them says nothing more."""
    usual = warnings.formatwarning
    warnings.formatwarning = lambda message, *about, **more: f"{message}\n"
    try:
        yield
    finally:
        warnings.formatwarning = usual


def _of_process() -> str:
    """Which of several processes has met an error: usually all of them, but not always."""
    rank = os.environ.get("RANK", "0")
    return "" if rank == "0" else f" (process {rank})"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="grupo", description="Teach language models to reason with Group Relative Policy Optimization."
    )
    parser.add_argument("--version", action="version", version=f"grupo {__version__}")
    parser.set_defaults(command=None)
    commands = parser.add_subparsers(metavar="COMMAND")

    train = commands.add_parser("train", help="train by a recipe; without one, the quickstart")
    train.add_argument("recipe", nargs="?", help="a YAML file or the name of a built-in recipe (default: quickstart)")
    train.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides",
        help="change a value of the recipe, for example --set training.max_steps=6",
    )  # fmt: skip
    train.add_argument("--resume", action="store_true", help="go on from the last checkpoint in training.output_dir")
    train.add_argument("--accept-changes", default="", metavar="NAMES",
                       help="with --resume: settings that may have changed, such as steps,rewards")  # fmt: skip
    train.add_argument("--dry-run", action="store_true", help="check everything and say what would be done")
    train.add_argument("--verbose", action="store_true", help="say more")
    train.set_defaults(command=_train)

    sft = commands.add_parser("sft", help="only the supervised phase of a recipe: show it answers in the wanted form")
    sft.add_argument("recipe", nargs="?", help="a YAML file or the name of a built-in recipe (default: quickstart)")
    sft.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides",
                     help="change a value of the recipe, for example --set sft.rows=50")  # fmt: skip
    sft.add_argument("--dry-run", action="store_true", help="check everything and say what would be done")
    sft.add_argument("--verbose", action="store_true", help="say more")
    sft.set_defaults(command=_sft)
    export = commands.add_parser("export", help="write a run's model for other programs, or upload it")
    export.add_argument("run", help="folder of a run, of a checkpoint, of an adapter or of a model")
    export.add_argument(
        "--to", required=True, choices=("adapter", "merged", "gguf", "hub"),
        help="the adapter alone; adapter and base in one folder; a file for llama.cpp; an upload of the folder",
    )  # fmt: skip
    export.add_argument("--output", help="where to; nothing is overwritten (default: beside the run, as in RUN-merged)")
    export.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), help="of merged weights (default: the base's)"
    )
    export.add_argument("--quantization", choices=("q8_0", "f16"), help="of a GGUF file (default: q8_0)")
    export.add_argument("--base", help="name or path of the base model, where it is not where the adapter says")
    export.add_argument(
        "--base-weights", choices=("dequantised", "original"),
        help="of a base that was quantised in training: as it was trained on (default), or as it was before",
    )  # fmt: skip
    export.add_argument("--repo", help="of --to hub: NAME or OWNER/NAME; made where there is none")
    export.add_argument("--private", action="store_true", default=None, help="of a new repository")
    export.add_argument("--revision", help="branch of the repository")
    export.add_argument("--verbose", action="store_true", help="say more")
    export.set_defaults(command=_export)

    for name, command, text in (
        ("tasks", _tasks, "list the built-in tasks"),
        ("env", _env, "show versions and accelerators"),
    ):
        commands.add_parser(name, help=text).set_defaults(command=command)

    rewards = commands.add_parser("rewards", help="list the built-in rewards, or check rewards before training")
    rewards.set_defaults(command=_rewards)
    check = rewards.add_subparsers(metavar="COMMAND").add_parser("check", help="find faults of rewards")
    check.add_argument("sources", nargs="+", metavar="RECIPE_OR_NAME", help="one recipe, or names of rewards")
    check.add_argument("--task", help="whose prompts the named rewards are checked with (default: times-tables)")
    check.add_argument("--completions", help="JSON lines with sampled completions, such as a run's completions.jsonl")
    check.add_argument("--gold-form", help="how a right completion is written, with {answer} and {reasoning} in it")
    check.add_argument("--timeout", type=float, default=10.0, help="seconds that one call may take (default: 10)")
    check.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides",
                       help="change a value of the recipe")  # fmt: skip
    check.set_defaults(command=_check_rewards)

    recipes = commands.add_parser("recipes", help="list the built-in recipes, or show one of them")
    recipes.set_defaults(command=_recipes)
    show = recipes.add_subparsers(metavar="COMMAND").add_parser("show", help="print a recipe, to start one's own from")
    show.add_argument("name", help="of a built-in recipe")
    show.set_defaults(command=_show_recipe)
    return parser


def _train(options: argparse.Namespace) -> int:
    from grupo.recipes.yaml_io import load_recipe

    # A recipe with a mistake is refused before anything slow is imported.
    recipe = load_recipe(options.recipe, options.overrides)

    from rich.console import Console
    from transformers.utils.logging import disable_progress_bar

    from grupo.cli.train import train

    disable_progress_bar()  # of loading and saving; training has its own

    if options.resume and not any(text.partition("=")[0].strip() == OUTPUT for text in options.overrides):
        _check_place(options.recipe, recipe.training.get("output_dir"))
    if options.accept_changes and not options.resume:
        raise ConfigError("--accept-changes is about what differs from a checkpoint: it needs --resume.")
    return train(
        recipe, Console(), resume=options.resume, accept_changes=options.accept_changes, dry_run=options.dry_run
    )


def _check_place(recipe: str | None, output_dir: str | None) -> None:
    """The recipe in a run folder that was moved, or is named from elsewhere, would start another run.

    Raises:
        ConfigError: its output_dir is another folder than the one that it is in.
    """
    folder = Path(recipe or "").parent
    if recipe is None or output_dir is None or not (Path(recipe).is_file() and (folder / "manifest.json").is_file()):
        return
    if folder.resolve() != Path(output_dir).resolve():
        raise ConfigError(
            f"--resume: {recipe} is in the folder of a run, and its {OUTPUT}={output_dir!r} is another folder from "
            f"here. To go on with the run that it is in, add --set {OUTPUT}={str(folder)!r}."
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
    except BrokenPipeError:  # the reader, such as `head`, has seen enough; Python would complain again at its end
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


if __name__ == "__main__":
    sys.exit(main())
