"""`grupo export`: what a run folder, a checkpoint and an adapter become, and what is refused."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import AutoPeftModelForCausalLM, LoraConfig
from transformers import AutoModelForCausalLM

from grupo.cli import main
from grupo.export.logit_check import difference, logits_of
from grupo.models.peft_io import find_adapter, load_with_adapter, save_adapter
from saved_adapters import ADAPTERS, NF4, adapted, base_folder
from tiny import tiny_tokenizer
from tiny_trainer import make_trainer

IDS = torch.arange(6, 80)[None]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on a model of disk, with a checkpoint."""
    from tiny import tiny_model

    folder = tmp_path_factory.mktemp("command")
    tiny_model(tied=True).save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    trainer = make_trainer(
        folder / "run", model=model, peft_config=LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear"),
        max_steps=2, save_strategy="steps", save_steps=1,
    )  # fmt: skip
    trainer.train()
    trainer.save_model()
    return folder / "run"


def test_merged_from_a_run_and_from_its_checkpoint(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["export", str(run), "--to", "merged", "--output", str(tmp_path / "merged")]) == 0
    said = capsys.readouterr().out
    assert (
        "merged model against adapter on base: log-probs differ by at most" in said
        and "training changed the model" in said
    )
    adapter = AutoPeftModelForCausalLM.from_pretrained(run)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert difference(logits_of(adapter, IDS), logits_of(merged, IDS)).largest < 1e-4
    assert "| step | reward |" in (tmp_path / "merged" / "README.md").read_text(encoding="utf-8")
    checkpoint = run / "checkpoint-1"
    assert main(["export", str(checkpoint), "--to", "merged", "--output", str(tmp_path / "first")]) == 0
    first = AutoModelForCausalLM.from_pretrained(tmp_path / "first")
    assert difference(logits_of(first, IDS), logits_of(merged, IDS)).largest > 1e-4


def test_a_killed_run_is_exported_from_its_newest_checkpoint(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture, caplog: pytest.LogCaptureFixture
) -> None:
    killed = tmp_path / "killed"
    killed.mkdir()
    (killed / "checkpoint-2").symlink_to(run / "checkpoint-2")
    assert main(["export", str(killed), "--to", "merged"]) == 0
    assert "it has no saved model; using its latest checkpoint, checkpoint-2." in caplog.text
    assert (tmp_path / "killed-merged" / "model.safetensors").is_file()
    assert main(["export", str(killed), "--to", "merged"]) == 2
    assert "exists already, and nothing is overwritten" in capsys.readouterr().err


def test_a_run_that_went_on_behind_its_saved_model_is_exported_from_its_newest_checkpoint(
    run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As one that SIGTERM has ended, which was then resumed and killed."""
    resumed = tmp_path / "resumed"
    shutil.copytree(run, resumed)
    shutil.copy(run / "checkpoint-1" / "adapter_model.safetensors", resumed)
    (resumed / "manifest.json").write_text('{"model_step": 1}')
    output = tmp_path / "newest"
    assert main(["export", str(resumed), "--to", "adapter", "--output", str(output)]) == 0
    assert "its saved model is older (step 1); using its latest checkpoint, checkpoint-2." in caplog.text
    weights = [
        (folder / "adapter_model.safetensors").read_bytes() for folder in (output, run / "checkpoint-2", resumed)
    ]
    assert weights[0] == weights[1] != weights[2]


def test_damaged_files_are_named(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(run, damaged)
    weights = damaged / "checkpoint-1" / "adapter_model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert main(["export", str(weights.parent), "--to", "adapter"]) == 2
    assert "adapter_model.safetensors has changed since it was written" in capsys.readouterr().err
    (damaged / "adapter_model.safetensors").write_bytes(content[:100])
    assert main(["export", str(damaged), "--to", "merged"]) == 2
    assert "cannot be read" in capsys.readouterr().err
    (damaged / "tokenizer.json").unlink()
    assert main(["export", str(damaged), "--to", "merged"]) == 2
    assert "tokenizer" in capsys.readouterr().err
    (damaged / "manifest.json").write_text('{"adapter": "style"}')
    shutil.copytree(run / "checkpoint-2", damaged / "style")
    assert main(["export", str(damaged), "--to", "adapter"]) == 2
    assert "trained the adapter 'style'" in capsys.readouterr().err


def test_what_cannot_be_written_is_a_sentence(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    for target in ("adapter", "merged"):
        assert main(["export", str(run), "--to", target, "--output", str(tmp_path / "file" / "below")]) == 1
        assert "cannot be written" in capsys.readouterr().err


def test_the_adapter_alone(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    output = tmp_path / "adapter"
    assert main(["export", str(run), "--to", "adapter", "--output", str(output)]) == 0
    assert {path.name for path in output.iterdir()} >= {"adapter_config.json", "adapter_model.safetensors",
                                                        "tokenizer.json", "chat_template.jinja"}  # fmt: skip
    assert not (output / "metrics.jsonl").exists() and "for the base model" in capsys.readouterr().out
    left, right = (AutoPeftModelForCausalLM.from_pretrained(folder) for folder in (run, output))
    assert difference(logits_of(left, IDS), logits_of(right, IDS)).largest == 0.0
    model = run.parent / "model"
    assert main(["export", str(model), "--to", "adapter"]) == 2
    assert "has a whole model, not an adapter" in capsys.readouterr().err


@pytest.mark.usefixtures("processor")
def test_how_the_base_was_quantised_goes_with_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture, caplog: pytest.LogCaptureFixture
) -> None:
    """From the manifest of the run, and from the file beside an exported adapter."""
    model = adapted(base_folder(tmp_path / "base"), NF4, **ADAPTERS["plain"])

    trainer = make_trainer(tmp_path / "run", model=model, learning_rate=0.0, max_steps=1)
    trainer.train()
    trainer.save_model()
    adapter, ids = tmp_path / "adapter", IDS
    before = logits_of(trainer.model, ids)
    assert main(["export", str(tmp_path / "run"), "--to", "adapter", "--output", str(adapter)]) == 0
    for number, source in enumerate((tmp_path / "run", adapter)):
        output = tmp_path / f"merged-{number}"
        assert main(["export", str(source), "--to", "merged", "--output", str(output), "--dtype", "float32"]) == 0
        merged = AutoModelForCausalLM.from_pretrained(output)
        assert difference(before, logits_of(merged, ids)).largest < 1e-4
    assert "starts from a slightly different policy" not in caplog.text
    load_with_adapter(find_adapter(str(adapter)))
    assert "starts from a slightly different policy" in caplog.text
    (adapter / "base_quantization.json").unlink()
    assert main(["export", str(adapter), "--to", "merged", "--output", str(tmp_path / "wrong")]) == 0
    wrong = AutoModelForCausalLM.from_pretrained(tmp_path / "wrong")
    assert difference(before, logits_of(wrong, ids)).largest > 1e-2, "otherwise this test would prove nothing"
    # A run without quantisation in the same folder must not be taken for one with it, nor an adapter.
    assert (tmp_path / "run" / "base_quantization.json").is_file()
    model = adapted(tmp_path / "base", None, **ADAPTERS["plain"])
    make_trainer(tmp_path / "run", model=model, learning_rate=0.0, max_steps=1).train()
    assert not (tmp_path / "run" / "base_quantization.json").exists()
    (adapter / "base_quantization.json").write_text("{}")
    save_adapter(model, adapter)
    assert not (adapter / "base_quantization.json").exists()


def test_options_of_another_target_are_refused(run: Path, capsys: pytest.CaptureFixture) -> None:
    for flags, said in (
        (["--to", "merged", "--quantization", "f16"], "--quantization has no effect with --to merged"),
        (["--to", "gguf", "--dtype", "float16"], "--dtype has no effect with --to gguf"),
        (["--to", "hub"], "--to hub needs a repository"),
        (["--to", "gguf"], "The tokenizer is of the kind WordLevel"),
    ):
        assert main(["export", str(run), *flags]) == 2
        assert said in capsys.readouterr().err


def test_gguf_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    base_folder(tmp_path / "base")
    assert main(["export", str(tmp_path / "base"), "--to", "gguf", "--quantization", "f16"]) == 0
    assert (tmp_path / "base-f16.gguf").is_file() and "pre-tokenizer smollm" in capsys.readouterr().out


def test_help_needs_no_torch() -> None:
    program = (
        "import sys\nfrom grupo.cli import main\ntry: main(['export', '--help'])\nexcept SystemExit: pass\n"
        "import grupo.export.upload\nassert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0 and "--base-weights" in result.stdout, result.stderr
