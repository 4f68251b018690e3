"""``jpets backbone pretrain``: a backbone whose upper layers know the texts of a domain."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from jpets.commands.output import busy, print_fields, progress_bars
from jpets.errors import Conflict, InvalidBackbone, InvalidInput

if TYPE_CHECKING:
    from jpets.training.pretrain import Vocabulary

MASKS = ("[MASK]", "<mask>")


def pretrain(
    source: Annotated[str, typer.Argument(help="folder (Hugging Face or native), installed package or hub id")],
    data: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help=".txt, .csv, .tsv, .jsonl or .parquet")],
    destination: Annotated[Path, typer.Argument(metavar="DEST", help="folder to write; it must not exist")],
    layers: Annotated[str | None, typer.Option(help="numbers by commas; by default the upper half")] = None,
    text: Annotated[str, typer.Option(help="column of the texts")] = "text",
    name: Annotated[str | None, typer.Option(help="name of the new backbone; by default DEST's")] = None,
    epochs: Annotated[int, typer.Option(min=1)] = 1,
    batch: Annotated[int, typer.Option(min=1, help="texts a batch")] = 32,
    rate: Annotated[float, typer.Option(min=0, help="learning rate of the layers")] = 1e-4,
    max_length: Annotated[int, typer.Option(min=2, help="tokens that texts are cut to")] = 128,
    dtype: Annotated[str, typer.Option(help="of the forward pass: bfloat16 or float32")] = "bfloat16",
    seed: Annotated[int, typer.Option(min=0)] = 0,
) -> None:
    """Train some layers further on texts without labels, by masked language modelling.

    The result is a backbone of its own, with a fingerprint of its own: tasks are trained on it anew.
    """
    from checkpoints.backbone import Backbone
    from checkpoints.canonical import from_params
    from checkpoints.native import write_native
    from checkpoints.source import load_backbone
    from jpets.model.encoder import split
    from jpets.tokenizing import TextEncoder
    from jpets.training import pretrain as training
    from jpets.training.data import Columns, read_examples
    from jpets.training.plan import Plan
    from jpets.types import Preprocessing, Query

    if destination.exists():
        raise Conflict(f"{destination} exists already; remove it or choose another folder")
    if dtype not in ("bfloat16", "float32"):
        raise typer.BadParameter(f"--dtype must be bfloat16 or float32, found {dtype!r}")
    examples = read_examples(data, Columns(text, None, None))
    with busy("read backbone"):
        backbone = load_backbone(source)
    config = backbone.config
    encoder = TextEncoder(backbone.tokenizer_json, config.vocab_size, config.type_vocab_size, config.max_positions)
    rule = Preprocessing(max_length=min(max_length, config.max_positions), truncation=True)
    tokens = [encoder.encode(Query(None, str(each.text)), rule) for each in examples]
    plan = Plan(epochs, batch, rate=rate, dtype=cast("Any", dtype), seed=seed)
    with progress_bars() as bars:
        bar = bars.add_task("pretrain", total=None)
        params, losses = training.pretrain(
            split(config),
            dict(backbone.params),
            tokens,
            _layers(layers, config.layers),
            _vocabulary(backbone.tokenizer_json),
            plan,
            pad_id=encoder.pad_id,
            report=lambda step: bars.update(
                bar, completed=step.number, total=step.of, description=f"pretrain, loss {step.loss:.3f}"
            ),
        )
    made = Backbone.of_tensors(name or destination.name, config, from_params(params, config), backbone.tokenizer_json)
    write_native(made, destination)
    tenth = max(1, len(losses) // 10)
    shown = {"first loss": sum(losses[:tenth]) / tenth, "last loss": sum(losses[-tenth:]) / tenth}
    rows = [(what, f"{value:.4f}") for what, value in shown.items()]
    print_fields([("backbone", made.name), ("fingerprint", made.fingerprint), ("updates", len(losses)), *rows])


def _layers(given: str | None, count: int) -> list[int]:
    if given is None:
        return list(range(count // 2, count))
    try:
        return sorted({int(each) for each in given.split(",")})
    except ValueError as error:
        raise InvalidInput(f"--layers must be numbers by commas, found {given!r}") from error


def _vocabulary(tokenizer_json: str) -> Vocabulary:
    from tokenizers import Tokenizer

    from jpets.training.pretrain import Vocabulary

    tokenizer = Tokenizer.from_str(tokenizer_json)
    special = {at for at, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    mask = next((at for at in map(tokenizer.token_to_id, MASKS) if at is not None), None)
    if mask is None:
        raise InvalidBackbone(f"the tokenizer has none of {list(MASKS)}: its model was not trained to guess tokens")
    return Vocabulary(tokenizer.get_vocab_size(), mask, tuple(sorted(special | {mask})))
