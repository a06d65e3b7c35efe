"""`generate` continues text with the model of a folder or a checkpoint, as it comes."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from accelerate_megatron.cli import generate, generate_ranks
from accelerate_megatron.cli.main import main
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_models import VOCAB_SIZE, TinyModel

RECIPE = TinyModel("llama", changes={"num_hidden_layers": 2})
WITH_ENCODER = TinyModel("t5", changes={"num_layers": 2, "num_decoder_layers": 2})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(RECIPE, tmp_path_factory.mktemp("llama"))


def write_folder(recipe: TinyModel, path: Path) -> Path:
    """Write a model with a tokenizer of whole words: w0, w1, ..."""
    recipe.build().save_pretrained(path)
    words = models.WordLevel({f"w{n}": n for n in range(VOCAB_SIZE)}, unk_token="w0")
    tokenizer = Tokenizer(words)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0").save_pretrained(path)
    return path


def on_rank(settings: str) -> str:
    """Run the job on this rank; return what it printed."""
    import contextlib
    import io

    sys.argv = ["generate_ranks", settings]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        generate_ranks.main()
    return printed.getvalue()


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Let jobs run on two ranks; what each of them prints comes here."""
    texts: list[str] = []

    def run_job(module: str, settings: dict[str, Any], flags: list[str]) -> Any:
        assert module == "accelerate_megatron.cli.generate_ranks"
        assert flags[:2] == ["--pp_degree", "2"]
        assert flags[-2:] == ["--mixed_precision", "no"]
        report = tmp_path / "report.json"
        path = tmp_path / "settings.json"
        path.write_text(json.dumps({**settings, "report": str(report)}))
        fields = zip(flags[:-2:2], flags[1:-2:2], strict=True)
        env = {f"MEGATRON_LM_{flag[2:].upper()}": value for flag, value in fields}
        env["ACCELERATE_USE_CPU"] = "true"
        texts.extend(run_ranks(on_rank, str(path), num_ranks=2, env=env))
        return json.loads(report.read_text())

    monkeypatch.setattr(generate, "run_job", run_job)
    return texts


def continuation(prompt: list[int], recipe: TinyModel = RECIPE, **asked: Any) -> str:
    model = recipe.build().eval()
    tokens = model.generate(
        torch.tensor([prompt]), do_sample=False, use_cache=True, pad_token_id=0, **asked
    )
    return " ".join(f"w{token}" for token in tokens[0].tolist())


def test_it_streams_each_prompt_on_the_main_process(folder: Path, printed: list[str]) -> None:
    words = ["--prompt", "w5 w6", "--prompt", "w7", "--max_new_tokens", "6"]

    assert main(["generate", "--pp_degree", "2", str(folder), *words]) == 0

    wanted = [continuation(prompt, max_new_tokens=6) for prompt in ([5, 6], [7])]
    assert printed[0] == ""
    assert printed[1].split("\n") == [*wanted, ""]


def test_it_streams_what_a_model_with_an_encoder_answers(
    tmp_path: Path, printed: list[str]
) -> None:
    write_folder(WITH_ENCODER, tmp_path / "t5")
    words = ["--prompt", "w5 w6 w9", "--max_new_tokens", "6", "--pp_degree", "2"]

    split = ["--pipeline_model_parallel_split_rank", "1"]
    assert main(["generate", str(tmp_path / "t5"), *words, *split]) == 0

    wanted = continuation([5, 6, 9], WITH_ENCODER, max_new_tokens=6)
    assert wanted.startswith("w3 ")
    assert printed == ["", wanted + "\n"]


def test_json_and_beams_come_at_the_end(folder: Path, printed: list[str], capsys) -> None:
    words = ["--prompt", "w5 w6", "--max_new_tokens", "6", "--pp_degree", "2", "--num_beams", "3"]
    wanted = continuation([5, 6], max_new_tokens=6, num_beams=3)

    assert main(["generate", str(folder), *words]) == 0
    assert capsys.readouterr().out == wanted + "\n"
    assert main(["generate", str(folder), *words, "--json"]) == 0
    [row] = json.loads(capsys.readouterr().out)["generated"]

    assert (row["prompt"], row["text"]) == ("w5 w6", wanted)
    assert set(printed) == {""}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--temperature", "0"], "temperature is 0.0; it must be above 0"),
        (["--max_new_tokens", "0"], "max_new_tokens is 0"),
        (["--tokenizer", "/nowhere"], "/nowhere holds no tokenizer; name its folder"),
        (["--top_p", "0.5", "--num_beams", "2"], "num_beams is 2 together with top_p"),
    ],
)
def test_misuse_is_told_before_ranks_are_started(
    folder: Path, words: list[str], message: str, capsys
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["generate", str(folder), "--prompt", "w5", *words])

    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_a_folder_without_a_model_is_refused(tmp_path: Path, capsys) -> None:
    with pytest.raises(SystemExit):
        main(["generate", str(tmp_path), "--prompt", "w5"])

    assert str(tmp_path) in capsys.readouterr().err


def save_checkpoint(recipe: TinyModel, output: str) -> None:
    from accelerate_megatron import Accelerator

    accelerator = Accelerator(cpu=True)
    accelerator.prepare(recipe.build())
    accelerator.save_state(output)


@pytest.mark.parametrize(
    ("recipe", "split"),
    [
        pytest.param(RECIPE, [], id="decoder"),
        # Its config says that it is tied, as transformers makes that of each T5 say.
        pytest.param(
            dataclasses.replace(WITH_ENCODER, tied=False),
            ["--pipeline_model_parallel_split_rank", "1"],
            id="untied-t5",
        ),
    ],
)
def test_a_checkpoint_continues_like_its_model(
    recipe: TinyModel, split: list[str], folder: Path, printed: list[str], tmp_path: Path
) -> None:
    run_ranks(save_checkpoint, recipe, str(tmp_path / "ckpt"), num_ranks=1)
    words = ["--prompt", "w5 w6", "--max_new_tokens", "6", "--pp_degree", "2", *split]

    assert main(["generate", str(tmp_path / "ckpt"), "--tokenizer", str(folder), *words]) == 0

    assert printed[1] == continuation([5, 6], recipe, max_new_tokens=6) + "\n"
