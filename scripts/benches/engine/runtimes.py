"""``bench.py runtimes``: single texts and small batches beside PyTorch (TurboTransformers figures 10 and 11)."""

from __future__ import annotations

import pathlib
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any

import jax
import numpy as np
import typer

from benches.shared import answers, console, engine_cache, interleave, paired_ratio, random_backbone, report
from jpets.config import BackboneConfig, EngineSettings
from jpets.engine.engine import Engine
from jpets.types import Query
from jpets.xla_flags import set_xla_flags

DTYPES = ("float32", "bfloat16")
"""PyTorch's."""
LENGTHS = (5, 500)
"""Least and most tokens of a text, as in the paper."""


def runtimes(
    backbone: str = "bert-base",
    texts: Annotated[int, typer.Option(help="single texts of 5 to 500 tokens, in random order")] = 50,
    batches: Annotated[str, typer.Option(help="batch sizes with texts of one length")] = "1,20",
    lengths: Annotated[str, typer.Option(help="tokens of the texts of a batch")] = "10,40,80,160,320,500",
    warm_up: Annotated[float, typer.Option(help="seconds of such texts for the engine before it is timed")] = 180.0,
    rounds: int = 5,
    json_out: Annotated[pathlib.Path | None, typer.Option("--json")] = None,
) -> None:
    """Seconds of a text and of a batch in an engine by default settings, and in PyTorch by ``transformers``.

    Needs PyTorch, with CUDA where jpets runs on a GPU. The encoders have the same sizes and random weights: bf16 here,
    f32 and bf16 there.
    """
    set_xla_flags()
    loaded = random_backbone(backbone)
    drawn = [int(n) for n in np.random.default_rng(0).integers(LENGTHS[0], LENGTHS[1] + 1, texts)]
    fixed = [(rows, length) for rows in map(int, batches.split(",")) for length in map(int, lengths.split(","))]
    models = {f"torch {dtype}": torch_model(loaded.config, dtype) for dtype in DTYPES}
    with engine_cache() as cache:
        engine = Engine(loaded, [], EngineSettings(), cache_dir=cache)
        with engine.start(lambda what, done, total: None):
            _warm_up(engine, texts, fixed, warm_up)
            before = engine.report().devices[0]
            runs: dict[str, Callable[[int, int], object]] = {"pets": partial(_serve, engine)}
            runs |= {name: partial(run, loaded.config.vocab_size) for name, run in models.items()}
            singles = _singles(runs, drawn, rounds)
            after = engine.report().devices[0]
            figures = {name: own | {"batches": {}} for name, own in singles.items()}
            for rows, length in fixed:
                seconds = interleave({name: partial(run, rows, length) for name, run in runs.items()}, rounds)
                console.log(f"{rows} x {length}", {name: statistics.median(own) for name, own in seconds.items()})
                for name, times in seconds.items():
                    own: dict[str, Any] = {"seconds": statistics.median(times)}
                    if name != "pets":
                        own["pets_ratio"] = paired_ratio(seconds["pets"], times)
                    figures[name]["batches"][f"{rows}x{length}"] = own
    settings = {
        "backbone": backbone,
        "texts": texts,
        "batches": batches,
        "lengths": lengths,
        "warm_up": warm_up,
        "rounds": rounds,
        "drawn": drawn,
        "fallbacks": after.fallbacks - before.fallbacks,
        "served": after.batches - before.batches,
    }
    report("runtimes", settings, figures, json_out)


def bert_config(config: BackboneConfig, **more: Any) -> Any:
    """A configuration of these sizes for ``transformers``."""
    import transformers

    return transformers.BertConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        intermediate_size=config.intermediate_size,
        max_position_embeddings=config.max_positions,
        **more,
    )


def torch_device() -> str:
    """Where PyTorch runs beside jpets."""
    return "cuda" if jax.default_backend() == "gpu" else "cpu"


def torch_model(config: BackboneConfig, dtype: str) -> Callable[[int, int, int], object]:
    """A call of ``transformers.BertModel`` with random weights of these sizes: (vocabulary, rows, tokens)."""
    import torch
    import transformers

    device = torch_device()
    model = transformers.BertModel(bert_config(config), add_pooling_layer=False)
    model = model.eval().to(device, getattr(torch, dtype))

    def run(vocabulary: int, rows: int, length: int) -> object:
        ids = np.random.default_rng(length).integers(5, vocabulary, (rows, length))
        with torch.inference_mode():
            return model(input_ids=torch.from_numpy(ids).to(device)).last_hidden_state.mean(1).float().cpu().numpy()

    return run


def _serve(engine: Engine, rows: int, length: int) -> None:
    ids = np.random.default_rng(length).integers(5, engine.backbone.config.vocab_size, (rows, length))
    answers(engine, [Query(None, input_ids=row) for row in ids.tolist()])


def _warm_up(engine: Engine, texts: int, fixed: Sequence[tuple[int, int]], seconds: float) -> None:
    """Single texts of other lengths than those that are timed, and the batches. Then nothing is compiled any more: it
    would take cores from what is timed."""
    until, rng = time.perf_counter() + seconds, np.random.default_rng(1)
    while time.perf_counter() < until:
        for rows, length in [*((1, int(length)) for length in rng.integers(LENGTHS[0], LENGTHS[1] + 1, texts)), *fixed]:
            _serve(engine, rows, length)
    engine.compiler.close()


def _singles(
    runs: dict[str, Callable[[int, int], object]], drawn: Sequence[int], rounds: int
) -> dict[str, dict[str, Any]]:
    """Median seconds of each text, and the ratio of all."""
    times: dict[str, list[list[float]]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        for name, run in runs.items():
            own = []
            for length in drawn:
                start = time.perf_counter()
                run(1, length)
                own.append(time.perf_counter() - start)
            if number:
                times[name].append(own)
    figures: dict[str, dict[str, Any]] = {}
    for name, found in times.items():
        each = np.median(np.array(found), axis=0)
        figures[name] = {"mean_seconds": float(each.mean()), "singles": each.tolist()}
        if name != "pets":
            ratio = paired_ratio([sum(own) for own in times["pets"]], [sum(own) for own in found])
            figures[name]["pets_ratio"] = ratio
    return figures
