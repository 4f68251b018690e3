"""What a Sentence-Transformers folder does around its model: what happens to texts before it, and to tokens behind it.

    modules.json                       the modules in their order, and where each lies
    sentence_bert_config.json          max_seq_length, do_lower_case (beside the model; older ones name the family)
    config_sentence_transformers.json  prompts, and which one every text gets
    1_Pooling/config.json              how tokens become one vector
    2_Dense/                           a layer behind that (``checkpoints.imports.dense``)

Whatever else such a folder asks for is a problem, and named.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import tokenizers

from checkpoints.settings import MAX_BYTES, expect, expect_count, is_number, names, read_json, unsupported
from jpets.errors import InvalidBackbone, InvalidTask
from jpets.files import read_bounded
from jpets.types import EmbeddingRule, Pooling, Preprocessing

MODULES = "modules.json"
PROMPTS = "config_sentence_transformers.json"
LIBRARY = "sentence_transformers."
UNDERSTOOD = ("Transformer", "Pooling", "Dense", "Normalize")
WITHOUT_EFFECT = ("Dropout",)
"""Modules that do nothing after training."""
FAMILIES = ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
"""Families in the name of the file with the model's settings; since version 0.3 it is ``bert`` for all."""
POOLINGS: Mapping[str, Pooling] = MappingProxyType(
    {"cls": "cls", "cls_token": "cls", "mean": "mean", "mean_tokens": "mean"}
)
MODE = "pooling_mode"
ROOT_MEAN = "mean_sqrt_len_tokens"
"""The sum over the root of the number of tokens: of length 1 it is the mean."""
POOLING_KEYS = names(
    "word_embedding_dimension embedding_dimension include_prompt pooling_mode pooling_mode_cls_token "
    "pooling_mode_mean_tokens pooling_mode_max_tokens pooling_mode_mean_sqrt_len_tokens "
    "pooling_mode_weightedmean_tokens pooling_mode_lasttoken"
)
TRANSFORMER_KEYS = names(
    "max_seq_length do_lower_case transformer_task modality_config module_output_name "
    # how the library computes, not what
    "unpad_inputs backend"
)
ARGUMENTS = ("model_args", "model_kwargs", "tokenizer_args", "processor_kwargs", "config_args", "config_kwargs")
"""What the library hands to transformers, by its old and new names."""
HARMLESS = names(
    "torch_dtype dtype attn_implementation add_pooling_layer use_safetensors low_cpu_mem_usage device_map "
    "trust_remote_code use_fast model_max_length clean_up_tokenization_spaces local_files_only cache_dir revision token"
)
"""Arguments about loading and precision, or read elsewhere."""
EXPECTED: Mapping[str, object] = MappingProxyType(
    {
        "transformer_task": "feature-extraction",
        "module_output_name": "token_embeddings",
        "modality_config": {"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
    }
)
UNLIMITED = 1 << 20
"""Tokenizers without a limit say a number above this."""


@dataclasses.dataclass(frozen=True)
class Sentence:
    """``lowercase``: texts lose their case before they are tokenised, whatever the tokenizer does.

    ``dense`` are the folders of the layers between pooling and normalisation. ``notes`` are for the user: what the
    folder offers and does not do by itself.
    """

    rule: EmbeddingRule
    lowercase: bool = False
    dense: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


class Module(NamedTuple):
    kind: str
    path: str


def model_folder(folder: Path) -> Path:
    """Where the model's own files lie: in a folder of their own where ``modules.json`` says so, as older ones do."""
    try:
        listed = json.loads(read_bounded(folder / MODULES, MAX_BYTES))
        places = [str(each["path"]) for each in listed if _kind(str(each["type"])) == "Transformer"]
    except (OSError, ValueError, RecursionError, KeyError, TypeError):  # which reading them all refuses
        return folder
    inner = [folder / place for place in places if _is_name(place)]
    return next((each for each in inner if any(each.glob("*config.json"))), folder)


def read_sentence(folder: Path, longest: int, problems: list[str], pooling: Pooling | None = None) -> Sentence | None:
    """How the folder makes an embedding of a text; None for one that does not say, without ``modules.json``.

    ``longest`` is the most tokens that the model takes; ``pooling`` is the user's, in the place of the folder's.
    Raises ``InvalidTask`` for files that cannot be read.
    """
    if not (folder / MODULES).is_file():
        return None
    modules = _modules(folder, problems)
    default, prompts = prompts_of(folder, problems)
    prompt = prompts.get(default) if default is not None else None
    pooled = _pooling_settings(folder, modules, problems)
    if pooled.get("include_prompt") is False:
        if prompt:
            problems.append("include_prompt must be true beside a default prompt, found false")
        prompts = {}
    settings = transformer_settings(folder)
    lowercase = expect(settings, "do_lower_case", bool, False, problems)
    rule = EmbeddingRule(
        pooling or _pooling(pooled, modules, problems),
        any(module.kind == "Normalize" for module in modules),
        Preprocessing(
            most_tokens(folder, settings, longest, problems),
            True,
            prefix=prompt or None,
            prompts=prompts or None,
        ),
    )
    check_settings(settings, EXPECTED, problems)
    dense = tuple(module.path for module in modules if module.kind == "Dense")
    return Sentence(rule, lowercase, dense, note_on_prompts(default, prompts, "name one with each text (prompt_name)"))


def lowercases(tokenizer_json: str) -> bool:
    """Whether a tokenizer takes texts without their case."""
    normalizer = tokenizers.Tokenizer.from_str(tokenizer_json).normalizer
    return normalizer is not None and normalizer.normalize_str("ABC").islower()


def check_case(lowercase: bool, tokenizer_json: str, problems: list[str]) -> None:
    """A problem for texts that would have to lose their case over a tokenizer that keeps it."""
    if lowercase and not lowercases(tokenizer_json):
        problems.append(
            "do_lower_case: the backbone's tokenizer keeps the case of texts; load this folder itself as a backbone, "
            "which then lowers it"
        )


def lowered(tokenizer_json: str) -> str:
    """The tokenizer made to lower case, as Sentence-Transformers does it; itself where it did before.

    Raises ``InvalidBackbone`` for what is no tokenizer.
    """
    try:
        if lowercases(tokenizer_json):
            return tokenizer_json
    except Exception as error:  # the tokenizers library raises bare Exception for a file that it cannot read
        raise InvalidBackbone("tokenizer.json cannot be read; save the fast tokenizer again") from error
    document = json.loads(tokenizer_json)
    own = document.get("normalizer")
    others = own["normalizers"] if own and own["type"] == "Sequence" else [own] if own else []
    document["normalizer"] = {"type": "Sequence", "normalizers": [{"type": "Lowercase"}, *others]}
    return json.dumps(document, ensure_ascii=False)


def _is_name(place: str) -> bool:
    """Whether it is the name of a folder in a folder."""
    return bool(place) and Path(place).name == place and place != ".." and "\\" not in place


def _kind(reference: str) -> str:
    """A module's class without its package, which the library moved; a class of another package as it is written."""
    return reference.rpartition(".")[2] if reference.startswith(LIBRARY) else reference


def listed_modules(folder: Path) -> Sequence[Module]:
    """The modules that have an effect, in their order. Raises ``InvalidTask``."""
    try:
        listed = json.loads(read_bounded(folder / MODULES, MAX_BYTES))
        modules = [Module(_kind(str(each["type"])), str(each["path"])) for each in listed]
    except (ValueError, RecursionError, KeyError, TypeError) as error:
        raise InvalidTask(f"{MODULES}: expected a list of modules with type and path") from error
    return [module for module in modules if module.kind not in WITHOUT_EFFECT]


def _modules(folder: Path, problems: list[str]) -> Sequence[Module]:
    """The modules of a model that embeds."""
    modules = listed_modules(folder)
    unknown = [f"{MODULES}: {kind[:80]!r} is not supported" for kind, _ in modules if kind not in UNDERSTOOD]
    problems += unknown[:3]
    found = tuple(module.kind for module in modules)
    between = found[2:-1] if found[-1:] == ("Normalize",) else found[2:]
    if not unknown and (found[:2] != UNDERSTOOD[:2] or any(kind != "Dense" for kind in between)):
        expected = "Transformer, Pooling, maybe some Dense and maybe Normalize"
        problems.append(f"{MODULES}: expected {expected}, found {str(list(found))[:80]}")
    for kind, path in modules:
        if path and not _is_name(path):
            problems.append(f"{MODULES}: expected the name of a folder in the folder, found {path[:80]!r}")
        elif kind == "Normalize" and (folder / path / "config.json").is_file() and path:
            _check_normalize(read_json(folder / path / "config.json"), path, problems)
    return [module for module in modules if not module.path or _is_name(module.path)]


def _check_normalize(settings: Mapping[str, Any], path: str, problems: list[str]) -> None:
    for option in ("module_input_name", "module_output_name"):
        if settings.get(option) not in (None, "sentence_embedding"):
            problems.append(f"{path}/config.json: {option} must be sentence_embedding, found {settings[option]!r}")


def _pooling_settings(folder: Path, modules: Sequence[Module], problems: list[str]) -> Mapping[str, Any]:
    place = next((module.path for module in modules if module.kind == "Pooling"), None)
    if place is None or not (folder / place / "config.json").is_file():
        if place is not None:
            problems.append(f"expected {place}/config.json, which says how tokens are pooled, found none")
        return {}
    settings = read_json(folder / place / "config.json")
    problems += [f"{place}/config.json: {each}" for each in unsupported(settings, POOLING_KEYS, "Pooling")]
    return settings


def _pooling(settings: Mapping[str, Any], modules: Sequence[Module], problems: list[str]) -> Pooling:
    """By the library's rules: the flags of older versions count where there is no ``pooling_mode``; the mean without
    any."""
    given = settings.get(MODE)
    modes = [name.removeprefix(f"{MODE}_") for name, on in settings.items() if name.startswith(f"{MODE}_") and on]
    if given is not None:
        modes = [str(each) for each in given] if isinstance(given, list) else [str(given)]
    modes = modes or ["mean"]
    if modes == [ROOT_MEAN] and [module.kind for module in modules][2:] == ["Normalize"]:
        return "mean"
    if len(modes) != 1 or modes[0] not in POOLINGS:
        problems.append(f"Pooling: expected {MODE} to be one of {sorted(POOLINGS)}, found {str(modes)[:80]}")
        return "mean"
    return POOLINGS[modes[0]]


def prompts_of(
    folder: Path, problems: list[str], kind: str = "SentenceTransformer"
) -> tuple[str | None, Mapping[str, str]]:
    """The name of the prompt that stands before every text, and all prompts that a caller of the library may name."""
    if not (folder / PROMPTS).is_file():
        return None, {}
    settings = read_json(folder / PROMPTS)
    prompts = expect(settings, "prompts", dict, {}, problems)
    if settings.get("truncate_dim") is not None:
        problems.append(f"{PROMPTS}: truncate_dim is not supported, found {str(settings['truncate_dim'])[:80]}")
    if settings.get("model_type") not in (None, kind):
        problems.append(f"{PROMPTS}: model_type must be {kind}, found {str(settings['model_type'])[:80]}")
    if not all(text is None or isinstance(text, str) for text in prompts.values()):
        problems.append(f"{PROMPTS}: prompts must be texts")
        return None, {}
    default = expect(settings, "default_prompt_name", str, None, problems)
    if default is not None and default not in prompts:
        problems.append(f"{PROMPTS}: default_prompt_name {default[:80]!r} is none of its prompts")
    return default, {str(name): text or "" for name, text in prompts.items()}


def note_on_prompts(default: str | None, prompts: Mapping[str, str], how: str) -> tuple[str, ...]:
    """A note on prompts that no text gets by itself."""
    others = [f"{name!r} ({text!r})" for name, text in prompts.items() if text and name != default]
    if not others:
        return ()
    return (f"it has {len(others)} prompts that callers choose, {', '.join(others[:3])[:300]}: {how}",)


def transformer_settings(folder: Path) -> Mapping[str, Any]:
    """The model's own settings: of the first file with an object that is not empty, as the library looks."""
    inner = model_folder(folder)
    for family in FAMILIES:
        path = inner / f"sentence_{family}_config.json"
        if path.is_file() and (settings := read_json(path)):
            return settings
    return {}


def check_settings(settings: Mapping[str, Any], expected: Mapping[str, object], problems: list[str]) -> None:
    """A problem for each setting of a Transformer module that has an effect and is not ``expected``."""
    problems += unsupported(settings, TRANSFORMER_KEYS | set(ARGUMENTS), "a Transformer module")
    for option, own in expected.items():
        if settings.get(option) not in (None, own):
            problems.append(f"{option}: expected {own}, found {str(settings[option])[:120]}")
    for option in ARGUMENTS:
        given = expect(settings, option, dict, {}, problems)
        problems += [f"{option}: {each}" for each in unsupported(given, HARMLESS, "a Transformer module")]


def most_tokens(folder: Path, settings: Mapping[str, Any], longest: int, problems: list[str]) -> int:
    """Where the library cuts texts, of at most the ``longest`` that the model takes."""
    return min(longest, _limit(folder, settings, problems) or longest)


def torch_class(reference: object) -> str | None:
    """The name of a class of ``torch.nn``, which the library writes with the package that it is defined in; None for
    any other reference."""
    written = str(reference)
    return written.rpartition(".")[2] if written.startswith("torch.nn.") else None


def _limit(folder: Path, settings: Mapping[str, Any], problems: list[str]) -> int | None:
    """``max_seq_length``, unless it is handed on as ``model_max_length``, or else the tokenizer's own limit."""
    handed_on = [settings.get(option) for option in ("tokenizer_args", "processor_kwargs")]
    limits = [(own, "model_max_length") for own in handed_on if isinstance(own, dict)] + [(settings, "max_seq_length")]
    for given, option in limits:
        if given.get(option) is not None:
            found: int | None = expect_count(given, option, None, problems)
            return found
    file = model_folder(folder) / "tokenizer_config.json"
    known = read_json(file) if file.is_file() else {}
    limit: Any = known.get("model_max_length", known.get("max_len"))  # the older name
    return int(limit) if is_number(limit) and 1 <= limit <= UNLIMITED else None
